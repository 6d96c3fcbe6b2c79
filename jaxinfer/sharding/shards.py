"""Shards: a model's parameters in parts on the devices of a placement."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, Sharding

from jaxinfer.models.config import ModelConfig
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import path_name
from jaxinfer.sharding.arrange import arrange, needs_arranging
from jaxinfer.sharding.model_split import ModelSplit
from jaxinfer.sharding.placement import WHOLE, Placement
from jaxinfer.sharding.rules import axes_of, split_axis


@dataclass(frozen=True)
class Shards:
    """How a model lies on devices.

    Attributes:
        split: into how many parts, of what sizes.
        placement: where they go; as many devices along its axis as there are parts.
    """

    split: ModelSplit
    placement: Placement

    @property
    def sum_over(self) -> str | None:
        """The mesh axis that programs add up over; None where nothing is split."""
        return self.placement.axis if self.split.num_parts > 1 else None

    @property
    def pool_spec(self) -> PartitionSpec:
        """How the arrays of a KV pool are cut, pages and scales alike: by KV heads."""
        return self._along(1) if self.split.num_parts > 1 else WHOLE

    def of(self, model: ModelConfig) -> "Shards":
        """The same of a model that has the same sizes."""
        return replace(self, split=replace(self.split, model=model))

    def put(self, path: str, leaf: Any) -> Any:
        """One parameter, arranged and on its devices. What is there already stays the same array.

        Args:
            path: such as "layers_0/attn/qkv/kernel".
            leaf: array or QuantArray, of NumPy (of which each device gets its part) or of JAX.

        Raises:
            ValueError: see `arrange`.
        """
        if self.split.num_parts == 1:
            return self.placement.put(leaf)
        on_device = any(isinstance(array, jax.Array) for array in jax.tree.leaves(leaf))
        if on_device and needs_arranging(path, leaf, self.split):
            moved = self.placement.put(leaf)  # a caller's own devices may be others
            specs = self.specs(path, jax.eval_shape(partial(arrange, path, split=self.split), leaf))
            targets = tuple(map(self.placement.sharding, jax.tree.leaves(specs, is_leaf=_is_spec)))
            # Layers share a program, and so does every later tree of the same shapes.
            first, _, rest = path.partition("/")
            arranged = _arranged(moved, rest if first.startswith("layers_") else path, self.split, targets)
            return jax.tree.map(self.placement.put, arranged, specs)
        arranged = arrange(path, leaf, self.split)
        return jax.tree.map(self.placement.put, arranged, self.specs(path, arranged))

    def put_tree(self, params: Any) -> Any:
        """All parameters, as `put` does each."""
        return self._mapped(self.put, params)

    def arranged(self, shapes: Any) -> Any:
        """Shapes of the arranged parameters, from those of the parameters; allocates nothing."""
        function = partial(self._mapped, lambda path, leaf: arrange(path, leaf, self.split))
        return shapes if self.split.num_parts == 1 else jax.eval_shape(function, shapes)

    def specs(self, path: str, leaf: Any) -> Any:
        """How an arranged parameter is cut: a PartitionSpec, or a QuantArray of them."""
        axes = axes_of(path, len(leaf.shape))
        place = None if self.split.num_parts == 1 else split_axis(axes, self.split.splits_experts)
        if not isinstance(leaf, QuantArray):
            return WHOLE if place is None else self._along(place)
        if place is None:
            return jax.tree.map(lambda _: WHOLE, leaf)
        codes = self._along(place)
        scales = codes if place < leaf.axis else WHOLE if leaf.group == leaf.row else self._along(leaf.axis)
        return replace(
            leaf,
            codes=codes,
            scale=scales,
            offset=None if leaf.offset is None else scales,
            codebook=None if leaf.codebook is None else WHOLE,
            order=None if leaf.order is None else WHOLE,
        )

    def tree_specs(self, params: Any) -> Any:
        """`specs` of a tree of arranged parameters."""
        return self._mapped(self.specs, params)

    def part_shapes(self, params: Any) -> Any:
        """A tree of arranged parameters as one device has it: `jax.ShapeDtypeStruct` leaves and QuantArrays of them."""
        return self._mapped(self.part, params)

    def part(self, path: str, leaf: Any) -> Any:
        """Shape of what one device has of an arranged parameter."""
        count, specs = self.split.num_parts, self.specs(path, leaf)
        parts = jax.tree.map(lambda array, spec: _part_shape(array, spec, count), leaf, specs)
        if not isinstance(leaf, QuantArray):
            return parts
        place = split_axis(axes_of(path, len(leaf.shape)), self.split.splits_experts) if count > 1 else None
        shape = tuple(size // count if index == place else size for index, size in enumerate(leaf.shape))
        group = math.prod(shape[leaf.axis :]) if leaf.group == leaf.row else leaf.group
        return replace(parts, shape=shape, group=group)

    def _along(self, axis: int) -> PartitionSpec:
        return PartitionSpec(*[None] * axis, self.placement.axis)

    def _mapped(self, function: Callable[[str, Any], Any], tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(path_name(path), leaf), tree, is_leaf=_is_quantised
        )


def shards_of(model: ModelConfig, placement: Placement, shapes: Any = None, *, splits_experts: bool = False) -> Shards:
    """How a model lies on the devices of a placement; arguments as for `split_of`.

    Raises:
        ValueError: it cannot be split so.
    """
    return Shards(split_of(model, placement.num_parts, shapes, splits_experts=splits_experts), placement)


def split_of(model: ModelConfig, num_parts: int, shapes: Any = None, *, splits_experts: bool = False) -> ModelSplit:
    """How a model is cut.

    Args:
        model: the whole.
        num_parts: devices.
        shapes: of its parameters, where some are quantised: groups that share a scale are not cut.
        splits_experts: see `ModelSplit`.

    Raises:
        ValueError: it cannot be split so.
    """
    units = {"ffn": 1, "expert_ffn": 1}
    if num_parts > 1 and shapes is not None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=_is_quantised):
            axes = axes_of(path_name(path), len(leaf.shape))
            if isinstance(leaf, QuantArray) and axes[-1] in units:
                units[axes[-1]] = math.lcm(units[axes[-1]], _unit(leaf))
    return ModelSplit(model, num_parts, splits_experts, units["ffn"], units["expert_ffn"])


def _unit(leaf: QuantArray) -> int:
    """Neighbouring inputs that have to stay together."""
    group = 1 if leaf.group == leaf.row else math.gcd(leaf.group, leaf.shape[-1])
    return math.lcm(group, leaf.rotation or 1, 8 // leaf.bits)


@partial(jax.jit, static_argnames=("path", "split", "targets"))
def _arranged(leaf: Any, path: str, split: ModelSplit, targets: tuple[Sharding, ...]) -> Any:
    """`arrange` on the devices, each of which keeps its part; `targets` are of the result's arrays in their order."""
    arrays, tree = jax.tree.flatten(arrange(path, leaf, split))
    return jax.tree.unflatten(tree, list(map(lax.with_sharding_constraint, arrays, targets)))


def _part_shape(array: Any, spec: PartitionSpec, count: int) -> jax.ShapeDtypeStruct:
    shape = (size // (1 if axis is None else count) for size, axis in zip(array.shape, _full(spec, array), strict=True))
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _full(spec: PartitionSpec, array: Any) -> tuple[Any, ...]:
    return (*spec, *[None] * (len(array.shape) - len(spec)))


def _is_quantised(leaf: Any) -> bool:
    return isinstance(leaf, QuantArray)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
