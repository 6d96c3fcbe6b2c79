"""Medusa heads of a model that is split: what they say does not depend on the number of devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.medusa import MedusaConfig, medusa_shapes
from tests.sharding.several_devices.conftest import PROMPTS, SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("own", [False, True])
def test_the_same_guesses_on_two_devices(
    small_model: Callable[..., ModelConfig], random_tree: Callable[..., Any], own: bool
) -> None:
    model = small_model(tie_word_embeddings=not own)
    rng = np.random.default_rng(0)
    shapes = medusa_shapes(MedusaConfig(48, 131, 2, own_heads=own), jnp.float32)
    heads = jax.tree.map(lambda leaf: rng.normal(0, 0.05, leaf.shape).astype(np.float32), shapes)
    config = {"method": "medusa", "params": heads, "num_speculative_tokens": 3}
    told = []
    for size, speculation in ((1, None), (1, config), (2, config)):
        options = SMALL | {"tensor_parallel_size": size, "speculative_config": speculation}
        with LLM(model_config=model, params=random_tree(model), **options) as llm:
            prompts = [{"prompt_token_ids": list(ids)} for ids in PROMPTS]
            ids = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            stats = llm.stats().speculation
            told.append((ids, stats and (stats.num_accepted_per_position, stats.num_drafts)))
    assert told[0][0] == told[1][0] == told[2][0]
    assert told[1][1] == told[2][1] and told[2][1][1] > 10


def test_an_eagle_head_of_a_split_model_is_refused_before_anything_is_read(
    small_model: Callable[..., ModelConfig], random_tree: Callable[..., Any]
) -> None:
    model = small_model()
    options = SMALL | {"tensor_parallel_size": 2, "speculative_config": {"method": "eagle", "model": "nowhere"}}
    with pytest.raises(ValueError, match="'eagle' needs the model whole on a device.*tensor_parallel_size=2"):
        LLM(model_config=model, params=random_tree(model), **options)
