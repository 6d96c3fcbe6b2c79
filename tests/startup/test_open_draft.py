"""Opening a draft model: whose tokenizers are asked for."""

import shutil
from pathlib import Path

import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.speculation import open_draft

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path / "bare"
    shutil.copytree(DATA / "tiny_llama", folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


def test_without_tokenizers_the_sizes_decide_for_engines_that_need_none(bare: Path) -> None:
    args = EngineArgs(str(bare), speculative_model=str(bare), skip_tokenizer_init=True)
    source = open_checkpoint(bare)
    draft = open_draft(args, args.speculative_options, source.model_config, source, None)
    assert draft is not None and draft.model == source.model_config


def test_an_engine_with_a_tokenizer_needs_the_drafts(bare: Path) -> None:
    args = EngineArgs(str(DATA / "tiny_llama"), speculative_model=str(bare))
    source = open_checkpoint(DATA / "tiny_llama")
    with pytest.raises(ValueError, match=r"bare has neither tokenizer\.json"):
        open_draft(args, args.speculative_options, source.model_config, source, source.tokenizer())


def test_where_nothing_drafts_no_tokenizer_is_asked_for(bare: Path) -> None:
    args = EngineArgs(str(bare), skip_tokenizer_init=True)
    source = open_checkpoint(bare)
    assert open_draft(args, args.speculative_options, source.model_config, source, None) is None
