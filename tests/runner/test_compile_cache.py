"""The persistent compile cache: hit by a second process; a bad folder warns and works; the user's own stays."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, warnings
import jax, jax.numpy as jnp
from jax import monitoring
from jaxinfer.runner.compile_cache import enable_compile_cache
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
if len(sys.argv) > 2:
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    enabled = enable_compile_cache(sys.argv[1])
    value = jax.jit(lambda x: (x * 3 + 1).sum())(jnp.arange(7.0))
print(enabled, float(value), events.count("/jax/compilation_cache/cache_hits"), len(caught),
      jax.config.jax_compilation_cache_dir)
"""


def run(*folders: Path) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def test_second_process_hits_and_a_corrupted_entry_is_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    assert run(cache)[:4] == ["True", "70.0", "0", "0"]
    enabled, value, hits, warned, _ = run(cache)
    assert (enabled, value, warned) == ("True", "70.0", "0")
    assert int(hits) >= 1

    for entry in cache.glob("*-cache"):
        entry.write_bytes(b"\0garbage\0")
    enabled, value, hits, warned, _ = run(cache)
    assert (enabled, value, hits) == ("True", "70.0", "0")
    assert int(warned) >= 1


def test_unwritable_folder_warns_and_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(blocked / "cache") == ["False", "70.0", "0", "1", "None"]


def test_a_folder_the_process_has_set_stays(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert run(tmp_path / "ours", own) == ["False", "70.0", "0", "0", str(own)]
    assert not (tmp_path / "ours").exists()
