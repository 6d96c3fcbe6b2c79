"""What requests share: prefixes in the cache, samples of one prompt, forks. Outputs are what they are alone."""

import logging
from typing import Any

import pytest

from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPT = [7 * i % 64 for i in range(40)]  # two full blocks of 16 and a half


def computed(harness: Any) -> int:
    return harness.engine.stats().num_computed_tokens


def last(outputs: dict[str, list[RequestOutput]], name: str) -> RequestOutput:
    return outputs[name][-1]


class TestPrefixCache:
    def test_a_second_request_computes_what_no_full_block_has(self, make_harness, naive, history):
        harness = make_harness()
        expected = naive(history, PROMPT, GREEDY)
        for num_cached in (0, 32, 32):
            before = computed(harness)
            output = harness.generate(PROMPT, max_tokens=6)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == output.metrics.num_cached_tokens == num_cached
            assert computed(harness) - before == 40 - num_cached + 5
        stats = harness.engine.stats()
        assert (stats.num_prefix_queries, stats.num_prefix_hits) == (120, 64)
        assert stats.prefix_hit_rate == 64 / 120
        harness.check_idle()

    @pytest.mark.parametrize(("num_prompt", "num_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
    def test_at_least_one_token_is_computed(self, make_harness, num_prompt, num_cached):
        harness = make_harness()
        outputs = [harness.generate(PROMPT[:num_prompt], max_tokens=4) for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, num_cached]
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids

    def test_generated_tokens_are_found_too(self, make_harness):
        """As in a conversation: the next prompt holds the last answer."""
        harness = make_harness()
        answer = harness.generate(PROMPT, max_tokens=30).outputs[0].token_ids
        # The token drawn last was never computed.
        output = harness.generate([*PROMPT, *answer, 1, 2], max_tokens=2)
        assert output.num_cached_tokens == (40 + 29) // 16 * 16

    def test_requests_that_arrive_together_share_from_their_first_step_on(self, make_harness, naive, history):
        harness = make_harness(max_num_batched_tokens=256)
        prompts = {name: [*PROMPT[:32], place, place] for place, name in enumerate("abcd")}
        for name, prompt in prompts.items():
            harness.add(name, prompt, GREEDY)
        harness.engine.step()
        assert sum(row.num_tokens for row in harness.device.plans[0].rows) == 32 + 4 * 2
        outputs = harness.run()
        for name, prompt in prompts.items():
            assert last(outputs, name).outputs[0].token_ids == naive(history, prompt, GREEDY)
        assert [last(outputs, name).num_cached_tokens for name in "abcd"] == [0, 32, 32, 32]

    def test_requests_in_the_middle_of_one_prompt_help_each_other(self, make_harness, naive, history):
        """Each takes over the blocks that another has computed meanwhile. Chunks end within blocks here, which both
        sides have begun then."""
        harness = make_harness(max_num_batched_tokens=32)
        prompt = [(i * i) % 64 for i in range(200)]
        for name in "abc":
            harness.add(name, prompt, GREEDY)
        outputs = harness.run()
        assert all(last(outputs, name).outputs[0].token_ids == naive(history, prompt, GREEDY) for name in "abc")
        assert 192 + 3 * 8 + 3 * 5 <= computed(harness) <= 2 * 200

    def test_salts_keep_requests_apart(self, make_harness):
        harness = make_harness()
        found = []
        for salt in ("one", None, "two", "one", None, "two"):
            harness.add("r", PROMPT, GREEDY, cache_salt=salt)
            found.append(last(harness.run(), "r").num_cached_tokens)
        assert found == [0, 0, 0, 32, 32, 32]

    @pytest.mark.parametrize(("salt", "error"), [("", ValueError), (7, TypeError), (b"a", TypeError)])
    def test_a_salt_that_is_none_is_refused(self, make_harness, salt, error):
        with pytest.raises(error, match="cache_salt="):
            make_harness().add("r", PROMPT, GREEDY, cache_salt=salt)

    def test_scored_prompts_are_computed_but_can_be_found(self, make_harness):
        harness = make_harness()
        cold = harness.generate(PROMPT, prompt_logprobs=2)
        warm = harness.generate(PROMPT, prompt_logprobs=2)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 0)
        assert warm.prompt_logprobs == cold.prompt_logprobs and len(warm.prompt_logprobs) == 40
        assert harness.generate(PROMPT, skip_reading_prefix_cache=True).num_cached_tokens == 0
        assert harness.generate(PROMPT).num_cached_tokens == 32
        stats = harness.engine.stats()
        assert (stats.num_prefix_queries, stats.num_prefix_hits) == (40, 32), "who does not look is not counted"

    def test_the_least_recently_used_block_goes_first_and_ends_before_beginnings(self, make_harness):
        harness = make_harness(num_blocks=1 + 6)
        prompts = [[(place + 7 * i) % 64 for i in range(40)] for place in range(3)]
        # A prompt fills two blocks, and needs a third. The third prompt takes the end of the second, which has not been
        # used for longest.
        for place, num_cached in [(0, 0), (1, 0), (0, 32), (2, 0), (0, 32), (1, 16)]:
            assert harness.generate(prompts[place], max_tokens=2).num_cached_tokens == num_cached
        harness.check_idle()

    def test_without_caching_nothing_is_found(self, make_harness):
        harness = make_harness(caching=False)
        assert [harness.generate(PROMPT).num_cached_tokens for _ in range(2)] == [0, 0]
        assert len(harness.engine.scheduler.block_manager.cache) == 0
        assert harness.engine.stats().prefix_hit_rate == 0.0

    def test_a_preempted_request_finds_its_own_blocks(self, make_harness, naive, history):
        harness = make_harness(num_blocks=9, block_size=8)
        prompts = {name: [ord(name)] * 20 for name in "ABC"}
        prompts = {name: [token % 64 for token in prompt] for name, prompt in prompts.items()}
        params = SamplingParams(temperature=0, max_tokens=30, output_kind=RequestOutputKind.FINAL_ONLY)
        for name, prompt in prompts.items():
            harness.add(name, prompt, params)
        outputs = harness.run()
        assert harness.engine.stats().num_preemptions > 0
        for name, prompt in prompts.items():
            assert last(outputs, name).outputs[0].token_ids == naive(history, prompt, params)
            assert last(outputs, name).num_cached_tokens == 0, "its own blocks are no hits"


class TestReset:
    def test_a_reset_says_whether_it_succeeded(self, make_harness, caplog):
        harness = make_harness()
        engine = harness.engine
        assert engine.reset_prefix_cache(), "an empty cache is reset"
        harness.add("r", PROMPT, GREEDY)
        engine.step()
        with caplog.at_level(logging.WARNING, logger="jaxinfer"):
            assert not engine.reset_prefix_cache()
        assert "1 requests are running" in caplog.text
        harness.run()
        assert harness.generate(PROMPT).num_cached_tokens == 32
        assert engine.reset_prefix_cache()
        assert harness.generate(PROMPT).num_cached_tokens == 0

    def test_a_reset_may_take_the_blocks_of_running_requests(self, make_harness, naive, history):
        harness = make_harness()
        harness.add("r", PROMPT, GREEDY)
        for _ in range(3):
            harness.engine.step()
        before = computed(harness)
        assert harness.engine.reset_prefix_cache(reset_running_requests=True)
        assert last(harness.run(), "r").outputs[0].token_ids == naive(history, PROMPT, GREEDY)
        assert computed(harness) - before >= 40

    def test_what_runs_while_the_parameters_change_is_not_found_afterwards(self, make_harness):
        """Field case 14: its keys and values are partly those of the old ones."""
        harness = make_harness()
        harness.generate(PROMPT)
        harness.add("running", PROMPT, SamplingParams(temperature=0, max_tokens=40))
        for _ in range(3):
            harness.engine.step()
        harness.engine.params_changed()
        harness.add("next", PROMPT, GREEDY)
        outputs = harness.run()
        assert last(outputs, "next").num_cached_tokens == 0
        assert last(outputs, "running").finished
        answer = last(outputs, "running").outputs[0].token_ids
        # The blocks of "next" are new; the longer ones of "running" would be found here.
        assert harness.generate([*PROMPT, *answer]).num_cached_tokens == 32

    def test_blocks_of_a_request_that_was_not_finite_are_not_found(self, make_harness, naive, history):
        harness = make_harness()
        harness.device.poison.add("bad")
        harness.add("bad", PROMPT, GREEDY)
        assert last(harness.run(), "bad").outputs[0].finish_reason == "error"
        output = harness.generate(PROMPT, max_tokens=6)
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, naive(history, PROMPT, GREEDY))
        harness.check_idle()


