"""GGUF's blocks of 32 values in 4 or 8 bits as QuantArrays, code by code.

Q4_0: a float16 scale and 16 bytes; byte j holds the codes of values j and j + 16, less 8. Q4_1: a float16 minimum after
the scale, and codes from 0. Q8_0: a float16 scale and 32 int8.
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.load import placements_by_leaf, split_pairs
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import Placement
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import input_axis
from jaxinfer.quant.quantize import pack_nibbles, quantized_shape, unpack_nibbles
from jaxinfer.quant.storage import Storage

BLOCK = 32
STORAGES: Mapping[str, Storage] = {
    "q4_0": Storage("int4", BLOCK, scales="float16", offsets="float16"),
    "q4_1": Storage("int4", BLOCK, symmetric=False, scales="float16", offsets="float16"),
    "q8_0": Storage("int8", BLOCK, scales="float16"),
}
"""Types of tensors whose codes can be taken over."""


def kept_storages(checkpoint: Checkpoint) -> dict[str, Storage]:
    """Path -> format of the parameters whose codes can be taken over from the file: matrices that are made of tensors
    of one such type, with blocks that do not reach over the parameter's last axis."""
    specs = leaf_shapes(checkpoint.model_config, "float32")
    kept = {}
    for name, placements in placements_by_leaf(checkpoint).items():
        types = {placement.tensor.dtype for placement in placements}
        plain = all(placement.slot.item is None for placement in placements)
        axis = input_axis(name, specs[name].shape)
        if axis is not None and len(types) == 1 and plain and specs[name].shape[-1] % BLOCK == 0:
            storage = STORAGES.get(types.pop())
            if storage is not None:
                kept[name] = storage
    return kept


def read_codes(name: str, shape: tuple[int, ...], placements: Sequence[Placement], dtype: str) -> QuantArray:
    """A parameter of `kept_storages`, as NumPy arrays.

    Args:
        name: its path.
        shape: its shape in floats.
        placements: the tensors it is made of.
        dtype: name of the dtype that it has in floats.

    Raises:
        ValueError: the file changed since it was opened.
    """
    storage = STORAGES[placements[0].tensor.dtype]
    axis = input_axis(name, shape)
    assert axis is not None
    array = quantized_shape(shape, axis, storage, dtype)
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    codes = np.empty(array.codes.shape, array.codes.dtype)
    scale = np.empty(blocks, storage.scale_dtype)
    offset = None if storage.offset_dtype is None else np.empty(blocks, storage.offset_dtype)
    for placement in placements:
        first, rows = placement.slot.first_row, placement.slot.shape[0]
        assert isinstance(placement.tensor, Tensor)
        stored = placement.tensor.stored_rows(first, first + rows)
        for target, part in zip((codes, scale, offset), _parts(stored, placement.tensor.dtype), strict=True):
            if target is not None and part is not None:
                _fill(target, placement, part.reshape(rows, -1))
    scales = array.scale.shape
    return QuantArray(
        codes=codes,
        scale=scale.reshape(scales),
        offset=None if offset is None else offset.reshape(scales),
        codebook=None,
        bits=storage.bits,
        group=BLOCK,
        axis=axis,
        shape=shape,
        dtype=dtype,
    )


def _parts(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes as they are stored here, scales, and offsets of rows of blocks; a block is an entry of the first axis."""
    head = 4 if kind == "q4_1" else 2
    blocks = rows.reshape(-1, head + (32 if kind == "q8_0" else 16))
    numbers = np.ascontiguousarray(blocks[:, :head]).view("<f2")
    body = np.ascontiguousarray(blocks[:, head:])
    if kind == "q8_0":
        return body.view(np.int8), numbers[:, 0], None
    halves = unpack_nibbles(body)  # values j and j + 16 side by side
    codes = np.concatenate([halves[:, 0::2], halves[:, 1::2]], axis=1)
    return pack_nibbles(codes), numbers[:, 0], numbers[:, 1] if kind == "q4_1" else -8 * numbers[:, 0]


def _fill(target: np.ndarray, placement: Placement, rows: np.ndarray) -> None:
    slot = placement.slot
    if slot.pairs is not None:
        rows = split_pairs(rows, slot.pairs[0], rows.shape[1])
    view = slot.view(target)
    view[...] = rows.reshape(view.shape)
