"""The scheduler on the field cases 4, 20, 21 and on each rule of its docstring."""

import statistics
import time

import pytest

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.engine.plan import RowResult, StepResult
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.scheduler import Scheduler

PARAMS = SamplingParams(max_tokens=None)


def new_request(name: str, num_prompt: int, max_total: int) -> Request:
    # Of other tokens than the requests beside it, whose blocks it would share otherwise.
    return Request(name, [ord(name[0]) % 64] * num_prompt, PARAMS, 0.0, max_total)


def tokens_of(plan, request) -> int:
    return sum(row.num_tokens for row in plan.rows if row.request is request)


def first_draw(sim, request) -> int:
    """Index of the step that draws the request's first token."""
    return next(i for i, plan in enumerate(sim.plans) if any(r.request is request and r.samples for r in plan.rows))


class TestPoolLimits:
    """Field case 4: a pool of 8 blocks of 16 tokens."""

    def test_a_prompt_that_can_never_fit_is_refused_with_numbers(self, simulation):
        sim = simulation(num_blocks=8, block_size=16)
        with pytest.raises(ValueError, match=r"200 tokens needs 13 KV blocks of 16 .* has 8 .*num_gpu_blocks_override"):
            sim.scheduler.capacity.check_fits(200)
        with pytest.raises(ValueError, match="needs 13 KV blocks"):
            sim.scheduler.add(new_request("long", 200, 300))
        sim.scheduler.capacity.check_fits(128)
        for _ in range(3):
            sim.add(5, 4)
        sim.run()
        sim.check_outputs()

    @pytest.mark.parametrize("run_ahead", [0, 1])
    @pytest.mark.parametrize("num_requests", [1, 5])
    def test_requests_that_outgrow_the_pool_end_with_length(self, simulation, num_requests, run_ahead):
        sim = simulation(num_blocks=8, block_size=16, run_ahead=run_ahead)
        requests = [sim.add(100, 200) for _ in range(num_requests)]
        sim.run(limit=250)
        sim.check_outputs()
        for request in requests:
            assert request.finish_reason == "length"
            # The last token is drawn from a full pool and is never stored itself.
            assert len(request.output_token_ids) == 128 + 1 - 100

    def test_a_prompt_that_fills_the_pool_gets_one_token(self, simulation):
        sim = simulation(num_blocks=8, block_size=16)
        request = sim.add(128, 50)
        sim.run(limit=20)
        assert len(request.output_token_ids) == 1

    def test_the_best_request_is_never_preempted(self, simulation):
        sim = simulation(num_blocks=8, block_size=4, num_seqs=4)
        first, *others = [sim.add(4, 20) for _ in range(4)]
        sim.run()
        sim.check_outputs()
        assert first.admission == 1
        assert max(request.admission for request in others) > 1

    @pytest.fixture
    def crowded(self, simulation):
        """Three decodes that take a block each step, so that chunks find fewer blocks than were free at admission."""

        def build(num_blocks, prompts):
            sim = simulation(num_blocks=num_blocks, block_size=1, num_batched=8, run_ahead=0)
            for _ in range(3):
                sim.add(2, 30)
            sim.step()
            return sim, [sim.add(num_prompt, 2) for num_prompt in prompts]

        return build

    def test_a_chunk_shrinks_to_the_free_blocks(self, crowded):
        sim, [request] = crowded(44, [28])
        shares = [tokens_of(sim.step(), request) for _ in range(5)]
        assert shares == [5, 5, 5, 5, 3]
        assert sim.scheduler.stats.num_preemptions == 0
        sim.run()
        sim.check_outputs()

    def test_a_prefill_takes_the_blocks_of_a_worse_prefill(self, crowded):
        sim, [better, worse] = crowded(73, [28, 30])
        for _ in range(8):
            assert (tokens_of(sim.step(), better), tokens_of(sim.plans[-1], worse)) == (2, 3)
        assert sim.scheduler.stats.num_free_blocks == 3
        plan = sim.step()
        assert [row.request for row in plan.rows[3:]] == [better]
        assert (worse.status, worse.num_computed_tokens) == (RequestStatus.WAITING, 0)
        sim.run()
        sim.check_outputs()

    def test_no_admission_while_the_last_token_is_in_flight(self, simulation):
        scheduler = simulation().scheduler
        request = new_request("r", 3, 9)
        scheduler.add(request)
        request.num_inflight = 1
        assert scheduler.schedule() is None
        request.num_inflight = 0
        assert scheduler.schedule().num_tokens == 3


