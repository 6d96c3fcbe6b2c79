"""Fixtures of the checkpoint tests: the committed tiny models, a forward pass, and a GGUF writer."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig

DATA = Path(__file__).parent.parent / "data"
FAMILIES = DATA / "families"
CASES = sorted(path.stem for path in FAMILIES.glob("*.json"))
# The script that makes the references, which is no part of a package, has the same file beside it.
_spec = importlib.util.spec_from_file_location("family_weights", DATA / "family_weights.py")
assert _spec is not None and _spec.loader is not None
_family_weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_family_weights)
random_weight = _family_weights.random_weight


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def reference(data_dir: Path) -> Callable[[str], Mapping[str, np.ndarray]]:
    """`reference("tiny_llama")`: transformers' tokens and float32 logits for that folder."""
    return lambda name: np.load(data_dir / name / "reference.npz")


@pytest.fixture(scope="session")
def all_logits() -> Callable[..., np.ndarray]:
    """`all_logits(config, params, tokens)`: float32 `[L, V]` by the decoder with textbook causal attention."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.models.attention import split_rotated
    from jaxinfer.models.decoder import Decoder

    def attend(qkv: Any, angles: Any, cache: Any, sight: Any) -> Any:
        q, k, v = split_rotated(qkv, angles)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) * (sight.scale or q.shape[-1] ** -0.5)
        if sight.softcap is not None:
            scores = sight.softcap * jnp.tanh(scores / sight.softcap)
        distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(q.shape[0])
        seen = (distance >= 0) & (distance < (sight.window or q.shape[0]))
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v), cache

    def run(config: ModelConfig, params: Any, tokens: Any) -> np.ndarray:
        decoder, tokens = Decoder(config), jnp.asarray(tokens, jnp.int32)
        caches = [None] * config.num_hidden_layers
        positions = jnp.arange(len(tokens))
        hidden, _ = decoder.apply({"params": params}, tokens, positions, jax.tree_util.Partial(attend), caches)
        return np.asarray(decoder.apply({"params": params}, hidden, method=Decoder.logits))

    return run


@pytest.fixture
def hf_copy(data_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """`hf_copy("tiny_llama", tensors, **config)`: that folder again, with other tensors and config fields."""
    from safetensors.numpy import load_file, save_file

    def copy(name: str, edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        merged = {**json.loads((data_dir / name / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps({key: merged[key] for key in merged if merged[key] is not ...}))
        tensors = load_file(data_dir / name / "model.safetensors")
        edit(tensors)
        save_file({key: np.ascontiguousarray(tensors[key]) for key in tensors}, folder / "model.safetensors")
        return folder

    return copy


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


@pytest.fixture
def gguf_twin(data_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """`gguf_twin("tiny_llama", "Q8_0", extra={...})`: the folder as llama.cpp's converter would write it.

    Matrices get the type given, vectors F32; `extra` tensors are added as float32, `metadata` values as uint32.
    """
    import gguf
    from safetensors.numpy import load_file

    def write(
        name: str, kind: str = "F32", extra: Mapping[str, np.ndarray] | None = None, metadata: Any = None
    ) -> Path:
        config = json.loads((data_dir / name / "config.json").read_text())
        arch, path = config["model_type"], tmp_path / f"{name}-{kind}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        _add_metadata(writer, config)
        for key, value in (metadata or {}).items():
            writer.add_uint32(key, value)
        qtype = gguf.GGMLQuantizationType[kind]
        for hf_name, tensor in load_file(data_dir / name / "model.safetensors").items():
            tensor = tensor.astype(np.float32)
            for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
                if part in hf_name and arch == "llama":
                    tensor = _permuted(tensor, heads)
            ours = hf_name
            for old, new in GGUF_NAMES.items():
                ours = ours.replace(old, new)
            if tensor.ndim == 1:
                writer.add_tensor(ours, tensor)
            else:
                writer.add_tensor(ours, gguf.quants.quantize(tensor, qtype), raw_dtype=qtype)
        for key, value in (extra or {}).items():
            writer.add_tensor(key, value.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_token_list(["<unk>", "<s>", "</s>"])


def _permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering of llama's q and k rows: from half a head apart to side by side."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class FamilyCase:
    """One case of tests/data/families, whose checkpoint is made when asked for."""

    name: str
    description: Mapping[str, Any]
    references: Mapping[str, np.ndarray]
    scratch: Path

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.description["config"])

    @property
    def tokens(self) -> list[int]:
        return self.description["tokens"]

    @property
    def greedy(self) -> list[int]:
        return self.description["greedy"]

    @property
    def lengths(self) -> list[int]:
        return sorted(int(key.removeprefix("logits_")) for key in self.references)

    def logits(self, length: int) -> np.ndarray:
        return self.references[f"logits_{length}"]

    def weights(self) -> dict[str, np.ndarray]:
        unit_offset = self.description["unit_offset"]
        shapes = self.description["tensors"]
        return {name: random_weight(name, tuple(shape), unit_offset=unit_offset) for name, shape in shapes.items()}

    def folder(self, rounding: str = "F32", **config: Any) -> Path:
        """The checkpoint's directory, with other config fields if need be (`...` leaves one out), and its matrices
        rounded as a GGUF file of that type rounds them."""
        from safetensors.numpy import save_file

        merged = {**self.config, **config}
        (self.scratch / "config.json").write_text(
            json.dumps({key: merged[key] for key in merged if merged[key] is not ...})
        )
        weights = {name: _rounded(value, rounding) for name, value in self.weights().items()}
        save_file(weights, self.scratch / "model.safetensors")
        return self.scratch

    def served_for(self, config: ModelConfig, length: int) -> ModelConfig:
        """The config as the engine has it when its longest sequence is `length`."""
        return replace(config, rope_length=length)


def _rounded(value: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    if value.ndim == 1 or kind == "F32":
        return value
    qtype = gguf.GGMLQuantizationType[kind if value.shape[-1] % 32 == 0 else "F16"]
    return gguf.quants.dequantize(gguf.quants.quantize(value, qtype), qtype)


@pytest.fixture
def make_case(tmp_path: Path) -> Callable[[str], FamilyCase]:
    """`make_case("gemma2")`."""

    def make(name: str) -> FamilyCase:
        description = json.loads((FAMILIES / f"{name}.json").read_text())
        with np.load(FAMILIES / f"{name}.npz") as file:
            references = {key: file[key] for key in file.files}
        scratch = tmp_path / name
        scratch.mkdir()
        return FamilyCase(name, description, references, scratch)

    return make


@pytest.fixture(params=CASES)
def family_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Every case in turn."""
    return make_case(request.param)


@pytest.fixture(params=["llama_dynamic", "phi3_longrope"])
def edge_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Cases with logits of several lengths."""
    return make_case(request.param)


@pytest.fixture(params=["gemma2", "cohere_qk_norm", "granite"])
def bf16_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Families with their own roundings."""
    return make_case(request.param)
