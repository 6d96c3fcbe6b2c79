"""Whoever guesses, and however well: greedy and seeded requests get what plain decoding gives (field cases 1, 18)."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.speculation.ngram import NgramProposer
from jaxinfer.speculation.proposer import Proposer
from tests.speculation.conftest import (
    EOS,
    Bench,
    Guesses,
    assert_same_logprobs,
    eight,
    prompt,
    serve,
    summary,
    token_ids,
)

Make = Callable[[str, Any], Proposer]


@pytest.fixture
def make(bench: Bench, random_params: Callable[..., Any], small_model: ModelConfig) -> Make:
    """`make(name, served)`: a proposer; `served` is what plain decoding gives."""

    def made(name: str, served: Any) -> Proposer:
        if name == "ngram":
            return NgramProposer(1, 4)
        if name == "same draft":
            return bench.drafter(bench.params)
        if name == "other draft":
            return bench.drafter(random_params(small_model, seed=99))
        return Guesses(token_ids(served), {"right": 1.0, "half right": 0.7, "random": 0.0}[name])

    return made


@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
@pytest.mark.parametrize("name", ["ngram", "same draft", "other draft", "half right", "random"])
def test_ids_are_those_of_plain_decoding(bench: Bench, make: Make, plain: Any, name: str, tokens: int) -> None:
    engine = bench.engine(make(name, plain), tokens)
    served = serve(engine, eight())
    assert summary(served) == summary(plain)
    stats = engine.stats().speculation
    assert stats is not None and stats.num_draft_tokens > 0
    if name == "same draft":
        assert stats.acceptance_rate == 1.0
    if name == "random":
        assert stats.acceptance_rate < 0.2


def test_a_draft_with_few_positions_stops_guessing_there(bench: Bench, plain: Any) -> None:
    """Field case 18: its positions end at 40, the sequence at 64."""
    engine = bench.engine(bench.drafter(bench.params, max_position=40), 5)
    served = serve(engine, [eight()[2]])
    assert token_ids(served)["0"] == token_ids(plain)["2"]
    stats = engine.stats().speculation
    assert stats.acceptance_rate == 1.0 and 12 <= stats.num_accepted_tokens <= 16


@pytest.mark.parametrize("name", ["ngram", "other draft", "half right"])
def test_in_a_small_pool_and_alone(bench: Bench, make: Make, plain: Any, name: str) -> None:
    engine = bench.engine(make(name, plain), 5, blocks=24)
    assert summary(serve(engine, eight())) == summary(plain)
    assert engine.stats().num_preemptions > 0
    for index in (1, 2):
        alone = serve(bench.engine(make(name, plain), 3), [eight()[index]])
        assert token_ids(alone)["0"] == token_ids(plain)[str(index)]


@pytest.mark.parametrize("name", ["ngram", "same draft", "other draft", "half right"])
def test_every_sampling_parameter_sees_the_draft_before_its_position(
    bench: Bench, make: Make, specials: Any, name: str
) -> None:
    requests, expected = specials
    served = serve(bench.engine(make(name, expected), 4), requests)
    assert summary(served) == summary(expected)
    for request_id, output in served.items():
        assert_same_logprobs(output, expected[request_id])


def test_ends_inside_an_accepted_run_cut_where_plain_decoding_does(bench: Bench) -> None:
    """The guess is right for 20 tokens on; the request ends after some of them, by each way to end."""
    ((_, long),) = token_ids(
        serve(bench.engine(None), [(prompt(9, 6), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))])
    ).items()
    place = next(index for index in range(4, 20) if long[index] not in long[:index])
    known = {str(index): long for index in range(5)}
    requests = [
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[long[place]], ignore_eos=True)),
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=place, ignore_eos=True)),
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)),
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),  # to max_model_len
        (prompt(9, 6), SamplingParams(temperature=0, max_tokens=40)),
    ]
    expected = summary(serve(bench.engine(None), requests))
    engine = bench.engine(Guesses(known), 8)
    assert summary(serve(engine, requests)) == expected
    assert expected["0"][0][0] == long[: place + 1] and expected["1"][0][1] == "length"
    assert len(expected["3"][0][0]) == 128 - 6
    # The first step of a request draws one token, the others nine each while the guess is right.
    assert engine.stats().speculation.num_accepted_per_position[7] >= 4


def test_an_end_of_sequence_id_amid_a_right_guess(bench: Bench) -> None:
    """Whatever it guesses: tokens behind the end are not the request's."""
    requests = [(prompt(seed, 4), SamplingParams(temperature=1.0, seed=seed, max_tokens=60)) for seed in range(6)]
    expected = serve(bench.engine(None), requests)
    ended = [output.outputs[0] for output in expected.values() if output.outputs[0].finish_reason == "stop"]
    assert ended and all(sample.token_ids[-1] == EOS for sample in ended)
    known = {name: [*ids, 5, 5, 5, 5, 5, 5, 5, 5] for name, ids in token_ids(expected).items()}
    assert summary(serve(bench.engine(Guesses(known), 8), requests)) == summary(expected)


