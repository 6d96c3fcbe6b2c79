"""GGUF files whose codes are taken over: what they stand for is what the gguf package says, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.gguf_codes import STORAGES, kept_storages
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.quantize import dequantized

WIDTH, FFN, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 1, 40
TENSORS = {
    "token_embd": (VOCAB, WIDTH),
    "output": (VOCAB, WIDTH),
    "blk.0.attn_q": (WIDTH, WIDTH),
    "blk.0.attn_k": (WIDTH // 2, WIDTH),
    "blk.0.attn_v": (WIDTH // 2, WIDTH),
    "blk.0.attn_output": (WIDTH, WIDTH),
    "blk.0.ffn_gate": (FFN, WIDTH),
    "blk.0.ffn_up": (FFN, WIDTH),
    "blk.0.ffn_down": (WIDTH, FFN),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(kind, **kinds)`: a llama file of one layer with tensors of a type; `kinds` names exceptions."""

    def make(kind: str, **kinds: str) -> Path:
        rng, path = np.random.default_rng(0), tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(1)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(VOCAB)
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        for name, shape in TENSORS.items():
            qtype = gguf.GGMLQuantizationType[kinds.get(name.split(".")[-1], kind)]
            values = rng.standard_normal(shape).astype(np.float32)
            values[3] = 0  # a row without a scale
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, qtype), raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QuantArray))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def load(path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], ModelConfig, QuantPlan]:
    """Parameters with and without the plan; the second are gguf's own values."""
    checkpoint = open_checkpoint(path)
    plan = QuantPlan("gguf", kept=kept_storages(checkpoint), **options)
    stored, floats = load_params(checkpoint, "float32", plan=plan), load_params(checkpoint, "float32")
    shapes = param_shapes(checkpoint.model_config, "float32", plan)
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (stored, shapes)]
    assert described[0] == described[1]
    return leaves(stored), leaves(floats), checkpoint.model_config, plan


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_codes_stay_as_they_are(kind: str, bits: int, write: Callable[..., Path]) -> None:
    stored, floats, _, _ = load(write(kind))
    quantised = {name for name, leaf in stored.items() if isinstance(leaf, QuantArray)}
    assert quantised == {name for name in floats if name.endswith(("kernel", "embedding"))}
    for name in quantised:
        array = jax.tree.map(np.asarray, stored[name])
        assert (array.bits, array.group, array.scale.dtype) == (bits, 32, np.float16)
        np.testing.assert_array_equal(dequantized(array), floats[name])
    # The file's bytes, but for a scale's negative eighth that Q4_0 does not store.
    down = stored["layers_0/mlp/down/kernel"]
    assert 8 * down.nbytes / down.size == {"Q4_0": 5, "Q4_1": 5, "Q8_0": 8.5}[kind]


def test_other_types_are_rounded_to_int8_and_mixed_parameters_too(write: Callable[..., Path]) -> None:
    stored, floats, _, plan = load(write("Q4_1", attn_v="Q8_0", ffn_down="Q5_0", token_embd="F16"))
    for name in ("layers_0/attn/qkv/kernel", "layers_0/mlp/down/kernel"):
        assert name not in plan.kept and stored[name].codes.dtype == np.int8
        array = jax.tree.map(np.asarray, stored[name])
        steps = np.abs(dequantized(array) - floats[name]).reshape(-1, 32) / array.scale.reshape(-1, 1)
        assert steps.max() <= 0.5 + 1e-4
    assert plan.kept["layers_0/mlp/gate_up/kernel"] == STORAGES["q4_1"]
    assert not isinstance(stored["embed/embedding"], QuantArray)


def test_the_fast_form_is_made_from_the_codes(write: Callable[..., Path]) -> None:
    stored, floats, _, _ = load(write("Q4_0"), fast_form=True)
    array = jax.tree.map(np.asarray, stored["layers_0/mlp/gate_up/kernel"])
    assert array.codes.dtype == np.int8 and array.group == array.row
    error = np.abs(dequantized(array) - floats["layers_0/mlp/gate_up/kernel"])
    assert (error <= array.scale * 0.5001).all()