class TestLengths:
    """Field case 20: exactly as many tokens as the limits allow."""

    @pytest.mark.parametrize("run_ahead", [0, 1])
    @pytest.mark.parametrize(("num_prompt", "max_tokens"), [(1, 1), (1, 63), (62, 2), (63, 1), (30, 2)])
    def test_no_token_too_many_or_too_few(self, simulation, num_prompt, max_tokens, run_ahead):
        sim = simulation(run_ahead=run_ahead)
        request = sim.add(num_prompt, max_tokens)
        sim.run()
        assert (request.finish_reason, len(request.output_token_ids)) == ("length", max_tokens)
        # The last token is known to be the last, so no step is spent on computing it.
        assert sim.scheduler.stats.num_tokens == num_prompt + max_tokens - 1

    @pytest.mark.parametrize("num_prompt", [0, 64, 65])
    def test_prompts_without_room_are_refused(self, simulation, num_prompt):
        with pytest.raises(ValueError, match=rf"prompt of {num_prompt} tokens .*max_total_tokens=64"):
            simulation().scheduler.add(new_request("r", num_prompt, 64))

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self, simulation):
        scheduler = simulation().scheduler
        scheduler.add(new_request("r", 3, 9))
        with pytest.raises(ValueError, match="'r' belongs to an unfinished request"):
            scheduler.add(new_request("r", 3, 9))
        scheduler.abort("r")
        scheduler.add(new_request("r", 3, 9))


class TestFairness:
    """Field case 21."""

    @pytest.mark.parametrize("num_long", [1, 2, 3])
    @pytest.mark.parametrize("num_batched", [16, 32, 256])
    def test_a_long_prefill_starves_nobody(self, simulation, num_long, num_batched):
        sim = simulation(num_blocks=300, block_size=16, num_batched=num_batched)
        running = sim.add(4, 300)
        sim.step()
        longs = [sim.add(1000, 3) for _ in range(num_long)]
        sim.step()
        short = sim.add(5, 3)
        sim.run()
        sim.check_outputs()
        until = first_draw(sim, longs[0])
        assert first_draw(sim, short) < until, "the short prompt waited for the long one"
        assert first_draw(sim, short) <= 3 + short.num_prompt_tokens
        assert all(tokens_of(plan, running) == 1 for plan in sim.plans[1:until]), "the decode missed a step"
        shares = [tokens_of(plan, longs[0]) for plan in sim.plans[1:until]]
        assert min(shares) >= (num_batched - 2) // 2, "the long prompt got less than its half"

    def test_a_prompt_two_steps_from_its_end_is_not_held_up(self, simulation):
        sim = simulation(num_batched=32)
        first, second = sim.add(50, 1), sim.add(50, 1)
        assert [tokens_of(sim.step(), first) for _ in range(2)] == [32, 18]
        assert tokens_of(sim.plans[1], second) == 14

    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_two_hundred_arrivals_do_not_slow_a_decode(self, simulation, run_ahead):
        sim = simulation(num_blocks=1000, run_ahead=run_ahead)
        running = sim.add(3, 300)
        sim.step()
        shorts = []
        for _ in range(200):
            shorts.append(sim.add(5, 3))
            assert tokens_of(sim.step(), running) == 1
        sim.run()
        sim.check_outputs()
        arrival = {request.request_id: int(request.arrival_time) for request in shorts}
        assert all(sim.first_token_step[name] - when <= 3 for name, when in arrival.items())

    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_a_waiting_request_enters_in_the_step_after_a_slot_is_free(self, simulation, run_ahead):
        sim = simulation(num_seqs=4, run_ahead=run_ahead)
        sim.add(3, 2)
        for _ in range(3):
            sim.add(3, 9)
        fifth = sim.add(3, 2)
        while sim.scheduler.num_running == 4 or sim.num_steps == 0:
            assert fifth.status is RequestStatus.WAITING
            sim.step()
        assert tokens_of(sim.step(), fifth) == 3
        sim.run()
        sim.check_outputs()

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_equal_priorities_under_preemption_all_finish(self, simulation, policy):
        sim = simulation(num_blocks=8, block_size=4, num_seqs=4, policy=policy)
        for step in range(300):
            if step % 10 == 0:
                sim.add(6, 24, priority=1)
            sim.step()
        sim.run(limit=2000)
        sim.check_outputs()
        first_steps = [sim.first_token_step[name] for name in sim.requests]
        assert first_steps == sorted(first_steps), "somebody lost its place"
        assert sim.scheduler.stats.num_preemptions > 10

    def test_priority_goes_before_arrival(self, simulation):
        sim = simulation(num_seqs=1, policy="priority")
        late = sim.add(3, 2, priority=5)
        early = sim.add(3, 2, priority=-1)
        sim.run()
        assert sim.first_token_step[early.request_id] < sim.first_token_step[late.request_id]

    def test_fcfs_ignores_priority(self, simulation):
        sim = simulation(num_seqs=1)
        first = sim.add(3, 2, priority=5)
        second = sim.add(3, 2, priority=-1)
        sim.run()
        assert sim.first_token_step[first.request_id] < sim.first_token_step[second.request_id]


