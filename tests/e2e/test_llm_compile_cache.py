"""Field case 17 in processes of their own: programs are kept by default and found again; a bad folder only warns."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
from jax import monitoring
from jaxinfer import LLM, SamplingParams
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
options = {} if sys.argv[2] == "default" else {"compilation_cache_dir": eval(sys.argv[2])}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    llm = LLM(sys.argv[1], enforce_eager=True, **options)
    (output,) = llm.generate([5], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(output.outputs[0].token_ids, len(hits), [str(w.message)[:21] for w in caught], sep=";")
"""


def serve(model: Path, cache: Path, setting: str = "default") -> tuple[str, int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), setting],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "JAXINFER_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    ids, hits, warned = done.stdout.strip().split(";")
    return ids, int(hits), warned


@pytest.mark.slow
def test_programs_are_kept_between_processes(scripted_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model, cache = scripted_checkpoint([5, 6, 7, 5]), tmp_path / "cache"
    assert serve(model, cache, "False") == ("[6, 7, 5, 6]", 0, "[]")
    assert not cache.exists()
    assert serve(model, cache) == ("[6, 7, 5, 6]", 0, "[]")
    assert list((cache / "programs").glob("*-cache"))
    ids, hits, warned = serve(model, cache)
    assert (ids, warned) == ("[6, 7, 5, 6]", "[]") and hits > 0

    blocked = tmp_path / "file"
    blocked.write_text("")
    assert serve(model, cache, repr(str(blocked / "cache"))) == ("[6, 7, 5, 6]", 0, "['compilation_cache_dir']")
