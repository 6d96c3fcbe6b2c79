"""What a product with packed weights does besides, against float64: norm, gate, rounded activations, order, tables."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Device
from pallas_kernels.quantized_matmul import ScaleTable, chosen_implementation, quantized_matmul

EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """Sizes, how the weights are stored, and what is around the product."""

    tokens: int
    out: int
    channels: int
    codes: str = "uint8"
    group: int = 32
    offset: bool = False
    ordered: bool = False
    table: bool = False
    norm: bool = False
    activation: str | None = None
    rounds: bool = False

    def __str__(self) -> str:
        words = [name for name in ("offset", "ordered", "table", "norm", "rounds") if getattr(self, name)]
        gate = self.activation or "plain"
        return "-".join([f"{self.tokens}x{self.channels}to{self.out}", self.codes, f"g{self.group}", gate, *words])


CASES = (
    Case(5, 40, 128, "float8_e4m3fn"),
    Case(3, 33, 192, "float8_e4m3fn", 64, ordered=True),
    Case(70, 40, 128, "float8_e4m3fn", 128),
    Case(17, 40, 128, offset=True, ordered=True),
    Case(40, 40, 64, offset=True, ordered=True),
    Case(4, 40, 96, table=True),
    Case(5, 128, 192, norm=True, activation="silu", offset=True),
    Case(20, 66, 128, norm=True, activation="relu", table=True, ordered=True),
    Case(3, 64, 128, "int8", 128, norm=True, activation="gelu_tanh"),
    Case(6, 40, 128, "int8", 128, rounds=True),
    Case(18, 33, 160, "int8", 160, rounds=True, norm=True),
    Case(5, 132, 96, "int8", 96, rounds=True, norm=True, activation="silu"),
    Case(6, 40, 128, "float8_e4m3fn", 128, rounds=True),
    Case(5, 70, 128, "float8_e4m3fn", 128, rounds=True, norm=True, activation="silu"),
    Case(1, 40, 128, "int8", 128, rounds=True, ordered=True),
)


def operands(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(case.tokens)
    groups = case.out, case.channels // case.group
    codes = rng.integers(0, 256, (case.out, case.channels // (2 if case.codes == "uint8" else 1))).astype(np.uint8)
    if case.codes == "float8_e4m3fn":
        codes = np.where((codes & 0x7F) == 0x7F, np.uint8(0), codes)
    size = {"uint8": 8, "int8": 74, "float8_e4m3fn": 120}[case.codes] * case.channels**0.5
    arrays: dict[str, Any] = {
        "x": jnp.asarray(rng.standard_normal((case.tokens, case.channels)), "bfloat16"),
        "codes": jnp.asarray(codes.view(jnp.dtype(case.codes))),
        "scale": jnp.asarray(rng.uniform(0.5, 1, groups) / size, jnp.float32),
    }
    if case.table:
        blocks = jnp.asarray(rng.uniform(1, 2, -(-groups[0] * groups[1] // 256)) / size, jnp.float32)
        book = jnp.sort(jnp.asarray(rng.uniform(-1, 1, 256), jnp.float32))
        arrays["scale"] = jnp.asarray(rng.integers(0, 256, groups), jnp.uint8)
        arrays["scale_table"] = ScaleTable(book, blocks, jnp.float32(1 / size))
    if case.offset:
        arrays["offset"] = jnp.asarray(rng.uniform(-8, 8, groups) / size, jnp.float32)
    if case.ordered:
        arrays["order"] = jnp.asarray(rng.permutation(case.channels), jnp.int32)
    if case.norm:
        arrays["norm"] = jnp.asarray(rng.uniform(0.5, 2, case.channels), "bfloat16")
    return arrays


def weights_of(case: Case, arrays: dict[str, Any]) -> np.ndarray:
    """float64[N, K], by the docstring's formulas, in x's order."""
    codes = np.asarray(arrays["codes"])
    if case.codes == "uint8":
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(case.out, -1)
    scale = np.asarray(arrays["scale"])
    if case.table:
        book, blocks, offset = map(np.asarray, arrays["scale_table"])
        flat = [book[code] * blocks[index // 256] + offset for index, code in enumerate(scale.reshape(-1))]
        scale = np.array(flat).reshape(scale.shape)
    weights = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), case.group, axis=1)
    if case.offset:
        weights += np.repeat(np.asarray(arrays["offset"], np.float64), case.group, axis=1)
    if case.ordered:
        in_place = np.empty_like(weights)
        in_place[:, np.asarray(arrays["order"])] = weights
        return in_place
    return weights


def rounded(x: np.ndarray, codes: str) -> np.ndarray:
    """Rows on the grid of a code's dtype, the largest magnitude on the largest code."""
    limit = 127 if codes == "int8" else 448
    scale = np.abs(x).max(1, keepdims=True) / limit
    exact = x / scale
    grid = np.rint(exact) if codes == "int8" else exact.astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64)
    return grid * scale


def in_float64(case: Case, arrays: dict[str, Any]) -> np.ndarray:
    x = np.asarray(arrays["x"]).astype(np.float64)
    if case.norm:
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON) * np.asarray(arrays["norm"]).astype(np.float64)
    out = (rounded(x, case.codes) if case.rounds else x) @ weights_of(case, arrays).T
    if case.activation is None:
        return out
    gate, up = out[:, : case.out // 2], out[:, case.out // 2 :]
    gates = {
        "silu": lambda g: g / (1 + np.exp(-g)),
        "relu": lambda g: np.maximum(g, 0),
        "gelu_tanh": lambda g: 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))),
    }
    return gates[case.activation](gate) * up


