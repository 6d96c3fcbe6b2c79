"""Codes of 4 or 8 bits in int32 words, the first in the lowest bits, as AWQ, GPTQ and compressed-tensors store them."""

import numpy as np

from jaxinfer.quant.quantize import pack_nibbles, unpack_nibbles

TILE = 128
ROWS_AT_A_TIME = 256


def codes_of(words: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes ``[..., n * 32 / bits]`` of int32 words ``[..., n]``."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return packed if bits == 8 else unpack_nibbles(packed)


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of uint8 codes: the inverse of `codes_of`.

    Raises:
        ValueError: the last axis is no multiple of the codes in a word.
    """
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill words of 32 bits")
    packed = np.ascontiguousarray(codes, np.uint8)
    return (
        (packed if bits == 8 else np.ascontiguousarray(pack_nibbles(packed))).view("<i4").astype(np.int32, copy=False)
    )


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A contiguous copy of a matrix with its axes swapped: tile by tile, so that both sides stay in the cache, and
    bytes eight at a time."""
    rows, columns = matrix.shape
    if matrix.dtype.itemsize == 1 and rows % 8 == 0:
        words = np.empty((rows // 8, columns, 8), np.uint8)
        for place in range(8):
            words[:, :, place] = matrix[place::8].view(np.uint8)
        return transposed(words.view(np.uint64)[:, :, 0]).view(matrix.dtype)
    out = np.empty((columns, rows), matrix.dtype)
    for left in range(0, columns, TILE):
        for top in range(0, rows, TILE):
            out[left : left + TILE, top : top + TILE] = matrix[top : top + TILE, left : left + TILE].T
    return out


def inputs_in_order(packed: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """Codes ``[N, K]``, packed along K, with input ``order[j]`` in place j. Whole rows are moved, for which the matrix
    is turned and turned back: several times as fast as taking single codes."""
    return transposed(rows_in_order(transposed(packed), order, bits))


def rows_in_order(stored: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """`inputs_in_order` of ``[K * bits / 8, N]``: an input a row, or two, the even one in the low nibbles."""
    if bits == 8:
        return stored[order]
    out = np.empty_like(stored)
    for start in range(0, len(out), ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        even, odd = (
            stored[inputs // 2] >> (inputs % 2 * 4).astype(np.uint8)[:, None]
            for inputs in (order[0::2][part], order[1::2][part])
        )
        out[part] = (even & 15) | (odd << 4)
    return out
