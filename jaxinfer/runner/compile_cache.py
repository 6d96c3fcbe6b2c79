"""JAX's persistent compilation cache, pointed at a folder of ours."""

import logging
import tempfile
import warnings
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def enable_compile_cache(path: str | Path) -> bool:
    """Keeps compiled programs in `path`, so that a second process loads them instead of compiling. Every program is
    kept, however quick it was to compile: the second start is to take seconds.

    The setting is JAX's and holds for the process. A folder that is already set, by the user or for an earlier engine,
    stays; so do thresholds the user has changed. A folder that cannot be written is given up with a warning, and JAX
    itself warns about and recompiles an entry that it cannot read.

    Returns:
        Whether programs are kept in `path`.
    """
    path = Path(path).expanduser()
    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if current is not None:
        if Path(current) != path:
            logger.info("the compilation cache stays at %s, which this process set first, not %s", current, path)
        return Path(current) == path
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        warnings.warn(
            f"compilation_cache_dir={str(path)!r} cannot be written ({error}); programs are compiled again at every "
            "start. Give a writable folder, or False to keep none.",
            stacklevel=2,
        )
        return False
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Only where they have JAX's defaults.
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # type: ignore[attr-defined]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.config.jax_persistent_cache_min_entry_size_bytes == 0:  # type: ignore[attr-defined]
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True
