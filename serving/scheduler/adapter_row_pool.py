"""Adapter row pool: assigns rows of the adapter pool to adapters, with pins and LRU eviction.

The adapter pool is a tensor on the device with one embedding row for each virtual token of the
adapters that are loaded. An adapter takes a contiguous range of rows. It is pinned while a running
sequence still has virtual tokens of this adapter to compute. If a new adapter finds no free range,
adapters that are not pinned are evicted, the least recently used first. This module has row numbers
only; the model runner has the tensor. Prefix adapters use KV blocks instead of rows of this pool.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _RowRange:
    start: int
    count: int
    users: int = 0


class AdapterRowPool:
    """Assigns row ranges of a pool of `count` rows to adapters, which are identified by digest."""

    def __init__(self, count: int) -> None:
        self.row_count = count
        self.loads = 0  # Number of times that an adapter's rows had to be written to the pool.
        # By digest, the least recently used adapter first.
        self._ranges: OrderedDict[str, _RowRange] = OrderedDict()
        self._changes: dict[str, bool] = {}  # Next result of `pop_changes`.

    @property
    def resident_count(self) -> int:
        return len(self._ranges)

    def fits(self, digest: str, count: int) -> bool:
        """Whether `pin` would find rows now, if necessary by evicting unpinned adapters."""
        if digest in self._ranges:
            return True
        pinned = [row_range for row_range in self._ranges.values() if row_range.users]
        return self._find_gap(pinned, count) is not None

    def pin(self, digest: str, count: int) -> tuple[int, bool]:
        """Pin an adapter for one more sequence; the caller has checked that it `fits`.

        Returns the adapter's first row, and whether its rows must be written to the pool.
        """
        row_range = self._ranges.get(digest)
        if row_range is not None:
            row_range.users += 1
            self._ranges.move_to_end(digest)
            return row_range.start, False
        start = self._find_gap(list(self._ranges.values()), count)
        while start is None:
            evicted_digest = next(
                other for other, row_range in self._ranges.items() if not row_range.users
            )
            del self._ranges[evicted_digest]
            self._changes[evicted_digest] = False
            start = self._find_gap(list(self._ranges.values()), count)
        self._ranges[digest] = _RowRange(start, count, 1)
        self._changes[digest] = True
        self.loads += 1
        return start, True

    def pop_changes(self) -> dict[str, bool]:
        """Return the digests of the adapters that got or lost rows since the last call.

        The value of a digest is whether the adapter has rows in the pool now.
        """
        changes, self._changes = self._changes, {}
        return changes

    def unpin(self, digest: str) -> None:
        row_range = self._ranges[digest]
        assert row_range.users > 0, "unpin of an adapter that is not pinned"
        row_range.users -= 1

    def _find_gap(self, ranges: list[_RowRange], count: int) -> int | None:
        """First row of the first gap of at least `count` rows outside of `ranges`; None: no gap."""
        end = 0
        for row_range in sorted(ranges, key=lambda row_range: row_range.start):
            if row_range.start - end >= count:
                return end
            end = row_range.start + row_range.count
        return end if self.row_count - end >= count else None

    def check(self, users: int) -> None:
        """Assert that no row is assigned twice, and that `users` sequences have pinned adapters."""
        ranges = sorted(self._ranges.values(), key=lambda row_range: row_range.start)
        end = 0
        for row_range in ranges:
            assert row_range.start >= end, "two adapters share a row"
            end = row_range.start + row_range.count
        assert end <= self.row_count, "an adapter exceeds the pool"
        assert sum(row_range.users for row_range in ranges) == users, (
            "the number of pins differs from the number of sequences that have pinned an adapter"
        )
