"""Checkpoints: finding them, checking them, streaming them into parameters, and writing them."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_checkpoint, load_params, resolve_dtype
from jaxinfer.checkpoint.name_map import Sources
from jaxinfer.checkpoint.resolve import resolve_model

if TYPE_CHECKING:
    from jaxinfer.checkpoint.convert import convert_checkpoint
    from jaxinfer.checkpoint.orbax import load_orbax, save_checkpoint
    from jaxinfer.checkpoint.quantize import quantize_checkpoint

__all__ = [
    "Checkpoint",
    "Sources",
    "convert_checkpoint",
    "load_checkpoint",
    "load_orbax",
    "load_params",
    "open_checkpoint",
    "quantize_checkpoint",
    "resolve_dtype",
    "resolve_model",
    "save_checkpoint",
]

# Imported when first asked for: Orbax takes seconds, and reading headers needs not even JAX.
_WRITERS = {
    "convert_checkpoint": "convert",
    "load_orbax": "orbax",
    "quantize_checkpoint": "quantize",
    "save_checkpoint": "orbax",
}


def __getattr__(name: str) -> Any:
    if name not in _WRITERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WRITERS[name]}"), name)
