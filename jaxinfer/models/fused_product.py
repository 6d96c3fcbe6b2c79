"""Norms and gates that go into the kernel of a product with quantised weights, where one takes them."""

import jax

from jaxinfer.models.norm import Norm
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.gpu_matmul import act_dtype, gpu_product, is_one_kernel


def normed_product(x: jax.Array, norm: Norm, weight: jax.Array | QuantArray) -> jax.Array | None:
    """``norm(x) . weight^T``, ``[T, N]``, where it is one kernel that also rounds the normed rows; else None: a norm
    alone is as well before the product."""
    scale = plain_scale(norm)
    if scale is None or not isinstance(weight, QuantArray) or act_dtype(weight) is None:
        return None
    if not is_one_kernel(x, weight, scale, None):
        return None
    product: jax.Array = gpu_product(x, weight, norm=scale, epsilon=norm.config.rms_norm_eps)
    return product


def gated_product(
    x: jax.Array, norm: Norm, weight: QuantArray, activation: str
) -> tuple[jax.Array, jax.Array | None] | None:
    """``act(n . gate^T) * (n . up^T)`` of ``n = norm(x)``, ``[T, F]``, and the largest magnitudes of its rows where the
    next product rounds these; None where it is not one kernel.

    Args:
        x: [T, D].
        norm: of x.
        weight: [2, F, D], gate and up.
        activation: of the gate.
    """
    scale = plain_scale(norm)
    if scale is None or not is_one_kernel(x, weight, scale, activation):
        return None
    rounds = act_dtype(weight) is not None
    epsilon = norm.config.rms_norm_eps
    result = gpu_product(x, weight, norm=scale, epsilon=epsilon, activation=activation, gives_maxima=rounds)
    return result if rounds else (result, None)


def plain_scale(norm: Norm) -> jax.Array | None:
    """The scale of a root-mean-square norm that is nothing else; None for other norms, and before it has one."""
    c = norm.config
    if c.norm != "rms" or c.norm_unit_offset or norm.sum_over is not None or norm.is_initializing():
        return None
    scale: jax.Array = norm.variables["params"]["scale"]
    return scale
