"""One of two processes that run an engine together: engine_of_two.py RANK ADDRESS. Prints what it found as JSON."""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import init_params

CONFIG = ModelConfig(
    vocab_size=97,  # odd: the last device has rows of padding
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 6, "block_size": 8}
ENGINE = {**SIZES, "enforce_eager": True, "use_tqdm_on_load": False, "compilation_cache_dir": False}
PROMPTS = [[1 + (5 * place + step) % 90 for step in range(3 + 2 * place)] for place in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)


def params_of(seed: int) -> Any:
    """Numpy arrays, the same in each process; larger than at the start of a training, so that outputs differ."""
    params = init_params(CONFIG, jax.random.key(seed), "float32")
    return jax.tree.map(lambda leaf: np.asarray(leaf) * (1 if leaf.ndim == 1 else 8), params)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    return [(list(sample.token_ids), sample.cumulative_logprob) for sample in samples]


def refusal(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def main(rank: int, address: str) -> dict[str, Any]:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, rank)
    found: dict[str, Any] = {}
    llm = LLM(model_config=CONFIG, params=params_of(0), tensor_parallel_size=2, **ENGINE)
    found["devices"] = len(llm._parts.engine.runner.leaves[0].sharding.device_set)  # type: ignore[union-attr]
    found["two processes"] = answers(llm)
    found["scores"] = [score.tolist() for score in llm.compute_logprobs(PROMPTS[1:3])]
    found["num_preemptions"] = llm.stats().num_preemptions
    llm.sleep(1)
    llm.wake_up()
    found["after sleep"] = answers(llm)
    llm.update_params(params_of(1))
    found["new"] = answers(llm)
    found["other requests"] = refusal(lambda: llm.generate([[1 + rank]], GREEDY, use_tqdm=False))
    seeded = dataclasses.replace(GREEDY, max_tokens=2 + rank)
    found["other params"] = refusal(lambda: llm.generate([[1]], seeded, use_tqdm=False))
    found["after refusals"] = answers(llm)
    llm.shutdown()
    sizes = {**ENGINE, "max_num_seqs": 2 + rank}
    found["other settings"] = refusal(
        lambda: LLM(model_config=CONFIG, params=params_of(0), tensor_parallel_size=2, **sizes)
    )
    found["async"] = refusal(
        lambda: AsyncLLM(model_config=CONFIG, params=params_of(0), tensor_parallel_size=2, **ENGINE)
    )
    found["too many"] = refusal(lambda: LLM(model_config=CONFIG, params=params_of(0), tensor_parallel_size=4, **ENGINE))
    if rank == 0:  # at the end: the other process does not wait for it
        with LLM(model_config=CONFIG, params=params_of(0), **ENGINE) as one:
            found["one device"] = answers(one)
            found["one device, scores"] = [score.tolist() for score in one.compute_logprobs(PROMPTS[1:3])]
            one.update_params(params_of(1))
            found["one device, new"] = answers(one)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
