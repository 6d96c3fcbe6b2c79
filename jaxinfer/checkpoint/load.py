"""Streaming a checkpoint's weights to the device, a parameter at a time."""

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import DTYPES, Checkpoint
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import Placement
from jaxinfer.progress_bar import ProgressBar

if TYPE_CHECKING:
    import jax

CHUNK_VALUES = 1 << 23  # values decoded at a time: 32 MB in float32, above what a decoder's temporaries cost per call
ALIGNMENT = 64  # bytes; the CPU device adopts a host buffer so aligned instead of copying it


def resolve_dtype(dtype: str, checkpoint_dtype: str, platform: str) -> str:
    """Settles what type the parameters get.

    Args:
        dtype: "auto", "float32" / "float", "bfloat16", "float16" / "half".
        checkpoint_dtype: the checkpoint's own.
        platform: JAX's name of the device's platform, e.g. "cpu".

    Returns:
        "float32", "bfloat16" or "float16"; for "auto" float32 on the CPU (16-bit arithmetic is emulated there) and the
        checkpoint's own elsewhere.

    Raises:
        ValueError: `dtype` is none of these.
    """
    if dtype == "auto":
        return "float32" if platform == "cpu" else checkpoint_dtype
    name = {"float": "float32", "half": "float16"}.get(dtype, dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be 'auto', 'float32', 'bfloat16' or 'float16'")
    return name


def load_params(
    checkpoint: Checkpoint, dtype: str, *, device: "jax.Device | None" = None, progress: bool = False
) -> dict[str, Any]:
    """Loads the weights.

    Beside the parameters themselves at most one of them and a few chunks are in memory.

    Args:
        checkpoint: an opened checkpoint.
        dtype: type of every parameter: "float32", "bfloat16" or "float16".
        device: where they go; None is JAX's default device.
        progress: show a progress bar.

    Returns:
        The parameter tree of ``jaxinfer.models.decoder``.

    Raises:
        ValueError: a file changed since it was opened.
    """
    import jax

    from jaxinfer.models.decoder import param_shapes

    _check_tied_head(checkpoint)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(param_shapes(checkpoint.model_config, dtype))
    sources = _by_leaf(checkpoint)
    arrays = []
    total = sum(placement.tensor.nbytes for placement in checkpoint.placements)
    with ProgressBar(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, spec in leaves:
            name = "/".join(key.key for key in path)
            host = _aligned_empty(spec.shape, spec.dtype)
            for placement in sources.pop(name):
                _fill(host, placement)
                bar.update(placement.tensor.nbytes)
            # Waiting keeps a second host copy from piling up behind a slow transfer.
            arrays.append(jax.block_until_ready(jax.device_put(host, device)))
    if sources:
        raise ValueError(f"the decoder has no parameter {next(iter(sources))!r}, which the family table fills")
    return jax.tree_util.tree_unflatten(treedef, arrays)


def _by_leaf(checkpoint: Checkpoint) -> dict[str, list[Placement]]:
    sources: dict[str, list[Placement]] = {}
    for placement in checkpoint.placements:
        sources.setdefault(placement.leaf, []).append(placement)
    return sources


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def target_of(leaf: np.ndarray, placement: Placement) -> np.ndarray:
    """The view of a parameter's array that a tensor fills."""
    target = (leaf.transpose(placement.axes) if placement.axes else leaf)[placement.part]
    if placement.item is None:
        return target
    first, last = placement.rows
    values = math.prod((last - first, *placement.tensor.shape[1:]))
    axes = next(axes for axes in range(target.ndim) if math.prod(target.shape[axes:]) == values)
    return target[np.unravel_index(placement.item, target.shape[:axes])]


def _fill(host: np.ndarray, placement: Placement) -> None:
    """Copies a tensor, or its part, into its part of the host buffer, some rows at a time."""
    target = target_of(host, placement)
    first, last = placement.rows
    rows_each = (last - first) // target.shape[0]  # tensor rows in one entry of the part's first axis
    values_each = max(1, target.size // target.shape[0])
    step = max(1, CHUNK_VALUES // values_each)
    for start in range(0, target.shape[0], step):
        stop = min(start + step, target.shape[0])
        rows = placement.tensor.rows(first + start * rows_each, first + stop * rows_each)
        if placement.pairs is not None:
            rows = _split_pairs(rows, *placement.pairs)
        with np.errstate(over="ignore"):  # float16 overflow shows as inf logits, which end a request with an error
            target[start:stop] = rows.reshape(target[start:stop].shape)


def _split_pairs(rows: np.ndarray, head_dim: int, channel_size: int) -> np.ndarray:
    """Moves rotary channels stored as pairs (2j, 2j + 1) half a head apart (j, j + head_dim / 2)."""
    return rows.reshape(-1, head_dim // 2, 2, channel_size).swapaxes(1, 2).reshape(rows.shape)


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Warns if a stored head differs from the embedding it is tied to; the tie wins, as the config says."""
    if checkpoint.tied_head is None:
        return
    embedding, head = checkpoint.tied_head
    same = embedding.shape == head.shape and all(
        np.array_equal(left, right) for left, right in zip(_chunks(embedding), _chunks(head), strict=True)
    )
    if not same:
        warnings.warn(
            f"{checkpoint.path}: {head.name!r} differs from the embedding although the config says "
            "tie_word_embeddings=true; the embedding is used. Set tie_word_embeddings to false to use the stored head",
            stacklevel=3,
        )


def _chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    step = max(1, CHUNK_VALUES // max(1, tensor.size // tensor.shape[0]))
    for start in range(0, tensor.shape[0], step):
        yield tensor.rows(start, min(start + step, tensor.shape[0]))
