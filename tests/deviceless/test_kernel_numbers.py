"""What compiled kernels compute: their PTX, carried out instruction by instruction, against float64.

The interpreter knows nothing of what Triton and XLA make of a kernel. Here numbers come out that a GPU would give, but
for the order of sums, and mistakes of the compilers show.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plt

from jaxinfer.planning import deviceless
from jaxinfer.planning.deviceless import compile_for, gpu_target
from pallas_kernels.paged_attention.code_ptx import decode, decode_int4
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.triton_call import triton_call
from tests.deviceless.ptx_machine import execute

Compute = Callable[..., np.ndarray]


@pytest.fixture
def compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compute:
    """Compiles a function of arrays for a GPU and carries out its kernel: [pieces, *result's shape]."""
    monkeypatch.setattr(deviceless.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))

    def run(gpu: str, name: str, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
        shape = jax.eval_shape(function, *arrays)
        abstract = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        report = compile_for(gpu_target(gpu), jax.jit(function), *abstract)
        kernel = next(kernel for kernel in report.kernels if kernel.name == name)
        ptx = next(text for path in tmp_path.glob("*.ptx") if f".entry {name}(" in (text := path.read_text()))
        result = np.full((kernel.grid[1], *shape.shape), np.nan, np.float32)
        return execute(ptx, name, arrays, result, kernel.grid, kernel.threads, kernel.shared_bytes)

    return run


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])
def test_decoded_pairs_stay_in_order(compute: Compute, dtype: str) -> None:
    """As paged attention decodes values and int4: joined again, they are what was stored."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (32, 32 if dtype == "int4" else 64)).astype(np.uint8)
    if dtype == "int4":
        signed = bits.view(np.int8)
        expected = np.stack([(bits << 4).view(np.int8) >> 4, signed >> 4], axis=2).reshape(32, 64).astype(np.float64)
    else:
        bits = np.where((bits & 0x7F) == 0x7F, np.uint8(0), bits)  # NaN of e4m3
        expected = bits.view(jnp.dtype(dtype)).astype(np.float64)
    stored = bits if dtype == "int4" else bits.view(jnp.dtype(dtype))

    def kernel(x_ref: Any, codes_ref: Any, out_ref: Any) -> None:
        codes = codes_ref[...]
        if dtype == "int4":
            parts = decode_int4(codes, False)
        else:
            parts = tuple(decode(part, False) for part in jnp.unstack(codes.reshape(32, 32, 2), axis=2))
        out_ref[...] = plt.dot(x_ref[...], jnp.stack(parts, axis=2).reshape(32, 64), trans_b=True)

    call = triton_call(
        kernel, name="joined", out_shape=jax.ShapeDtypeStruct((16, 32), jnp.float32), grid=(1,), num_warps=1
    )
    x = rng.standard_normal((16, 64)).astype(jnp.bfloat16)
    (out,) = compute("h200", "joined", call, x, stored)
    np.testing.assert_allclose(out, x.astype(np.float64) @ expected.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("gpu", "tokens", "bits", "group", "kind", "dtype"),
    [
        ("a100-80g", 5, 4, 128, "offset", "bfloat16"),
        ("a100-80g", 16, 4, 64, "table", "float16"),
        ("a100-80g", 70, 8, 32, "scale", "bfloat16"),
        ("rtx4090", 16, 8, 64, "offset", "float16"),
        ("rtx4090", 130, 4, 32, "offset", "bfloat16"),
        ("h200", 8, 4, 128, "offset", "bfloat16"),
        ("h200", 17, 4, 64, "table", "bfloat16"),
        ("h200", 3, 4, 512, "scale", "bfloat16"),
        ("h200", 70, 4, 32, "offset", "bfloat16"),
        ("h200", 130, 4, 64, "table", "bfloat16"),
        ("h200", 129, 8, 32, "scale", "bfloat16"),
    ],
)
def test_products_with_packed_weights(
    compute: Compute, gpu: str, tokens: int, bits: int, group: int, kind: str, dtype: str
) -> None:
    rng = np.random.default_rng(tokens)
    rows, channels = 130, 512
    values = rng.integers(*((0, 16) if bits == 4 else (-128, 128)), (rows, channels))
    codes = (values[:, 0::2] | values[:, 1::2] << 4).astype(np.uint8) if bits == 4 else values.astype(np.int8)
    x = rng.standard_normal((tokens, channels)).astype(jnp.dtype(dtype))
    scale, offset = (rng.uniform(-1, 1, (rows, channels // group)).astype(np.float32) for _ in range(2))
    table = rng.uniform(-1, 1, 16).astype(np.float32)
    extra = {"offset": ("offset", 8 * offset), "table": ("codebook", table)}.get(kind)

    def function(x: jax.Array, codes: jax.Array, scale: jax.Array, *more: jax.Array) -> jax.Array:
        named: dict[str, Any] = {extra[0]: more[0]} if extra else {}
        return quantized_matmul(x, codes, scale, bits=bits, group=group, out_dtype=jnp.float32, **named)

    out = compute(gpu, "quantized_matmul", function, x, codes, scale, *([extra[1]] if extra else []))
    weights = (table[values] if kind == "table" else values) * np.repeat(scale.astype(np.float64), group, axis=1)
    if kind == "offset":
        weights += np.repeat(8.0 * offset, group, axis=1)
    expected = x.astype(np.float64) @ weights.T
    # Codes are exact for few tokens; for many, weights are rounded, and so are the table's entries.
    tolerance = 1e-5 if tokens <= 32 and kind != "table" else 2**-7
    assert np.abs(out.astype(np.float64).sum(0) - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("gpu", "tokens", "group"), [("a100-80g", 5, 128), ("a100-80g", 70, 128), ("rtx4090", 16, 64), ("h200", 20, 32)]
)
def test_products_with_e4m3_codes(compute: Compute, gpu: str, tokens: int, group: int) -> None:
    """No instruction for these numbers is used, which the A100 does not have."""
    rng = np.random.default_rng(tokens)
    rows, channels = 130, 256
    bits = rng.integers(0, 256, (rows, channels)).astype(np.uint8)
    codes = np.where((bits & 0x7F) == 0x7F, np.uint8(0), bits).view(jnp.float8_e4m3fn)  # NaN
    x = rng.standard_normal((tokens, channels)).astype(jnp.bfloat16)
    scale = rng.uniform(-1, 1, (rows, channels // group)).astype(np.float32)

    def function(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        return quantized_matmul(x, codes, scale, bits=8, group=group, out_dtype=jnp.float32)

    out = compute(gpu, "quantized_matmul", function, x, codes, scale)
    weights = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), group, axis=1)
    expected = x.astype(np.float64) @ weights.T
    tolerance = 1e-5 if tokens <= 32 else 2**-7
    assert np.abs(out.astype(np.float64).sum(0) - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize(("gpu", "bits", "ordered"), [("a100-80g", 4, True), ("h200", 4, False), ("h200", 8, True)])
def test_norms_and_gates_around_products(compute: Compute, gpu: str, bits: int, ordered: bool) -> None:
    rng = np.random.default_rng(bits)
    tokens, gates, channels, group = 5, 40, 256, 64
    values = rng.integers(*((0, 16) if bits == 4 else (-128, 128)), (2 * gates, channels))
    codes = (values[:, 0::2] | values[:, 1::2] << 4).astype(np.uint8) if bits == 4 else values.astype(np.int8)
    x = rng.standard_normal((tokens, channels)).astype(jnp.bfloat16)
    scale = (rng.uniform(-1, 1, (2 * gates, channels // group)) / (8 if bits == 4 else 64) / 16).astype(np.float32)
    norm = rng.uniform(0.5, 2, channels).astype(jnp.bfloat16)
    order = rng.permutation(channels).astype(np.int32)

    # In the order of the kernel's own operands.
    def function(x: jax.Array, codes: jax.Array, scale: jax.Array, *more: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"bits": bits, "group": group, "order": more[0] if ordered else None}
        return quantized_matmul(
            x, codes, scale, norm=more[-1], epsilon=1e-5, activation="relu", out_dtype=jnp.float32, **options
        )

    more = (order, norm) if ordered else (norm,)
    (out,) = compute(gpu, "quantized_matmul", function, x, codes, scale, *more)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * norm.astype(np.float64)
    normed = normed[:, order] if ordered else normed
    gate, up = np.split(normed @ (values * np.repeat(scale.astype(np.float64), group, axis=1)).T, 2, axis=1)
    expected = np.maximum(gate, 0) * up
    assert np.abs(out - expected).max() < 2**-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("gpu", "tokens", "codes"),
    [("a100-80g", 5, "int8"), ("rtx4090", 20, "float8_e4m3fn"), ("h200", 20, "int8"), ("h200", 5, "float8_e4m3fn")],
)
def test_rounded_activations(compute: Compute, gpu: str, tokens: int, codes: str) -> None:
    """Numbers that are codes themselves, with the largest code in each row: sums of products are exact."""
    rng = np.random.default_rng(tokens)
    rows, channels, limit = 72, 256, 127 if codes == "int8" else 448
    bits = rng.integers(0, 256, (rows, channels)).astype(np.uint8)
    if codes == "float8_e4m3fn":
        bits = np.where((bits & 0x7F) == 0x7F, np.uint8(0), bits)  # NaN
    weights = bits.view(jnp.dtype(codes))
    x = rng.choice(np.arange(-15, 16), (tokens, channels))
    x[:, 7] = limit
    maxima = np.full((1, tokens), float(limit), np.float32)
    scale = rng.uniform(-1, 1, (rows, 1)).astype(np.float32)

    def function(x: jax.Array, codes_: jax.Array, scale: jax.Array, maxima: jax.Array) -> jax.Array:
        return quantized_matmul(
            x, codes_, scale, bits=8, group=channels, act_dtype=codes, row_maxima=maxima, out_dtype=jnp.float32
        )

    out = compute(gpu, "quantized_matmul", function, x.astype(jnp.bfloat16), weights, scale, maxima)
    expected = (x.astype(np.float64) @ weights.astype(np.float64).T) * scale[:, 0]
    np.testing.assert_allclose(out.astype(np.float64).sum(0), expected, rtol=1e-5, atol=1e-3 * np.abs(expected).max())
