"""Products with quantised matrices, against NumPy on what the matrices stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.array import QuantArray, dequantize, take_rows
from jaxinfer.quant.gpu_matmul import gpu_product
from jaxinfer.quant.matmul import project
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage
from pallas_kernels.dispatch import Device

STORAGES = [
    Storage("int8"),
    Storage("int8", act_bits=8),
    Storage("int8", 32),
    Storage("fp8"),
    Storage("int4", 64),
    Storage("int4", 32, symmetric=False),
    Storage("nf4", 64),
    Storage("nf4", 64, double=True),
    Storage("fp4", 64),
]
FORMS = {"cpu": project, "gpu": gpu_product}


def matrix(storage: Storage, rows: int = 24, seed: int = 0) -> QuantArray:
    values = np.random.default_rng(seed).standard_normal((rows, 2, 64)).astype(np.float32)
    return jax.device_put(quantize(values, 1, storage))


def activations(tokens: int, width: int = 128) -> jax.Array:
    rng = np.random.default_rng(tokens)
    values = rng.standard_normal((tokens, width)) * rng.choice([1e-3, 1.0, 50.0], (tokens, 1))
    return jnp.asarray(values, jnp.float32)


def rounded_rows(x: jax.Array) -> np.ndarray:
    """Each row on a grid of 127 steps up to its largest magnitude."""
    wide = np.asarray(x, np.float64)
    scale = np.abs(wide).max(1, keepdims=True) / 127
    scale[scale == 0] = 1
    return np.rint(wide / scale) * scale


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_products(storage: Storage, form: str) -> None:
    weight = matrix(storage)
    values = dequantized(jax.tree.map(np.asarray, weight)).reshape(24, 128).astype(np.float64)
    np.testing.assert_allclose(dequantize(weight).reshape(24, 128), values, atol=1e-6)
    for tokens in (1, 3, 40):
        x = activations(tokens)
        expected = (rounded_rows(x) if storage.act_bits == 8 else np.asarray(x, np.float64)) @ values.T
        out = jax.jit(FORMS[form])(x, weight)
        assert out.shape == (tokens, 24) and out.dtype == jnp.float32
        largest = np.abs(np.asarray(x)).max(1, keepdims=True) * np.abs(values).sum(1)
        # Activations of 16 bits are two halves of 8 on the CPU, where a channel has one scale.
        assert (
            np.abs(out - expected) <= largest * (1.6e-5 if storage == Storage("int8") and form == "cpu" else 2e-6)
        ).all()


def test_fp8_rounds_activations_where_they_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """From compute capability 8.9 on, each row with its largest magnitude at 448; not before, and not on a CPU."""
    weight, x = matrix(Storage("fp8", act_bits=8)), activations(3)
    values = dequantized(jax.tree.map(np.asarray, weight)).reshape(24, 128).astype(np.float64)
    wide = np.asarray(x, np.float64)
    scale = np.abs(wide).max(1, keepdims=True) / 448
    rounded = (wide / scale).astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
    for capability, expected in (((9, 0), rounded), ((8, 0), wide)):
        device = Device("gpu", "a GPU", capability, 100, present=False)
        monkeypatch.setattr("jaxinfer.quant.gpu_matmul.current_device", lambda device=device: device)
        out = np.asarray(gpu_product(x, weight), np.float64)
        np.testing.assert_allclose(out, expected @ values.T, rtol=1e-4, atol=1e-4 * np.abs(wide).max())
    np.testing.assert_allclose(project(x, weight), wide @ values.T, rtol=1e-4, atol=1e-4 * np.abs(wide).max())


def test_w8a8_rows_do_not_depend_on_their_neighbours() -> None:
    weight, x = matrix(Storage("int8", act_bits=8)), activations(40)
    together = np.asarray(jax.jit(project)(x, weight))
    for row in (0, 7, 39):
        np.testing.assert_array_equal(jax.jit(project)(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("storage", [Storage("int8"), Storage("int8", act_bits=8), Storage("int4", 64)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_and_stays_in_its_row(storage: Storage, bad: float) -> None:
    weight = matrix(storage)
    x = activations(3).at[1, 5].set(bad)
    out = np.asarray(jax.jit(project)(x, weight))
    assert not np.isfinite(out[1]).any() and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("storage", [Storage("int8"), Storage("int8", act_bits=8)], ids=str)
def test_zeros_give_zeros(storage: Storage) -> None:
    run = jax.jit(project)
    assert (np.asarray(run(jnp.zeros((3, 128)), matrix(storage))) == 0).all()
    empty = jax.device_put(quantize(np.zeros((24, 2, 64), np.float32), 1, storage))
    assert (np.asarray(run(activations(3), empty)) == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_activations_of_16_bits_keep_their_dtype(dtype: jnp.dtype) -> None:
    weight = matrix(Storage("int8"))
    for form in FORMS.values():
        out = form(activations(3)[:1].astype(dtype), weight)
        assert out.dtype == dtype
        expected = (
            np.asarray(activations(3)[:1].astype(dtype), np.float64) @ np.asarray(dequantize(weight)).reshape(24, -1).T
        )
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("storage", [Storage("int8"), Storage("int4", 32, symmetric=False)], ids=str)
def test_rows_of_a_table(storage: Storage) -> None:
    table = np.random.default_rng(1).standard_normal((11, 64)).astype(np.float32)
    weight = quantize(table, 1, storage, "bfloat16")
    ids = jnp.array([[3, 10], [0, 3]])
    rows = take_rows(jax.device_put(weight), ids)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, jnp.asarray(dequantized(weight)[np.asarray(ids)], jnp.bfloat16))


def test_matrices_wait_for_their_activations() -> None:
    """Or all would be in float32 at the beginning of a program."""

    def chain(x: jax.Array, weights: list[QuantArray]) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(project(x, weight))
        return x

    rng = np.random.default_rng(0)
    weights = [quantize(rng.standard_normal((256, 256)).astype(np.float32), 1, Storage("int8")) for _ in range(12)]
    compiled = jax.jit(chain).lower(jnp.zeros((64, 256)), jax.device_put(weights)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 3 * 4 * 256 * 256
