"""GPTQ's tensors: a naive loop over random ones, and those of AutoGPTQ and GPTQModel, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxinfer.quant.array import QuantArray, dequantize, take_rows
from jaxinfer.quant.layouts.gptq import GPTQLayout
from jaxinfer.quant.matmul import project
from jaxinfer.quant.quantize import dequantized, quantize, quantized_shape
from jaxinfer.quant.storage import Storage

DATA = Path(__file__).parents[1] / "data/quantised"
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}


def naive(tensors: dict[str, np.ndarray], bits: int, plain_zeros: bool) -> np.ndarray:
    """float64[N, K], code by code."""
    per_word, mask = 32 // bits, 2**bits - 1
    row, channels = len(tensors["g_idx"]), tensors["scales"].shape[1]
    out = np.zeros((channels, row))
    for k in range(row):
        group = tensors["g_idx"][k]
        for n in range(channels):
            code = (int(tensors["qweight"][k // per_word, n]) >> bits * (k % per_word)) & mask
            zero = (int(tensors["qzeros"][group, n // per_word]) >> bits * (n % per_word)) & mask
            zero = zero if plain_zeros else (zero + 1) & mask
            out[n, k] = (code - zero) * float(tensors["scales"][group, n])
    return out


def random_tensors(layout: GPTQLayout, channels: int, row: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    specs = layout.shapes(channels, row)
    group = row if layout.group == -1 else layout.group
    words = {
        name: rng.integers(-(2**31), 2**31, specs[name].shape, dtype=np.int64).astype(np.int32)
        for name in ("qweight", "qzeros")
    }
    groups = (np.arange(row) // group).astype(np.int32)
    scales = rng.uniform(0.001, 0.1, specs["scales"].shape).astype(np.float16)
    return words | {"scales": scales, "g_idx": rng.permutation(groups) if layout.act_order else groups}


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    act_order=st.booleans(),
    plain=st.booleans(),
    words=st.integers(1, 4),
    groups=st.integers(1, 4),
    group=st.sampled_from([8, 16, 24]),
    seed=st.integers(0, 2**32),
)
def test_what_is_unpacked_packs_to_the_same_bits(
    bits: int, act_order: bool, plain: bool, words: int, groups: int, group: int, seed: int
) -> None:
    layout = GPTQLayout(bits, group, act_order, symmetric=False, plain_zeros=plain)
    channels, row = 8 * words, group * groups
    tensors = random_tensors(layout, channels, row, seed)
    array = layout.unpack(tensors, channels, row)
    np.testing.assert_array_equal(dequantized(array), naive(tensors, bits, plain))
    packed = layout.pack(array)
    assert all(
        np.array_equal(packed[name], value) and packed[name].dtype == value.dtype for name, value in tensors.items()
    )


@pytest.mark.parametrize(
    ("folder", "layout"),
    [
        ("gptq_v1", GPTQLayout(4, 32)),
        ("gptq_act_order", GPTQLayout(4, 32, act_order=True, symmetric=False)),
        ("gptq_v2_8bit", GPTQLayout(8, 32, act_order=True, symmetric=False, plain_zeros=True)),
    ],
)
def test_the_reference_packers_tensors_pack_to_the_same_bits(folder: str, layout: GPTQLayout) -> None:
    """AutoGPTQ's of the first two, GPTQModel's of the third."""
    stored = load_file(DATA / folder / "model.safetensors")
    modules = {name.rpartition(".")[0] for name in stored if name.endswith("qweight")}
    assert len(modules) >= 7
    for module in modules:
        tensors = {name: stored[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx")}
        shape = tensors["scales"].shape[1], len(tensors["g_idx"])
        packed = layout.pack(layout.unpack(tensors, *shape))
        for name, value in tensors.items():
            np.testing.assert_array_equal(packed[name], value, err_msg=f"{module}.{name}")
            assert packed[name].dtype == value.dtype


@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel_takes_the_1_from_whole_words(bits: int) -> None:
    """Its qzeros are plain ones less 0x11111111 or 0x01010101: a zero point of 0 borrows from the next one."""
    plain = GPTQLayout(bits, 16, symmetric=False, plain_zeros=True)
    tensors = random_tensors(plain, 32, 32)
    tensors["qzeros"][:, 0] = 0x12340056
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    borrowed = tensors | {"qzeros": (tensors["qzeros"].view(np.uint32) - ones).view(np.int32)}
    said = CONFIG | {"bits": bits, "group_size": 16, "sym": False, "meta": {"quantizer": ["gptqmodel:1.4.0"]}}
    layout = GPTQLayout.from_config(said)
    assert layout.borrowing and GPTQLayout.from_config(layout.config()) == layout
    array = layout.unpack(borrowed, 32, 32)
    np.testing.assert_array_equal(dequantized(array), dequantized(plain.unpack(tensors, 32, 32)))
    np.testing.assert_array_equal(layout.pack(array)["qzeros"], borrowed["qzeros"])
    by_itself = replace(layout, borrowing=False).unpack(borrowed, 32, 32)
    assert not np.array_equal(dequantized(by_itself), dequantized(array))


def test_symmetric_codes_have_their_zero_in_the_middle() -> None:
    for bits, middle in ((4, 0x77777777), (8, 0x7F7F7F7F)):
        layout = GPTQLayout(bits, 32)
        tensors = random_tensors(layout, 16, 64) | {"qzeros": np.full((2, 16 * bits // 32), middle, np.int32)}
        array = layout.unpack(tensors, 16, 64)
        np.testing.assert_array_equal(dequantized(array), naive(tensors, bits, False))
        storage = layout.storage(64, {"scales": "float16"})
        assert (array.offset is None) == (bits == 8) == (storage.offset_dtype is None)
        assert array.nbytes == storage.nbytes(16, 64)
        assert np.array_equal(layout.pack(array)["qzeros"], tensors["qzeros"])
        with pytest.raises(ValueError, match=rf"^qzeros holds other zero points than {2 ** (bits - 1)}, but sym"):
            layout.unpack(tensors | {"qzeros": tensors["qzeros"] + 1}, 16, 64)


@pytest.mark.parametrize("act_order", [False, True])
def test_a_group_that_does_not_divide_a_row_becomes_smaller_ones(act_order: bool) -> None:
    """Field case 7c: SmolLM2's width of 576 is 4.5 groups of 128; the last of GPTQ's five groups is half a one."""
    layout = GPTQLayout(4, 128, act_order, symmetric=False)
    tensors = random_tensors(layout, 8, 576)
    assert tensors["scales"].shape == (5, 8)
    array = layout.unpack(tensors, 8, 576)
    np.testing.assert_array_equal(dequantized(array), naive(tensors, 4, False))
    assert array.group == 64 and array.nbytes == layout.storage(576, {"scales": "float16"}).nbytes(8, 576)
    with pytest.raises(ValueError, match="in_features=132 and group_size=128 have no common divisor of at least 8"):
        GPTQLayout(8, 128).shapes(8, 132)


def ordered_matrix(channels: int = 24, row: int = 64) -> tuple[QuantArray, np.ndarray]:
    layout = GPTQLayout(4, 16, act_order=True, symmetric=False)
    tensors = random_tensors(layout, channels, row)
    return layout.unpack(tensors, channels, row), naive(tensors, 4, False).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_gather_their_activations(tokens: int) -> None:
    array, values = ordered_matrix()
    x = np.random.default_rng(1).standard_normal((tokens, 64)).astype(np.float32)
    found = jax.jit(project)(x, jax.device_put(array))
    np.testing.assert_allclose(found, x @ values.T, rtol=1e-4, atol=1e-4)


def test_values_and_rows_come_in_the_inputs_own_order() -> None:
    array, values = ordered_matrix()
    np.testing.assert_allclose(dequantize(array), values, atol=1e-6)
    ids = jnp.array([[3, 0], [23, 7]])
    np.testing.assert_allclose(take_rows(jax.device_put(array), ids), values[np.asarray(ids)], atol=1e-6)


def test_a_format_with_an_order_can_be_rounded_to() -> None:
    """As weights that are swapped into an engine are."""
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    for kind, offsets in (("int4", "float32"), ("int8", "float32")):
        storage = Storage(kind, 32, scales="float16", offsets=offsets, ordered=True)  # type: ignore[arg-type]
        array = quantize(values, 1, storage)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), quantized_shape((8, 64), 1, storage))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), array) == shapes
        assert np.abs(dequantized(array) - values).max() < 0.3


def test_whole_rows_have_no_order() -> None:
    layout = GPTQLayout(4, -1, act_order=True, symmetric=False)
    tensors = random_tensors(layout, 8, 64)
    array = layout.unpack(tensors, 8, 64)
    assert array.order is None and not layout.storage(64, {"scales": "float16"}).ordered
    np.testing.assert_array_equal(dequantized(array), naive(tensors, 4, False))
    del tensors["g_idx"]  # the one tensor that may be missing
    assert not layout.shapes(8, 64)["g_idx"].required and layout.unpack(tensors, 8, 64).row == 64


def test_groups_that_are_not_what_the_config_says_are_refused() -> None:
    layout = GPTQLayout(4, 16, symmetric=False)
    tensors = random_tensors(layout, 8, 64)
    tensors["g_idx"][[0, 63]] = tensors["g_idx"][[63, 0]]
    with pytest.raises(ValueError, match="^g_idx puts inputs into other groups than their neighbours', but desc_act"):
        layout.unpack(tensors, 8, 64)
    ordered = replace(layout, act_order=True)
    np.testing.assert_array_equal(dequantized(ordered.unpack(tensors, 8, 64)), naive(tensors, 4, False))
    tensors["g_idx"][0] = 0
    with pytest.raises(ValueError, match="^g_idx does not give each group its 16 inputs"):
        ordered.unpack(tensors, 8, 64)


def test_degenerate_scales() -> None:
    layout = GPTQLayout(4, 32, symmetric=False)
    tensors = random_tensors(layout, 8, 64)
    tensors["scales"][0, 3] = 0
    array = layout.unpack(tensors, 8, 64)
    assert (dequantized(array)[3, :32] == 0).all()
    assert np.array_equal(dequantized(layout.unpack(layout.pack(array), 8, 64)), dequantized(array))
    tensors["scales"][0, 3] = np.nan
    with pytest.raises(ValueError, match="^scales holds a value that is not finite"):
        layout.unpack(tensors, 8, 64)
    large = random_tensors(GPTQLayout(4, 32), 8, 64) | {"qzeros": np.full((2, 1), 0x77777777, np.int32)}
    large["scales"][1, 1] = 9000
    with pytest.raises(ValueError, match="^scales holds a value that times its zero point is beyond float16"):
        GPTQLayout(4, 32).unpack(large, 8, 64)


def test_settings_come_back() -> None:
    others = [{"bits": 8, "group_size": -1, "sym": False}, {"desc_act": True, "checkpoint_format": "gptq_v2"}]
    for changes in ({}, {"modules_in_block_to_quantize": [["self_attn.q_proj", "mlp.up_proj"]]}, *others):
        layout = GPTQLayout.from_config(CONFIG | changes)
        assert GPTQLayout.from_config(layout.config()) == layout
        written = layout.config()
        assert {key: written[key] for key in CONFIG | changes} == CONFIG | changes
    assert str(GPTQLayout(4, 128, True)) == "gptq, 4 bits in groups of 128, act-order"


def test_which_modules_are_quantised() -> None:
    inside = GPTQLayout.from_config(CONFIG | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert inside.covers("model.layers.3.mlp.up_proj") and not inside.covers("model.layers.3.mlp.down_proj")
    assert GPTQLayout().covers("model.layers.3.mlp.down_proj") and not GPTQLayout().covers("lm_head")
    assert GPTQLayout.from_config(CONFIG | {"lm_head": True}).covers("lm_head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 2}, r"bits=2 \(supported: 4, 8\)"),
        ({"bits": 3}, "bits=3"),
        ({"bits": None}, "bits=None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"format": "bitblas"}, "checkpoint_format='bitblas'"),
        ({"is_marlin_format": True}, "is_marlin_format=True"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic with"),
        ({"pack_dtype": "int16"}, "pack_dtype='int16'"),
        ({"group_size": "128"}, "group_size='128'"),
        ({"modules_in_block_to_quantize": "all"}, "modules_in_block_to_quantize='all'"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTQLayout.from_config(CONFIG | changes)


def rounded(storage: Storage) -> QuantArray:
    return quantize(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), 1, storage)


def test_what_is_rounded_here_can_be_packed() -> None:
    for storage, layout in (
        (Storage("int4", 32), GPTQLayout(4, 32)),
        (Storage("int4", 32, symmetric=False), GPTQLayout(4, 32, symmetric=False)),
        (Storage("int4", 32, symmetric=False), GPTQLayout(4, 32, symmetric=False, act_order=True)),
    ):
        array = rounded(storage)
        again = layout.unpack(layout.pack(array), 8, 64)
        np.testing.assert_array_equal(dequantized(again), dequantized(array))


@pytest.mark.parametrize(
    ("array", "layout", "message"),
    [
        (rounded(Storage("int8", 32)), GPTQLayout(4, 32), "integers of 4 bits"),
        (rounded(Storage("fp8", 32)), GPTQLayout(8, 32), "integers of 8 bits"),
        (rounded(Storage("nf4", 32)), GPTQLayout(4, 32), "integers of 4 bits"),
        (rounded(Storage("int4", 16)), GPTQLayout(4, 32), "groups are of 16 inputs"),
        (rounded(Storage("int4", 32, ordered=True)), GPTQLayout(4, 32), "needs desc_act"),
        (rounded(Storage("int4", 32, symmetric=False)), GPTQLayout(4, 32), "sym says that all zero points are 8"),
        (rounded(Storage("int8", 32)), GPTQLayout(8, 32), "scales are stored in float16"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(array: QuantArray, layout: GPTQLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.pack(array)
