"""Where jaxinfer keeps what it can make again: downloaded models and compiled programs."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$JAXINFER_CACHE_DIR, else $XDG_CACHE_HOME/jaxinfer, else ~/.cache/jaxinfer. Nothing is created.

    The one place outside the command line that reads the environment: `LLM()` has to work without it.
    """
    own = os.environ.get("JAXINFER_CACHE_DIR")  # noqa: TID251
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251
    return (Path(shared) if shared else Path.home() / ".cache") / "jaxinfer"
