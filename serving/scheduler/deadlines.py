"""When who must have ended: the earliest first.

Those that are over stay a while, and are thrown out together. It knows only times and numbers.
"""

from collections.abc import Container, Iterator, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol


class _Live(Container[int], Sized, Protocol):
    """Numbers of all that have not ended."""


class Deadlines:
    def __init__(self, live: _Live) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline: float, number: int) -> None:
        heappush(self._heap, (deadline, number))

    def passed(self, now: float) -> Iterator[int]:
        """Those whose time is over; none is told twice."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, number = heappop(heap)
            if number in self._live:
                yield number
        if len(heap) > 2 * len(self._live) + 64:
            heap[:] = [one for one in heap if one[1] in self._live]
            heapify(heap)
