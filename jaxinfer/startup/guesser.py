"""Guesser: what a method of speculation loads, before it is loaded."""

from pathlib import Path
from typing import Protocol

from jaxinfer.cache_dir import default_cache_dir
from jaxinfer.checkpoint.resolve import resolve_model
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.speculation_options import SpeculativeOptions


class Guesser(Protocol):
    """A model or heads that guess, checked against the target; their weights are not read yet."""

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of its parameters on the device, for activations of this dtype."""
        ...

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Bytes of a block in a pool of its own; 0 where it has none."""
        ...

    def tree_depth(self, num_tokens: int) -> int:
        """How deep its trees of `num_tokens` tokens may be; 0 where its drafts are chains."""
        ...

    def step_bytes(self, vocab_size: int, num_running: int, num_tokens: int) -> int:
        """Bytes that it holds while it guesses, beside weights and pools.

        Args:
            vocab_size: of the target.
            num_running: requests that it guesses for, at most.
            num_tokens: guesses for each, at most.
        """
        ...


def guesser_path(args: EngineArgs, options: SpeculativeOptions) -> Path:
    """Where the model or heads lie that the options name.

    Args:
        args: settings of the engine.
        options: with a `model`.

    Raises:
        ValueError: there is none.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    assert options.model is not None
    token = None if args.hf_token is True else args.hf_token
    return resolve_model(options.model, revision=options.revision, token=token, cache_dir=default_cache_dir())
