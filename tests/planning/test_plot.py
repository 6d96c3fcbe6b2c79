"""The picture of memory against context."""

from pathlib import Path

import pytest

from jaxinfer.planning import recommend_config
from jaxinfer.planning.memory_plan import MemoryPlan
from jaxinfer.planning.plot import context_curves, plot_plan


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    found = recommend_config("4090", "llama-3-8b", 4, context=2048, quant="fp16", kv_cache_dtype="auto").plan
    assert found is not None
    return found


def test_curves(plan: MemoryPlan) -> None:
    """4 requests of up to 8,192 tokens, the model's longest: 4 x 2,731 + 2 x 5,461 tokens, and a block and a half."""
    plain, eight, four = context_curves(plan)
    assert [curve.kv_dtype for curve in (plain, eight, four)] == ["auto", "int8", "int4"]
    assert plain.contexts[-1] == 8192
    rest = plan.weights + plan.step.total
    assert plain.num_bytes[-1] == rest + (1366 + 2) * 16 * 131_072
    assert eight.num_bytes[-1] == rest + (1366 + 2) * 16 * 67_584
    for curve in (plain, eight, four):
        assert list(curve.num_bytes) == sorted(curve.num_bytes)
        assert curve.num_bytes[0] - rest < 2**24


def test_without_matplotlib(plan: MemoryPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="--plot needs matplotlib.*pip install 'jaxinfer"):
        plot_plan(plan, "title", tmp_path / "plan.png")


def test_a_picture(plan: MemoryPlan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_plan(plan, "title", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
