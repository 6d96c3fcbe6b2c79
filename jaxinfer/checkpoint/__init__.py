"""Checkpoints: finding them, checking them, and streaming them into parameters."""

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params, resolve_dtype
from jaxinfer.checkpoint.resolve import resolve_model

__all__ = ["Checkpoint", "load_params", "open_checkpoint", "resolve_dtype", "resolve_model"]
