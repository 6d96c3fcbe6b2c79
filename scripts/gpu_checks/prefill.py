"""Stage `prefill`: causal attention over whole prompts in bfloat16, in TFLOP/s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import make_work_list, paged_attention
from scripts.gpu_checks.case import Case, CheckFailed, Compiled, Program
from scripts.gpu_checks.pools import SEED, random_tables, random_values
from scripts.gpu_checks.session import Session
from scripts.gpu_checks.tolerance import attention_tolerance, relative_error

ASSUMED_FLOPS = 4e14
"""Only to choose how many calls a program has."""

SAMPLE_SECONDS = 0.03
PAGE_SIZE = 16
CHECKED_QUERIES = 8


@dataclass(frozen=True)
class Prefill:
    """B prompts of T tokens, N query and K KV heads."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        length = f"{self.length // 1024}k" if self.length >= 1024 else str(self.length)
        return f"{self.batch} x {length}"

    @property
    def flops(self) -> int:
        """Of one causal attention: two products over half of the square."""
        return 2 * self.batch * self.heads * self.head_dim * self.length * (self.length + 1)

    @property
    def calls(self) -> int:
        """Calls of a program: about two milliseconds, and enough for a CUDA graph."""
        return max(5, min(32, round(2e-3 / (self.flops / ASSUMED_FLOPS))))

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """q[B, T, N, H], and k[B, T, K, H] like v."""
        rows = (self.batch, self.length)
        return tuple(  # type: ignore[return-value]
            jax.ShapeDtypeStruct((*rows, heads, self.head_dim), jnp.bfloat16) for heads in (self.heads, self.kv_heads)
        )

    @property
    def num_bytes(self) -> int:
        """Device memory of the arrays, results and the gradients' float32."""
        return 8 * 2 * self.batch * self.length * (self.heads + 2 * self.kv_heads) * self.head_dim


SHAPES = (Prefill(1, 16384), Prefill(4, 4096), Prefill(16, 1024))
"""16k tokens each."""

REHEARSAL = (Prefill(2, 48, heads=4, kv_heads=2, head_dim=32),)

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def shapes(session: Session) -> tuple[Prefill, ...]:
    """The shapes of this run."""
    return REHEARSAL if session.options.rehearse else SHAPES


def cases(session: Session) -> list[Case]:
    """Flash attention and paged attention on every shape, then flash attention's gradients."""
    result = []
    for prefill in shapes(session):
        result += [flash_case(session, prefill), paged_case(session, prefill)]
    return [*result, gradient_case(session, shapes(session)[len(shapes(session)) // 2])]


def flash_case(session: Session, prefill: Prefill) -> Case:
    """Our flash attention on one shape."""
    attend = partial(_flash, session.implementation)
    return attention_case(session, "prefill", "flash_attention", prefill, attend, kernel="flash_attention")


def paged_case(session: Session, prefill: Prefill) -> Case:
    """Our paged attention on one shape."""
    attend = partial(_paged, prefill, session.implementation)
    return attention_case(session, "prefill", "paged_attention", prefill, attend, kernel="paged_attention bfloat16")


def attention_case(
    session: Session, stage: str, name: str, prefill: Prefill, attend: Attention, kernel: str | None = None
) -> Case:
    """`attend`, checked on a few queries and timed.

    Args:
        session, stage, name, kernel: as in `Case`.
        prefill: the shape.
        attend: ``(q[B, T, N, H], k[B, T, K, H], v) -> [B, T, N, H]``, causal.
    """
    calls = _calls(session, prefill)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = None
        for _ in range(calls):
            q = attend(q, k, v)
            first = q[:, -CHECKED_QUERIES:] if first is None else first
        assert first is not None
        return q, first

    q, kv = prefill.shapes
    program = Program(f"{stage} {name} {prefill.name}", jax.jit(run, donate_argnums=0), (q, kv, kv))
    return Case(
        stage,
        f"{name} {prefill.name}",
        partial(_run, prefill),
        (program, inputs_program(prefill)),
        kernel=kernel,
        num_bytes=prefill.num_bytes,
        facts={"batch": prefill.batch, "length": prefill.length, "what": name},
    )


def inputs_program(prefill: Prefill) -> Program:
    """Random q, k and v."""
    q, kv = prefill.shapes

    def make(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        queries = 4 * random_values(q.shape, q.dtype, seed)
        return queries, random_values(kv.shape, kv.dtype, seed + 1), random_values(kv.shape, kv.dtype, seed + 2)

    return Program(f"prefill inputs {prefill.name}", jax.jit(make), (SEED,))


def _flash(implementation: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out = flash_attention(q, k, v, causal=True, implementation=implementation)
    assert isinstance(out, jax.Array)
    return out


def _paged(prefill: Prefill, implementation: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same through pages cut from k and v, which XLA does once for all calls of a program."""
    batch, length, heads, head_dim = q.shape
    width = -(-length // PAGE_SIZE)
    table = random_tables(np.random.default_rng(9), 1, batch, width)[0]
    interleaved = jnp.stack([k, v], axis=3).reshape(batch, width, PAGE_SIZE, 2 * prefill.kv_heads, head_dim)
    by_page = interleaved.transpose(0, 1, 3, 2, 4).reshape(batch * width, 2 * prefill.kv_heads, PAGE_SIZE, head_dim)
    pages = jnp.concatenate([by_page[:1], by_page[np.argsort(table.reshape(-1))]])
    query_start = jnp.arange(batch + 1, dtype=jnp.int32) * length
    context_lens = jnp.full((batch,), length, jnp.int32)
    work_list = make_work_list(
        query_start,
        context_lens,
        num_tokens=batch * length,
        num_heads=heads,
        num_kv_heads=prefill.kv_heads,
        head_dim=head_dim,
        implementation=implementation,
    )
    out = paged_attention(
        q.reshape(batch * length, heads, head_dim),
        pages,
        jnp.asarray(table),
        query_start,
        context_lens,
        work_list=work_list,
        implementation=implementation,
    )
    return out.reshape(q.shape)


def gradient_case(session: Session, prefill: Prefill) -> Case:
    """Forward and backward of flash attention; its numbers are checked by the stage `correctness`."""
    calls = _calls(session, prefill)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = _flash(session.implementation, q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(calls):
            dq, dk, dv = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
            q = dq + jnp.mean(dk) + jnp.mean(dv)
        return q

    q, kv = prefill.shapes
    program = Program(f"prefill gradient {prefill.name}", jax.jit(run, donate_argnums=0), (q, kv, kv))
    return Case(
        "prefill",
        f"flash_attention gradient {prefill.name}",
        partial(_run_gradient, prefill),
        (program, inputs_program(prefill)),
        kernel="flash_attention gradient",
        num_bytes=prefill.num_bytes,
        facts={"batch": prefill.batch, "length": prefill.length, "what": "flash_attention forward + backward"},
    )


def _calls(session: Session, prefill: Prefill) -> int:
    return 2 if session.options.rehearse else prefill.calls


def _run(prefill: Prefill, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    q, k, v = make(jnp.int32(6))
    asked, keys, values = (np.asarray(x[-1], np.float32) for x in (q[:, -CHECKED_QUERIES:], k, v))
    last, first = run(q, k, v)
    error = _error(asked, keys, values, np.asarray(first[-1], np.float32))
    if not error <= attention_tolerance("bfloat16"):
        raise CheckFailed(f"relative error {error:.3g} against float64", error=error)
    return _timed(session, prefill, lambda q: run(q, k, v)[0], last, prefill.flops) | {"error": error}


def _run_gradient(prefill: Prefill, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    q, k, v = make(jnp.int32(6))
    # Backward has five products where forward has two.
    return _timed(session, prefill, lambda q: run(q, k, v), q, prefill.flops * 7 // 2)


def _timed(session: Session, prefill: Prefill, step: Any, q: jax.Array, flops: int) -> dict[str, Any]:
    timing = session.time(
        step,
        q,
        operations=_calls(session, prefill),
        sample_seconds=SAMPLE_SECONDS,
    )
    rates = {"tflop_per_s": flops / timing.seconds / 1e12} if session.options.claims_times else {}
    return timing.values(session.options.claims_times) | rates


def _error(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> float:
    """Of the last queries of a prompt, ``q[C, N, H]`` of ``k[T, K, H]``."""
    q, k, v, out = (x.astype(np.float64) for x in (q, k, v, out))
    group = q.shape[1] // k.shape[1]
    expected = np.zeros_like(q)
    first = k.shape[0] - q.shape[0]
    visible = np.arange(k.shape[0])[None, :] <= (first + np.arange(q.shape[0]))[:, None]
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1])
        weights = np.where(visible, np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
        expected[:, head] = weights @ v[:, head // group] / weights.sum(-1, keepdims=True)
    return relative_error(out, expected)
