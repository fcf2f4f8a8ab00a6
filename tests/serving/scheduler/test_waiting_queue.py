"""Whose turn it is: class, priority with age, tenant, arrival."""

from gpt.sampling_params import Sampling
from serving.messages import ServiceClass, Submission
from serving.scheduler.sequence import LEVELS_TO_LATENCY, Sequence
from serving.scheduler.waiting_queue import TENANTS_MAX, Tenants, Waiting

AGE_S = 10.0


class Line:
    def __init__(self) -> None:
        self.tenants = Tenants()
        self.waiting = Waiting(self.tenants, AGE_S)
        self.count = 0

    def come(
        self,
        now: float = 0.0,
        *,
        service: ServiceClass = "latency",
        priority: int = 0,
        tenant: str = "",
    ) -> Sequence:
        one = Submission(
            self.count, [1], Sampling(), service=service, priority=priority, tenant=tenant
        )
        sequence = Sequence(
            one,
            order=self.count,
            tokens=[1],
            prompt=1,
            most=2,
            latency=service == "latency",
            queued_at=now,
        )
        self.count += 1
        self.tenants.enter(tenant)
        self.waiting.push(sequence)
        return sequence

    def order(self, now: float = 0.0, *, urgent: bool = False, charge: int = 0) -> list[int]:
        turns, numbers = self.waiting.turns(now), list[int]()
        while (one := turns.next(urgent=urgent)) is not None:
            numbers.append(one.number)
            self.tenants.charge(one.submission.tenant, charge)
        return numbers


def test_the_first_to_come_is_the_first_to_go() -> None:
    line = Line()
    for _ in range(5):
        line.come()
    assert line.order() == [0, 1, 2, 3, 4]
    assert len(line.waiting) == 0


def test_class_comes_before_priority_and_priority_before_arrival() -> None:
    line = Line()
    line.come(service="throughput", priority=9)
    line.come(priority=0)
    line.come(priority=1)
    line.come(service="throughput", priority=10)
    assert line.order() == [2, 1, 3, 0]


def test_urgent_turns_end_where_the_throughput_class_begins() -> None:
    line = Line()
    line.come(service="throughput")
    line.come()
    assert line.order(urgent=True) == [1]
    assert line.order() == [0]


def test_waiting_is_worth_a_priority_each_time() -> None:
    line = Line()
    line.come(0.0)
    line.come(2 * AGE_S, priority=1)
    assert line.order(2 * AGE_S) == [0, 1]
    line.come(0.0)
    line.come(0.5 * AGE_S, priority=1)
    assert line.order(0.5 * AGE_S) == [3, 2]


def test_who_waits_long_enough_leaves_the_throughput_class() -> None:
    line = Line()
    line.come(0.0, service="throughput")
    late = LEVELS_TO_LATENCY * AGE_S
    line.come(late)
    assert line.order(late - 1, urgent=True) == [1]
    line.come(late)
    assert line.order(late, urgent=True) == [0, 2]


def test_waiting_that_was_interrupted_is_added_up() -> None:
    line = Line()
    sequence = line.come(0.0)
    assert line.order(15.0) == [0]
    sequence.waited_s, sequence.queued_at = 15.0, 100.0
    assert sequence.level(106.0, AGE_S) == 2


def test_tenants_take_turns_by_what_they_were_served() -> None:
    line = Line()
    for _ in range(4):
        line.come(tenant="many")
    line.come(tenant="few")
    line.come(tenant="few")
    assert line.order(charge=10) == [0, 4, 1, 5, 2, 3]


def test_a_pause_saves_nothing_up_and_costs_nothing() -> None:
    tenants = Tenants()
    tenants.enter("here")
    tenants.charge("here", 500)
    tenants.enter("new")
    assert tenants.served("new") == 500
    tenants.charge("new", 1000)
    tenants.leave("new")
    tenants.charge("here", 100)
    tenants.enter("new")
    assert tenants.served("new") == 1500


def test_only_so_many_tenants_are_remembered() -> None:
    tenants = Tenants()
    for number in range(TENANTS_MAX + 50):
        tenants.enter(str(number))
        tenants.leave(str(number))
    tenants.enter("last")
    assert len(tenants._served) <= TENANTS_MAX + 1


def test_those_that_ended_are_passed_over_and_not_kept() -> None:
    line = Line()
    for number in range(1000):
        sequence = line.come(tenant=str(number % 3))
        if number % 100:
            sequence.ending = "cancelled"
            line.waiting.discard(sequence)
    assert len(line.waiting) == 10
    assert sum(len(one) for one in line.waiting._lines.values()) < 100
    assert sorted(line.order()) == list(range(0, 1000, 100))


def test_who_found_no_room_keeps_its_place() -> None:
    line = Line()
    for _ in range(3):
        line.come()
    first = line.waiting.turns(0.0).next(urgent=False)
    assert first is not None and first.number == 0
    line.come()
    line.waiting.push(first)
    assert line.order() == [0, 1, 2, 3]
