"""Batch files: reading requests, and appending results that survive a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.openai.batch_input import batch_keys, read_batch
from jaxinfer.openai.batch_output import BatchOutput

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def result(custom_id: str | None, name: str = "1") -> dict[str, Any]:
    return {"id": f"jaxinfer-{name}", "custom_id": custom_id, "response": {}, "error": None}


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\n  \n" + json.dumps({**GOOD, "custom_id": "b"}).encode()
    )
    first, second = read_batch(path)
    assert (first.number, first.key, first.url, first.body) == (1, "a", "/v1/completions", {"prompt": "x"})
    assert (second.number, second.key, second.error) == (4, "b", None)


@pytest.mark.parametrize(
    ("line", "key", "named"),
    [
        (b"{", 2, "line 2 is not JSON"),
        (b"[1]", 2, "line 2 is not a JSON object"),
        (b'"\xff"', 2, "line 2 is not JSON"),
        (b"[" * 100_000, 2, "line 2 is not JSON"),
        ({**GOOD, "custom_id": None}, 2, "custom_id=None"),
        ({**GOOD, "custom_id": 5}, 2, "custom_id=5"),
        ({**GOOD, "method": "GET"}, "a", "method='GET'"),
        ({**GOOD, "url": "/v1/embeddings"}, "a", "url='/v1/embeddings'"),
        ({**GOOD, "url": ["x"]}, "a", "url=['x']"),
        ({**GOOD, "body": "x"}, "a", "body='x'"),
        ({**GOOD, "priority": 1}, "a", "priority"),
    ],
)
def test_bad_lines_say_why(tmp_path: Path, line: Any, key: str | int, named: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" + (line if isinstance(line, bytes) else json.dumps(line).encode()))
    (read,) = read_batch(path)
    assert read.key == key and named in (read.error or "")


def test_a_custom_id_names_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n?\n?\n{json.dumps({**GOOD, 'custom_id': 'b'})}\n")
    assert batch_keys(path) == {"a", "b", 2, 3}
    path.write_text(f"{json.dumps(GOOD)}\n?\n{json.dumps(GOOD)}\n")
    with pytest.raises(ValueError, match="lines 1 and 3 have the same custom_id 'a'"):
        batch_keys(path)


def test_results_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        assert output.done == set()
        output.write([result("a"), result(None, "line-3")])
        output.write([result("\ud800 é")])
    with BatchOutput(path) as output:
        assert output.done == {"a", 3, "\ud800 é"}
        output.write([result("b")])
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", None, "\ud800 é", "b"]


def test_a_torn_end_is_cut_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = (json.dumps(result("a")) + "\n").encode()
    torn = (json.dumps(result("b")) + "\n").encode()
    for length in range(len(torn)):
        for padding in (b"", b"\0" * 40):
            path.write_bytes(whole + torn[:length] + padding)
            with BatchOutput(path) as output:
                assert output.done == {"a"}
                output.write([result("b")])
            assert path.read_bytes() == whole + torn


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"id": 1}\n', b'{"id": "jaxinfer-1"}\n', b"[]\n"])
def test_foreign_files_stay_as_they_are(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    for before in (b"", json.dumps(result("a")).encode() + b"\n"):
        path.write_bytes(before + content)
        with pytest.raises(ValueError, match="not the result of a batch job"):
            BatchOutput(path)
        assert path.read_bytes() == before + content


def test_one_job_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path), pytest.raises(ValueError, match="another job"):
        BatchOutput(path)
    BatchOutput(path).__exit__(None, None, None)
