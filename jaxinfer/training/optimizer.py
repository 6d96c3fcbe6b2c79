"""The optimizer: AdamW with a warm-up, a cosine and clipped gradients."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (arXiv:1711.05101) whose rate rises linearly and then falls along half a cosine (arXiv:1608.03983).

    Attributes:
        learning_rate: at its highest, > 0.
        steps: of the whole run, at least 1.
        warmup_steps: during which it rises from 0, 0 to `steps`.
        final_ratio: what is left of it at the end, 0 to 1.
        weight_decay: of matrices (norms and biases are left alone), at least 0.
        beta1, beta2: decay rates of the moments, 0 to below 1.
        clip_norm: what the norm of all gradients together is cut down to, > 0.

    Raises:
        ValueError: one of them is out of range.
    """

    learning_rate: float = 3e-4
    steps: int = 1000
    warmup_steps: int = 0
    final_ratio: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be 0 to steps={self.steps}")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio={self.final_ratio} must be 0 to 1")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay={self.weight_decay} must be at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 to below 1")


def learning_rate_schedule(options: OptimizerOptions) -> "optax.Schedule":
    """The rate of each step, from 0; the first step of a warm-up has ``learning_rate / warmup_steps``."""
    import optax

    cosine = optax.cosine_decay_schedule(
        options.learning_rate, max(options.steps - options.warmup_steps, 1), options.final_ratio
    )
    if not options.warmup_steps:
        return cosine
    first = options.learning_rate / options.warmup_steps
    warmup = optax.linear_schedule(first, options.learning_rate, max(options.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, cosine], [options.warmup_steps])


def make_optimizer(options: OptimizerOptions) -> "optax.GradientTransformation":
    """Raises RuntimeError where optax is not installed, which says how to install it."""
    try:
        import optax
    except ImportError as error:
        raise RuntimeError(f"training needs optax ({error}); run `pip install 'jaxinfer[train]'`") from error
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(
            learning_rate_schedule(options),
            b1=options.beta1,
            b2=options.beta2,
            weight_decay=options.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
