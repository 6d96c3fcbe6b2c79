"""What requests share, rule by rule: blocks of forks and samples, places in the queue, and what preemption does."""

import pytest

from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.sampling_params import SamplingParams


def first_draw(sim, request) -> int:
    """Index of the step that draws the request's first token."""
    return next(i for i, plan in enumerate(sim.plans) if any(r.request is request and r.samples for r in plan.rows))


def used(sim) -> int:
    return sim.scheduler.block_manager.num_used_blocks


class TestFork:
    @pytest.fixture
    def running(self, simulation):
        """A request of 10 tokens in blocks of 4 that has drawn two, the second of which is in no block yet."""
        sim = simulation(block_size=4, run_ahead=0)
        request = sim.add(10, 20)
        for _ in range(2):
            sim.step()
        assert (request.num_computed_tokens, request.num_known_tokens, used(sim)) == (11, 12, 3)
        return sim, request

    def test_a_fork_has_all_blocks_and_takes_one_when_it_writes(self, running):
        sim, source = running
        twin = sim.fork(source, child_index=1)
        assert twin.block_ids == source.block_ids and (twin.num_computed_tokens, used(sim)) == (11, 3)
        plan = sim.step()
        assert [(row.start, row.num_tokens) for row in plan.rows] == [(11, 1), (11, 1)]
        assert len(plan.copies) == 1 and used(sim) == 4, "the last of the owners writes in place"
        assert twin.block_ids[:2] == source.block_ids[:2] and twin.block_ids[2] != source.block_ids[2]
        sim.run()
        sim.check_outputs()

    def test_a_beam_gets_its_last_token_from_the_host(self, running):
        sim, source = running
        beams = [sim.fork(source, [*source.output_token_ids[:-1], token]) for token in (1, 2, 3)]
        assert all(beam.num_computed_tokens == 11 for beam in beams)
        sim.scheduler.finish(source, "abort")
        plan = sim.step()
        assert len(plan.rows) == 3 and len(plan.copies) == 2
        sim.run()
        sim.check_outputs()

    def test_only_what_is_the_same_is_shared(self, running):
        sim, source = running
        other = [(source.output_token_ids[0] + 1) % 64, 5]
        twin = sim.fork(source, other)
        assert (twin.num_computed_tokens, len(twin.block_ids)) == (10, 3)
        assert [row.num_tokens for row in sim.step().rows] == [1, 2]
        sim.run()
        sim.check_outputs()

    def test_a_fork_of_a_token_in_flight_begins_at_the_last_one_that_is_known(self, simulation):
        sim = simulation(block_size=4)
        source = sim.add(10, 20)
        for _ in range(3):
            sim.step()
        assert (source.num_inflight, source.num_known_tokens, source.num_computed_tokens) == (1, 12, 12)
        twin = sim.fork(source, child_index=1)
        assert (twin.num_computed_tokens, twin.num_inflight) == (11, 0)
        sim.run()
        sim.check_outputs()

    def test_a_block_that_the_last_owner_writes_again_is_not_found(self, running):
        """Its source has filled it with other tokens than the fork will."""
        sim, source = running
        while source.num_known_tokens < 13:
            sim.step()
        twin = sim.fork(source, [], child_index=1)
        assert (twin.num_computed_tokens, len(sim.scheduler.block_manager.cache)) == (9, 3)
        sim.scheduler.finish(source, "abort")
        sim.step()
        assert len(sim.scheduler.block_manager.cache) == 2
        sim.run()
        sim.check_outputs()

    def test_without_a_slot_a_fork_waits(self, simulation):
        sim = simulation(block_size=4, num_seqs=1)
        source = sim.add(10, 6)
        sim.step()
        twin = sim.fork(source, child_index=1)
        assert (twin.status, twin.block_ids, sim.scheduler.num_waiting) == (RequestStatus.WAITING, [], 1)
        sim.run()
        sim.check_outputs()
        assert twin.num_cached_tokens == 8

    def test_what_has_finished_cannot_be_forked(self, running):
        sim, source = running
        sim.run()
        with pytest.raises(ValueError, match="'r0' has finished"):
            sim.scheduler.fork(source, source.twin("twin"))

    def test_the_next_step_waits_for_requests_whose_tokens_the_host_chooses(self, simulation):
        sim = simulation()
        source = sim.add(3, 9)
        sim.step()
        assert not sim.scheduler.must_sync
        twin = source.twin("twin")
        twin.is_synchronous = True
        sim.expect(twin)
        sim.scheduler.fork(source, twin)
        assert sim.scheduler.must_sync
        sim.run()
        assert not sim.scheduler.must_sync
        sim.check_outputs()


