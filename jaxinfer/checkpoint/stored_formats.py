"""What a quantised checkpoint's matrices will take: from its files' headers, or from its config alone."""

import math
from dataclasses import replace
from typing import NamedTuple

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.packed_codes import packed_storages
from jaxinfer.checkpoint.weight_map import expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families.family import Family
from jaxinfer.quant.layouts.layout import Layout
from jaxinfer.quant.plan import input_axis
from jaxinfer.quant.storage import Storage

_SCALE_DTYPES = {"scales": "float16", "weight_scale": "bfloat16"}
"""Of scales whose dtype is the file's own: what tools for AWQ and GPTQ write, and the dtype of most models."""


class StoredMatrix(NamedTuple):
    """One linear layer, or a parameter that is made of several.

    Attributes:
        method: that of the engine with such codes, "awq" and "gptq" included; None for floats.
        values: outputs times inputs.
        nbytes: with scales and zero points; floats in 16 bits.
    """

    method: str | None
    values: int
    nbytes: int


def held_matrices(checkpoint: Checkpoint) -> list[StoredMatrix]:
    """Each parameter that holds matrices of the layers, routers left out, as the engine holds it on a device that takes
    the checkpoint's codes over.

    Args:
        checkpoint: a quantised one.
    """
    assert checkpoint.layout is not None
    kept, found = packed_storages(checkpoint), []
    for path, spec in leaf_shapes(checkpoint.model_config, "bfloat16").items():
        axis = input_axis(path, spec.shape)
        if axis is None or not path.startswith("layers_"):
            continue
        storage, channels, row = kept.get(path), math.prod(spec.shape[:axis]), math.prod(spec.shape[axis:])
        if storage is None:
            found.append(StoredMatrix(None, spec.size, 2 * spec.size))
        else:
            method = _method(storage, checkpoint.layout.method)
            found.append(StoredMatrix(method, spec.size, storage.nbytes(channels, row)))
    return found


def stored_matrices(layout: Layout, family: Family, config: ModelConfig) -> list[StoredMatrix]:
    """Each linear layer of the model's layers, routers left out, of a checkpoint whose files are not here.

    Scales whose dtype only the files know are taken for 16 bits. Not seen is what only the files say: an order of
    inputs in compressed-tensors, and which matrices end up in floats because their parts differ
    (`jaxinfer.checkpoint.packed_codes`).

    Raises:
        ValueError: the layout cannot hold a layer of the model.
    """
    found: dict[str, StoredMatrix] = {}
    for name, weight, slot in expected_weights(family, config, "hf"):
        shape = weight.tensor_shape(config)
        if len(shape) == 2 and slot.leaf.startswith("layers_") and input_axis(slot.leaf, shape) is not None:
            found[name] = _stored(layout, name.removesuffix(".weight"), *shape)
    return list(found.values())


def _stored(layout: Layout, module: str, channels: int, row: int) -> StoredMatrix:
    values = channels * row
    if not layout.covers(module):
        return StoredMatrix(None, values, 2 * values)
    storage = layout.of(module, {}).storage(row, _SCALE_DTYPES)
    if storage.double:
        storage = replace(storage, double=False, scales="float32")  # as they are kept
    return StoredMatrix(_method(storage, layout.method), values, storage.nbytes(channels, row))


def _method(storage: Storage, of_layout: str) -> str:
    if storage.kind == "int4" and of_layout in ("awq", "gptq"):
        return of_layout
    return "int8_w8a8" if storage.kind == "int8" and storage.act_bits == 8 else storage.kind
