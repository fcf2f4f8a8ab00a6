"""KV block pool (pages of the KV cache): reference counts, prefix-cached blocks, LRU eviction.

A block of the block pool is in one of three states. Free: it has no useful content. In use: it is
in the block tables of one or more sequences, and its reference count is their number. Cached: it is
in no block table, but published under a key, so that a later prompt may use it again. When no block
is free, the cached block that was released first is evicted. Block 0 is scratch memory and is never
allocated. A block belongs to a KV group from its allocation to its eviction; the pool counts the
blocks in use of each group. Keys are opaque bytes in this module.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Allocates, counts and evicts blocks. `count`: number of blocks, including block 0."""

    def __init__(self, count: int, groups: int = 1) -> None:
        assert count > 1, "a pool needs block 0 and at least one block to allocate"
        self.capacity = count - 1
        self._free = list(range(count - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * count
        # The KV group of each block that is in use or cached.
        self._groups = [0] * count
        # The sum of the reference counts, and the number of blocks whose reference count is not 0,
        # in total and by KV group.
        self._ref_total = self._in_use_count = 0
        self._in_use_by_group = [0] * groups
        self._keys_by_block: dict[int, list[bytes]] = {}
        self._blocks_by_key: dict[bytes, int] = {}
        # `find_cached(key)` returns the block published under the key, or None. It is a bound
        # `dict.get` and not a method, because it is called for each block of each prompt.
        self.find_cached = self._blocks_by_key.get

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now: the free blocks and the cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    @property
    def in_use_count(self) -> int:
        return self._in_use_count

    @property
    def in_use_by_group(self) -> list[int]:
        return list(self._in_use_by_group)

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Allocate `count` blocks of a KV group with reference count 1.

        `count` must be at most `available`.
        """
        assert count <= self.available, f"{count} blocks requested, {self.available} available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.unpublish(block)
            self._ref_counts[block] = 1
            self._groups[block] = group
            blocks.append(block)
        self._ref_total += count
        self._in_use_count += count
        self._in_use_by_group[group] += count
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Increase the reference count of each block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
                self._in_use_count += 1
                self._in_use_by_group[self._groups[block]] += 1
            self._ref_counts[block] += 1
            self._ref_total += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrease the reference count of each block of a block table.

        The last block is released first, so that the end of a prefix is evicted before its start: a
        cached block can be matched only if all blocks before it are cached too.
        """
        for block in reversed(blocks):
            ref_count = self._ref_counts[block] - 1
            assert ref_count >= 0, f"block {block} is released more often than it was retained"
            self._ref_counts[block] = ref_count
            self._ref_total -= 1
            if ref_count == 0:
                self._in_use_count -= 1
                self._in_use_by_group[self._groups[block]] -= 1
                if block in self._keys_by_block:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, key: bytes, block: int) -> None:
        """Publish `block`, which must be in use, under `key`, unless `key` is already published."""
        if key not in self._blocks_by_key:
            self._blocks_by_key[key] = block
            self._keys_by_block.setdefault(block, []).append(key)

    def unpublish(self, block: int) -> None:
        """Remove a block's keys, because its content will be overwritten or is invalid."""
        for key in self._keys_by_block.pop(block, ()):
            del self._blocks_by_key[key]

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check_totals(self, references: int) -> None:
        """Assert that no block is lost and that the total of all reference counts is right.

        `references` is the number of entries in all block tables. The check is cheap, so it runs at
        every step.
        """
        assert self._in_use_count + self.available == self.capacity, (
            "a block is lost or was released twice"
        )
        assert sum(self._in_use_by_group) == self._in_use_count, "a block changed its KV group"
        assert self._ref_total == references, (
            f"the pool counts {self._ref_total} references to blocks, but the block tables have "
            f"{references} entries"
        )

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that each block is either free, cached or in use, with the right reference count.

        `tables` are the block tables of all running sequences. The reference count of a block is
        its number of entries in them.
        """
        counts = [0] * (self.capacity + 1)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free) and not free & self._cached.keys(), (
            "a block was released twice"
        )
        unused = {block for block, count in enumerate(counts) if block and not count}
        assert free | self._cached.keys() == unused, "a block is lost, or is both free and in use"
        assert self._cached.keys() == self._keys_by_block.keys() & unused, (
            "a cached block has no key, or an unused block with a key is not cached"
        )
        blocks_by_key = {key: block for block, keys in self._keys_by_block.items() for key in keys}
        assert blocks_by_key == self._blocks_by_key, "the two maps of keys and blocks differ"
