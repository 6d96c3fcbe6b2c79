"""Several engines behind the interface of one, on devices in numpy whose steps end when the test says so."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineAsleepError, EngineDeadError
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import Replicas, num_lost
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.openai.batch_input import BatchLine
from jaxinfer.openai.batch_job import BatchJob
from jaxinfer.openai.batch_output import BatchOutput
from jaxinfer.openai.request import RequestReader

GREEDY = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY)


@dataclass
class Group:
    """Replicas on numpy devices."""

    replicas: Replicas
    harnesses: list[Any]
    waits: int = 0
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def add(self, request_id: str, prompt: Any = (1,), params: Any = GREEDY, **options: Any) -> int:
        """Returns the replica."""
        self.replicas.add_request(request_id, prompt, params, **options)
        place = self.replicas._router.replica_of(request_id)
        assert place is not None
        return place

    def take(self, outputs: list[RequestOutput]) -> None:
        self.outputs |= {output.request_id: output for output in outputs if output.finished}

    def run(self) -> dict[str, RequestOutput]:
        while self.replicas.has_unfinished_requests():
            self.take(self.replicas.step())
        return self.outputs

    def check_idle(self) -> None:
        for harness in self.harnesses:
            harness.check_idle()
        assert set(self.replicas._router.loads) == {0}


@pytest.fixture
def make_group(make_harness: Callable[..., Any]) -> Callable[..., Group]:
    def make(count: int = 2, **options: Any) -> Group:
        harnesses = [make_harness(**options) for _ in range(count)]
        seeds = random.Random(options.get("seed", 0))
        engines = []
        for harness in harnesses:
            old = harness.engine
            ends = old._intake._eos_token_ids
            harness.engine = Engine(old.config, harness.device, harness.tokenizer, eos_token_ids=ends, seeds=seeds)
            engines.append(harness.engine)
        return Group(Replicas(engines), harnesses)

    return make


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(sample.token_ids) for sample in output.outputs]


prompts = st.lists(st.integers(3, 40), min_size=1, max_size=40)
sampling = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 1, 3]),
        "temperature": st.just(1.0),
        "seed": st.sampled_from([None, None, 3]),
        "max_tokens": st.integers(1, 12),
        "logprobs": st.sampled_from([None, 1]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)
arrivals = st.lists(st.tuples(prompts, sampling, st.integers(0, 3)), min_size=1, max_size=10)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals, count=st.integers(2, 3), num_blocks=st.sampled_from([12, 64]), caching=st.booleans())
def test_outputs_are_those_of_one_engine(
    make_harness: Any, make_group: Any, arrivals: list[Any], count: int, num_blocks: int, caching: bool
) -> None:
    """Whatever the replica, with preemptions (12 blocks), prefix hits, seeds given and not, and several samples."""
    options = {"num_blocks": num_blocks, "block_size": 8, "max_num_seqs": 3, "caching": caching, "seed": 7}
    group, one = make_group(count, **options), make_harness(**options)
    for number, (prompt, values, steps) in enumerate(arrivals):
        params = SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)
        group.add(str(number), prompt, params)
        one.add(str(number), prompt, params)
        for _ in range(steps):
            group.take(group.replicas.step())
    expected = {request_id: outputs[-1] for request_id, outputs in one.run().items()}
    found = group.run()
    assert set(found) == set(expected)
    for request_id, output in found.items():
        assert tokens(output) == tokens(expected[request_id])
        assert [sample.logprobs for sample in output.outputs] == [s.logprobs for s in expected[request_id].outputs]
        assert output.prompt_logprobs == expected[request_id].prompt_logprobs
    group.check_idle()


def test_beam_search_is_that_of_one_engine(make_group: Any, make_harness: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    one = make_harness()
    one.add("beams", [4, 5], params)
    (expected,) = one.run()["beams"]
    group = make_group()
    assert [group.add("other", [9]), group.add("beams", [4, 5], params)] == [0, 1]
    assert tokens(group.run()["beams"]) == tokens(expected)
    group.check_idle()


def test_requests_spread_evenly(make_group: Any) -> None:
    group = make_group(3)
    placed = Counter(group.add(str(number), [3 + number] * 5) for number in range(12))
    assert placed == {0: 4, 1: 4, 2: 4}
    assert len(group.run()) == 12
    group.check_idle()


def test_a_request_goes_where_its_prefix_is(make_group: Any) -> None:
    group = make_group(block_size=4)
    long = list(range(3, 43))
    assert group.add("first", [50] * 40) == 0
    assert group.add("second", long) == 1
    group.run()
    assert group.add("again", [*long, 7]) == 1
    assert group.run()["again"].num_cached_tokens == 40
    assert group.add("salted", [*long, 7], cache_salt="other") == 0  # nobody has it: the first of equals
    assert group.add("scored", [*long, 7], SamplingParams(max_tokens=1, prompt_logprobs=0)) == 1  # less to do there
    group.run()
    assert group.replicas.reset_prefix_cache()
    assert group.add("forgotten", [*long, 7]) == 0
    assert group.run()["forgotten"].num_cached_tokens == 0


def test_a_slow_replica_keeps_no_other_waiting(make_group: Any) -> None:
    group = make_group()
    slow = group.harnesses[0].device
    slow.is_busy = lambda: "fast" not in group.outputs
    assert [group.add("slow"), group.add("fast")] == [0, 1]
    while "fast" not in group.outputs:
        group.take(group.replicas.step())
    assert "slow" not in group.outputs
    assert slow.events == [("execute", 0), ("execute", 1)]  # it has its next step, and nobody waited for it
    assert set(group.run()) == {"slow", "fast"}
    group.check_idle()


def test_the_host_sleeps_while_all_devices_work(make_group: Any) -> None:
    group = make_group()
    waits: list[float] = []
    group.replicas._sleep = waits.append
    for harness in group.harnesses:
        harness.device.is_busy = lambda: len(waits) < 5
    group.add("a")
    group.add("b")
    group.replicas.step()
    assert len(waits) == 5
    # Every device was given its steps before anybody waited.
    assert [harness.device.events[:2] for harness in group.harnesses] == [[("execute", 0), ("execute", 1)]] * 2


def test_an_aborted_request_frees_what_it_holds(make_group: Any) -> None:
    group = make_group()
    for number in range(6):
        group.add(str(number), [3 + number] * 20, SamplingParams(max_tokens=50))
    group.replicas.step()
    ended = group.replicas.abort(["1", "4", "unknown"])
    assert {output.request_id: output.outputs[0].finish_reason for output in ended} == {"1": "abort", "4": "abort"}
    group.add("1", [9])  # its id is free
    ended = group.replicas.abort_all()
    assert sorted(output.request_id for output in ended) == ["0", "1", "2", "3", "5"]
    assert group.replicas.step() == []
    group.check_idle()


def test_refusals_change_nothing(make_group: Any) -> None:
    group = make_group(num_blocks=8)
    group.add("a")
    for prompt, params, error, message in (
        ([1], GREEDY, ValueError, "'a' is in use"),
        ([], GREEDY, ValueError, "empty"),
        ([10**9], GREEDY, ValueError, "vocabulary"),
        ([10**12], GREEDY, ValueError, "vocabulary"),
        ([1] * 300, GREEDY, ValueError, "KV blocks"),
        (["x"], GREEDY, TypeError, "ints"),
        (None, GREEDY, TypeError, "NoneType"),
        ([1], {"n": 1}, TypeError, "SamplingParams"),
    ):
        with pytest.raises(error, match=message):
            group.replicas.add_request("a" if "in use" in message else "b", prompt, params)
    with pytest.raises(ValueError, match="no unfinished sample 0"):
        group.replicas.fork("unknown", "c", GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        group.replicas.fork("a", "a", GREEDY)
    assert set(group.run()) == {"a"}
    group.check_idle()


def test_a_fork_lies_beside_its_source(make_group: Any) -> None:
    group = make_group()
    group.add("other")
    params = SamplingParams(temperature=0, max_tokens=9)
    assert group.add("source", [5, 6, 7], params) == 1
    group.replicas.step()
    group.replicas.fork("source", "fork", SamplingParams(temperature=0, max_tokens=3))
    assert group.replicas._router.replica_of("fork") == 1
    found = group.run()
    known = [*found["source"].prompt_token_ids, *tokens(found["source"])[0]]
    start = len(found["fork"].prompt_token_ids)
    assert [*found["fork"].prompt_token_ids, *tokens(found["fork"])[0]] == known[: start + 3]
    group.check_idle()


@pytest.mark.parametrize("where", ["fail_in_execute_of", "fail_in_result_of"])
def test_one_replica_dies_and_the_others_go_on(make_group: Any, where: str, caplog: pytest.LogCaptureFixture) -> None:
    group = make_group()
    setattr(group.harnesses[1].device, where, 2)
    placed = {str(number): group.add(str(number), [3 + number] * 5) for number in range(6)}
    found = group.run()
    assert {request_id for request_id, output in found.items() if output.error is not None} == {
        request_id for request_id, place in placed.items() if place == 1
    }
    assert all("dead" in output.error for output in found.values() if output.error is not None)
    assert [output.outputs[0].finish_reason for output in found.values() if output.error is None] == ["length"] * 3
    assert caplog.text.count("replica 1 of 2 is dead") == 1
    # It gets no more requests; nothing else changes.
    assert {group.add(f"new {number}", [3 + number]) for number in range(4)} == {0}
    assert all(output.error is None for name, output in group.run().items() if name.startswith("new"))
    assert not group.replicas.is_dead and group.replicas.suspend() == []
    group.replicas.resume()
    group.harnesses[0].device.fail_in_execute_of = len(group.harnesses[0].device.plans)
    group.add("last")
    assert group.run()["last"].error is not None
    assert group.replicas.is_dead and not group.replicas.can_step
    for call in (group.replicas.step, group.replicas.check_alive, lambda: group.add("x")):
        with pytest.raises(EngineDeadError):
            call()


def test_a_batch_goes_on_without_a_replica(make_group: Any, tmp_path: Path) -> None:
    """What the dead one had is served by the other, lines with prompts on both included."""
    group, lines = make_group(max_num_seqs=2), []
    for number in range(1, 20):
        body = {"prompt": [[3 + number], [5, number]] if number % 3 else [3 + number], "max_tokens": 6}
        lines.append(BatchLine(number, str(number), "/v1/completions", {**body, "temperature": 0}))
    group.harnesses[1].device.fail_in_result_of = 9
    with BatchOutput(tmp_path / "out.jsonl") as output:
        BatchJob(group.replicas, RequestReader(None, {}, "model"), output, "model").run(lines)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert num_lost(group.replicas) == 1
    assert sorted(int(result["custom_id"]) for result in results) == list(range(1, 20))
    assert {result["response"]["status_code"] for result in results} == {200}
    group.harnesses[0].check_idle()


def test_all_replicas_sleep_and_wake(make_group: Any) -> None:
    group = make_group()
    expected = make_group()
    for each in (group, expected):
        for number in range(4):
            each.add(str(number), [3 + number] * 20)
        each.replicas.step()
    group.take(group.replicas.suspend())
    assert group.replicas.is_suspended and not group.replicas.can_step
    for call in (group.replicas.step, lambda: group.add("x")):
        with pytest.raises(EngineAsleepError):
            call()
    group.replicas.resume()
    assert {name: tokens(output) for name, output in group.run().items()} == {
        name: tokens(output) for name, output in expected.run().items()
    }
    group.check_idle()


def test_other_parameters_end_what_is_shared(make_group: Any) -> None:
    group = make_group(block_size=4)
    long = list(range(3, 43))
    assert [group.add("a", [50] * 40), group.add("b", long)] == [0, 1]
    group.replicas.step()
    group.replicas.params_changed()
    assert group.replicas.weight_version == 1 and [e.weight_version for e in group.replicas.engines] == [1, 1]
    group.run()
    assert group.add("c", [*long, 7]) == 0
    group.run()
    group.check_idle()


def test_statistics_are_sums(make_group: Any) -> None:
    group = make_group()
    for number in range(5):
        group.add(str(number), [3 + number] * 5)
    group.replicas.step()
    stats = group.replicas.stats()
    assert stats.num_unfinished == stats.num_running == 5 and group.replicas.num_unfinished_requests == 5
    group.run()
    stats = group.replicas.stats()
    assert stats.num_generated_tokens == 30 and stats.num_unfinished == 0
    assert [part.num_generated_tokens for part in stats.replicas] == [18, 12]
    assert stats.num_computed_tokens == sum(part.num_computed_tokens for part in stats.replicas)
    assert stats.num_blocks == 2 * 63 == stats.num_free_blocks
    assert stats.kv_waste_worst == max(part.kv_waste_worst for part in stats.replicas)
    assert stats.kv_waste_mean <= stats.kv_waste_worst and 0 <= stats.device_share <= 1
    assert group.replicas.max_num_seqs == 16
