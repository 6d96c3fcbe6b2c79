"""jaxinfer eval."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def words(scripted_checkpoint: Callable[..., Path], tmp_path: Path) -> list[str]:
    """A model that is sure of the alphabet's next letter, and a text with one surprise."""
    (tmp_path / "text").write_text("abcdefgabc")
    model = scripted_checkpoint([*b"abcdefg", *b"a"])
    engine = ["--max-num-batched-tokens", "8", "--max-model-len", "64"]
    return ["eval", "--model", str(model), "--text", str(tmp_path / "text"), *engine]


def test_comparison_as_json_and_as_a_table(jaxinfer: Any, words: list[str], tmp_path: Path) -> None:
    options = ["--window", "5", "--compare", "--kv-cache-dtype", "fp8", "--json"]
    assert jaxinfer(*words, *options, "--output-json", tmp_path / "report.json") == 0
    (report,) = jaxinfer.json_lines()
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (report["window"], report["num_windows"], report["num_scored"], report["dtype"]) == (5, 2, 8, "float32")
    assert [result["kv_cache_dtype"] for result in report["results"]] == ["float32", "fp8_e4m3"]
    for result in report["results"]:
        assert 1 <= result["perplexity"] < 1.01  # every letter follows from the one before it
    # All keys and values are zero, and so they stay.
    difference = report["results"][1]["difference"]
    assert difference["mean_abs_delta_logprob"] == 0 and difference["same_top1"] == 1
    assert difference["worst_layers"] == [{"layer": 0, "attention_error": 0}]


def test_one_dtype_as_text(jaxinfer: Any, words: list[str]) -> None:
    assert jaxinfer(*words, "--kv-cache-dtype", "int8") == 0
    first, _, header, row = jaxinfer.stdout.splitlines()
    assert first == "9 tokens scored in windows of 10 (1), activations in float32"
    assert header.split()[:2] == ["KV", "cache"] and row.split()[:2] == ["int8", "1.0000"]


def test_weights_are_compared_with_unquantised_ones(jaxinfer: Any, words: list[str], tmp_path: Path) -> None:
    options = ["--compare", "--quantization", "int8,int4", "--quantization-config", '{"group_size": 32}', "--json"]
    assert jaxinfer(*words, *options, "--also", words[2]) == 0
    (report,) = jaxinfer.json_lines()
    assert [result["name"] for result in report["results"]] == ["float32", "int8", "int4", words[2]]
    alone, *others = report["results"]
    assert alone["difference"] is None and report["num_scored"] == 9
    for result in others:  # the projections are zero, the rest is not quantised
        assert result["difference"]["mean_abs_delta_logprob"] == 0
        assert result["difference"]["perplexity_ratio"] == 1
    # One layer of width 64, 8 in the feed-forward, and 3 matrices for attention: a byte each on a CPU, 4 a channel's
    # scale, and 4 for what a product may need of a channel beside it.
    codes, channels = 64 * (3 * 64 + 64 + 2 * 8 + 8), 4 * 64 + 2 * 8 + 64
    for result in others[:2]:
        saved = alone["weight_bytes"] - result["weight_bytes"]
        assert 3 * codes - 8 * channels <= saved <= 3 * codes - 4 * channels
    assert others[2]["weight_bytes"] == alone["weight_bytes"]


def test_a_table_of_methods(jaxinfer: Any, words: list[str]) -> None:
    assert jaxinfer(*words, "--quantization", "int8", "fp8") == 0
    _, _, header, *rows = jaxinfer.stdout.splitlines()
    assert header.split() == ["weights", "perplexity", "weight", "bytes", "tokens/s"]
    assert [row.split()[:2] for row in rows] == [["int8", "1.0000"], ["fp8", "1.0000"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "64"], "window=64 exceeds the 63 tokens"),
        (["--window", "1"], "window=1 leaves no token"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype='int3' is not supported"),
        (["--text", "/nowhere"], "/nowhere"),
        (["--skip-tokenizer-init"], "skip_tokenizer_init=True"),
        (["--quantization", "int8,int3"], "quantization='int3' is not supported"),
        (["--quantization", "int8_w8a8,fp8", "--quantization-config", '{"group_size": 32}'], "=32 is of 'int8' and 4"),
        (["--quantization", "int8,fp8", "--kv-cache-dtype", "int8", "fp8"], "--kv-cache-dtype: several weights"),
    ],
)
def test_what_is_refused(jaxinfer: Any, words: list[str], options: list[str], message: str) -> None:
    assert jaxinfer(*words, *options) == 2
    assert message in jaxinfer.stderr


def test_options_that_nothing_takes_are_refused(jaxinfer: Any, words: list[str]) -> None:
    assert jaxinfer(*words, "--also", words[2], "--quantization-config", '{"fast_form": false}') == 2
    assert "quantization_config without quantization: {'fast_form': False} needs" in jaxinfer.stderr
