"""The rotary embedding with the KV write: against float64, against the two steps it stands for, in place."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.rope import Rotation, rotate
from pallas_kernels import dispatch, self_check
from pallas_kernels.dispatch import Device
from pallas_kernels.kv_write import api, kv_write, rope_kv_write, triton
from pallas_kernels.kv_write.config import Tiles

IMPLEMENTATIONS = ("xla", "triton-interpret")
TOLERANCES = {"float32": 3e-7, "bfloat16": 2**-8, "float16": 2**-11}
"""Of a rotated channel, relative to the pair it comes from: half an ulp at worst, or two roundings in float32."""


class Case(NamedTuple):
    heads: int
    groups: int
    head_dim: int
    rotary_dim: int
    dtype: str = "float32"
    page_size: int = 4


CASES = (
    Case(2, 4, 64, 64),
    Case(1, 5, 80, 80, "bfloat16"),
    Case(2, 1, 96, 96, "float16"),
    Case(2, 3, 128, 128, "bfloat16", page_size=16),
    Case(1, 2, 256, 64),
    Case(3, 1, 80, 32, "bfloat16"),
    Case(1, 16, 64, 2),
)


class Inputs(NamedTuple):
    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    pages: jax.Array
    page_ids: jax.Array
    offsets: jax.Array


def inputs(case: Case, pool: str | None = None, tokens: int = 3, seed: int = 0) -> Inputs:
    """Tokens at far positions, on pages of their own; the pool is full of ones."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((tokens, case.heads, case.groups + 2, case.head_dim))
    angles = rng.uniform(0, 1e4, (tokens, case.rotary_dim // 2)).astype(np.float32)
    width = case.head_dim // 2 if pool == "uint8" else case.head_dim
    pages = jnp.ones((tokens + 2, 2 * case.heads, case.page_size, width), pool or case.dtype)
    places = jnp.arange(tokens) + 1, (jnp.arange(tokens) + 2) % case.page_size
    return Inputs(jnp.asarray(qkv, case.dtype), jnp.cos(angles), jnp.sin(angles), pages, *places)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """One row, channel by channel, in float64."""
    out, half = x.astype(np.float64), len(cos)
    for i in range(half):
        turned = complex(x[i], x[i + half]) * complex(cos[i], sin[i])
        out[i], out[i + half] = turned.real, turned.imag
    return out


def scales_of(pages: jax.Array) -> jax.Array | None:
    return None if jnp.issubdtype(pages.dtype, jnp.floating) and pages.dtype.itemsize > 1 else jnp.ones(pages.shape[:3])


def assert_close(got: Any, expected: np.ndarray, dtype: str) -> None:
    size = np.abs(expected) + np.abs(np.roll(expected, expected.shape[-1] // 2, -1)) + 1.0
    np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - expected), TOLERANCES[dtype] * size * 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_and_keys_are_rotated_and_land_in_place(case: Case, implementation: str) -> None:
    given = inputs(case)
    q, pages = jax.jit(partial(rope_kv_write, implementation=implementation))(*given)
    assert (q.dtype, pages.dtype) == (case.dtype, case.dtype)
    assert q.shape == (3, case.heads * case.groups, case.head_dim)
    qkv, cos, sin = (np.asarray(array, np.float64) for array in given[:3])
    expected = np.ones(pages.shape)
    for token in range(3):
        for head in range(case.heads):
            rows = [rotated(row, cos[token], sin[token]) for row in qkv[token, head, :-1]]
            assert_close(q[token, case.groups * head : case.groups * (head + 1)], np.stack(rows[:-1]), case.dtype)
            place = given.page_ids[token], 2 * head, given.offsets[token]
            expected[place], expected[place[0], 2 * head + 1, place[2]] = rows[-1], qkv[token, head, -1]
    assert_close(pages, expected, case.dtype)
    np.testing.assert_array_equal(np.asarray(pages)[:, 1::2], expected[:, 1::2])  # values are not rotated


@pytest.mark.parametrize("pool", ["float32", "int8", "float8_e4m3fn", "float8_e5m2", "uint8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_rotate_then_kv_write_bit_for_bit(implementation: str, pool: str) -> None:
    case = Case(2, 3, 20, 20)
    given = inputs(case, pool, seed=1)
    scales = scales_of(given.pages)

    @jax.jit
    def in_two_steps(qkv: jax.Array, cos: jax.Array, sin: jax.Array, *places: jax.Array) -> Any:
        turned = rotate(qkv[:, :, :4], Rotation(cos, sin))
        written = kv_write(turned[:, :, 3], qkv[:, :, 4], *places, scales=scales, implementation="reference")
        return turned[:, :, :3].reshape(3, 6, 20), *(written if scales is not None else (written,))

    got = jax.jit(partial(rope_kv_write, implementation=implementation))(*given, scales=scales)
    for one, other in zip(got, in_two_steps(*given), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("pool", ["int8", "float8_e4m3fn", "uint8"])
def test_bytes_in_pairs(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 2 to 4 GiB are written as int16; here every pool, and in three spans of channels."""
    given = inputs(Case(2, 3, 32, 24), pool, seed=3)
    run = partial(rope_kv_write, implementation="triton-interpret")
    expected = jax.jit(run)(*given, scales=scales_of(given.pages))
    monkeypatch.setattr("pallas_kernels.byte_pairs.SIGNED_LIMIT", 0)
    got = jax.jit(partial(run))(*given, scales=scales_of(given.pages))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("pool", ["int8", "uint8"])
def test_bfloat16_keys_are_quantised_from_what_they_round_to(pool: str) -> None:
    """Left to itself XLA drops a rounding to bfloat16 that is undone at once."""
    given = inputs(Case(2, 3, 24, 16, "bfloat16"), pool, seed=2)
    results = []
    for name in IMPLEMENTATIONS:
        function = partial(rope_kv_write, implementation=name)
        run = jax.jit(function, compiler_options={"xla_allow_excess_precision": False})
        results.append(run(*given, scales=scales_of(given.pages)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_programs_of_several_heads_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(Case(4, 3, 24, 16), "int8", seed=3)
    expected = jax.jit(partial(rope_kv_write, implementation="reference"))(*given, scales=scales_of(given.pages))
    monkeypatch.setattr(triton, "tiles_for", lambda *_: Tiles(heads=2, num_warps=1))
    run = jax.jit(partial(rope_kv_write, implementation="triton-interpret"))
    jax.tree.map(np.testing.assert_array_equal, run(*given, scales=scales_of(given.pages)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", [3, 4], ids=["key", "value"])
def test_what_is_not_finite_marks_its_own_token_and_head(implementation: str, row: int) -> None:
    given = inputs(Case(2, 3, 16, 8), "float8_e4m3fn")
    run = jax.jit(partial(rope_kv_write, implementation=implementation))
    bad = run(*given._replace(qkv=given.qkv.at[1, 1, row, 15].set(jnp.inf)), scales=scales_of(given.pages))
    good = run(*given, scales=scales_of(given.pages))
    q, pages, scales = (np.asarray(array, np.float64) for array in good)
    page, offset = given.page_ids[1], given.offsets[1]
    pages[page, 2:, offset] = 0
    scales[page, 2:, offset] = np.nan, 1
    np.testing.assert_array_equal(np.asarray(bad[0]), q)
    np.testing.assert_array_equal(np.asarray(bad[1], np.float64), pages)
    np.testing.assert_array_equal(np.asarray(bad[2]), scales)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_tokens_write_to_page_0_and_still_have_queries(implementation: str) -> None:
    given = inputs(Case(1, 2, 16, 16))
    page_ids, offsets = jnp.array([0, 3, 0]), jnp.array([0, 2, 0])
    run = jax.jit(partial(rope_kv_write, implementation=implementation))
    q, pages = run(*given._replace(page_ids=page_ids, offsets=offsets))
    np.testing.assert_array_equal(q, run(*given)[0])
    changed = {tuple(place) for place in np.argwhere((np.asarray(pages) != 1).any((1, 3)))}
    assert changed == {(0, 0), (3, 2)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_without_tokens_writes_nothing(implementation: str) -> None:
    given = inputs(Case(1, 2, 16, 16), tokens=0)
    q, pages = jax.jit(partial(rope_kv_write, implementation=implementation))(*given)
    assert q.shape == (0, 2, 16)
    np.testing.assert_array_equal(pages, given.pages)


def test_bad_arguments_are_refused_by_name() -> None:
    given = inputs(Case(2, 3, 16, 16))
    with pytest.raises(ValueError, match=r"qkv\(3, 2, 2, 16\) must be .* G >= 1"):
        rope_kv_write(*given._replace(qkv=given.qkv[:, :, :2]))
    with pytest.raises(ValueError, match=r"cos\(3, 9\) and sin\(3, 9\) must be \[T=3, R / 2\] with R in 2 \.\. H=16"):
        rope_kv_write(*given._replace(cos=jnp.ones((3, 9)), sin=jnp.ones((3, 9))))
    with pytest.raises(ValueError, match=r"cos \(bfloat16\)"):
        rope_kv_write(*given._replace(cos=given.cos.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"pages float32\(5, 2, 4, 16\) must be \[P, 2K, S, H\] with K=2"):
        rope_kv_write(*given._replace(pages=given.pages[:, :2]))
    with pytest.raises(ValueError, match=r"page_ids\(2,\)"):
        rope_kv_write(*given._replace(page_ids=given.page_ids[:2]))


def test_halves_that_int4_cannot_pair_are_not_attempted() -> None:
    given = inputs(Case(2, 3, 16, 6), "uint8")
    with pytest.raises(NotImplementedError, match="int4"):
        rope_kv_write(*given, scales=scales_of(given.pages), implementation="triton-interpret")


@pytest.mark.parametrize("pool", ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_the_self_checks_pass_right_kernels(pool: str) -> None:
    cases: list[Any] = [
        (check, (*case, paired))
        for check, case in (
            (api._check_kv_write, ("bfloat16", pool, 20)),
            (api._check_rope_kv_write, ("bfloat16", pool, 20, 8, 5)),
        )
        for paired in (False, True)[: 1 if pool == "bfloat16" else 2]
    ]
    for check, case in cases:
        one, other = (jax.jit(partial(check, name, *case))() for name in ("triton-interpret", "reference"))
        assert self_check.difference(one, other) is None


def test_the_self_check_finds_a_wrong_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("bfloat16", "int8", 16, 8, 5)
    expected = jax.jit(partial(api._check_rope_kv_write, "reference", *case))()
    monkeypatch.setattr(triton, "_rotate", lambda parts, cos, sin: parts)
    got = jax.jit(partial(api._check_rope_kv_write, "triton-interpret", *case))()
    assert "off by" in str(self_check.difference(got, expected))


def test_a_gpu_where_the_kernel_fails_gets_the_numbers_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a GPU is one: it cannot compile the kernel."""
    monkeypatch.setattr(dispatch, "current_device", lambda: Device("gpu", "NVIDIA H200", (9, 0), 132))
    given = inputs(Case(2, 3, 16, 16))
    with pytest.warns(RuntimeWarning, match=r"rope_kv_write falls back .*float32, 16, 8, 5.*Only interpret mode"):
        got = jax.jit(rope_kv_write)(*given)
    expected = jax.jit(partial(rope_kv_write, implementation="reference"))(*given)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
