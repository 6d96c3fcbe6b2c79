"""Flash attention, forward and backward: every implementation against all logits at once in float64.

The oracle lists by hand which keys a query sees, and `jax.grad` differentiates it. The tiles are of 16 queries and
keys, so that lengths below 50 have whole tiles, cut tiles and tiles nobody sees.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention, xla
from pallas_kernels.flash_attention.api import make_spec, run, self_check
from pallas_kernels.flash_attention.spec import AttentionSpec, Masks, keys_of, queries_of
from pallas_kernels.self_check import difference

TILE = 16
IMPLEMENTATIONS = ("xla", "triton-interpret")

# Of the largest value expected. Half of the digits that 16-bit results hold are lost twice on the way to a gradient.
TOLERANCES = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}


class Case(NamedTuple):
    """T queries, S keys, ``group`` query heads for each of K KV heads."""

    num_queries: int
    num_keys: int
    group: int = 1
    head_dim: int = 16
    dtype: str = "float32"
    kv_heads: int = 1
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    segments: bool = False
    lengths: tuple[int, ...] | None = None
    alibi: bool = False
    scale: float | None = None
    batch: int = 2


CASES = {
    # Each pair of kinds of masks, and of equal, fewer and more queries than keys, meets in one of the first nine.
    "window, segments, lengths": Case(37, 37, 2, 64, window=7, segments=True, lengths=(0, 1, 33)),
    "causal, two-sided window, fewer queries": Case(20, 45, 16, 80, "bfloat16", causal=True, window=(5, 3)),
    "soft cap, more queries": Case(45, 20, 1, 24, "float16", kv_heads=2, softcap=2.0),
    "everything, more queries": Case(
        45, 20, 3, 32, causal=True, window=(5, 3), softcap=2.0, segments=True, lengths=(0, 16, 19)
    ),
    "causal, window, soft cap, lengths": Case(20, 45, 8, 96, causal=True, window=7, softcap=2.0, lengths=(1, 40)),
    "causal, soft cap, segments": Case(37, 37, 4, 64, "bfloat16", causal=True, softcap=2.0, segments=True),
    "segments, lengths, fewer queries": Case(20, 45, 2, 128, kv_heads=2, segments=True, lengths=(45, 32)),
    "window, segments, more queries": Case(45, 20, 5, 72, "float16", window=7, segments=True),
    "two-sided window, lengths": Case(37, 37, 1, 256, "bfloat16", window=(5, 3), lengths=(17, 37)),
    "nothing masked, whole tiles": Case(32, 48, 2, kv_heads=3),
    "causal, whole tiles": Case(48, 48, 4, 128, causal=True),
    "one query": Case(1, 37, 8, causal=True),
    "one key": Case(37, 1, 2, causal=True),
    "window without an end": Case(37, 40, window=(None, 3)),
    "window of one": Case(20, 20, causal=True, window=1),
    "alibi, causal": Case(37, 45, 2, kv_heads=2, causal=True, alibi=True),
    "alibi, soft cap, window": Case(40, 40, 3, window=(9, 20), softcap=3.0, alibi=True, lengths=(40, 23)),
    "negative scale": Case(20, 37, causal=True, scale=-0.3),
}


class Operands(NamedTuple):
    """Inputs, cotangents and masks of a case; past `lengths` keys and values are NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    grad: np.ndarray
    lse_grad: np.ndarray
    masks: Masks


