"""GGUF twins of the families' tiny checkpoints against their directories, and against llama.cpp (field case 13)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.gguf import read_gguf
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.models.config import ModelConfig

Case = Any  # conftest's FamilyCase
TWINS = ["gemma", "gemma2", "gemma3", "granite", "llama_llama3", "mixtral", "phi3", "phi3_longrope", "qwen2_moe_all"]
TWINS += ["qwen2", "qwen3", "qwen3_moe_unnormalised"]
EXACT = {"rtol": 0, "atol": 1e-4}
# ggml looks its GELU up in a table of half precision.
TOLERANCES = {name: {"rtol": 0, "atol": 1e-2} for name in TWINS if name.startswith("gemma")}


def near(left: ModelConfig, right: ModelConfig) -> bool:
    """Equal but for numbers that GGUF files hold in float32, and for llama3's scaling as divisors."""
    numbers = ("rms_norm_eps", "query_scale", "residual_multiplier", "rope_theta", "local_rope_theta")
    same: dict[str, Any] = {name: getattr(right, name) for name in numbers}
    if left.rope_scaling is not None and left.rope_scaling.long_factor is not None:
        same["rope_scaling"] = right.rope_scaling
        assert left.rope_scaling.long_factor == pytest.approx(right.rope_scaling.long_factor)  # type: ignore[union-attr]
        assert left.rope_scaling.magnitude() == pytest.approx(right.rope_scaling.magnitude())  # type: ignore[union-attr]
    if left.rope_freq_factors is not None:
        same |= {"rope_scaling": right.rope_scaling, "rope_freq_factors": None}
    assert [getattr(left, name) or 0 for name in numbers] == pytest.approx([same[name] or 0 for name in numbers])
    return replace(left, **same) == right


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", TWINS)
def test_parameters_are_those_of_the_rounded_directory(
    name: str, kind: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path]
) -> None:
    """Bit for bit, and the architecture too; the norms of Gemma have their 1 in the file."""
    case = make_case(name)
    checkpoint = open_checkpoint(twin(case, kind))
    directory = open_checkpoint(case.twin_folder(kind))
    assert near(checkpoint.model_config, directory.model_config)

    def through_the_file(path: Any, leaf: jax.Array) -> np.ndarray:
        value, one = np.asarray(leaf), np.float32(1)
        is_norm = directory.model_config.norm_unit_offset and "norm" in jax.tree_util.keystr(path)
        return (value + one) - one if is_norm else value

    expected = jax.tree_util.tree_map_with_path(through_the_file, load_params(directory, "float32"))
    jax.tree.map(np.testing.assert_array_equal, load_params(checkpoint, "float32"), expected)


@pytest.mark.parametrize("name", TWINS)
def test_logits_and_greedy_ids_are_those_of_llama_cpp(
    name: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path], all_logits: Any, data_dir: Path
) -> None:
    case = make_case(name)
    with np.load(data_dir / "gguf" / "llama_cpp.npz") as file:
        expected, greedy = file[f"{name}.logits"], file[f"{name}.greedy"].tolist()
    checkpoint = open_checkpoint(twin(case, "F32"))
    config = case.served_for(checkpoint.model_config, case.config["max_position_embeddings"])
    logits = all_logits(config, load_params(checkpoint, "float32"), case.tokens + greedy[:-1])
    count = len(case.tokens)
    np.testing.assert_allclose(logits[:count], expected, **TOLERANCES.get(name, EXACT))
    assert logits[count - 1 :].argmax(-1).tolist() == greedy


@pytest.mark.parametrize("name", [name for name in TWINS if name != "llama_llama3"])
def test_a_config_json_says_the_same(
    name: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path]
) -> None:
    """So that every architecture's file can be converted to safetensors."""
    checkpoint = open_checkpoint(twin(make_case(name), "Q8_0"))
    family, config = exported_config(checkpoint)
    assert family.model_config(config) == checkpoint.model_config
    assert family.unknown_keys(config) == []


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "phi3_longrope"])
@pytest.mark.filterwarnings("ignore:no tokenizer is written")
def test_converted_to_safetensors_it_is_the_same(
    name: str, make_case: Callable[[str], Case], twin: Callable[[Case, str], Path], tmp_path: Path
) -> None:
    """Norms, expert by expert, fused projections: as transformers has them."""
    case = make_case(name)
    convert_checkpoint(twin(case, "F32"), tmp_path / "out", "safetensors", dtype="float32")
    written, original = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(case.folder() / "model.safetensors"),
    )
    assert written.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_allclose(written[key], tensor, rtol=0, atol=2e-7, err_msg=key)  # the 1 of Gemma's norms


@pytest.fixture
def k_quants(data_dir: Path) -> dict[str, np.ndarray]:
    """What llama.cpp makes in float32 of a file of its own in which every K type occurs."""
    with np.load(data_dir / "gguf" / "k_quants.npz") as file:
        return dict(file)


def test_k_quants_are_the_values_of_llama_cpp_and_of_the_gguf_package(
    data_dir: Path, k_quants: dict[str, np.ndarray]
) -> None:
    path = data_dir / "gguf" / "k_quants.gguf"
    tensors, kinds = read_gguf(path).tensors, set()
    for theirs in gguf.GGUFReader(path).tensors:
        kinds.add(theirs.tensor_type.name)
        ours = tensors[theirs.name].rows(0, tensors[theirs.name].shape[0])
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(ours.reshape(expected.shape), expected)
        if theirs.name in k_quants:
            rows = k_quants[theirs.name]
            np.testing.assert_allclose(ours[: len(rows)], rows, rtol=1e-6, atol=1e-7)
    assert kinds == {"F32", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def test_k_quants_give_the_logits_of_llama_cpp(
    data_dir: Path, k_quants: dict[str, np.ndarray], all_logits: Any
) -> None:
    checkpoint = open_checkpoint(data_dir / "gguf" / "k_quants.gguf")
    tokens, greedy = k_quants["tokens"].tolist(), k_quants["greedy"].tolist()
    logits = all_logits(checkpoint.model_config, load_params(checkpoint, "float32"), tokens + greedy[:-1])
    np.testing.assert_allclose(logits[: len(tokens)], k_quants["logits"], **EXACT)
    assert logits[len(tokens) - 1 :].argmax(-1).tolist() == greedy
    unquantised, near = k_quants["unquantised"], logits[: len(tokens)]
    cosine = (near * unquantised).sum() / np.linalg.norm(near) / np.linalg.norm(unquantised)
    assert cosine > 0.8  # two to six bits of random weights
