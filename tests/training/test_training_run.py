"""The loop around the steps."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.training.run_checkpoint import restore_state, save_state, saved_steps
from jaxinfer.training.step import TrainState
from jaxinfer.training.training_run import CHECKPOINTS, Pace, train


def start() -> TrainState:
    return TrainState({"w": jnp.zeros(2)}, {"count": jnp.int32(0)}, jnp.int32(0))


def counting(fails_at: int) -> Any:
    """A step that adds its number, from 1, and whose loss is no number at `fails_at`."""

    def step(state: TrainState, frozen: Any, batch: int) -> tuple[TrainState, dict[str, float]]:
        done = TrainState({"w": state.trained["w"] + batch + 1}, state.optimizer, state.step + 1)
        return done, {"loss": float("nan") if batch + 1 == fails_at else 1.0, "weight": 1.0}

    return step


def test_a_loss_that_is_no_number_ends_the_run_with_what_was_good(tmp_path: Path) -> None:
    pace = Pace(6, log_every=1, save_every=2)
    with pytest.raises(RuntimeError, match="the loss at step 4 is nan; a smaller learning rate"):
        train(tmp_path, start(), counting(4), {}, lambda step, state: step, pace)
    assert saved_steps(tmp_path / CHECKPOINTS) == [2]
    state, log = train(tmp_path, start(), counting(0), {}, lambda step, state: step, pace)
    assert state.trained["w"].tolist() == [21.0, 21.0] and int(state.step) == 6
    assert [entry["step"] for entry in log.entries] == [1, 2, 3, 4, 5, 6]
    assert saved_steps(tmp_path / CHECKPOINTS) == [4, 6]


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, 3, start())
    other = start()._replace(trained={"w": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"leaf_00000 is float32\[2\], and this run's is float32\[3\]"):
        restore_state(tmp_path, 3, other)


@pytest.mark.parametrize("name", ["steps", "log_every", "save_every", "eval_every"])
def test_paces_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        Pace(**{"steps": 1, name: 0})
