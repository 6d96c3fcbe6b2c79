"""Models whose every layer has a window: what no token sees any more is free again, and counts for nothing."""

import pytest


def held(sim) -> int:
    return sim.scheduler.block_manager.num_used_blocks


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_long_request_lives_in_a_pool_of_its_window_and_a_chunk(simulation, run_ahead):
    """300 tokens with a window of 16 in chunks of 8, blocks of 4: 23 positions, 7 blocks at worst."""
    sim = simulation(num_blocks=7, block_size=4, num_batched=8, window=16, run_ahead=run_ahead)
    request = sim.add(100, 200)
    most = 0
    while sim.scheduler.has_unfinished:
        sim.step()
        most = max(most, held(sim))
    sim.check_outputs()
    assert (len(request.output_token_ids), request.finish_reason) == (200, "length")
    assert 5 <= most <= 7
    assert sim.scheduler.stats.num_preemptions == 0


def test_a_pool_smaller_than_a_chunk_shrinks_the_chunks(simulation):
    """Window 16 and a chunk of one token are 5 blocks; with 4 nothing longer than the pool fits."""
    sim = simulation(num_blocks=5, block_size=4, num_batched=32, window=16)
    sim.add(90, 40)
    sim.run()
    sim.check_outputs()
    small = simulation(num_blocks=4, block_size=4, num_batched=32, window=16)
    with pytest.raises(ValueError, match="a prompt of 90 tokens needs 5 KV blocks of 4 tokens, but the pool has 4"):
        small.scheduler.capacity.check_fits(90)
    assert small.scheduler.capacity.bound(1000) == 17
    request = small.add(10, 40)
    small.run()
    small.check_outputs()
    assert request.finish_reason == "length" and len(request.output_token_ids) == 7


def test_more_requests_run_at_once(simulation):
    """40 blocks of 4: eight requests of 120 tokens would need 30 each, with a window of 8 they need 4."""
    running = {}
    for window in (None, 8):
        sim = simulation(num_blocks=40, block_size=4, num_batched=16, window=window, caching=False)
        for index in range(8):
            sim.add([index] * 60, 60)
        running[window] = 0
        while sim.scheduler.has_unfinished:
            sim.step()
            running[window] = max(running[window], sim.scheduler.num_running)
        sim.check_outputs()
        assert window is None or sim.scheduler.stats.num_preemptions == 0
    assert running[8] == 8 > 2 * running[None]


def test_a_hit_needs_only_what_is_in_sight(simulation):
    """After the first request's head was given to others, its tail is enough; without its tail nothing is."""
    sim = simulation(num_blocks=12, block_size=4, num_batched=64, window=8)
    prompt = list(range(41))
    first = sim.add(prompt, 1)
    sim.run()
    manager = sim.scheduler.block_manager
    blocks = manager.cache.find(first.block_keys)
    assert len(blocks) == 10
    manager.forget(blocks[:8])
    second = sim.add(prompt, 1)
    sim.run()
    assert second.num_cached_tokens == 40
    manager.forget(manager.cache.find_each(first.block_keys)[9:10])
    third = sim.add(prompt, 1)
    sim.run()
    assert third.num_cached_tokens == 0  # block 8 alone is less than position 36 sees
    sim.check_outputs()


def test_samples_share_while_the_first_has_what_they_need(simulation):
    sim = simulation(num_blocks=30, block_size=4, window=8, caching=False)
    first = sim.add(30, 6, n=3)
    sim.run()
    sim.check_outputs()
    assert [sample.num_cached_tokens for sample in first.siblings] == [0, 29, 29]
    late = simulation(num_blocks=30, block_size=4, window=8, caching=False)
    source = late.add(30, 30)
    for _ in range(25):
        late.step()
    child = late.fork(source, source.output_token_ids[:2], child_index=5)
    assert child.slot == -1 and not child.block_ids  # what it would read is gone
    late.run()
    late.check_outputs()
