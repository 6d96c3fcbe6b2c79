"""What this version of the engine can run of what a plan says."""

from collections.abc import Mapping
from typing import Any


def engine_refusals(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Why `LLM` refuses arguments, one reason each: `EngineArgs` is asked about every one alone; none if it takes all.

    Args:
        arguments: keywords of `LLM`.
    """
    from jaxinfer.startup.args import EngineArgs

    reasons = []
    for name, value in arguments.items():
        try:
            EngineArgs("model", **{name: value})
        except ValueError as error:
            reasons.append(str(error))
    return tuple(reasons)
