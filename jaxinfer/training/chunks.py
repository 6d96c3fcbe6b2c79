"""What is as wide as the vocabulary is computed for some tokens at a time, and again for the gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CHUNK_TOKENS = 512
"""Tokens whose logits are held at a time."""


def over_tokens(function: Callable[..., Any], arrays: Any, chunk: int = CHUNK_TOKENS) -> Any:
    """``function(arrays)`` for some tokens after the other; what is inside is not kept for the backward pass.

    Args:
        function: takes a tree like `arrays` with `chunk` or fewer tokens, and returns a tree of arrays ``[tokens,
            ...]``; a token's result depends on that token alone.
        arrays: tree of arrays ``[tokens, ...]``, None among the leaves too.
        chunk: tokens at a time, at least 1.

    Returns:
        The tree that `function` returns, for all the tokens.
    """
    function = jax.checkpoint(function)
    count = jax.tree.leaves(arrays)[0].shape[0]
    if count <= chunk:
        return function(arrays)
    pieces = -(-count // chunk)

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, pieces * chunk - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding, mode="edge").reshape(pieces, chunk, *array.shape[1:])

    results = jax.lax.map(function, jax.tree.map(cut, arrays))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:count], results)
