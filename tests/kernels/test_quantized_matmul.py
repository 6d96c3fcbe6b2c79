"""Products with packed weights against float64, the weights unpacked one by one; the kernel is interpreted."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import Device
from pallas_kernels.quantized_matmul import chosen_implementation, dequantize, quantized_matmul, xla
from pallas_kernels.quantized_matmul.api import _self_check
from pallas_kernels.self_check import difference

NF4 = np.array(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ],
    np.float32,
)
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Of the largest magnitude: a rounding of the result, and of the weights where they meet x in its dtype."""


@dataclass(frozen=True)
class Case:
    """Sizes, and how the weights are stored."""

    tokens: int
    out: int
    channels: int
    bits: int
    group: int
    offset: bool = False
    table: bool = False
    dtype: str = "bfloat16"
    scale_dtype: str = "float32"
    out_dtype: str | None = None

    def __str__(self) -> str:
        kind = "table" if self.table else "offset" if self.offset else "scale"
        return f"{self.tokens}x{self.channels}to{self.out}-{self.bits}b-g{self.group}-{kind}-{self.dtype}"


def operands(case: Case, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    groups = (case.out, case.channels // case.group)
    low, high = (0, 256) if case.bits == 4 else (-128, 128)
    codes = rng.integers(low, high, (case.out, case.channels * case.bits // 8))
    scale = rng.uniform(-1, 1, groups)
    return {
        "x": jnp.asarray(rng.standard_normal((case.tokens, case.channels)), case.dtype),
        "codes": jnp.asarray(codes.astype(np.uint8 if case.bits == 4 else np.int8)),
        "scale": jnp.asarray(scale, case.scale_dtype),
        "offset": jnp.asarray(rng.uniform(-8, 8, groups), case.scale_dtype) if case.offset else None,
        "codebook": jnp.asarray(NF4) if case.table else None,
    }


def weights_of(codes: Any, scale: Any, offset: Any, codebook: Any, bits: int, group: int) -> np.ndarray:
    """float64[N, K], by the docstring's formula, weight by weight."""
    rows, width = codes.shape[0], codes.shape[1] * 8 // bits
    codes = np.asarray(codes).tolist()
    scale, offset, codebook = (
        None if array is None else np.asarray(array).astype(np.float64).tolist() for array in (scale, offset, codebook)
    )
    weights = np.empty((rows, width))
    for n in range(rows):
        for k in range(width):
            code = codes[n][k // 2] // 16 ** (k % 2) % 16 if bits == 4 else codes[n][k]
            value = codebook[code] if codebook is not None else code
            shift = offset[n][k // group] if offset is not None else 0.0
            weights[n, k] = value * scale[n][k // group] + shift
    return weights


def stored(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arrays.items() if name != "x"}


def run(case: Case, arrays: dict[str, Any], implementation: str | None) -> np.ndarray:
    function = partial(quantized_matmul, bits=case.bits, group=case.group, out_dtype=case.out_dtype)
    out = jax.jit(partial(function, implementation=implementation))(
        arrays["x"], arrays["codes"], arrays["scale"], offset=arrays["offset"], codebook=arrays["codebook"]
    )
    assert out.dtype == (case.out_dtype or case.dtype)
    assert out.shape == (case.tokens, case.out)
    return np.asarray(out).astype(np.float64)


def check(case: Case, implementation: str | None, arrays: dict[str, Any] | None = None) -> None:
    arrays = arrays or operands(case)
    weights = weights_of(bits=case.bits, group=case.group, **stored(arrays))
    x = np.asarray(arrays["x"]).astype(np.float64)
    out = run(case, arrays, implementation)
    # What each result sums up: products of random signs.
    size = np.sqrt((x**2).sum(1))[:, None] * np.sqrt((weights**2).mean(1))[None, :]
    error = np.abs(out - x @ weights.T)
    assert np.isfinite(out).all()
    assert (error <= TOLERANCES[case.dtype] * (size + np.abs(x @ weights.T))).all(), (error / (size + 1e-30)).max()


CASES = (
    Case(1, 40, 64, 4, 32, offset=True),
    Case(5, 130, 192, 4, 64, table=True),
    Case(16, 33, 256, 4, 128, offset=True, scale_dtype="bfloat16"),
    Case(17, 129, 96, 4, 96, out_dtype="float32"),
    Case(3, 128, 320, 4, 320, offset=True, dtype="float16"),
    Case(7, 37, 128, 4, 32, table=True, dtype="float16", scale_dtype="float16"),
    Case(32, 20, 96, 8, 32, dtype="float16"),
    Case(2, 50, 160, 8, 160),
    Case(9, 50, 128, 8, 64, offset=True, scale_dtype="bfloat16"),
    Case(33, 70, 64, 4, 32, offset=True),
    Case(65, 40, 128, 4, 64, table=True, out_dtype="float32"),
    Case(130, 70, 128, 8, 128),
    Case(129, 40, 128, 8, 32, offset=True),
    Case(70, 33, 256, 4, 256, offset=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
def test_equals_float64(case: Case, implementation: str) -> None:
    check(case, implementation)


@pytest.mark.parametrize("case", CASES[-5:], ids=str)
def test_many_tokens_on_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the weights are the first operand, and the tile of the result is turned over."""
    h200 = Device("gpu", "NVIDIA H200", (9, 0), 132)
    monkeypatch.setattr("pallas_kernels.quantized_matmul.triton.current_device", lambda: h200)
    check(case, "triton-interpret")


XLA_CASES = (
    Case(3, 17, 60, 4, 20, offset=True, dtype="float32"),
    Case(4, 9, 34, 4, 34, table=True, dtype="float32"),
    Case(40, 9, 35, 8, 7, offset=True, dtype="float32"),
    Case(3, 9, 35, 8, 35, offset=True, dtype="float32", out_dtype="bfloat16"),
    Case(40, 12, 64, 4, 32, offset=True, dtype="float16"),
)


@pytest.mark.parametrize("case", XLA_CASES, ids=str)
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_what_no_kernel_takes(case: Case, implementation: str | None) -> None:
    if case.out_dtype:
        check(Case(**{**vars(case), "dtype": "bfloat16"}), implementation)
    else:
        check(case, implementation)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], XLA_CASES[1]], ids=str)
def test_some_rows_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In XLA the copy of the weights is bounded: here to 7 rows, which divide none of the cases' N."""
    width = 4 if case.dtype == "float32" else 2
    monkeypatch.setattr(xla, "MAX_COPY_BYTES", 7 * case.channels * width)
    check(case, "xla")
    shapes = {name: value for name, value in operands(case).items() if value is not None}
    text = jax.jit(partial(quantized_matmul, bits=4, group=case.group, implementation="xla")).lower(**shapes).as_text()
    assert f"tensor<7x{case.channels}x" in text
    assert f"tensor<{case.out}x{case.channels}x" not in text


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("grouped", [True, False])
def test_channels_in_pieces(splits: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3, 3 and 1 tiles of channels."""
    from pallas_kernels.quantized_matmul import triton

    case = Case(6, 40, 224, 4, 32 if grouped else 224, offset=True)
    tiles_for = triton.tiles_for

    def in_pieces(*args: Any, **kwargs: Any) -> Any:
        tiles = tiles_for(*args, **kwargs)
        assert tiles.into == 32
        return tiles._replace(splits=splits, steps=-(-7 // splits))

    monkeypatch.setattr(triton, "tiles_for", in_pieces)
    check(case, "triton-interpret")


@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
@pytest.mark.parametrize("factor", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_any_size(factor: float, dtype: str, implementation: str) -> None:
    """Rows with scales of 0, tiny and huge ones: nothing overflows on the way, zeros stay zeros."""
    case = Case(4, 24, 64, 4, 32, offset=True, dtype=dtype, out_dtype="float32")
    arrays = operands(case)
    rows = jnp.array([0.0, 1.0, factor] * 8)[:, None]
    arrays |= {"scale": arrays["scale"] * rows, "offset": arrays["offset"] * rows}
    check(case, implementation, arrays)
    assert not run(case, arrays, implementation)[:, ::3].any()


def test_sums_are_exact_where_numbers_are_small_integers() -> None:
    """Codes meet x as integers: what is left on them, and taken off with the sum of x, leaves nothing behind."""
    case = Case(8, 40, 256, 4, 64, offset=True, out_dtype="float32")
    arrays = operands(case)
    rng = np.random.default_rng(3)
    arrays["x"] = jnp.asarray(rng.integers(-4, 5, arrays["x"].shape), "bfloat16")
    arrays["scale"] = jnp.ones_like(arrays["scale"])
    arrays["offset"] = jnp.full_like(arrays["offset"], -8.0)
    weights = weights_of(bits=4, group=64, **stored(arrays))
    expected = np.asarray(arrays["x"]).astype(np.float64) @ weights.T
    np.testing.assert_array_equal(run(case, arrays, "triton-interpret"), expected)


@pytest.mark.parametrize("tokens", [20, 140])
def test_a_token_does_not_depend_on_the_others(tokens: int) -> None:
    case = Case(tokens, 40, 64, 4, 32, offset=True)
    arrays = operands(case)
    together = run(case, arrays, "triton-interpret")
    spoilt = run(case, arrays | {"x": arrays["x"].at[3].set(jnp.nan)}, "triton-interpret")
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(together, 3, 0))


@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
def test_no_tokens(implementation: str) -> None:
    run(Case(0, 8, 64, 4, 32), operands(Case(0, 8, 64, 4, 32)), implementation)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_packing(data: st.DataObject) -> None:
    """Any bytes, groups and offsets: the float32 weights are the formula's."""
    out, groups, width = 2, 2, data.draw(st.sampled_from([1, 3]))
    codes = np.frombuffer(data.draw(st.binary(min_size=out * groups * width, max_size=out * groups * width)), np.uint8)
    codes = codes.reshape(out, groups * width)
    numbers = st.lists(st.floats(-100, 100, width=16), min_size=out * groups, max_size=out * groups)
    scale, offset = (np.array(data.draw(numbers), np.float32).reshape(out, groups) for _ in range(2))
    table = np.array(data.draw(st.lists(st.floats(-4, 4, width=16), min_size=16, max_size=16)), np.float32)
    for extra in ((offset, None), (None, table), (None, None)):
        expected = weights_of(codes, scale, extra[0], extra[1], bits=4, group=2 * width)
        optional = [None if value is None else jnp.asarray(value) for value in extra]
        got = dequantize(jnp.asarray(codes), jnp.asarray(scale), optional[0], optional[1], bits=4)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6, atol=1e-4)


def test_derivatives_are_those_of_xla() -> None:
    arrays = operands(Case(3, 40, 64, 4, 32, offset=True))

    def loss(implementation: str, x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"bits": 4, "group": 32, "implementation": implementation}
        out = quantized_matmul(x, arrays["codes"], scale, offset=offset, out_dtype=jnp.float32, **options)
        return jnp.sum(out * jnp.arange(40))

    given_ = arrays["x"], arrays["scale"], arrays["offset"]
    got, want = (
        jax.jit(jax.grad(partial(loss, name), argnums=(0, 1, 2)))(*given_) for name in ("triton-interpret", "reference")
    )
    for one, other in zip(got, want, strict=True):
        limit = 0.02 * float(jnp.abs(other).max())
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=0.02, atol=limit)


def test_what_the_kernel_cannot_do_is_said() -> None:
    for case, message in (
        (Case(2, 8, 64, 4, 32, dtype="float32"), "float32 would leave the tensor cores; use 'xla'"),
        (Case(33, 8, 64, 4, 32, dtype="float16"), "33 tokens of float16: the kernel is for at most 32"),
        (Case(2, 8, 48, 4, 48), "group=48 must be a multiple of 32"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            run(case, operands(case), "triton-interpret")


def test_a_cpu_takes_xla() -> None:
    arrays = operands(CASES[0])
    assert chosen_implementation(arrays["x"], arrays["codes"], arrays["scale"], bits=4) == "xla"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits=3 of quantized_matmul must be 4 or 8"),
        ({"bits": 8}, "codes of uint8 with bits=8 must be int8 or float8_e4m3fn"),
        ({"group": 24}, r"group=24 must divide K=64, be even"),
        ({"group": 64}, r"scale\(8, 2\) must be \[N, K / group\], \(8, 1\) with group=64"),
        ({"x": jnp.zeros((2, 60))}, r"x\(2, 60\) must be \[M, K\] and codes\(8, 32\) \[N, K / 2\]"),
        ({"scale": jnp.zeros((8, 2), int)}, r"scale \(int32\) of quantized_matmul must be one of float32"),
        ({"offset": jnp.zeros((8, 1))}, r"scale\(8, 2\) and offset\(8, 1\) must be"),
        ({"codebook": jnp.zeros(8)}, r"codebook float32\(8,\) must be float32\[16\]"),
        ({"codebook": jnp.zeros(16), "offset": jnp.zeros((8, 2))}, "without an offset: put the offset into"),
        ({"out_dtype": "int8"}, r"out_dtype \(int8\)"),
        ({"implementation": "mosaic"}, "implementation='mosaic' of quantized_matmul must be one of"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    given_ = {"x": jnp.zeros((2, 64)), "codes": jnp.zeros((8, 32), jnp.uint8), "scale": jnp.zeros((8, 2))}
    with pytest.raises(ValueError, match=message):
        quantized_matmul(**({"bits": 4, "group": 32} | given_ | changes))


SELF_CHECKS = (
    ("bfloat16", "uint8", 32, True, True, False, False, False, True, False, None, False),
    ("bfloat16", "uint8", 32, True, True, False, False, False, False, False, None, False),
    ("bfloat16", "uint8", 32, True, False, True, True, False, True, True, "silu", False),
    ("bfloat16", "int8", 32, False, False, False, False, False, True, True, "silu", True),
    ("bfloat16", "float8_e4m3fn", 32, True, False, False, False, True, True, False, None, False),
)


@pytest.mark.parametrize("case", SELF_CHECKS)
def test_the_self_check_tells_wrong_numbers(case: tuple[Any, ...]) -> None:
    got, want, other = (
        _self_check(name, *rest)
        for name, rest in (
            ("triton-interpret", case),
            ("reference", case),
            ("reference", (*case[:4], not case[4] and case[1] == "uint8", False, False, not case[7], *case[8:])),
        )
    )
    assert difference(got, want) is None
    assert difference(other, want) is not None
