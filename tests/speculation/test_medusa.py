"""Medusa heads in the engine: whatever they say, greedy and seeded requests get what plain decoding gives."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import (
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
    TypicalAcceptance,
)
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.medusa import MedusaConfig, config_of_medusa, medusa_shapes
from jaxinfer.runner.medusa_runner import MedusaRunner
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.speculation.candidate_tree import check_choices
from jaxinfer.speculation.medusa import MedusaProposer
from jaxinfer.speculation.speculator import Speculator
from tests.speculation.conftest import EOS, eight, prompt, serve, summary, token_ids
from tests.speculation.test_distribution import PROMPT, SETTINGS, exact, naive_logits, p_value
from tests.speculation.test_lossless import assert_same_logprobs

NODES, DEPTH, SEQS, BLOCKS = 8, 4, 8, 130
SCRIPT = [*range(10, 30), 10]


@dataclasses.dataclass
class Served:
    """A target with heads on one runner; engines are made around it."""

    config: EngineConfig
    runner: ModelRunner
    params: Any

    def engine(self, heads: Any = None, tokens: int = NODES, blocks: int = BLOCKS, choices: Any = None) -> Engine:
        """An engine that guesses with these heads; a plain one without."""
        guess = dataclasses.replace(self.config.speculation, num_tokens=tokens, tree_depth=min(tokens, DEPTH))
        cache = dataclasses.replace(self.config.cache, num_blocks=blocks)
        config = dataclasses.replace(self.config, cache=cache, speculation=None if heads is None else guess)
        speculator = None
        if heads is not None:
            sizes = config_of_medusa(heads, config.model.vocab_size)
            steps = MedusaRunner(self.runner, sizes, heads, min(NODES, config.model.vocab_size))
            shape = None if choices is None else check_choices(choices)
            speculator = Speculator(guess, MedusaProposer(steps, config.cache.block_size, shape))
        return Engine(config, self.runner, None, eos_token_ids=frozenset({EOS}), speculation=speculator)


def served_model(
    model: ModelConfig, params: Any, seqs: int = SEQS, typical: TypicalAcceptance | None = None, **sizes: Any
) -> Served:
    config = EngineConfig(
        model,
        CacheConfig(block_size=4, num_blocks=sizes.get("blocks", BLOCKS)),
        SchedulerConfig(seqs, sizes.get("tokens", 80), 128, token_buckets=(sizes.get("tokens", 80),)),
        RunnerConfig(enforce_eager=True),
        speculation=SpeculationConfig(NODES, max_running=seqs, features="hidden", tree_depth=DEPTH, typical=typical),
    )
    return Served(config, ModelRunner(config, params), params)


def random_heads(heads: MedusaConfig, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    shapes = medusa_shapes(heads, jnp.float32)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def small(small_model: ModelConfig, random_params: Callable[..., Any]) -> Served:
    return served_model(small_model, random_params(small_model, seed=3))


@pytest.fixture(scope="module")
def scripted(scripted_model: Callable[..., Any]) -> Served:
    return served_model(*scripted_model(SCRIPT, vocab_size=64))


def scripted_heads(params: Any, decoys: bool = False) -> Any:
    """Heads that know the script: head k gives token j the embedding of what is k + 2 places before it. With decoys
    the last one likes a token better, 20 above the right one, that the script does not have."""
    table, ring = params["embed"]["embedding"], SCRIPT[:-1]
    width = table.shape[1]
    heads = {}
    for number in range(DEPTH):
        matrix = np.zeros_like(table)
        for index, token in enumerate(ring):
            matrix[token] = table[ring[index - (number + 2)]]
        if decoys and number == DEPTH - 1:
            matrix[30:50] = 1.02 * matrix[10:30]
        block = {"kernel": np.zeros((width, width), np.float32), "bias": np.zeros(width, np.float32)}
        heads[f"heads_{number}"] = {"blocks_0": block, "lm_head": {"kernel": matrix}}
    return heads


@pytest.fixture(scope="module")
def plain(small: Served) -> Any:
    return serve(small.engine(), eight())


@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_random_heads_change_nothing(small: Served, plain: Any, tokens: int) -> None:
    engine = small.engine(random_heads(MedusaConfig(32, 64, 3)), tokens)
    assert summary(serve(engine, eight())) == summary(plain)
    stats = engine.stats().speculation
    assert stats.num_drafts > 30 and stats.acceptance_length < 1.3
    assert len(stats.num_drafted_per_position) <= min(tokens, 3)


def test_alone_in_a_small_pool_and_with_a_given_tree(small: Served, plain: Any) -> None:
    heads = random_heads(MedusaConfig(32, 64, 4, own_heads=True), 1)
    engine = small.engine(heads, 5, blocks=26)
    assert summary(serve(engine, eight())) == summary(plain)
    assert engine.stats().num_preemptions > 0
    choices = [[0], [1], [0, 0], [0, 1], [0, 0, 0], [2], [0, 0, 0, 0]]
    for index in (1, 2):
        engine = small.engine(heads, 7, choices=choices)
        assert token_ids(serve(engine, [eight()[index]]))["0"] == token_ids(plain)[str(index)]
        assert len(engine.stats().speculation.num_drafted_per_position) == 4


def test_log_probabilities_are_those_of_plain_decoding(small: Served) -> None:
    requests = [(ids, dataclasses.replace(params, logprobs=3, frequency_penalty=0.2)) for ids, params in eight()]
    expected = serve(small.engine(), requests)
    served = serve(small.engine(random_heads(MedusaConfig(32, 64, 2)), 5), requests)
    assert summary(served) == summary(expected)
    for name, output in served.items():
        assert_same_logprobs(output, expected[name])


def cycle(start: int, count: int) -> list[int]:
    return [SCRIPT[:-1][(start + index) % 20] for index in range(count)]


def script_requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy ones and a seeded one; two share the beginning of their prompts."""
    greedy = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    warm = SamplingParams(temperature=2.0, seed=3, max_tokens=30, ignore_eos=True)
    starts = [(0, 9, greedy), (0, 14, greedy), (7, 1, greedy), (3, 30, greedy), (5, 6, warm)]
    return [(cycle(start, count), params) for start, count, params in starts]


