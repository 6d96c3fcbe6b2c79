"""Quantised engines: near the floats, small in memory, and as good as any other with everything else."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.array import QuantArray, dequantize
from jaxinfer.quant.quantize import quantize
from jaxinfer.quant.storage import Storage

DATA = Path(__file__).parents[1] / "data"
PROMPT = {"prompt_token_ids": [5, 9, 17, 33, 60, 2, 40]}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "num_gpu_blocks_override": 50,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "max_logprobs": -1,
}


def first_logprobs(llm: LLM) -> np.ndarray:
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    first = output.outputs[0].logprobs[0]
    return np.array([first[token].logprob for token in range(len(first))])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def weight_bytes(llm: LLM) -> int:
    return sum(leaf.nbytes for leaf in llm._parts.engine.runner._leaves)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def floats() -> Iterator[dict[str, np.ndarray]]:
    """Log-probabilities of the first token without quantisation."""
    found = {}
    for name in ("tiny_llama", "tiny_llama_tied"):
        with LLM(DATA / name, **SETTINGS) as llm:
            found[name] = first_logprobs(llm)
    yield found


@pytest.fixture(scope="module")
def int8() -> Iterator[LLM]:
    with LLM(DATA / "tiny_llama", quantization="int8_w8a8", **SETTINGS) as llm:
        yield llm


def test_w8a8_is_near_the_floats_and_its_head_is_quantised(int8: LLM, floats: dict[str, np.ndarray]) -> None:
    assert cosine(first_logprobs(int8), floats["tiny_llama"]) > 0.99
    plan = int8._parts._plan
    config = open_checkpoint(DATA / "tiny_llama").model_config
    shapes = param_shapes(config, "float32", plan)
    assert isinstance(shapes["lm_head"]["kernel"], QuantArray) and shapes["lm_head"]["kernel"].act_bits == 8
    assert not isinstance(shapes["embed"]["embedding"], QuantArray)
    assert weight_bytes(int8) == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def test_a_request_does_not_depend_on_its_neighbours(int8: LLM) -> None:
    alone = int8.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    together = int8.generate([{"prompt_token_ids": [7] * 20}, PROMPT], GREEDY, use_tqdm=False)[1].outputs[0]
    assert alone.token_ids == together.token_ids
    assert alone.cumulative_logprob == pytest.approx(together.cumulative_logprob, abs=1e-3)


def test_update_params_quantises_floats_and_takes_what_is_quantised(int8: LLM) -> None:
    before = first_logprobs(int8)
    checkpoint = open_checkpoint(DATA / "tiny_llama")
    floats = load_params(checkpoint, "float32")
    negated = jax.tree.map(lambda leaf: -leaf, floats)
    programs = int8.stats().num_compiled
    int8.update_params(negated)
    assert np.abs(first_logprobs(int8) - before).max() > 0.1
    int8.update_params(load_params(checkpoint, "float32", plan=int8._parts._plan))
    np.testing.assert_allclose(first_logprobs(int8), before, atol=1e-5)
    int8.update_params(floats)
    np.testing.assert_allclose(first_logprobs(int8), before, atol=1e-5)
    assert int8.stats().num_compiled == programs
    broken = {**floats, "final_norm": {"scale": floats["final_norm"]["scale"][:-1]}}
    with pytest.raises(ValueError, match="final_norm/scale"):
        int8.update_params(broken)
    with pytest.raises(ValueError, match="quantised in another way"):
        int8.update_params({**floats, "lm_head": {"kernel": _of_another_kind(floats["lm_head"]["kernel"])}})


def _of_another_kind(kernel: jax.Array) -> QuantArray:
    return jax.device_put(quantize(np.asarray(kernel), 1, Storage("int4", 16)))


def test_sleep_brings_the_codes_back(int8: LLM) -> None:
    before = first_logprobs(int8)
    int8.sleep(level=1)
    int8.wake_up()
    np.testing.assert_allclose(first_logprobs(int8), before, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("int8", {"quantize_head": True}, 0.99),  # field case 22
        ("int8", {"quantize_embedding": True, "fast_form": False}, 0.99),
        ("fp8", {"quantize_head": True}, 0.98),
        ("nf4", {"double_quant": True, "quantize_head": True}, 0.9),
    ],
)
def test_tied_heads(method: str, options: dict[str, Any], least: float, floats: dict[str, np.ndarray]) -> None:
    before = sum(array.nbytes for array in jax.live_arrays())
    with LLM(
        DATA / "tiny_llama_tied", quantization=method, quantization_config=options, load_in_4bit=False, **SETTINGS
    ) as llm:
        assert cosine(first_logprobs(llm), floats["tiny_llama_tied"]) > least
        embedding = param_shapes(open_checkpoint(DATA / "tiny_llama_tied").model_config, "float32", llm._parts._plan)[
            "embed"
        ]["embedding"]
        asked = bool(options.get("quantize_head") or options.get("quantize_embedding"))
        assert isinstance(embedding, QuantArray) == asked
    del llm
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before + 2**20


def test_an_engine_of_four_bits_gives_what_its_values_give_in_floats() -> None:
    options = {"group_size": 32, "symmetric": False, "fast_form": False}
    with LLM(DATA / "tiny_llama", quantization="int4", quantization_config=options, **SETTINGS) as llm:
        found = first_logprobs(llm)
        checkpoint = open_checkpoint(DATA / "tiny_llama")
        stored = load_params(checkpoint, "float32", plan=llm._parts._plan)
    values = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantArray) else leaf,
        stored,
        is_leaf=lambda leaf: isinstance(leaf, QuantArray),
    )
    with LLM(model_config=checkpoint.model_config, params=values, **SETTINGS) as llm:
        np.testing.assert_allclose(found, first_logprobs(llm), atol=1e-3)


def test_a_checkpoint_that_is_no_gguf_file_has_no_codes_to_keep() -> None:
    with pytest.raises(
        ValueError, match=r"quantization='gguf' keeps the codes of a GGUF file, and .*tiny_llama is none"
    ):
        LLM(DATA / "tiny_llama", quantization="gguf", **SETTINGS)
