"""What a linear map can say of the next hidden state: where an EAGLE head starts from."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.training.features import given_features
from jaxinfer.training.head_losses import before, draft_weights
from jaxinfer.typing import Params

RIDGE = 1e-3
"""Penalty on weights, of inputs scaled to a mean square of 1, for each token of the data."""


def linear_fit(
    config: ModelConfig, params: Params, batches: Iterable[Mapping[str, Any]], use_bias: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The map of ``[embedding, feature before]`` to a token's feature with the smallest squares of errors.

    Args:
        config: of the model.
        params: its parameters; its token table alone where batches bring "features".
        batches: "ids", "segments", and perhaps "counted" and "features", each ``[B, T]``; gone through once.
        use_bias: whether it adds a constant.

    Returns:
        Its matrix float32[D, 2 D] and what it adds, float32[D].
    """

    @jax.jit
    def products(params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        ids, segments = batch["ids"], batch["segments"]
        features = given_features(config, params, batch, "float32")
        embedded: Any = Decoder(config).apply(
            {"params": {"embed": params["embed"]}}, ids.reshape(-1), None, method=Decoder.embedded
        )
        given = [embedded.astype(jnp.float32).reshape(features.shape), before(features, segments)]
        x = jnp.concatenate([*given, jnp.full((*ids.shape, 1), float(use_bias))], axis=-1)
        weighed = x * draft_weights(batch)[..., None]
        high = jax.lax.Precision.HIGHEST
        return (
            jnp.einsum("btx,bty->xy", weighed, x, precision=high),
            jnp.einsum("btx,bty->xy", weighed, features, precision=high),
        )

    squares: Any = 0.0
    targets: Any = 0.0
    for batch in batches:
        one, other = products(params, dict(batch))
        squares, targets = squares + np.asarray(one, np.float64), targets + np.asarray(other, np.float64)
    diagonal = np.diag(squares).copy()
    halves = np.split(diagonal[:-1], 2)
    penalty = np.concatenate([*(np.full(len(half), half.mean()) for half in halves), [0.0 if use_bias else 1.0]])
    penalty[:-1] = np.maximum(RIDGE * penalty[:-1], np.finfo(np.float32).tiny)
    solved = np.linalg.solve(squares + np.diag(penalty), targets).astype(np.float32)
    return np.ascontiguousarray(solved[:-1].T), solved[-1]
