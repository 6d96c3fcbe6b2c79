"""Streaming a checkpoint's weights to the device, a parameter at a time."""

import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import DTYPES, Checkpoint, open_checkpoint
from jaxinfer.checkpoint.packed_module import PackedModule
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import Placement
from jaxinfer.models.config import ModelConfig
from jaxinfer.progress_bar import ProgressBar

if TYPE_CHECKING:
    from jaxinfer.quant.plan import QuantPlan

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
    checkpoint: Checkpoint,
    dtype: str,
    *,
    plan: "QuantPlan | None" = None,
    device: Any = None,
    put: Callable[[str, Any], Any] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Loads the weights.

    Beside the parameters themselves at most one of them and a few chunks are in memory.

    Args:
        checkpoint: an opened checkpoint.
        dtype: type of every parameter that is not quantised: "float32", "bfloat16" or "float16".
        plan: which parameters are quantised as they are read, and how; None for none.
        device: where they go: a `jax.Device`, a `jax.sharding.Sharding`, or a tree of them like the parameters; None is
            JAX's default device.
        put: brings a parameter, given with its path, from the host to its devices, in place of `device`.
        progress: show a progress bar.

    Returns:
        The parameter tree of ``jaxinfer.models.decoder``.

    Raises:
        ValueError: a file changed since it was opened, or a value to be quantised is not finite.
    """
    import jax

    from jaxinfer.checkpoint.leaf_shapes import leaf_shapes, leaf_targets, nested
    from jaxinfer.checkpoint.quantised import read_quantised

    targets = leaf_targets(device, leaf_shapes(checkpoint.model_config, dtype))
    what = "Loading weights" if plan is None else f"Loading weights as {plan.method}"
    with ProgressBar(total=stored_bytes(checkpoint), desc=what, unit="B", unit_scale=True, disable=not progress) as bar:
        # Waiting keeps a second host copy from piling up behind a slow transfer.
        arrays = {
            name: jax.block_until_ready(jax.device_put(host, targets[name]) if put is None else put(name, host))
            for name, host in (
                read_leaves(checkpoint, dtype, on_bytes=bar.update)
                if plan is None
                else read_quantised(checkpoint, dtype, plan, on_bytes=bar.update)
            )
        }
    return nested(arrays)


def load_checkpoint(
    path: str | Path, *, dtype: str | None = None, sharding: Any = None, progress: bool = False
) -> tuple[dict[str, Any], ModelConfig]:
    """Loads parameters and their architecture from anything that `LLM` can be pointed at on disk.

    Args:
        path: a GGUF file, a Hugging Face directory, or what `save_checkpoint` wrote.
        dtype: "float32", "bfloat16" or "float16"; None takes the checkpoint's own.
        sharding: where the parameters go, as for `load_params`.
        progress: show a progress bar.

    Raises:
        ValueError: it does not load; names file or tensor.
    """
    checkpoint = open_checkpoint(Path(path).expanduser())
    wanted = checkpoint.dtype if dtype is None else resolve_dtype(dtype, checkpoint.dtype, "any")
    return load_params(checkpoint, wanted, device=sharding, progress=progress), checkpoint.model_config


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all the values as they are stored; what `read_leaves` reports adds up to it."""
    if checkpoint.leaves is not None:
        return sum(leaf.nbytes for leaf in checkpoint.leaves.values())
    return sum(placement.nbytes for placement in checkpoint.placements)


def read_leaves(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    wide: Collection[str] = (),
    skipped: Collection[str] = (),
    on_bytes: Callable[[int], object] = lambda count: None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads the parameters one after the other, in the order of the tree's leaves.

    Args:
        checkpoint: an opened checkpoint.
        dtype: "float32", "bfloat16" or "float16".
        wide: paths of parameters that are read in float32 all the same.
        skipped: paths of parameters that are not read.
        on_bytes: told the stored bytes of each piece that has been read.

    Yields:
        Path of the leaf, and its values in an array of its own; most are aligned so that a CPU device adopts them.

    Raises:
        ValueError: a file changed since it was opened, or parameters are missing, too many or misshapen.
    """
    from jaxinfer.checkpoint.leaf_shapes import leaf_shapes

    specs = leaf_shapes(checkpoint.model_config, dtype)
    exact = leaf_shapes(checkpoint.model_config, "float32") if wide else {}
    specs |= {name: exact[name] for name in wide}
    if checkpoint.leaves is not None:
        from jaxinfer.checkpoint.orbax import read_own_leaves

        yield from read_own_leaves(checkpoint.path, specs, on_bytes)
        return
    _check_tied_head(checkpoint)
    sources = placements_by_leaf(checkpoint)
    for name, spec in specs.items():
        if name in skipped:
            del sources[name]
            continue
        yield name, read_leaf(spec, sources.pop(name), on_bytes)
    if sources:
        raise ValueError(f"the decoder has no parameter {next(iter(sources))!r}, which the family table fills")


def read_leaf(spec: Any, placements: list[Placement], on_bytes: Callable[[int], object]) -> np.ndarray:
    """Reads one parameter.

    Args:
        spec: its shape, and the dtype it is to have.
        placements: of `placements_by_leaf`.
        on_bytes: told the stored bytes of each tensor that has been read.
    """
    host = _aligned_empty(spec.shape, spec.dtype)
    for placement in placements:
        _fill(host, placement)
        on_bytes(placement.nbytes)
    return host


def placements_by_leaf(checkpoint: Checkpoint) -> dict[str, list[Placement]]:
    """Path of a parameter -> the tensors it is made of; empty for an Orbax directory."""
    sources: dict[str, list[Placement]] = {}
    for placement in checkpoint.placements:
        sources.setdefault(placement.slot.leaf, []).append(placement)
    return sources


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _fill(host: np.ndarray, placement: Placement) -> None:
    """Copies a tensor, or its part, into its part of the host buffer, some rows at a time."""
    slot = placement.slot
    target = slot.view(host)
    rows_each = slot.shape[0] // target.shape[0]  # tensor rows in one entry of the part's first axis
    values_each = max(1, target.size // target.shape[0])
    step = max(1, CHUNK_VALUES // values_each)
    if isinstance(placement.tensor, PackedModule):
        step = target.shape[0]  # it is unpacked as a whole
    for start in range(0, target.shape[0], step):
        stop = min(start + step, target.shape[0])
        rows = placement.tensor.rows(slot.first_row + start * rows_each, slot.first_row + stop * rows_each)
        if slot.pairs is not None:
            rows = split_pairs(rows, *slot.pairs)
        if slot.offset:
            rows = rows.astype(np.float32) + np.float32(slot.offset)
        with np.errstate(over="ignore"):  # float16 overflow shows as inf logits, which end a request with an error
            target[start:stop] = rows.reshape(target[start:stop].shape)


def split_pairs(rows: np.ndarray, head_dim: int, channel_size: int) -> np.ndarray:
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
            stacklevel=4,
        )


def _chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    step = max(1, CHUNK_VALUES // max(1, tensor.size // tensor.shape[0]))
    for start in range(0, tensor.shape[0], step):
        yield tensor.rows(start, min(start + step, tensor.shape[0]))
