"""From the quantised modules of a checkpoint to our parameters, which are several of them in one, code by code."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import jax
import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.load import placements_by_leaf, split_pairs
from jaxinfer.checkpoint.packed_module import PackedModule
from jaxinfer.checkpoint.weight_map import Placement, Slot
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import input_axis
from jaxinfer.quant.quantize import host_scales, quantized_shape
from jaxinfer.quant.storage import Storage


def packed_storages(checkpoint: Checkpoint) -> dict[str, Storage]:
    """Path -> format of the parameters whose codes are taken over from the checkpoint's quantised modules.

    Those are the parameters that are made of modules of one format. Others that have a quantised part are read in
    floats, 2 or 4 bytes a value: where only some of the parts are quantised; and, with a warning, where GPTQ's
    act-order differs between parts that share their inputs, which one product could not serve. (It does not for what is
    quantised on the same activations, as query, key and value are; the experts of a layer have orders of their own.)
    """
    specs = leaf_shapes(checkpoint.model_config, "float32")
    kept, mixed = {}, []
    for name, placements in placements_by_leaf(checkpoint).items():
        axis = input_axis(name, specs[name].shape)
        modules = [placement.tensor for placement in placements if isinstance(placement.tensor, PackedModule)]
        if len(modules) < len(placements) or axis is None:
            continue
        storages = {module.storage for module in modules}
        storage = storages.pop()
        row = modules[0].shape[1]
        if storages or not _fits(storage, specs[name].shape, row):
            mixed.append(name)
            continue
        if not storage.group and row < math.prod(specs[name].shape[axis:]):
            storage = replace(storage, group=row)  # each expert has a scale of its own for an output that they share
        if storage.ordered and not _agree_on_order(placements, specs[name].shape, axis):
            mixed.append(name)
            continue
        whole = storage.group == math.prod(specs[name].shape[axis:])
        storage = replace(storage, group=0) if whole else storage
        kept[name] = replace(storage, double=False, scales="float32") if storage.double else storage
    if mixed:
        warnings.warn(
            f"{checkpoint.path}: {len(mixed)} parameters, {mixed[0]!r} among them, are made of quantised parts that do "
            "not go together (formats or act-orders differ); they are kept in floats, in 4 to 8 times the memory",
            stacklevel=3,
        )
    return kept


def read_packed(
    name: str, spec: jax.ShapeDtypeStruct, placements: Sequence[Placement], storage: Storage, dtype: str
) -> QuantArray:
    """A parameter of `packed_storages`, as NumPy arrays.

    Args:
        name: its path.
        spec: its shape in floats.
        placements: the modules it is made of.
        storage: its format.
        dtype: name of the dtype that it has in floats.

    Raises:
        ValueError: the file changed since it was opened, or a tensor holds what is impossible.
    """
    axis = input_axis(name, spec.shape)
    assert axis is not None
    array = quantized_shape(spec.shape, axis, storage, dtype)
    codes = np.empty(array.codes.shape, array.codes.dtype)
    lead = _lead_axes(spec.shape, placements[0].slot.shape[-1])
    groups = placements[0].slot.shape[-1] // array.group
    blocks = (*spec.shape[:lead], *[1] * (len(spec.shape) - lead - 1), groups)
    scale = np.empty(blocks, storage.scale_dtype)
    offset = None if storage.offset_dtype is None else np.empty(blocks, storage.offset_dtype)
    codebook, order = None, np.empty(array.row, np.int32) if storage.ordered else None
    for _, same in groupby(placements, lambda placement: id(placement.tensor)):
        slots = list(same)
        module = slots[0].tensor
        assert isinstance(module, PackedModule)
        found = module.read()
        codebook = found.codebook
        for slot in (placement.slot for placement in slots):
            if order is not None:
                first = _first_input(slot, spec.shape, axis)
                order[first : first + found.row] = first + np.asarray(found.order)
            _fill(codes, slot, np.asarray(found.codes))
            _fill(scale, slot, host_scales(found) if storage.scale_dtype == "float32" else np.asarray(found.scale))
            if offset is not None:
                _fill(offset, slot, np.asarray(found.offset))
    return replace(
        array,
        codes=codes,
        scale=scale.reshape(*spec.shape[:axis], -1),
        offset=None if offset is None else offset.reshape(*spec.shape[:axis], -1),
        codebook=codebook,
        order=order,
    )


def _fits(storage: Storage, shape: tuple[int, ...], row: int) -> bool:
    """Whether codes of a module of `row` inputs keep their bytes in a parameter of this shape."""
    return row % storage.group_of(row) == 0 and (storage.bits == 8 or shape[-1] % 2 == 0)


def _lead_axes(shape: tuple[int, ...], row: int) -> int:
    """How many axes stand before those of a module's inputs."""
    return next(axes for axes in range(len(shape)) if math.prod(shape[axes:]) == row)


def _fill(target: np.ndarray, slot: Slot, found: np.ndarray) -> None:
    """Puts what a module has for each of its outputs, ``[N, n]``, into its part of the parameter's."""
    rows = found[slot.first_row : slot.first_row + slot.shape[0]]
    if slot.pairs is not None:
        rows = split_pairs(rows, slot.pairs[0], rows.shape[1])
    view = replace(slot, shape=rows.shape).view(target)
    view[...] = rows.reshape(view.shape)


def _agree_on_order(placements: Sequence[Placement], shape: tuple[int, ...], axis: int) -> bool:
    """Whether modules that have the same inputs of a parameter store them in the same order."""
    seen: dict[int, bytes] = {}
    for placement in placements:
        module = placement.tensor
        groups = module.ordering() if isinstance(module, PackedModule) else None
        assert groups is not None
        if seen.setdefault(_first_input(placement.slot, shape, axis), groups.tobytes()) != groups.tobytes():
            return False
    return True


def _first_input(slot: Slot, shape: tuple[int, ...], axis: int) -> int:
    """Which of a parameter's inputs is the first of the module that goes there: not 0 for most experts' outputs."""
    inputs = np.broadcast_to(np.arange(math.prod(shape[axis:])).reshape(shape[axis:]), shape)
    return int(slot.view(inputs).flat[0])