def operands(case: Case, seed: int = 0) -> Operands:
    rng = np.random.default_rng(seed)
    batch = len(case.lengths) if case.lengths else case.batch
    heads = case.group * case.kv_heads

    def normal(length: int, heads: int) -> np.ndarray:
        return np.asarray(rng.standard_normal((batch, length, heads, case.head_dim)), jnp.dtype(case.dtype))

    q, grad = normal(case.num_queries, heads), normal(case.num_queries, heads)
    k, v = normal(case.num_keys, case.kv_heads), normal(case.num_keys, case.kv_heads)
    for row, length in enumerate(case.lengths or ()):
        k[row, length:] = v[row, length:] = np.nan
    lse_grad = rng.standard_normal((batch, heads, case.num_queries)).astype(np.float32)
    q_segments = kv_segments = slopes = None
    if case.segments:
        kv_segments = np.sort(rng.integers(0, 3, (batch, case.num_keys)), axis=1).astype(np.int32)
        q_segments = np.sort(rng.integers(0, 3, (batch, case.num_queries)), axis=1).astype(np.int32)
    if case.alibi:
        slopes = rng.uniform(0.1, 1.0, (batch, heads)).astype(np.float32)
    lengths = None if case.lengths is None else np.array(case.lengths, np.int32)
    return Operands(q, k, v, grad, lse_grad, Masks(q_segments, kv_segments, lengths, slopes))


def visible_by_hand(case: Case, masks: Masks, batch: int) -> np.ndarray:
    """bool[B, T, S], pair by pair, from the words of `flash_attention`'s docstring."""
    visible = np.zeros((batch, case.num_queries, case.num_keys), bool)
    for b, i, j in np.ndindex(*visible.shape):
        position = i + case.num_keys - case.num_queries
        sees = not case.causal or j <= position
        if isinstance(case.window, int):
            sees &= position - case.window < j
        elif case.window is not None:
            left, right = case.window
            sees &= (left is None or position - j <= left) and (right is None or j - position <= right)
        if masks.q_segments is not None:
            sees &= bool(masks.q_segments[b, i] == masks.kv_segments[b, j])
        if case.lengths is not None:
            sees &= j < case.lengths[b]
        visible[b, i, j] = sees
    return visible


