"""Orbax checkpoints: saving parameters as a model directory, and loading them, also from a training run."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint import orbax_io
from jaxinfer.checkpoint.leaf_shapes import describe, flat, leaf_shapes, leaf_targets, nested
from jaxinfer.checkpoint.name_map import NameMap, Sources, resolve_names
from jaxinfer.checkpoint.orbax_directory import (
    DESCRIPTION,
    DTYPES,
    OWN_FILES,
    PARAMS,
    OrbaxModel,
    StoredLeaf,
    read_description,
)
from jaxinfer.checkpoint.output_directory import output_directory
from jaxinfer.checkpoint.packed_module import listed
from jaxinfer.checkpoint.tokenizer_files import write_tokenizer
from jaxinfer.models.config import ModelConfig
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.typing import Params

Specs = Mapping[str, jax.ShapeDtypeStruct]
# A step of a training run: "1000", "step_1000", "checkpoint-1000".
STEP = re.compile(r"(?:\w+[-_])?(\d+)")


def save_checkpoint(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    tokenizer: str | Path | None = None,
    eos_token_ids: Collection[int] = (),
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Saves parameters as a directory that `LLM(path)` serves; `path/params` is an ordinary Orbax checkpoint.

    The directory appears when everything is written; a process killed before leaves nothing that loads, and the next
    save to the same path removes what it left.

    Args:
        path: a directory that does not exist yet or is empty.
        params: tree of `jaxinfer.models.decoder.init_params`; jax.Arrays, sharded ones too, or numpy arrays.
        config: the architecture.
        tokenizer: model directory or GGUF file whose tokenizer and chat template are written beside them; without one
            prompts must be token ids.
        eos_token_ids: ids that end a generation, beside the tokenizer's own.
        generation_config: sampling defaults by Hugging Face's names.

    Raises:
        ValueError: `path` is not free, or the parameters are not those of `config`; names parameter and both shapes.
    """
    if jax.process_count() > 1:
        raise ValueError("save_checkpoint runs in one process; gather the parameters, or save them with Orbax itself")
    leaves = flat(params)
    _check_params(leaves, config)
    model = _description(leaves, config, frozenset(map(int, eos_token_ids)))
    with output_directory(path) as folder:
        if all(isinstance(leaf, jax.Array) for leaf in leaves.values()):
            orbax_io.write_arrays(folder / PARAMS, nested(leaves))
        else:
            orbax_io.write_stream(folder / PARAMS, leaves, ((name, np.asarray(leaf)) for name, leaf in leaves.items()))
        if tokenizer is not None:
            write_tokenizer(Path(tokenizer), folder)
        write_description(folder, model, generation_config)


def write_description(folder: Path, model: OrbaxModel, generation_config: Mapping[str, Any] | None) -> None:
    """Writes the small files beside the parameters; that by which the directory is known comes last."""
    if generation_config:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation_config), indent=2), encoding="utf-8")
    (folder / DESCRIPTION).write_text(json.dumps(model.as_json(), indent=2), encoding="utf-8")


