"""AutoAWQ's tensors: hand-made ones, a naive loop over random ones, and AutoAWQ's own, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.awq import AWQLayout
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

DATA = Path(__file__).parents[1] / "data/quantised"
GEMM = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # which output a word's nibbles are of, from the lowest


def naive(tensors: dict[str, np.ndarray], group: int) -> np.ndarray:
    """float64[N, K], nibble by nibble."""
    rows, words = tensors["qweight"].shape
    out = np.zeros((8 * words, rows))
    for k in range(rows):
        for n in range(8 * words):
            shift = 4 * NIBBLES.index(n % 8)
            code = (int(tensors["qweight"][k, n // 8]) >> shift) & 15
            zero = (int(tensors["qzeros"][k // group, n // 8]) >> shift) & 15
            out[n, k] = (code - zero) * float(tensors["scales"][k // group, n])
    return out


def random_tensors(layout: AWQLayout, channels: int, row: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    specs = layout.shapes(channels, row)
    words = {
        name: rng.integers(-(2**31), 2**31, specs[name].shape, dtype=np.int64).astype(np.int32)
        for name in ("qweight", "qzeros")
    }
    return words | {"scales": rng.uniform(0.001, 0.1, specs["scales"].shape).astype(np.float16)}


def test_the_hand_made_layer() -> None:
    """Field case 7a: every word 0x75316420, zero points 0 and scales 1 make output j the constant j."""
    layout = AWQLayout(128)
    tensors = {
        "qweight": np.full((128, 1), 0x75316420, np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    array = layout.unpack(tensors, 8, 128)
    np.testing.assert_array_equal(dequantized(array), np.repeat(np.arange(8.0)[:, None], 128, 1))
    zeros = tensors | {"qzeros": np.full((1, 1), 0x75316420, np.int32)}  # zero point j of output j
    np.testing.assert_array_equal(dequantized(layout.unpack(zeros, 8, 128)), np.zeros((8, 128)))
    for given_tensors in (tensors, zeros):
        packed = layout.pack(layout.unpack(given_tensors, 8, 128))
        assert all(np.array_equal(packed[name], value) for name, value in given_tensors.items())


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_groups(group: int) -> None:
    """Field case 7b."""
    layout = AWQLayout(group)
    tensors = random_tensors(layout, 16, 256)
    array = layout.unpack(tensors, 16, 256)
    np.testing.assert_array_equal(dequantized(array), naive(tensors, 256 if group == -1 else group))
    assert array.group == (256 if group == -1 else group) and array.codes.flags.c_contiguous


@settings(max_examples=25, deadline=None)
@given(
    words=st.integers(1, 5), groups=st.integers(1, 4), half=st.sampled_from([1, 4, 8, 12]), seed=st.integers(0, 2**32)
)
def test_what_is_unpacked_packs_to_the_same_bits(words: int, groups: int, half: int, seed: int) -> None:
    layout = AWQLayout(2 * half)
    tensors = random_tensors(layout, 8 * words, 2 * half * groups, seed)
    array = layout.unpack(tensors, 8 * words, 2 * half * groups)
    np.testing.assert_array_equal(dequantized(array), naive(tensors, 2 * half))
    assert all(np.array_equal(layout.pack(array)[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(("folder", "group"), [("awq_gemm", 32), ("awq_row", -1)])
def test_autoawqs_own_tensors_pack_to_the_same_bits(folder: str, group: int) -> None:
    stored = load_file(DATA / folder / "model.safetensors")
    layout, modules = AWQLayout(group), {name.rpartition(".")[0] for name in stored if name.endswith("qweight")}
    assert len(modules) >= 7
    for module in modules:
        tensors = {name: stored[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales")}
        shape = tensors["scales"].shape[1], tensors["qweight"].shape[0]
        packed = layout.pack(layout.unpack(tensors, *shape))
        for name, value in tensors.items():
            np.testing.assert_array_equal(packed[name], value, err_msg=f"{module}.{name}")
            assert packed[name].dtype == value.dtype


def test_the_storage_is_that_of_the_arrays() -> None:
    layout = AWQLayout(32)
    array = layout.unpack(random_tensors(layout, 8, 64), 8, 64)
    storage = layout.storage(64, {"scales": "float16"})
    assert storage == Storage("int4", 32, symmetric=False, scales="float16", offsets="float32")
    assert (array.scale.dtype, array.offset.dtype) == (storage.scale_dtype, storage.offset_dtype)
    assert array.nbytes == storage.nbytes(8, 64) == 8 * 32 + 8 * 2 * 6


def test_scales_of_zero_stay_zeros() -> None:
    layout = AWQLayout(32)
    tensors = random_tensors(layout, 8, 64)
    tensors["scales"][0, 3] = 0
    array = layout.unpack(tensors, 8, 64)
    assert (dequantized(array)[3, :32] == 0).all() and np.isfinite(dequantized(array)).all()
    assert np.array_equal(dequantized(layout.unpack(layout.pack(array), 8, 64)), dequantized(array))
    tensors["scales"][1, 2] = np.inf
    with pytest.raises(ValueError, match="^scales holds a value that is not finite"):
        layout.unpack(tensors, 8, 64)


def test_settings_come_back() -> None:
    for config in (GEMM, GEMM | {"group_size": -1, "modules_to_not_convert": ["down_proj", "layers.0."]}):
        layout = AWQLayout.from_config(config)
        assert AWQLayout.from_config(layout.config()) == layout
        assert {key: layout.config()[key] for key in config} == config
    own = AWQLayout.from_config({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"})
    assert own == AWQLayout(64) and str(own) == "awq, 4 bits in groups of 64"


def test_modules_that_are_not_quantised() -> None:
    """Field case 7f."""
    layout = AWQLayout(32, skipped=("down_proj",))
    assert layout.covers("model.layers.0.mlp.up_proj") and not layout.covers("model.layers.0.mlp.down_proj")
    assert not layout.covers("lm_head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "version='gemv'"),
        ({"version": "exllama"}, "version='exllama'"),
        ({"version": "marlin"}, "version='marlin'"),
        ({"bits": 3}, "bits=3"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 33}, "group_size=33; it is even"),
        ({"group_size": None}, "group_size=None"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AWQLayout.from_config(GEMM | changes)


@pytest.mark.parametrize(
    ("channels", "row", "group", "message"),
    [
        (64, 576, 128, "in_features=576 is no multiple of group_size=128"),  # field case 7c
        (12, 128, 32, "out_features=12 is no multiple of 8"),
        (8, 33, -1, "in_features=33"),
    ],
)
def test_sizes_that_do_not_fit_are_named(channels: int, row: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AWQLayout(group).shapes(channels, row)


def matrix(storage: Storage = Storage("int4", 32, symmetric=False), **changes: Any) -> QuantArray:  # noqa: B008
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    array = quantize(values, 1, storage)
    return QuantArray(**{name: getattr(array, name) for name in array.__dataclass_fields__} | changes)


def test_what_is_rounded_here_can_be_packed() -> None:
    layout = AWQLayout(32)
    for storage in (Storage("int4", 32, symmetric=False), Storage("int4", 32)):
        array = matrix(storage)
        np.testing.assert_array_equal(dequantized(layout.unpack(layout.pack(array), 8, 64)), dequantized(array))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (matrix(Storage("int8", 32)), "integers of 4 bits"),
        (matrix(Storage("nf4", 32)), "integers of 4 bits"),
        (matrix(Storage("int4", 16, symmetric=False)), "groups are of 16 inputs, and group_size=32"),
        (matrix(order=np.arange(64, dtype=np.int32)), "inputs in their own order"),
        (matrix(scale=np.full((8, 2), 1e6, np.float32), offset=np.zeros((8, 2), np.float32)), "out of their range"),
        (matrix(scale=np.full((8, 2), 1.0001, np.float32)), "between two of them"),
        (matrix(scale=np.ones((8, 2), np.float32), offset=np.full((8, 2), -1.5, np.float32)), "whole numbers"),
        (matrix(scale=np.ones((8, 2), np.float32), offset=np.full((8, 2), 1, np.float32)), "whole numbers"),
    ],
)
def test_what_awq_cannot_hold_is_refused(array: QuantArray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AWQLayout(32).pack(array)
