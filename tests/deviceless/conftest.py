"""Compiling for GPUs that are not here needs JAX's CUDA plugin, which the CPU suite runs without."""

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("jax_cuda12_plugin") is not None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deviceless)
            if not found:
                item.add_marker(pytest.mark.skip(reason="no CUDA plugin: run scripts/test.sh --deviceless"))


@pytest.fixture(params=["a100-80g", "rtx4090", "h100", "h200"])
def gpu(request: pytest.FixtureRequest) -> str:
    """Each of the GPU models in turn."""
    return request.param
