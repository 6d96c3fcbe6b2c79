"""Counts of guesses, of one engine and of several."""

from dataclasses import fields

from jaxinfer.engine.speculation_stats import SpeculationStats, sum_of_speculation


def test_a_trees_positions_are_its_depths() -> None:
    stats = SpeculationStats()
    stats.add(2, 7, 3)  # seven nodes three deep, of which two on a path held
    stats.add(0, 4, 1)
    assert stats.num_drafted_per_position == [2, 1, 1] and stats.num_accepted_per_position == [1, 1, 0]
    assert stats.acceptance_length == 2.0 and stats.acceptance_rate == 2 / 11
    assert stats.acceptance_rate_per_position == [0.5, 1.0, 0.0]


def test_nothing_is_left_out_of_a_sum() -> None:
    parts = [SpeculationStats(1, 2, 3, [4], [5], 6, 7.0, 8.0), SpeculationStats(1, 2, 3, [4, 1], [5, 0], 6, 7.0, 8.0)]
    total = sum_of_speculation(parts)
    assert total == SpeculationStats(2, 4, 6, [8, 1], [10, 0], 12, 14.0, 16.0)
    assert len(fields(total)) == 8