def test_many_running_requests_step_aside_and_few_do_not(bench: Bench, make: Make, plain: Any) -> None:
    """The visible rule: no guess while more run than `max_running`; then the engine runs a step ahead again."""
    engine = bench.engine(Guesses(token_ids(plain)), 4, max_running=2)
    requests = eight()
    assert summary(serve(engine, requests)) == summary(plain)
    stats = engine.stats().speculation
    assert 0 < stats.num_drafts < 24
    engine = bench.engine(Guesses(token_ids(plain)), 4, max_running=2)
    for index, (ids, params) in enumerate(requests):
        engine.add_request(str(index), ids, params)
    engine.step()
    engine.step()
    assert engine.stats().speculation.num_drafts == 0 and len(engine._steps) == 1
    engine.abort([str(index) for index in range(8)])


def test_aborting_and_pausing_the_pool_amid_a_verification(bench: Bench, plain: Any) -> None:
    """A request that lost its blocks, or its life, while its draft was in flight."""
    engine = bench.engine(Guesses(token_ids(plain), 0.8), 5)
    requests = eight()
    for index, (ids, params) in enumerate(requests):
        engine.add_request(str(index), ids, params)
    served: dict[str, Any] = {}
    for count in range(4):
        served |= {output.request_id: output for output in engine.step() if output.finished}
        engine._fill()
        assert engine.reset_prefix_cache(reset_running_requests=True) or count
        engine.scheduler.check_integrity()
    engine._fill()
    engine.abort("2")
    while engine.has_unfinished_requests():
        served |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check_integrity()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    expected = {name: value for name, value in summary(plain).items() if name != "2"}
    assert {name: value for name, value in summary(served).items() if name != "2"} == expected


def test_what_was_guessed_is_on_the_outputs(bench: Bench, plain: Any) -> None:
    served = serve(bench.engine(Guesses(token_ids(plain)), 4), [eight()[0], eight()[4]])
    metrics = served["0"].metrics.speculation
    count = len(served["0"].outputs[0].token_ids)
    assert metrics.acceptance_rate_per_position[0] > 0.7
    assert metrics.num_accepted_tokens + metrics.num_drafts + 1 >= count
    assert metrics.verify_seconds > 0.0 and metrics.draft_seconds > 0.0
    assert served["1"].metrics.speculation is None  # its only token needed no guess


def test_a_request_with_a_draft_leaves_the_pool_like_one_without(bench: Bench, plain: Any) -> None:
    """Field case 18: rejected tokens do not stay. What follows the prompt and output is computed from the cached blocks
    of a run with wrong guesses."""
    ids, params = eight()[2]
    engine = bench.engine(Guesses({}, 0.0), 8)
    first = token_ids(serve(engine, [(ids, params)]))["0"]
    hits = engine.stats().num_prefix_hits
    longer = serve(engine, [(ids + first, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))])
    assert engine.stats().num_prefix_hits - hits > len(ids)
    fresh = serve(bench.engine(None), [(ids + first, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))])
    assert token_ids(longer) == token_ids(fresh)
