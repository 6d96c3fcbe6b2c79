"""Checks of flash attention: outputs, log-sum-exps and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import flash_attention
from scripts.gpu_checks import references
from scripts.gpu_checks.check import Check, Ratios
from scripts.gpu_checks.tolerance import attention_tolerance, gradient_tolerance, relative_error, worst_row_error


@dataclass(frozen=True)
class Flash:
    """A call on B = 2 sequences of `queries` (T) and `keys` (S) positions.

    `segments` cuts every sequence in three packed ones; `lengths` ends the second one early.
    """

    dtype: str = "bfloat16"
    queries: int = 200
    keys: int = 200
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    segments: bool = False
    lengths: bool = False

    @property
    def name(self) -> str:
        size = f"{self.queries} x {self.keys} G{self.group} H{self.head_dim}"
        flags = [name for name in ("causal", "segments", "lengths") if getattr(self, name)]
        flags += [f"{name} {value}" for name in ("window", "softcap") if (value := getattr(self, name)) is not None]
        return " ".join([f"flash_attention {self.dtype} {size}", *flags])

    @property
    def plain(self) -> bool:
        """Whether the timed calls are of this kind."""
        return self.dtype == "bfloat16" and self.window is None and self.softcap is None and not self.segments


SHAPES = (
    Flash(),
    Flash(queries=1024, keys=1024, kv_heads=1),
    Flash("float16", 77, 200, group=1, head_dim=64),
    Flash("float32", 65, 65, group=2, head_dim=64, causal=False),
    Flash(queries=130, keys=130, head_dim=80, window=40),
    Flash(queries=130, keys=200, head_dim=96, softcap=20.0),
    Flash(queries=96, keys=96, group=8, head_dim=256),
    Flash(segments=True),
    Flash(lengths=True, causal=False),
    Flash(queries=200, keys=77, group=1),
)
"""The most important first; the last has queries that see nothing."""

REHEARSAL = (
    Flash(queries=20, keys=24, head_dim=32, window=9),
    Flash("float32", 17, 17, group=1, head_dim=16, segments=True),
)


def checks(implementation: str | None, rehearse: bool) -> list[Check]:
    """Forward and backward of every shape."""
    shapes = REHEARSAL if rehearse else SHAPES
    forward = [_forward(flash, implementation) for flash in shapes]
    return forward + [_backward(flash, implementation) for flash in shapes]


def _inputs(flash: Flash) -> tuple[np.ndarray, ...]:
    """q, k, v and the gradient of the output, in the call's dtype; segment ids and lengths, or None."""
    rng = np.random.default_rng([flash.queries, flash.keys, flash.group, flash.head_dim])
    heads = flash.kv_heads * flash.group
    dtype = jnp.dtype(flash.dtype)

    def normal(length: int, count: int) -> Any:
        return rng.standard_normal((2, length, count, flash.head_dim)).astype(dtype)

    q, k, v = normal(flash.queries, heads), normal(flash.keys, flash.kv_heads), normal(flash.keys, flash.kv_heads)
    segments = np.tile(np.arange(flash.keys, dtype=np.int32) * 3 // flash.keys, (2, 1)) if flash.segments else None
    lengths = np.array([flash.keys, flash.keys * 2 // 3], np.int32) if flash.lengths else None
    return q, k, v, normal(flash.queries, heads), segments, lengths  # type: ignore[return-value]


def _visible(flash: Flash) -> np.ndarray:
    """bool[B, T, S]."""
    if flash.causal:
        visible = references.causal(flash.queries, flash.keys, flash.window)
    else:
        visible = np.ones((flash.queries, flash.keys), bool)
    both = np.stack([visible, visible])
    *_, segments, lengths = _inputs(flash)
    if segments is not None:
        both &= segments[:, :, None] == segments[:, None, :]
    if lengths is not None:
        both &= np.arange(flash.keys)[None, None, :] < lengths[:, None, None]
    return both


def _expected(flash: Flash) -> references.FlashResult:
    q, k, v, g, *_ = (None if x is None else x.astype(np.float64) for x in _inputs(flash))
    masking = references.Masking(flash.head_dim**-0.5, softcap=flash.softcap)
    return references.flash_attention(q, k, v, g, _visible(flash), masking)


def _call(flash: Flash, implementation: str | None, return_lse: bool) -> Any:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, lengths: Any) -> Any:
        return flash_attention(
            q,
            k,
            v,
            causal=flash.causal,
            window=flash.window,
            softcap=flash.softcap,
            segment_ids=segments,
            kv_lengths=lengths,
            return_lse=return_lse,
            implementation=implementation,
        )

    return run


def _forward(flash: Flash, implementation: str | None) -> Check:
    q, k, v, _, segments, lengths = _inputs(flash)

    def judge(results: Any) -> Ratios:
        out, lse = results
        expected, tolerance = _expected(flash), attention_tolerance(flash.dtype)
        return {
            "out": relative_error(out.astype(np.float64), expected.out) / tolerance,
            "worst row": worst_row_error(out.astype(np.float64), expected.out) / (2 * tolerance),
            "lse": relative_error(lse.astype(np.float64), expected.lse) / tolerance,
        }

    kernel = "flash_attention" if flash.plain else "flash_attention with options"
    return Check(flash.name, kernel, _call(flash, implementation, True), (q, k, v, segments, lengths), judge)


def _backward(flash: Flash, implementation: str | None) -> Check:
    q, k, v, g, segments, lengths = _inputs(flash)
    call = _call(flash, implementation, False)

    def gradients(q: Any, k: Any, v: Any, g: Any, segments: Any, lengths: Any) -> Any:
        return jax.vjp(lambda q, k, v: call(q, k, v, segments, lengths), q, k, v)[1](g)

    def judge(results: Any) -> Ratios:
        expected, tolerance = _expected(flash), gradient_tolerance(flash.dtype)
        ratios = {}
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            pair = result.astype(np.float64), getattr(expected, name)
            ratios[name] = relative_error(*pair) / tolerance
            ratios[f"worst row of {name}"] = worst_row_error(*pair) / (2 * tolerance)
        return ratios

    kernel = "flash_attention gradient" if flash.plain else "flash_attention gradient with options"
    return Check(f"{flash.name} gradient", kernel, gradients, (q, k, v, g, segments, lengths), judge)