def load_orbax(
    path: str | Path,
    config: ModelConfig,
    name_map: NameMap | None = None,
    *,
    ignore: Collection[str] = (),
    dtype: str | None = None,
    sharding: Any = None,
    step: int | None = None,
    progress: bool = False,
) -> Params:
    """Loads parameters from an Orbax checkpoint, for instance of a Flax training run; its other contents stay on disk.

    Args:
        path: what `save_checkpoint` wrote, a checkpoint of Orbax's checkpointers, or the directory of a
            CheckpointManager.
        config: the architecture.
        name_map: our parameter path -> path in the checkpoint, or `Sources` of several paths and a function that joins
            them: a function, or a mapping in whose keys "layers_{i}" stands for every layer. None for a tree that is
            the decoder's own, at the root or under "params" (a TrainState's, for instance).
        ignore: patterns (`*`, `?`) of paths that are left out on purpose, of those that lie in the same branch as the
            parameters.
        dtype: "float32", "bfloat16" or "float16"; None takes the one that most values are stored in.
        sharding: where the parameters go: one `jax.sharding.Sharding` or device for all, or a tree of them like the
            parameters; None is JAX's default device.
        step: of a CheckpointManager's directory; None takes the last.
        progress: show a progress bar.

    Returns:
        The parameter tree of ``jaxinfer.models.decoder``; beside it at most some arrays of the checkpoint (64 MB, or
        those that make one parameter) are in memory.

    Raises:
        ValueError: not an Orbax checkpoint; a parameter is missing, too many or misshapen (with both shapes); or the
            name map does not fit.
    """
    directory = _find_tree(Path(path).expanduser(), step)
    stored = orbax_io.tree_leaves(directory)
    specs = leaf_shapes(config, np.float32)
    sources = _own_names(directory, specs, stored) if name_map is None else resolve_names(name_map, specs)
    _check_sources(directory, specs, sources, stored, ignore)
    read = {path: stored[path] for source in sources.values() for path in source.paths}
    wanted = np.dtype(dtype or _most_common(read))
    if wanted.name not in DTYPES:
        raise ValueError(f"dtype={wanted.name!r} must be one of {', '.join(DTYPES)}")
    specs = {name: jax.ShapeDtypeStruct(spec.shape, wanted) for name, spec in specs.items()}
    targets = leaf_targets(sharding, specs)
    params = {}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in read.values())
    with ProgressBar(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for name, array in _read(directory, specs, sources, bar.update):
            params[name] = jax.block_until_ready(jax.device_put(array, targets[name]))
    return nested({name: params[name] for name in specs})


def read_own_leaves(
    path: Path,
    specs: Specs,
    on_bytes: Callable[[int], object] = lambda count: None,
    *,
    some: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a model directory's parameters in the order of `specs`, in the dtypes it says.

    Args:
        path: the model directory.
        specs: path of a parameter -> its shape and the dtype it is to have.
        on_bytes: told the bytes of each piece that has been read.
        some: whether `specs` may leave some of the model's parameters out.

    Raises:
        ValueError: a parameter is missing, too many or misshapen; names it and both shapes.
    """
    directory = path / PARAMS
    stored = orbax_io.tree_leaves(directory)
    sources = {name: Sources(name) for name in specs}
    _check_sources(directory, specs, sources, stored, ("*",) if some else ())
    yield from _read(directory, specs, sources, on_bytes)


def _read(
    directory: Path,
    specs: Specs,
    sources: Mapping[str, Sources],
    on_bytes: Callable[[int], object],
) -> Iterator[tuple[str, np.ndarray]]:
    by_paths: dict[tuple[str, ...], list[str]] = {}  # layers that are stacked in one array are cut from one reading
    for name, source in sources.items():
        by_paths.setdefault(tuple(source.paths), []).append(name)
    for paths, arrays in orbax_io.read_groups(directory, by_paths):
        for name in by_paths[paths]:
            transform = sources[name].transform
            made = arrays[0] if transform is None else np.asarray(transform(*arrays))
            if made.shape != specs[name].shape:
                raise ValueError(
                    f"{directory}: parameter {name!r}, made from {', '.join(map(repr, paths))} "
                    f"({', '.join(map(describe, arrays))}), has the shape {list(made.shape)}, but this model needs "
                    f"{list(specs[name].shape)}"
                )
            with np.errstate(over="ignore"):  # float16 overflow shows as inf logits, which end a request with an error
                yield name, made.astype(specs[name].dtype, copy=False)
        on_bytes(sum(array.nbytes for array in arrays))


def _find_tree(path: Path, step: int | None) -> Path:
    """The directory that holds the tree itself."""
    if (path / DESCRIPTION).is_file():
        read_description(path)
        return path / PARAMS
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; give an Orbax checkpoint")
    if (path / OWN_FILES[0]).is_file():
        return path
    inside = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and ".orbax-checkpoint-tmp" not in entry.name]
    items = [entry for entry in inside if (entry / OWN_FILES[0]).is_file()]
    steps = {int(match[1]): entry for entry in inside if (match := STEP.fullmatch(entry.name))}
    if steps:
        if step is not None and step not in steps:
            raise ValueError(f"step={step} is not in {path}; it has {', '.join(map(str, sorted(steps)))}")
        return _find_tree(steps[max(steps) if step is None else step], None)
    if len(items) > 1:
        raise ValueError(f"{path} has several trees; give one of them: {', '.join(item.name for item in items)}")
    if not items:
        raise ValueError(f"{path} is no finished Orbax checkpoint: neither it nor a folder in it has {OWN_FILES[0]}")
    return items[0]


def _own_names(directory: Path, specs: Specs, stored: Specs) -> dict[str, Sources]:
    """The decoder's tree where it lies: at the root, or under a branch "params"."""
    first = "embed/embedding"
    prefixes = [path.removesuffix(first) for path in stored if f"/{path}".endswith(f"/{first}")]
    own = [prefix for prefix in prefixes if not prefix or prefix.endswith("params/")]
    own = [prefix for prefix in own if not any(part.startswith("opt") for part in prefix.split("/"))]
    if not own:
        raise ValueError(
            f"{directory} does not hold the decoder's own tree, at its root or under 'params'; its arrays are "
            f"{listed([f'{path} {describe(leaf)}' for path, leaf in stored.items()])}. Give a name_map from "
            f"parameters ({', '.join(list(specs)[:2])}, ...) to them"
        )
    prefix = min(own, key=len)
    return {name: Sources(prefix + name) for name in specs}


def _check_sources(
    directory: Path, specs: Specs, sources: Mapping[str, Sources], stored: Specs, ignore: Collection[str]
) -> None:
    """Raises ValueError for what is missing, misshapen, or left over in the branch that is read."""
    read = {path for source in sources.values() for path in source.paths}
    missing, misshapen = [], []
    for name, source in sources.items():
        absent = [path for path in source.paths if path not in stored]
        if absent:
            missing.append(f"{absent[0]} (for {name} {list(specs[name].shape)})")
        elif source.transform is None and stored[source.paths[0]].shape != specs[name].shape:
            shape = list(stored[source.paths[0]].shape)
            misshapen.append(f"{source.paths[0]} is {shape} but {name} is {list(specs[name].shape)} in this model")
    branch = _branch(read)
    extra = [
        f"{path} {describe(leaf)}"
        for path, leaf in stored.items()
        if path.startswith(branch) and path not in read and not any(fnmatchcase(path, pattern) for pattern in ignore)
    ]
    if missing:
        beside = f"; nobody reads {listed(extra)}" if extra else ""
        raise ValueError(f"{directory}: {listed(missing)} missing from the checkpoint{beside}")
    if misshapen:
        raise ValueError(f"{directory}: {listed(misshapen)}")
    if extra:
        raise ValueError(
            f"{directory}: {listed(extra)} has no place in the model; map it, or leave it out with ignore=[...]"
        )


def _branch(paths: Collection[str]) -> str:
    """The longest "a/b/" that all paths begin with."""
    first, last = min(paths).split("/")[:-1], max(paths).split("/")[:-1]
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return "".join(f"{part}/" for part in first[:same])


def _check_params(leaves: Mapping[str, Any], config: ModelConfig) -> None:
    specs = leaf_shapes(config, np.float32)
    if leaves and all(name.startswith("params/") for name in leaves):
        raise ValueError("params has the single entry 'params'; pass variables['params'], the parameters themselves")
    for name in specs:
        if name not in leaves:
            raise ValueError(f"params has no {name!r} {list(specs[name].shape)}, which this model needs")
    for name, leaf in leaves.items():
        if name not in specs:
            raise ValueError(f"params has {name!r}, which this model does not have")
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"params at {name!r} is {type(leaf).__name__}, not an array")
        if leaf.shape != specs[name].shape:
            raise ValueError(f"params at {name!r} is {list(leaf.shape)}; this model needs {list(specs[name].shape)}")
        if leaf.dtype.name not in DTYPES:
            raise ValueError(f"params at {name!r} has dtype {leaf.dtype}; it must be one of {', '.join(DTYPES)}")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"params at {name!r} has been deleted, probably donated to a jitted function; save what that returned"
            )


def _description(leaves: Mapping[str, Any], config: ModelConfig, eos_token_ids: frozenset[int]) -> OrbaxModel:
    stored = {name: StoredLeaf(tuple(leaf.shape), leaf.dtype.name) for name, leaf in leaves.items()}
    return OrbaxModel(config, _most_common(leaves), stored, eos_token_ids)


def _most_common(leaves: Mapping[str, Any]) -> str:
    """The dtype of most of the values; float32 where they are of none that we compute in."""
    sizes: dict[str, int] = {}
    for leaf in leaves.values():
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.size
    most = max(sizes, key=sizes.__getitem__)
    return most if most in DTYPES else "float32"
