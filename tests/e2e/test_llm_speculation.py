"""Speculation through the front doors: same outputs, nothing compiled while serving, drafts that do not belong."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jax import monitoring

from jaxinfer import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
PROMPTS = ["abcabcabcabc", "to be or not to be", "x", "The capital", "abcabcabcabc"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0, max_tokens=20, presence_penalty=1.0, bad_words=["ab", "q"]),
    SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=25, min_tokens=5, prompt_logprobs=1),
]
TINY = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4, "use_tqdm_on_load": False}


@pytest.fixture(scope="module")
def live(text_config: ModelConfig, text_params: Any, tokenizer_dir: Path) -> dict[str, Any]:
    """Arguments of an engine from live parameters, with text."""
    return {"model_config": text_config, "params": text_params, "tokenizer": tokenizer_dir, **TINY}


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def summary(outputs: list[RequestOutput]) -> list[Any]:
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


@pytest.fixture(scope="module")
def plain(live: dict[str, Any]) -> list[Any]:
    with LLM(**live, enforce_eager=True) as llm:
        return summary(generate(llm))


@pytest.fixture(scope="module")
def drafting(live: dict[str, Any], text_params: Any, text_config: ModelConfig) -> Iterator[LLM]:
    """Warmed up, with its own parameters as the draft."""
    config = {"params": text_params, "model_config": text_config, "num_speculative_tokens": 3}
    with LLM(**live, speculative_config=config) as llm:
        yield llm


def test_nothing_is_compiled_after_warm_up(drafting: LLM, plain: list[Any]) -> None:
    """Field case 17, with drafts of every length, through every sampling parameter."""
    events: list[str] = []

    def note(name: str, seconds: float, **_: object) -> None:
        if name == COMPILE_EVENT:
            events.append(name)

    documented = drafting.stats().num_compiled
    monitoring.register_event_duration_secs_listener(note)
    assert summary(generate(drafting)) == plain
    drafting.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=9, frequency_penalty=0.5), use_tqdm=False)
    monitoring.unregister_event_duration_listener(note)
    # Step sizes 1 and 8, greedy and sampling, 8 also with logits for drafts; two uploads, copy, count; draft steps.
    assert drafting.stats().num_compiled == documented == 6 + 4 + 4
    assert events == []
    stats = drafting.stats().speculation
    assert stats is not None and stats.acceptance_rate > 0.9 and stats.draft_seconds > 0.0


def test_nothing_is_compiled_after_warm_up_for_trees(live: dict[str, Any], plain: list[Any]) -> None:
    """Trees of up to 3 tokens, some of which are moved when they hold."""
    config = {"method": "lookahead", "window_size": 1, "ngram_size": 3, "guess_set_size": 1}
    with LLM(**live, speculative_config=config) as llm:
        documented = llm.stats().num_compiled
        assert summary(generate(llm)) == plain
        # Step sizes 1 and 8, greedy and sampling, 8 also for trees; two uploads, copy, count, move.
        assert llm.stats().num_compiled == documented == 6 + 5
        stats = llm.stats().speculation
        assert stats is not None and stats.num_draft_tokens > 50


def test_a_sleeping_draft_has_no_pool_and_wakes_with_an_empty_one(drafting: LLM, plain: list[Any]) -> None:
    drafting.sleep()
    drafting.wake_up()
    assert summary(generate(drafting)) == plain


def test_new_parameters_of_the_target(drafting: LLM, live: dict[str, Any], random_params: Callable[..., Any]) -> None:
    other = random_params(live["model_config"], seed=7)
    with LLM(**live | {"params": other}, enforce_eager=True) as llm:
        expected = summary(generate(llm))
    drafting.update_params(other)
    assert summary(generate(drafting)) == expected
    drafting.update_params(live["params"])


def test_ngram_with_an_int8_cache(live: dict[str, Any]) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "enforce_eager": True}
    with LLM(**live, **options) as llm:
        expected = summary(generate(llm))
    config = {"method": "ngram", "prompt_lookup_min": 1}
    with LLM(**live, **options, speculative_config=config, num_speculative_tokens="auto") as llm:
        assert summary(generate(llm)) == expected
        assert llm.stats().speculation.num_draft_tokens > 20


def test_a_stream_gets_every_token_once(live: dict[str, Any], plain: list[Any]) -> None:
    async def collect(engine: AsyncLLM) -> tuple[str, list[int]]:
        params = dataclasses.replace(PARAMS[0], output_kind=RequestOutputKind.DELTA)
        text, ids = "", []
        async for output in engine.generate(PROMPTS[0], params):
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
        return text, ids

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with AsyncLLM(**live, enforce_eager=True, speculative_config=config) as engine:
        assert asyncio.run(collect(engine)) == plain[0][:2]
        assert engine.stats().speculation.num_drafts > 0


def padded(params: Any, count: int) -> Any:
    """The same model with rows for `count` ids that mean nothing, the likeliest of all."""
    import numpy as np

    head = params["lm_head"]["kernel"]
    rows = {"embed": {"embedding": params["embed"]["embedding"]}, "lm_head": {"kernel": head}}
    for kind, leaf in (("embed", "embedding"), ("lm_head", "kernel")):
        rows[kind] = {leaf: np.concatenate([rows[kind][leaf], np.full((count, head.shape[1]), 9.0, np.float32)])}
    return {**params, **rows}


def test_a_draft_whose_vocabulary_is_padded(
    live: dict[str, Any], text_config: ModelConfig, text_params: Any, plain: list[Any], write_checkpoint: Any
) -> None:
    """Field case 24: padded ids are never proposed."""
    wide = dataclasses.replace(text_config, vocab_size=text_config.vocab_size + 62)
    draft = write_checkpoint(wide, padded(text_params, 62), name="padded")
    target = write_checkpoint(text_config, text_params, name="target")
    with LLM(target, **TINY, enforce_eager=True, speculative_model=draft, num_speculative_tokens=3) as llm:
        assert summary(generate(llm)) == plain
        assert llm.stats().speculation.acceptance_rate > 0.9


def test_a_draft_of_another_vocabulary_is_refused(
    text_config: ModelConfig, text_params: Any, write_checkpoint: Any, live: dict[str, Any]
) -> None:
    target = write_checkpoint(text_config, text_params, name="target")
    draft = write_checkpoint(text_config, text_params, name="draft")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="token 97 is 'b' there and 'a' here"):
        LLM(target, **TINY, speculative_model=draft)
    other = dataclasses.replace(text_config, vocab_size=300)
    with pytest.raises(ValueError, match="300 token ids and the target 258"):
        LLM(**live, speculative_config={"params": text_params, "model_config": other})


def test_a_draft_that_sees_further_than_the_target_keeps_its_cache_is_refused(live: dict[str, Any]) -> None:
    windowed = dataclasses.replace(live["model_config"], sliding_window=8)
    config = {"params": live["params"], "model_config": live["model_config"]}
    with pytest.raises(ValueError, match="sees all positions and the target the last 8"):
        LLM(**live | {"model_config": windowed}, speculative_config=config)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
LOOKAHEAD = {"method": "lookahead", "window_size": 2, "ngram_size": 4, "guess_set_size": 3}


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("config", "least"),
    [pytest.param(NGRAM, 1.6, id="ngram"), pytest.param(LOOKAHEAD, 1.2, marks=pytest.mark.slow, id="lookahead")],
)
def test_golden_prompts_and_echoes(
    smollm2_path: Path, golden: Mapping[str, Any], config: dict[str, Any], least: float
) -> None:
    """Field case 18: what transformers says, with and without guesses. Lookup guesses only where there is a match."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 512, "max_num_batched_tokens": 16}
    options |= {"enforce_eager": True, "use_tqdm_on_load": False, "num_gpu_blocks_override": 120}
    chosen = golden["prompts"][:4]
    prompts = [{"prompt_token_ids": prompt["prompt_ids"]} for prompt in chosen]
    expected = [prompt["greedy_ids"] for prompt in chosen]
    params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in expected]
    with LLM(smollm2_path, **options, speculative_config=config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        echo = llm.generate(" echo" * 48, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0]
        assert echo.metrics.speculation.acceptance_length > least
