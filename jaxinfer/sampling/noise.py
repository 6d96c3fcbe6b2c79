"""Gumbel noise that depends on (seed, child index, position) of a token and on nothing else.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) written as plain
elementwise operations: XLA fuses it into what follows, and both output words are used, so that it takes a quarter of
the time of a vmapped `jax.random.gumbel` on the CPU.
"""

import jax
import jax.numpy as jnp

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_PARITY = 0x1BD11BDA


Words = tuple[jax.Array, jax.Array]


def threefry_2x32(key: Words, counter: Words) -> Words:
    """Two pseudo-random words for each key and counter; all four uint32, broadcast against each other."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(KEY_PARITY))
    first, second = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            first = first + second
            second = ((second << distance) | (second >> (32 - distance))) ^ first
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


def gumbel_noise(
    seed_lo: jax.Array, seed_hi: jax.Array, child_index: jax.Array, position: jax.Array, vocab_size: int
) -> jax.Array:
    """Standard Gumbel noise, float32[R, V], finite; a row depends only on its own four numbers.

    Args:
        seed_lo, seed_hi: uint32[R], halves of the 64-bit seed.
        child_index, position: int32[R].
        vocab_size: V.
    """
    stream = threefry_2x32((seed_lo, seed_hi), (child_index.astype(jnp.uint32), position.astype(jnp.uint32)))
    key = (stream[0][:, None], stream[1][:, None])
    half = (vocab_size + 1) // 2
    words = threefry_2x32(key, (jnp.arange(half, dtype=jnp.uint32), jnp.uint32(0)))
    bits = jnp.concatenate(words, axis=1)[:, :vocab_size]
    return _gumbel(bits)


def uniform_noise(seed_lo: jax.Array, seed_hi: jax.Array, child_index: jax.Array, position: jax.Array) -> jax.Array:
    """float32[R] in [0, 1), a number for each row that depends on its own four only.

    Args:
        seed_lo, seed_hi, child_index, position: as for `gumbel_noise`; other halves of a seed give other numbers.
    """
    bits, _ = threefry_2x32((seed_lo, seed_hi), (child_index.astype(jnp.uint32), position.astype(jnp.uint32)))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _gumbel(bits: jax.Array) -> jax.Array:
    """From uniform bits. Small u, where the noise is large and decides, keeps its full relative precision."""
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    uniform = jnp.minimum(uniform, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
