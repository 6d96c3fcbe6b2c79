"""A kernel's proof on the GPU it is about to run on: the reference's numbers for a tiny input, before it is trusted."""

import functools
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

SelfCheck = Callable[..., Any]
"""``(implementation, *case) -> tree of arrays``."""

TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 4e-2}
"""By dtype, relative to the largest magnitude expected: wide enough for any order of summation, far below what
wrong data give."""


@functools.cache
def failure_of(op: str, self_check: SelfCheck, case: tuple[Hashable, ...], device: Any) -> str | None:
    """Why the Triton kernel of `op` must not be used on `device` for `case`, after warning about it; None if it may.

    The cache is the record of what was checked. May be called while a function is traced.
    """
    reason = _outside_of_traces(lambda: _run(self_check, case, device))
    if reason is not None:
        described = ", ".join(map(str, case))
        warnings.warn(
            f"{op} falls back to plain XLA on {device.device_kind} ({described}): its Triton kernel failed its "
            f"self-check: {reason}. Pass implementation='triton' to use the kernel all the same, or "
            "implementation='xla' to choose XLA without this check",
            RuntimeWarning,
            stacklevel=3,
        )
    return reason


def _run(self_check: SelfCheck, case: tuple[Hashable, ...], device: Any) -> str | None:
    with jax.default_device(device):
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(functools.partial(self_check, "reference", *case))()
        try:
            actual = jax.block_until_ready(jax.jit(functools.partial(self_check, "triton", *case))())
        except Exception as error:  # whatever a compiler or a driver raises, XLA's road is still open
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        return difference(actual, expected)


def difference(actual: Any, expected: Any) -> str | None:
    """Where two trees of arrays disagree, None if nowhere.

    NaN must meet NaN, and infinity the same; floats may differ by `TOLERANCES`; integers and booleans must be equal.
    """
    for index, (got, want) in enumerate(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"result {index} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}"
        tolerance = TOLERANCES.get(str(want.dtype), 0.0)
        one, other = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
        if not np.array_equal(np.isnan(one), np.isnan(other)):
            return f"result {index} has NaN where it should not, or none where it should"
        finite = np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return f"result {index} has not the infinities it should have"
        one, other = one[finite], other[finite]
        error, largest = np.max(np.abs(one - other), initial=0.0), np.max(np.abs(other), initial=0.0)
        if not error <= tolerance * largest:
            return f"result {index} is off by {error:.3g} where the largest value is {largest:.3g}"
    return None


def _outside_of_traces(function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread of its own, which no trace, mesh or setting of the calling code reaches."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="pallas_kernels self-check")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
