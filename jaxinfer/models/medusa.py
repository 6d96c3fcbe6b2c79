"""Medusa heads: tokens further ahead, guessed from a model's hidden states (arXiv:2401.10774)."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.linear import Linear
from jaxinfer.typing import Params


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads of one model.

    Args:
        hidden_size: width of the model, D.
        vocab_size: of the model, V.
        num_heads: K; head k, from 0, guesses the token k + 2 places after the one whose hidden state it is given.
        num_layers: residual blocks of a head.
        own_heads: each head has an output matrix ``[V, D]`` of its own; else they share the model's.

    Raises:
        ValueError: a number is below 1.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    own_heads: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class MedusaHead(nn.Module):
    """One head: blocks ``x + silu(W x + b)``, and an output matrix where it has its own."""

    config: MedusaConfig
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        c = self.config
        size = (c.hidden_size,)
        self.blocks = [Linear(size, size, True, self.param_dtype) for _ in range(c.num_layers)]
        if c.own_heads:
            self.lm_head = Linear((c.vocab_size,), size, False, self.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x[T, D] -> [T, V]`` with an output matrix, else ``[T, D]``."""
        for block in self.blocks:
            x = x + nn.silu(block(x))
        return self.lm_head(x) if self.config.own_heads else x


class MedusaHeads(nn.Module):
    """All heads of a model."""

    config: MedusaConfig
    param_dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        self.heads = [MedusaHead(self.config, self.param_dtype) for _ in range(self.config.num_heads)]

    def __call__(self, hidden: jax.Array) -> tuple[jax.Array, ...]:
        """What each head makes of ``hidden[T, D]``, the model's hidden states after its last norm: logits ``[T, V]`` of
        its own, or ``[T, D]``, which the model's output head takes (`jaxinfer.models.decoder.Decoder.logits`)."""
        return tuple(head(hidden) for head in self.heads)


def medusa_shapes(config: MedusaConfig, dtype: Any) -> Params:
    """The parameter tree of heads as `jax.ShapeDtypeStruct` leaves; allocates nothing."""
    row = jax.ShapeDtypeStruct((1, config.hidden_size), dtype)
    shapes: Params = jax.eval_shape(MedusaHeads(config, jnp.dtype(dtype)).init, jax.random.key(0), row)["params"]
    return shapes


def config_of_medusa(params: Params, vocab_size: int) -> MedusaConfig:
    """The sizes of heads, from their parameters.

    Args:
        params: of `MedusaHeads`.
        vocab_size: of the model they belong to, for heads without matrices of their own.

    Raises:
        ValueError: these are no such parameters.
    """
    heads = [name for name in params if name.startswith("heads_")]
    first: Any = params.get("heads_0", {})
    if not heads or len(heads) < len(params) or "blocks_0" not in first:
        raise ValueError(f"params has the entries {', '.join(params)}; Medusa heads are heads_0, heads_1 and so on")
    layers = sum(name.startswith("blocks_") for name in first)
    own = "lm_head" in first
    vocab = first["lm_head"]["kernel"].shape[0] if own else vocab_size
    return MedusaConfig(first["blocks_0"]["kernel"].shape[0], vocab, len(heads), layers, own)


def init_medusa(config: MedusaConfig, output_matrix: jax.Array | None = None) -> Params:
    """Float32 heads that say what the model says of the next token: blocks that add nothing, and the model's matrix.

    Args:
        config: of the heads.
        output_matrix: [V, D], the model's; needed where the heads have their own.
    """
    size = config.hidden_size
    block = {"kernel": jnp.zeros((size, size)), "bias": jnp.zeros(size)}
    head: dict[str, Any] = {f"blocks_{layer}": block for layer in range(config.num_layers)}
    if config.own_heads:
        assert output_matrix is not None
        head["lm_head"] = {"kernel": jnp.asarray(output_matrix, jnp.float32)}
    return {f"heads_{number}": jax.tree.map(jnp.copy, head) for number in range(config.num_heads)}
