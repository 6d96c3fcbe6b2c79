"""From products of queries and keys to logits in base 2: the same arithmetic in the tiles of every kernel."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.spec import AttentionSpec

LOG2_E = math.log2(math.e)


class Logits(NamedTuple):
    """Logits in base 2, as ``values * factor``: the product folds into the subtraction that follows it.

    Attributes:
        values: float32, shape of the products.
        factor: positive.
        slope: derivative of the soft cap, or None where there is none.
    """

    values: jax.Array
    factor: float
    slope: jax.Array | None


def base2_logits(spec: AttentionSpec, products: jax.Array, bias: jax.Array | None) -> Logits:
    """Scales, caps and biases the products.

    Args:
        spec: scale and soft cap.
        products: float32, queries times keys.
        bias: what is added to the logits, in base 2, or None.
    """
    factor, slope = spec.scale * LOG2_E, None
    if spec.softcap is not None:
        capped = _tanh(products * (spec.scale / spec.softcap))
        products, factor, slope = capped, spec.softcap * LOG2_E, 1.0 - capped * capped
    if bias is None and factor > 0:
        return Logits(products, factor, slope)
    logits = products * factor
    return Logits(logits if bias is None else logits + bias, 1.0, slope)


def alibi_bias(slope: jax.Array, positions: jax.Array, keys: jax.Array) -> jax.Array:
    """ALiBi's penalty (arXiv:2108.12409) in base 2: grows with the distance of query and key."""
    return -(slope * LOG2_E) * jnp.abs(positions - keys).astype(jnp.float32)


def _tanh(x: jax.Array) -> jax.Array:
    """Within 2e-7 by one exponential: the hardware's own tanh is 1e-3 off, and a library's is slow."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E)))
