"""The chunk draft: the prefill chunks of a step while they are being chosen."""

from collections.abc import Sequence

from jaxinfer.engine.request import Request
from jaxinfer.engine.token_budget import TokenBudget, share_tokens, trimmed_total


def num_to_score(request: Request) -> int:
    """Positions not computed yet whose next prompt token wants a log-probability."""
    if request.params.prompt_logprobs is None:
        return 0
    if num_before_scores(request):
        return 0
    return max(0, request.num_prompt_tokens - 1 - request.num_computed_tokens)


def num_before_scores(request: Request) -> int:
    """Positions not computed yet before the first that is scored, of a request that scores from some token on."""
    if request.scoring is None or request.params.prompt_logprobs is None:
        return 0
    return max(0, request.scoring.start - 1 - request.num_computed_tokens)


class ChunkDraft:
    """Collects requests that lack tokens, the best first, and shares the step's tokens and logits rows over them.

    Every request that runs has a logits row for its draw; what is spare goes to prompt positions that are scored.

    Args:
        num_tokens: tokens of the step that decodes leave, at least 1 when anybody is offered.
        spare_rows: logits rows beyond one for each running request.
        min_chunk: see `TokenBudget`.
    """

    def __init__(self, num_tokens: int, spare_rows: int, min_chunk: int) -> None:
        self.spare_rows = spare_rows
        self._num_tokens = num_tokens
        self._min_chunk = min_chunk
        self._budget = TokenBudget(num_tokens, min_chunk)
        self._requests: list[Request] = []
        self._wants: list[int] = []

    @property
    def tokens_left(self) -> int:
        return self._budget.left

    def offer(self, request: Request, is_last: bool) -> bool:
        """Adds a request; False when nothing is left for it.

        Args:
            is_last: nobody is offered tokens after it. Saying False wrongly costs a scoring request some rows.
        """
        want = request.num_tokens - request.num_computed_tokens
        if unscored := num_before_scores(request):
            want = unscored  # what a row scores comes first in it
        if to_score := num_to_score(request):
            # Half, when others wait: a scoring request would otherwise keep them out until its prompt is done.
            num_rows = 1 + (self.spare_rows if is_last else self.spare_rows // 2)
            if to_score >= num_rows:
                want = min(want, num_rows)
            self.spare_rows -= min(want, to_score + 1) - 1
        self._requests.append(request)
        self._wants.append(want)
        return self._budget.offer(want, is_last) > 0

    def chunks(self, num_decodes: int, token_buckets: Sequence[int]) -> list[tuple[Request, int]]:
        """Each request, in the order of the offers, with the number of tokens it may compute, 0 included."""
        shares = self._budget.finish()
        total = num_decodes + sum(shares)
        trimmed = trimmed_total(total, num_decodes, token_buckets)
        if trimmed < total:
            shares = share_tokens(self._wants, trimmed - num_decodes, self._min_chunk)
        return list(zip(self._requests, shares, strict=True))
