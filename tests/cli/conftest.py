"""The command line on small models, in this process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.cli.main import main

LETTERS = [*b"abcdefgh", 257]  # after each letter the next, after h the end
ENDLESS = [*b"abcdefgh", *b"a"]


class Command:
    """Runs `jaxinfer` and keeps what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.stdout = ""
        self.stderr = ""

    def __call__(self, *words: str | Path) -> int:
        """Returns the exit status."""
        self._capsys.readouterr()
        status = main([str(word) for word in words])
        self.stdout, self.stderr = self._capsys.readouterr()
        assert "Traceback" not in self.stderr
        return status

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


@pytest.fixture
def jaxinfer(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def with_template(scripted_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`with_template(script, template)`: a scripted checkpoint with a chat template."""

    def make(script: Sequence[int], template: str = "{{ messages[-1].content }}") -> Path:
        folder = scripted_checkpoint(script)
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
        return folder

    return make


@pytest.fixture
def letters(with_template: Callable[..., Path]) -> list[str]:
    """Engine options of a model that goes through the letters a to h and ends."""
    return small_engine(with_template(LETTERS))


@pytest.fixture
def endless(with_template: Callable[..., Path]) -> list[str]:
    """Engine options of a model that goes through the letters for ever."""
    return small_engine(with_template(ENDLESS))


@pytest.fixture
def interrupt_at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`interrupt_at_step(n)`: Ctrl-C comes while the n-th step runs."""
    import os
    import signal

    from jaxinfer.engine.engine import Engine

    def install(number: int) -> None:
        original, count = Engine.step, 0

        def step(engine: Engine) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGINT)
            return original(engine)

        monkeypatch.setattr(Engine, "step", step)

    return install


def small_engine(model: Path) -> list[str]:
    sizes = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-logprobs", "3"]
    return ["--model", str(model), "--enforce-eager", *sizes]
