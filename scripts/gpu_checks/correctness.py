"""Stage `correctness`: every kernel against float64, before anything is timed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu_checks import attention_checks, flash_checks, product_checks, quantized_checks, writing_checks
from scripts.gpu_checks.case import Case, CheckFailed, Compiled
from scripts.gpu_checks.check import Check
from scripts.gpu_checks.session import Session

MODULES = (attention_checks, writing_checks, product_checks, quantized_checks, flash_checks)
LEADING = 12
FALLS_BACK = "falls back"
"""In the warning of a kernel that failed its self-check."""


def cases(session: Session) -> list[Case]:
    """The checks of all kernels, each kernel's first ones first; then whether dispatch takes the kernels."""
    rehearse = session.options.rehearse
    lists = [module.checks(session.implementation, rehearse) for module in MODULES]
    checks = [check for checks in lists for check in checks[:LEADING]]
    checks += [check for checks in lists for check in checks[LEADING:]]
    chosen = [check for module in MODULES for check in module.checks(None, rehearse)[:1]]
    if session.options.compile_for is not None:
        chosen = []  # nothing to run
    return [check.case() for check in checks] + [
        Case("correctness", f"dispatch of {check.name}", partial(_run_chosen, check)) for check in chosen
    ]


def _run_chosen(check: Check, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    """The call with the implementation left to dispatch: on a GPU the kernel, once it has passed its self-check."""
    args = [None if arg is None else jnp.asarray(arg) for arg in check.args]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = jax.tree.map(np.asarray, jax.jit(check.function)(*args))
    fallbacks = [str(warning.message) for warning in caught if FALLS_BACK in str(warning.message)]
    if fallbacks:
        raise CheckFailed("; ".join(fallbacks))
    return check.judged(results)
