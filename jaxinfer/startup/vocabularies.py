"""Whether two models mean the same by their token ids."""

from jaxinfer.tokenizers.pieces import HasPieces
from jaxinfer.tokenizers.tokenizer import Tokenizer


def check_vocabularies(target: Tokenizer | None, draft: Tokenizer | None, sizes: tuple[int, int]) -> None:
    """Refuses a draft model whose ids mean something else than the target's.

    Ids that only one of the models has are padding, or are never proposed and never met.

    Args:
        target, draft: the models' own tokenizers; None where there is none.
        sizes: rows of the target's embedding and of the draft's.

    Raises:
        ValueError: a token differs, which is named; or there are no tokenizers to tell, and the sizes differ.
    """
    if target is None or draft is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft model has {sizes[1]} token ids and the target {sizes[0]}, and without the tokenizers of "
                "both nobody can tell whether they mean the same; use a draft model with the target's vocabulary"
            )
        return
    for token_id in range(min(target.vocab_size, draft.vocab_size, *sizes)):
        own, other = _piece(target, token_id), _piece(draft, token_id)
        if own != other:
            raise ValueError(
                f"the draft model does not belong to the target: token {token_id} is {other!r} there and {own!r} here "
                f"({draft.vocab_size} and {target.vocab_size} tokens); use a draft model with the target's vocabulary"
            )


def _piece(tokenizer: Tokenizer, token_id: int) -> str | bytes | int | None:
    """What a token stands for; bytes that are no text by themselves are told apart where that is possible."""
    pieces = tokenizer.pieces if isinstance(tokenizer, HasPieces) else None
    return tokenizer.token_text(token_id) if pieces is None else pieces[token_id]
