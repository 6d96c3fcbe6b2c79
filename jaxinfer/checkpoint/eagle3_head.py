"""Files of an EAGLE-3 head, in the layout of SafeAILab/EAGLE that vLLM and SGLang read, too.

config.json is that of a Llama model with one layer and ``draft_vocab_size``. model.safetensors has ``fc.weight``
``[D, 3 D']``; the layer as ``midlayer.*`` (or ``layers.0.*``): ``input_layernorm`` of the embedding, ``hidden_norm`` of
the feature, ``self_attn.{q,k,v}_proj`` with 2 D inputs, ``self_attn.o_proj``, ``post_attention_layernorm`` and ``mlp``;
``norm.weight``; ``lm_head.weight`` ``[U, D]``; ``d2t`` int64[U], what is added to a guess's number to make it a token;
``t2d`` bool[V], which tokens can be guessed; and perhaps ``embed_tokens.weight`` ``[V, D]``.

Which hidden states it is given: ``eagle_aux_hidden_state_layer_ids`` counts what goes into layers, as vLLM does;
within ``eagle_config`` it counts what comes out of them, as SGLang does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.convert import write_json
from jaxinfer.checkpoint.hf_directory import read_json, read_tensors
from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.checkpoint.shards import FileTensor, header
from jaxinfer.checkpoint.tensor import Tensor
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Config, default_taps
from jaxinfer.models.families.hf_config import flag, size
from jaxinfer.models.families.llama import model_config
from jaxinfer.typing import Params

FILE = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
TAPS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
_VECTORS = {
    "midlayer.input_layernorm.weight": "layers_0/embed_norm/scale",
    "midlayer.hidden_norm.weight": "layers_0/feature_norm/scale",
    "midlayer.post_attention_layernorm.weight": "layers_0/mlp_norm/scale",
    "norm.weight": "final_norm/scale",
}
_CONFIG_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class Eagle3Checkpoint:
    """What a directory holds.

    Attributes:
        config: of the head.
        params: float32 numpy arrays in the tree of `Eagle3Head`.
        token_ids: int32[U], the model's token of each guess.
        embedding: its copy of the model's token table [V, D], which the head need not have; None where there is none,
            and where the table is the head's own (then it is among `params`).
    """

    config: Eagle3Config
    params: Params
    token_ids: np.ndarray
    embedding: np.ndarray | None = None


def write_eagle3(
    folder: Path, config: Eagle3Config, params: Params, token_ids: Sequence[int] | np.ndarray, dtype: str
) -> None:
    """Writes a head into a folder that exists; config.json comes last.

    Args:
        folder: where it goes.
        config: of the head.
        params: of `Eagle3Head`.
        token_ids: int[U], ascending: the model's token of each guess.
        dtype: what the matrices are written as: "float32", "bfloat16" or "float16".

    Raises:
        ValueError: the token ids do not fit, or the layer is of a kind that the layout has no place for.
    """
    ids = _checked_ids(config, np.asarray(token_ids))
    said = _said(config, dtype)
    if _layer_config(said) != config.layer:
        raise ValueError(
            "the layout of EAGLE-3 heads has Llama layers only; this one is of another kind: use eagle3_config(model)"
        )
    tensors = _tensors(config, {path: np.asarray(leaf) for path, leaf in flat(params).items()})
    files = [FileTensor(name, values.shape, dtype) for name, values in tensors.items()]
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(config.layer.vocab_size), ids)
    files += [FileTensor("d2t", ids.shape, "int64"), FileTensor("t2d", tensors["t2d"].shape, "bool")]
    with (folder / FILE).open("wb") as file:
        file.write(header(files))
        for tensor in files:
            values = np.ascontiguousarray(tensors[tensor.name], tensor.numpy_dtype)
            file.write(values.reshape(-1).view(np.uint8).data)
    write_json(folder / "config.json", said)


def read_eagle3_config(folder: Path, num_layers: int) -> Eagle3Config:
    """Sizes of a head, whose tensors have them; reads no weights.

    Args:
        folder: the directory.
        num_layers: of the model it belongs to; says which hidden states are meant where config.json does not.

    Raises:
        ValueError: not such a directory; a tensor is missing, too many or misshapen, by name.
    """
    said = read_json(folder / "config.json")
    found = {_plain(name): tensor for name, tensor in read_tensors(folder).items()}
    if not {"fc.weight", "midlayer.hidden_norm.weight"} <= found.keys():
        raise ValueError(f"{folder} has no EAGLE-3 head: 'fc.weight' or 'midlayer.hidden_norm.weight' is missing")
    layer = _layer_config(said)
    target = size(said, "target_hidden_size", layer.hidden_size)
    draft_vocab = size(said, "draft_vocab_size", None) or layer.vocab_size
    taps = _taps(folder, said, num_layers)
    before = flag(said, "norm_before_residual", False)
    config = Eagle3Config(layer, target, draft_vocab, taps, before, target != layer.hidden_size)
    _check(folder, config, found)
    return config


def read_eagle3(folder: Path, num_layers: int) -> Eagle3Checkpoint:
    """Reads a head.

    Args:
        folder, num_layers: as for `read_eagle3_config`.

    Raises:
        ValueError: not such a directory; a tensor is missing, too many or misshapen, by name.
    """
    config = read_eagle3_config(folder, num_layers)
    found = {_plain(name): tensor for name, tensor in read_tensors(folder).items()}
    offsets = _integers(found.pop("d2t")) if "d2t" in found else 0
    ids = _checked_ids(config, np.arange(config.draft_vocab_size) + offsets, folder)
    found.pop("t2d", None)
    arrays = {name: tensor.rows(0, tensor.shape[0]) for name, tensor in found.items()}
    embedding = None if config.own_embedding or EMBEDDING not in arrays else arrays.pop(EMBEDDING).astype(np.float32)
    return Eagle3Checkpoint(config, nested(_leaves(config, arrays)), ids.astype(np.int32), embedding)


def is_eagle3(folder: Path) -> bool:
    """Whether a head's directory is of this layout, by its tensors."""
    return any("hidden_norm" in name for name in read_tensors(folder))


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _said(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    said: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "llama"}
    said |= {name: getattr(config.layer, name) for name in _CONFIG_FIELDS}
    said |= {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": config.layer.qkv_bias,
        "mlp_bias": config.layer.mlp_bias,
        "draft_vocab_size": config.draft_vocab_size,
        TAPS: list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "torch_dtype": dtype,
    }
    return said | ({"target_hidden_size": config.target_hidden_size} if config.own_embedding else {})