class TestCache:
    def test_a_prompts_block_is_found_from_the_step_on_that_fills_it(self, simulation):
        scheduler = simulation(block_size=4, num_batched=8).scheduler
        request = Request("r", list(range(12)), SamplingParams(), 0.0, 20)
        scheduler.add(request)
        found = [scheduler.schedule() and len(scheduler.block_manager.cache) for _ in range(2)]
        assert found == [2, 3]

    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_a_generated_block_is_found_when_its_ids_are_known(self, simulation, run_ahead):
        """Without running ahead in the step that computes its last token; with it when that token is committed."""
        sim = simulation(block_size=4, run_ahead=run_ahead)
        sim.add(3, 20)
        seen = []
        for _ in range(6):
            sim.step()
            seen.append(len(sim.scheduler.block_manager.cache))
        assert seen == [0, 1, 1, 1, 1, 2]


class TestPreemption:
    def test_who_is_preempted_takes_nothing_from_those_that_share(self, simulation):
        sim = simulation(num_blocks=8, block_size=4, run_ahead=0, num_seqs=4)
        source = sim.add(8, 20)
        sim.step()
        twin = sim.fork(source, child_index=1)
        sim.step()
        shared = source.block_ids[:2]
        while twin.status is RequestStatus.RUNNING:
            sim.step()
        assert (twin.block_ids, source.block_ids[:2]) == ([], shared)
        sim.run()
        sim.check_outputs()
        assert source.admission == 1

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_samples_that_outgrow_the_pool_end_with_length(self, simulation, run_ahead, caching):
        """Field case 4 with several samples: 8 blocks of 16 tokens."""
        sim = simulation(num_blocks=8, block_size=16, run_ahead=run_ahead, caching=caching)
        first = sim.add(100, 200, n=4)
        sim.run(limit=400)
        sim.check_outputs()
        assert [request.finish_reason for request in first.siblings] == ["length"] * 4
        assert all(len(request.output_token_ids) == 128 + 1 - 100 for request in first.siblings)


class TestPlaces:
    @pytest.mark.parametrize("num_batched", [16, 32])
    def test_a_long_prompt_of_many_samples_starves_nobody(self, simulation, num_batched):
        """Field case 21."""
        sim = simulation(num_blocks=300, block_size=16, num_batched=num_batched)
        running = sim.add(4, 300)
        sim.step()
        long = sim.add(1000, 3, n=3)
        sim.step()
        short = sim.add(5, 3)
        sim.run()
        sim.check_outputs()
        until = first_draw(sim, long)
        assert first_draw(sim, short) < until
        assert all(any(row.request is running for row in plan.rows) for plan in sim.plans[1:until])
        assert all(first_draw(sim, sample) == until + 1 for sample in long.siblings[1:])

    def test_samples_come_before_what_arrived_later(self, simulation):
        sim = simulation(num_seqs=3, num_batched=8)
        samples = sim.add(30, 9, n=3).siblings
        sim.step()
        later = [sim.add(3, 9) for _ in range(2)]
        sim.run()
        sim.check_outputs()
        assert max(first_draw(sim, sample) for sample in samples) < min(first_draw(sim, other) for other in later)

    def test_one_sample_may_be_aborted_while_it_waits_for_the_prompt(self, simulation):
        sim = simulation(num_batched=8)
        first = sim.add(30, 5, n=4)
        sim.step()
        assert sim.scheduler.num_waiting == 3
        for name in ("r2", "r0"):
            sim.scheduler.abort(name)
        assert (sim.scheduler.num_waiting, sim.scheduler.num_running) == (2, 0)
        assert first.siblings[1].followers == [first.siblings[3]]
        sim.run()
        sim.check_outputs()

    def test_kv_waste_counts_what_is_shared_once(self, simulation):
        sim = simulation(block_size=4, run_ahead=0)
        sim.add(9, 2, n=2)
        sim.run()
        # 9 of 12 slots; then two blocks that both have and one of each: 2 * 4 + 2 + 1 of 16; then 10 of 12.
        assert sim.scheduler.stats.kv_waste_worst == pytest.approx(5 / 16)
        assert sim.scheduler.stats.kv_waste_mean == pytest.approx((3 / 12 + 5 / 16 + 2 / 12) / 3)
