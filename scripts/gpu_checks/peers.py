"""Stage `peers`: what others do with the same shapes, in the same run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu_checks import paged_decode, prefill
from scripts.gpu_checks.case import Case, Compiled, NotHere, Program
from scripts.gpu_checks.paged_decode import Decode
from scripts.gpu_checks.pools import SEED, random_tables, random_values
from scripts.gpu_checks.prefill import Prefill
from scripts.gpu_checks.session import Session

DECODES = ((64, 8192), (1, 8192), (16, 1024))


def cases(session: Session) -> list[Case]:
    """torch's SDPA, JAX's cuDNN attention and JAX's deprecated paged attention."""
    result = []
    for shape in prefill.shapes(session):
        facts = {"batch": shape.batch, "length": shape.length, "what": "torch SDPA"}
        result.append(Case("peers", f"torch SDPA {shape.name}", partial(_torch, shape), facts=facts))
        if session.options.claims_times:  # cuDNN is needed to compile it too
            attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            result.append(prefill.attention_case(session, "peers", "JAX cuDNN", shape, attend))
    for decode in _decodes(session):
        result.append(_paged_case(session, decode))
    return result


def _decodes(session: Session) -> list[Decode]:
    if session.options.rehearse:
        return [decode for decode in paged_decode.REHEARSAL if decode.kv == "bf16"]
    return [Decode(rows, context) for rows, context in DECODES]


def _torch(shape: Prefill, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    answer = session.torch.ask(
        "sdpa",
        batch=shape.batch,
        length=shape.length,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        seconds=prefill.SAMPLE_SECONDS,
        samples=session.samples,
    )
    return answer | ({"tflop_per_s": shape.flops / answer["us"] / 1e6} if "us" in answer else {})


def _paged_case(session: Session, decode: Decode) -> Case:
    """JAX's kernel with its default tiles, on the pages and tables of `paged_decode`."""
    calls = 2 if session.options.rehearse else decode.calls
    options = {"k_splits": 16 if decode.width % 16 == 0 else 1}  # each split has the same number of pages

    def run(q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, contexts: jax.Array) -> jax.Array:
        for index in range(calls):
            table = tables[index % decode.table_sets]
            # It does not scale the logits.
            scaled = q * jnp.asarray(decode.head_dim**-0.5, q.dtype)
            q = _jax_paged_attention(scaled, keys, values, table, contexts, options, session.options.rehearse)
        return q

    half = jax.ShapeDtypeStruct((decode.kv_heads, decode.num_pages, decode.page_size, decode.head_dim), jnp.bfloat16)
    shapes = (
        jax.ShapeDtypeStruct((decode.rows, decode.group * decode.kv_heads, decode.head_dim), jnp.bfloat16),
        half,
        half,
        jax.ShapeDtypeStruct((decode.table_sets, decode.rows, decode.width), jnp.int32),
        jax.ShapeDtypeStruct((decode.rows,), jnp.int32),
    )

    def make(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = 4 * random_values(shapes[0].shape, jnp.dtype(jnp.bfloat16), seed)
        return q, random_values(half.shape, half.dtype, seed + 1), random_values(half.shape, half.dtype, seed + 2)

    program = Program(f"peers JAX paged_attention {decode.name}", jax.jit(run, donate_argnums=0), shapes)
    inputs = Program(f"peers inputs {decode.name}", jax.jit(make), (SEED,))
    return Case(
        "peers",
        f"JAX paged_attention {decode.name}",
        partial(_run_paged, decode),
        (program, inputs),
        num_bytes=decode.num_bytes,
        facts={"rows": decode.rows, "context": decode.context, "group": decode.group, "kv": decode.kv},
    )


def _jax_paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    contexts: jax.Array,
    options: dict[str, int],
    interpret: bool,
) -> jax.Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

            return paged_attention(q, keys, values, table, contexts, interpret=interpret, **options)
    except ImportError as error:
        raise NotHere(f"this JAX has no paged attention for GPUs ({error})") from error


def _run_paged(decode: Decode, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    run, make = programs
    q, keys, values = make(jnp.int32(2))
    tables = random_tables(np.random.default_rng(5), decode.table_sets, decode.rows, decode.width)
    fixed = (keys, values, jnp.asarray(tables), jnp.asarray(decode.contexts))
    timing = session.time(
        lambda query: run(query, *fixed),
        q,
        operations=2 if session.options.rehearse else decode.calls,
        sample_seconds=paged_decode.SAMPLE_SECONDS,
    )
    rates = session.share_of_bandwidth(decode.call_bytes, timing.seconds)
    return timing.values(session.options.claims_times) | rates
