"""How requests end: stop strings (field case 3), min_tokens (10), end-of-sequence ids (11)."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

HELLO = (12, 13, 14, 15)  # "hel" "lo" " wor" "ld"
EMOJI = (16, 17, 18)


def both_ways(harness: Any, prompt: tuple[int, ...] = (1,), **params: Any) -> tuple[RequestOutput, list[str]]:
    """The final output and the streamed deltas, which must add up to it."""
    final = harness.generate(prompt, **params)
    harness.add("delta", prompt, SamplingParams(temperature=0, output_kind=RequestOutputKind.DELTA, **params))
    deltas = [output.outputs[0] for output in harness.run()["delta"]]
    assert "".join(delta.text for delta in deltas) == final.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == final.outputs[0].token_ids
    assert deltas[-1].finish_reason == final.outputs[0].finish_reason
    assert deltas[-1].stop_reason == final.outputs[0].stop_reason
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    harness.add("whole", prompt, SamplingParams(temperature=0, **params))
    assert harness.run()["whole"][-1].outputs[0] == final.outputs[0]
    harness.check_idle()
    return final, [delta.text for delta in deltas]


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "DE")])
def test_stop_inside_a_token(make_harness: Callable, script: Callable, include: bool, text: str) -> None:
    final, _ = both_ways(make_harness(script(10)), stop=["DE"], include_stop_str_in_output=include)
    sample = final.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason, sample.token_ids) == (text, "stop", "DE", [10])


@pytest.mark.parametrize(("include", "text"), [(False, "hel"), (True, "hello w")])
def test_stop_across_tokens(make_harness: Callable, script: Callable, include: bool, text: str) -> None:
    harness = make_harness(script(*HELLO))
    final, deltas = both_ways(harness, stop=["lo w"], include_stop_str_in_output=include)
    assert (final.outputs[0].text, final.outputs[0].stop_reason) == (text, "lo w")
    if not include:
        assert not any("l" in delta[-1:] and "lo" in delta for delta in deltas) and "".join(deltas) == "hel"


def test_held_back_text_comes_at_the_end(make_harness: Callable, script: Callable) -> None:
    final, _ = both_ways(make_harness(script(12, 53)), stop=["xyz"], max_tokens=2)  # 53 = "x"
    assert (final.outputs[0].text, final.outputs[0].finish_reason) == ("helx", "length")


def test_stop_of_several_bytes(make_harness: Callable, script: Callable) -> None:
    final, deltas = both_ways(make_harness(script(12, *EMOJI)), stop=["😀"])
    assert (final.outputs[0].text, final.outputs[0].token_ids) == ("hel", [12, *EMOJI])
    assert not any("\ufffd" in delta for delta in deltas)


def test_stop_in_the_prompt_does_not_count(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(13, 14))
    final, _ = both_ways(harness, (12, 1), stop=["hel", "hello"], max_tokens=2)
    assert (final.outputs[0].text, final.outputs[0].finish_reason) == ("lo wor", "length")


def test_stop_on_the_last_token_is_a_stop(make_harness: Callable, script: Callable) -> None:
    final, _ = both_ways(make_harness(script(*HELLO)), stop=["wor"], max_tokens=3)
    assert (final.outputs[0].text, final.outputs[0].finish_reason) == ("hello ", "stop")


def test_step_in_flight_after_a_stop_is_dropped(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(*HELLO))
    final = harness.generate(stop=["lo"], max_tokens=50)
    assert final.outputs[0].token_ids == [12, 13]
    assert sum(len(plan.rows) for plan in harness.device.plans) == 3, "one step ahead, not more"
    harness.check_idle()


@pytest.mark.parametrize(
    ("min_tokens", "ids"),
    [(0, [3, 4, 5, 6]), (3, [3, 4, 5, 6]), (4, [3, 4, 5, 7, 8, 9]), (5, [3, 4, 5, 7, 8, 9])],
)
def test_min_tokens_masks_eos_exactly(
    make_harness: Callable, script: Callable, min_tokens: int, ids: list[int]
) -> None:
    # The 4th token is the EOS 6; its runner-up 7 leads to 8 and the EOS 9.
    def logits(context: list[int]) -> Any:
        values = script(3, 4, 5, 6)(context)
        for token, follower in ((7, 8), (8, 9)):
            if context[-1] == token:
                values[follower] = 20.0
        return values

    final, _ = both_ways(make_harness(logits, eos=(6, 9)), min_tokens=min_tokens)
    assert (final.outputs[0].token_ids, final.outputs[0].finish_reason) == (ids, "stop")
    assert final.outputs[0].stop_reason is None


def test_min_tokens_and_stop_strings(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(30, 13, 31, 32, 33, 34, 41, 44))  # "lo" is token 2, and again complete at token 8
    final, _ = both_ways(harness, stop=["lo"], min_tokens=5)
    assert final.outputs[0].text == "alobcde"
    assert len(final.outputs[0].token_ids) == 8
    assert both_ways(harness, stop=["lo"])[0].outputs[0].text == "a"


@pytest.mark.parametrize("eos", [(0,), (2,), (0, 2), (2, 5)])
@pytest.mark.parametrize("last", [0, 2, 5])
def test_every_id_of_the_union_ends(make_harness: Callable, script: Callable, eos: tuple[int, ...], last: int) -> None:
    final, _ = both_ways(make_harness(script(12, last, 13), eos=eos), max_tokens=3)
    sample = final.outputs[0]
    if last in eos:
        assert (sample.text, sample.token_ids, sample.finish_reason) == ("hel", [12, last], "stop")
        assert sample.stop_reason is None
    else:
        assert (len(sample.token_ids), sample.finish_reason) == (3, "length")


def test_ignore_eos_keeps_stop_token_ids(make_harness: Callable, script: Callable) -> None:
    harness = make_harness(script(12, 2, 13, 5, 14), eos=(2, 5))
    final, _ = both_ways(harness, ignore_eos=True, max_tokens=5)
    assert (final.outputs[0].token_ids, final.outputs[0].finish_reason) == ([12, 2, 13, 5, 14], "length")
    final, _ = both_ways(harness, ignore_eos=True, stop_token_ids=[5])
    assert (final.outputs[0].token_ids, final.outputs[0].stop_reason) == ([12, 2, 13, 5], 5)


def test_stop_token_stays_in_the_text_unless_special(make_harness: Callable, script: Callable) -> None:
    assert both_ways(make_harness(script(12, 13)), stop_token_ids=[13])[0].outputs[0].text == "hello"
    assert both_ways(make_harness(script(12, 2)), stop_token_ids=[2])[0].outputs[0].text == "hel"
    shown, _ = both_ways(make_harness(script(12, 2)), stop_token_ids=[2], skip_special_tokens=False)
    assert shown.outputs[0].text == "hel<|im_end|>"


def test_eos_outside_the_vocabulary_is_harmless(make_harness: Callable, script: Callable) -> None:
    final = make_harness(script(12, 2), eos=(2, -1, 10**9)).generate(min_tokens=1)
    assert final.outputs[0].token_ids == [12, 2]
