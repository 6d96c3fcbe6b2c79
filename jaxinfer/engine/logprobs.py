"""Log-probabilities of one position, from the arrays of a step to what the user reads."""

from collections.abc import Callable

from jaxinfer.engine.outputs import Logprob, TokenLogprobs
from jaxinfer.engine.plan import RowLogprobs


def token_logprobs(
    row: RowLogprobs, index: int, token_id: int, count: int, token_text: Callable[[int], str] | None
) -> TokenLogprobs:
    """The candidates of one position: `token_id` first, then the best others in order.

    Args:
        row: arrays of the step; a batch may bring more alternatives than this request asked for.
        index: which logits row of `row`.
        token_id: the token that is at the position.
        count: alternatives asked for, -1 for all in `row`. The result has `count` or `count + 1` entries.
        token_text: text of one token, or None for no text.
    """
    last = None if count == -1 else count
    found = {token_id: Logprob(float(row.target_logprobs[index]), int(row.target_ranks[index]))}
    candidates = zip(row.token_ids[index, :last].tolist(), row.logprobs[index, :last].tolist(), strict=True)
    for rank, (candidate, logprob) in enumerate(candidates, start=1):
        if candidate != token_id:
            found[candidate] = Logprob(logprob, rank)
    if token_text is not None:
        for candidate, entry in found.items():
            entry.decoded_token = token_text(candidate)
    return found
