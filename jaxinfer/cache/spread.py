"""Spreading of outliers over a head's channels, for caches of so few bits that one large channel spoils the others.

Keys have a few channels many times as large as the rest, and a scale that fits them leaves the rest almost no codes. An
orthogonal matrix on keys and queries alike changes no product of the two; one made of Hadamard's, whose entries are all
of one size, gives every channel its share of an outlier (QuaRot, arXiv:2404.00456). Values are spread too, and what
attention makes of them is gathered again.
"""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Attributes:
    matrix: float32[H, H], powers of two with signs, and zeros, so that every dtype has them exactly.
    gain: ``matrix @ matrix.T`` is so many times the identity: 1 or 1/2.
    """

    matrix: np.ndarray
    gain: float


def channel_spread(head_dim: int) -> Spread:
    """The spread of a head's channels: all of them where H is a power of two, else the largest such stretches.

    Args:
        head_dim: H, even.
    """
    size = head_dim & -head_dim
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    # Of the size of size ** -0.5, rounded down to a power of two.
    entry = 2.0 ** -(size.bit_length() // 2)
    matrix = np.kron(np.eye(head_dim // size, dtype=np.float32), hadamard * np.float32(entry))
    return Spread(matrix, size * entry * entry)
