"""The layout "fp8": DeepSeek's rule for blocks, spelled out value by value, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.quant.layouts.fp8_block import Fp8Layout
from jaxinfer.quant.layouts.layout import TensorSpec
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(128, 128), (64, 32), (1, 32)]),
    st.integers(1, 200),
    st.sampled_from([16, 64, 96, 128, 192, 320]),
    st.integers(0, 2**32 - 1),
)
def test_blocks_end_with_the_matrix(block, channels, row, seed):
    rng = np.random.default_rng(seed)
    codes = rng.uniform(-448, 448, (channels, row)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(-1, 1, (-(-channels // block[0]), -(-row // block[1]))).astype(np.float32)
    tensors = {"weight": codes, "weight_scale_inv": scale}
    layout = Fp8Layout.from_config(CONFIG | {"weight_block_size": list(block)})
    assert {suffix: spec.shape for suffix, spec in layout.shapes(channels, row).items()} == {
        suffix: values.shape for suffix, values in tensors.items()
    }
    array = layout.unpack(tensors, channels, row)
    assert array.group == layout.storage(row, {}).group_of(row)
    rows, columns = np.arange(channels)[:, None] // block[0], np.arange(row) // block[1]
    np.testing.assert_array_equal(dequantized(array), codes.astype(np.float32) * scale[rows, columns])
    packed = layout.pack(array)
    assert all(np.array_equal(packed[suffix], values) for suffix, values in tensors.items())


@pytest.mark.parametrize(("name", "shape"), [("weight_scale", (1,)), ("weight_scale", ()), ("weight_scale_inv", ())])
def test_one_scale_a_matrix(name, shape):
    codes = np.linspace(-4, 4, 96).reshape(4, 24).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": codes, name: np.full(shape, 0.5, np.float32), "input_scale": np.ones(1, np.float32)}
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    with pytest.warns(UserWarning, match="a scale for each token in place of the checkpoint's static ones"):
        layout = Fp8Layout.from_config(config)
    own = layout.of("model.x", {suffix: TensorSpec(value.shape, str(value.dtype)) for suffix, value in tensors.items()})
    specs = own.shapes(4, 24)
    assert specs[name].shape == shape and specs["input_scale"].shape == (1,) and not specs["input_scale"].required
    array = own.unpack(tensors, 4, 24)
    np.testing.assert_array_equal(dequantized(array), codes.astype(np.float32) / 2)
    assert own.storage(24, {}) == Storage("fp8", act_bits=8) and array.act_bits == 8
    assert np.array_equal(own.pack(array)[name], np.float32(0.5))
    assert not layout.covers("lm_head") and layout.covers("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "uint8", "bfloat16"])
def test_scales_of_other_types(dtype):
    """DeepSeek-V3.1 has powers of 2, which are stored as exponents in some files."""
    scale = np.array([[0.25, 2.0]])
    stored = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8) if dtype == "uint8" else scale.astype(dtype)
    codes = np.ones((3, 256), ml_dtypes.float8_e4m3fn)
    layout = Fp8Layout.from_config(CONFIG | {"scale_fmt": "ue8m0"})
    values = dequantized(layout.unpack({"weight": codes, "weight_scale_inv": stored}, 3, 256))
    np.testing.assert_array_equal(values, np.repeat(scale, 128, axis=1).repeat(3, axis=0))


def test_config_there_and_back():
    for layout in (Fp8Layout(), Fp8Layout(None, ("lm_head",)), Fp8Layout((1, 32), ())):
        assert Fp8Layout.from_config(layout.config()) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "none"}, "activation_scheme='none'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ({"modules_to_convert": ["embed"]}, "modules_to_convert="),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"is_checkpoint_fp8_serialized": False}, "is_checkpoint_fp8_serialized=False"),
        ({"modules_to_not_convert": [1]}, r"modules_to_not_convert=\[1\]"),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Fp8Layout.from_config(CONFIG | change)


def test_impossible_values_are_refused_by_tensor():
    layout = Fp8Layout()
    codes, scale = np.ones((2, 128), ml_dtypes.float8_e4m3fn), np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match="weight_scale_inv holds NaN or infinity"):
        layout.unpack({"weight": codes, "weight_scale_inv": scale * np.inf}, 2, 128)
    codes.view(np.uint8)[1, 5] = 0xFF
    with pytest.raises(ValueError, match="weight holds NaN"):
        layout.unpack({"weight": codes, "weight_scale_inv": scale}, 2, 128)


def test_what_the_layout_cannot_hold_is_refused():
    values = np.linspace(0.1, 1, 512, dtype=np.float32).reshape(2, 256)
    for array, message in [
        (quantize(values, 1, Storage("int8")), "float8_e4m3fn codes alone"),
        (quantize(values, 1, Storage("fp8")), "scales differ within 128 outputs by 128 inputs"),
        (quantize(values, 1, Storage("fp8", 64)), "scales differ within 128 outputs by 128 inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            Fp8Layout().pack(array)
    with pytest.raises(ValueError, match="channels of 136 inputs would need groups of 8"):
        Fp8Layout().storage(136, {})
