"""A frozen model's hidden states at every place of the data, kept on disk."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.config import ModelConfig
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.training.features import model_features
from jaxinfer.training.packing import PackedRows
from jaxinfer.training.row_cache import RowCache, digest
from jaxinfer.training.step import DATA, on_mesh
from jaxinfer.training.teacher import Teacher
from jaxinfer.typing import Params

FLOAT16_BYTES = 2


class FeatureKind(Protocol):
    """Which hidden states: a name for them, and a function of a model that gives them."""

    @property
    def name(self) -> str: ...

    def width(self, model: Teacher) -> int:
        """Channels of a token."""
        ...

    def of(self, config: Any, params: Params, ids: jax.Array, segments: jax.Array) -> jax.Array:
        """``[B, T, width]``."""
        ...


class LastFeatures:
    """A `FeatureKind`: hidden states after the last norm."""

    name = "last"

    def width(self, model: Teacher) -> int:
        return model.config.hidden_size

    def of(self, config: ModelConfig, params: Params, ids: jax.Array, segments: jax.Array) -> jax.Array:
        return model_features(config, params, ids, segments)


def cached_features(
    folder: Path,
    rows: PackedRows,
    kind: FeatureKind,
    model: Teacher,
    params: Params,
    mesh: Mesh,
    batch_size: int,
    progress: bool,
) -> RowCache:
    """The cache of "features", float16[R, T, width], whose missing shards are computed first.

    Args:
        folder: where caches are kept; each set of rows and each kind has a folder of its own in it.
        rows: the data.
        kind: which hidden states.
        model: whose.
        params: its parameters.
        mesh: over whose devices rows are split.
        batch_size: rows that are computed at a time.
        progress: show a progress bar.

    Raises:
        ValueError: the folder holds features of another model, or float16 cannot hold these.
    """
    width = kind.width(model)
    identity = {"teacher": str(model.checkpoint.path), "dtype": model.dtype, "features": kind.name}
    place = folder / f"{kind.name}_{digest(rows)[:12]}"
    cache = RowCache(place, "features", rows, FLOAT16_BYTES * width, identity)
    if not cache.missing:
        return cache
    same, split = PartitionSpec(), PartitionSpec(DATA)
    compute: Any = jax.jit(
        jax.shard_map(
            partial(kind.of, model.config), mesh=mesh, in_specs=(same, split, split), out_specs=split, check_vma=False
        )
    )

    def of(some: PackedRows) -> dict[str, np.ndarray]:
        batch = on_mesh({"ids": some.ids, "segments": some.segments}, mesh)
        found = np.asarray(compute(params, batch["ids"], batch["segments"]), np.float32)
        if np.abs(found).max() > np.finfo(np.float16).max:
            raise ValueError("the model's hidden states exceed float16, in which they are kept; leave the cache out")
        return {"features": found.astype(np.float16)}

    with ProgressBar(total=len(rows), desc="Hidden states", unit="row", disable=not progress) as bar:
        cache.fill(of, batch_size, bar.update)
    return cache
