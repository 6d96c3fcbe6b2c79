"""JAX traces of a running engine."""

import time
from pathlib import Path

from jaxinfer.cache_dir import default_cache_dir


def start_profile(trace_dir: str | Path | None = None) -> Path:
    """Begins a JAX trace of the whole process.

    Args:
        trace_dir: where `stop_profile` writes it, for TensorBoard or Perfetto; None makes a folder named after the
            time of day under `default_cache_dir()`.

    Returns:
        The folder.

    Raises:
        RuntimeError: a trace is running.
    """
    import jax

    default = default_cache_dir() / "traces" / time.strftime("%Y%m%d-%H%M%S")
    folder = default if trace_dir is None else Path(trace_dir).expanduser()
    jax.profiler.start_trace(str(folder))
    return folder


def stop_profile() -> None:
    """Ends the trace and writes it.

    Raises:
        RuntimeError: no trace is running.
    """
    import jax

    jax.profiler.stop_trace()
