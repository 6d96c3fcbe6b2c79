"""Block manager: every block is free, cached or owned, and holds what its owners wrote, whatever the order of
operations."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.cache.block_manager import PADDING_BLOCK, BlockManager
from jaxinfer.config import CacheConfig

SIZE, NUM_BLOCKS = 4, 12


class Owner:
    def __init__(self) -> None:
        self.block_ids: list[int] = []


class BlockManagerMachine(RuleBasedStateMachine):
    """Compares with a model of what the blocks hold: every owner is a sequence of numbered tokens, writes them as it
    grows, and must read its own tokens back, whoever shares, copies, caches and evicts."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(CacheConfig(block_size=SIZE, num_blocks=NUM_BLOCKS + 1))
        self.owners = [Owner() for _ in range(4)]
        self.tokens: list[list[int]] = [[] for _ in range(4)]
        self.contents: dict[int, list[int]] = {block: [-1] * SIZE for block in range(1, NUM_BLOCKS + 1)}
        self.num_written = 0

    def used(self) -> set[int]:
        return {block for owner in self.owners for block in owner.block_ids}

    @rule(index=st.integers(0, 3), count=st.integers(0, 13))
    def write(self, index: int, count: int) -> None:
        """One request computes some tokens: blocks, then copies, then writes, as in a step."""
        owner, tokens = self.owners[index], self.tokens[index]
        start, stop = len(tokens), len(tokens) + count
        before, refs = list(owner.block_ids), Counter(block for owner in self.owners for block in owner.block_ids)
        copied = start // SIZE < len(before) and refs[before[start // SIZE]] > 1
        needed = max(0, -(-stop // SIZE) - len(before)) + copied
        done = self.manager.allocate_writable(owner, start, stop)
        assert done == (needed <= NUM_BLOCKS - len(refs))
        self.copy()
        if not done:
            assert owner.block_ids == before
            return
        assert len(owner.block_ids) == max(len(before), -(-stop // SIZE))
        assert owner.block_ids[: start // SIZE] == before[: start // SIZE], "a block that is not written was replaced"
        assert set(owner.block_ids[len(before) :]).isdisjoint(refs)
        for position in range(start, stop):
            block = owner.block_ids[position // SIZE]
            self.num_written += 1
            tokens.append(self.num_written)
            assert self.manager.num_refs[block] == 1, "a shared block is written"
            self.contents[block][position % SIZE] = self.num_written

    def copy(self) -> None:
        for source, target in self.manager.take_copies():
            self.contents[target] = list(self.contents[source])

    @rule(index=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def allocate(self, index: int, num_tokens: int) -> None:
        used, before = self.used(), list(self.owners[index].block_ids)
        missing = max(0, -(-num_tokens // SIZE) - len(before))
        done = self.manager.allocate(self.owners[index], num_tokens)
        after = self.owners[index].block_ids
        assert done == (missing <= NUM_BLOCKS - len(used))
        assert len(after) == len(before) + (missing if done else 0)
        assert after[: len(before)] == before, "a table is only appended to"
        new = after[len(before) :]
        assert used.isdisjoint(new) and len(set(new)) == len(new)

    @rule(index=st.integers(0, 3), source=st.integers(0, 3), count=st.integers(0, 13))
    def fork(self, index: int, source: int, count: int) -> None:
        """A new request begins with some of another's tokens; its last block may be filled in part."""
        if not self.owners[index].block_ids:
            count = min(count, len(self.tokens[source]))
            self.manager.share(self.owners[index], self.owners[source].block_ids[: -(-count // SIZE)])
            self.tokens[index] = self.tokens[source][:count]

    @rule(index=st.integers(0, 3))
    def publish(self, index: int) -> None:
        for place in range(len(self.tokens[index]) // SIZE):
            held = tuple(self.tokens[index][: (place + 1) * SIZE])
            self.manager.cache.put(repr(held).encode(), self.owners[index].block_ids[place])

    @rule(index=st.integers(0, 3), source=st.integers(0, 3), count=st.integers(1, 9))
    def find(self, index: int, source: int, count: int) -> None:
        """A new request looks for the beginning of another one's tokens, which may be long gone."""
        if self.owners[index].block_ids:
            return
        tokens = (self.tokens[source] or self.gone)[: count * SIZE]
        keys = [repr(tuple(tokens[: end * SIZE])).encode() for end in range(1, len(tokens) // SIZE + 1)]
        found = self.manager.cache.find(keys)
        self.manager.share(self.owners[index], found)
        self.tokens[index] = list(tokens[: len(found) * SIZE])

    @rule(index=st.integers(0, 3))
    def drop_last(self, index: int) -> None:
        if self.owners[index].block_ids:
            self.manager.drop_last(self.owners[index])
            del self.tokens[index][len(self.owners[index].block_ids) * SIZE :]

    gone: tuple[int, ...] = ()

    @rule(index=st.integers(0, 3))
    def free(self, index: int) -> None:
        if self.tokens[index]:
            self.gone = tuple(self.tokens[index])
        self.manager.free(self.owners[index])
        self.tokens[index] = []

    @rule(index=st.integers(0, 3))
    def withdraw(self, index: int) -> None:
        self.manager.forget(self.owners[index].block_ids)
        assert not any(block in self.manager.cache for block in self.owners[index].block_ids)

    @rule()
    def reset(self) -> None:
        self.manager.forget_all()
        assert len(self.manager.cache) == 0

    @precondition(lambda self: len(self.used()) < NUM_BLOCKS)
    @rule()
    def refuse_to_share_what_nobody_owns_or_finds(self) -> None:
        for block in set(self.contents) - self.used():
            if block not in self.manager.cache:
                with pytest.raises(ValueError, match=f"block {block} has no owner"):
                    self.manager.share(self.owners[0], [block])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_used_blocks == len(self.used())
        assert self.manager.num_free_blocks == NUM_BLOCKS - len(self.used())
        assert PADDING_BLOCK not in self.used()

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for owner, tokens in zip(self.owners, self.tokens, strict=True):
            read = [self.contents[owner.block_ids[place // SIZE]][place % SIZE] for place in range(len(tokens))]
            assert read == tokens

    @invariant()
    def what_is_found_is_what_was_published(self) -> None:
        for block, key in self.manager.cache.keys.items():
            assert repr(tuple(self.contents[block]))[1:-1] in key.decode()


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_padding_block_cannot_be_shared():
    with pytest.raises(ValueError, match="block 0"):
        BlockManager(CacheConfig()).share(Owner(), [PADDING_BLOCK])


def test_a_block_in_two_tables_without_a_reference_is_found():
    manager, owners = BlockManager(CacheConfig(4, 9)), (Owner(), Owner())
    for owner in owners:
        manager.allocate(owner, 8)
    owners[0].block_ids[0] = owners[1].block_ids[0]
    with pytest.raises(RuntimeError, match="references"):
        manager.check_integrity()


def test_a_lost_block_is_found():
    manager, owner = BlockManager(CacheConfig(4, 9)), Owner()
    manager.allocate(owner, 8)
    owner.block_ids.pop()
    with pytest.raises(RuntimeError, match="references"):
        manager.check_integrity()


def test_few_blocks_are_touched_when_few_are_used():
    manager = BlockManager(CacheConfig(4, 100))
    seen = set()
    for _ in range(20):
        owner = Owner()
        manager.allocate(owner, 12)
        seen.update(owner.block_ids)
        manager.free(owner)
    assert seen == {1, 2, 3}


def published(manager: BlockManager, owner: Owner, name: str) -> list[bytes]:
    keys = [f"{name}{place}".encode() for place in range(len(owner.block_ids))]
    for key, block in zip(keys, owner.block_ids, strict=True):
        manager.cache.put(key, block)
    return keys


def test_blocks_that_can_be_found_go_last_and_ends_before_beginnings():
    manager, owners = BlockManager(CacheConfig(4, 1 + 7)), [Owner() for _ in range(3)]
    keys = []
    for owner, name in zip(owners, "ab", strict=False):
        manager.allocate(owner, 12)
        keys += published(manager, owner, name)
    manager.free(owners[0])
    manager.free(owners[1])
    assert manager.num_free_blocks == 7
    left = []
    for count in range(1, 8):
        manager.allocate(owners[2], 4 * count)
        left.append([key.decode() for key in keys if manager.cache.find([key])])
    assert left == [
        ["a0", "a1", "a2", "b0", "b1", "b2"],
        ["a0", "a1", "b0", "b1", "b2"],
        ["a0", "b0", "b1", "b2"],
        ["b0", "b1", "b2"],
        ["b0", "b1"],
        ["b0"],
        [],
    ]


def test_a_block_that_is_found_again_is_the_last_to_go():
    manager, owners = BlockManager(CacheConfig(4, 1 + 2)), [Owner() for _ in range(3)]
    for owner, name in zip(owners, "ab", strict=False):
        manager.allocate(owner, 4)
        published(manager, owner, name)
    manager.free(owners[0])
    manager.free(owners[1])
    manager.share(owners[2], manager.cache.find([b"a0"]))
    manager.free(owners[2])
    manager.allocate(owners[2], 4)
    assert (len(manager.cache.find([b"a0"])), len(manager.cache.find([b"b0"]))) == (1, 0)


def test_the_last_owner_of_a_shared_block_writes_in_place():
    manager, owners = BlockManager(CacheConfig(4, 9)), [Owner() for _ in range(3)]
    manager.allocate(owners[0], 6)
    for owner in owners[1:]:
        manager.share(owner, owners[0].block_ids)
    shared = owners[0].block_ids[1]
    assert all(manager.allocate_writable(owner, 6, 7) for owner in owners)
    ends = [owner.block_ids[1] for owner in owners]
    assert manager.take_copies() == ((shared, ends[0]), (shared, ends[1])) and ends[2] == shared
    assert manager.take_copies() == ()
    assert len({owner.block_ids[0] for owner in owners}) == 1


def test_a_block_that_is_written_again_cannot_be_found():
    """A request that shared a block in part is the last owner; the cache knows the block by what it held."""
    manager, owners = BlockManager(CacheConfig(4, 9)), [Owner() for _ in range(2)]
    manager.allocate(owners[0], 4)
    published(manager, owners[0], "a")
    manager.share(owners[1], owners[0].block_ids)
    manager.free(owners[0])
    assert manager.allocate_writable(owners[1], 2, 3)
    assert manager.cache.find([b"a0"]) == [] and manager.take_copies() == ()


def test_only_the_last_copy_into_a_block_is_made():
    manager, owners = BlockManager(CacheConfig(4, 1 + 3)), [Owner() for _ in range(4)]
    manager.allocate(owners[0], 2)
    manager.allocate(owners[1], 2)
    manager.share(owners[2], owners[0].block_ids)
    manager.share(owners[3], owners[1].block_ids)
    assert manager.allocate_writable(owners[2], 2, 3)
    assert not manager.allocate_writable(owners[3], 2, 3), "no block is free"
    target = owners[2].block_ids[0]
    manager.free(owners[2])
    assert manager.allocate_writable(owners[3], 2, 3)
    assert manager.take_copies() == ((owners[1].block_ids[0], target),)
