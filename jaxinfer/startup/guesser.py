"""Guesser: what a method of speculation loads, before it is loaded."""

from typing import Protocol


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
