"""Medusa heads through the front door."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.medusa_heads import write_medusa
from jaxinfer.models.medusa import MedusaConfig, medusa_shapes
from tests.e2e.test_llm_speculation import COMPILE_EVENT, TINY, generate, live, plain, summary

__all__ = ["live", "plain"]  # fixtures


def random_heads(heads: MedusaConfig) -> Any:
    rng = np.random.default_rng(0)
    shapes = medusa_shapes(heads, jnp.float32)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


def heads_folder(path: Path, heads: MedusaConfig) -> str:
    path.mkdir()
    write_medusa(path, heads, random_heads(heads), "tiny", "float16")
    return str(path)


def test_warmed_up_and_with_other_parameters(
    live: dict[str, Any],
    plain: list[Any],
    random_params: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = heads_folder(tmp_path / "heads", MedusaConfig(64, 258, 3))
    events: list[str] = []

    def note(name: str, seconds: float, **_: object) -> None:
        if name == COMPILE_EVENT:
            events.append(name)

    config = {"method": "medusa", "model": folder, "num_speculative_tokens": 5}
    other = random_params(live["model_config"], seed=7)
    with LLM(**live | {"params": other}, enforce_eager=True) as llm:
        expected = summary(generate(llm))
    with LLM(**live, speculative_config=config) as llm:
        documented = llm.stats().num_compiled
        monitoring.register_event_duration_secs_listener(note)
        assert summary(generate(llm)) == plain
        llm.update_params(other)
        assert summary(generate(llm)) == expected
        monitoring.unregister_event_duration_listener(note)
        # Step sizes 1 and 8, greedy and sampling, 8 also for trees; two uploads, copy, count, move; heads for 1 and 2.
        assert llm.stats().num_compiled == documented == 6 + 5 + 2 and events == []
        stats = llm.stats().speculation
        assert stats.num_draft_tokens > 100 and stats.draft_seconds > 0.0


@pytest.mark.slow
def test_codes_for_weights_and_cache_and_adapting_trees(live: dict[str, Any]) -> None:
    options = {"kv_cache_dtype": "int8", "quantization": "int8", "enforce_eager": True}
    with LLM(**live, **options) as llm:
        expected = summary(generate(llm))
    config = {"method": "medusa", "params": random_heads(MedusaConfig(64, 258, 2, own_heads=True))}
    with LLM(**live, **options, speculative_config=config, num_speculative_tokens="auto") as llm:
        assert summary(generate(llm)) == expected
        assert llm.stats().speculation.num_draft_tokens > 20


def test_heads_that_do_not_belong(live: dict[str, Any], tmp_path: Path) -> None:
    for name, heads, named in (
        ("wide", MedusaConfig(32, 258, 2), "their hidden_size is 32 and the model's is 64"),
        ("other", MedusaConfig(64, 300, 2, own_heads=True), "their vocab_size is 300 and the model's is 258"),
    ):
        folder = heads_folder(tmp_path / name, heads)
        with pytest.raises(ValueError, match=named):
            LLM(**live, speculative_config={"method": "medusa", "model": folder})
    deep = {"method": "medusa", "params": random_heads(MedusaConfig(64, 258, 1)), "medusa_choices": [[0], [0, 0]]}
    with pytest.raises(ValueError, match="a path of 2 nodes and there are 1 heads"):
        LLM(**live, speculative_config=deep)
    with pytest.raises(ValueError, match="Medusa heads are heads_0"):
        LLM(**live, speculative_config={"method": "medusa", "params": live["params"]})
    lacking = random_heads(MedusaConfig(64, 258, 1))
    del lacking["heads_0"]["blocks_0"]["bias"]
    with pytest.raises(ValueError, match="heads_0/blocks_0/bias"):
        LLM(**live, speculative_config={"method": "medusa", "params": lacking})
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    (tmp_path / "pickled/medusa_lm_head.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickle"):
        LLM(**live, speculative_config={"method": "medusa", "model": tmp_path / "pickled"})


@pytest.mark.slow
@pytest.mark.real_model
def test_golden_prompts(smollm2_path: Path, golden: Mapping[str, Any]) -> None:
    """What transformers says, whatever heads say."""
    heads = random_heads(MedusaConfig(576, 49152, 4))
    config = {"method": "medusa", "params": heads, "num_speculative_tokens": 7}
    options = TINY | {"max_model_len": 512, "max_num_batched_tokens": 16, "enforce_eager": True, "block_size": 16}
    chosen = golden["prompts"][:4]
    prompts = [{"prompt_token_ids": prompt["prompt_ids"]} for prompt in chosen]
    expected = [prompt["greedy_ids"] for prompt in chosen]
    params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in expected]
    with LLM(smollm2_path, **options, speculative_config=config, num_gpu_blocks_override=120) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.stats().speculation.num_drafts > 20
