"""Asynchronous scheduling: early steps change no output."""

import pytest

from gpt.sampling_params import SamplingParams
from tests.support.fake_ranks import text_ids
from tests.support.random_schedules import RandomSchedule
from tests.support.scheduler_harness import SchedulerHarness

CHUNKS = 3
SCHEDULES_PER_CHUNK = 100


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_sequence_in_a_random_async_schedule_has_the_same_output_as_alone(chunk: int) -> None:
    early_steps = 0
    for seed in range(chunk * SCHEDULES_PER_CHUNK, (chunk + 1) * SCHEDULES_PER_CHUNK):
        schedule = RandomSchedule(seed, step_ahead="on", stages=1, speculate_tokens_max=0)
        try:
            schedule.run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise
        early_steps += schedule.harness.async_steps
    assert early_steps > SCHEDULES_PER_CHUNK


def async_play(**settings: object) -> SchedulerHarness:
    return SchedulerHarness(step_ahead="on", **settings)  # type: ignore[arg-type]


def test_steps_are_planned_early_while_all_sequences_decode() -> None:
    harness = async_play()
    sequence_ids = [harness.submit(text_ids(3, seed), 20) for seed in range(3)]
    harness.finish()
    # One prefill step, then nineteen decode steps.
    assert (len(harness.steps), harness.async_steps) == (20, 19)
    assert [len(harness.tokens[sequence_id]) for sequence_id in sequence_ids] == [20] * 3


def test_a_stopped_sequence_is_reported_at_once_and_its_early_row_dropped() -> None:
    harness = async_play()
    stopped = harness.submit(text_ids(3), 20, stop_token_ids=tuple(range(50)))
    other = harness.submit(text_ids(3, 1), 20)
    harness.plan()
    step = harness.plan()
    assert step is not None and len(step.slots) == 2  # The end is not known yet.
    harness.commit()
    assert harness.last_outputs[stopped].end == "stop" and len(harness.tokens[stopped]) == 1
    assert harness.scheduler.stats.running == 2  # Its slot is free after the early step.
    next_step = harness.plan()
    assert next_step is not None and len(next_step.slots) == 1
    harness.commit()
    assert harness.scheduler.stats.running == 1
    harness.finish()
    assert harness.last_outputs[other].end == "length"


def test_no_early_step_is_planned_while_sequences_wait_or_prefill() -> None:
    harness = async_play(step_tokens_max=4)
    harness.submit(text_ids(3), 30)
    while harness.async_steps < 3:
        harness.step()
    late = harness.submit(text_ids(10, 1), 2)
    assert len(harness.in_flight) == 1 and harness.plan() is None
    harness.commit()
    step = harness.plan()
    assert step is not None and step.slot_inits
    assert harness.plan() is None  # Unplanned prefill prevents an early step.
    harness.finish()
    assert len(harness.tokens[late]) == 2


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1.2}, {"min_new_tokens": 3, "stop_token_ids": (1,)}]
)
def test_stateful_sampling_prevents_early_steps(sampling: dict[str, object]) -> None:
    assert not SamplingParams(**sampling).is_stateless  # type: ignore[arg-type]
    harness = async_play()
    harness.submit(text_ids(3), 5, **sampling)
    harness.submit(text_ids(3, 1), 5, **sampling)
    harness.finish()
    assert harness.async_steps == 0


def test_early_steps_work_with_preemption_when_blocks_run_short() -> None:
    harness = async_play(blocks=12, context=40)
    for seed in range(4):
        harness.submit(text_ids(5, seed), 20)
    harness.finish()
    assert harness.scheduler.stats.preemptions > 0 and harness.async_steps > 0