class TestSamples:
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("num_prompt", [1, 2, 16, 17, 32, 40])
    @pytest.mark.parametrize("n", [2, 5])
    def test_one_sample_computes_the_prompt(self, make_harness, naive, history, n, num_prompt, caching):
        harness = make_harness(caching=caching)
        prompt = PROMPT[:num_prompt]
        params = SamplingParams(n=n, temperature=0.9, seed=3, max_tokens=6, logprobs=1)
        harness.add("r", prompt, params)
        outputs = last(harness.run(), "r").outputs
        for index, sample in enumerate(outputs):
            assert sample.token_ids == naive(history, prompt, params, child_index=index)
        assert len({tuple(sample.token_ids) for sample in outputs}) > 1
        # The others compute the prompt's last token again, to draw from.
        assert computed(harness) == num_prompt + (n - 1) + n * 5
        copies = [pair for plan in harness.device.plans for pair in plan.copies]
        assert len(copies) == (n - 1 if (num_prompt - 1) % 16 else 0), "only a block that is filled in part is copied"
        harness.check_idle()

    def test_sixty_four_samples_with_eight_slots(self, make_harness, naive, history):
        harness = make_harness(num_blocks=40)
        params = SamplingParams(n=64, temperature=0.9, seed=3, max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)
        harness.add("r", PROMPT, params)
        outputs = last(harness.run(), "r").outputs
        assert len(outputs) == 64
        for index in (0, 1, 7, 8, 40, 63):
            assert outputs[index].token_ids == naive(history, PROMPT, params, child_index=index)
        # Those that get a slot after all that have the prompt have ended compute what no full block has.
        assert computed(harness) <= 40 + 63 * 8 + 64 * 4
        harness.check_idle()

    def test_samples_wait_for_their_prompt_but_nobody_gets_their_slots(self, make_harness):
        harness = make_harness(max_num_seqs=4, max_num_batched_tokens=16)
        harness.add("many", PROMPT, SamplingParams(n=3, temperature=0.9, max_tokens=4))
        harness.add("one", [1, 2, 3], GREEDY)
        harness.add("two", [4, 5, 6], GREEDY)
        harness.engine.step()
        stats = harness.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 3), "'one' runs, 'two' has no slot"
        outputs = harness.run()
        assert all(last(outputs, name).finished for name in ("many", "one", "two"))

    @pytest.mark.parametrize("num_steps", range(6))
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_a_sample_may_end_at_any_moment(self, make_harness, naive, history, victim, num_steps):
        """The first one's end hands the prompt over to the next."""
        harness = make_harness(max_num_batched_tokens=16)
        params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=6)
        harness.add("r", PROMPT, params)
        for _ in range(num_steps):
            harness.engine.step()
        harness.device.poison.add(f"r/{victim}")
        outputs = last(harness.run(), "r").outputs
        for index, sample in enumerate(outputs):
            expected = naive(history, PROMPT, params, child_index=index)
            assert sample.token_ids == (expected[: len(sample.token_ids)] if index == victim else expected)
        harness.check_idle()

    def test_samples_end_with_their_request(self, make_harness):
        harness = make_harness(max_num_batched_tokens=16)
        harness.add("r", PROMPT, SamplingParams(n=5, temperature=0.9))
        harness.engine.step()
        (output,) = harness.engine.abort("r")
        assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 5
        harness.run()
        harness.check_idle()


