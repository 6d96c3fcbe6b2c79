"""Feed-forward layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import RMSNorm
from pallas_kernels.gated_matmul import ACTIVATIONS, chosen_implementation, norm_gated_matmul


class GatedMLP(nn.Module):
    """``down(act(gate(n)) * up(n))`` of ``n = norm(x)`` (GLU variants, arXiv:2002.05202); gate and up are one weight
    ``[2, F, D]``. On a GPU a decode step computes everything before `down` in one kernel.

    `sum_over`: see `Linear`; F is split over that axis.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, norm: RMSNorm) -> jax.Array:
        c = self.config
        gate_up = Linear((2, c.intermediate_size), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="gate_up")
        if not self.is_initializing() and self._fuses(x, norm, gate_up):
            scale, weights = norm.variables["params"]["scale"], gate_up.variables["params"]["kernel"]
            hidden = norm_gated_matmul(x, scale, weights, epsilon=norm.epsilon, activation=c.hidden_act)
        else:
            both = gate_up(norm(x))
            hidden = ACTIVATIONS[c.hidden_act](both[:, 0]) * both[:, 1]
        sizes = (c.hidden_size,), (c.intermediate_size,)
        return Linear(*sizes, c.mlp_bias, self.param_dtype, self.sum_over, name="down")(hidden)

    def _fuses(self, x: jax.Array, norm: RMSNorm, gate_up: Linear) -> bool:
        """Whether there is a kernel for these parameters on the current device."""
        if self.config.mlp_bias:
            return False
        scale, weights = norm.variables["params"]["scale"], gate_up.variables["params"]["kernel"]
        return scale.dtype == x.dtype and chosen_implementation(x, weights, self.config.hidden_act) == "triton"
