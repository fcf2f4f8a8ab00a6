"""Blocks of the KV pool: whatever is taken, shared, named and given back, none is lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.scheduler.block_pool import Blocks


class Lending(RuleBasedStateMachine):
    """Tables take, share and give back blocks; a slow twin remembers what each name stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(8)
        self.tables: list[list[int]] = []
        self.names = 0
        self.content: dict[int, int] = {}  # What was last written into a block.
        self.named: dict[bytes, int] = {}  # What was in a block when it got this name.

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > self.blocks.available:
            with pytest.raises(AssertionError):
                self.blocks.take(count)
            return
        taken = self.blocks.take(count)
        assert len(set(taken)) == count and 0 not in taken
        assert not set(taken) & {block for table in self.tables for block in table}
        for block in taken:
            self.content[block] = self.names = self.names + 1
        self.tables.append(taken)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        name = str(data.draw(st.integers(0, 9))).encode()
        before = self.blocks.find(name)
        self.blocks.name(name, block)
        assert self.blocks.find(name) == (block if before is None else before)
        if before is None:
            self.named[name] = self.content[block]

    @rule(number=st.integers(0, 9))
    def share(self, number: int) -> None:
        block = self.blocks.find(str(number).encode())
        if block is not None:
            assert self.content[block] == self.named[str(number).encode()]
            self.blocks.hold([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.blocks.drop(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.blocks.forget(table[0])

    @invariant()
    def nothing_is_lost(self) -> None:
        self.blocks.check(self.tables)
        self.blocks.tally(sum(len(table) for table in self.tables))
        held = {block for table in self.tables for block in table}
        assert self.blocks.held == len(held)
        assert self.blocks.available == 7 - len(held)


Lending.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestLending = Lending.TestCase


def test_what_was_let_go_first_goes_first_and_of_one_table_the_end() -> None:
    blocks = Blocks(5)
    first, second = blocks.take(2), blocks.take(2)
    for place, block in enumerate([*first, *second]):
        blocks.name(bytes([place]), block)
    blocks.drop(first)
    blocks.drop(second)
    assert blocks.cached == 4
    gone = [blocks.take(1)[0] for _ in range(4)]
    assert gone == [first[1], first[0], second[1], second[0]]
    assert blocks.find(b"\0") is None


def test_a_cached_block_that_is_used_again_stays_longest() -> None:
    blocks = Blocks(3)
    old, new = blocks.take(2)
    blocks.name(b"old", old)
    blocks.name(b"new", new)
    blocks.drop([old])
    blocks.drop([new])
    blocks.hold([old])
    blocks.drop([old])
    assert blocks.take(1) == [new]


def test_free_blocks_go_before_cached_ones() -> None:
    blocks = Blocks(3)
    named, plain = blocks.take(2)
    blocks.name(b"name", named)
    blocks.drop([named])
    blocks.drop([plain])
    assert blocks.take(1) == [plain]
    assert blocks.find(b"name") == named


def test_a_name_stays_where_it_was_first() -> None:
    blocks = Blocks(3)
    one, two = blocks.take(2)
    blocks.name(b"name", one)
    blocks.name(b"name", two)
    assert blocks.find(b"name") == one
    blocks.forget(one)
    assert blocks.find(b"name") is None


def test_dropping_what_is_not_held_is_noticed() -> None:
    blocks = Blocks(3)
    table = blocks.take(1)
    blocks.drop(table)
    with pytest.raises(AssertionError, match="does not hold"):
        blocks.drop(table)
