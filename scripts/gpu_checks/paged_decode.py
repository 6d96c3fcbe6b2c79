"""Stage `paged_decode`: one new token a row over long contexts, as a share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_format import dequantize, format_of
from pallas_kernels.paged_attention import make_work_list, paged_attention
from scripts.gpu_checks.case import Case, CheckFailed, Compiled, Program
from scripts.gpu_checks.pools import SEED, random_scales, random_tables, random_values
from scripts.gpu_checks.session import Session
from scripts.gpu_checks.tolerance import attention_tolerance, relative_error

HEAD_DIM = 128
KV_HEADS = 8
BEYOND_L2 = 256 << 20
"""Calls that follow each other read different pages until this many bytes have passed: no cache holds them."""

ASSUMED_BANDWIDTH = 4e12
"""Only to choose how many calls a program has."""

SAMPLE_SECONDS = 0.03
POOL_DTYPES = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn", "int4": "uint8"}


@dataclass(frozen=True)
class Decode:
    """B rows of a context each, G query heads for each of `kv_heads` KV heads.

    `spread` makes the contexts uneven: they grow evenly from nothing to twice the mean.
    """

    rows: int
    context: int
    group: int = 4
    kv: str = "bf16"
    page_size: int = 16
    spread: bool = False
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM

    @property
    def name(self) -> str:
        page = f" page {self.page_size}" if self.page_size != 16 else ""
        context = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        return f"{self.rows} x {context}{' uneven' if self.spread else ''} G{self.group} {self.kv}{page}"

    @property
    def dtype(self) -> Any:
        """Of the pool."""
        return jnp.dtype(POOL_DTYPES[self.kv])

    @property
    def contexts(self) -> np.ndarray:
        """int32[B]."""
        if not self.spread:
            return np.full(self.rows, self.context, np.int32)
        return np.round(2 * self.context * (np.arange(self.rows) + 1) / (self.rows + 1)).astype(np.int32)

    @property
    def width(self) -> int:
        """M, entries of a block table."""
        return -(-int(self.contexts.max()) // self.page_size)

    @property
    def position_bytes(self) -> int:
        """Of the keys and values of a position of one sequence, scales included."""
        row = self.head_dim // 2 if self.kv == "int4" else self.head_dim * self.dtype.itemsize
        return 2 * self.kv_heads * (row + (0 if self.kv == "bf16" else 4))

    @property
    def call_bytes(self) -> int:
        """What one call must move: the context of every row, the queries and the results."""
        queries = 2 * 2 * self.rows * self.group * self.kv_heads * self.head_dim
        return int(self.contexts.sum()) * self.position_bytes + queries

    @property
    def table_sets(self) -> int:
        """R, block tables that share no page; calls take them in turn."""
        return max(1, min(64, -(-BEYOND_L2 // self.call_bytes)))

    @property
    def num_pages(self) -> int:
        """P."""
        return 1 + self.table_sets * self.rows * self.width

    @property
    def calls(self) -> int:
        """U, calls of a program: about a millisecond, and enough for a CUDA graph."""
        return max(5, min(32, round(1e-3 / (self.call_bytes / ASSUMED_BANDWIDTH))))

    @property
    def num_bytes(self) -> int:
        """Device memory of the arrays."""
        return int(1.05 * self.num_pages * self.page_size * self.position_bytes)

    @property
    def kernel(self) -> str:
        """As the stage `correctness` names it."""
        return f"paged_attention {self.dtype}"


CASES = (
    Decode(64, 8192),
    Decode(64, 8192, kv="int8"),
    Decode(64, 8192, kv="fp8"),
    Decode(1, 8192),
    Decode(256, 1024),
    Decode(16, 8192, group=8),
    Decode(1, 32768, group=8),
    Decode(64, 8192, spread=True),
    Decode(16, 32768, kv="int8"),
    Decode(64, 8192, kv="int4"),
    Decode(16, 1024),
    Decode(64, 1024, group=8, kv="fp8"),
    Decode(64, 8192, page_size=64),
    Decode(256, 8192),
    Decode(1, 1024),
    Decode(64, 32768, group=8, kv="fp8"),
    Decode(256, 32768, group=8, kv="int8"),
    Decode(256, 8192, group=8, kv="int8"),
)
"""The most important first."""

REHEARSAL = tuple(
    Decode(3, 40, group, kv, spread=spread, kv_heads=2, head_dim=32)
    for group, kv, spread in ((4, "bf16", False), (8, "int8", True))
)


def decodes(session: Session) -> tuple[Decode, ...]:
    """The shapes of this run."""
    return REHEARSAL if session.options.rehearse else CASES


def cases(session: Session) -> list[Case]:
    """Our kernel on every shape."""
    return [decode_case(session, decode) for decode in decodes(session)]


def decode_case(session: Session, decode: Decode) -> Case:
    """Our kernel on one shape, checked and timed."""
    return Case(
        "paged_decode",
        decode.name,
        partial(_run, decode),
        (chain_program(session, decode), inputs_program(decode), row_program(decode)),
        kernel=decode.kernel,
        num_bytes=decode.num_bytes,
        facts={"rows": decode.rows, "context": decode.context, "group": decode.group, "kv": decode.kv},
    )


def chain_program(session: Session, decode: Decode) -> Program:
    """U calls in a row, each asking with the answer of the last, and the first answer by itself."""
    calls = 2 if session.options.rehearse else decode.calls

    def run(
        q: jax.Array, pages: jax.Array, scales: jax.Array | None, tables: jax.Array, contexts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        query_start = jnp.arange(decode.rows + 1, dtype=jnp.int32)
        work_list = make_work_list(
            query_start,
            contexts,
            num_tokens=decode.rows,
            num_heads=q.shape[1],
            num_kv_heads=decode.kv_heads,
            head_dim=decode.head_dim,
            implementation=session.implementation,
        )
        first = None
        for index in range(calls):
            q = paged_attention(
                q,
                pages,
                tables[index % decode.table_sets],
                query_start,
                contexts,
                scales=scales,
                work_list=work_list,
                implementation=session.implementation,
            )
            first = q if first is None else first
        assert first is not None
        return q, first

    return Program(f"paged_decode {decode.name}", jax.jit(run, donate_argnums=0), _shapes(decode))


def inputs_program(decode: Decode) -> Program:
    """Random queries, pages and scales."""
    q_shape, pages_shape, scales_shape, _, _ = _shapes(decode)
    kv_format = format_of(decode.dtype)

    def make(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        q = 4 * random_values(q_shape.shape, q_shape.dtype, seed)
        pages = random_values(pages_shape.shape, pages_shape.dtype, seed + 1)
        return q, pages, None if kv_format is None else random_scales(scales_shape.shape, kv_format.limit, seed + 2)

    return Program(f"paged_decode inputs {decode.name}", jax.jit(make), (SEED,))


def row_program(decode: Decode) -> Program:
    """The keys and values of one row and KV head, float32[2, M * S, H], for the check on the host."""

    def gather(pages: jax.Array, scales: jax.Array | None, table: jax.Array, head: jax.Array) -> jax.Array:
        rows = 2 * head + jnp.arange(2)
        chosen = pages[table[None, :], rows[:, None]]
        values = dequantize(chosen, None if scales is None else scales[table[None, :], rows[:, None]])
        return values.reshape(2, -1, decode.head_dim)

    _, pages, scales, _, _ = _shapes(decode)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    table = jax.ShapeDtypeStruct((decode.width,), jnp.int32)
    return Program(f"paged_decode row {decode.name}", jax.jit(gather), (pages, scales, table, index))


def _shapes(decode: Decode) -> tuple[Any, ...]:
    shape = jax.ShapeDtypeStruct
    rows = (decode.num_pages, 2 * decode.kv_heads, decode.page_size)
    channels = decode.head_dim // 2 if decode.kv == "int4" else decode.head_dim
    return (
        shape((decode.rows, decode.group * decode.kv_heads, decode.head_dim), jnp.bfloat16),
        shape((*rows, channels), decode.dtype),
        None if decode.kv == "bf16" else shape(rows, jnp.float32),
        shape((decode.table_sets, decode.rows, decode.width), jnp.int32),
        shape((decode.rows,), jnp.int32),
    )


def _run(decode: Decode, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make, gather = programs
    q, pages, scales = make(jnp.int32(2))
    tables = random_tables(np.random.default_rng(5), decode.table_sets, decode.rows, decode.width)
    fixed = (pages, scales, jnp.asarray(tables), jnp.asarray(decode.contexts))
    asked = np.asarray(q).astype(np.float64)
    last, first = run(q, *fixed)
    error = _error(decode, asked, partial(gather, pages, scales), tables[0], np.asarray(first).astype(np.float64))
    if not error <= attention_tolerance("bfloat16"):
        raise CheckFailed(f"relative error {error:.3g} against float64", error=error)
    timing = session.time(
        lambda query: run(query, *fixed)[0],
        last,
        operations=2 if session.options.rehearse else decode.calls,
        sample_seconds=SAMPLE_SECONDS,
    )
    rates = session.share_of_bandwidth(decode.call_bytes, timing.seconds)
    return timing.values(session.options.claims_times) | rates | {"error": error, "mib": decode.call_bytes >> 20}


def _error(decode: Decode, q: np.ndarray, gather: Compiled, table: np.ndarray, out: np.ndarray) -> float:
    """Of the first KV head of the row whose pages lie highest in the pool and of the last KV head of the last row."""
    worst = 0.0
    highest = int(np.argmax(table.max(axis=1)))
    for row, head in ((highest, 0), (decode.rows - 1, decode.kv_heads - 1)):
        pair = np.asarray(gather(jnp.asarray(table[row]), jnp.int32(head))).astype(np.float64)
        keys, values = pair[:, : decode.contexts[row]]
        queries = slice(head * decode.group, (head + 1) * decode.group)
        logits = q[row, queries] @ keys.T / np.sqrt(decode.head_dim)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = weights @ values / weights.sum(-1, keepdims=True)
        worst = max(worst, relative_error(out[row, queries], expected))
    return worst
