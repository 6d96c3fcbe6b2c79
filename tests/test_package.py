"""What pip installs: the wheel, its declared dependencies, and imports without side effects."""

import ast
import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Import names that differ from the names of their distributions.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "jax_triton": "jax-triton"}


def package_files() -> set[str]:
    files = [*(ROOT / "jaxinfer").rglob("*"), *(ROOT / "pallas_kernels").rglob("*")]
    return {str(f.relative_to(ROOT)) for f in files if f.is_file() and "__pycache__" not in f.parts}


def requirement_name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def test_every_import_is_declared() -> None:
    declared = {requirement_name(r) for r in PROJECT["dependencies"]}
    for extra in ("cuda12", "plot", "ray", "train"):
        declared |= {requirement_name(r) for r in PROJECT["optional-dependencies"][extra]}
    for path in [*(ROOT / "jaxinfer").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.split(".")[0] for name in names} - {"jaxinfer", "pallas_kernels"}:
                known = name in sys.stdlib_module_names or requirement_name(DISTRIBUTIONS.get(name, name)) in declared
                assert known, f"{path.relative_to(ROOT)} imports {name}, which pyproject.toml does not declare"


IMPORT_EVERYTHING = """
import importlib, json, os, signal, sys, threading
before = dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()}, threading.active_count()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()}, threading.active_count()
from jax._src import xla_bridge
print(json.dumps({
    "environment": sorted(set(before[0].items()) ^ set(after[0].items())),
    "signals": [str(s) for s in before[1] if before[1][s] != after[1][s]],
    "threads": after[2] - before[2],
    "backends": xla_bridge.backends_are_initialized(),
}))
"""


def module_names() -> list[str]:
    names = [f.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for f in package_files() if ".py" in f]
    return sorted(name for name in names if not name.endswith(("__main__", ".typed")))


def test_importing_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORT_EVERYTHING, *module_names()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"environment": [], "signals": [], "threads": 0, "backends": False}
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    from jaxinfer._version import __version__

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"jaxinfer-{__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(info)} == package_files()
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "jaxinfer = jaxinfer.cli.main:main" in scripts


GENERATE = """
import sys
from jaxinfer import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], enforce_eager=True)
    for output in llm.generate(["a", "c"], SamplingParams(temperature=0, max_tokens=50), use_tqdm=False):
        print(output.outputs[0].text, output.outputs[0].finish_reason)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_environment_generates(wheel: Path, scripted_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = scripted_checkpoint([*b"abcdefgh", 257])
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)

    def run(*command: str) -> str:
        program = environment / "bin" / command[0]
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pip", "install", "--quiet", str(wheel))
    run("pip", "check")
    assert run("python", "-c", GENERATE, str(model)).splitlines() == ["bcdefgh stop", "defgh stop"]
    assert wheel.name.split("-")[1] in run("jaxinfer", "--version")
    options = ["--max-tokens", "50", "--temperature", "0"]
    assert "bcdefgh" in run("jaxinfer", "generate", "--model", str(model), "--prompt", "a", *options)
    assert "bcdefgh" in run("python", "-m", "jaxinfer", "generate", "--model", str(model), "--prompt", "a", *options)
