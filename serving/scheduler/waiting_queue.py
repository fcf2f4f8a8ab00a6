"""Waiting queue: admission order by class, priority with aging, tenant fairness, arrival.

Within one class and priority, the tenant with the fewest served tokens is first. A tenant that
returns after a pause starts with at least the count of the least-served tenant that has live
sequences, so a pause gives no credit. This is the fair scheduler VTC of Sheng et al., 2023. The
module is independent of free slots and blocks: the caller pops the next sequence, and pushes it
back if it cannot be admitted.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from serving.messages import ServiceClass
from serving.scheduler.sequence import LEVELS_TO_LATENCY, Sequence

# Maximum number of tenants without live sequences whose served tokens are stored. If there are
# more, the tenants that became active longest ago are removed.
TENANTS_MAX = 10_000

# (treated as throughput class, -(priority + aging level), tenant's served tokens, arrival order);
# the lowest is admitted first.
_AdmissionPriority = tuple[bool, int, int, int]


class TenantFairness:
    """Tokens served to each tenant; they order tenants within one class and priority."""

    def __init__(self) -> None:
        self._served_tokens: OrderedDict[str, int] = OrderedDict()
        self._sequence_counts: dict[str, int] = {}

    def add_sequence(self, tenant: str) -> None:
        """Count a live sequence of the tenant.

        The first live sequence raises the tenant's served tokens to the lowest count of the other
        tenants with live sequences, if that count is higher.
        """
        count = self._sequence_counts.get(tenant, 0)
        if count == 0:
            # A new tenant, or a tenant after a pause, has no advantage over the other tenants.
            served_min = min(
                (self._served_tokens[other] for other in self._sequence_counts), default=0
            )
            self._served_tokens[tenant] = max(self._served_tokens.get(tenant, 0), served_min)
            self._served_tokens.move_to_end(tenant)
        self._sequence_counts[tenant] = count + 1

    def remove_sequence(self, tenant: str) -> None:
        if self._sequence_counts[tenant] > 1:
            self._sequence_counts[tenant] -= 1
            return
        del self._sequence_counts[tenant]
        while len(self._served_tokens) - len(self._sequence_counts) > TENANTS_MAX:
            forgotten_tenant = next(
                name for name in self._served_tokens if name not in self._sequence_counts
            )
            del self._served_tokens[forgotten_tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served_tokens[tenant] += tokens

    def served_tokens(self, tenant: str) -> int:
        return self._served_tokens[tenant]


_Queue = list[tuple[int, Sequence]]
_QueueKey = tuple[ServiceClass, int, str]


class WaitingQueue:
    """Waiting sequences except parked ones; `age_s` seconds of waiting raise the priority by 1."""

    def __init__(self, tenants: TenantFairness, age_s: float) -> None:
        self._tenants = tenants
        self._age_s = age_s
        # One heap per class, priority and tenant; within a heap the earliest arrival is first.
        self._queues: dict[_QueueKey, _Queue] = {}
        self._ended_count = 0  # Number of ended sequences that are still in a heap.
        self._count = 0
        # Number of waiting latency-class sequences. Throughput-class sequences that aging treats as
        # latency class do not count.
        self.latency_count = 0
        self.change_count = 0  # Number of pushes and discards; admissions (pops) do not count.

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        submission = sequence.submission
        queue = self._queues.setdefault(
            (submission.service, submission.priority, submission.tenant), []
        )
        heappush(queue, (sequence.arrival_order, sequence))
        self.change_count += 1
        self._count += 1
        self.latency_count += sequence.is_latency_class

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended.

        Its entry leaves the heap when it reaches the front. All entries of ended sequences are
        removed when their number exceeds the number of other entries by more than 64.
        """
        assert sequence.end_reason is not None, "discard of a sequence that has not ended"
        self.change_count += 1
        self._count -= 1
        self.latency_count -= sequence.is_latency_class
        self._ended_count += 1
        if self._ended_count > self._count + 64:
            for key, queue in list(self._queues.items()):
                queue[:] = [pair for pair in queue if pair[1].end_reason is None]
                heapify(queue)
                if not queue:
                    del self._queues[key]
            self._ended_count = 0

    def candidates(self, now: float) -> "AdmissionOrder":
        """The admission order as of `now`."""
        return AdmissionOrder(self, now)

    def queue_keys(self) -> list[_QueueKey]:
        return list(self._queues)

    def front_priority(self, key: _QueueKey, now: float) -> _AdmissionPriority | None:
        """Priority of the first sequence of a heap; None: the heap is empty."""
        queue = self._queues.get(key)
        while queue and queue[0][1].end_reason is not None:
            heappop(queue)
            self._ended_count -= 1
        if not queue:
            self._queues.pop(key, None)
            return None
        order, sequence = queue[0]
        aging_level = sequence.aging_level(now, self._age_s)
        is_throughput = not (sequence.is_latency_class or aging_level >= LEVELS_TO_LATENCY)
        return (
            is_throughput,
            -(sequence.submission.priority + aging_level),
            self._tenants.served_tokens(key[2]),
            order,
        )

    def pop(self, key: _QueueKey) -> Sequence:
        """Remove and return the first sequence of a heap that is not empty."""
        _, sequence = heappop(self._queues[key])
        self._count -= 1
        self.latency_count -= sequence.is_latency_class
        return sequence


class AdmissionOrder:
    """Iterates over waiting sequences in admission order, as of one point in time."""

    def __init__(self, queue: WaitingQueue, now: float) -> None:
        self._queue = queue
        self._now = now
        priorities = ((queue.front_priority(key, now), key) for key in queue.queue_keys())
        self._fronts = [(priority, key) for priority, key in priorities if priority is not None]
        heapify(self._fronts)

    def pop_next(self, *, latency_only: bool) -> Sequence | None:
        """Remove and return the next sequence; None: no sequence waits.

        `latency_only`: return None also if the next sequence is not treated as latency class.
        """
        fronts = self._fronts
        while fronts:
            priority, key = fronts[0]
            current = self._queue.front_priority(key, self._now)
            if current is None:
                heappop(fronts)
            elif current > priority:  # The tenant was charged, or the first sequence was popped.
                heapreplace(fronts, (current, key))
            elif latency_only and priority[0]:
                return None
            else:
                return self._queue.pop(key)
        return None
