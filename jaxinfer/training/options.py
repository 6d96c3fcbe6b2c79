"""How a run goes, whatever it trains."""

from dataclasses import asdict, dataclass, field
from typing import Any

from jaxinfer.training.optimizer import OptimizerOptions
from jaxinfer.training.training_run import Pace


@dataclass(frozen=True)
class TrainOptions:
    """Sizes and rates of a run.

    Attributes:
        optimizer: rates; its `steps` are the run's.
        pace: when to log, save and measure; its `steps` are the same.
        batch_size: rows of a step, over all devices and parts.
        accumulate: parts that a device's share of a batch is computed in, to save memory.
        devices: how many of this process's are used; None for all.
        dtype: in which models compute: "float32", "bfloat16", "float16", or "auto" for float32 on the CPU and the
            checkpoint's own elsewhere. What is trained stays float32 between steps.
        remat: compute layers again for the gradients, to save memory.
        seed: of the order of the rows and of fresh parameters.

    Raises:
        ValueError: a number is out of range.
    """

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    pace: Pace = field(default_factory=lambda: Pace(OptimizerOptions().steps))
    batch_size: int = 8
    accumulate: int = 1
    devices: int | None = None
    dtype: str = "auto"
    remat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer.steps != self.pace.steps:
            raise ValueError(f"optimizer.steps={self.optimizer.steps} and pace.steps={self.pace.steps} must be equal")
        for name in ("batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")

    def identity(self) -> dict[str, Any]:
        """What the result depends on."""
        return asdict(self)