def oracle(case: Case, ops: Operands) -> tuple[np.ndarray, ...]:
    """out, lse, dq, dk, dv in float64."""
    visible = visible_by_hand(case, ops.masks, ops.q.shape[0])[:, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (jnp.repeat(array, case.group, axis=2) for array in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * (case.scale or case.head_dim**-0.5)
        if case.softcap is not None:
            logits = case.softcap * jnp.tanh(logits / case.softcap)
        if ops.masks.slopes is not None:
            position = np.arange(case.num_queries)[:, None] + case.num_keys - case.num_queries
            logits = logits - ops.masks.slopes[:, :, None, None] * np.abs(position - np.arange(case.num_keys))
        weights = jnp.where(visible, jnp.exp(logits), 0.0)
        total = weights.sum(-1, keepdims=True)
        total = jnp.where(total > 0, total, 1.0)
        # Of a query that sees nothing 0 stands for the -inf, which has no gradient.
        return jnp.einsum("bnts,bsnh->btnh", weights / total, v), jnp.log(total)[..., 0]

    @jax.jit
    def all_of(q: jax.Array, k: jax.Array, v: jax.Array, grads: Any) -> Any:
        outputs, pullback = jax.vjp(attend, q, k, v)
        return *outputs, *pullback(grads)

    with jax.enable_x64(True):
        q, k, v, *grads = (np.nan_to_num(array.astype(np.float64)) for array in ops[:5])
        out, lse, *gradients = all_of(q, k, v, tuple(grads))
        lse = np.where(visible.any(-1), lse, -np.inf)
        return tuple(np.asarray(array) for array in (out, lse, *gradients))


def attend_case(case: Case, implementation: str, masks: Masks, q: Any, k: Any, v: Any) -> Any:
    """The public function, and what lies below it for the slopes that only `flash_attn_func` takes."""
    if case.alibi:
        spec = make_spec(q, causal=case.causal, window=case.window, softcap=case.softcap, scale=case.scale)
        return run(q, k, v, masks, spec, with_lse=True, implementation=implementation)
    return flash_attention(
        q,
        k,
        v,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        scale=case.scale,
        segment_ids=None if masks.q_segments is None else (masks.q_segments, masks.kv_segments),
        kv_lengths=masks.kv_lengths,
        return_lse=True,
        implementation=implementation,
    )


def results(case: Case, ops: Operands, implementation: str) -> tuple[jax.Array, ...]:
    """out, lse, dq, dk, dv of an implementation."""

    @jax.jit
    def all_of(q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, grads: Any) -> Any:
        outputs, pullback = jax.vjp(partial(attend_case, case, implementation, masks), q, k, v)
        return *outputs, *pullback(grads)

    return all_of(ops.q, ops.k, ops.v, jax.tree.map(jnp.asarray, ops.masks), (ops.grad, ops.lse_grad))


def assert_close(actual: tuple[jax.Array, ...], expected: tuple[np.ndarray, ...], dtype: str) -> None:
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert got.dtype == (jnp.float32 if name == "lse" else dtype), name
        got = np.asarray(got).astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=name)
        got, want = got[np.isfinite(want)], want[np.isfinite(want)]
        error = np.abs(got - want).max(initial=0.0)
        limit = (1e-5 if name == "lse" else TOLERANCES[dtype]) * max(1.0, np.abs(want).max(initial=0.0))
        assert error <= limit, f"{name} is off by {error:.3g}, allowed is {limit:.3g}"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the XLA version the tiles that the interpreter has anyway."""
    monkeypatch.setattr(xla, "TILE", TILE)


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[Operands, tuple[np.ndarray, ...]]]:
    """Operands and oracle of a case, computed once for all implementations."""
    known: dict[str, Any] = {}

    def of(name: str) -> tuple[Operands, tuple[np.ndarray, ...]]:
        if name not in known:
            ops = operands(CASES[name])
            known[name] = ops, oracle(CASES[name], ops)
        return known[name]

    return of


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "reference"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, implementation: str, expected: Callable[[str], Any]) -> None:
    ops, want = expected(name)
    if implementation == "reference" and ops.q.dtype != np.float32:
        pytest.skip("its one difference between dtypes is the rounding of the result")
    assert_close(results(CASES[name], ops, implementation), want, CASES[name].dtype)


def test_xla_at_its_own_tile_size() -> None:
    case = Case(150, 290, 2, causal=True, window=(140, 0), lengths=(290, 200))
    ops = operands(case)
    assert_close(results(case, ops, "xla"), oracle(case, ops), "float32")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tiles_that_nobody_sees_are_not_read(implementation: str) -> None:
    """NaN marks what must not be read: 0 * NaN would show."""
    rng = np.random.default_rng(0)
    q, k, v, grad = (jnp.asarray(rng.standard_normal((1, 64, 1, 16)), jnp.float32) for _ in range(4))
    attend = partial(flash_attention, causal=True, window=9, implementation=implementation)
    late = slice(3 * TILE, None)
    out = attend(q, k.at[:, late].set(jnp.nan), v.at[:, late].set(jnp.nan))
    assert not jnp.isnan(out[:, : 3 * TILE]).any()
    out = attend(q, k.at[:, :TILE].set(jnp.nan), v.at[:, :TILE].set(jnp.nan))
    assert jnp.isnan(out[:, : TILE + 8]).all()
    assert not jnp.isnan(out[:, 2 * TILE :]).any()
    _, pullback = jax.vjp(attend, q.at[:, :TILE].set(jnp.nan), k, v)
    dq, dk, dv = pullback(grad.at[:, :TILE].set(jnp.nan))
    assert not any(jnp.isnan(d[:, TILE:]).any() for d in (dq, dk, dv))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_gradient_through_queries_that_see_nothing(implementation: str) -> None:
    """Merging parts by their log-sum-exp gives NaN where all parts are empty; it must stay there."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, 1, 16)), jnp.float32) for length in (20, 5, 5))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True, implementation=implementation)
        return jnp.sum(out) + jnp.sum(lse - lse)

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    np.testing.assert_array_equal(grads[0][:, :15], 0)
    assert jnp.any(grads[2] != 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_folds_into_the_batch(implementation: str) -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 2, 2, 12, 2, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, 20, 1, 16)), jnp.float32) for _ in range(2))
    lengths = jnp.array([[20, 7], [0, 17]])

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        attend = partial(flash_attention, causal=True, kv_lengths=lengths, implementation=implementation)
        out = attend(q, k, v)
        return jnp.sum(jnp.square(out)), out

    once = jax.grad(loss, argnums=(0, 1), has_aux=True)
    batched = jax.jit(jax.vmap(jax.vmap(once), in_axes=(0, None, None, None)))
    (dq, dk), out = batched(q, k, v, lengths)
    # k is not batched on the outer axis, its gradients are.
    for i, j in np.ndindex(2, 2):
        (one_dq, one_dk), one = jax.jit(once)(q[i, j], k[j], v[j], lengths[j])
        for got, want in ((dq[i, j], one_dq), (dk[i, j], one_dk), (out[i, j], one)):
            assert jnp.max(jnp.abs(got - want)) <= TOLERANCES["float32"] * max(1.0, float(jnp.max(jnp.abs(want))))


