"""Small real engines: a random model whose output depends on everything, with the byte tokenizer."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, AsyncLLM
from jaxinfer.models.config import ModelConfig

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "enforce_eager": True, "use_tqdm_on_load": False}


@pytest.fixture(scope="session")
def text_config(tiny_config: ModelConfig) -> ModelConfig:
    """`tiny_config` with the byte tokenizer's vocabulary."""
    return dataclasses.replace(tiny_config, vocab_size=258)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer_json: str) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return folder


@pytest.fixture(scope="session")
def text_params(text_config: ModelConfig, random_params: Callable[..., Any]) -> Any:
    return random_params(text_config)


@pytest.fixture(scope="module")
def llm(text_config: ModelConfig, text_params: Any, tokenizer_dir: Path) -> Iterator[LLM]:
    """An engine from live parameters, with text."""
    with LLM(model_config=text_config, params=text_params, tokenizer=tokenizer_dir, **SMALL) as engine:
        yield engine
        assert is_idle(engine)


@pytest.fixture(scope="module")
def async_llm(text_config: ModelConfig, text_params: Any, tokenizer_dir: Path) -> Iterator[AsyncLLM]:
    """The same for asyncio; a step takes 10 ms at least, so 500 tokens are not done within two seconds."""
    with AsyncLLM(model_config=text_config, params=text_params, tokenizer=tokenizer_dir, **SMALL) as engine:
        runner: Any = engine._parts.engine.runner
        execute = runner.execute

        def slowly(plan: Any) -> Any:
            time.sleep(0.01)
            return execute(plan)

        runner.execute = slowly
        yield engine
        assert is_idle(engine)


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Keyword arguments of a small engine that compiles what it needs only."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def idle() -> Callable[[LLM | AsyncLLM], bool]:
    """`idle(llm)`: no request is unfinished and every block is free."""
    return is_idle


@pytest.fixture(scope="session")
def becomes_idle() -> Callable[[AsyncLLM], Any]:
    """`await becomes_idle(llm)`: it is idle within two seconds (field case 6)."""

    async def wait(engine: AsyncLLM) -> bool:
        deadline = time.monotonic() + 2.0
        while not is_idle(engine):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    return wait


def is_idle(llm: LLM | AsyncLLM) -> bool:
    stats = llm.stats()
    return not stats.num_unfinished and stats.num_free_blocks == stats.num_blocks
