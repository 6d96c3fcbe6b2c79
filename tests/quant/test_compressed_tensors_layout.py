"""compressed-tensors' tensors: a naive loop over random ones, the settings that are read, and those refused by name.

Bits are laid out by a loop over Python's integers, as the package describes it: codes plus half their range, one after
the other from the lowest bit on, without padding.
"""

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.compressed_tensors import CompressedTensorsLayout
from jaxinfer.quant.layouts.layout import TensorSpec
from jaxinfer.quant.layouts.words import inputs_in_order
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT_TOKENS = TOKENS | {"type": "float"}


def config(weights: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": more.pop("targets", ["Linear"]), "weights": weights} | more.pop("group", {})
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def layout_of(*args: Any, **more: Any) -> CompressedTensorsLayout:
    return CompressedTensorsLayout.from_config(config(*args, **more))


def words(rows: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of each row's codes, one bit string after the other."""
    packed = []
    for row in rows.tolist():
        number = sum((code + 2 ** (bits - 1)) << (bits * index) for index, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        packed.append([(number >> (32 * index)) & 0xFFFFFFFF for index in range(count)])
    return np.array(packed, np.uint32).view(np.int32)


def specs_of(tensors: dict[str, np.ndarray]) -> dict[str, TensorSpec]:
    return {suffix: TensorSpec(values.shape, str(values.dtype)) for suffix, values in tensors.items()}


def unpacked(layout: CompressedTensorsLayout, tensors: dict[str, np.ndarray], channels: int, row: int) -> QuantArray:
    """After what the loader checks."""
    own = layout.of("model.layers.0.mlp.up_proj", specs_of(tensors))
    for suffix, spec in own.shapes(channels, row).items():
        assert not spec.required or suffix in tensors
        if suffix in tensors:
            dtypes = (spec.dtype,) if isinstance(spec.dtype, str) else spec.dtype
            assert tensors[suffix].shape == spec.shape and str(tensors[suffix].dtype) in dtypes
    array = own.unpack(tensors, channels, row)
    storage = own.storage(row, {suffix: spec.dtype for suffix, spec in specs_of(tensors).items()})
    assert (str(array.scale.dtype), array.bits, array.group) == (
        storage.scale_dtype,
        storage.bits,
        storage.group_of(row),
    )
    assert (None if array.offset is None else str(array.offset.dtype)) == storage.offset_dtype
    return array


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([0, 16, 32]),
    st.booleans(),
    st.integers(1, 19),
    st.integers(1, 3),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(0, 2**32 - 1),
)
def test_packed_integers_are_what_a_loop_makes_of_them(bits, group, symmetric, channels, groups, dtype, seed):
    rng, row = np.random.default_rng(seed), groups * (group or 14)
    count = groups if group else 1
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (channels, row))
    zero = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (channels, count)) * (not symmetric)
    scale = rng.uniform(-1, 1, (channels, count)).astype(dtype)
    scale[rng.random(scale.shape) < 0.1] = 0
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array([channels, row], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
    weights = {"num_bits": bits, "group_size": group or -1, "symmetric": symmetric}
    array = unpacked(layout_of(weights), tensors, channels, row)
    expected = np.empty((channels, row), np.float32)
    for n in range(channels):
        for k in range(row):
            g = k // group if group else 0
            expected[n, k] = np.float32(codes[n, k] - zero[n, g]) * np.float32(scale[n, g])
    atol = np.abs(expected).max(initial=0) * 2.0**-20  # offsets are products of their own
    np.testing.assert_allclose(dequantized(array), expected, rtol=0, atol=atol)
    again = layout_of(weights).of("model.x", {}).pack(array)
    assert again.keys() == tensors.keys()
    for suffix, values in tensors.items():
        if suffix == "weight_zero_point":  # where the scale is 0, any will do
            assert again[suffix].shape == values.shape
            continue
        np.testing.assert_array_equal(again[suffix], values)
    np.testing.assert_array_equal(dequantized(unpacked(layout_of(weights), again, channels, row)), dequantized(array))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_plain_weights(kind, strategy):
    rng = np.random.default_rng(1)
    channels, row, block = 72, 96, (64, 64)
    if kind == "int":
        codes = rng.integers(-128, 128, (channels, row)).astype(np.int8)
    else:
        codes = rng.standard_normal((channels, row)).astype(ml_dtypes.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (channels, 1), "block": (2, 2)}[strategy]
    scale = rng.uniform(0.5, 1, shape).astype(np.float32)
    weights = {"num_bits": 8, "type": kind, "strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    layout = layout_of(weights, f"{kind}-quantized")
    tensors = {"weight": codes, "weight_scale": scale}
    array = unpacked(layout, tensors, channels, row)
    height, width = {"tensor": (channels, row), "channel": (1, row), "block": block}[strategy]
    grid = scale.reshape(-(-channels // height), -1)
    rows = [[np.float32(codes[n, k]) * grid[n // height, k // width] for k in range(row)] for n in range(channels)]
    expected = np.array(rows)
    np.testing.assert_array_equal(dequantized(array), expected)
    packed = layout.of("model.x", {}).pack(array)
    assert packed.keys() == tensors.keys()
    assert all(np.array_equal(packed[suffix], values) for suffix, values in tensors.items())


def test_act_order_becomes_an_order_of_inputs():
    rng = np.random.default_rng(2)
    channels, row = 8, 64
    codes = rng.integers(-8, 8, (channels, row))
    groups = rng.permutation(np.repeat(np.arange(2), 32)).astype(np.int32)
    scale = rng.uniform(0.5, 1, (channels, 2)).astype(np.float32)
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scale, "weight_g_idx": groups}
    layout = layout_of(INT4 | {"actorder": "group"})
    array = unpacked(layout, tensors, channels, row)
    np.testing.assert_array_equal(np.sort(array.order), np.arange(row))
    np.testing.assert_allclose(dequantized(array), codes * scale[:, groups], rtol=1e-6)
    same = unpacked(layout, tensors | {"weight_g_idx": np.full(row, -1, np.int32)}, channels, row)
    np.testing.assert_array_equal(same.order, np.arange(row))
    with pytest.raises(ValueError, match="weight_g_idx does not give each of 2 groups 32 inputs"):
        unpacked(layout, tensors | {"weight_g_idx": np.zeros(row, np.int32)}, channels, row)


def test_act_bits_follow_the_activations():
    for weights, form, activations, expected in [
        (INT8, "int-quantized", TOKENS, 8),
        (INT8, "int-quantized", None, 16),
        (FLOAT8, "float-quantized", FLOAT_TOKENS, 8),
    ]:
        layout = layout_of(weights, form, group={"input_activations": activations})
        assert layout.storage(64, {}).act_bits == expected
    for weights, form, activations, told in [
        (
            INT8,
            "int-quantized",
            TOKENS | {"dynamic": False, "strategy": "tensor"},
            "checkpoint's static ones",
        ),
        (INT8 | {"symmetric": False}, "int-quantized", TOKENS, "activations stay in 16 bits"),
        (INT8, "int-quantized", TOKENS | {"symmetric": False}, "activations stay in 16 bits"),
        (INT4, "pack-quantized", TOKENS, "activations stay in 16 bits"),
        (INT8, "int-quantized", FLOAT_TOKENS, "activations stay in 16 bits"),
    ]:
        with pytest.warns(UserWarning, match=told):
            layout = layout_of(weights, form, group={"input_activations": activations})
        assert layout.storage(64, {}).act_bits == (8 if "static" in told else 16)
    with pytest.warns(UserWarning, match="KV cache is as kv_cache_dtype says"):
        layout_of(INT4, kv_cache_scheme=FLOAT8, quantization_status="frozen")  # as older files say


def test_groups_targets_and_ignored_modules():
    said = config(INT4 | {"symmetric": False}, targets=["re:.*self_attn.*"], ignore=["lm_head", "re:.*layers[.]1[.].*"])
    said["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": INT8, "format": "int-quantized"}
    said["config_groups"]["group_2"] = {"targets": ["model.layers.0.self_attn.o_proj"], "weights": INT4}
    said["config_groups"]["kv"] = {"targets": ["re:.*k_proj"], "weights": None, "output_activations": TOKENS}
    with pytest.warns(UserWarning, match="outputs stay in 16 bits"):
        layout = CompressedTensorsLayout.from_config(said)
    expected = {
        "model.layers.0.self_attn.q_proj": "int4 in groups of 32, asymmetric",
        "model.layers.0.self_attn.o_proj": "int4 in groups of 32",
        "model.layers.0.mlp.up_proj": "int8 per output channel",
    }
    for module, words_of_it in expected.items():
        assert layout.covers(module)
        assert str(layout.of(module, {}).storage(64, {})) == words_of_it
    for module in ("lm_head", "model.layers.1.mlp.up_proj", "model.embed_tokens"):
        assert not layout.covers(module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 2}, "weights of num_bits=2 and type='int'"),
        ({"num_bits": 4, "type": "float"}, "weights of num_bits=4 and type='float'"),
        ({"scale_dtype": "torch.uint8"}, "scale_dtype='torch.uint8'"),
        ({"strategy": "tensor_group", "group_size": 16}, "strategy='tensor_group'"),
        ({"group_size": 0}, "group_size=0"),
        ({"dynamic": True}, "dynamic=True"),
        ({"strategy": "block", "block_structure": [128, 128]}, "packed weights with strategy='block'"),
        ({"symmetric": False, "type": "float", "num_bits": 8}, "symmetric=False, float"),
        ({"rotation": 3}, "weights with rotation"),
    ],
)
def test_weights_that_are_not_read_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"group 'group_0' has .*{message}"):
        layout_of(INT4 | change)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"form": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        ({"form": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
        ({"form": "mixed-precision"}, "format='mixed-precision'"),
        ({"form": "fakequant"}, "format='fakequant'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        ({"config_groups": None}, "config_groups=None"),
        ({"targets": ["Embedding"]}, "targets with 'Embedding'"),
        ({"targets": ["re:("]}, r"targets with 're:\('"),
        ({"targets": "Linear"}, "targets='Linear'"),
        ({"ignore": "lm_head"}, "ignore='lm_head'"),
        ({"ignore": ["re:["]}, r"ignore with 're:\['"),
        ({"group": {"input_activations": {"num_bits": 4, "type": "int"}}}, "input_activations of num_bits=4"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(more, message):
    with pytest.raises(ValueError, match=message):
        layout_of(INT4, **more)


@pytest.mark.parametrize(
    "storages",
    [
        {"a": Storage("int4", 32), "b": Storage("int4", 32)},
        {"a": Storage("int4", 32, symmetric=False), "b": Storage("int4", 16, symmetric=False)},
        {"a": Storage("int8"), "b": Storage("int4", 32)},
        {"a": Storage("int8", act_bits=8)},
        {"a": Storage("fp8"), "b": Storage("fp8", act_bits=8)},
        {"a": Storage("int8", 32)},
    ],
    ids=lambda storages: "; ".join(map(str, storages.values())),
)
def test_what_is_quantised_here_is_written_and_read_again(storages):
    layout = CompressedTensorsLayout.for_modules(storages, ["lm_head", "router"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CompressedTensorsLayout.from_config(layout.config()) == layout
    values = np.random.default_rng(3).standard_normal((24, 96)).astype(np.float32)
    values[2] = 0
    for module, storage in storages.items():
        array = quantize(values, 1, storage, "bfloat16")
        tensors = layout.of(module, {}).pack(array)
        again = layout.of(module, specs_of(tensors)).unpack(tensors, 24, 96)
        np.testing.assert_array_equal(dequantized(again), dequantized(array))
        assert again.act_bits == storage.act_bits
    assert layout.covers("a") and not layout.covers("lm_head") and not layout.covers("router")


def test_what_the_layout_cannot_hold_is_refused():
    nf4 = quantize(np.ones((4, 64), np.float32), 1, Storage("nf4", 64))
    shifted = quantize(np.linspace(0, 1, 256, dtype=np.float32).reshape(4, 64), 1, Storage("int4", 32, symmetric=False))
    for layout, array, message in [
        (layout_of(INT4), nf4, "holds int4 codes"),
        (layout_of(INT4), shifted, "no zero points but half the range"),
        (layout_of(INT8), shifted, "holds int8 codes"),
        (
            layout_of(INT4 | {"strategy": "channel", "group_size": None}),
            shifted,
            "scales differ within 1 outputs",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            layout.pack(array)
    with pytest.raises(ValueError, match="compressed-tensors has no nf4"):
        CompressedTensorsLayout.for_modules({"a": Storage("nf4", 64)}, [])
    for row, message in ((40, "40 inputs do not come to groups of group_size=32"),):
        with pytest.raises(ValueError, match=message):
            layout_of(INT4).shapes(8, row)
    with pytest.raises(ValueError, match="15 inputs do not come to bytes"):
        layout_of({"num_bits": 4, "group_size": -1}).shapes(8, 15)


@pytest.mark.parametrize(("channels", "row"), [(1, 2), (7, 30), (16, 536)])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_put_in_an_order_of_inputs(channels, row, bits):
    rng = np.random.default_rng(row)
    order = rng.permutation(row)
    codes = rng.integers(0, 1 << bits, (channels, row)).astype(np.uint8)
    packed, expected = (
        part if bits == 8 else part[:, 0::2] | (part[:, 1::2] << 4) for part in (codes, codes[:, order])
    )
    np.testing.assert_array_equal(inputs_in_order(packed, order, bits), expected)
