"""A model of which every layer has a window, in a pool that holds little more than the windows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig

WINDOW, BLOCK = 8, 4
PROMPTS = [{"prompt_token_ids": [(37 * i + 11 * k) % 256 for i in range(30)]} for k in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def engine(tiny_config: ModelConfig, random_params: Any, small: dict[str, Any]) -> Any:
    """Four requests of 54 tokens take 14 blocks each; with a window of 8 and chunks of 8 they hold at most 5."""
    config = dataclasses.replace(tiny_config, sliding_window=WINDOW)
    options = dict(small) | {"max_num_batched_tokens": 8, "block_size": BLOCK, "num_gpu_blocks_override": 20}
    with LLM(model_config=config, params=random_params(config), **options) as llm:
        yield llm


def test_no_request_waits_or_is_preempted_and_nothing_of_what_was_freed_is_read(engine: LLM) -> None:
    alone = [engine.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert len({tuple(ids) for ids in answers(alone)}) == 4
    runner: Any = engine._parts.engine.runner
    manager = engine._parts.engine.scheduler.block_manager
    engine._parts.engine.reset_prefix_cache()
    execute, most = runner.execute, 0

    def poisoned(plan: Any) -> Any:
        """What nobody owns must not matter, the sink's page included."""
        nonlocal most
        most = max(most, len(plan.rows))
        free = (np.array(manager.num_refs) == 0)[:, None, None, None]
        layers = (layer._replace(pages=jnp.where(free, jnp.nan, layer.pages)) for layer in runner.kv.layers)
        runner.kv = runner.kv._replace(layers=tuple(layers))
        return execute(plan)

    runner.execute = poisoned
    together = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    runner.execute = execute
    engine._parts.engine.reset_prefix_cache()  # what was free is in there
    assert answers(together) == answers(alone)
    assert engine.stats().num_preemptions == 0 and most == 4


def test_hits_need_only_what_is_in_sight(engine: LLM) -> None:
    engine._parts.engine.reset_prefix_cache()
    (first,) = engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    (again,) = engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 28)
    assert answers([first]) == answers([again])


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": 8}, 8),
        ({"sliding_window": 8, "window_layers": (True, True)}, 8),
        ({"sliding_window": 8, "window_layers": (True, False)}, None),  # the full layer needs every block
        ({"sliding_window": 8, "window_layers": (False, False)}, None),
    ],
)
def test_the_widest_window(tiny_config: ModelConfig, fields: dict[str, Any], window: int | None) -> None:
    assert dataclasses.replace(tiny_config, **fields).widest_window == window
