"""The block manager: which blocks of the KV pool are whose. HOST: plain integers, no device memory."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from jaxinfer.config import CacheConfig

PADDING_BLOCK = 0
"""Where padding rows write; never allocated."""


class BlockOwner(Protocol):
    """Anything with a block table; a Request is one. Compared by identity."""

    block_ids: list[int]

    def __hash__(self) -> int: ...


class BlockManager:
    """Hands out blocks on demand and takes them back when their last owner lets go.

    A block freed while a step that writes to it is in flight may be handed out at once: steps run in order on the
    device, so that the new owner's writes come later.

    Args:
        config: sizes of the pool.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks - 1
        """Blocks that can be allocated."""
        # A stack: the block freed last is used first, so that a lightly used pool stays in few pages.
        self._free = list(range(self.num_blocks, PADDING_BLOCK, -1))
        self._num_refs = [0] * config.num_blocks
        self._owners: set[BlockOwner] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks with an owner; one that several share counts once."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner: BlockOwner, num_tokens: int) -> bool:
        """Grows the owner's block table until it holds `num_tokens` tokens; never shrinks it.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        needed = self.blocks_for(num_tokens) - len(owner.block_ids)
        if needed > len(self._free):
            return False
        if needed > 0:
            self._owners.add(owner)
            for _ in range(needed):
                block = self._free.pop()
                self._num_refs[block] = 1
                owner.block_ids.append(block)
        return True

    def share(self, owner: BlockOwner, block_ids: Sequence[int]) -> None:
        """Appends blocks that others own to the owner's table. They are to be full: nobody may write to them again.

        Raises:
            ValueError: a block has no owner, so its contents may be anybody's.
        """
        for block in block_ids:
            if block == PADDING_BLOCK or self._num_refs[block] == 0:
                raise ValueError(f"block {block} has no owner and cannot be shared; allocate blocks instead")
        if block_ids:
            self._owners.add(owner)
        for block in block_ids:
            self._num_refs[block] += 1
            owner.block_ids.append(block)

    def free(self, owner: BlockOwner) -> None:
        """Empties the owner's block table; blocks that nobody else owns are free again."""
        for block in reversed(owner.block_ids):
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free.append(block)
        owner.block_ids.clear()
        self._owners.discard(owner)

    def check_integrity(self) -> None:
        """Compares free list, counts and block tables; linear in the pool.

        Raises:
            RuntimeError: a block is lost, owned and free at once, or counted wrongly.
        """
        held = Counter(block for owner in self._owners for block in owner.block_ids)
        free = Counter(self._free)
        if PADDING_BLOCK in held or PADDING_BLOCK in free or self._num_refs[PADDING_BLOCK]:
            raise RuntimeError(f"block {PADDING_BLOCK} is the padding sink, yet it is in use")
        for block in range(1, self.num_blocks + 1):
            if self._num_refs[block] != held[block]:
                raise RuntimeError(f"block {block} counts {self._num_refs[block]} references but has {held[block]}")
            if free[block] != (0 if held[block] else 1):
                raise RuntimeError(f"block {block} has {held[block]} owners and is {free[block]} times free")
        if len(self._free) + len(held) != self.num_blocks:
            raise RuntimeError(f"{len(self._free)} free and {len(held)} owned blocks are not {self.num_blocks}")
