"""BeamSearchParams: what a beam search is asked for, with vLLM's names and defaults."""

import math
from dataclasses import dataclass
from typing import Any

MAX_LENGTH_PENALTY = 16
"""Far from where the power of a sequence's length would leave the range of a float."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Checked when made.

    Attributes:
        beam_width: sequences that are kept, and returned; at least 1.
        max_tokens: most tokens generated, the end among them; at least 1.
        ignore_eos: nothing but `max_tokens` ends a sequence.
        temperature: changes nothing, since nothing is drawn: sequences are scored by the raw log-probabilities, as in
            vLLM and in transformers. At least 0.
        length_penalty: sequences are compared by the sum of their log-probabilities over
            ``generated tokens ** length_penalty``, so that more than 0 favours long ones; -16 to 16.
        include_stop_str_in_output: keep the id that ended a sequence in its tokens and text.
        structured_outputs: None; not built.

    Raises:
        ValueError, TypeError: by name.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} must be a number")
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} must be finite")
        if abs(self.length_penalty) > MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty={self.length_penalty} must lie between {-MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0; a beam search does not draw anyway")
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs is not built yet; leave it out")
