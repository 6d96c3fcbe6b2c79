"""Rotary frequencies stretched beyond the trained context. HOST only, never imports jax.

The settings of the command line hold a `RopeScaling`; numpy is imported where it computes, so that help needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """One way of stretching the frequencies, with Hugging Face's names for its numbers.

    "linear" (arXiv:2306.15595) divides all frequencies by the factor; "yarn" (arXiv:2309.00071) and "llama3" divide
    the low ones only, and "yarn" also multiplies cosines and sines by an attention factor. Two types depend on the
    length of the sequence: "dynamic" (NTK-aware: a larger base) and "longrope" (arXiv:2402.13753: one list of divisors
    up to the trained length, another beyond). Keys in the cache are rotated already, so while serving the length is
    fixed: it is the longest that the engine accepts (`ModelConfig.rope_length`; vLLM does the same for "longrope", and
    for "dynamic" takes factor times the trained length). transformers takes the length of the text so far: both agree
    on a text of that length, and wherever all lengths lie on the same side of the trained one.

    Args:
        kind: one of ``ROPE_TYPES``.
        original_max_position_embeddings: context length of the pretraining.
        factor: how much longer the context becomes; at least 1 but for "longrope".
        attention_factor: factor on cosines and sines; None for the paper's.
        low_freq_factor, high_freq_factor: "llama3": rotations within the original context below which frequencies are
            divided, and above which they are kept.
        beta_fast, beta_slow: "yarn": the same, the other way round.
        mscale, mscale_all_dim: "yarn": weights of log(factor) above and below the line of the attention factor.
        truncate: "yarn": bounds are rounded to whole channels.
        short_factor, long_factor: "longrope": divisors up to the original context, and beyond.

    Raises:
        ValueError: an unknown kind, or a number that is missing or out of range.
    """

    kind: str
    original_max_position_embeddings: int
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise ValueError(f"rope type {self.kind!r} is not supported; use one of {', '.join(ROPE_TYPES)}")
        for name in ("original_max_position_embeddings", "factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} of rope type {self.kind!r} must be a number above 0")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be above 0 and below high_freq_factor="
                f"{self.high_freq_factor}"
            )
        if self.kind == "longrope" and (self.short_factor is None or self.long_factor is None):
            raise ValueError("rope type 'longrope' needs short_factor and long_factor")
        if self.kind == "longrope" and self.original_max_position_embeddings <= 1:
            raise ValueError("original_max_position_embeddings=1 of rope type 'longrope' must be above 1")

    def check_rotary_dim(self, rotary_dim: int) -> None:
        """Raises ValueError if a list of divisors does not have one for each of ``rotary_dim / 2`` frequencies, or if
        "dynamic" has less than two of these."""
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != rotary_dim // 2:
                raise ValueError(f"{name} has {len(factors)} values; the rotation has {rotary_dim // 2} frequencies")
        if self.kind == "dynamic" and rotary_dim < 4:
            raise ValueError(f"rope type 'dynamic' needs a rotation of at least 4 channels, not {rotary_dim}")

    def check_theta(self, theta: float) -> None:
        """Raises ValueError if the frequencies of base `theta` are all the same, where "yarn" tells them apart."""
        if self.kind == "yarn" and theta <= 1:
            raise ValueError(f"rope_theta={theta} must be above 1 for rope type 'yarn'")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are other ones for longer sequences."""
        return self.kind in ("dynamic", "longrope")

    def reach(self, max_positions: int) -> int:
        """Context length of a model whose config says `max_positions`: for "dynamic", and for "yarn" as it is switched
        on by hand, that is still the trained one."""
        if self.kind not in ("dynamic", "yarn"):
            return max_positions
        return max(max_positions, int(self.original_max_position_embeddings * self.factor))

    def frequencies(self, theta: float, rotary_dim: int, length: int) -> np.ndarray:
        """The ``rotary_dim / 2`` angular frequencies in radians per position, float64.

        Args:
            theta: base.
            rotary_dim: rotated channels of a head.
            length: tokens of the longest sequence.
        """
        import numpy as np

        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
        original = self.original_max_position_embeddings
        if self.kind == "dynamic":
            growth = self.factor * max(length, original) / original - (self.factor - 1)
            return (theta * growth ** (rotary_dim / (rotary_dim - 2))) ** -exponents
        plain = theta**-exponents
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "longrope":
            return plain / np.asarray(self.long_factor if length > original else self.short_factor, np.float64)
        kept = self._kept_llama3(plain) if self.kind == "llama3" else self._kept_yarn(theta, rotary_dim)
        return plain * kept + plain / self.factor * (1 - kept)

    def _kept_llama3(self, plain: np.ndarray) -> np.ndarray:
        """How much of each frequency is kept, 0 to 1."""
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(0, 1)

    def _kept_yarn(self, theta: float, rotary_dim: int) -> np.ndarray:
        import numpy as np

        original = self.original_max_position_embeddings

        def channel(turns: float) -> float:
            return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        return 1 - np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)

    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        stretch = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (stretch * self.mscale + 1) / (stretch * self.mscale_all_dim + 1)
        return stretch + 1
