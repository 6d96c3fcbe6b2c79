"""Opening a draft model: whose tokenizers are asked for."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.draft_model import DraftModel
from jaxinfer.startup.guesser import Guesser
from jaxinfer.startup.speculation import open_guesser

BARE = Path(__file__).parents[1] / "data/tiny_llama"  # which has no tokenizer


def opened(**arguments: Any) -> Guesser | None:
    args = EngineArgs(str(BARE), **arguments)
    source = open_checkpoint(BARE)
    return open_guesser(args, args.speculative_options, source.model_config, source, None)


def test_without_tokenizers_the_sizes_decide_for_engines_that_need_none() -> None:
    draft = opened(speculative_model=str(BARE), skip_tokenizer_init=True)
    assert isinstance(draft, DraftModel) and draft.model == open_checkpoint(BARE).model_config


def test_other_engines_need_them() -> None:
    with pytest.raises(ValueError, match=r"tiny_llama has neither tokenizer\.json"):
        opened(speculative_model=str(BARE))


def test_where_nothing_drafts_none_is_asked_for() -> None:
    assert opened() is None