def multiply(case: Case, arrays: dict[str, Any], implementation: str | None, **options: Any) -> Any:
    function = partial(
        quantized_matmul,
        bits=4 if case.codes == "uint8" else 8,
        group=case.group,
        epsilon=EPSILON if case.norm else None,
        activation=case.activation,
        act_dtype=case.codes if case.rounds else None,
        implementation=implementation,
        **options,
    )
    return jax.jit(lambda arrays: function(**arrays))(arrays)


RUNS = [("triton-interpret", case) for case in CASES] + [("xla", case) for case in CASES[1::2]]
RUNS += [("reference", case) for case in CASES[::5]]


@pytest.mark.parametrize(("implementation", "case"), RUNS, ids=str)
def test_equals_float64(implementation: str, case: Case) -> None:
    arrays = operands(case)
    out = np.asarray(multiply(case, arrays, implementation)).astype(np.float64)
    expected = in_float64(case, arrays)
    assert out.shape == expected.shape
    # A normed row is rounded to bfloat16, once or twice, after which a code may be the neighbour of the one expected.
    error = np.abs(out - expected).mean() / np.abs(expected).mean()
    assert error < (2**-8 if not case.norm else 2**-6 if not case.rounds or case.codes == "int8" else 2**-4)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_maxima_go_from_product_to_product(codes: str) -> None:
    """Those of a gated result, of two tiles, are what the next product would find itself."""
    first = Case(5, 132, 96, codes, 96, rounds=True, norm=True, activation="silu")
    hidden, maxima = multiply(first, operands(first), "triton-interpret", gives_maxima=True)
    assert maxima.shape == (3, 5)
    np.testing.assert_array_equal(np.asarray(maxima).max(0), np.abs(np.asarray(hidden, np.float32)).max(1))
    second = Case(5, 40, 64, codes, 64, rounds=True)
    arrays = operands(second) | {"x": hidden[:, :64]}
    narrow = jnp.abs(arrays["x"].astype(jnp.float32)).max(1)
    parts = jnp.stack([narrow / 2, narrow, jnp.zeros_like(narrow)])
    given = multiply(second, arrays | {"row_maxima": parts}, "triton-interpret")
    np.testing.assert_array_equal(np.float32(given), np.float32(multiply(second, arrays, "triton-interpret")))


@pytest.mark.parametrize("implementation", ["triton-interpret", "xla"])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_rows_of_zeros_and_of_what_is_not_finite(codes: str, implementation: str) -> None:
    case = Case(4, 40, 128, codes, 128, rounds=True)
    arrays = operands(case)
    plain = np.float32(multiply(case, arrays, implementation))
    x = arrays["x"].at[0].set(0).at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
    out = np.float32(multiply(case, arrays | {"x": x}, implementation))
    assert not out[0].any() and not np.isfinite(out[1:3]).any()
    np.testing.assert_array_equal(out[3], plain[3])


def test_what_the_kernel_cannot_do_is_said() -> None:
    for case, message in (
        (Case(33, 40, 128, norm=True, activation="silu"), "33 tokens with more than a product: 32 at most"),
        (Case(2, 40, 128, norm=True, activation="gelu"), "activation='gelu': Pallas-Triton has no error function"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            multiply(case, operands(case), "triton-interpret")


def test_float8_activations_need_their_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 40, 128, "float8_e4m3fn", 128)
    arrays = operands(case)
    chosen = {}
    for name, capability in (("A100", (8, 0)), ("L4", (8, 9))):
        device = Device("gpu", name, capability, 100, present=False)
        monkeypatch.setattr("pallas_kernels.dispatch.current_device", lambda device=device: device)
        chosen[name] = [
            chosen_implementation(arrays["x"], arrays["codes"], arrays["scale"], bits=8, act_dtype=act)
            for act in (None, case.codes)
        ]
    # Below 8.9 the kernel decodes what XLA could only copy.
    assert chosen == {"A100": ["triton", "xla"], "L4": ["xla", "triton"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": jnp.ones(64)}, r"norm float32\(64,\) must be bfloat16\[64\]"),
        ({"norm": jnp.ones(64, jnp.bfloat16)}, "epsilon=None must be above 0 with a norm"),
        ({"epsilon": 1e-5}, "epsilon=1e-05 must be above 0 with a norm, and None without"),
        ({"activation": "swish"}, "activation='swish' must be one of silu"),
        ({"act_dtype": "int8"}, "act_dtype='int8' goes with codes of that dtype"),
        ({"order": jnp.arange(63)}, r"order int32\(63,\) must be int32\[64\]"),
        ({"row_maxima": jnp.ones((1, 2))}, "row_maxima are of what is rounded"),
        ({"row_maxima": jnp.ones((2,))}, r"row_maxima float32\(2,\) must be float32\[any, 2\]"),
        (
            {"scale_table": ScaleTable(jnp.ones(256), jnp.ones(1), jnp.float32(0))},
            r"scale \(float32\) with a scale_table of blocks\(1,\) must be uint8",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    given = {"x": jnp.zeros((2, 64), jnp.bfloat16), "codes": jnp.zeros((8, 32), jnp.uint8), "scale": jnp.zeros((8, 2))}
    with pytest.raises(ValueError, match=message):
        quantized_matmul(**({"bits": 4, "group": 32} | given | changes))
