"""From a parameter to all its parts together: padded, KV heads repeated, groups of scales that no part cuts.

The same functions take NumPy arrays, which a loader has, and JAX arrays or tracers, which a caller has; what needs no
change is returned as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.quant.array import CodedScale, QuantArray, scales_of
from jaxinfer.sharding.model_split import ModelSplit
from jaxinfer.sharding.rules import axes_of, split_axis


def arrange(path: str, leaf: Any, split: ModelSplit) -> Any:
    """A parameter as the parts have it, still in one piece: each part is a slice of it.

    Args:
        path: such as "layers_0/attn/qkv/kernel".
        leaf: array, or QuantArray.
        split: how the model is split.

    Raises:
        ValueError: a quantised parameter whose parts would not be whole; it is named.
    """
    if split.num_parts == 1:
        return leaf
    axes = axes_of(path, len(leaf.shape))
    target = _target(axes, leaf.shape, split)
    if not isinstance(leaf, QuantArray):
        return _fit(leaf, axes, target, split.copies)
    if isinstance(leaf.scale, CodedScale):
        leaf = replace(leaf, scale=_decoded(leaf.scale, leaf))
    place = split_axis(axes, split.splits_experts)
    if place is None or place < leaf.axis:
        return _cut_outputs(leaf, axes, target, split)
    return _cut_inputs(path, leaf, axes, target, split)


def needs_arranging(path: str, leaf: Any, split: ModelSplit) -> bool:
    """Whether `arrange` would change a parameter, without looking at its values."""
    if split.num_parts == 1:
        return False
    axes, shape = axes_of(path, len(leaf.shape)), tuple(leaf.shape)
    return isinstance(leaf, QuantArray) or _target(axes, shape, split) != shape


def _target(axes: Sequence[str], shape: Sequence[int], split: ModelSplit) -> tuple[int, ...]:
    """The shape of all parts together."""
    copies = split.copies
    sizes = {
        "vocab": lambda size: split.up(size),
        "experts": lambda size: split.up(size) if split.splits_experts else size,
        "expert_ffn": split.expert_width,
        "ffn": lambda size: split.up(size, split.ffn_unit),
        "kv_heads": lambda size: size * copies,
        "group": lambda size: size // copies,
        "qkv": lambda size: (size - 2) // copies + 2,
    }
    return tuple(sizes[name](size) if name in sizes else size for name, size in zip(axes, shape, strict=True))


def _fit(array: Any, axes: Sequence[str], target: Sequence[int], copies: int) -> Any:
    """An array with these axes, padded with zeros up to `target`."""
    if copies > 1 and "kv_heads" in axes:
        array = _repeat_heads(array, axes, copies)
    missing = [wanted - size for wanted, size in zip(target, array.shape, strict=True)]
    return _numpy_of(array).pad(array, [(0, count) for count in missing]) if any(missing) else array


def _repeat_heads(array: Any, axes: Sequence[str], copies: int) -> Any:
    """KV heads `copies` times, each with its part of the queries."""
    xp, place = _numpy_of(array), list(axes).index("kv_heads")
    before, heads, (rows, *after) = array.shape[:place], array.shape[place], array.shape[place + 1 :]
    if axes[place + 1] == "head_dim":  # of keys alone
        return xp.repeat(array, copies, axis=place)
    if axes[place + 1] == "group":  # of queries alone
        return array.reshape(*before, heads * copies, rows // copies, *after)
    groups = (rows - 2) // copies
    queries = array[:, :-2].reshape(heads, copies, groups, *after)
    own = xp.broadcast_to(array[:, None, -2:], (heads, copies, 2, *after))
    return xp.concatenate([queries, own], axis=2).reshape(heads * copies, groups + 2, *after)


def _cut_outputs(array: QuantArray, axes: Sequence[str], target: tuple[int, ...], split: ModelSplit) -> QuantArray:
    """A matrix whose outputs are dealt out, each with its codes and scales."""
    kept = array.axis

    def fit(values: Any) -> Any:
        if values is None:
            return None
        inputs = values.shape[kept:]
        return _fit(values, (*axes[:kept], *[""] * len(inputs)), (*target[:kept], *inputs), split.copies)

    fields = {"codes": fit(array.codes), "scale": fit(array.scale), "offset": fit(array.offset)}
    return replace(array, **fields, shape=target)


def _cut_inputs(
    path: str, array: QuantArray, axes: Sequence[str], target: tuple[int, ...], split: ModelSplit
) -> QuantArray:
    """A matrix whose inputs are dealt out."""
    row = math.prod(target[array.axis :])
    _check_whole(path, array, axes, row // split.num_parts, split.num_parts)
    codes_a_byte = array.shape[-1] // array.codes.shape[-1]
    codes = _fit(array.codes, axes, (*target[:-1], target[-1] // codes_a_byte), split.copies)
    if array.group == array.row:
        return replace(array, codes=codes, shape=target, group=row)
    group = math.gcd(array.group, row // split.num_parts if axes[-1] == "head_dim" else array.shape[-1])

    def fit(values: Any) -> Any:
        if values is None:
            return None
        if group < array.group:
            values = _numpy_of(values).repeat(values, array.group // group, axis=-1)
        return values if axes[-1] == "head_dim" else _fit_scales(values, array, target, group, split)

    return replace(array, codes=codes, scale=fit(array.scale), offset=fit(array.offset), shape=target, group=group)


def _fit_scales(values: Any, array: QuantArray, target: tuple[int, ...], group: int, split: ModelSplit) -> Any:
    """Scales of groups of feed-forward channels, those of a part one behind the other."""
    outputs, experts = array.shape[: array.axis], array.shape[array.axis : -1]
    values = values.reshape(*outputs, *experts, array.shape[-1] // group)
    wanted = (*outputs, *target[array.axis : -1], target[-1] // group)
    values = _fit(values, ("",) * len(wanted), wanted, 1)
    if experts and not split.splits_experts:  # a part has a piece of every expert
        values = values.reshape(*outputs, *experts, split.num_parts, -1)
        values = _numpy_of(values).moveaxis(values, -2, array.axis)
    return values.reshape(*outputs, -1)


def _check_whole(path: str, array: QuantArray, axes: Sequence[str], part: int, count: int) -> None:
    if array.order is not None:
        raise ValueError(
            f"tensor_parallel_size={count}: the inputs of {path!r} are stored in an order of their own (GPTQ's "
            "desc_act), which parts would cut across; use 1, or a checkpoint without it"
        )
    width = part if axes[-1] == "head_dim" else array.shape[-1]
    if array.rotation and width % array.rotation:
        raise ValueError(
            f"tensor_parallel_size={count}: the inputs of {path!r} are rotated in blocks of {array.rotation}, and "
            f"{width} that lie together are no multiple of it; quantise the weights for this many devices"
        )


def _decoded(scale: CodedScale, array: QuantArray) -> Any:
    """Scales that were codes, as floats: their blocks do not follow the parts."""
    if not isinstance(scale.codes, np.ndarray):
        return scales_of(array)
    values = np.take(np.asarray(scale.codebook), scale.codes.reshape(-1)).astype(np.float32)
    blocks = np.repeat(np.asarray(scale.scale), 256)[: values.size]
    return (values * blocks + np.float32(scale.offset)).reshape(scale.shape)


def _numpy_of(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else jnp
