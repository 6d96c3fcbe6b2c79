"""An engine on a device that is not JAX's default one."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.shards import shards_of

PARAMS = (
    SamplingParams(max_tokens=6, temperature=0, logprobs=2),
    SamplingParams(max_tokens=6, temperature=1, seed=3, presence_penalty=0.3, logit_bias={3: 2.0}),
)


def outputs(config: ModelConfig, params: Any, placement: Placement | None) -> tuple[ModelRunner, list[list[int]]]:
    scheduler = SchedulerConfig(4, 16, 128, token_buckets=(4, 16))
    settings = EngineConfig(config, CacheConfig(16, 64), scheduler, RunnerConfig())
    runner = ModelRunner(settings, params, shards_of(config, placement or Placement()))
    engine = Engine(settings, runner, None)
    for index, sampling in enumerate(PARAMS):
        engine.add_request(str(index), [1, 2, 3, 4], sampling)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return runner, [list(finished[str(index)].outputs[0].token_ids) for index in range(len(PARAMS))]


def test_everything_lies_and_runs_on_the_device_that_is_named(
    tiny_config: ModelConfig, tiny_params: Callable[..., Any]
) -> None:
    device = jax.devices()[2]
    params = jax.device_put(tiny_params(), device)
    runner, tokens = outputs(tiny_config, params, Placement(device=device))
    _, expected = outputs(tiny_config, tiny_params(), None)
    assert tokens == expected
    assert {leaf.device for leaf in jax.tree.leaves((runner.kv, runner._state, runner._leaves))} == {device}
    assert all(mine is given for mine, given in zip(runner._leaves, jax.tree.leaves(params), strict=True))


def test_a_placement_is_a_device_or_an_axis_of_a_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    assert Placement(mesh=mesh, axis="model").num_parts == 2
    with pytest.raises(ValueError, match="axis='heads' is none of the mesh's axes: data, model"):
        Placement(mesh=mesh, axis="heads")
    with pytest.raises(ValueError, match="device and mesh"):
        Placement(device=jax.devices()[0], mesh=mesh, axis="model")
