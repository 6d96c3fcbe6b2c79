"""Whoever guesses gives its weights back, too, while the engine sleeps."""

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.eagle3_head import write_eagle3
from jaxinfer.checkpoint.medusa_heads import write_medusa
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import eagle3_config, init_eagle3
from jaxinfer.models.medusa import MedusaConfig, medusa_shapes

TINY_LLAMA = Path(__file__).parents[1] / "data" / "tiny_llama"
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SIZES = {
    "max_num_seqs": 1, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 50, "enforce_eager": True,
    "use_tqdm_on_load": False, "skip_tokenizer_init": True,
}  # fmt: skip


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def answer(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 17, 33]}], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


def random_heads(heads: MedusaConfig) -> Any:
    return random_like(medusa_shapes(heads, jnp.float32))


def random_like(shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module", params=["draft", "heads", "eagle"])
def speculation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> Any:
    """A draft model, heads, and a head that guesses among the first tokens, in files."""
    if request.param == "draft":
        return {"model": str(TINY_LLAMA), "num_speculative_tokens": 2}
    if request.param == "eagle":
        head = eagle3_config(tiny_llama, 40)
        shapes = jax.eval_shape(lambda: init_eagle3(head, jax.random.key(0)))
        folder = tmp_path_factory.mktemp("eagle")
        write_eagle3(folder, head, random_like(shapes), np.arange(40), "float32")
        return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 1}
    heads = MedusaConfig(tiny_llama.hidden_size, tiny_llama.vocab_size, 2, own_heads=True)
    folder = tmp_path_factory.mktemp("heads")
    write_medusa(folder, heads, random_heads(heads), "tiny", "float32")
    return {"method": "medusa", "model": str(folder), "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def tiny_llama() -> ModelConfig:
    from jaxinfer.checkpoint import open_checkpoint

    return open_checkpoint(TINY_LLAMA).model_config


def test_everything_comes_back_and_results_stay(speculation: dict[str, Any]) -> None:
    before = live_bytes()
    with LLM(TINY_LLAMA, **SIZES, speculative_config=speculation) as llm:
        expected, awake = answer(llm), live_bytes()
        assert llm.stats().speculation.num_drafts > 0
        for level in (1, 2):
            llm.sleep(level)
            assert live_bytes() - before < 1_000
            llm.wake_up(["weights"])
            assert llm.is_sleeping() and before + 1_000 < live_bytes() < awake
            llm.wake_up()
            assert live_bytes() == awake and answer(llm) == expected
            drafts = llm.stats().speculation.num_drafts
            assert answer(llm) == expected and llm.stats().speculation.num_drafts > drafts


def test_heads_that_nobody_could_read_again_are_kept(tiny_config: ModelConfig, tiny_params: Any) -> None:
    """What `update_params` gives is the model's; the heads come back with it."""
    heads = random_heads(MedusaConfig(64, 256, 1))
    config = {"method": "medusa", "params": heads, "num_speculative_tokens": 1}
    before = live_bytes()
    with LLM(model_config=tiny_config, params=tiny_params(0), **SIZES, speculative_config=config) as llm:
        expected, awake = answer(llm), live_bytes()
        llm.sleep(2)
        assert live_bytes() - before < 1_000
        llm.update_params(tiny_params(0))
        llm.wake_up()
        assert live_bytes() == awake and answer(llm) == expected
