"""Loaded weights give the reference's logits, whatever the family, the container and the tying (field case 13)."""

import gguf
import jax
import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint

NAMES = ("tiny_llama", "tiny_llama_tied", "tiny_qwen2")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_directory(name, data_dir, reference, all_logits):
    checkpoint, expected = open_checkpoint(data_dir / name), reference(name)
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_gguf_float32(name, gguf_twin, reference, all_logits):
    checkpoint, expected = open_checkpoint(gguf_twin(name)), reference(name)
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], **TOLERANCE)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_quantised_equals_the_rounded_directory(kind, gguf_twin, hf_copy):
    """Parameters from a quantised file are, bit for bit, those of a directory whose matrices were rounded likewise."""

    def round_matrices(tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(np.float32)
            if tensor.ndim == 2:
                qtype = gguf.GGMLQuantizationType[kind]
                tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], qtype), qtype)

    left = load_params(open_checkpoint(gguf_twin("tiny_llama", kind)), "float32")
    right = load_params(open_checkpoint(hf_copy("tiny_llama", round_matrices)), "float32")
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_rope_frequency_tensor_divides_the_frequencies(gguf_twin, reference, all_logits):
    expected = reference("tiny_llama")
    path = gguf_twin("tiny_llama", extra={"rope_freqs.weight": expected["rope_factors"]})
    checkpoint = open_checkpoint(path)
    assert checkpoint.model_config.rope_freq_factors == tuple(float(value) for value in expected["rope_factors"])
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), expected["tokens"])
    np.testing.assert_allclose(logits, expected["scaled_logits"], **TOLERANCE)


def test_sixteen_bit_parameters(data_dir, reference, all_logits):
    checkpoint, expected = open_checkpoint(data_dir / "tiny_llama"), reference("tiny_llama")
    for dtype in ("bfloat16", "float16"):
        params = load_params(checkpoint, dtype)
        assert params["layers_1"]["mlp"]["gate_up"]["kernel"].dtype == dtype
        assert params["final_norm"]["scale"].dtype == dtype
        logits = all_logits(checkpoint.model_config, params, expected["tokens"])
        np.testing.assert_allclose(logits, expected["logits"], atol=0.6)
