"""The block manager: which blocks of the KV pool are whose. HOST: plain integers, no device memory."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from jaxinfer.cache.prefix_cache import PrefixCache
from jaxinfer.config import CacheConfig

PADDING_BLOCK = 0
"""Where padding rows write; never allocated."""


class BlockOwner(Protocol):
    """Anything with a block table; a Request is one. Compared by identity.

    Attributes:
        block_ids: the table. `PADDING_BLOCK` stands, at its beginning only, for blocks that the owner needs no more.
    """

    block_ids: list[int]

    def __hash__(self) -> int: ...


class BlockManager:
    """Hands out blocks on demand and takes them back when their last owner lets go.

    A block is owned, or free and empty, or free and cached: the prefix cache can find it, `share` brings it back, and
    it is given away when no empty block is left, the one that was freed first going first. A table is freed from its
    end, so of a chain of blocks the last goes before those it depends on.

    A block freed while a step that writes to it is in flight may be handed out at once: steps run in order on the
    device, so that the new owner's writes come later.

    Args:
        config: sizes of the pool.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks - 1
        """Blocks that can be allocated."""
        self.cache = PrefixCache()
        """What full blocks hold. Put only blocks there that somebody owns."""
        self.num_refs = [0] * config.num_blocks
        """Owners of each block; read only."""
        # A stack: the block freed last is used first, so that a lightly used pool stays in few pages.
        self._empty = list(range(self.num_blocks, PADDING_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners: set[BlockOwner] = set()
        self._copies: dict[int, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, those that only the cache still knows included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks with an owner; one that several share counts once."""
        return self.num_blocks - self.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner: BlockOwner, num_tokens: int) -> bool:
        """Grows the owner's block table until it holds `num_tokens` tokens; never shrinks it.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        needed = self.blocks_for(num_tokens) - len(owner.block_ids)
        if needed > self.num_free_blocks:
            return False
        if needed > 0:
            self._owners.add(owner)
            owner.block_ids += [self._take() for _ in range(needed)]
        return True

    def allocate_writable(self, owner: BlockOwner, first: int, num_tokens: int) -> bool:
        """`allocate`, and the owner may write to the positions from `first` on: where others share the block of
        `first`, the owner gets a block of its own, and a copy on the device is noted for `take_copies`. Where nobody
        else owns it but the cache knows it, the cache forgets it.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        shared = self.shares_block(owner, first)
        needed = self.blocks_for(num_tokens) - len(owner.block_ids) + shared
        if needed > self.num_free_blocks:
            return False
        index = first // self.block_size
        if shared:
            self._replace(owner, index)
        elif index < len(owner.block_ids):
            self.cache.forget(owner.block_ids[index])
        return self.allocate(owner, num_tokens)

    def shares_block(self, owner: BlockOwner, position: int) -> bool:
        """The owner's block of this position is there and others own it too."""
        index = position // self.block_size
        return index < len(owner.block_ids) and self.num_refs[owner.block_ids[index]] > 1

    def room(self, owner: BlockOwner, position: int) -> int:
        """How many tokens the owner can write from `position` on with the blocks that it has and that are free."""
        blocks = len(owner.block_ids) + self.num_free_blocks - self.shares_block(owner, position)
        return blocks * self.block_size - position

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source, target) noted since the last call, in order: they are to be made before the next step
        writes anything."""
        copies = tuple((source, target) for target, source in self._copies.items())
        self._copies.clear()
        return copies

    def share(self, owner: BlockOwner, block_ids: Sequence[int]) -> None:
        """Appends blocks that others own, or that the cache found, to the owner's table.

        Full blocks are never written again. Into one that is not full, sharers write after `allocate_writable`.

        Raises:
            ValueError: a block has no owner and is not in the cache, so its contents may be anybody's.
        """
        for block in block_ids:
            if block == PADDING_BLOCK or (self.num_refs[block] == 0 and block not in self._cached):
                raise ValueError(f"block {block} has no owner and cannot be shared; allocate blocks instead")
        if block_ids:
            self._owners.add(owner)
        for block in block_ids:
            if self.num_refs[block] == 0:
                del self._cached[block]
            self.num_refs[block] += 1
        owner.block_ids += block_ids

    def drop_last(self, owner: BlockOwner) -> None:
        """Takes the last block of the owner's table away."""
        self._let_go([owner.block_ids.pop()])

    def skip(self, owner: BlockOwner, count: int) -> None:
        """Appends table entries for `count` blocks that the owner will never need, to a table of such entries."""
        if count:
            self._owners.add(owner)
            owner.block_ids += [PADDING_BLOCK] * count

    def hide(self, owner: BlockOwner, count: int) -> None:
        """Takes the first `count` blocks of the owner's table away, which has as many; the owner needs them no more."""
        table, first = owner.block_ids, count
        while first > 0 and table[first - 1] != PADDING_BLOCK:
            first -= 1
        self._let_go(reversed(table[first:count]))
        table[first:count] = [PADDING_BLOCK] * (count - first)

    def free(self, owner: BlockOwner) -> None:
        """Empties the owner's block table; blocks that nobody else owns are free again."""
        self._let_go(block for block in reversed(owner.block_ids) if block != PADDING_BLOCK)
        owner.block_ids.clear()
        self._owners.discard(owner)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Takes blocks out of the cache; who owns them keeps them."""
        for block in block_ids:
            self.cache.forget(block)
            if block in self._cached:
                del self._cached[block]
                self._empty.append(block)

    def forget_all(self) -> None:
        """Empties the cache; who owns blocks keeps them."""
        self.cache.clear()
        self._empty += sorted(self._cached, reverse=True)
        self._cached.clear()

    def check_integrity(self) -> None:
        """Compares free blocks, cache, counts and block tables; linear in the pool.

        Raises:
            RuntimeError: a block is lost, in two states at once, or counted wrongly.
        """
        self.cache.check_integrity()
        tables = [owner.block_ids[_num_skipped(owner) :] for owner in self._owners]
        held = Counter(block for table in tables for block in table)
        free = Counter([*self._empty, *self._cached])
        if PADDING_BLOCK in held or PADDING_BLOCK in free or self.num_refs[PADDING_BLOCK]:
            raise RuntimeError(f"block {PADDING_BLOCK} is the padding sink, yet it is in use")
        for block in range(1, self.num_blocks + 1):
            if self.num_refs[block] != held[block]:
                raise RuntimeError(f"block {block} counts {self.num_refs[block]} references but has {held[block]}")
            if free[block] != (0 if held[block] else 1):
                raise RuntimeError(f"block {block} has {held[block]} owners and is {free[block]} times free")
            if not held[block] and (block in self.cache) != (block in self._cached):
                raise RuntimeError(f"block {block} is free, and the cache and the free list differ about it")
        if self.num_free_blocks + len(held) != self.num_blocks:
            raise RuntimeError(f"{self.num_free_blocks} free and {len(held)} owned blocks are not {self.num_blocks}")

    def _let_go(self, block_ids: Iterable[int]) -> None:
        """One owner less for each of these blocks."""
        for block in block_ids:
            self.num_refs[block] -= 1
            if self.num_refs[block] == 0:
                if block in self.cache:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def _take(self) -> int:
        """A free block for a new owner: an empty one, else the one in the cache that nobody has used for longest."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.cache.forget(block)
        self.num_refs[block] = 1
        return block

    def _replace(self, owner: BlockOwner, index: int) -> None:
        """Gives the owner a block of its own in place of a shared one, with what is in there now."""
        source, target = owner.block_ids[index], self._take()
        self.num_refs[source] -= 1
        owner.block_ids[index] = target
        # A block that was to receive a copy, lost its owner and was handed out again receives the last one only.
        self._copies.pop(target, None)
        self._copies[target] = source


def _num_skipped(owner: BlockOwner) -> int:
    """Entries at the beginning of a table that stand for no block."""
    return sum(1 for _ in takewhile(lambda block: block == PADDING_BLOCK, owner.block_ids))
