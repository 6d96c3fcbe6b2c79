"""Tile sizes of the kernel."""

from typing import NamedTuple

MAX_TOKENS = 64
"""Beyond it the products are no longer bound by the weights' bytes, and a library's larger tiles win."""

BLOCK_OUT = 32
BLOCK_IN = 64


class Tiles(NamedTuple):
    """Attributes:
    tokens: rows of a program, all that there are.
    out: gate channels of a program, and as many of the other projection.
    into: channels of x in one product.
    num_warps, num_stages: of a program, and of its pipeline of loads.
    """

    tokens: int
    out: int
    into: int
    num_warps: int
    num_stages: int


def tiles_for(num_tokens: int) -> Tiles:
    """Tiles for T tokens. Three tiles of weights in flight are 24 KiB a program, and two to six programs share an SM:
    by Little's law 11 KiB an SM (A100) to 26 KiB (H200) keep the memory busy.
    """
    tokens = 16
    while tokens < num_tokens:
        tokens *= 2
    return Tiles(tokens, BLOCK_OUT, BLOCK_IN, 4, 4)