class TestRunAhead:
    def test_a_decode_is_scheduled_on_its_token_in_flight(self, simulation):
        sim = simulation()
        sim.add(3, 5)
        rows = [sim.step().rows[0] for _ in range(3)]
        assert [row.token_on_device for row in rows] == [False, True, True]
        assert [(row.start, row.num_tokens) for row in rows] == [(0, 3), (3, 1), (4, 1)]

    def test_at_most_one_step_is_uncommitted_when_another_is_scheduled(self, simulation):
        scheduler = simulation().scheduler
        scheduler.add(new_request("r", 3, 9))
        first, second = scheduler.schedule(), scheduler.schedule()
        with pytest.raises(RuntimeError, match="two steps are uncommitted"):
            scheduler.schedule()
        result = StepResult((RowResult(5),), 0.0)
        with pytest.raises(ValueError, match="in the order they were scheduled"):
            scheduler.commit(second, result)
        with pytest.raises(ValueError, match="0 results for the 1 rows"):
            scheduler.commit(first, StepResult((), 0.0))
        scheduler.commit(first, result)
        with pytest.raises(ValueError, match="committed once each"):
            scheduler.commit(first, result)

    def test_a_preempted_request_keeps_its_token_in_flight(self, simulation):
        scheduler = simulation(num_blocks=8, block_size=4, num_seqs=2).scheduler
        best, victim = new_request("best", 7, 30), new_request("victim", 7, 30)
        scheduler.add(best)
        scheduler.add(victim)
        in_flight, plan = None, scheduler.schedule()
        while victim.admission == 0 or victim.status is RequestStatus.RUNNING:
            if in_flight:
                scheduler.commit(in_flight, StepResult((RowResult(5), RowResult(6)), 0.0))
            in_flight, plan = plan, scheduler.schedule()
        assert [row.request for row in in_flight.rows] == [best, victim]
        assert [row.request for row in plan.rows] == [best]
        assert (victim.num_computed_tokens, victim.slot, victim.block_ids) == (0, -1, [])
        known = list(victim.output_token_ids)
        scheduler.commit(in_flight, StepResult((RowResult(5), RowResult(9)), 0.0))
        assert (victim.output_token_ids, victim.num_inflight) == ([*known, 9], 0)
        scheduler.finish(victim, "stop")
        assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)

    def test_rows_of_finished_requests_are_dropped(self, simulation):
        scheduler = simulation().scheduler
        stays, goes = new_request("stays", 3, 9), new_request("goes", 3, 9)
        scheduler.add(stays)
        scheduler.add(goes)
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.commit(first, StepResult((RowResult(5), RowResult(6)), 0.0))
        scheduler.finish(goes, "stop", stop_reason=6)
        scheduler.finish(goes, "abort")
        assert (goes.finish_reason, goes.stop_reason) == ("stop", 6)
        accepted = scheduler.commit(second, StepResult((RowResult(7), RowResult(8)), 0.0))
        assert [request for request, _ in accepted] == [stays]
        assert (stays.output_token_ids, goes.output_token_ids) == ([5, 7], [6])

    def test_rows_that_are_not_finite_bring_no_token(self, simulation):
        scheduler = simulation().scheduler
        request = new_request("r", 3, 9)
        scheduler.add(request)
        plan = scheduler.schedule()
        [(accepted, result)] = scheduler.commit(plan, StepResult((RowResult(0, finite=False),), 0.0))
        assert accepted is request and not result.finite and request.output_token_ids == []
        scheduler.finish(request, "error", error="not finite")
        assert request.error == "not finite" and not scheduler.has_unfinished

    def test_must_sync_while_a_bad_word_of_several_tokens_runs(self, simulation):
        sim = simulation()
        sim.add(3, 3, bad_words_token_ids=((1,), (2,)))
        request = sim.add(3, 2, bad_words_token_ids=((1, 2),))
        assert not sim.scheduler.must_sync
        sim.step()
        assert sim.scheduler.must_sync
        sim.scheduler.abort(request.request_id)
        assert not sim.scheduler.must_sync


