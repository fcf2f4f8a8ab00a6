"""Waiting queue: admission order by class, aged priority, tenant and arrival."""

from gpt.sampling_params import SamplingParams
from serving.messages import ServiceClass, Submission
from serving.scheduler.sequence import LEVELS_TO_LATENCY, Sequence
from serving.scheduler.waiting_queue import TENANTS_MAX, TenantFairness, WaitingQueue
from tests.support.fake_ranks import VOCAB_SIZE

AGE_S = 10.0


class Queue:
    """A waiting queue with its tenants; sequences are numbered in order of arrival."""

    def __init__(self) -> None:
        self.tenants = TenantFairness()
        self.waiting = WaitingQueue(self.tenants, AGE_S)
        self.arrivals = 0

    def push_new(
        self,
        now: float = 0.0,
        *,
        service: ServiceClass = "latency",
        priority: int = 0,
        tenant: str = "",
    ) -> Sequence:
        submission = Submission(
            self.arrivals,
            [1],
            SamplingParams(max_new_tokens=1),
            service=service,
            priority=priority,
            tenant=tenant,
        )
        sequence = Sequence.from_submission(
            submission, arrival_order=self.arrivals, vocab_size=VOCAB_SIZE, block_tokens=4, now=now
        )
        self.arrivals += 1
        self.tenants.add_sequence(tenant)
        self.waiting.push(sequence)
        return sequence

    def pop_all(
        self, now: float = 0.0, *, latency_only: bool = False, charge: int = 0
    ) -> list[int]:
        """Pop sequences in admission order, and charge each one's tenant; returns their ids."""
        candidates = self.waiting.candidates(now)
        sequence_ids = list[int]()
        while (sequence := candidates.pop_next(latency_only=latency_only)) is not None:
            sequence_ids.append(sequence.sequence_id)
            self.tenants.charge(sequence.submission.tenant, charge)
        return sequence_ids


def test_equal_sequences_are_admitted_in_arrival_order() -> None:
    queue = Queue()
    for _ in range(5):
        queue.push_new()
    assert queue.pop_all() == [0, 1, 2, 3, 4]
    assert len(queue.waiting) == 0


def test_class_comes_before_priority_and_priority_before_arrival() -> None:
    queue = Queue()
    queue.push_new(service="throughput", priority=9)
    queue.push_new(priority=0)
    queue.push_new(priority=1)
    queue.push_new(service="throughput", priority=10)
    assert queue.pop_all() == [2, 1, 3, 0]


def test_latency_only_stops_at_the_throughput_class() -> None:
    queue = Queue()
    queue.push_new(service="throughput")
    queue.push_new()
    assert queue.pop_all(latency_only=True) == [1]
    assert queue.pop_all() == [0]


def test_waiting_raises_the_priority() -> None:
    queue = Queue()
    queue.push_new(0.0)
    queue.push_new(2 * AGE_S, priority=1)
    assert queue.pop_all(2 * AGE_S) == [0, 1]
    queue.push_new(0.0)
    queue.push_new(0.5 * AGE_S, priority=1)
    assert queue.pop_all(0.5 * AGE_S) == [3, 2]


def test_aging_moves_a_throughput_sequence_to_the_latency_class() -> None:
    queue = Queue()
    queue.push_new(0.0, service="throughput")
    late = LEVELS_TO_LATENCY * AGE_S
    queue.push_new(late)
    assert queue.pop_all(late - 1, latency_only=True) == [1]
    queue.push_new(late)
    assert queue.pop_all(late, latency_only=True) == [0, 2]


def test_waiting_time_is_summed_over_preemptions() -> None:
    queue = Queue()
    sequence = queue.push_new(0.0)
    assert queue.pop_all(15.0) == [0]
    sequence.start_running(slot=0, block_tables=[[]], matched_tokens=0, now=15.0)
    sequence.stop_running()
    sequence.enqueue(100.0)
    assert sequence.aging_level(106.0, AGE_S) == 2


def test_tenants_take_turns_by_served_tokens() -> None:
    queue = Queue()
    for _ in range(4):
        queue.push_new(tenant="many")
    queue.push_new(tenant="few")
    queue.push_new(tenant="few")
    assert queue.pop_all(charge=10) == [0, 4, 1, 5, 2, 3]


def test_a_pause_gives_a_tenant_no_credit_and_no_penalty() -> None:
    tenants = TenantFairness()
    tenants.add_sequence("other")
    tenants.charge("other", 500)
    tenants.add_sequence("new")
    assert tenants.served_tokens("new") == 500
    tenants.charge("new", 1000)
    tenants.remove_sequence("new")
    tenants.charge("other", 100)
    tenants.add_sequence("new")
    assert tenants.served_tokens("new") == 1500


def test_the_number_of_remembered_tenants_is_bounded() -> None:
    tenants = TenantFairness()
    for number in range(TENANTS_MAX + 50):
        tenants.add_sequence(str(number))
        tenants.remove_sequence(str(number))
    tenants.add_sequence("last")
    assert len(tenants._served_tokens) <= TENANTS_MAX + 1


def test_ended_sequences_are_skipped_and_removed() -> None:
    queue = Queue()
    for number in range(1000):
        sequence = queue.push_new(tenant=str(number % 3))
        if number % 100:
            sequence.end("cancelled")
            queue.waiting.discard(sequence)
    assert len(queue.waiting) == 10
    assert sum(len(heap) for heap in queue.waiting._queues.values()) < 100
    assert sorted(queue.pop_all()) == list(range(0, 1000, 100))


def test_a_sequence_that_was_not_admitted_keeps_its_position() -> None:
    queue = Queue()
    for _ in range(3):
        queue.push_new()
    first = queue.waiting.candidates(0.0).pop_next(latency_only=False)
    assert first is not None and first.sequence_id == 0
    queue.push_new()
    queue.waiting.push(first)
    assert queue.pop_all() == [0, 1, 2, 3]
