"""RequestLoop: interrupts between two steps, and nothing left behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.loading import load_engine

PROMPT = TokenizedPrompt([*b"a"], "a")
ONE = SamplingParams(temperature=0, max_tokens=1)
LONG = SamplingParams(temperature=0, max_tokens=50)


@pytest.fixture
def engine(scripted_checkpoint: Callable[..., Path]) -> Engine:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    model = scripted_checkpoint([*b"abcd", *b"a"])
    return load_engine(EngineArgs(model, enforce_eager=True, use_tqdm_on_load=False, **sizes), None, None).engine


def texts(loop: RequestLoop) -> dict[str, str]:
    """Steps to the end: the final texts."""
    found = {}
    while len(loop):
        found |= {output.request_id: output.outputs[0].text for output in loop.step() if output.finished}
    return found


def test_requests_come_at_any_time(engine: Engine) -> None:
    with RequestLoop(engine) as loop:
        loop.add("one", PROMPT, LONG)
        assert len(loop) == 1 and loop.step()[0].prompt == "a"
        with pytest.raises(ValueError, match="in use"):
            loop.add("one", PROMPT, ONE)
        loop.add("two", PROMPT, ONE)
        assert len(loop) == 2
        assert texts(loop) == {"one": ("bcda" * 13)[:50], "two": "b"}


def test_what_is_left_is_aborted(engine: Engine) -> None:
    with RequestLoop(engine) as loop:
        for name in ("one", "two", "three"):
            loop.add(name, PROMPT, LONG)
        loop.step()
        loop.abort("two")
        assert len(loop) == 2 and engine.num_unfinished_requests == 2
    assert not engine.has_unfinished_requests()
    with RequestLoop(engine) as loop:
        loop.add("one", PROMPT, ONE)
        assert texts(loop) == {"one": "b"}


def test_an_interrupt_waits_for_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine.step

    def step(engine: Engine) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(engine)

    monkeypatch.setattr(Engine, "step", step)
    before = signal.getsignal(signal.SIGINT)
    outputs = []
    with pytest.raises(KeyboardInterrupt), RequestLoop(engine) as loop:
        loop.add("one", PROMPT, ONE)
        loop.add("two", PROMPT, LONG)
        outputs = loop.step()
        loop.step()
    assert [output.request_id for output in outputs if output.finished] == ["one"]
    assert signal.getsignal(signal.SIGINT) is before
    assert not engine.has_unfinished_requests() and not engine.is_dead


def test_a_failed_step_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(plan: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "execute", execute)
    with pytest.raises(EngineDeadError, match="the device is gone"), RequestLoop(engine) as loop:
        loop.add("one", PROMPT, ONE)
        loop.step()
    with pytest.raises(EngineDeadError), RequestLoop(engine):
        pass
