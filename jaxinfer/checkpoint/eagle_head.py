"""Files of an EAGLE head, in the layout of SafeAILab/EAGLE (versions 1 and 2).

A directory has the config.json of a model with one layer, whose "bias" says whether `fc` has one, and model.safetensors
with ``fc.weight`` ``[D, 2 D]``, ``fc.bias``, the layer's tensors without "model." before their names and without the
norm before its attention, and ``embed_tokens.weight``, a copy of the model's token table, which may be missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.hf_directory import read_json, read_tensors
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.checkpoint.load import read_leaf
from jaxinfer.checkpoint.save import part_rows
from jaxinfer.checkpoint.shards import FileTensor, header
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.checkpoint.weight_map import Placement, Slot, expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config, init_eagle
from jaxinfer.models.families.family import Family
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.typing import Params

FILE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"


def write_eagle(folder: Path, description: Checkpoint, params: Params, embedding: np.ndarray, dtype: str) -> None:
    """Writes a head into a folder that exists; config.json comes last.

    Args:
        folder: where it goes.
        description: of a model like the one it belongs to, with one layer; its weights are not read.
        params: of `EagleHead`.
        embedding: [V, D], the model's token table.
        dtype: what the tensors are written as: "float32", "bfloat16" or "float16".

    Raises:
        ValueError: no config.json can say what the layer is.
    """
    family, said = exported_config(description)
    leaves = {path: np.asarray(leaf) for path, leaf in flat(params).items()}
    tensors = {"fc.weight": leaves["fc/kernel"]}
    if "fc/bias" in leaves:
        tensors["fc.bias"] = leaves["fc/bias"]
    shapes, slots = _layer(family, description.model_config)
    for name, parts in slots.items():
        tensors[name] = np.concatenate([part_rows(name, slot, leaves[slot.leaf]) for slot in parts]).reshape(
            shapes[name]
        )
    tensors[EMBEDDING] = embedding
    files = [FileTensor(name, values.shape, dtype) for name, values in tensors.items()]
    with (folder / FILE).open("wb") as file:
        file.write(header(files))
        for tensor in files:
            values = np.ascontiguousarray(tensors[tensor.name], tensor.numpy_dtype)
            file.write(values.reshape(-1).view(np.uint8).data)
    written = {**said, "bias": "fc/bias" in leaves}
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = dtype
    write_json(folder / "config.json", written)


def read_eagle_config(folder: Path) -> tuple[ModelConfig, bool]:
    """Architecture of a head, and whether `fc` has a bias; reads no weights.

    Raises:
        ValueError: not such a directory; a tensor is missing, too many or misshapen, by name.
    """
    _, config, tensors = _described(folder)
    return config, "fc.bias" in tensors


def _described(folder: Path) -> tuple[Family, ModelConfig, dict[str, Tensor]]:
    """Its family and architecture, and its tensors by their names, which are those of a head."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder).items()}
    if "fc.weight" not in tensors:
        raise ValueError(f"{folder}: tensor fc.weight is missing, so this is no EAGLE head")
    family, config = _architecture(folder)
    size = config.hidden_size
    shapes = _layer(family, config)[0] | {"fc.weight": (size, 2 * size)}
    if "fc.bias" in tensors:
        shapes["fc.bias"] = (size,)
    _check(folder, shapes, {name: tensor for name, tensor in tensors.items() if name != EMBEDDING})
    return family, config, tensors


def _architecture(folder: Path) -> tuple[Family, ModelConfig]:
    said = {key: value for key, value in read_json(folder / "config.json").items() if key != "bias"}
    family = family_of_hf_config(said)
    return family, eagle_config(family.model_config(said))


def read_eagle(folder: Path) -> tuple[ModelConfig, dict[str, Any], np.ndarray | None]:
    """Reads a head as float32 parameters of `EagleHead`.

    Returns:
        Its architecture, the parameters (with "fc/bias" where it has one), and its copy of the token table, if any.

    Raises:
        ValueError: not such a directory; a tensor is missing, too many or misshapen, by name.
    """
    family, config, tensors = _described(folder)
    embedding = tensors.get(EMBEDDING)
    use_bias, size = "fc.bias" in tensors, config.hidden_size
    _, slots = _layer(family, config)
    placements: dict[str, list[Placement]] = {}
    for name, parts in slots.items():
        for slot in parts:
            placements.setdefault(slot.leaf, []).append(Placement(tensors[name], slot))
    leaves = {"fc/kernel": tensors["fc.weight"].rows(0, size).astype(np.float32)}
    if use_bias:
        leaves["fc/bias"] = tensors["fc.bias"].rows(0, size).reshape(size).astype(np.float32)
    specs = _specs(config, use_bias)
    for path, found in placements.items():
        leaves[path] = read_leaf(specs[path], found, lambda count: None)
    table = None if embedding is None else embedding.rows(0, config.vocab_size).astype(np.float32)
    return config, nested({path: leaves[path] for path in specs}), table


def _layer(family: Family, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Slot]]]:
    """Shape of each tensor of the layer by its name, and the parts of parameters that it is made of, in the order of
    its rows."""
    shapes: dict[str, tuple[int, ...]] = {}
    slots: dict[str, list[Slot]] = {}
    for full_name, weight, slot in expected_weights(family, config, "hf"):
        if slot.leaf.startswith("layers_0/") and not slot.leaf.startswith("layers_0/attn_norm/"):
            name = full_name.removeprefix("model.")
            shapes[name] = weight.tensor_shape(config)
            slots.setdefault(name, []).append(slot)
    return shapes, {name: sorted(parts, key=lambda slot: slot.first_row) for name, parts in slots.items()}


def _specs(config: ModelConfig, use_bias: bool) -> dict[str, jax.ShapeDtypeStruct]:
    return flat(jax.eval_shape(lambda: init_eagle(config, jax.random.key(0), use_bias=use_bias)))


def _check(folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} {list(shape)} is missing, so this is no EAGLE head")
        if tensors[name].shape != shape:
            raise ValueError(f"{folder}: tensor {name} is {list(tensors[name].shape)}; it must be {list(shape)}")
    extra = sorted(set(tensors) - set(shapes))
    if extra:
        raise ValueError(
            f"{folder}: tensor {extra[0]} has no place in an EAGLE head of versions 1 and 2, which is one layer "
            "without a norm before its attention"
        )
