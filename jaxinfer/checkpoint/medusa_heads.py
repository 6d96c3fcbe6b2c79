"""Files of Medusa heads, in the layout of FasterDecoding/Medusa.

A directory has a config.json with `medusa_num_heads` and `medusa_num_layers`, and the tensors ``{head}.{layer}.linear
.weight`` and ``.bias`` of the residual blocks; ``{head}.{layers}.weight`` is a head's own output matrix, without which
the heads share the model's. They are in medusa_lm_head.safetensors; the pickled medusa_lm_head.pt is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.hf_directory import pickle_refusal, read_json
from jaxinfer.checkpoint.safetensors import read_safetensors
from jaxinfer.checkpoint.shards import FileTensor, header
from jaxinfer.models.medusa import MedusaConfig
from jaxinfer.typing import Params

FILE, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
PREFIXES = ("medusa_head.", "medusa_heads.")
"""What some files have before the names."""


def write_medusa(folder: Path, config: MedusaConfig, params: Params, base: str, dtype: str) -> None:
    """Writes heads into a folder that exists; config.json comes last.

    Args:
        folder: where they go.
        config: of the heads.
        params: of `MedusaHeads`.
        base: name or path of the model they belong to.
        dtype: what they are written as: "float32", "bfloat16" or "float16".
    """
    tensors = {name: np.asarray(_leaf(params, path)) for name, path in _names(config).items()}
    files = [FileTensor(name, values.shape, dtype) for name, values in tensors.items()]
    with (folder / FILE).open("wb") as file:
        file.write(header(files))
        for tensor in files:
            values = np.ascontiguousarray(tensors[tensor.name], tensor.numpy_dtype)
            file.write(values.reshape(-1).view(np.uint8).data)
    said = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "base_model_name_or_path": base,
        "torch_dtype": dtype,
    }
    write_json(folder / "config.json", said)


def read_medusa(folder: Path, vocab_size: int | None = None) -> tuple[MedusaConfig, dict[str, Any]]:
    """Reads heads as float32 parameters of `MedusaHeads`.

    Args:
        folder: a directory of this layout.
        vocab_size: of the model they belong to; needed where neither the config nor a tensor says it.

    Raises:
        ValueError: not such a directory; a tensor is missing, too many or misshapen, by name.
    """
    config, tensors = _describe(folder, vocab_size)
    return config, _read(config, tensors)


def read_medusa_config(folder: Path, vocab_size: int | None = None) -> MedusaConfig:
    """The sizes of heads, without reading them; as `read_medusa`."""
    return _describe(folder, vocab_size)[0]


def _describe(folder: Path, vocab_size: int | None) -> tuple[MedusaConfig, dict[str, Any]]:
    said = read_json(folder / "config.json")
    path = next((path for path in (folder / FILE, folder / "model.safetensors") if path.is_file()), None)
    if path is None:
        if (folder / PICKLE).is_file():
            raise ValueError(pickle_refusal(folder / PICKLE))
        raise ValueError(f"{folder} has no {FILE}, so there are no Medusa heads in it")
    tensors = {_plain(name): tensor for name, tensor in read_safetensors(path).items()}
    heads, layers = (_count(folder, said, key) for key in ("medusa_num_heads", "medusa_num_layers"))
    first = tensors.get("0.0.linear.weight")
    if first is None or len(first.shape) != 2:
        raise ValueError(f"{path} has no matrix '0.0.linear.weight'; it has {', '.join(list(tensors)[:3])}")
    own = f"0.{layers}.weight" in tensors
    vocab = tensors[f"0.{layers}.weight"].shape[0] if own else said.get("vocab_size", vocab_size)
    if vocab is None:
        raise ValueError(f"{folder / 'config.json'} says no vocab_size; give that of the model")
    config = MedusaConfig(first.shape[0], vocab, heads, layers, own)
    _check(path, config, tensors)
    return config, tensors


def _check(path: Path, config: MedusaConfig, tensors: Mapping[str, Any]) -> None:
    names = _names(config)
    differing = sorted(set(names) ^ set(tensors))
    if differing:
        what = "is missing" if differing[0] in names else "has no place in the heads that config.json describes"
        raise ValueError(f"{path}: tensor {differing[0]!r} {what}")
    size = config.hidden_size
    for name, leaf in names.items():
        wanted = {"bias": (size,)}.get(leaf[-1], (config.vocab_size if leaf[1] == "lm_head" else size, size))
        if tensors[name].shape != wanted:
            raise ValueError(f"{path}: tensor {name!r} is {list(tensors[name].shape)}; it must be {list(wanted)}")


def _read(config: MedusaConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, leaf in _names(config).items():
        node, tensor = params, tensors[name]
        for key in leaf[:-1]:
            node = node.setdefault(key, {})
        node[leaf[-1]] = tensor.rows(0, tensor.shape[0]).reshape(tensor.shape).astype(np.float32)
    return params


def _names(config: MedusaConfig) -> dict[str, tuple[str, str, str]]:
    """Name in the file -> path of the parameter."""
    found: dict[str, tuple[str, str, str]] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            place = f"heads_{head}", f"blocks_{layer}"
            found[f"{head}.{layer}.linear.weight"] = (*place, "kernel")
            found[f"{head}.{layer}.linear.bias"] = (*place, "bias")
        if config.own_heads:
            found[f"{head}.{config.num_layers}.weight"] = (f"heads_{head}", "lm_head", "kernel")
    return found


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    node: Any = params
    for key in path:
        node = node[key]
    return node


def _plain(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def _count(folder: Path, said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{folder / 'config.json'}: {key}={value!r} must be a number from 1 up")
    return value
