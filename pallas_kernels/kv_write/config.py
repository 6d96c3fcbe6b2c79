"""How the work of a KV write is cut into programs."""

from typing import NamedTuple

PROGRAMS_WANTED = 512
"""Enough to fill the GPUs of today with small programs; only beyond it a program takes several heads."""

ELEMENTS_A_WARP = 2048
"""Channels of all rows that one warp handles, about eight 16-byte accesses of bfloat16 a lane."""


class Tiles(NamedTuple):
    """Attributes:
    heads: KV heads of a program, a power of two that divides K.
    num_warps: of a program.
    """

    heads: int
    num_warps: int


def tiles_for(num_tokens: int, num_kv_heads: int, rows_per_head: int, head_dim: int) -> Tiles:
    """Tiles of a step of T tokens.

    Several heads in a program give wider loads (one key of 128 bfloat16 channels is only 8 bytes a lane), but a decode
    of few tokens has too few heads to share out.

    Args:
        num_tokens: T.
        num_kv_heads: K.
        rows_per_head: query, key and value rows that come with a KV head.
        head_dim: H.
    """
    heads = 1
    while (
        num_kv_heads % (2 * heads) == 0
        and 2 * heads * rows_per_head * head_dim <= ELEMENTS_A_WARP
        and num_tokens * num_kv_heads >= 2 * heads * PROGRAMS_WANTED
    ):
        heads *= 2
    num_warps = 1
    while num_warps < 8 and num_warps * ELEMENTS_A_WARP < heads * rows_per_head * head_dim:
        num_warps *= 2
    return Tiles(heads, num_warps)
