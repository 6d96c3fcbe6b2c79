"""speculative_config and its short forms: what is taken, and what is refused before anything is loaded."""

from typing import Any

import pytest

from jaxinfer.config import TypicalAcceptance
from jaxinfer.speculation.lookahead import LookaheadShape
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.speculation import speculation_config


def options(**arguments: Any) -> Any:
    return EngineArgs("m", **arguments).speculative_options


def test_nothing_is_asked_for() -> None:
    assert options() is None
    assert options(speculative_config=None, speculative_model=None, num_speculative_tokens=None) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"model": "ngram", "num_speculative_tokens": 4}},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 4},
        {"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 4},
    ],
)
def test_forms_of_ngram(arguments: dict[str, Any]) -> None:
    made = options(**arguments)
    assert (made.method, made.model, made.max_tokens, made.lookup) == ("ngram", None, 4, (2, 5))


def test_a_draft_model_and_the_defaults() -> None:
    made = options(speculative_model="small")
    assert (made.method, made.model, made.max_tokens) == ("draft_model", "small", 5)
    assert options(speculative_model="small", num_speculative_tokens="auto").max_tokens == 7


def test_lookahead() -> None:
    """Tokens of a draft: W (N - 1) - 1 of the window and G (N - 1) of the guesses."""
    made = options(speculative_config={"method": "lookahead"})
    assert (made.lookahead, made.max_tokens) == (LookaheadShape(4, 5, 4), 31)
    sizes = {"window_size": 15, "ngram_size": 5, "guess_set_size": 15}
    made = options(speculative_config={"method": "lookahead", **sizes}, num_speculative_tokens=119)
    assert made.max_tokens == made.lookahead.tokens == 119
    config = speculation_config(made, None, "gpu")
    assert config is not None and (config.num_tokens, config.tree_depth, config.max_running) == (119, 17, 2)
    with pytest.raises(TypeError, match="pool_from_prompt=1"):
        options(speculative_config={"method": "lookahead", "pool_from_prompt": 1})


def test_lookup_lengths() -> None:
    for given, expected in (({"prompt_lookup_max": 3}, (2, 3)), ({"prompt_lookup_max": 1}, (1, 1))):
        assert options(speculative_config={"method": "ngram", **given}).lookup == expected
    assert options(speculative_config={"method": "ngram", "prompt_lookup_min": 7}).lookup == (7, 7)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"method": "eagle"}, "needs the head"),
        ({"method": "ngram", "eagle_topk": 2}, "eagle_topk is not of"),
        ({"method": "medusa"}, "needs the heads"),
        ({"method": "medusa", "model": "a", "params": {}}, "needs the heads"),
        ({"method": "medusa", "model": "a", "quantization": "int8"}, "quantization is not of"),
        ({"method": "medusa", "model": "a", "medusa_choices": [[0, 0]]}, r"\[0, 0\] without \[0\]"),
        ({"method": "medusa", "model": "a", "medusa_choices": [[0], [0]]}, "each once"),
        ({"method": "medusa", "model": "a", "medusa_choices": [[0], [-1]]}, r"\[-1\]; a path"),
        ({"method": "medusa", "model": "a", "medusa_choices": []}, "must be paths"),
        ({"method": "ngram", "medusa_choices": [[0]]}, "medusa_choices is not of"),
        ({"method": "medusa", "model": "a", "acceptance": "fast"}, "acceptance='fast'.*lossy"),
        ({"method": "medusa", "model": "a", "posterior_alpha": 0.3}, "acceptance='typical'"),
        ({"method": "ngram", "acceptance": "typical"}, "not of the speculative method 'ngram'"),
        ({"method": "medusa", "model": "a", "acceptance": "typical", "posterior_threshold": 1.5}, "below 1"),
        ({"method": "magic"}, "magic.*must be one of"),
        ({"num_speculative_tokens": 3}, "must be one of.*speculative_model"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "'many'.*'auto'"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ({"method": "lookahead", "ngram_size": 1}, "ngram_size=1"),
        ({"method": "lookahead", "window_size": 0}, "window_size=0"),
        ({"method": "lookahead", "num_speculative_tokens": 5}, "num_speculative_tokens=5.*= 31"),
        ({"method": "lookahead", "num_speculative_tokens": "auto"}, "num_speculative_tokens='auto'"),
        ({"method": "ngram", "window_size": 3}, "window_size is not of"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size=0"),
        ({"method": "ngram", "model": "small"}, "model is not of"),
        ({"model": "small", "prompt_lookup_max": 3}, "prompt_lookup_max is not of"),
        ({"method": "draft_model", "model": "[ngram]"}, "contradicts"),
        ({"method": "ngram", "tokens": 3}, "'tokens'"),
        ({"model": "small", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2"),
        ({"params": {}}, "model_config"),
    ],
)
def test_refusals_name_the_entry(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        options(speculative_config=config)


def test_heads_and_their_trees() -> None:
    made = options(speculative_config={"method": "medusa", "model": "heads", "medusa_choices": [[0], [1], [0, 0]]})
    assert (made.method, made.max_tokens, made.choices) == ("medusa", 3, ((0,), (1,), (0, 0)))
    assert options(speculative_config={"method": "medusa", "model": "heads"}).max_tokens == 5


def test_the_lossy_rule_is_asked_for_by_name() -> None:
    heads = {"method": "medusa", "model": "heads"}
    assert options(speculative_config=heads).typical is None
    assert options(speculative_config=heads | {"acceptance": "typical"}).typical == TypicalAcceptance(0.09, 0.3)
    config = heads | {"acceptance": "typical", "posterior_threshold": 0.2, "posterior_alpha": 0.5}
    assert options(speculative_config=config).typical == TypicalAcceptance(0.2, 0.5)


def test_a_contradiction_between_the_forms() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=3"):
        options(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, num_speculative_tokens=4)
    with pytest.raises(TypeError, match="speculative_config"):
        options(speculative_config="ngram")
