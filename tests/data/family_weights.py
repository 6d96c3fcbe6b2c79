"""The weights of the tiny family checkpoints, made from their names: nothing of them need be committed."""

import zlib

import numpy as np


def random_weight(name: str, shape: tuple[int, ...], *, unit_offset: bool = False) -> np.ndarray:
    """float32 values that depend on nothing but the tensor's name and shape.

    Wide enough that every position and everything seen so far changes the logits. Norms lie around 1, or around 0 where
    the model adds the 1 itself.
    """
    random = np.random.RandomState(zlib.crc32(name.encode()))  # numpy promises that its values never change
    values = (0.2 * random.standard_normal(shape)).astype(np.float32)
    is_norm = (len(shape) == 1 and name.endswith("weight")) or ("norm" in name and name.endswith("weight"))
    return values + np.float32(1) if is_norm and not unit_offset else values
