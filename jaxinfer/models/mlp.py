"""Feed-forward layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import Norm
from jaxinfer.quant.array import QuantArray
from pallas_kernels.gated_matmul import ACTIVATIONS, chosen_implementation, norm_gated_matmul


class MLP(nn.Module):
    """``down(act(gate(n)) * up(n))`` of ``n = norm(x)`` (GLU variants, arXiv:2002.05202), or ``down(act(up(n)))`` where
    nothing gates; without a norm ``n = x``.

    Gate and up are one weight ``[2, F, D]``. On a GPU a decode step computes everything before `down` in one kernel,
    where there is one for this norm. `sum_over`: see `Linear`; F is split over that axis.
    """

    config: ModelConfig
    width: int
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, norm: Norm | None = None) -> jax.Array:
        c, act = self.config, ACTIVATIONS[self.config.hidden_act]
        if c.mlp_gated:
            gate_up = Linear((2, self.width), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="gate_up")
            if norm is not None and not self.is_initializing() and self._fuses(x, norm, gate_up):
                scale, weights = norm.variables["params"]["scale"], gate_up.variables["params"]["kernel"]
                hidden = norm_gated_matmul(x, scale, weights, epsilon=c.rms_norm_eps, activation=c.hidden_act)
            else:
                both = gate_up(x if norm is None else norm(x))
                hidden = act(both[:, 0]) * both[:, 1]
        else:
            up = Linear((self.width,), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="up")
            hidden = act(up(x if norm is None else norm(x)))
        sizes = (c.hidden_size,), (self.width,)
        return Linear(*sizes, c.mlp_bias, self.param_dtype, self.sum_over, name="down")(hidden)

    def _fuses(self, x: jax.Array, norm: Norm, gate_up: Linear) -> bool:
        """Whether there is a kernel for these parameters on the current device."""
        c = self.config
        if c.mlp_bias or c.norm != "rms" or c.norm_unit_offset:
            return False
        scale, weights = norm.variables["params"]["scale"], gate_up.variables["params"]["kernel"]
        if isinstance(weights, QuantArray):
            return False
        return scale.dtype == x.dtype and chosen_implementation(x, weights, c.hidden_act) == "triton"
