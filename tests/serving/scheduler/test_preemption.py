"""Preemption policy: victims have lower priority, are the fewest, and the lowest comes first."""

import pytest

from gpt.sampling_params import SamplingParams
from serving.messages import ServiceClass, Submission
from serving.scheduler.preemption import PreemptionPolicy
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE, text_ids
from tests.support.scheduler_harness import SchedulerHarness

AGE_S = 10.0


def new_sequence(
    sequence_id: int, service: ServiceClass = "latency", priority: int = 0
) -> Sequence:
    """A waiting sequence; a smaller id arrived earlier."""
    return Sequence.from_submission(
        Submission(
            sequence_id,
            text_ids(4, sequence_id),
            SamplingParams(max_new_tokens=8),
            service=service,
            priority=priority,
        ),
        arrival_order=sequence_id,
        vocab_size=VOCAB_SIZE,
        block_tokens=4,
        now=0.0,
    )


def new_running_sequence(
    sequence_id: int,
    service: ServiceClass = "latency",
    priority: int = 0,
    *,
    waited_s: float = 0.0,
    block_count: int = 1,
) -> Sequence:
    sequence = new_sequence(sequence_id, service, priority)
    blocks = list(range(1, 1 + block_count))
    sequence.start_running(sequence_id, [blocks], matched_tokens=0, now=waited_s)
    return sequence


def admission_victims(
    waiting: Sequence, running: list[Sequence], blocks_missing: int
) -> list[Sequence]:
    return PreemptionPolicy(AGE_S).victims_for_admission(
        waiting,
        running,
        blocks_missing=blocks_missing,
        blocks_gained=lambda sequence: sequence.block_count,
    )


# ------------------------------------------------------------------------- preemptible sequences


@pytest.mark.parametrize(
    ("service", "priority", "is_preemptible"),
    [
        ("throughput", 9, True),  # The class precedes the priority.
        ("latency", 4, True),
        ("latency", 5, False),
        ("latency", 6, False),
    ],
)
def test_a_waiting_sequence_preempts_lower_classes_and_priorities(
    service: ServiceClass, priority: int, is_preemptible: bool
) -> None:
    running = new_running_sequence(1, service, priority)
    preemptible = PreemptionPolicy(AGE_S).preemptible_by(new_sequence(0, priority=5), [running])
    assert preemptible == ([running] if is_preemptible else [])


def test_aging_protects_a_running_sequence_from_preemption() -> None:
    policy = PreemptionPolicy(AGE_S)
    urgent = new_sequence(0, priority=1)
    fresh = new_running_sequence(1, waited_s=AGE_S / 2)
    aged = new_running_sequence(2, waited_s=AGE_S)
    starved = new_running_sequence(3, "throughput", waited_s=6 * AGE_S)
    assert policy.preemptible_by(urgent, [fresh, aged, starved]) == [fresh]


def test_aging_gives_a_waiting_sequence_no_right_to_preempt() -> None:
    waiting = new_sequence(0)
    assert waiting.aging_level(100 * AGE_S, AGE_S) == 100
    assert PreemptionPolicy(AGE_S).preemptible_by(waiting, [new_running_sequence(1)]) == []


def test_an_ended_sequence_is_no_victim() -> None:
    running = new_running_sequence(1, "throughput")
    running.end("cancelled")
    policy = PreemptionPolicy(AGE_S)
    assert policy.preemptible_by(new_sequence(0), [running]) == []
    assert policy.victims_for_growth(new_running_sequence(2), [running]) == []


def test_a_sequence_in_flight_is_preemptible_only_after_its_step() -> None:
    running = new_running_sequence(1, "throughput")
    running.plan_tokens(1, 0.0)
    urgent = new_sequence(0)
    growing = new_running_sequence(2)
    policy = PreemptionPolicy(AGE_S)
    assert policy.preemptible_by(urgent, [running]) == [running]
    assert admission_victims(urgent, [running], blocks_missing=1) == []
    assert policy.victims_for_growth(growing, [running]) == []
    running.complete_step()
    assert admission_victims(urgent, [running], blocks_missing=1) == [running]
    assert policy.victims_for_growth(growing, [running]) == [running]


# ------------------------------------------------------------------------- victims of an admission


def test_an_admission_preempts_the_fewest_victims_of_the_lowest_priority() -> None:
    first = new_running_sequence(1, "throughput", priority=1, block_count=2)
    second = new_running_sequence(2, "throughput", block_count=2)
    third = new_running_sequence(3, "throughput", block_count=2)
    running = [first, second, third]
    urgent = new_sequence(4)
    # Of equal priorities the later arrival is the first victim.
    assert admission_victims(urgent, running, blocks_missing=1) == [third]
    assert admission_victims(urgent, running, blocks_missing=2) == [third]
    assert admission_victims(urgent, running, blocks_missing=3) == [third, second]
    assert admission_victims(urgent, running, blocks_missing=6) == [third, second, first]


