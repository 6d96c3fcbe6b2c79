"""Feed-forward layers."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.linear import Linear


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function behind a name of ``jaxinfer.models.config.ACTIVATIONS``."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
    }
    return functions[name]


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (GLU variants, arXiv:2002.05202), or ``down(act(up(x)))`` where nothing gates.

    Gate and up are one matmul of ``[2, F, D]``. `sum_over`: see `Linear`; F is split over that axis.
    """

    config: ModelConfig
    width: int
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, act = self.config, activation(self.config.hidden_act)
        if c.mlp_gated:
            gate_up = Linear((2, self.width), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="gate_up")(x)
            hidden = act(gate_up[:, 0]) * gate_up[:, 1]
        else:
            hidden = act(Linear((self.width,), (c.hidden_size,), c.mlp_bias, self.param_dtype, name="up")(x))
        sizes = (c.hidden_size,), (self.width,)
        return Linear(*sizes, c.mlp_bias, self.param_dtype, self.sum_over, name="down")(hidden)
