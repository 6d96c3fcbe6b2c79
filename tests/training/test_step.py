"""A training step: devices and parts change nothing, and the optimizer does what its options say."""

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.training.optimizer import OptimizerOptions, learning_rate_schedule, make_optimizer
from jaxinfer.training.step import check_batch_size, data_mesh, init_state, make_step

WEIGHTS = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
ROWS = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0], [2.0, 2.0]], np.float32)
SEEN = np.array([1.0, 1.0, 0.0, 1.0], np.float32)


def squares(trained: Any, frozen: Any, batch: Any) -> dict[str, jax.Array]:
    """Sum of (W x - frozen)^2 over the rows that count."""
    errors = jnp.sum((batch["x"] @ trained["w"].T - frozen) ** 2, axis=1) * batch["seen"]
    return {"loss": errors.sum(), "weight": batch["seen"].sum()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_adamw_of_the_mean_gradient(accumulate: int) -> None:
    """AdamW's first step by hand: the moments' bias corrections leave the sign of each gradient."""
    options = OptimizerOptions(0.1, steps=10, weight_decay=0.5, clip_norm=1e6)
    mesh, optimizer = data_mesh(1), make_optimizer(options)
    step = make_step(squares, optimizer, mesh, accumulate=accumulate)
    state = init_state({"w": WEIGHTS}, optimizer, mesh)
    frozen = np.float32([1.0, 0.0])
    state, metrics = step(state, frozen, {"x": ROWS, "seen": SEEN})
    errors = (ROWS @ WEIGHTS.T - frozen) * SEEN[:, None]
    slope = 2 * errors.T @ ROWS / 3
    np.testing.assert_allclose(metrics["loss"], (errors**2).sum() / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(slope), rtol=1e-6)
    expected = WEIGHTS - 0.1 * (slope / (np.abs(slope) + 1e-8) + 0.5 * WEIGHTS)
    np.testing.assert_allclose(state.trained["w"], expected, rtol=1e-5)
    assert int(state.step) == 1


def test_the_rate_rises_and_falls() -> None:
    rate = learning_rate_schedule(OptimizerOptions(1.0, steps=12, warmup_steps=4, final_ratio=0.2))
    assert [round(float(rate(step)), 6) for step in (0, 1, 3, 4, 8, 12)] == [0.25, 0.5, 1.0, 1.0, 0.6, 0.2]


def test_gradients_are_cut_down_and_vectors_do_not_decay() -> None:
    optimizer = make_optimizer(OptimizerOptions(0.1, steps=10, weight_decay=0.5, clip_norm=1.0, beta1=0.0, beta2=0.0))
    params = {"matrix": jnp.ones((1, 1)), "vector": jnp.ones(1)}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    assert float(updates["vector"][0]) == 0.0 and float(updates["matrix"][0, 0]) == pytest.approx(-0.05)
    _, state = make_optimizer(OptimizerOptions(beta1=0.0, clip_norm=1.0)).update(
        {"matrix": jnp.full((1, 1), 3.0), "vector": jnp.full(1, 4.0)}, optimizer.init(params), params
    )
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sorted(float(leaf.reshape(())) for leaf in moments[:2]) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_norm": 0}, "clip_norm=0 must be a number above 0"),
        ({"final_ratio": 1.5}, "final_ratio=1.5 must be 0 to 1"),
        ({"weight_decay": -1}, "weight_decay=-1 must be at least 0"),
        ({"beta2": 1.0}, "beta2=1.0 must be 0 to below 1"),
    ],
)
def test_options_out_of_range(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerOptions(**fields)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_cut() -> None:
    check_batch_size(16, 2, 8)
    with pytest.raises(ValueError, match="batch_size=12 must be a multiple of 16: accumulate=2 parts .* of 8 devices"):
        check_batch_size(12, 2, 8)


EIGHT = """
import json, os, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", os.environ["JAXINFER_CACHE_DIR"] + "/test-programs")
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.training.distillation_loss import DistillationLoss
from jaxinfer.training.optimizer import OptimizerOptions, make_optimizer
from jaxinfer.training.step import data_mesh, init_state, make_step
sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_attention_heads=2)
config = ModelConfig(num_hidden_layers=1, **sizes)
rng = np.random.default_rng(0)
fresh = lambda: jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) / 4, param_shapes(config))
teacher, student = fresh(), fresh()
lengths = rng.integers(2, 12, 16)
segments = np.where(np.arange(12) < lengths[:, None], 0, -1).astype(np.int32)
batch = {"ids": rng.integers(0, 40, (16, 12)).astype(np.int32), "segments": segments}
optimizer = make_optimizer(OptimizerOptions(0.01, steps=10))
runs = []
for devices, accumulate in ((1, 1), (8, 2)):
    mesh = data_mesh(devices)
    step = make_step(DistillationLoss(config, config), optimizer, mesh, accumulate=accumulate)
    state = init_state({"model": student}, optimizer, mesh)
    numbers = []
    for _ in range(3):
        state, metrics = step(state, teacher, batch)
        numbers.append([float(metrics[name]) for name in ("loss", "nll", "weight", "grad_norm")])
    runs.append([len(state.step.sharding.device_set), numbers])
print(json.dumps([int((lengths - 1).sum()), runs]))
"""


def test_eight_devices_give_the_loss_of_one() -> None:
    """Rows of different lengths, so that the devices' means are not the mean."""
    done = subprocess.run([sys.executable, "-c", EIGHT], capture_output=True, text=True, check=True)
    weight, ((one_device, one), (devices, eight)) = json.loads(done.stdout)
    assert (one_device, devices) == (1, 8)
    assert one[0][2] == weight and one[2][0] < one[0][0]
    np.testing.assert_allclose(eight, one, rtol=2e-5)