class TestFork:
    @pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 12])
    @pytest.mark.parametrize("n", [1, 3])
    def test_a_fork_goes_on_from_where_its_source_is(self, make_harness, naive, history, num_steps, n):
        harness = make_harness(max_num_batched_tokens=24)
        source = SamplingParams(temperature=0, max_tokens=20)
        branch = SamplingParams(temperature=0.8, seed=9, max_tokens=8, n=n)
        harness.add("source", PROMPT, source)
        for _ in range(num_steps):
            harness.engine.step()
        before = computed(harness)
        harness.engine.fork("source", "branch", branch)
        outputs = harness.run()
        assert last(outputs, "source").outputs[0].token_ids == naive(history, PROMPT, source)
        start = last(outputs, "branch").prompt_token_ids
        assert start == [*PROMPT, *naive(history, PROMPT, source)][: len(start)]
        for index, sample in enumerate(last(outputs, "branch").outputs):
            assert sample.token_ids == naive(history, start, branch, child_index=index)
        if len(start) > 40:
            rest_of_source = 40 + 19 - before
            assert computed(harness) - before <= rest_of_source + n * 8, "the prompt was computed again"
        harness.check_idle()

    def test_a_fork_without_a_free_slot_waits(self, make_harness, naive, history):
        harness = make_harness(max_num_seqs=1)
        harness.add("source", PROMPT, GREEDY)
        for _ in range(3):
            harness.engine.step()
        harness.engine.fork("source", "branch", GREEDY)
        outputs = harness.run()
        start = last(outputs, "branch").prompt_token_ids
        assert last(outputs, "branch").outputs[0].token_ids == naive(history, start, GREEDY)
        assert last(outputs, "branch").num_cached_tokens == 32

    def test_what_a_fork_cannot_give_is_refused(self, make_harness, naive, history):
        harness = make_harness()
        harness.add("r", PROMPT, GREEDY)
        harness.engine.step()
        with pytest.raises(ValueError, match="prompt_logprobs=0 cannot be had from a fork"):
            harness.engine.fork("r", "branch", SamplingParams(prompt_logprobs=0))
        with pytest.raises(TypeError, match=r"BeamSearchParams\(.*must be SamplingParams"):
            harness.engine.fork("r", "branch", BeamSearchParams(2, 3))
        assert harness.engine.num_unfinished_requests == 1
        assert last(harness.run(), "r").outputs[0].token_ids == naive(history, PROMPT, GREEDY)

    def test_only_what_is_unfinished_can_be_forked(self, make_harness):
        harness = make_harness()
        harness.generate(PROMPT)
        with pytest.raises(ValueError, match="'only' has no unfinished sample 0"):
            harness.engine.fork("only", "branch", GREEDY)
        harness.add("r", PROMPT, GREEDY)
        for index in (1, -1):
            with pytest.raises(ValueError, match=f"'r' has no unfinished sample {index}"):
                harness.engine.fork("r", "branch", GREEDY, index=index)
        with pytest.raises(ValueError, match="'r' is in use"):
            harness.engine.fork("r", "r", GREEDY)
        harness.run()
