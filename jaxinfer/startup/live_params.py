"""Parameters that the caller's process holds already: checked against the decoder's tree, used without a copy."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.sharding.shards import Shards
from jaxinfer.typing import Params

logger = logging.getLogger("jaxinfer")


def match_params(
    params: Params,
    config: ModelConfig,
    dtype: str,
    plan: QuantPlan | None = None,
    shapes: Params | None = None,
    shards: Shards | None = None,
) -> Params:
    """The tree as plain nested dicts of device arrays. Leaves that are jax.Arrays stay the same arrays where they lie
    as `shards` has them, others are copied; those that the plan quantises are rounded, one after the other on the host,
    unless they are QuantArrays of its format already.

    Args:
        params: tree of `jaxinfer.models.decoder.init_params`; leaves are jax.Arrays or numpy arrays.
        config: the architecture.
        dtype: dtype name that every leaf has.
        plan: which parameters are quantised, and how; None for none.
        shapes: `param_shapes` of config and dtype, where they are known; tracing them takes most of the time.
        shards: how the model lies on several devices; None is on one.

    Raises:
        ValueError: a leaf is missing, too many, of another shape, dtype or format, deleted, on several devices, or to
            be quantised and not finite; it is named.
    """
    if isinstance(params, Mapping) and set(params) == {"params"}:
        raise ValueError("params has the single entry 'params'; pass variables['params'], the parameters themselves")
    split = None if shards is None or shards.placement.mesh is None else shards
    matched: Params = _match(params, shapes or param_shapes(config, jax.numpy.dtype(dtype)), "", plan, split)
    if split is not None:
        _tell_moves(params, matched)
    return matched


def _tell_moves(given: Params, placed: Params) -> None:
    """Says how many of a caller's arrays had to be laid out anew."""
    pairs = list(zip(jax.tree.leaves(given), jax.tree.leaves(placed), strict=False))
    moved = [old for old, new in pairs if old is not new]
    if moved:
        logger.info(
            "%d of %d parameters were laid out anew for the engine's devices (%.2f GiB); arrays that lie as "
            "`Shards.tree_specs` says are used without a copy",
            len(moved),
            len(pairs),
            sum(leaf.nbytes for leaf in moved) / 2**30,
        )


def match_tree(params: Params | None, shapes: Params) -> Params:
    """`match_params` for any tree of floats: the same arrays where they are jax.Arrays, copies of others.

    Args:
        params: leaves are jax.Arrays or numpy arrays.
        shapes: the tree as `jax.ShapeDtypeStruct` leaves.
    """
    return _match(params, shapes, "", None)


def dtype_of_params(params: Params) -> str:
    """dtype name of the first leaf.

    Raises:
        ValueError: there is no array.
    """
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array | np.ndarray):
            return leaf.dtype.name
    raise ValueError("params holds no array; give the tree that jaxinfer.models.decoder.init_params makes")


def _match(given: Any, expected: Any, path: str, plan: QuantPlan | None, shards: Shards | None = None) -> Any:
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping):
            raise ValueError(f"params{_at(path)} is {type(given).__name__}, not a mapping with {', '.join(expected)}")
        for name in given:
            if name not in expected:
                raise ValueError(f"params has the leaf or branch {_join(path, name)!r}, which this model does not have")
        for name in expected:
            if name not in given:
                raise ValueError(f"params has no {_join(path, name)!r}, which this model needs")
        return {name: _match(given[name], expected[name], _join(path, name), plan, shards) for name in expected}
    stored = expected if plan is None else plan.shape_of(path, expected)
    if isinstance(given, QuantArray):
        return _match_quantised(given, stored, path, shards)
    if not isinstance(given, jax.Array | np.ndarray):
        raise ValueError(f"params{_at(path)} is {type(given).__name__}, not an array")
    if given.shape != expected.shape:
        raise ValueError(f"params{_at(path)} has shape {given.shape}; this model needs {expected.shape}")
    if given.dtype != expected.dtype:
        raise ValueError(
            f"params{_at(path)} has dtype {given.dtype}, not {expected.dtype}; cast all leaves alike with "
            "jax.tree.map(lambda leaf: leaf.astype(...), params)"
        )
    if plan is not None and isinstance(stored, QuantArray):
        _check_alive(given, path)
        rounded = plan.apply(path, np.asarray(given), expected.dtype.name)
        return jax.device_put(rounded) if shards is None else shards.put(path, rounded)
    return _on_device(given, path) if shards is None else shards.put(path, _own(given, path))


def _match_quantised(given: QuantArray, expected: Any, path: str, shards: Shards | None) -> Any:
    wanted = jax.tree.map(lambda leaf: (tuple(leaf.shape), leaf.dtype), expected)
    if jax.tree.map(lambda leaf: (tuple(leaf.shape), leaf.dtype), given) != wanted:
        raise ValueError(
            f"params{_at(path)} is quantised in another way than this engine's, or this engine does not quantise it; "
            "give floats"
        )
    if shards is not None:
        return shards.put(path, jax.tree.map(lambda leaf: _own(leaf, path), given))
    return jax.tree.map(lambda leaf: _on_device(leaf, path), given)


def _own(given: jax.Array | np.ndarray, path: str) -> jax.Array | np.ndarray:
    """An array that the caller cannot change."""
    _check_alive(given, path)
    return given if isinstance(given, jax.Array) else np.array(given, copy=True)


def _on_device(given: jax.Array | np.ndarray, path: str) -> jax.Array:
    if not isinstance(given, jax.Array):
        return jax.numpy.array(given, copy=True)  # device_put would share memory that the caller may change
    _check_alive(given, path)
    if len(given.devices()) > 1:
        raise ValueError(
            f"params{_at(path)} lies on {len(given.devices())} devices; the engine runs on one: give their mesh=, "
            "or jax.device_put(params, jax.devices()[0])"
        )
    return given


def _check_alive(given: jax.Array | np.ndarray, path: str) -> None:
    if isinstance(given, jax.Array) and given.is_deleted():
        raise ValueError(
            f"params{_at(path)} has been deleted, probably donated to a jitted function; give what that returned"
        )


def _join(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""
