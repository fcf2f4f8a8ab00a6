"""Who waits, and whose turn it is: class, then priority with age, then tenant, then arrival.

Tenants take turns by what they were served: the one with the fewest tokens goes first, and who
comes back after a pause starts level with the others (virtual token counter, Sheng et al., 2023).
It knows nothing of room: it says who is next, and takes back who found none.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from serving.messages import ServiceClass
from serving.scheduler.sequence import LEVELS_TO_LATENCY, Sequence

# Tenants that are not here now are remembered up to so many, the last seen ones.
TENANTS_MAX = 10_000

_Rank = tuple[bool, int, int, int]


class Tenants:
    """What each was served: the count decides between those of one level."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()
        self._present: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """One sequence more of it is here."""
        count = self._present.get(tenant, 0)
        if count == 0:
            # Neither is a pause saved up, nor does coming late cost anything.
            least = min((self._served[other] for other in self._present), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            self._served.move_to_end(tenant)
        self._present[tenant] = count + 1

    def leave(self, tenant: str) -> None:
        if self._present[tenant] > 1:
            self._present[tenant] -= 1
            return
        del self._present[tenant]
        while len(self._served) - len(self._present) > TENANTS_MAX:
            gone = next(name for name in self._served if name not in self._present)
            del self._served[gone]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens

    def served(self, tenant: str) -> int:
        return self._served[tenant]


_Line = list[tuple[int, Sequence]]
_Kind = tuple[ServiceClass, int, str]


class Waiting:
    def __init__(self, tenants: Tenants, age_s: float) -> None:
        self._tenants = tenants
        self._age_s = age_s
        # One heap by arrival for each kind: within a kind the one that came first is the next.
        self._lines: dict[_Kind, _Line] = {}
        self._gone = 0  # Ended sequences that still lie in a line.
        self._count = 0
        self.urgent = 0  # Of them, those of the latency class by birth.
        self.changes = 0  # Who came and went, but for those that were let in.

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        one = sequence.submission
        line = self._lines.setdefault((one.service, one.priority, one.tenant), [])
        heappush(line, (sequence.order, sequence))
        self.changes += 1
        self._count += 1
        self.urgent += sequence.latency

    def discard(self, sequence: Sequence) -> None:
        """It has ended. It is taken out when it comes to the front, or when many are to be."""
        assert sequence.ending is not None, "one that goes on is taken out"
        self.changes += 1
        self._count -= 1
        self.urgent -= sequence.latency
        self._gone += 1
        if self._gone > self._count + 64:
            for kind, line in list(self._lines.items()):
                line[:] = [one for one in line if one[1].ending is None]
                heapify(line)
                if not line:
                    del self._lines[kind]
            self._gone = 0

    def turns(self, now: float) -> "Turns":
        return Turns(self, now)

    def kinds(self) -> list[_Kind]:
        return list(self._lines)

    def rank(self, kind: _Kind, now: float) -> _Rank | None:
        """Of the first one of a kind: the lowest goes first. None: there is none."""
        line = self._lines.get(kind)
        while line and line[0][1].ending is not None:
            heappop(line)
            self._gone -= 1
        if not line:
            self._lines.pop(kind, None)
            return None
        order, sequence = line[0]
        level = sequence.level(now, self._age_s)
        late = not (sequence.latency or level >= LEVELS_TO_LATENCY)
        return late, -(sequence.submission.priority + level), self._tenants.served(kind[2]), order

    def pop(self, kind: _Kind) -> Sequence:
        """Take out the first one of a kind that has one."""
        _, sequence = heappop(self._lines[kind])
        self._count -= 1
        self.urgent -= sequence.latency
        return sequence


class Turns:
    """The order in which those that wait are to be let in, as it is at one moment."""

    def __init__(self, waiting: Waiting, now: float) -> None:
        self._waiting, self._now = waiting, now
        ranked = ((waiting.rank(kind, now), kind) for kind in waiting.kinds())
        self._fronts = [(rank, kind) for rank, kind in ranked if rank is not None]
        heapify(self._fronts)

    def next(self, *, urgent: bool) -> Sequence | None:
        """The next one, taken out. `urgent`: only if it counts as of the latency class."""
        fronts = self._fronts
        while fronts:
            rank, kind = fronts[0]
            fresh = self._waiting.rank(kind, self._now)
            if fresh is None:
                heappop(fronts)
            elif fresh > rank:  # Its tenant was served since, or its first one was taken out.
                heapreplace(fronts, (fresh, kind))
            elif urgent and rank[0]:
                return None
            else:
                return self._waiting.pop(kind)
        return None
