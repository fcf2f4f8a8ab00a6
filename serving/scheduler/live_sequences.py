"""Live sequences: the sequences that wait or run, by id, and their deadlines, earliest first.

A deadline applies to waiting and to running sequences. A sequence that has ended stays live while a
step in flight contains it. The deadline of a removed sequence stays in the heap until it passes, or
until the heap has more than 2 * (live sequences) + 64 entries. `pop_expired` then removes the
deadlines of all removed sequences together. The scheduler ends the sequences; this module only
finds them.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from serving.scheduler.sequence import Sequence


class LiveSequences:
    """The live sequences, and a heap of their deadlines."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        deadline = sequence.submission.deadline
        if deadline is not None:
            heappush(self._deadlines, (deadline, sequence.sequence_id))

    def get(self, sequence_id: int) -> Sequence | None:
        """The live sequence with this id; None: it was removed, or never added."""
        return self._sequences.get(sequence_id)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Sequences whose deadline has passed; each is returned once."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, sequence_id = heappop(deadlines)
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                yield sequence
        if len(deadlines) > 2 * len(self._sequences) + 64:
            deadlines[:] = [pair for pair in deadlines if pair[1] in self._sequences]
            heapify(deadlines)