class TestBuckets:
    def test_a_little_over_an_edge_is_trimmed_to_it(self, simulation):
        sim = simulation(num_blocks=200, num_batched=128, buckets=(16, 32, 64, 128))
        sim.add(70, 2)
        assert [sim.step().num_tokens for _ in range(2)] == [64, 6]

    def test_a_step_near_the_next_edge_is_padded(self, simulation):
        sim = simulation(num_blocks=200, num_batched=128, buckets=(16, 32, 64, 128))
        sim.add(100, 2)
        assert sim.step().num_tokens == 100

    def test_trimming_lets_nobody_overtake(self, simulation):
        sim = simulation(num_blocks=200, num_batched=128, buckets=(16, 32, 64, 128))
        first, second, third = sim.add(62, 2), sim.add(10, 2), sim.add(2, 2)
        plan = sim.step()
        assert [row.request for row in plan.rows] == [first]
        plan = sim.step()
        assert [row.request for row in plan.rows] == [first, second, third]

    def test_decodes_are_never_trimmed(self, simulation):
        sim = simulation(num_seqs=5, buckets=(4, 32))
        for _ in range(5):
            sim.add(1, 9)
        sim.step()
        assert sim.step().num_tokens == 5


class TestPromptLogprobs:
    def test_a_prompt_is_chunked_to_the_logits_rows(self, simulation):
        sim = simulation(num_seqs=4)
        sim.add(10, 2, prompt_logprobs=0)
        assert [sim.step().num_tokens for _ in range(4)] == [4, 4, 2, 1]

    def test_several_share_the_spare_rows(self, simulation):
        sim = simulation(num_seqs=6)
        requests = [sim.add(20, 2, prompt_logprobs=0) for _ in range(3)]
        plan = sim.step()
        # Half of the 5 spare rows beside its own, half of what then is spare, and the rest.
        assert [tokens_of(plan, request) for request in requests] == [3, 2, 1]
        sim.run()
        sim.check_outputs()

    @pytest.mark.parametrize("num_seqs", [2, 4])
    def test_it_does_not_keep_others_out(self, simulation, num_seqs):
        sim = simulation(num_seqs=num_seqs)
        sim.add(60, 2, prompt_logprobs=0)
        other = sim.add(5, 2)
        sim.run()
        sim.check_outputs()
        assert sim.first_token_step[other.request_id] <= 2


class TestCounters:
    def test_kv_waste_is_what_blocks_hold_beyond_tokens(self, simulation):
        sim = simulation(block_size=4, run_ahead=0)
        for _ in range(2):
            sim.add(3, 3)
            sim.run()
        # 3 of 4 slots, then 4 of 4, then 5 of 8, and the same again.
        assert sim.scheduler.stats.kv_waste_mean == pytest.approx((1 / 4 + 0 + 3 / 8) / 3)
        assert sim.scheduler.stats.kv_waste_worst == pytest.approx(3 / 8)
        assert (sim.scheduler.stats.num_steps, sim.scheduler.stats.num_tokens) == (6, 10)

    def test_kv_waste_is_weighted_by_time(self):
        scheduler = Scheduler(SchedulerConfig(4, 8, 100), CacheConfig(4, 10))
        scheduler.add(new_request("r", 3, 9))
        for seconds in (3.0, 1.0):
            scheduler.commit(scheduler.schedule(), StepResult((RowResult(1),), seconds))
        assert scheduler.stats.kv_waste_mean == pytest.approx((3.0 * 1 / 4 + 1.0 * 0) / 4)

    def test_the_lowest_slot_is_given_first(self, simulation):
        sim = simulation(num_seqs=4)
        requests = [sim.add(3, 9) for _ in range(3)]
        sim.step()
        assert [request.slot for request in requests] == [0, 1, 2]
        sim.scheduler.abort(requests[1].request_id)
        later = sim.add(3, 9)
        sim.step()
        assert later.slot == 1


