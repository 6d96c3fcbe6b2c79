"""Trees of drafts on a device that keeps in each KV slot all tokens that its contents depend on.

Whatever happens around a request, it reads nothing else than its own tokens, and its output is what it would be alone.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from jaxinfer.engine.draft import NO_DRAFT, Draft
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.plan import DraftOutcome, RowResult, ScheduledRow, StepPlan, StepResult
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.speculation.lookahead import LookaheadProposer, LookaheadShape
from jaxinfer.speculation.speculator import Speculator
from tests.engine.loop.conftest import DictTokenizer

VOCAB, EOS, LONGEST, SEQS = 5, 0, 40, 4
Prefix = tuple[int, ...]


def draw(prefix: Sequence[int]) -> int:
    return zlib.crc32(bytes(prefix)) % 97 % VOCAB


def alone(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < (params.max_tokens or LONGEST) and len(prompt) + len(output) < LONGEST:
        output.append(draw([*prompt, *output]))
        if output[-1] == EOS:
            break
    return output


@dataclass
class Device:
    """A runner; a slot holds the token that was computed there with all before it that it saw."""

    config: EngineConfig
    pool: dict[int, Prefix] = field(default_factory=dict)
    num_compiled: int = 0
    num_moved: int = 0

    def change(self, copies: Sequence[tuple[int, int]], moves: Sequence[tuple[int, int]]) -> None:
        size = self.config.cache.block_size
        for target, contents in [(target, self.pool.get(source, ())) for source, target in moves]:
            self.pool[target] = contents
            self.num_moved += 1
        for source, target in copies:
            for offset in range(size):
                self.pool[target * size + offset] = self.pool.get(source * size + offset, ())

    def execute(self, plan: StepPlan) -> "Pending":
        self.change(plan.copies, plan.moves)
        news = [self.write(row) for row in plan.rows]
        return Pending(StepResult(tuple(map(self.result, plan.rows, news)), 0.0))

    def slot(self, request: Request, place: int) -> int:
        size = self.config.cache.block_size
        return request.block_ids[place // size] * size + place % size

    def write(self, row: ScheduledRow) -> list[Prefix]:
        """What each new token depends on."""
        assert not row.token_on_device
        request, draft = row.request, row.draft
        num_known = row.num_tokens - len(draft.token_ids)
        known = tuple(request.token_ids(0, row.start + num_known))
        new = [known[: row.start + 1 + index] for index in range(num_known)]
        new += [(*known, *draft.guessed(index)) for index in range(len(draft.token_ids))]
        for index, prefix in enumerate(new):
            self.pool[self.slot(request, row.start + index)] = prefix
        return new

    def result(self, row: ScheduledRow, new: list[Prefix]) -> RowResult:
        tokens = row.request.token_ids(0, row.start)
        window = self.config.model.sliding_window or LONGEST
        for place in range(max(0, row.start - window + 1), row.start):
            assert self.pool.get(self.slot(row.request, place), ()) == tuple(tokens[: place + 1])
        if not row.samples:
            return RowResult(None)
        drawn, *following = [RowResult(draw(prefix)) for prefix in new[-1 - len(row.draft.token_ids) :]]
        return RowResult(drawn.token_id, following=tuple(following))


@dataclass
class Pending:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


@dataclass
class RandomTrees:
    rng: random.Random
    num_compiled: int = 0
    num_accepted: int = 0

    def warm_up(self, progress: bool) -> None: ...

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self.tree(request, count) for request, count in rows]

    def tree(self, request: Request, count: int) -> Draft:
        """Often with what the request will say, also beyond its end."""
        count = self.rng.randint(0, count)
        if not count:
            return NO_DRAFT
        known = request.token_ids(0, request.num_known_tokens)
        parents, tokens = [], []
        draft = NO_DRAFT
        for _ in range(count):
            parent = self.rng.randint(max(-1, len(tokens) - 3), len(tokens) - 1)
            right = draw([*known, *draft.guessed(parent)])
            tokens.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
            parents.append(parent)
            draft = Draft(tuple(tokens), parents=tuple(parents))
        return draft if self.rng.random() < 0.9 else Draft(draft.token_ids)

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        for outcome in outcomes:
            drawn = [outcome.drawn[0], *(outcome.drawn[1 + index] for index in outcome.path)]
            assert [outcome.draft.token_ids[index] for index in outcome.path] == drawn[:-1]
            self.num_accepted += len(outcome.path)

    def release(self) -> None: ...

    def restore(self) -> None: ...


class Letters(DictTokenizer):
    """Token t is the t-th letter."""

    all_special_ids = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ["abcde".index(letter) for letter in text]

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        return "".join("abcde"[token] for token in token_ids)


def make(shape: dict[str, Any], rng: random.Random, tokenizer: Letters | None = None) -> tuple[Engine, Device, Any]:
    nodes = depth = int(shape["nodes"])
    proposer: Any = RandomTrees(rng)
    if shape.get("lookahead"):
        look = LookaheadShape(1 + nodes % 3, 2 + nodes % 4, 1 + nodes % 5)
        nodes, depth, proposer = look.tokens, look.depth, LookaheadProposer(look, from_text=rng.random() < 0.5)
    guess = SpeculationConfig(nodes, max_running=SEQS, tree_depth=depth)
    config = EngineConfig(
        ModelConfig(VOCAB, 8, 8, 1, 1, max_position_embeddings=LONGEST, sliding_window=shape.get("window")),
        CacheConfig(int(shape["block_size"]), int(shape["num_blocks"]), enable_prefix_caching=bool(shape["caching"])),
        SchedulerConfig(SEQS, int(shape["budget"]), LONGEST),
        RunnerConfig(),
        speculation=guess,
    )
    device = Device(config)
    engine = Engine(config, device, tokenizer, eos_token_ids=frozenset({EOS}), speculation=Speculator(guess, proposer))
    return engine, device, proposer


def running(engine: Engine, rng: random.Random) -> Request | None:
    """One that may be forked; a step with its tree may be in flight."""
    if rng.random() < 0.5:
        engine._fill()
    found = [request for request in engine.scheduler._running if request.num_known_tokens < LONGEST - 1]
    return rng.choice(found) if found else None


SHAPES = st.fixed_dictionaries(
    {
        "nodes": st.integers(1, 12),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "num_blocks": st.sampled_from([0, 0, 4, 30]),
        "budget": st.integers(SEQS, 60),
        "caching": st.booleans(),
        "lookahead": st.sampled_from([False, False, True]),
        "window": st.sampled_from([None, None, 1, 3, 8]),
    }
)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32), num_requests=st.integers(1, 10))
def test_outputs_equal_solo_runs(shape: dict[str, Any], seed: int, num_requests: int) -> None:
    rng = random.Random(seed)
    # As many blocks as one request needs, and some more.
    shape = {**shape, "num_blocks": 1 + -(-LONGEST // int(shape["block_size"])) + int(shape["num_blocks"])}
    engine, device, _ = make(shape, rng)
    prompts: dict[str, list[int]] = {}
    params: dict[str, SamplingParams] = {}
    served: dict[str, list[int]] = {}
    aborted = set()
    while len(prompts) < num_requests or engine.has_unfinished_requests():
        if len(prompts) < num_requests and rng.random() < 0.5:
            name = str(len(prompts))
            before = rng.choice([[], *([*prompts[key], *ids] for key, ids in served.items())])
            prompts[name] = [*before, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))][: LONGEST - 2]
            params[name] = SamplingParams(temperature=0, max_tokens=rng.randint(1, 30))
            engine.add_request(name, prompts[name], params[name])
        event = rng.random()
        if event < 0.05 and prompts:
            aborted |= {output.request_id for output in engine.abort(rng.choice(list(prompts)))}
        elif event < 0.1:
            engine.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        elif event < 0.16 and len(prompts) < num_requests and (source := running(engine, rng)) is not None:
            name = str(len(prompts))
            prompts[name] = source.token_ids(0, source.num_known_tokens)
            params[name] = SamplingParams(temperature=0, max_tokens=rng.randint(1, 9), n=1)
            engine.fork(source.request_id, name, params[name])
        elif event < 0.19:
            for output in engine.suspend():
                if output.finished:
                    served[output.request_id] = list(output.outputs[0].token_ids)
            device.pool.clear()
            engine.resume()
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished:
                served[output.request_id] = list(output.outputs[0].token_ids)
        engine.scheduler.check_integrity()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    assert served.keys() | aborted == prompts.keys()
    for name, ids in served.items():
        right = alone(prompts[name], params[name])
        assert ids == (right[: len(ids)] if name in aborted else right)


def test_what_the_property_is_about_happens() -> None:
    """Paths hold that are not the first tokens of their trees, and their contents are moved, in small blocks."""
    shape: dict[str, Any] = {"nodes": 9, "block_size": 2, "num_blocks": 60, "budget": 50, "caching": True}
    engine, device, proposer = make(shape, random.Random(0))
    for name in range(6):
        engine.add_request(
            str(name), [1 + name % 4, 2, 3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        )
    while engine.has_unfinished_requests():
        engine.step()
    assert proposer.num_accepted > 60 and device.num_moved > 30


def test_stop_strings_inside_a_branch_that_holds() -> None:
    """Three requests at a time; each text ends before the first place where its stop string is."""
    shape: dict[str, Any] = {"nodes": 9, "block_size": 4, "num_blocks": 60, "budget": 50, "caching": True}
    engine, _, proposer = make(shape, random.Random(1), Letters())
    stops = ["b", "cd", "dd", "ebc", "bd", "ccc", "de", "db", "ec"]
    served = {}
    for first, stop in enumerate(stops):
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop])
        for length in (1, 2, 3):
            engine.add_request(f"{stop} {length}", [1 + first % 4] * length, params)
        while engine.has_unfinished_requests():
            served |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    cut = 0
    for first, stop in enumerate(stops):
        for length in (1, 2, 3):
            prompt, ids = [1 + first % 4] * length, []
            while len(ids) < 30:
                ids.append(draw([*prompt, *ids]))
            text, sample = Letters().decode(ids), served[f"{stop} {length}"]
            place = text.find(stop)
            assert sample.text == (text if place < 0 else text[:place])
            assert len(sample.token_ids) == (30 if place < 0 else place + len(stop))
            assert sample.stop_reason == (None if place < 0 else stop)
            cut += place >= 0
    assert cut > 15 and proposer.num_accepted > 100


def test_a_tree_where_chains_are_expected() -> None:
    shape: dict[str, Any] = {"nodes": 4, "block_size": 4, "num_blocks": 30, "budget": 20, "caching": True}
    engine, _, _ = make(shape, random.Random(0))
    engine.add_request("r", [1, 2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.step()
    (request,) = engine.scheduler.draft_room._running
    room = engine.scheduler.draft_room
    room._speculation = SpeculationConfig(4)
    with pytest.raises(ValueError, match="tree_depth is 0"):
        room.put(request, Draft((1, 2), parents=(-1, -1)))
