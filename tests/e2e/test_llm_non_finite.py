"""Field case 16: what is not finite ends the request that computed it and reaches nobody else."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.models.config import ModelConfig

PARAMS = SamplingParams(temperature=0, max_tokens=12)
GOOD = [[5, 6, 7], list(range(10, 40)), [9]]


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# Id 0 is also what padding tokens are made of; a prompt of 70 goes through in chunks.
@pytest.mark.parametrize(("bad", "value"), [([0], np.nan), ([3, 0, 200], np.inf), ([200] + [3] * 69, np.nan)])
def test_a_spoilt_token_spoils_its_requests_only(
    tiny_config: ModelConfig, tiny_params: Callable[[int], Any], small: dict[str, Any], bad: list[int], value: float
) -> None:
    params = tiny_params(0)
    expected = ids(generate(LLM(model_config=tiny_config, params=params, **small), GOOD))
    params["embed"]["embedding"][[0, 200], 3] = value
    llm = LLM(model_config=tiny_config, params=params, **small)
    with pytest.warns(UserWarning, match="1 of 4 prompts ended with an error.*NaN or infinite.*bfloat16"):
        outputs = generate(llm, [GOOD[0], bad, *GOOD[1:]])
    spoilt = outputs.pop(1).outputs[0]
    assert (spoilt.finish_reason, spoilt.token_ids) == ("error", [])
    assert ids(outputs) == expected
    assert ids(generate(llm, GOOD)) == expected, "the pages it left behind do no harm"


def test_overflow_in_float16(
    tiny_config: ModelConfig, tiny_params: Callable[[int], Any], small: dict[str, Any]
) -> None:
    """Never a run of one id: the request ends, the engine goes on."""
    params = jax.tree.map(lambda leaf: leaf.astype(np.float16), tiny_params(0))
    llm = LLM(model_config=tiny_config, params=params, **small)
    expected = ids(generate(llm, GOOD))
    down = params["layers_0"]["mlp"]["down"]["kernel"]
    large = np.clip(down.astype(np.float32) * 6e4, -6e4, 6e4).astype(np.float16)
    params["layers_0"]["mlp"]["down"]["kernel"] = large
    llm.update_params(params)
    with pytest.warns(UserWarning, match="4 of 4 prompts ended with an error.*dtype=float16"):
        outputs = generate(llm, [*GOOD, [1] * 70])
    assert ids(outputs) == [[]] * 4
    params["layers_0"]["mlp"]["down"]["kernel"] = down
    llm.update_params(params)
    assert ids(generate(llm, GOOD)) == expected
