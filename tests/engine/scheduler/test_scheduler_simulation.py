"""Random workloads: whatever happens around a request, its output is what it would be alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 70),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "run_ahead": st.integers(0, 1),
        "num_seqs": st.integers(1, 6),
        "num_batched": st.integers(6, 40),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "buckets": st.sampled_from([(), (1, 2, 4, 8, 16, 32, 64), (8, 40)]),
        "caching": st.booleans(),
        "window": st.sampled_from([None, None, 1, 3, 8, 13]),
    }
)


def random_prompt(sim, rng: random.Random) -> list[int]:
    """New tokens, often behind the beginning of an earlier request, its output included."""
    before: list[int] = []
    if sim.requests and rng.random() < 0.6:
        earlier = rng.choice(list(sim.requests.values()))
        before = earlier.token_ids(0, rng.randint(1, earlier.num_known_tokens))
    new = [rng.randrange(64) for _ in range(rng.randint(not before, 40 if rng.random() < 0.5 else 3))]
    return (before + new)[: min(60, sim.pool_tokens)]


def random_request(sim, rng: random.Random) -> None:
    max_tokens = rng.randint(1, 30)
    params = {}
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 0
    elif rng.random() < 0.1:
        params["skip_reading_prefix_cache"] = True
    if rng.random() < 0.3:
        params["min_tokens"] = rng.randint(0, max_tokens)
        params["stop_token_ids"] = [rng.randrange(64) for _ in range(4)]
    if rng.random() < 0.1:
        params["bad_words_token_ids"] = ((1, 2),)
    params |= {"n": rng.choice([1, 1, 2, 5]), "salt": rng.choice([None, None, "one", "two"])}
    eos = [rng.randrange(64) for _ in range(rng.choice([0, 3]))]
    sim.add(random_prompt(sim, rng), max_tokens, priority=rng.randint(0, 2), eos=eos, **params)


def random_fork(sim, rng: random.Random) -> None:
    """A twin that draws otherwise, or (as in beam search) one whose last token the host has replaced."""
    source = rng.choice(sim.live)
    output = list(source.output_token_ids)
    if output and rng.random() < 0.5:
        output[-1] = rng.randrange(64)
    if source.is_finished or len(output) + source.num_prompt_tokens >= source.max_total_tokens:
        return
    sim.fork(source, output[: rng.choice([len(output), rng.randint(0, len(output))])], child_index=rng.randint(0, 9))


def random_event(sim, rng: random.Random) -> None:
    what = rng.random()
    if what < 0.1:
        sim.scheduler.abort(rng.choice(list(sim.requests)))
    elif what < 0.12:
        sim.device.poisoned.add(rng.choice(list(sim.requests)))
    elif what < 0.2 and sim.live:
        random_fork(sim, rng)
    elif what < 0.21:
        sim.device.params += 1
        sim.scheduler.forget_prefixes()
    elif what < 0.22:
        sim.scheduler.reset_prefix_cache(preempt=rng.random() < 0.5)
    sim.check()


def random_workload(sim, rng: random.Random, num_requests: int) -> None:
    while len(sim.requests) < num_requests:
        for _ in range(rng.choice([0, 0, 1, 1, 3]) if sim.scheduler.num_waiting < 10 else 0):
            random_request(sim, rng)
        if sim.requests:
            random_event(sim, rng)
        sim.step()
    sim.run()


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32), num_requests=st.integers(1, 16))
def test_outputs_equal_solo_runs(simulation, shape, seed, num_requests):
    sim = simulation(**shape)
    random_workload(sim, random.Random(seed), num_requests)
    sim.check_outputs()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_thousand_random_requests_leave_every_block_free(simulation, run_ahead):
    sim = simulation(num_blocks=24, run_ahead=run_ahead, policy="priority")
    random_workload(sim, random.Random(run_ahead), 1000)
    sim.check_outputs()
    reasons = {request.finish_reason for request in sim.requests.values()}
    assert reasons == {"stop", "length", "abort", "error"}
    assert sim.scheduler.stats.num_preemptions > 50


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("num_steps", range(12))
def test_abort_at_every_moment(simulation, run_ahead, num_steps):
    """Field case 6: waiting, in prefill, decoding, preempted, with a token in flight."""
    for victim in range(3):
        sim = simulation(num_blocks=5, num_seqs=2, num_batched=6, run_ahead=run_ahead)
        names = [sim.add(7, 8).request_id for _ in range(3)]
        for _ in range(num_steps):
            sim.step()
        aborted = sim.scheduler.abort(names[victim])
        if aborted:
            assert aborted.finish_reason == "abort"
            assert sim.scheduler.abort(names[victim]) is None
        sim.check()
        sim.run()
        sim.check_outputs()