@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_heads_that_know_are_right(scripted: Served, tokens: int) -> None:
    requests = script_requests()[:4]
    expected = serve(scripted.engine(), requests)
    assert token_ids(expected)["2"] == cycle(8, 41)
    engine = scripted.engine(scripted_heads(scripted.params), tokens)
    assert summary(serve(engine, requests)) == summary(expected)
    stats = engine.stats().speculation
    assert stats.acceptance_rate_per_position == [1.0] * min(tokens, DEPTH)


def test_a_branch_that_holds_takes_its_features_along(scripted: Served) -> None:
    """The last right token is the second guess of the last head, so that it has to be moved to where the first one was
    computed; and the next guess starts from it."""
    requests = script_requests()
    expected = serve(scripted.engine(), requests)
    engine = scripted.engine(scripted_heads(scripted.params, decoys=True))
    assert token_ids(serve(engine, requests[:4])) == {str(name): token_ids(expected)[str(name)] for name in range(4)}
    assert engine.stats().speculation.acceptance_rate_per_position == [1.0] * DEPTH
    assert summary(serve(engine, requests)) == summary(expected)
    assert engine.stats().num_prefix_hits > 0


def test_features_are_found_again_and_made_again(scripted: Served) -> None:
    """Requests that lose their blocks to others go on guessing right."""
    requests = script_requests()
    expected = serve(scripted.engine(), requests)
    engine = scripted.engine(scripted_heads(scripted.params), blocks=30)
    assert summary(serve(engine, requests)) == summary(expected)
    assert set(engine.stats().speculation.acceptance_rate_per_position) == {1.0}
    assert engine.stats().num_preemptions > 0 and engine.stats().num_prefix_hits > 0


EIGHT_TOKENS = ModelConfig(
    vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def of_eight_tokens(random_params: Callable[..., Any]) -> Served:
    params = random_params(EIGHT_TOKENS, seed=11, scale=0.15)
    return served_model(EIGHT_TOKENS, params, seqs=64, blocks=400, tokens=256)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("requests", "n"), [(1, 1_500), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_triples(of_eight_tokens: Served, setting: str, requests: int, n: int) -> None:
    """Unseeded sampling, batch 64: all 512 triples as often as they should come."""
    params = SamplingParams(
        n=n, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **SETTINGS[setting]
    )
    engine = of_eight_tokens.engine(random_heads(MedusaConfig(32, 8, 2), 4), 3, blocks=400)
    for index in range(requests):
        engine.add_request(str(index), PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    drawn = np.array([sample.token_ids[1:4] for output in outputs for sample in output.outputs])
    assert len(drawn) == requests * n
    counts = np.bincount(drawn @ [64, 8, 1], minlength=512)
    probability = exact(of_eight_tokens.config.model, of_eight_tokens.params, params)
    assert 1.05 < engine.stats().speculation.acceptance_length < 3.0
    assert counts[probability == 0.0].sum() == 0
    assert p_value(counts, probability * requests * n) > 0.001


def test_prompts_of_one_token(small: Served) -> None:
    requests = [([9], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)), (prompt(8, 2), eight()[0][1])]
    expected = serve(small.engine(), requests)
    assert summary(serve(small.engine(random_heads(MedusaConfig(32, 64, 3)), 5), requests)) == summary(expected)


@pytest.mark.slow
def test_the_lossy_rule_keeps_more_and_nothing_that_is_filtered_out(of_eight_tokens: Served) -> None:
    params = of_eight_tokens.params
    heads = random_heads(MedusaConfig(32, 8, 3), 4)
    sampling = SamplingParams(
        n=8, temperature=1.0, seed=1, top_k=3, max_tokens=30, ignore_eos=True, logprobs=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    lengths = []
    for model in (of_eight_tokens, served_model(EIGHT_TOKENS, params, typical=TypicalAcceptance())):
        engine = model.engine(heads, 6)
        served = serve(engine, [(PROMPT, sampling)])
        lengths.append(engine.stats().speculation.acceptance_length)
        drawn = np.array([sample.token_ids for sample in served["0"].outputs])
        ids = np.concatenate([np.tile(PROMPT, (len(drawn), 1)), drawn], axis=1)
        shares = naive_logits(EIGHT_TOKENS, params, ids)[:, len(PROMPT) - 1 : -1]
        ranks = (shares > np.take_along_axis(shares, drawn[..., None], axis=-1)).sum(-1)
        assert ranks.max() == 2  # top_k=3
        for sample in served["0"].outputs:
            assert all(token in entry for token, entry in zip(sample.token_ids, sample.logprobs, strict=True))
        assert token_ids(serve(model.engine(heads, 6), [(PROMPT, greedy)])) == token_ids(
            serve(model.engine(), [(PROMPT, greedy)])
        )
    assert lengths[1] > lengths[0] + 0.5
