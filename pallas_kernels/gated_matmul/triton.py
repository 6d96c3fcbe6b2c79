"""Norm, two projections and the gate in one launch, for few tokens: each weight is read once, nothing comes back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Device
from pallas_kernels.gated_matmul.config import BLOCK_IN, BLOCK_OUT, MAX_TOKENS, Tiles, tiles_for
from pallas_kernels.gated_matmul.reference import ACTIVATIONS, norm_gated_matmul_reference
from pallas_kernels.triton_call import triton_call


def check_triton(x: Any, weights: Any, activation: str, device: Device | None) -> None:
    """Tells what the kernel cannot do.

    Raises:
        NotImplementedError: what it is, and what to use instead.
    """
    del device  # tensor cores have bfloat16 wherever Triton runs
    if x.dtype != jnp.bfloat16 or weights.dtype != x.dtype:
        # Float32 products would leave the tensor cores, and x times its scale can overflow float16.
        raise NotImplementedError(f"x of {x.dtype} and weights of {weights.dtype} must be bfloat16; use 'xla'")
    if activation == "gelu":
        raise NotImplementedError("activation='gelu': Pallas-Triton has no error function; use 'xla' or 'gelu_tanh'")
    if x.shape[0] > MAX_TOKENS:
        raise NotImplementedError(f"{x.shape[0]} tokens: the kernel is for at most {MAX_TOKENS}; use 'xla'")
    if x.shape[1] % BLOCK_IN or weights.shape[1] % BLOCK_OUT:
        raise NotImplementedError(
            f"weights{weights.shape} must have F divisible by {BLOCK_OUT} and D by {BLOCK_IN}; use 'xla'"
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def norm_gated_matmul_triton(
    x: jax.Array, scale: jax.Array, weights: jax.Array, epsilon: float, activation: str, interpret: bool
) -> jax.Array:
    """Same contract as `norm_gated_matmul`; derivatives are the reference's.

    Raises:
        NotImplementedError: as `check_triton`.
    """
    tokens, channels = x.shape
    tiles = tiles_for(tokens)
    return triton_call(
        functools.partial(_kernel, tiles, tokens, channels, epsilon, activation),
        name="norm_gated_matmul",
        out_shape=jax.ShapeDtypeStruct((tokens, weights.shape[1]), x.dtype),
        grid=(weights.shape[1] // tiles.out,),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(x, scale, weights)


@norm_gated_matmul_triton.defjvp
def _jvp(epsilon: float, activation: str, interpret: bool, primals: Any, tangents: Any) -> Any:
    del interpret
    reference = functools.partial(norm_gated_matmul_reference, epsilon=epsilon, activation=activation)
    return jax.jvp(reference, primals, tangents)


def _kernel(
    tiles: Tiles,
    tokens: int,
    channels: int,
    epsilon: float,
    activation: str,
    x_ref: Any,
    scale_ref: Any,
    weights_ref: Any,
    out_ref: Any,
) -> None:
    """All tokens by `tiles.out` gates. The root mean square of a token is known at the end only and comes in there."""
    first = pl.program_id(0) * tiles.out
    # Rows past the last token are that token again: they compute, and store, what it does.
    rows = jnp.minimum(jnp.arange(tiles.tokens), tokens - 1)

    def step(index: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        gate, up, squares = carry
        low = index * tiles.into
        inside = pl.ds(low, tiles.into)
        x = x_ref[rows, inside].astype(jnp.float32)
        scaled = (x * scale_ref[inside].astype(jnp.float32)[None, :]).astype(x_ref.dtype)
        gate_weights = weights_ref[0, pl.ds(first, tiles.out), inside]
        up_weights = weights_ref[1, pl.ds(first, tiles.out), inside]
        gate += plt.dot(scaled, gate_weights, trans_b=True)
        up += plt.dot(scaled, up_weights, trans_b=True)
        return gate, up, squares + jnp.sum(x * x, axis=1)

    zero = jnp.zeros((tiles.tokens, tiles.out), jnp.float32)
    start = (zero, zero, jnp.zeros((tiles.tokens,), jnp.float32))
    gate, up, squares = lax.fori_loop(0, channels // tiles.into, step, start)
    factor = lax.rsqrt(squares / channels + epsilon)[:, None]
    out = ACTIVATIONS[activation](gate * factor) * (up * factor)
    out_ref[rows, pl.ds(first, tiles.out)] = out.astype(out_ref.dtype)
