"""What a training run goes on from after it was killed: its state in Orbax's format, a folder a checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint import orbax_io
from jaxinfer.checkpoint.output_directory import output_directory

KEPT = 2
"""Checkpoints that are kept: the last, and the one before it."""
PREFIX = "step_"


def save_state(folder: Path, step: int, state: Any) -> None:
    """Writes `state` as ``folder/step_N``, which appears when it is whole, and removes all but the last `KEPT`.

    Args:
        folder: of the run's checkpoints.
        step: steps done, N.
        state: tree of jax.Arrays.

    Raises:
        OSError: it cannot be written; the checkpoints before are left as they were.
    """
    leaves = {name: jnp.atleast_1d(leaf) for name, leaf in _leaves(state).items()}
    if (folder / f"{PREFIX}{step}").exists():
        return
    with output_directory(folder / f"{PREFIX}{step}") as partial:
        orbax_io.write_arrays(partial / "state", leaves)
    for old in saved_steps(folder)[:-KEPT]:
        shutil.rmtree(folder / f"{PREFIX}{old}")


def saved_steps(folder: Path) -> list[int]:
    """The steps that there is a whole checkpoint of, the last at the end."""
    if not folder.is_dir():
        return []
    names = [entry.name.removeprefix(PREFIX) for entry in folder.iterdir() if entry.name.startswith(PREFIX)]
    return sorted(int(name) for name in names if name.isdecimal())


def restore_state(folder: Path, step: int, like: Any) -> Any:
    """Reads a checkpoint, bit for bit what was saved.

    Args:
        folder: of the run's checkpoints.
        step: one of `saved_steps`.
        like: a tree of arrays of those shapes; the result lies where its arrays lie.

    Raises:
        ValueError: it is damaged, or of other shapes.
    """
    directory = folder / f"{PREFIX}{step}" / "state"
    wanted = _leaves(like)
    read = {names[0]: arrays[0] for names, arrays in orbax_io.read_groups(directory, [(name,) for name in wanted])}
    restored = []
    for name, leaf in wanted.items():
        found = read[name]
        if found.size != np.prod(leaf.shape, dtype=int) or found.dtype != leaf.dtype:
            raise ValueError(
                f"{directory}: {name} is {found.dtype}{list(found.shape)}, and this run's is "
                f"{leaf.dtype}{list(leaf.shape)}; remove the folder to start again"
            )
        restored.append(jax.device_put(found.reshape(leaf.shape), leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their number: optimizers' states have attributes and places where parameters have names."""
    return {f"leaf_{number:05}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
