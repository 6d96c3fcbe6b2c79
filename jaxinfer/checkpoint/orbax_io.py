"""Trees on disk through Orbax: leaves stream in and out a few at a time."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.leaf_shapes import flat, nested

BATCH_BYTES = 64 << 20  # what is read or written in one go, unless one leaf is larger
CHUNK_BYTES = 64 << 20  # pieces of a leaf that are compressed, and can be read, by themselves
Group = tuple[str, ...]


def tree_leaves(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every array of an Orbax checkpoint, from its metadata.

    Raises:
        ValueError: the metadata cannot be read.
    """
    return _arrays(_metadata(directory))


def read_groups(directory: Path, groups: Iterable[Group]) -> Iterator[tuple[Group, tuple[np.ndarray, ...]]]:
    """Reads arrays of an Orbax checkpoint, nothing else of it.

    Args:
        directory: holds the tree.
        groups: paths that are wanted together, one group after the other.

    Yields:
        Each group with its arrays. Those of some more groups are held beside them, up to `BATCH_BYTES`.

    Raises:
        ValueError: the data is damaged or gone.
    """
    import orbax.checkpoint as ocp

    tree = _metadata(directory)
    sizes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in _arrays(tree).items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for batch in _batches(groups, sizes):
            wanted = {path for group in batch for path in group}
            item = _select(tree, wanted, 0, ocp.PLACEHOLDER)
            args = _select(tree, wanted, ocp.RestoreArgs(restore_type=np.ndarray), ocp.RestoreArgs())
            try:
                restored = flat(
                    checkpointer.restore(directory.resolve(), args=ocp.args.PyTreeRestore(item=item, restore_args=args))
                )
            except Exception as error:  # tensorstore and Orbax raise a dozen kinds
                raise ValueError(f"{directory} cannot be read, at {batch[0][0]!r}: {error}") from error
            for group in batch:
                yield group, tuple(restored[path] for path in group)


def write_stream(directory: Path, specs: Mapping[str, Any], stream: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays that are made one after the other.

    Args:
        directory: does not exist yet.
        specs: path -> shape and dtype of all the leaves.
        stream: path and array of each of them, in any order.
    """
    from orbax.checkpoint import type_handlers

    from jaxinfer.checkpoint.orbax_stream import StreamedLeaf, StreamHandler

    handler = StreamHandler(stream, BATCH_BYTES)
    leaves = nested({path: StreamedLeaf(path, spec) for path, spec in specs.items()})
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler()), (StreamedLeaf, handler)
    )
    _save(directory, leaves, type_handler_registry=registry)


def write_arrays(directory: Path, tree: Any) -> None:
    """Writes a tree of jax.Arrays, sharded ones shard by shard."""
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tree))
    # What is copied to the host ahead of the writing; Orbax counts in whole GB and wants more than the largest leaf.
    _save(directory, tree, save_device_host_concurrent_gb=largest // 10**9 + 1)


def _save(directory: Path, tree: Any, **options: Any) -> None:
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(directory.resolve(), args=ocp.args.PyTreeSave(tree, save_args=args))


def _metadata(directory: Path) -> Any:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            metadata = checkpointer.metadata(directory.resolve()).item_metadata  # Orbax wants absolute paths
        except Exception as error:
            raise ValueError(f"{directory} cannot be read as an Orbax checkpoint: {error}") from error
    if metadata is None:  # Orbax has logged why
        raise ValueError(f"{directory} is not an Orbax checkpoint of a tree, or is damaged")
    return metadata.tree


def _arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a metadata tree; scalars, texts and empty nodes are left out."""
    return {
        path: jax.ShapeDtypeStruct(tuple(entry.shape), np.dtype(entry.dtype))
        for path, entry in flat(tree).items()
        if getattr(entry, "shape", None) is not None and getattr(entry, "dtype", None) is not None
    }


def _batches(groups: Iterable[Group], sizes: Mapping[str, int]) -> Iterator[list[Group]]:
    batch: list[Group] = []
    held = 0
    for group in groups:
        size = sum(sizes[path] for path in group)
        if batch and held + size > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(group)
        held += size
    if batch:
        yield batch


def _select(tree: Any, wanted: set[str], chosen: Any, other: Any) -> Any:
    """The tree with `chosen` at the wanted paths and `other` at the rest."""
    paths = iter(flat(tree))
    return jax.tree.map(lambda leaf: chosen if next(paths) in wanted else other, tree)
