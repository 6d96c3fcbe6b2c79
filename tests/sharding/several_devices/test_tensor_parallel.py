"""A model over several devices says what it says on one."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.models.config import ModelConfig

Make = Callable[..., ModelConfig]

# Heads of whole groups, KV heads repeated (8/2 on 4 and 8, MQA), and a group that two devices share (6/2 on 3).
CASES = {
    "24 heads, tied": (
        {"num_attention_heads": 24, "num_key_value_heads": 24, "tie_word_embeddings": True},
        (2, 3, 4, 8),
    ),
    "8/2 with biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, (2, 8)),
    "MQA": ({"num_attention_heads": 4, "num_key_value_heads": 1}, (4,)),
    "9/3": ({"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 96}, (3, 9)),
    "6/2": ({"num_attention_heads": 6, "num_key_value_heads": 2}, (3,)),
    "norm over all heads": ({"qk_norm": "full", "pre_norms": False, "post_norms": True}, (8,)),
    "norm of each head, layer norms, no gate": (
        {"qk_norm": "heads", "norm": "layer", "norm_bias": True, "mlp_gated": False, "mlp_bias": True}
        | {"learned_positions": True, "block": "parallel", "logit_softcap": 9.0},
        (4,),
    ),
}


SLOW = ("6/2", "norm of each head, layer norms, no gate")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_as_on_one_device(
    name: str, small_model: Make, random_tree: Callable[..., Any], served: Callable[..., Any], same: Callable[..., None]
) -> None:
    fields, sizes = CASES[name]
    config = small_model(**fields)
    params = random_tree(config)
    expected = served(config, params)
    for size in sizes:
        same(served(config, params, tensor_parallel_size=size), expected)


def test_greedy_rows_find_the_best_token_without_the_whole_logits(
    small_model: Make, random_tree: Callable[..., Any], served: Callable[..., Any]
) -> None:
    config = small_model()
    params = random_tree(config)
    found, expected = (served(config, params, answer={"logprobs": None}, tensor_parallel_size=size) for size in (4, 1))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


def test_heads_that_cannot_be_dealt_out_are_refused_with_the_sizes_that_work(
    small_model: Make, random_tree: Callable[..., Any]
) -> None:
    config = small_model(num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 .*num_attention_heads=9 .*use one of 1, 3, 9$"):
        LLM(model_config=config, params=random_tree(config), tensor_parallel_size=2)


def test_more_devices_than_there_are(small_model: Make, random_tree: Callable[..., Any]) -> None:
    config = small_model()
    with pytest.raises(ValueError, match="tensor_parallel_size=16 needs as many devices, and this process has 9"):
        LLM(model_config=config, params=random_tree(config), tensor_parallel_size=16)
    assert len(jax.devices()) == 9
