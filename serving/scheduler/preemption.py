"""Preemption policy: choice of the running sequences that lose their KV blocks to another sequence.

A preempted sequence frees its slot and its blocks, returns to the waiting queue with its tokens,
and computes its uncached KV again after the next admission. The policy only reads sequences.
`ResourceAllocator` owns their resources: it asks the policy for victims, releases their resources
and pushes them to the waiting queue (`ResourceAllocator.requeue`).

Two events can preempt sequences: the admission of a waiting sequence, and the growth of a running
one beyond its blocks. The sequence of the lowest scheduling priority is preempted first, and no
sequence preempts one of higher priority, so the sequence of the highest priority always finishes. A
sequence that a step in flight contains cannot be a victim, because the step writes into its blocks.
"""

from collections.abc import Callable, Iterable

from serving.scheduler.sequence import SchedulingPriority, Sequence


class PreemptionPolicy:
    """Chooses victims among running sequences; `age_s` seconds of waiting add 1 to the priority."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s

    def preemptible_by(self, waiting: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences that `waiting` may preempt, now or after their steps in flight.

        The original class and priority of the waiting sequence are compared with the aged class and
        priority of the running ones: aging protects a sequence from preemption, but gives no right
        to preempt. For this reason two sequences cannot preempt each other alternately.
        """
        own_priority = (waiting.is_latency_class, waiting.submission.priority)
        return [
            other
            for other in running
            if other.end_reason is None and self._scheduling_priority(other)[:2] < own_priority
        ]

    def victims_for_admission(
        self,
        waiting: Sequence,
        running: Iterable[Sequence],
        *,
        blocks_missing: int,
        blocks_gained: Callable[[Sequence], int],
    ) -> list[Sequence]:
        """The victims whose preemption lets a waiting sequence run, lowest priority first.

        To be called only if no slot is free, or if `blocks_missing` > 0. The list is empty if there
        is no candidate, or if all candidates together free too few blocks. `blocks_gained`: the
        number of blocks that become available if a sequence is preempted.
        """
        candidates = [
            other for other in self.preemptible_by(waiting, running) if other.steps_in_flight == 0
        ]
        candidates.sort(key=self._scheduling_priority)
        victims = list[Sequence]()
        for candidate in candidates:
            victims.append(candidate)
            blocks_missing -= blocks_gained(candidate)
            if blocks_missing <= 0:
                return victims
        return []

    def victims_for_growth(self, growing: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """All sequences that `growing` may preempt now for more blocks, lowest priority first.

        The allocator preempts them in this order until there are enough blocks. The aged class and
        priority of `growing` are compared with the aged class and priority of each running
        sequence. If they are equal, the sequence that arrived later is the victim.
        """
        own_priority = self._scheduling_priority(growing)
        candidates = list[tuple[SchedulingPriority, Sequence]]()
        for other in running:
            if other.steps_in_flight == 0 and other.end_reason is None:
                priority = self._scheduling_priority(other)
                if priority < own_priority:
                    candidates.append((priority, other))
        candidates.sort()  # Priorities are unique, so sequences are not compared.
        return [candidate for _, candidate in candidates]

    def _scheduling_priority(self, sequence: Sequence) -> SchedulingPriority:
        return sequence.scheduling_priority(self._age_s)
