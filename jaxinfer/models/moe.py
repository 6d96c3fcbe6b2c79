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

    `norm`: as for `MLP`. `sum_over`: see `Linear`; over that axis every expert's F is split, or with `splits_experts`
    the experts are dealt out, zeros filling up what is missing. All is added up once.
    """

    config: ModelConfig
    param_dtype: jnp.dtype = jnp.float32
    sum_over: str | None = None
    splits_experts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, norm: Norm | None = None) -> jax.Array:
        c, width = self.config, self.config.moe_intermediate_size
        x = x if norm is None else norm(x)
        weights, sums = self._own(self._route(x)), (self.sum_over, True)
        count = weights.shape[1]
        gate_up = Linear((2, count, width), (c.hidden_size,), False, self.param_dtype, name="gate_up")
        down = Linear((c.hidden_size,), (count, width), False, self.param_dtype, *sums, name="down")

        def experts(x: jax.Array, weights: jax.Array) -> jax.Array:
            hidden = gate_up(x)
            hidden = ACTIVATIONS[c.hidden_act](hidden[:, 0]) * hidden[:, 1]
            return down(hidden * weights[:, :, None])

        tokens = x.shape[0]
        slices = -(-tokens * 2 * count * width // MAX_HIDDEN_VALUES)
        while tokens % slices:
            slices += 1
        parts = [experts(*pair) for pair in zip(jnp.split(x, slices), jnp.split(weights, slices), strict=True)]
        out = parts[0] if slices == 1 else jnp.concatenate(parts)
        if c.shared_expert_intermediate_size:
            shared = MLP(c, c.shared_expert_intermediate_size, self.param_dtype, *sums, name="shared")(x)
            gate = Linear((1,), (c.hidden_size,), False, self.param_dtype, name="shared_gate")(x)
            out = out + jax.nn.sigmoid(gate) * shared
        return out if self.sum_over is None else jax.lax.psum(out, self.sum_over)

    def _own(self, weights: jax.Array) -> jax.Array:
        """``weights[T, E]`` of the experts that are here."""
        if self.sum_over is None or not self.splits_experts:
            return weights
        devices = jax.lax.axis_size(self.sum_over)
        each = -(-weights.shape[1] // devices)
        weights = jnp.pad(weights, ((0, 0), (0, each * devices - weights.shape[1])))
        return jax.lax.dynamic_slice_in_dim(weights, jax.lax.axis_index(self.sum_over) * each, each, axis=1)

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
