"""The list of step sizes that are ever compiled."""

SMALLEST_BATCH = 8
"""Smallest bucket above one token: below it a step costs what its weights cost to read, whatever its size."""


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, num_verified: int = 0) -> tuple[int, ...]:
    """Step sizes in tokens, ascending, the last being `max_num_batched_tokens`.

    One token alone; then doubling from 8 to `max_num_seqs`, where decode steps fall and padding costs throughput; then
    factors of four, since the scheduler cuts prefill chunks to fit.

    Args:
        max_num_seqs, max_num_batched_tokens: limits of a step.
        num_verified: tokens of the largest step that verifies drafts; up to there sizes double, too.
    """
    buckets = {1, max_num_batched_tokens}
    size = SMALLEST_BATCH
    while size < max_num_batched_tokens:
        buckets.add(size)
        size *= 2 if size < max(max_num_seqs, num_verified) else 4
    return tuple(sorted(buckets))


def tiled_buckets(max_num_seqs: int, max_num_batched_tokens: int, tile: int) -> tuple[int, ...]:
    """Step sizes of the deterministic mode, in whole tiles: one for decodes, one for the largest step. A step costs the
    tiles it fills, so that sizes in between would save nothing but scratch memory."""
    return tuple(sorted({-(-size // tile) * tile for size in (max_num_seqs, max_num_batched_tokens)}))


def bucket_for(num_tokens: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `num_tokens`.

    Raises:
        ValueError: none does.
    """
    for bucket in buckets:
        if bucket >= num_tokens:
            return bucket
    raise ValueError(f"num_tokens={num_tokens} exceeds the largest bucket {buckets[-1]}")
