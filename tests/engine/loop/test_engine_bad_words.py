"""bad_words and allow-lists: field case 5."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.sampling_params import SamplingParams

VOCAB_SIZE = 64


def wants(*script: int) -> Callable[[Sequence[int]], np.ndarray]:
    """Wants the script in order whatever was drawn in between, then the id 40."""

    def logits(context: Sequence[int]) -> np.ndarray:
        values = -np.arange(VOCAB_SIZE, dtype=float) / 100
        done = len(context) - 1
        values[script[done] if done < len(script) else 40] = 10.0
        values[41] = 5.0  # what comes instead of a banned token
        return values

    return logits


@pytest.mark.parametrize(
    ("script", "ids"),
    [
        ((19, 12), [41, 12]),  # " described" in one piece
        ((20, 21), [20, 41]),  # "desc" "ribed": the first half alone is allowed
        ((21, 20), [21, 20]),
        ((20, 12, 21), [20, 12, 21]),
    ],
)
def test_both_spellings_are_banned(make_harness: Callable, script: tuple[int, ...], ids: list[int]) -> None:
    final = make_harness(wants(*script)).generate(bad_words=["described"], max_tokens=len(script))
    assert final.outputs[0].token_ids == ids


def test_one_piece_spellings(make_harness: Callable) -> None:
    final = make_harness(wants(22, 23, 12)).generate(bad_words=["London"], max_tokens=3)
    assert final.outputs[0].token_ids == [41, 41, 12]


def test_three_pieces_ban_only_the_last(make_harness: Callable) -> None:
    harness = make_harness(wants(12, 13, 15, 12, 13, 14))
    final = harness.generate(bad_words=["hellold"], max_tokens=6)  # "hel" "lo" "ld"
    assert final.outputs[0].token_ids == [12, 13, 41, 12, 13, 14]


def test_the_prompt_does_not_complete_a_word(make_harness: Callable) -> None:
    # The prompt ends in "desc"; only output ids count.
    harness = make_harness(wants(0, 21))
    harness.add("a", (1, 20), SamplingParams(temperature=0, bad_words=["described"], max_tokens=1))
    assert harness.run()["a"][-1].outputs[0].token_ids == [21]


def test_contradiction_is_refused_when_added(make_harness: Callable) -> None:
    harness = make_harness()
    with pytest.raises(ValueError, match=r"allowed_token_ids=\[22\] are all banned"):
        harness.add("a", (1,), SamplingParams(allowed_token_ids=[22], bad_words=["London"]))
    assert not harness.engine.has_unfinished_requests()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_only_allowed_ids_appear(make_harness: Callable, params: dict[str, Any]) -> None:
    final = make_harness().generate(allowed_token_ids=[20, 21, 22], bad_words=["London"], max_tokens=30, **params)
    ids = final.outputs[0].token_ids
    assert len(ids) == 30 and set(ids) <= {20, 21}
