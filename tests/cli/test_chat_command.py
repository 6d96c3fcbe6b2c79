"""jaxinfer chat."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The answer tells how many messages there are: one begins with b, two with c, ...
COUNTING = "{{ 'abcdefgh'[messages | length - 1] }}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_turns_from_a_pipe(jaxinfer: Any, letters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n/reset\nnew\n/quit\nunread\n"))
    assert jaxinfer("chat", *without_seqs(letters), "--temperature", "0", "--chat-template", COUNTING) == 0
    assert jaxinfer.stdout == "bcdefgh\ndefgh\nbcdefgh\n"
    assert jaxinfer.stderr == ""


def test_a_system_message_begins_each_conversation(
    jaxinfer: Any, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/reset\nnew"))
    words = ["--temperature", "0", "--system", "be brief", "--chat-template", COUNTING]
    assert jaxinfer("chat", *without_seqs(letters), *words) == 0
    assert jaxinfer.stdout == "cdefgh\ncdefgh\n"


def test_a_message_that_is_too_long_is_left_out(
    jaxinfer: Any, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages | map(attribute='content') | join('') }}"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'x' * 300}\na\n"))
    assert jaxinfer("chat", *without_seqs(letters), "--temperature", "0", "--chat-template", template) == 2
    assert jaxinfer.stdout == "bcdefgh\n"
    assert "300" in jaxinfer.stderr


def test_interrupt_stops_the_answer_only(
    jaxinfer: Any, endless: list[str], interrupt_at_step: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_step(5)
    messages = iter(["one", "two"])
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        try:
            return next(messages)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    words = ["--temperature", "0", "--max-tokens", "8", "--chat-template", COUNTING]
    assert jaxinfer("chat", *without_seqs(endless), *words) == 0
    first, second, end = jaxinfer.stdout.split("\n", 2)
    assert "bcdefgha".startswith(first.removesuffix(" ...")) and first.endswith(" ...") and len(first) < 12
    assert second == "defghabc"  # the third message: the first answer is part of the conversation
    assert end == "\n" and asked == ["> "] * 3


def test_interrupt_of_piped_messages_ends_the_line_and_the_command(
    jaxinfer: Any, endless: list[str], interrupt_at_step: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_step(4)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert jaxinfer("chat", *without_seqs(endless), "--temperature", "0", "--chat-template", COUNTING) == 130
    assert jaxinfer.stdout.endswith(" ...\n") and jaxinfer.stdout.count("\n") == 1 and jaxinfer.stderr == ""


def test_interrupt_at_the_prompt_leaves(jaxinfer: Any, letters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert jaxinfer("chat", *without_seqs(letters)) == 130


def test_a_model_without_template(
    jaxinfer: Any, scripted_checkpoint: Callable[..., Path], letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = scripted_checkpoint([*b"abc", 257], name="plain")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert jaxinfer("chat", *without_seqs(["--model", str(plain), *letters[2:]])) == 2
    assert "chat template" in jaxinfer.stderr


def without_seqs(options: list[str]) -> list[str]:
    place = options.index("--max-num-seqs")
    return [*options[:place], *options[place + 2 :]]
