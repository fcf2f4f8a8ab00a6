"""KV block pool: no sequence of allocate, retain, publish and release loses a block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.scheduler.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Random operations on block tables, compared with a simple model of each key's content."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, groups=3)
        self.tables: list[list[int]] = []
        self.write_count = 0
        self.content: dict[int, int] = {}  # The content last written into each block.
        self.group_of: dict[int, int] = {}  # The KV group that allocated each block last.
        # By key: the block's content when the key was published.
        self.published_content: dict[bytes, int] = {}

    @rule(count=st.integers(0, 4), group=st.integers(0, 2))
    def allocate(self, count: int, group: int) -> None:
        if count > self.pool.available:
            with pytest.raises(AssertionError):
                self.pool.allocate(count, group)
            return
        blocks = self.pool.allocate(count, group)
        self.group_of |= dict.fromkeys(blocks, group)
        assert len(set(blocks)) == count and 0 not in blocks
        assert not set(blocks) & {block for table in self.tables for block in table}
        for block in blocks:
            self.write_count += 1
            self.content[block] = self.write_count
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        key = str(data.draw(st.integers(0, 9))).encode()
        earlier_block = self.pool.find_cached(key)
        self.pool.publish(key, block)
        assert self.pool.find_cached(key) == (block if earlier_block is None else earlier_block)
        if earlier_block is None:
            self.published_content[key] = self.content[block]

    @rule(number=st.integers(0, 9))
    def retain(self, number: int) -> None:
        block = self.pool.find_cached(str(number).encode())
        if block is not None:
            assert self.content[block] == self.published_content[str(number).encode()]
            self.pool.retain([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.pool.unpublish(table[0])

    @invariant()
    def no_block_is_lost(self) -> None:
        self.pool.check(self.tables)
        self.pool.check_totals(sum(len(table) for table in self.tables))
        blocks_in_use = {block for table in self.tables for block in table}
        assert self.pool.in_use_count == len(blocks_in_use)
        assert self.pool.available == 7 - len(blocks_in_use)
        groups = [self.group_of[block] for block in blocks_in_use]
        assert self.pool.in_use_by_group == [groups.count(group) for group in range(3)]


BlockPoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlockPool = BlockPoolMachine.TestCase


def test_eviction_is_in_order_of_release_and_from_the_end_of_a_table() -> None:
    pool = BlockPool(5)
    first = pool.allocate(2)
    second = pool.allocate(2)
    for index, block in enumerate([*first, *second]):
        pool.publish(bytes([index]), block)
    pool.release(first)
    pool.release(second)
    assert pool.cached_count == 4
    evicted_blocks = [pool.allocate(1)[0] for _ in range(4)]
    assert evicted_blocks == [first[1], first[0], second[1], second[0]]
    assert pool.find_cached(b"\0") is None


def test_a_reused_cached_block_is_evicted_last() -> None:
    pool = BlockPool(3)
    old, new = pool.allocate(2)
    pool.publish(b"old", old)
    pool.publish(b"new", new)
    pool.release([old])
    pool.release([new])
    pool.retain([old])
    pool.release([old])
    assert pool.allocate(1) == [new]


def test_free_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(3)
    published, plain = pool.allocate(2)
    pool.publish(b"key", published)
    pool.release([published])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find_cached(b"key") == published


def test_a_key_stays_with_the_block_that_published_it_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(b"key", first)
    pool.publish(b"key", second)
    assert pool.find_cached(b"key") == first
    pool.unpublish(first)
    assert pool.find_cached(b"key") is None


def test_a_block_without_references_cannot_be_released() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="more often than it was retained"):
        pool.release(table)