def test_one_array_of_segments_and_no_log_sum_exp() -> None:
    ops = operands(Case(37, 37, 2, segments=True))
    segments = jnp.asarray(ops.masks.q_segments)
    attend = partial(flash_attention, ops.q, ops.k, ops.v)
    pair = attend(segment_ids=(segments, segments), return_lse=True)
    np.testing.assert_array_equal(attend(segment_ids=segments), pair[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_end_with_the_keys(implementation: str) -> None:
    ops = operands(Case(20, 20, 2))
    attend = partial(flash_attention, ops.q, ops.k, ops.v, implementation=implementation)
    np.testing.assert_array_equal(attend(kv_lengths=[1000, -1]), attend(kv_lengths=jnp.array([20, 0])))


def test_without_a_gpu_xla_is_chosen() -> None:
    ops = operands(Case(20, 20))
    program = jax.make_jaxpr(partial(flash_attention, causal=True))(ops.q, ops.k, ops.v)
    assert "pallas_call" not in str(program)


@pytest.mark.parametrize("implementation", ["reference", "triton-interpret"])
@pytest.mark.parametrize(("num_queries", "num_keys", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_nothing_to_do(num_queries: int, num_keys: int, batch: int, implementation: str) -> None:
    q, k = jnp.ones((batch, num_queries, 4, 16)), jnp.ones((batch, num_keys, 2, 16))
    out, lse = flash_attention(q, k, k, causal=True, return_lse=True, implementation=implementation)
    assert out.shape == q.shape and lse.shape == (batch, 4, num_queries)
    assert not out.any() and (lse == -jnp.inf).all()


def test_heads_wider_than_the_kernels_go() -> None:
    q = jnp.ones((1, 3, 1, 264))
    with pytest.raises(NotImplementedError, match=r"head_dim=264.*256"):
        flash_attention(q, q, q, implementation="triton-interpret")
    np.testing.assert_allclose(flash_attention(q, q, q), 1.0, rtol=1e-6)


@pytest.mark.parametrize("scales", [1, 2])
def test_memory_of_the_xla_version_grows_with_the_tokens(scales: int) -> None:
    """Not with their square: the logits of one head alone would be ``4 * length**2`` bytes."""
    length = 1024 * scales
    array = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(flash_attention(q, k, v, causal=True, implementation="xla"))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(array, array, array).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    tensor_bytes = length * 4 * 64 * 4
    assert temp < 8 * tensor_bytes + (2 << 20)


def test_self_check_agrees() -> None:
    kernel, reference = (
        jax.jit(partial(self_check, implementation, "float32", 16, 1))()
        for implementation in ("triton-interpret", "reference")
    )
    assert difference(kernel, reference) is None


Q, K = jnp.ones((2, 6, 4, 16)), jnp.ones((2, 8, 2, 16))
IDS = jnp.zeros((2, 6), jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q[0], K, K), {}, r"q\(6, 4, 16\) must be \[B, T, N, H\]"),
        ((Q, K[..., :8], K[..., :8]), {}, r"k\(2, 8, 2, 8\).*same B and H"),
        ((Q, K, K[:, :7]), {}, r"v\(2, 7, 2, 16\) must have the shape of k\(2, 8, 2, 16\)"),
        ((Q[:, :, :3], K, K), {}, r"2 heads, which must divide the 3 heads"),
        ((Q.astype(jnp.int32), K, K), {}, r"dtype int32.*float32, bfloat16 or float16"),
        ((Q, K.astype(jnp.bfloat16), K), {}, r"k has dtype bfloat16.*cast"),
        ((Q, K, K), {"window": 0}, r"window=0 must be at least 1"),
        ((Q, K, K), {"window": (-1, 0)}, r"window=\(-1, 0\).*None for no limit"),
        ((Q, K, K), {"window": (1, 2, 3)}, r"window=\(1, 2, 3\) must be an int of at least 1, or a pair"),
        ((Q, K, K), {"window": 2.5}, r"window=2.5 must be an int"),
        ((Q, K, K), {"window": True}, r"window=True must be an int"),
        ((Q, K, K), {"softcap": float("inf")}, r"softcap=inf must be above 0, or None"),
        ((Q, K, K), {"softcap": 0.0}, r"softcap=0.0 must be above 0, or None"),
        ((Q, K, K), {"scale": float("inf")}, r"scale=inf must be finite"),
        ((Q, K, K), {"segment_ids": IDS}, r"segment_ids\(2, 6\), \(2, 6\).*give a pair"),
        ((Q, Q, Q), {"segment_ids": IDS.astype(jnp.float32)}, r"segment_ids has dtype float32"),
        ((Q, K, K), {"kv_lengths": jnp.ones(3, jnp.int32)}, r"kv_lengths is int32\(3,\).*\(2,\)"),
        ((Q, K, K), {"implementation": "cuda"}, r"implementation='cuda'.*triton"),
    ],
)
def test_errors_name_the_argument(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*arguments, **options)


@pytest.mark.parametrize("far", [2**31 - 1, 2**40])
def test_windows_wider_than_32_bits_count_hide_nothing(far: int) -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, length, 2, 8)), jnp.float32) for length in (5, 9))
    attend = jax.jit(flash_attention, static_argnames=("window", "implementation"))
    everything = attend(q, k, k, implementation="xla")
    for window in (far, (far, None), (None, far)):
        np.testing.assert_array_equal(attend(q, k, k, window=window, implementation="xla"), everything)


