"""Block manager: every block is free or owned, never both, whatever the order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.cache.block_manager import PADDING_BLOCK, BlockManager
from jaxinfer.config import CacheConfig


class Owner:
    def __init__(self) -> None:
        self.block_ids: list[int] = []


class BlockManagerMachine(RuleBasedStateMachine):
    """Compares with a model: each owner's table as a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(CacheConfig(block_size=4, num_blocks=13))
        self.owners = [Owner() for _ in range(4)]
        self.tables: list[list[int]] = [[] for _ in range(4)]

    def used(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(index=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def allocate(self, index: int, num_tokens: int) -> None:
        used, before = self.used(), self.tables[index]
        missing = max(0, (num_tokens + 3) // 4 - len(before))
        done = self.manager.allocate(self.owners[index], num_tokens)
        after = self.owners[index].block_ids
        assert done == (missing <= 12 - len(used))
        assert len(after) == len(before) + (missing if done else 0)
        assert after[: len(before)] == before, "a table is only appended to"
        new = after[len(before) :]
        assert used.isdisjoint(new) and len(set(new)) == len(new)
        self.tables[index] = list(after)

    @rule(index=st.integers(0, 3), source=st.integers(0, 3), count=st.integers(0, 3))
    def share(self, index: int, source: int, count: int) -> None:
        if index != source and not self.tables[index]:
            self.manager.share(self.owners[index], self.tables[source][:count])
            self.tables[index] = self.tables[source][:count]

    @rule(index=st.integers(0, 3))
    def free(self, index: int) -> None:
        self.manager.free(self.owners[index])
        self.tables[index] = []

    @precondition(lambda self: len(self.used()) < 12)
    @rule()
    def refuse_to_share_what_nobody_owns(self) -> None:
        unowned = min(set(range(1, 13)) - self.used())
        with pytest.raises(ValueError, match=f"block {unowned} has no owner"):
            self.manager.share(self.owners[0], [unowned])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.manager.check_integrity()
        assert [owner.block_ids for owner in self.owners] == self.tables
        assert self.manager.num_used_blocks == len(self.used())
        assert self.manager.num_free_blocks == 12 - len(self.used())
        assert PADDING_BLOCK not in self.used()


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
