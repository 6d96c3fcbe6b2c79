"""jaxinfer bench speculative."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.bench.prompts import PROMPTS, read_prompts
from jaxinfer.bench.speculative import Comparison, DecodeTimes
from jaxinfer.bench.speculative_report import markdown, plot
from jaxinfer.checkpoint.medusa_heads import write_medusa
from jaxinfer.cli.bench_speculative import _cases
from jaxinfer.cli.main import build_parser
from jaxinfer.models.medusa import MedusaConfig
from tests.cli.conftest import ENDLESS

OPTIONS = ["--max-model-len", "128", "--max-num-batched-tokens", "32", "--enforce-eager"]


@pytest.fixture
def ring(with_template: Callable[..., Path]) -> Path:
    """A model that goes through the letters a to h for ever."""
    return with_template(ENDLESS)


@pytest.fixture
def run(jaxinfer: Any, ring: Path, tmp_path: Path) -> Callable[..., int]:
    data = tmp_path / "prompts.jsonl"
    data.write_text('"abc"\n{"prompt": "d"}\n{"messages": [{"role": "user", "content": "efg"}]}\n')
    words = ["bench", "speculative", "--model", ring, *OPTIONS, "--data", data, "--output-len", "12"]
    return lambda *more: jaxinfer(*words, *more)


def test_methods_guesses_and_batches_in_one_run(run: Callable[..., int], jaxinfer: Any, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    wrong = {"kernel": np.zeros((64, 64), np.float32), "bias": np.zeros(64, np.float32)}
    write_medusa(heads, MedusaConfig(64, 258, 2), {f"heads_{k}": {"blocks_0": wrong} for k in range(2)}, "m", "float32")
    table = tmp_path / "table.md"
    words = ["--method", "ngram,medusa", "-k", "3", "--batch-sizes", "2,1", "--heads", heads, "--output", table]
    assert run(*words, "--json") == 0
    rows = jaxinfer.json_lines()
    assert [(row["method"], row["num_speculative_tokens"], row["batch_size"]) for row in rows] == [
        (method, 3, size) for method in ("ngram", "medusa") for size in (1, 2)
    ]
    for row in rows:
        # Three prompts, alone or in pairs of which the last is filled up.
        assert row["num_requests"] == row["num_same_outputs"] == (3 if row["batch_size"] == 1 else 4)
        assert row["speedup"] > 0 and row["implied_speedup"] > 0 and row["plain_step_ms"] > 0 and row["verify_ms"] > 0
        # The text repeats itself after eight letters; the heads say the next letter once more.
        assert row["tokens_per_step"] > (1.0 if row["method"] == "ngram" else 0.99)
    assert rows[2]["acceptance_rate_per_position"][0] == 0.0 and rows[2]["tokens_per_step"] == 1.0
    lines = table.read_text().splitlines()
    assert len(lines) == 2 + len(rows) and lines[0].startswith("| method | k | batch | tokens a step |")


@pytest.mark.slow
def test_a_draft_model_that_is_the_model_itself(
    run: Callable[..., int], jaxinfer: Any, ring: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.json"
    words = ["--method", "draft-model", "--draft", ring, "-k", "2", "--raw", "--num-prompts", "1", "--output", output]
    assert run(*words) == 0
    (row,) = json.loads(output.read_text())
    # A token with the prompt, and then three at a time, the last two of the twelve together.
    assert row["acceptance_rate_per_position"] == [1.0, 1.0]
    assert row["tokens_per_step"] == pytest.approx(11 / 4)
    assert jaxinfer.stdout.splitlines()[2].startswith("| draft_model | 2 | 1 | 2.75 | 1.00 1.00 |")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "magic"], "'magic' is none of ngram, lookahead, draft_model, medusa, eagle, eagle3"),
        (["-k", "0"], "'0' is not a number from 1 up"),
        (["--batch-sizes", "two"], "'two' is not a number"),
        (["--method", "draft_model"], "needs --draft MODEL"),
        (["--method", "medusa"], "needs --heads medusa=DIR"),
        (["--method", "medusa,eagle", "--heads", "here"], "--heads here: say whose"),
        (["--data", "/nowhere.json"], "nowhere"),
        (["--config", "medusa={}"], "--config medusa={}: begin with one of the methods, ngram"),
        (["--config", "ngram=[]"], "--config ngram: '[]' is not a JSON object"),
    ],
)
def test_refusals_come_before_the_model(jaxinfer: Any, words: list[str], named: str) -> None:
    assert jaxinfer("bench", "speculative", "--model", "/nowhere", *words) == 2
    assert named in jaxinfer.stderr


def times(tokens: int, rows: int, seconds: float, **more: Any) -> DecodeTimes:
    return DecodeTimes(tokens, rows, rows, seconds, **more)


def test_further_entries_of_methods() -> None:
    words = ["bench", "speculative", "--model", "m", "--method", "ngram,lookahead", "-k", "2,auto"]
    entries = ["--config", 'ngram={"prompt_lookup_max": 3}', "--config", 'lookahead={"window_size": 2}']
    cases = _cases(build_parser().parse_args([*words, *entries]))
    assert cases == [
        {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2},
        {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": "auto"},
        {"method": "lookahead", "window_size": 2},
    ]


def test_what_the_numbers_mean() -> None:
    """By hand: 100 tokens in 50 steps, 40 of which verify, against 100 steps of 10 ms."""
    plain = times(100, 100, 1.2, device_seconds=1.0, token_ids=[[1, 2], [3]])
    guessing = times(
        100, 50, 0.8, num_verifying=40, draft_seconds=0.04, verify_seconds=0.56, drafted=[40, 40], accepted=[30, 20],
        token_ids=[[1, 2], [4]],
    )  # fmt: skip
    one = Comparison("ngram", 2, 1, guessing, plain)
    assert (one.draft_ms, one.verify_ms, one.plain.step_ms) == pytest.approx((1.0, 14.0, 10.0))
    assert one.speedup == pytest.approx(1.5) and one.rates == [0.75, 0.5] and one.num_same == 1
    # 50 steps cost 600 ms of guesses and verification and 10 plain ones 100 ms; 100 plain ones a second.
    assert one.implied_speedup == pytest.approx(1000 / 700)
    assert "| ngram | 2 | 1 | 2.00 | 0.75 0.50 | 1.0 | 14.0 | 10.0 | 1.50 | 1.43 | 1 of 2 |" in markdown([one])


def test_nothing_was_guessed() -> None:
    one = Comparison("ngram", 2, 1, times(9, 9, 1.0), times(9, 9, 1.0, device_seconds=1.0))
    assert one.draft_ms == one.verify_ms == 0.0 and one.speedup == 1.0 and one.rates == []
    assert "| - |" in markdown([one])


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        Comparison(name, 3, size, times(9, 5, 1.0), times(9, 9, 1.0 + size))
        for name in ("ngram", "x")
        for size in (1, 8)
    ]
    plot(rows, "speed", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_files(tmp_path: Path) -> None:
    assert len(PROMPTS) == 8
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\n")
    assert read_prompts(lines) == ["one", "two"]
    listed = tmp_path / "prompts.json"
    for text, named in (('{"a": 1}', "no list"), ("[]", "no list"), ('["a", 3]', "prompt 2"), ("[", "not JSON")):
        listed.write_text(text)
        with pytest.raises(ValueError, match=named):
            read_prompts(listed)
