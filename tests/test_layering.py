"""Imports go one way, and the host side runs without JAX."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each package of jaxinfer may import beside itself; the top level of jaxinfer is "front" (the two front doors)
# except the foundation. A package that is not listed yet has to be put in its place here.
FOUNDATION = {"_version", "cache_dir", "config", "progress_bar", "typing"}
ALLOWED = {
    "foundation": {"models.config"},
    "tokenizers": {"checkpoint.gguf"},  # the file reader: a GGUF file has its tokenizer inside
    "cache": {"foundation", "models.config", "pallas_kernels"},
    "engine": {"foundation", "models.config", "tokenizers"}
    | {"cache.block_manager", "cache.prefix_cache", "cache.sight"},
    "sampling": {"foundation", "engine"},
    "quant": {"foundation", "pallas_kernels"},
    "models": {"foundation", "quant", "pallas_kernels"},
    "checkpoint": {"foundation", "models", "quant", "tokenizers", "calibration"},
    # What a checkpoint is, and what the engine accepts today, read when a plan is asked for.
    "planning": {"foundation", "models", "cache", "checkpoint", "startup.args", "sharding.model_split"},
    "calibration": {"foundation", "models", "quant", "tokenizers", "pallas_kernels"},
    "sharding": {"foundation", "models", "quant"},
    "runner": {"foundation", "models", "quant", "cache", "engine", "sampling", "planning", "pallas_kernels"}
    | {"sharding"},
    "speculation": {"foundation", "engine", "sampling", "cache.block_manager"},
    "startup": {"foundation", "models", "quant", "engine", "runner", "checkpoint", "planning", "tokenizers"}
    | {"speculation", "sharding"},
    "serving": {"foundation", "engine", "tokenizers"},
    "front": {"foundation", "models.config", "engine", "startup", "serving", "tokenizers"},
    "openai": {"foundation", "engine", "tokenizers", "serving"},
    "cluster": {"foundation", "engine", "tokenizers", "startup", "serving", "openai"},
    "bench": {"foundation", "engine", "serving"},
    "evaluation": {
        "foundation",
        "models",
        "cache",
        "engine",
        "runner",
        "checkpoint",
        "planning",
        "tokenizers",
        "serving",
    }
    | {"startup", "sharding"},
    # It writes what it has trained, and has the engine write texts to learn from.
    # With the engine's own tiles it scores what the engine writes, to the bit.
    "training": {"foundation", "models", "checkpoint", "tokenizers", "engine", "front", "cache", "runner"}
    | {"sampling"},
    "cli": {"foundation", "models", "engine", "runner", "checkpoint", "planning", "tokenizers", "startup", "serving"}
    | {"quant", "calibration", "front", "openai", "cluster", "bench", "evaluation", "training"},
}
HOST_ONLY = [
    *sorted((ROOT / "jaxinfer/engine").glob("*.py")),
    ROOT / "jaxinfer/cache/block_manager.py",
    ROOT / "jaxinfer/cache/prefix_cache.py",
]


def source_files() -> list[Path]:
    return sorted([*(ROOT / "jaxinfer").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere; `from package import module` gives the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def place(module: str) -> str:
    """The part of the project that a module belongs to: a key of `ALLOWED`, or "pallas_kernels"."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if len(parts) == 1:
        return "foundation" if module == "jaxinfer" else module
    if parts[1] in FOUNDATION:
        return "foundation"
    return parts[1] if (ROOT / "jaxinfer" / parts[1]).is_dir() else "front"


def may_import(importer: str, imported: str) -> bool:
    part = place(imported)
    inside = imported.removeprefix("jaxinfer.")
    return part == place(importer) or part in ALLOWED[place(importer)] or inside in ALLOWED[place(importer)]


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_arrows_point_one_way(path: Path) -> None:
    importer = module_name(path)
    own = [module for module in imported_modules(path) if module.split(".")[0] in ("jaxinfer", "pallas_kernels")]
    if importer in ("jaxinfer", "jaxinfer.__main__"):
        return  # public names, loaded when used; the way into cli
    if place(importer) == "pallas_kernels":
        assert [module for module in own if place(module) != "pallas_kernels"] == []
        return
    assert [module for module in own if not may_import(importer, module)] == []


@pytest.mark.parametrize("path", HOST_ONLY, ids=module_name)
def test_host_files_do_not_name_jax(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported_modules(path)} & {"jax", "jaxlib", "flax", "pallas_kernels"}


def test_host_side_loads_without_jax() -> None:
    modules = ", ".join(module_name(path) for path in HOST_ONLY)
    program = f"import {modules}, sys; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
