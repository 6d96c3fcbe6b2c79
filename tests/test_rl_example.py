"""scripts/rl_example.py in short: the reward rises, ratios begin at exactly 1, and nothing is compiled again."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "rl_example.py"


def test_reward_rises(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optax")
    spec = importlib.util.spec_from_file_location("rl_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.reward_of("Aue. x!") == 3 / 4
    assert script.main(["--steps", "8", "--max-tokens", "8"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 8
    for line in lines:
        _, reward, distance, milliseconds, recompiled = line.split()[:5]
        assert 0 <= float(reward) <= 1 and float(distance) == 0.0 and float(milliseconds) > 0 and recompiled == "0"
    assert last.endswith("0 recompilations; the first ratios were all 1: True")
    before, after = (float(word.rstrip(";")) for word in (last.split()[1], last.split()[3]))
    assert after > before + 0.1
