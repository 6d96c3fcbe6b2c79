"""The EAGLE draft loop and the layer that steps keep up for it, against the head over whole sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EagleTree, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config, init_eagle
from jaxinfer.models.eagle3 import eagle3_config, init_eagle3
from jaxinfer.models.eagle_model import CUT_HEAD, TOKEN_IDS, EagleModel, cut_head
from jaxinfer.runner.eagle_runner import EagleRunner, loop_buckets
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.sampling.best_rows import best_of_rows
from tests.runner.eagle_naive import NaiveEagle

MODEL = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
CUT = [*range(2, 300, 5)]
SEEDED = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)


def random_like(tree: Any, seed: int, scale: float) -> Any:
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(tree)
    filled = [(scale * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


class Made:
    """A target with a head of a kind, in a runner and written out naively."""

    def __init__(self, kind: str, params: Any) -> None:
        self.params = params
        if kind == "eagle3":
            head: Any = eagle3_config(MODEL, len(CUT))
            own = random_like(init_eagle3(head, jax.random.key(0)), 1, 0.3)
            given = {"head": own, TOKEN_IDS: jnp.asarray(CUT, jnp.int32)}
        else:
            head = eagle_config(MODEL)
            own = random_like(init_eagle(head, jax.random.key(0)), 2, 0.3)
            given = {"head": own}
            if kind == "cut":
                ids = jnp.asarray(CUT, jnp.int32)
                given |= {TOKEN_IDS: ids, CUT_HEAD: cut_head(MODEL, params, ids, jnp.float32)}
        self.model = EagleModel(MODEL, head, kind != "eagle3")
        self.naive = NaiveEagle(MODEL, params, head, own, None if kind == "eagle" else CUT)
        self.given = given

    def runner(self, tree: EagleTree) -> tuple[EngineConfig, ModelRunner]:
        """With a pool that has room for trees like this and for smaller ones."""
        speculation = SpeculationConfig(4, max_running=4, features="eagle", eagle=tree)
        config = EngineConfig(
            MODEL,
            CacheConfig(block_size=4, num_blocks=60),
            SchedulerConfig(4, 16, 64, token_buckets=(16,)),
            RunnerConfig(enforce_eager=True),
            speculation=speculation,
        )
        runner = ModelRunner(config, self.params)
        runner.use_eagle(self.model, self.given)
        return config, runner


@pytest.fixture(scope="module")
def made(random_params: Callable[..., Any]) -> Callable[[str], Made]:
    params = jax.tree.map(jnp.asarray, random_params(MODEL, seed=5))
    kinds: dict[str, Made] = {}

    def make(kind: str) -> Made:
        return kinds.setdefault(kind, Made(kind, params))

    return make


def settled(engine: Engine) -> list[Request]:
    """Running requests that lack their last token only; they have blocks for it and a draft."""
    while engine._steps:
        engine._complete_step()
    return [request for request, _ in engine.scheduler.draft_room.candidates(lambda request: 4)]


def check(naive: NaiveEagle, loop: EagleRunner, tree: EagleTree, requests: list[Request]) -> None:
    trees = loop.draft(requests)
    for index, request in enumerate(requests):
        ids = request.token_ids(0, request.num_known_tokens)
        expected = naive.tree(ids, tree.depth, tree.top_k, tree.num_nodes)
        found = zip(trees.token_ids[index].tolist(), trees.parents[index].tolist(), strict=True)
        assert list(found) == [(token, parent) for token, parent, _ in expected]
        np.testing.assert_allclose(trees.logprobs[index], [score for *_, score in expected], atol=5e-3, rtol=1e-3)


def trees_of(model: EagleModel) -> dict[str, EagleTree]:
    return {
        "chain": EagleTree(model.layer, 4, 1, 4),
        "wide": EagleTree(model.layer, 3, 3, 9),
        "one deep": EagleTree(model.layer, 1, 5, 4),
    }


SLOW = pytest.mark.slow  # tests/speculation/test_eagle.py looks at trees of version 1


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=SLOW), pytest.param("cut", marks=SLOW), "eagle3"])
def test_trees_are_those_of_the_head_over_whole_sequences(made: Callable[[str], Made], kind: str) -> None:
    """After a prompt longer than a step, a prefix hit, samples that share a block, and a preemption."""
    one = made(kind)
    trees = trees_of(one.model)
    config, runner = one.runner(trees["wide"])
    loops = {name: EagleRunner(runner, tree) for name, tree in trees.items()}
    engine = Engine(config, runner, None)
    prompt = np.random.default_rng(0).integers(2, 300, 22).tolist()
    engine.add_request("first", prompt, SEEDED)
    engine.add_request("short", [7], SEEDED)
    for _ in range(5):
        engine.step()
    engine.add_request("second", [*prompt[:18], 3, 4], dataclasses.replace(SEEDED, seed=3))
    for _ in range(6):
        engine.step()
    assert engine.stats().num_prefix_hits >= 16
    requests = settled(engine)
    assert len(requests) == 3
    for name, tree in trees.items():
        if name == "wide" or kind == "eagle":
            check(one.naive, loops[name], tree, requests)
    before = [request.num_known_tokens for request in requests]
    for request in requests:
        engine.scheduler.draft_room.put(request, NO_DRAFT)
    engine.step()  # what the loops wrote behind the requests is overwritten
    while engine._steps:
        engine._complete_step()
    engine.scheduler.preempt_all()
    for _ in range(7):
        engine.step()
    requests = settled(engine)
    assert [request.num_known_tokens for request in requests] > before
    loops["wide"].warm_up()
    assert loops["wide"].num_compiled == len(loop_buckets(4)) == 2
    check(one.naive, loops["wide"], trees["wide"], requests)
    assert loops["wide"].num_compiled == 2


def test_a_node_whose_children_are_no_numbers_comes_before_them(made: Callable[[str], Made]) -> None:
    one = made("eagle3")
    tree = EagleTree(one.model.layer, 3, 3, 15)
    config, runner = one.runner(tree)
    engine = Engine(config, runner, None)
    engine.add_request("a", [7, 8, 9], SEEDED)
    engine.step()
    requests, loop = settled(engine), EagleRunner(runner, tree)
    best = int(loop.draft(requests).token_ids[0, 0])
    assert best != requests[0].token_ids(0, 4)[-1]
    table = jnp.asarray(one.params["embed"]["embedding"]).at[best].set(jnp.nan)
    runner.update_params({**one.params, "embed": {"embedding": table}})
    trees = loop.draft(requests)
    drafted = Draft(tuple(trees.token_ids[0].tolist()), parents=tuple(trees.parents[0].tolist()))
    drafted.check()
    assert best in drafted.token_ids and set(drafted.token_ids) <= set(CUT)


def test_batch_sizes_are_few() -> None:
    assert loop_buckets(1) == (1,)
    assert loop_buckets(2) == (1, 2)
    assert loop_buckets(8) == (1, 8)
    assert loop_buckets(16) == (1, 16)
    assert loop_buckets(42) == (1, 8, 42)


@pytest.mark.parametrize("width", [3, 256, 300, 1000])
def test_best_of_rows(width: int) -> None:
    """With equal values: the first of them."""
    values = np.random.default_rng(width).integers(0, 40, (5, width)).astype(np.float32)
    best, indices = jax.jit(best_of_rows, static_argnums=1)(values, 3)
    for row in range(5):
        order = sorted(range(width), key=lambda index: (-values[row, index], index))[:3]
        assert np.asarray(indices[row]).tolist() == order
        np.testing.assert_array_equal(best[row], values[row, order])
