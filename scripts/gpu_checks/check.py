"""A correctness check: a kernel's call on small inputs, and what float64 says about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu_checks.case import Case, CheckFailed, Compiled, Program

if TYPE_CHECKING:
    from scripts.gpu_checks.session import Session

Ratios = dict[str, float]
"""Of each result its error over the tolerance; at most 1 is right."""


@dataclass(frozen=True)
class Check:
    """One call.

    Attributes:
        name: of the case.
        kernel: what is wrong when this fails; see `Case`.
        function: ``(*args) -> results``, with the implementation bound.
        args: numpy arrays, or None.
        judge: given the results as numpy arrays, their `Ratios`; computes the reference.
    """

    name: str
    kernel: str
    function: Callable[..., Any]
    args: tuple[np.ndarray | None, ...]
    judge: Callable[[Any], Ratios]

    def case(self) -> Case:
        """As a case of the stage `correctness`."""
        shapes = tuple(None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.args)
        program = Program(f"correctness {self.name}", jax.jit(self.function), shapes)
        return Case("correctness", self.name, partial(_run, self), (program,), kernel=self.kernel)

    def judged(self, results: Any) -> dict[str, float]:
        """For a record: the largest of the ratios.

        Raises:
            CheckFailed: one of them is above 1.
        """
        ratios = self.judge(results)
        # Not `max`, which may pass over NaN.
        wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1.0}
        if wrong:
            described = ", ".join(f"{name} {ratio:.3g}" for name, ratio in wrong.items())
            raise CheckFailed(f"error over tolerance: {described}")
        return {"of_tolerance": max(ratios.values())}


def _run(check: Check, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (program,) = programs
    results = program(*(None if a is None else jnp.asarray(a) for a in check.args))
    return check.judged(jax.tree.map(np.asarray, results))
