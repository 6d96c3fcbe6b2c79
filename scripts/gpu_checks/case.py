"""A case: programs to compile ahead, and what to do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.gpu_checks.session import Session

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A `jax.jit` function and the shapes it is compiled for; `name` is unique in a run."""

    name: str
    function: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One line of the report.

    Attributes:
        stage, name: unique together.
        run: given the session and the compiled programs, returns what goes into the record. Raises `CheckFailed` where
            numbers are wrong.
        programs: what `run` needs.
        kernel: the kernel that is timed; the case is skipped where that one gave wrong numbers.
        num_bytes: device memory that it takes; the case is dropped where the device has less.
    """

    stage: str
    name: str
    run: Callable[[Session, Sequence[Compiled]], dict[str, Any]]
    programs: tuple[Program, ...] = ()
    kernel: str | None = None
    num_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class CheckFailed(Exception):
    """Numbers are wrong; the message says how. `values` go into the record."""

    def __init__(self, message: str, **values: Any) -> None:
        super().__init__(message)
        self.values = values


class NotHere(Exception):
    """The case cannot run on this machine (a library is missing, a dtype is not supported); the message says why."""
