"""Mixture of experts (arXiv:1701.06538): each token goes to a few of many feed-forward networks."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import MAX_HIDDEN_VALUES, ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.mlp import MLP
from jaxinfer.models.norm import Norm
from pallas_kernels.gated_matmul import ACTIVATIONS


class MixtureOfExperts(nn.Module):
    """``sum_e p_e(x) expert_e(x)`` over the best experts of each token, and the shared expert behind its gate.

    Every expert computes every token and the router's weights, 0 for most, pick: two plain matmuls over weights
    ``[2, E, F, D]`` and ``[D, E, F]``, each read once. A decode of many rows reads all experts anyway; a long prompt
    pays E / k times the arithmetic. Tokens sorted by expert and `jax.lax.ragged_dot` (jax 0.10.2) are no better: 2 to
    10 times slower on the CPU at 1 to 512 tokens, and on a GPU XLA copies a third of the weights for it, or more.

    `norm`: as for `MLP`. `sum_over`: see `Linear`; F is split over that axis.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, norm: Norm | None = None) -> jax.Array:
        c, width = self.config, self.config.moe_intermediate_size
        x = x if norm is None else norm(x)
        weights = self._route(x)
        gate_up = Linear((2, c.num_experts, width), (c.hidden_size,), False, self.param_dtype, name="gate_up")
        down = Linear((c.hidden_size,), (c.num_experts, width), False, self.param_dtype, self.sum_over, name="down")

        def experts(x: jax.Array, weights: jax.Array) -> jax.Array:
            hidden = gate_up(x)
            hidden = ACTIVATIONS[c.hidden_act](hidden[:, 0]) * hidden[:, 1]
            return down(hidden * weights[:, :, None])

        tokens = x.shape[0]
        slices = -(-tokens * 2 * c.num_experts * width // MAX_HIDDEN_VALUES)
        while tokens % slices:
            slices += 1
        parts = [experts(*pair) for pair in zip(jnp.split(x, slices), jnp.split(weights, slices), strict=True)]
        out = parts[0] if slices == 1 else jnp.concatenate(parts)
        if c.shared_expert_intermediate_size:
            shared = MLP(c, c.shared_expert_intermediate_size, self.param_dtype, self.sum_over, name="shared")(x)
            gate = Linear((1,), (c.hidden_size,), False, self.param_dtype, name="shared_gate")(x)
            out = out + jax.nn.sigmoid(gate) * shared
        return out

    def _route(self, x: jax.Array) -> jax.Array:
        """Weight of each expert for each token, ``[T, E]`` in x's dtype, 0 for those it does not go to."""
        c = self.config
        scores = Linear((c.num_experts,), (c.hidden_size,), False, self.param_dtype, name="router")(x)
        probs = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
        best, chosen = jax.lax.top_k(probs, c.num_experts_per_tok)
        if c.renormalize_experts:
            best = best / best.sum(-1, keepdims=True)
        spread = jax.nn.one_hot(chosen, c.num_experts, dtype=jnp.float32) * best[:, :, None]
        return spread.sum(1).astype(x.dtype)
