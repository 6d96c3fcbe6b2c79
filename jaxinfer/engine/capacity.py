"""Capacity: how much of the KV pool a request takes, and what never fits. Arithmetic."""

from jaxinfer.cache.sight import BlockSight


class Capacity:
    """The pool as one request sees it that is alone in it.

    Args:
        num_blocks: blocks that can be allocated.
        sight: which blocks a request still needs.
        chunk: tokens computed in a step at most.
    """

    def __init__(self, num_blocks: int, sight: BlockSight, chunk: int) -> None:
        self._num_blocks = num_blocks
        self._num_slots = num_blocks * sight.block_size
        self._sight = sight
        self._chunk = chunk

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Refuses a prompt that the pool cannot hold even when it is alone.

        Raises:
            ValueError: with the blocks needed and available.
        """
        needed = self._sight.most_blocks(num_prompt_tokens, 1)
        if needed > self._num_blocks:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens needs {needed} KV blocks of {self._sight.block_size} tokens, "
                f"but the pool has {self._num_blocks} ({self._num_slots} tokens); shorten the prompt, or make the pool "
                "larger (num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization)"
            )

    def bound(self, max_total_tokens: int) -> int:
        """At most as many tokens as a request can have before it fills the pool. The token drawn last is never
        computed and needs no slot."""
        if self._sight.most_blocks(max(1, max_total_tokens - 1), 1) <= self._num_blocks:
            return max_total_tokens
        return self._num_slots + 1

    def blocks_ahead(self, num_tokens: int, num_computed: int, num_entries: int) -> int:
        """Blocks that a request lacks until it has computed `num_tokens` tokens.

        Args:
            num_tokens: what it is to reach, at least 1.
            num_computed: tokens it has computed.
            num_entries: entries of its block table.
        """
        missing = max(0, -(-num_tokens // self._sight.block_size) - num_entries)
        if self._sight.window is None or not missing:
            return missing
        held = num_entries - min(num_entries, self._sight.num_hidden(num_computed))
        most = min(self._sight.most_blocks(num_tokens, self._chunk), self._num_blocks)
        return max(0, min(missing, most - held))
