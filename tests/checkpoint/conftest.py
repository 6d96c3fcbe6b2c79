"""Fixtures of the checkpoint tests: the committed tiny models, a forward pass, and a GGUF writer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig


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

    def attend(qkv: Any, angles: Any, cache: Any) -> Any:
        q, k, v = split_rotated(qkv, angles)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((q.shape[0], q.shape[0]), bool))
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v), cache

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
