"""Feed-forward layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.fused_product import gated_product, plain_scale
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import Norm
from jaxinfer.quant.array import QuantArray
from pallas_kernels.gated_matmul import ACTIVATIONS, chosen_implementation, norm_gated_matmul


class MLP(nn.Module):
    """``down(act(gate(n)) * up(n))`` of ``n = norm(x)`` (GLU variants, arXiv:2002.05202), or ``down(act(up(n)))`` where
    nothing gates; without a norm ``n = x``.

    Gate and up are one weight ``[2, F, D]``. On a GPU a decode step computes everything before `down` in one kernel,
    where there is one for this norm. `sum_over`, `leaves_sum`: see `Linear`; F is split over that
    axis.
    """

    config: ModelConfig
    width: int
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    leaves_sum: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, norm: Norm | None = None) -> jax.Array:
        c, act, maxima = self.config, ACTIVATIONS[self.config.hidden_act], None
        if c.mlp_gated:
            gate_up = Linear((2, self.width), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="gate_up")
            fused = None if norm is None or self.is_initializing() else self._fused(x, norm, gate_up)
            if fused is not None:
                hidden, maxima = fused
            else:
                both = gate_up(x if norm is None else norm(x))
                hidden = act(both[:, 0]) * both[:, 1]
        else:
            up = Linear((self.width,), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="up")
            hidden = act(up(x if norm is None else norm(x)))
        sizes, sums = ((c.hidden_size,), (self.width,)), (self.sum_over, self.leaves_sum)
        return Linear(*sizes, c.mlp_bias, self.param_dtype, *sums, name="down")(hidden, row_maxima=maxima)

    def _fused(self, x: jax.Array, norm: Norm, gate_up: Linear) -> tuple[jax.Array, jax.Array | None] | None:
        """What `down` takes, and its rows' maxima if they come with it; None where there is no kernel for these
        parameters on the current device."""
        c, weights = self.config, gate_up.variables["params"]["kernel"]
        if c.mlp_bias:
            return None
        if isinstance(weights, QuantArray):
            return gated_product(x, norm, weights, c.hidden_act)
        scale = plain_scale(norm)
        if scale is None or scale.dtype != x.dtype or chosen_implementation(x, weights, c.hidden_act) != "triton":
            return None
        return norm_gated_matmul(x, scale, weights, epsilon=c.rms_norm_eps, activation=c.hidden_act), None