def test_an_admission_that_stays_impossible_preempts_no_sequence() -> None:
    running = [new_running_sequence(number, "throughput") for number in range(3)]
    assert admission_victims(new_sequence(4), running, blocks_missing=4) == []


def test_an_admission_that_lacks_only_a_slot_has_one_victim() -> None:
    running = [new_running_sequence(number, "throughput") for number in range(3)]
    assert admission_victims(new_sequence(4), running, blocks_missing=-5) == [running[2]]


# --------------------------------------------------------------------------- victims of growth


def test_growth_preempts_lower_priorities_and_later_arrivals() -> None:
    growing = new_running_sequence(2, priority=1)
    earlier = new_running_sequence(1, priority=1)
    later = new_running_sequence(3, priority=1)
    lower = new_running_sequence(4, priority=0)
    batch = new_running_sequence(0, "throughput", priority=9)
    running = [earlier, growing, later, lower, batch]
    policy = PreemptionPolicy(AGE_S)
    assert policy.victims_for_growth(growing, running) == [batch, lower, later]
    assert policy.victims_for_growth(batch, running) == []


# ------------------------------------------------------------------------- preemption in steps


@pytest.mark.parametrize(
    ("sequences", "preempted"),
    [
        ([("throughput", 0), ("latency", 0), ("latency", 0)], 0),
        ([("throughput", 9), ("latency", 0), ("latency", 5)], 0),
        ([("latency", 5), ("latency", 0), ("latency", 1)], 1),
        ([("throughput", 5), ("throughput", 0), ("latency", 0)], 1),
        ([("latency", 0), ("latency", 0), ("latency", 0)], 2),
    ],
)
def test_the_lowest_priority_is_preempted(sequences: list[tuple[str, int]], preempted: int) -> None:
    # The pool has blocks for three sequences of 12 tokens, and each sequence grows beyond that.
    harness = SchedulerHarness(blocks=1 + 9, step_tokens_max=64)
    for number, (service, priority) in enumerate(sequences):
        harness.submit(text_ids(8, number), 12, service=service, priority=priority)
    while not harness.scheduler.stats.preemptions:
        assert harness.scheduler.stats.running in (0, 3)
        harness.step()
    sequence_ids = {
        slot_init.slot: slot_init.sampling.seed
        for step in harness.steps
        for slot_init in step.slot_inits
    }
    assert {sequence_ids[slot] for slot in harness.steps[-1].slots} == {0, 1, 2} - {preempted}
    harness.finish()


def test_two_sequences_that_do_not_fit_together_both_finish() -> None:
    harness = SchedulerHarness(blocks=1 + 10, prefix_cache=False)
    harness.submit(text_ids(8, 0), 30)
    harness.submit(text_ids(8, 1), 30)
    harness.finish()
    assert harness.scheduler.stats.preemptions > 0
    assert harness.end_steps[0] < harness.end_steps[1]  # The first sequence was not preempted.


def test_a_latency_request_preempts_a_throughput_request() -> None:
    harness = SchedulerHarness(running_requests_max=2, blocks=200)
    for number in range(2):
        harness.submit(text_ids(8, number), 50, service="throughput")
    for _ in range(10):
        harness.step()
    urgent = harness.submit(text_ids(8, 2), 3, service="latency")
    harness.step()
    assert urgent in harness.first_token_steps
    assert harness.scheduler.stats.preemptions == 1
    harness.finish()
    assert harness.end_steps[0] < harness.end_steps[1]  # The later sequence was preempted.


def test_prefill_preempts_decodes_of_lower_priority_when_blocks_run_short() -> None:
    harness = SchedulerHarness(blocks=1 + 24, step_tokens_max=5)
    harness.submit(text_ids(4), 50, service="throughput")
    for _ in range(3):
        harness.step()
    # There are enough blocks at admission, but the other sequence grows during the prefill.
    urgent = harness.submit(text_ids(80, 9), 2, service="latency")
    first_step = harness.committed
    harness.finish()
    assert harness.first_token_steps[urgent] - first_step <= 22
    assert harness.scheduler.stats.preemptions > 0


def test_equal_sequences_do_not_preempt_each_other() -> None:
    harness = SchedulerHarness(running_requests_max=2, priority_age_s=0.01)
    for number in range(6):
        harness.submit(text_ids(8, number), 10)
    harness.finish()
    assert harness.scheduler.stats.preemptions == 0
