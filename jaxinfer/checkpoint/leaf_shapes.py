"""The parameter tree as a flat table from leaf paths to shapes: what every loader fills and every writer expects."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes


def leaf_shapes(config: ModelConfig, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Path such as "layers_0/attn/qkv/kernel" -> shape and dtype, in the order of the tree's leaves."""
    return flat(param_shapes(config, dtype))


def leaf_targets(sharding: Any, leaves: Iterable[str]) -> dict[str, Any]:
    """Where each leaf goes.

    Args:
        sharding: one device or sharding for all, None for JAX's default device, or a tree of them like the parameters.
        leaves: paths of the parameters.

    Raises:
        ValueError: a tree of other paths.
    """
    if sharding is None or isinstance(sharding, jax.Device | jax.sharding.Sharding):
        return dict.fromkeys(leaves, sharding)
    targets = flat(sharding)
    differing = sorted(set(leaves) ^ set(targets))
    if differing:
        raise ValueError(
            f"sharding must be a device, a sharding, or a tree of them like the parameters; it differs from them at "
            f"{differing[0]!r}"
        )
    return targets


def flat(tree: Any) -> dict[str, Any]:
    """A tree's leaves by their paths, joined with slashes; sequences by index."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(_key(entry) for entry in path): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dicts whose paths these are."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def describe(array: Any) -> str:
    """ "float32[4, 8]" of anything with a shape and a dtype."""
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _key(entry: Any) -> str:
    if isinstance(entry, jax.tree_util.DictKey | jax.tree_util.FlattenedIndexKey):
        return str(entry.key)
    if isinstance(entry, jax.tree_util.SequenceKey):
        return str(entry.idx)
    return str(entry.name)