def test_counts_stay_right_when_the_head_of_the_queue_is_aborted(simulation):
    sim = simulation(num_seqs=1)
    requests = [sim.add(3, 2) for _ in range(6)]
    sim.step()
    for expected, request in zip((4, 3), requests[1:3], strict=True):
        sim.scheduler.abort(request.request_id)
        assert sim.scheduler.num_waiting == expected
    sim.run()
    sim.check_outputs()


def step_seconds(num_running: int, num_waiting: int) -> float:
    """Median CPU time of schedule + commit with everybody decoding and one step in flight."""
    scheduler = Scheduler(SchedulerConfig(num_running, 4096, 4096), CacheConfig(16, 20_000))
    for index in range(num_running + num_waiting):
        scheduler.add(new_request(str(index), 4, 1000))
    times = []
    plan = scheduler.schedule()
    for _ in range(40):
        results = StepResult(tuple(RowResult(3) for _ in plan.rows), 0.0)
        start = time.process_time()
        following = scheduler.schedule()
        scheduler.commit(plan, results)
        times.append(time.process_time() - start)
        plan = following
    assert len(plan.rows) == num_running
    return statistics.median(times)


class TestPause:
    def test_a_paused_request_is_not_in_the_queue(self, simulation):
        """Paused while it waits, with its token in flight, it is passed over until it is resumed, once."""
        sim = simulation(run_ahead=0)
        paused, other = sim.add(6, 9), sim.add(5, 9)
        sim.step()
        sim.scheduler.preempt_all()
        for _ in range(2):
            sim.scheduler.pause(paused)
            assert sim.scheduler.num_waiting == 1
            sim.check()
        while not other.is_finished:
            sim.step()
        assert (paused.num_output_tokens, paused.slot) == (1, -1)
        for _ in range(2):
            sim.scheduler.resume(paused)
            assert sim.scheduler.num_waiting == 1
            sim.check()
        sim.run()
        sim.check_outputs()

    @pytest.mark.parametrize("preempts", [False, True])
    @pytest.mark.parametrize("ends", [False, True])
    def test_a_request_paused_while_it_runs(self, simulation, preempts, ends):
        sim = simulation()
        paused, other = sim.add(6, 9), sim.add(5, 9)
        sim.step()
        sim.step()
        sim.scheduler.pause(paused)
        if preempts:
            sim.scheduler.preempt_all()
            assert sim.scheduler.num_waiting == 1
        while not other.is_finished:
            sim.step()
        assert len(paused.output_token_ids) == 2
        if ends:
            sim.scheduler.abort(paused.request_id)
        else:
            sim.scheduler.resume(paused)
        sim.check()
        sim.run()
        sim.check_outputs()

    def test_samples_behind_a_sibling_are_not_paused(self, simulation):
        sim = simulation()
        follower = sim.add(6, 9, n=2).siblings[1]
        with pytest.raises(ValueError, match="waits for a sibling's prompt"):
            sim.scheduler.pause(follower)
        sim.check()
        sim.run()
        sim.check_outputs()

    def test_integrity_sees_a_request_in_two_places(self, simulation):
        sim = simulation()
        request = sim.add(6, 9)
        sim.scheduler._admission.queue(request)
        with pytest.raises(RuntimeError, match="'r0' .* not in the one place"):
            sim.scheduler.check_integrity()
        sim = simulation()
        sim.add(6, 9).is_paused = True
        with pytest.raises(RuntimeError, match="is_paused=True is not in the one place"):
            sim.scheduler.check_integrity()


def test_cost_is_linear_in_running_and_independent_of_waiting_requests():
    few = min(step_seconds(64, 0) for _ in range(3))
    many = min(step_seconds(256, 0) for _ in range(3))
    crowd = min(step_seconds(256, 5_000) for _ in range(3))
    assert many < 8 * few
    assert crowd < 2 * many
    assert many < 2e-3


def test_leaving_the_queue_is_cheap_however_many_wait():
    scheduler = Scheduler(SchedulerConfig(1, 8, 100), CacheConfig(16, 20))
    for index in range(10_000):
        scheduler.add(new_request(str(index), 4, 50))
    scheduler.schedule()
    start = time.process_time()
    for index in range(9_999, 0, -1):
        scheduler.abort(str(index))
    assert time.process_time() - start < 2.0
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
