"""bitsandbytes' tensors: a naive loop over random ones, what is read and written, and what is refused by name."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.quant.array import CodedScale
from jaxinfer.quant.layouts.bitsandbytes import BitsAndBytesLayout
from jaxinfer.quant.layouts.layout import TensorSpec
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
STATE = "weight.quant_state.bitsandbytes__"


def tensors_of(kind: str, channels: int, row: int, block: int, double: bool, seed: int) -> dict[str, np.ndarray]:
    """Random codes and scales with a random table."""
    rng = np.random.default_rng(seed)
    scales = -(-channels * row // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [channels, row]}
    tensors = {
        "weight": rng.integers(0, 256, (channels * row // 2, 1)).astype(np.uint8),
        "weight.quant_map": rng.uniform(-1, 1, 16).astype(np.float32),
        "weight.absmax": rng.uniform(0, 2, scales).astype(np.float32),
    }
    if double:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(np.float32(rng.random()))}
        tensors["weight.absmax"] = rng.integers(0, 256, scales).astype(np.uint8)
        tensors["weight.nested_absmax"] = rng.uniform(0, 1, -(-scales // 256)).astype(np.float32)
        tensors["weight.nested_quant_map"] = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    return tensors | {STATE + kind: np.frombuffer(json.dumps(state).encode(), np.uint8)}


def naive(kind: str, tensors: dict[str, np.ndarray], channels: int, row: int) -> np.ndarray:
    """float32[N, K], value by value in C order."""
    state = json.loads(tensors[STATE + kind].tobytes())
    out = np.empty(channels * row, np.float32)
    for index in range(out.size):
        byte = int(tensors["weight"][index // 2, 0])
        code = byte >> 4 if index % 2 == 0 else byte & 15
        scale = tensors["weight.absmax"][index // state["blocksize"]]
        if "weight.nested_absmax" in tensors:
            nested = tensors["weight.nested_absmax"][index // state["blocksize"] // 256]
            scale = tensors["weight.nested_quant_map"][scale] * nested + np.float32(state["nested_offset"])
        out[index] = tensors["weight.quant_map"][code] * scale
    return out.reshape(channels, row)


def specs_of(tensors: dict[str, np.ndarray]) -> dict[str, TensorSpec]:
    return {suffix: TensorSpec(values.shape, str(values.dtype)) for suffix, values in tensors.items()}


def own_layout(config: dict[str, Any], tensors: dict[str, np.ndarray], channels: int, row: int) -> BitsAndBytesLayout:
    layout = BitsAndBytesLayout.from_config(config).of("model.x", specs_of(tensors))
    specs = layout.shapes(channels, row)
    for suffix, values in tensors.items():
        assert (specs[suffix].shape, specs[suffix].dtype) == (values.shape, str(values.dtype))
    assert all(suffix in tensors for suffix, spec in specs.items() if spec.required)
    return layout


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["nf4", "fp4"]),
    st.integers(1, 5),
    st.sampled_from([16, 32, 48, 64, 96, 128, 192]),
    st.sampled_from([32, 64, 128, 256, 4096]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_four_bits_are_what_a_loop_makes_of_them(kind, channels, row, block, double, seed):
    """Blocks run on from one channel into the next where a channel is no multiple of them."""
    tensors = tensors_of(kind, channels, row, block, double, seed)
    layout = own_layout(FOUR, tensors, channels, row)  # the tensors say which table
    array = layout.unpack(tensors, channels, row)
    storage = layout.storage(row, {})
    assert (storage.kind, storage.group_of(row), storage.double) == (
        kind,
        array.group,
        isinstance(array.scale, CodedScale),
    )
    assert array.group == np.gcd(block, row)
    if tensors["weight.absmax"].size > 1:  # one scale alone says nothing about blocks
        assert storage.double == (double and row % block == 0)
    np.testing.assert_array_equal(dequantized(array), naive(kind, tensors, channels, row))


def test_more_scales_than_a_block_of_their_own():
    tensors = tensors_of("nf4", 300, 64, 64, True, 5)
    array = own_layout(FOUR, tensors, 300, 64).unpack(tensors, 300, 64)
    assert isinstance(array.scale, CodedScale) and array.scale.scale.size == 2
    np.testing.assert_array_equal(dequantized(array), naive("nf4", tensors, 300, 64))


def test_codes_may_pass_as_floats():
    """`bnb_4bit_quant_storage` has the same bytes under another dtype."""
    tensors = tensors_of("nf4", 4, 64, 64, False, 6)
    passing = tensors | {"weight": tensors["weight"].reshape(-1).view(np.float16)[:, None]}
    array = own_layout(FOUR | {"bnb_4bit_quant_storage": "float16"}, passing, 4, 64).unpack(passing, 4, 64)
    np.testing.assert_array_equal(dequantized(array), naive("nf4", tensors, 4, 64))


def test_eight_bits():
    rng = np.random.default_rng(7)
    codes, largest = rng.integers(-127, 128, (6, 10)).astype(np.int8), rng.uniform(0, 3, 6).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    layout = own_layout(EIGHT, tensors, 6, 10)
    array = layout.unpack(tensors, 6, 10)
    np.testing.assert_allclose(dequantized(array), codes * largest[:, None] / 127, rtol=3e-7)
    packed = layout.pack(array)
    np.testing.assert_array_equal(packed["weight"], codes)
    np.testing.assert_allclose(packed["SCB"], largest, rtol=1.2e-7)
    assert packed["weight_format"] == 0
    with pytest.raises(ValueError, match="weight_format is 1, a GPU's own order"):
        layout.unpack(tensors | {"weight_format": np.array(1, np.uint8)}, 6, 10)


@pytest.mark.parametrize("storage", [Storage("nf4", 64), Storage("fp4", 128), Storage("nf4", 64, double=True)], ids=str)
def test_what_is_quantised_here_is_written_and_read_again(storage):
    values = np.random.default_rng(8).standard_normal((12, 128)).astype(np.float32)
    values[3] = 0
    array = quantize(values, 1, storage, "bfloat16")
    layout = BitsAndBytesLayout(storage.kind, storage.double)
    tensors = layout.pack(array)
    np.testing.assert_allclose(naive(storage.kind, tensors, 12, 128), dequantized(array), rtol=1e-6, atol=1e-7)
    own = own_layout(layout.config(), tensors, 12, 128)
    np.testing.assert_array_equal(dequantized(own.unpack(tensors, 12, 128)), dequantized(array))
    assert own.storage(128, {}) == storage
    assert json.loads(tensors[STATE + storage.kind].tobytes())["dtype"] == "bfloat16"
    assert BitsAndBytesLayout.from_config(layout.config()) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocksize": 128}, "blocks of 128 where weight.absmax is"),
        ({"shape": [64, 4]}, r"has shape \[64, 4\]"),
        ({"blocksize": 0}, "impossible values"),
        ({"nested_blocksize": 128}, "nested_blocksize 128"),
        ({"nested_offset": float("nan")}, "impossible values"),
        ({"shape": None}, "not the JSON of a quant state"),
        ({"blocksize": float("inf")}, "not the JSON of a quant state"),
    ],
)
def test_a_state_that_contradicts_the_tensors_is_refused(change, message):
    tensors = tensors_of("nf4", 4, 64, 64, True, 9)
    layout = own_layout(FOUR, tensors, 4, 64)
    state = json.loads(tensors[STATE + "nf4"].tobytes()) | change
    with pytest.raises(ValueError, match=f"weight.quant_state.bitsandbytes__nf4 .*{message}"):
        layout.unpack(tensors | {STATE + "nf4": np.frombuffer(json.dumps(state).encode(), np.uint8)}, 4, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FOUR | {"load_in_8bit": True}, "load_in_8bit=True and load_in_4bit=True"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit=False and load_in_4bit=False"),
        (FOUR | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4'"),
        (EIGHT | {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True"),
        (EIGHT | {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules='lm_head'"),
        (EIGHT | {"llm_int8_skip_modules": ["("]}, r"llm_int8_skip_modules with '\('"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        BitsAndBytesLayout.from_config(config)


def test_transformers_arguments_that_agree():
    """`load_in_4bit=True` alone is "fp4" there, and fits a checkpoint of either type."""
    four = {kind: BitsAndBytesLayout.from_config(FOUR | {"bnb_4bit_quant_type": kind}).names for kind in ("nf4", "fp4")}
    assert "fp4" in four["nf4"] and "nf4" in four["nf4"] and "nf4" not in four["fp4"]
    assert BitsAndBytesLayout.from_config(EIGHT).names == ("bitsandbytes", "int8")


def test_which_modules_are_in_floats():
    default = BitsAndBytesLayout.from_config(EIGHT)
    assert default.covers("model.layers.0.mlp.gate_proj") and not default.covers("lm_head")
    chosen = BitsAndBytesLayout.from_config(EIGHT | {"llm_int8_skip_modules": ["model.layers.1", "mlp.gate"]})
    for module, covered in {
        "lm_head": True,
        "model.layers.0.mlp.gate_proj": True,
        "model.layers.0.mlp.gate": False,
        "model.layers.1.mlp.up_proj": False,
        "model.layers.11.mlp.up_proj": True,
    }.items():
        assert chosen.covers(module) == covered


def test_what_the_layout_cannot_hold_is_refused():
    int4 = quantize(np.ones((4, 64), np.float32), 1, Storage("int4", 64))
    table = quantize(np.ones((4, 64), np.float32), 1, Storage("nf4", 64))
    odd = quantize(np.ones((4, 48), np.float32), 1, Storage("nf4", 48))
    grouped = quantize(np.ones((4, 64), np.float32), 1, Storage("int8", 32))
    for kind, array, message in [
        ("nf4", int4, "neither offsets"),
        ("fp4", table, "of its own table only"),
        ("nf4", odd, "not of 48"),
        ("int8", grouped, "a scale an output only"),
    ]:
        with pytest.raises(ValueError, match=message):
            BitsAndBytesLayout(kind).pack(array)
    with pytest.raises(ValueError, match="and quantised scales, as its config says"):
        BitsAndBytesLayout("nf4", double=True).pack(table)
    layout = BitsAndBytesLayout("nf4")
    with pytest.raises(ValueError, match="channels of 33 inputs"):
        layout.shapes(4, 33)
    with pytest.raises(ValueError, match="blocks of 64 on channels of 40 inputs would need groups of 8"):
        layout.storage(40, {})
