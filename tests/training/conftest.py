"""Small teachers for training runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.training.corpus import DataOptions
from jaxinfer.training.optimizer import OptimizerOptions
from jaxinfer.training.options import TrainOptions
from jaxinfer.training.training_run import Pace

TEXT = "the cat sat on the mat and the dog sat on the log. " * 12


@pytest.fixture(scope="session")
def small_config(tiny_config: ModelConfig) -> ModelConfig:
    """Three layers, the tokens of the tests' tokenizer."""
    return replace(
        tiny_config,
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )


@pytest.fixture
def teacher(
    small_config: ModelConfig, random_params: Callable[..., Any], write_checkpoint: Callable[..., Path]
) -> Path:
    """A random teacher's directory."""
    return write_checkpoint(small_config, random_params(small_config, 3), name="teacher")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 612 bytes, which is as many tokens."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def data(text: Path) -> DataOptions:
    return DataOptions(files=(text,), seq_len=32, eval_fraction=0.1)


@pytest.fixture
def training() -> Callable[..., TrainOptions]:
    """`training(steps=4, ...)`: keywords of `OptimizerOptions`, `Pace` or `TrainOptions`."""

    def make(steps: int = 4, **fields: Any) -> TrainOptions:
        own = {name: fields.pop(name) for name in list(fields) if name in TrainOptions.__dataclass_fields__}
        pace = {name: fields.pop(name) for name in list(fields) if name in Pace.__dataclass_fields__}
        optimizer = OptimizerOptions(steps=steps, **{"learning_rate": 1e-2, **fields})
        return TrainOptions(optimizer, Pace(steps, **{"log_every": 1, **pace}), **{"batch_size": 4, **own})

    return make