def _layer_config(said: Mapping[str, Any]) -> ModelConfig:
    config = model_config(said)
    if config.num_hidden_layers != 1:
        raise ValueError(f"num_hidden_layers={config.num_hidden_layers} of an EAGLE-3 head is not supported; only 1 is")
    return replace(config, tie_word_embeddings=False)


def _taps(folder: Path, said: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    within = said.get("eagle_config") or {}
    ids, shift = said.get(TAPS), 0
    if not ids and isinstance(within, Mapping):
        ids, shift = within.get(TAPS), 1
    if not ids:
        return default_taps(num_layers)
    if not isinstance(ids, list) or not all(isinstance(item, int) and 0 <= item + shift <= num_layers for item in ids):
        raise ValueError(
            f"{folder / 'config.json'}: {TAPS}={ids!r} must be layers of the model, which has {num_layers}"
        )
    return tuple(item + shift for item in ids)


def _checked_ids(config: Eagle3Config, ids: np.ndarray, source: Path | str = "token_ids") -> np.ndarray:
    if ids.shape != (config.draft_vocab_size,):
        raise ValueError(f"{source}: {list(ids.shape)} token ids for draft_vocab_size={config.draft_vocab_size}")
    if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= config.layer.vocab_size:
        raise ValueError(f"{source}: the ids of guesses must ascend from 0 to below {config.layer.vocab_size}")
    return ids.astype(np.int64)


def _integers(tensor: Tensor) -> np.ndarray:
    return tensor.stored_rows(0, tensor.shape[0]).view(f"i{tensor.row_bytes}").reshape(-1).astype(np.int64)


def _shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by its name, without "d2t" and "t2d"."""
    c = config.layer
    hidden, heads, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_VECTORS, (hidden,))
    shapes["fc.weight"] = hidden, len(config.taps) * config.target_hidden_size
    for name, (rows, columns) in {"q": (heads, 2 * hidden), "k": (keys, 2 * hidden), "v": (keys, 2 * hidden)}.items():
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = rows, columns
        if c.qkv_bias:
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = (rows,)
    sizes = {"self_attn.o": (hidden, heads, c.o_bias), "mlp.down": (hidden, c.intermediate_size, c.mlp_bias)}
    sizes |= {f"mlp.{name}": (c.intermediate_size, hidden, c.mlp_bias) for name in ("gate", "up")}
    for name, (rows, columns, bias) in sizes.items():
        shapes[f"midlayer.{name}_proj.weight"] = rows, columns
        if bias:
            shapes[f"midlayer.{name}_proj.bias"] = (rows,)
    shapes["lm_head.weight"] = config.draft_vocab_size, hidden
    if config.own_embedding:
        shapes[EMBEDDING] = c.vocab_size, hidden
    return shapes


def _check(folder: Path, config: Eagle3Config, found: Mapping[str, Tensor]) -> None:
    shapes = _shapes(config)
    optional: dict[str, tuple[int, ...]] = {EMBEDDING: (config.layer.vocab_size, config.layer.hidden_size)}
    optional |= {"d2t": (config.draft_vocab_size,), "t2d": (config.layer.vocab_size,)}
    for name, shape in shapes.items():
        if name not in found:
            raise ValueError(f"{folder}: tensor {name} {list(shape)} of an EAGLE-3 head is missing")
    for name, tensor in found.items():
        if name not in shapes and name not in optional:
            raise ValueError(f"{folder}: tensor {name} has no place in an EAGLE-3 head as its config.json describes it")
        expected = shapes[name] if name in shapes else optional[name]
        if tensor.shape != expected:
            raise ValueError(f"{folder}: tensor {name} is {list(tensor.shape)}; it must be {list(expected)}")


def _leaves(config: Eagle3Config, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Paths of parameters and their float32 values."""
    c = config.layer
    groups = (c.num_key_value_heads, c.num_query_groups, c.head_dim)
    values = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    leaves = {leaf: values[name] for name, leaf in _VECTORS.items()}
    leaves |= {"fc/kernel": values["fc.weight"], "lm_head/kernel": values["lm_head.weight"]}
    if config.own_embedding:
        leaves["embed/embedding"] = values[EMBEDDING]
    for ending, leaf, wanted in (("weight", "kernel", True), ("bias", "bias", c.qkv_bias)):
        if wanted:
            q, k, v = (values[f"midlayer.self_attn.{name}_proj.{ending}"] for name in "qkv")
            rest = q.shape[1:]
            parts = q.reshape(*groups, *rest), *(x.reshape(groups[0], 1, groups[2], *rest) for x in (k, v))
            leaves[f"layers_0/attn/qkv/{leaf}"] = np.concatenate(parts, axis=1)
    leaves["layers_0/attn/out/kernel"] = values["midlayer.self_attn.o_proj.weight"].reshape(-1, *groups)
    leaves["layers_0/mlp/gate_up/kernel"] = np.stack([values[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up")])
    leaves["layers_0/mlp/down/kernel"] = values["midlayer.mlp.down_proj.weight"]
    if c.o_bias:
        leaves["layers_0/attn/out/bias"] = values["midlayer.self_attn.o_proj.bias"]
    if c.mlp_bias:
        leaves["layers_0/mlp/gate_up/bias"] = np.stack([values[f"midlayer.mlp.{n}_proj.bias"] for n in ("gate", "up")])
        leaves["layers_0/mlp/down/bias"] = values["midlayer.mlp.down_proj.bias"]
    return leaves


def _tensors(config: Eagle3Config, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The other way round: the tensors by name."""
    tensors = {name: leaves[leaf] for name, leaf in _VECTORS.items()}
    tensors |= {"fc.weight": leaves["fc/kernel"], "lm_head.weight": leaves["lm_head/kernel"]}
    if config.own_embedding:
        tensors[EMBEDDING] = leaves["embed/embedding"]
    shapes = _shapes(config)
    for ending, leaf in (("weight", "kernel"), ("bias", "bias")):
        qkv, gate_up = (leaves.get(f"layers_0/{name}/{leaf}") for name in ("attn/qkv", "mlp/gate_up"))
        if qkv is not None:
            parts = {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
            tensors |= {f"midlayer.self_attn.{name}_proj.{ending}": part for name, part in parts.items()}
        if gate_up is not None:
            tensors |= {f"midlayer.mlp.{n}_proj.{ending}": gate_up[i] for i, n in enumerate(("gate", "up"))}
        for name, place in (("self_attn.o", "attn/out"), ("mlp.down", "mlp/down")):
            if f"layers_0/{place}/{leaf}" in leaves:
                tensors[f"midlayer.{name}_proj.{ending}"] = leaves[f"layers_0/{place}/{leaf}"]
    return {name: values.reshape(shapes[name]) for name, values in tensors.items()}
