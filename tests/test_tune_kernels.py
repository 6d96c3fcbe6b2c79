"""scripts/tune_kernels.py: what it chooses, that candidates reach the kernels, and the tables it writes."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from pallas_kernels.dispatch import Device

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "tune_kernels.py"
H200 = Device("gpu", "NVIDIA H200", (9, 0), 132)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_kernels_under_test", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


class FakeLowered:
    """Compiles to nothing."""

    def compile(self) -> Any:
        return SimpleNamespace(memory_analysis=lambda: None)


@pytest.fixture
def choose(script: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """What a search chooses when its candidates take these times; a string is an error's message."""
    from scripts.gpu_checks.case import Case, Program

    def run(without: float | str, times: dict[tuple[int, ...], float | str]) -> Any:
        module = SimpleNamespace(TILES=MappingProxyType({"other": (9,), "key": (8,)}))

        def cases() -> list[Case]:
            assert module.TILES["other"] == (9,)
            outcome = times.get(module.TILES.get("key"), without)
            lowered = SimpleNamespace(lower=FakeLowered)

            def act(*_: Any) -> dict[str, Any]:
                if isinstance(outcome, str):
                    raise RuntimeError(outcome)
                return {"us": outcome}

            return [Case("prefill", "a case", act, (Program("a program", lowered, ()),))]

        search = SimpleNamespace(
            name="a search", module=module, table="TILES", key="key", candidates=tuple(times), cases=cases
        )
        args = script.parse_args(["--out", str(tmp_path), "--threads", "1"])
        session = script.make_session(args)
        try:
            return script.run_search(session, search)
        finally:
            session.programs.close()
            assert module.TILES["key"] == (8,)

    return run


def test_the_fastest_right_candidate_wins(choose: Callable[..., Any]) -> None:
    assert choose(100.0, {(1,): 90.0, (2,): 80.0, (3,): 85.0}) == (2,)
    assert choose(100.0, {(1,): "too much shared memory", (2,): 97.0}) == (2,)
    assert choose("wrong", {(1,): 900.0}) == (1,)


def test_without_a_gain_there_is_no_entry(choose: Callable[..., Any]) -> None:
    assert choose(100.0, {(1,): 99.0, (2,): 120.0}) is None
    assert choose(100.0, {(1,): "wrong"}) is None


def test_candidates_reach_the_kernels(script: ModuleType, tmp_path: Path) -> None:
    from scripts.tuning.searches import searches

    args = script.parse_args(["--rehearse", "--out", str(tmp_path)])
    session = script.make_session(args)
    (search,) = searches(session, "cpu", ["decode"], [16])
    texts = []
    for candidate in ((16, 16, 4, 3, False), (16, 32, 4, 3, False)):
        ((_, programs),) = script.trace(search, candidate)
        texts.append(programs[0].function.lower().as_text())
    session.programs.close()
    assert texts[0] != texts[1]


def test_a_table_is_merged_and_the_rest_of_its_file_kept(tmp_path: Path) -> None:
    from scripts.tuning.table import merge_into, read_tables

    source = ROOT / "pallas_kernels" / "paged_attention" / "measured.py"
    path = tmp_path / "measured.py"
    path.write_text(source.read_text())
    first, second = ("NVIDIA H200", 16, 128, "int8"), ("NVIDIA A100", 16, 128, "int8")
    merge_into(path, "TILES", {first: (16, 64, 4, 5, False)})
    merge_into(path, "TILES", {second: (16, 32, 4, 3, True)})
    merge_into(path, "TILES", {first: (16, 128, 8, 5, False)})
    merge_into(path, "PIECES", {"NVIDIA H200": (2, 128)})
    tables = read_tables(path)
    before = read_tables(source)
    assert tables["TILES"] == before["TILES"] | {first: (16, 128, 8, 5, False), second: (16, 32, 4, 3, True)}
    assert tables["PIECES"] == before["PIECES"] | {"NVIDIA H200": (2, 128)}
    text = path.read_text()
    assert text.startswith(source.read_text().split("TILES")[0])
    assert text.index("NVIDIA A100") < text.index("NVIDIA H200")
    ruff = [sys.executable, "-m", "ruff", "format", "--check", "--config", str(ROOT / "pyproject.toml"), str(path)]
    assert subprocess.run(ruff, capture_output=True).returncode == 0
    with pytest.raises(ValueError, match="'TILE'.*TILES, PIECES"):
        merge_into(path, "TILE", {})


def test_the_kernels_take_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from pallas_kernels.flash_attention import measured as flash
    from pallas_kernels.flash_attention.config import Tiles, tile_set
    from pallas_kernels.paged_attention import measured as paged
    from pallas_kernels.paged_attention.config import TileConfig, split_policy, tile_config

    monkeypatch.setattr(paged, "TILES", {(H200.kind, 16, 128, "int8"): (16, 32, 2, 4, True)})
    monkeypatch.setattr(paged, "PIECES", {H200.kind: (8, 1024)})
    monkeypatch.setattr(flash, "DQ", {(H200.kind, 128): (16, 32, 2, 4)})
    sizes = {"block_m": 16, "group": 4, "head_dim": 128, "dtype": "bfloat16"}
    assert tile_config(H200, pages_dtype="int8", **sizes) == TileConfig(16, 32, 2, 4, True)
    assert tile_config(H200, pages_dtype="uint8", **sizes) != TileConfig(16, 32, 2, 4, True)
    policy = split_policy(H200, num_tokens=4, num_rows=4, group=4, num_kv_heads=8, head_dim=128)
    assert (policy.short.pieces, policy.short.min_piece) == (8 * 132 // 8, 1024)
    tiles = tile_set(H200, np.dtype("float16"), 96)
    assert tiles.dq == Tiles(16, 32, 2, 4) and tiles.forward != tiles.dq != tiles.dkv


def test_without_a_gpu_it_refuses() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OUT"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "no GPU" in done.stderr and "measured on the GPU they are for" in done.stderr


@pytest.mark.parametrize("arguments", [["--rehearse"], ["--head-dim", "512"]])
def test_bad_arguments(script: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit, match="2"):
        script.parse_args(arguments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_writes_every_table(tmp_path: Path) -> None:
    from scripts.tuning.table import read_tables

    command = [sys.executable, SCRIPT, "--rehearse", "--out", tmp_path, "--head-dim", "32", "--threads", "2"]
    done = subprocess.run([*command, "--budget", "1500"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paged, flash = (read_tables(tmp_path / f"{name}_attention_measured.py") for name in ("paged", "flash"))
    assert set(paged["TILES"]) == {("cpu", 16, 32, "int8"), ("cpu", 64, 32, "bfloat16")}
    assert set(paged["PIECES"]) == {"cpu"}
    assert all(set(flash[table]) == {("cpu", 64)} for table in ("FORWARD", "DQ", "DKV"))
    assert " us" not in done.stdout  # a rehearsal claims no times
