"""The loop: steps, the log, held-out measurements and checkpoints, from wherever an earlier process got to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.progress_bar import ProgressBar
from jaxinfer.training.curve import LOG, TrainingLog
from jaxinfer.training.run_checkpoint import restore_state, save_state, saved_steps
from jaxinfer.training.step import StepFunction, TrainState

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Pace:
    """How long a run is and what happens on the way.

    Attributes:
        steps: of the whole run.
        log_every, save_every, eval_every: steps between two entries of the log, checkpoints, and measurements on
            held-out text; the last step has all three.

    Raises:
        ValueError: a number is below 1.
    """

    steps: int
    log_every: int = 10
    save_every: int = 100
    eval_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "save_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def due(self, step: int, every: int) -> bool:
        """Whether something that comes at this pace comes after so many steps."""
        return step % every == 0 or step == self.steps


def train(
    folder: Path,
    state: TrainState,
    step_function: StepFunction,
    frozen: Any,
    batch_of: Callable[[int, TrainState], Any],
    pace: Pace,
    *,
    evaluate: Callable[[TrainState], Mapping[str, float]] = lambda state: {},
    progress: bool = False,
) -> tuple[TrainState, TrainingLog]:
    """Runs the steps that are left.

    Args:
        folder: of the run; its log and checkpoints lie there.
        state: before the first step; where there is a checkpoint, only its shapes count.
        step_function: of `make_step`.
        frozen: what it is given.
        batch_of: the batch of a step, from 0; depends on its number and on the state before it alone.
        pace: when to stop, log, save and measure.
        evaluate: what to measure on held-out text, by names that begin with "eval_"; also before the first step.
        progress: show a progress bar.

    Returns:
        The state after the last step, bit for bit that of an uninterrupted run, and the log.

    Raises:
        RuntimeError: the loss is no number any more; the last checkpoint is of before.
    """
    checkpoints = folder / CHECKPOINTS
    saved = saved_steps(checkpoints)
    done = saved[-1] if saved else 0
    if saved:
        state = restore_state(checkpoints, done, state)
    log = TrainingLog(folder / LOG, done if saved else -1)
    if not saved and (first := evaluate(state)):
        log.add(0, first)
    waiting: list[Any] = []
    with ProgressBar(total=pace.steps, initial=done, desc="Training", unit="step", disable=not progress) as bar:
        for step in range(done + 1, pace.steps + 1):
            state, metrics = step_function(state, frozen, batch_of(step - 1, state))
            waiting.append(metrics)
            save = pace.due(step, pace.save_every)
            if save or pace.due(step, pace.log_every):  # a resumed run's means are of the same steps
                values = _mean(step, waiting)
                waiting = []
                bar.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)
                if pace.due(step, pace.eval_every):
                    values |= evaluate(state)
                log.add(step, values)
            elif pace.due(step, pace.eval_every):
                log.add(step, evaluate(state))
            if save:
                save_state(checkpoints, step, state)
            bar.update()
    return state, log


def _mean(step: int, waiting: list[Any]) -> dict[str, float]:
    """The mean of what some steps measured."""
    fetched = jax.device_get(waiting)
    values = {name: float(np.mean([entry[name] for entry in fetched])) for name in fetched[0]}
    if not np.isfinite(values["loss"]):
        raise RuntimeError(
            f"the loss at step {step} is {values['loss']}; a smaller learning rate or longer warm-up may help"
        )
    return values
