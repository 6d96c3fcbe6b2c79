"""Stage `bandwidth`: how fast large arrays are copied and read; the yardstick of everything that moves bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_checks.case import Case, Compiled, Program
from scripts.gpu_checks.pools import random_values
from scripts.gpu_checks.session import GIB, Session
from scripts.gpu_checks.timing import Timing

SAMPLE_SECONDS = 0.05


def cases(session: Session) -> list[Case]:
    """A copy by XLA, an update in place, a reduction (which only reads), and a copy by PyTorch."""
    num_bytes = 1 << 16 if session.options.rehearse else min(4 * GIB, session.memory_bytes // 8)
    array = jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32)
    copy = Program("bandwidth copy", jax.jit(_copy, donate_argnums=1, keep_unused=True), (array, array))
    update = Program("bandwidth update", jax.jit(_update, donate_argnums=0), (array,))
    read = Program("bandwidth read", jax.jit(_read), (array, jax.ShapeDtypeStruct((), jnp.float32)))
    facts = {"copies": True, "mib": num_bytes >> 20}
    return [
        Case("bandwidth", "XLA copy", partial(_time_copy, num_bytes), (copy,), facts=facts),
        Case("bandwidth", "XLA update in place", partial(_time_update, num_bytes), (update,), facts=facts),
        Case("bandwidth", "XLA read", partial(_time_read, num_bytes), (read,), facts=facts | {"copies": False}),
        Case("bandwidth", "torch copy", partial(_time_torch, num_bytes), facts=facts),
    ]


def _copy(source: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.copy(source)


def _update(x: jax.Array) -> jax.Array:
    return x * 1.000001 + 1e-9


def _read(x: jax.Array, seed: jax.Array) -> jax.Array:
    return jnp.sum(x * (1.0 + seed)) * 1e-20


def _values(num_bytes: int) -> jax.Array:
    return random_values((num_bytes // 4,), jnp.dtype(jnp.float32), 1)


def _result(session: Session, timing: Timing, num_bytes: int) -> dict[str, Any]:
    rates = {"gb_per_s": num_bytes / timing.seconds / 1e9} if session.options.claims_times else {}
    return timing.values(session.options.claims_times) | rates


def _time(session: Session, step: Any, state: Any) -> Timing:
    return session.time(step, state, operations=1, sample_seconds=SAMPLE_SECONDS)


def _time_copy(num_bytes: int, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (copy,) = programs
    # The result takes the memory of the one before last.
    timing = _time(session, lambda pair: (copy(*pair), pair[0]), (_values(num_bytes), jnp.zeros(num_bytes // 4)))
    return _result(session, timing, 2 * num_bytes)


def _time_update(num_bytes: int, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (update,) = programs
    return _result(session, _time(session, update, _values(num_bytes)), 2 * num_bytes)


def _time_read(num_bytes: int, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (read,) = programs
    values = _values(num_bytes)
    return _result(session, _time(session, lambda seed: read(values, seed), jnp.zeros(())), num_bytes)


def _time_torch(num_bytes: int, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    answer = session.torch.ask("copy", num_bytes=num_bytes, seconds=SAMPLE_SECONDS, samples=session.samples)
    rates = {"gb_per_s": 2 * num_bytes / answer["us"] / 1e3} if "us" in answer else {}
    return answer | rates
