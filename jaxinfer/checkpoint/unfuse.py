"""From a fused parameter that is quantised to the matrices of the linear layers that a checkpoint names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinfer.checkpoint.weight_map import Slot
from jaxinfer.quant.array import CodedScale, QuantArray
from jaxinfer.quant.quantize import host_scales


def module_array(array: QuantArray, slots: Sequence[Slot]) -> QuantArray:
    """The matrix ``[N, K]`` of one linear layer, cut out of a fused parameter.

    Where the inputs of the parameter are those of several layers (experts), a scale of a whole channel becomes that of
    each of them.

    Args:
        array: of NumPy arrays.
        slots: the parts of the parameter that the layer's weight is made of, in the order of its rows, as
            `jaxinfer.checkpoint.save.plan_tensors` has them; of weights ``[out, in]``.

    Returns:
        A QuantArray of axis 1; scales that are codes have been decoded.

    Raises:
        ValueError: a group, or the order of the inputs, reaches over the inputs of several layers.
    """
    row = slots[0].shape[1]
    group = min(array.group, row) if _is_split(slots[0]) and array.group == array.row else array.group
    if row % group:
        raise ValueError(f"has groups of {array.group} inputs, which reach over the {row} inputs of a single layer")
    scale = host_scales(array) if isinstance(array.scale, CodedScale) else np.asarray(array.scale)
    offset = None if array.offset is None else np.asarray(array.offset)
    return replace(
        array,
        codes=_rows(np.asarray(array.codes), slots, row * array.bits // 8),
        scale=_rows(_by_layer(scale, array, slots[0]), slots, row // group),
        offset=None if offset is None else _rows(_by_layer(offset, array, slots[0]), slots, row // group),
        order=None if array.order is None else _order(np.asarray(array.order), slots[0], row),
        group=group,
        axis=1,
        shape=(sum(slot.shape[0] for slot in slots), row),
    )


def _is_split(slot: Slot) -> bool:
    """Whether the parameter's inputs are those of several layers: experts' outputs are summed in one product."""
    return bool(slot.axes)


def _by_layer(values: np.ndarray, array: QuantArray, slot: Slot) -> np.ndarray:
    """Scales ``[*shape[:axis], K / group]`` with the axes of the parameter where a layer takes some of its inputs."""
    if not _is_split(slot):
        return values
    if array.group == array.row:
        ones = [1] * (len(array.shape) - array.axis)
        return np.broadcast_to(values.reshape(*array.shape[: array.axis], *ones), (*array.shape[:-1], 1))
    return values.reshape(*array.shape[:-1], array.shape[-1] // array.group)


def _rows(values: np.ndarray, slots: Sequence[Slot], width: int) -> np.ndarray:
    """The layer's rows of something that has `width` values for each of its channels."""
    parts = []
    for slot in slots:
        pairs = None if slot.pairs is None else (slot.pairs[0], width)
        parts.append(replace(slot, shape=(slot.shape[0], width), pairs=pairs).tensor_rows(values))
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))


def _order(order: np.ndarray, slot: Slot, row: int) -> np.ndarray:
    if not _is_split(slot):
        return order
    assert slot.item is not None
    own: np.ndarray = order.reshape(-1, row)[slot.item] - slot.item * row
    if own.min() < 0 or own.max() >= row:
        raise ValueError(f"has an order of its inputs that mixes those of several layers of {row} inputs")
    return own
