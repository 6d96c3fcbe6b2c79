"""Hugging Face model directories: config.json, generation_config.json and the safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.safetensors import read_safetensors
from jaxinfer.checkpoint.tensor import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping.

    Raises:
        ValueError: it is not JSON or not a mapping, naming the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def has_weights(directory: Path) -> bool:
    """Whether a file of it looks like weights, of a kind that is read or refused."""
    return any(path.suffix in (".safetensors", ".gguf", *PICKLES) for path in directory.iterdir())


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Reads the headers of a directory's safetensors files; where there is an index, it decides.

    Returns:
        The tensors by name.

    Raises:
        ValueError: no safetensors, only pickle files, a shard missing or corrupt, or a tensor not in its shard.
    """
    if (directory / INDEX).is_file():
        return _read_indexed(directory)
    if (directory / SINGLE).is_file():
        return read_safetensors(directory / SINGLE)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1 and "-of-" not in files[0].name:
        return read_safetensors(files[0])
    if files:
        raise ValueError(f"{directory} has {len(files)} safetensors shards but no {INDEX}; download it too")
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ValueError(pickle_refusal(directory / pickles[0]))
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    hint = f"; for its GGUF file give {directory / ggufs[0]}" if ggufs else ""
    raise ValueError(f"{directory} has no *.safetensors file; it is incomplete or not a model directory{hint}")


def pickle_refusal(path: Path) -> str:
    """Why a pickle file is not read, and the way out."""
    return (
        f"{path} is a pickle file, and unpickling can run any code it contains; it is refused. Convert the "
        "checkpoint to safetensors (transformers: model.save_pretrained) or use a copy that has them"
    )


def _read_indexed(directory: Path) -> dict[str, Tensor]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{directory / INDEX} is corrupt: it has no 'weight_map' from tensor names to file names")
    shards: dict[str, dict[str, Tensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{directory / INDEX} names the shard {shard!r}, which is not a file of that directory")
        if not (directory / shard).is_file():
            raise ValueError(f"{directory / shard} is missing; {INDEX} needs it. Download the checkpoint again")
        shards[shard] = read_safetensors(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{directory / shard} has no tensor {name!r}, which {INDEX} says is there")
    return {name: shards[shard][name] for name, shard in weight_map.items()}
