"""What a layer's matrices see while a text runs through it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import InterceptorContext

from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import MLP
from jaxinfer.models.moe import MixtureOfExperts
from jaxinfer.models.sequence import run_layer
from jaxinfer.typing import Params

_ROUTED = "mlp/routed"
EXPERTS = ("mlp/gate_up", "mlp/down")
"""Of a mixture: matrices that hold all experts'."""


class InputStatistics(NamedTuple):
    """Sums over the inputs x of a matrix, float32; an expert's are of the tokens that go to it.

    Attributes:
        gram: ``[E, K, K]``, of ``x x^T``; E is 1 for a matrix without experts.
        magnitude: ``[E, K]``, of ``|x|``.
        tokens: ``[E]``, how many.
    """

    gram: jax.Array
    magnitude: jax.Array
    tokens: jax.Array


Statistics = dict[str, InputStatistics]
"""By the layer's modules: "attn/qkv", "mlp/down", ..."""


@partial(jax.jit, static_argnums=(0, 1, 2))
def layer_statistics(
    config: ModelConfig, kind: LayerKind, modules: tuple[str, ...], params: Params, x: jax.Array
) -> Statistics:
    """Statistics of some of a layer's matrices over ``x[B, T, D]``; what they do not need is not computed.

    Args:
        config: the architecture.
        kind: of the layer.
        modules: names of the matrices' modules.
        params: of the layer, in floats.
        x: what goes into it.
    """
    seen: dict[str, list[jax.Array]] = {}
    with nn.intercept_methods(partial(_watch, seen)):
        run_layer(config, kind, None, params, x, None)
    return {module: _of_module(module, seen) for module in modules}


def added(left: Statistics, right: Statistics) -> Statistics:
    """Statistics over both texts."""
    return _sum(left, right)


@partial(jax.jit, donate_argnums=0)
def _sum(left: Statistics, right: Statistics) -> Statistics:
    return jax.tree.map(jnp.add, left, right)


def _watch(
    seen: dict[str, list[jax.Array]], call: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext
) -> Any:
    """Notes what goes into each `Linear`, and the experts' weights."""
    module, name = context.module, "/".join(context.module.path)
    if isinstance(module, MLP) and context.method_name == "__call__" and len(args) > 1:
        x, norm = args
        return call(x if norm is None else norm(x))  # a kernel that does both would not come by here
    if isinstance(module, Linear) and context.method_name == "__call__":
        seen.setdefault(name, []).append(args[0])
    result = call(*args, **kwargs)
    if isinstance(module, MixtureOfExperts) and context.method_name == "_route":
        seen[_ROUTED] = [result]
    return result


def _of_module(module: str, seen: dict[str, list[jax.Array]]) -> InputStatistics:
    pieces = seen[module]
    routed = seen.get(_ROUTED)
    if routed is None or module not in EXPERTS:
        parts = [_of_inputs(x.reshape(len(x), -1), jnp.ones((len(x), 1), bool)) for x in pieces]
    else:
        parts = [_of_inputs(x, chosen) for x, chosen in zip(pieces, jnp.split(routed[0] > 0, len(pieces)), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = jax.tree.map(jnp.add, total, part)
    return total


def _of_inputs(x: jax.Array, chosen: jax.Array) -> InputStatistics:
    """Of inputs ``x[T, K]``, or each expert's own ``x[T, E, K]``, that count for the experts of ``chosen[T, E]``."""

    def of_expert(rows: jax.Array, mine: jax.Array) -> InputStatistics:
        rows = jnp.where(mine[:, None], rows.astype(jnp.float32), 0.0)
        gram = jnp.matmul(rows.T, rows, precision="highest")
        return InputStatistics(gram, jnp.abs(rows).sum(0), mine.sum().astype(jnp.float32))

    if x.ndim == 2:
        return jax.lax.map(partial(of_expert, x), chosen.T)
    return jax.lax.map(lambda pair: of_expert(*pair), (x.swapaxes(0, 1), chosen.T))