def test_spans_of_tiles() -> None:
    """Against what each pair of query and key says, for spans of 4 rows."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_queries, num_keys = rng.integers(1, 24, 2)
        offset, length = num_keys - num_queries, rng.integers(0, num_keys + 1)
        left, right = (None if rng.random() < 0.3 else int(rng.integers(0, 9)) for _ in range(2))
        spec = AttentionSpec(1.0, None, left, right)
        i, j = np.mgrid[-4 : num_queries + 4, : num_keys + 4]
        seen = (j < length) & (left is None or i + offset - j <= left) & (right is None or j - i - offset <= right)
        first = int(rng.integers(0, num_queries))
        tile = seen[first + 4 : first + 8]  # rows past the end count as queries here
        span = keys_of(spec, first + offset, first + 3 + offset, jnp.int32(length), num_keys)
        assert not tile[:, [*range(int(span.start)), *range(int(span.stop), num_keys)]].any()
        assert tile[:, int(span.full_start) : int(span.full_stop)].all()
        first = int(rng.integers(0, num_keys))
        tile = seen[4 : num_queries + 4, first : first + 4]
        span = queries_of(spec, first, first + 3, jnp.int32(length), int(num_queries), int(offset))
        assert not tile[[*range(int(span.start)), *range(int(span.stop), num_queries)]].any()
        assert tile[int(span.full_start) : int(span.full_stop)].all()
