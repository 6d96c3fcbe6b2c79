"""jaxinfer generate."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.cli.completion_output import BlockWriter
from jaxinfer.engine.outputs import CompletionOutput, RequestOutput

GREEDY = ["--temperature", "0"]


def test_one_prompt_prints_its_completion_only(jaxinfer: Any, letters: list[str]) -> None:
    assert jaxinfer("generate", *letters, *GREEDY, "--prompt", "a") == 0
    assert jaxinfer.stdout == "bcdefgh\n"


def test_standard_input_is_a_prompt(jaxinfer: Any, letters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("xyz\nc\n"))
    assert jaxinfer("generate", *letters, *GREEDY, "--stream") == 0
    assert jaxinfer.stdout == "defgh\n"


def test_several_prompts_are_blocks_in_order(jaxinfer: Any, letters: list[str]) -> None:
    prompts = ["--prompt", "a", "--prompt", "g", "--prompt", "x\ny c"]
    assert jaxinfer("generate", *letters, *GREEDY, *prompts) == 0
    assert jaxinfer.stdout == "=== 1: a\nbcdefgh\n=== 2: g\nh\n=== 3: x y c\ndefgh\n"
    whole = jaxinfer.stdout
    assert jaxinfer("generate", *letters, *GREEDY, *prompts, "--stream") == 0
    assert jaxinfer.stdout == whole


def test_sampling_options(jaxinfer: Any, letters: list[str]) -> None:
    assert jaxinfer("generate", *letters, "--prompt", "a", "--n", "2", "--seed", "3", "--stop", "f", "--json") == 0
    (result,) = jaxinfer.json_lines()
    assert result["index"] == 0 and result["prompt"] == "a" and result["num_prompt_tokens"] == 1
    first, second = result["outputs"]
    assert first["text"] == second["text"] == "bcde"
    assert [first["index"], second["index"]] == [0, 1]
    assert first["finish_reason"] == "stop" and first["stop_reason"] == "f"


def test_json_stream_adds_up(jaxinfer: Any, letters: list[str]) -> None:
    words = ["--prompt", "a", "--prompt", "e", "--stream", "--json", "--logprobs", "1"]
    assert jaxinfer("generate", *letters, *GREEDY, *words) == 0
    pieces = jaxinfer.json_lines()
    assert len(pieces) > 2
    texts = ["".join(piece["text"] for piece in pieces if piece["index"] == index) for index in (0, 1)]
    assert texts == ["bcdefgh", "fgh"]
    ids = [token for piece in pieces if piece["index"] == 1 for token in piece["token_ids"]]
    assert ids == [*b"fgh", 257]
    best = pieces[0]["logprobs"][0][0]
    assert best["token_id"] == ord("b") and best["token"] == "b" and best["rank"] == 1 and -0.1 < best["logprob"] <= 0


def test_json_stream_has_prompt_logprobs_once(jaxinfer: Any, letters: list[str]) -> None:
    words = ["--prompt", "abc", "--stream", "--json", "--prompt-logprobs", "1"]
    assert jaxinfer("generate", *letters, *GREEDY, *words) == 0
    pieces = jaxinfer.json_lines()
    (scored,) = [piece["prompt_logprobs"] for piece in pieces if "prompt_logprobs" in piece]
    assert scored[0] is None and [position[0]["token"] for position in scored[1:]] == ["b", "c"]
    assert "".join(piece["text"] for piece in pieces) == "defgh"


def test_json_in_a_locale_without_utf_8() -> None:
    program = "from jaxinfer.cli import completion_output as c; c.JsonWriter(['é \U0001f600'], False).refuse(0, 'x')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment)
    assert json.loads(done.stdout)["prompt"] == "é \U0001f600"


def test_a_refused_prompt_leaves_the_others(jaxinfer: Any, letters: list[str]) -> None:
    assert jaxinfer("generate", *letters, *GREEDY, "--prompt", "z" * 200, "--prompt", "a") == 2
    assert jaxinfer.stdout.endswith("\n\n=== 2: a\nbcdefgh\n")
    assert "prompt 1:" in jaxinfer.stderr and "200" in jaxinfer.stderr
    assert jaxinfer("generate", *letters, *GREEDY, "--prompt", "z" * 200, "--prompt", "a", "--json") == 2
    refused, served = jaxinfer.json_lines()
    assert "200" in refused["error"] and refused["outputs"] == []
    assert served["error"] is None and served["outputs"][0]["text"] == "bcdefgh"


def test_defaults_come_from_the_model(jaxinfer: Any, letters: list[str]) -> None:
    config = {"temperature": 0.0, "max_new_tokens": 3}
    (Path(letters[1]) / "generation_config.json").write_text(json.dumps(config))
    assert jaxinfer("generate", *letters, "--prompt", "a") == 0
    assert jaxinfer.stdout == "bcd\n"
    assert jaxinfer("generate", *letters, "--prompt", "a", "--max-tokens", "none") == 0
    assert jaxinfer.stdout == "bcdefgh\n"


def test_the_default_length(jaxinfer: Any, endless: list[str]) -> None:
    endless[endless.index("--max-model-len") + 1] = "256"
    assert jaxinfer("generate", *endless, *GREEDY, "--prompt", "a", "--json") == 0
    assert len(jaxinfer.json_lines()[0]["outputs"][0]["token_ids"]) == 128


def test_chat_uses_the_template(jaxinfer: Any, with_template: Callable[..., Path], letters: list[str]) -> None:
    template = "{% for message in messages %}{{ message.role[0] }}{% endfor %}"  # "su", "u"
    words = ["--chat", "--prompt", "a", "--chat-template", template + "{{ messages[-1].content }}"]
    assert jaxinfer("generate", *letters, *GREEDY, *words, "--system", "b", "--json") == 0
    (result,) = jaxinfer.json_lines()
    assert result["num_prompt_tokens"] == len("sua") and result["outputs"][0]["text"] == "bcdefgh"


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_an_interrupt_ends_the_command(
    jaxinfer: Any, endless: list[str], interrupt_at_step: Callable[[int], None], command: str
) -> None:
    interrupt_at_step(4)
    words = {
        "generate": ["generate", "--prompt", "a", "--stream", *GREEDY],
        "bench": ["bench", "throughput", "--num-prompts", "9", "--input-len", "4", "--output-len", "90"],
    }
    assert jaxinfer(*words[command], *endless) == 130
    assert jaxinfer.stderr == ""
    assert len(jaxinfer.stdout) < 20


def test_blocks_stay_apart_while_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    def delta(index: int, text: str, reason: str | None = None) -> None:
        sample = CompletionOutput(0, text, [], finish_reason=reason)
        writer.write(index, RequestOutput(str(index), None, None, outputs=[sample]))

    writer = BlockWriter(["one", "two", "three"], 1)
    delta(1, "B1")
    delta(0, "A1")
    assert capsys.readouterr().out == "=== 1: one\nA1"
    delta(2, "C1", "stop")
    delta(1, "B2")
    delta(0, "A2", "stop")
    assert capsys.readouterr().out == "A2\n=== 2: two\nB1B2"
    delta(1, "B3", "length")
    assert capsys.readouterr().out == "B3\n=== 3: three\nC1\n"
