"""Which rows of the device's adapter pool hold which adapter.

An adapter lies in one run of rows. It must stay while a sequence that runs still has virtual tokens
to compute, and may go after that, the least recently used one first. It does not hold the rows.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    start: int
    count: int
    users: int = 0


class AdapterRows:
    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0
        self._places: OrderedDict[str, _Place] = OrderedDict()  # The least recently used one first.

    @property
    def resident(self) -> int:
        return len(self._places)

    def fits(self, digest: str, count: int) -> bool:
        """Whether `pin` would find room now."""
        if digest in self._places:
            return True
        pinned = [place for place in self._places.values() if place.users]
        return self._gap(pinned, count) is not None

    def pin(self, digest: str, count: int) -> tuple[int, bool]:
        """The adapter's first row, and whether its rows must be written; it `fits`."""
        place = self._places.get(digest)
        if place is not None:
            place.users += 1
            self._places.move_to_end(digest)
            return place.start, False
        start = self._gap(list(self._places.values()), count)
        while start is None:
            oldest = next(name for name, place in self._places.items() if not place.users)
            del self._places[oldest]
            start = self._gap(list(self._places.values()), count)
        self._places[digest] = _Place(start, count, 1)
        self.loads += 1
        return start, True

    def unpin(self, digest: str) -> None:
        place = self._places[digest]
        assert place.users > 0, "rows are given back that nobody uses"
        place.users -= 1

    def _gap(self, places: list[_Place], count: int) -> int | None:
        """The first row of the first run of `count` rows that none of the places has."""
        end = 0
        for place in sorted(places, key=lambda place: place.start):
            if place.start - end >= count:
                return end
            end = place.start + place.count
        return end if self.count - end >= count else None

    def check(self, users: int) -> None:
        places = sorted(self._places.values(), key=lambda place: place.start)
        end = 0
        for place in places:
            assert place.start >= end, "two adapters in one row"
            end = place.start + place.count
        assert end <= self.count, "an adapter past the pool's end"
        assert sum(place.users for place in places) == users, "pinned otherwise than sequences say"
