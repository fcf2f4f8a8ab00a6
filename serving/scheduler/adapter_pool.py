"""Adapter pool: assigns ranges of memory on the device to adapters, with pins and LRU eviction.

There are two pools. The units of the first are rows of a tensor with one embedding row for each
virtual token of the adapters that are loaded. An adapter is pinned there while a running sequence
still has virtual tokens of this adapter to compute. The units of the second are pages of memory for
the adapter weights; an adapter is pinned there until its sequences end. An adapter takes a
contiguous range. If a new adapter finds no free range, adapters that are not pinned are evicted,
the least recently used first. This module has numbers only; the model runner has the memory. Prefix
adapters use KV blocks instead of rows.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Range:
    start: int
    count: int
    users: int = 0


class AdapterPool:
    """Assigns ranges of a pool of `count` units to adapters, which are identified by digest."""

    def __init__(self, count: int) -> None:
        self.unit_count = count
        self.loads = 0  # Number of times that an adapter had to be written to the pool.
        self.evictions = 0
        # By digest, the least recently used adapter first.
        self._ranges: OrderedDict[str, _Range] = OrderedDict()
        self._changes: dict[str, bool] = {}  # Next result of `pop_changes`.

    @property
    def resident_count(self) -> int:
        return len(self._ranges)

    def is_resident(self, digest: str) -> bool:
        return digest in self._ranges

    def is_pinned(self, digest: str) -> bool:
        unit_range = self._ranges.get(digest)
        return unit_range is not None and unit_range.users > 0

    def remove(self, digest: str) -> None:
        """Free the range of an adapter that is not pinned."""
        assert not self._ranges[digest].users, "a pinned adapter is removed"
        del self._ranges[digest]
        self._changes[digest] = False

    @property
    def used_count(self) -> int:
        """The number of units that adapters have, also if no sequence uses the adapters."""
        return sum(unit_range.count for unit_range in self._ranges.values())

    @property
    def user_count(self) -> int:
        """The number of pins of all adapters."""
        return sum(unit_range.users for unit_range in self._ranges.values())

    def fits(self, digest: str, count: int) -> bool:
        """Whether `pin` would find a range now, if necessary by evicting unpinned adapters."""
        if digest in self._ranges:
            return True
        pinned = [unit_range for unit_range in self._ranges.values() if unit_range.users]
        return self._find_gap(pinned, count) is not None

    def pin(self, digest: str, count: int) -> tuple[int, bool]:
        """Pin an adapter for one more sequence; the caller has checked that it `fits`.

        Returns the adapter's first unit, and whether it must be written to the pool.
        """
        unit_range = self._ranges.get(digest)
        if unit_range is not None:
            unit_range.users += 1
            self._ranges.move_to_end(digest)
            return unit_range.start, False
        start = self._find_gap(list(self._ranges.values()), count)
        while start is None:
            evicted_digest = next(
                other for other, unit_range in self._ranges.items() if not unit_range.users
            )
            del self._ranges[evicted_digest]
            self.evictions += 1
            self._changes[evicted_digest] = False
            start = self._find_gap(list(self._ranges.values()), count)
        self._ranges[digest] = _Range(start, count, 1)
        self._changes[digest] = True
        self.loads += 1
        return start, True

    def pop_changes(self) -> dict[str, bool]:
        """Return the digests of the adapters that got or lost a range since the last call.

        The value of a digest is whether the adapter is in the pool now.
        """
        changes, self._changes = self._changes, {}
        return changes

    def unpin(self, digest: str) -> None:
        unit_range = self._ranges[digest]
        assert unit_range.users > 0, "unpin of an adapter that is not pinned"
        unit_range.users -= 1

    def _find_gap(self, ranges: list[_Range], count: int) -> int | None:
        """First unit of the first gap of at least `count` units outside `ranges`; None: no gap."""
        end = 0
        for unit_range in sorted(ranges, key=lambda unit_range: unit_range.start):
            if unit_range.start - end >= count:
                return end
            end = unit_range.start + unit_range.count
        return end if self.unit_count - end >= count else None

    def check(self, users: int) -> None:
        """Assert that no unit is assigned twice, and that `users` pins exist."""
        ranges = sorted(self._ranges.values(), key=lambda unit_range: unit_range.start)
        end = 0
        for unit_range in ranges:
            assert unit_range.start >= end, "two adapters share a unit"
            end = unit_range.start + unit_range.count
        assert end <= self.unit_count, "an adapter exceeds the pool"
        assert sum(unit_range.users for unit_range in ranges) == users, (
            "the number of pins differs from the number of sequences that have pinned an adapter"
        )
