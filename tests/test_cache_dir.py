"""Where cached files go."""

from pathlib import Path

import pytest

from jaxinfer.cache_dir import default_cache_dir


def test_the_environment_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "~/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert default_cache_dir() == Path("/home/someone/own")
    monkeypatch.delenv("JAXINFER_CACHE_DIR")
    assert default_cache_dir() == Path("/shared/jaxinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("/home/someone/.cache/jaxinfer")
