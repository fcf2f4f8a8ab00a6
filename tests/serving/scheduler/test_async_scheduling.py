"""Asynchronous scheduling: early steps change no output."""

import pytest

from gpt.sampling_params import SamplingParams
from tests.support.drawn_schedules import Drawn
from tests.support.fake_ranks import Play, text

CHUNKS = 3
SCHEDULES_PER_CHUNK = 100


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_sequence_in_a_random_async_schedule_has_the_same_output_as_alone(chunk: int) -> None:
    early_steps = 0
    for seed in range(chunk * SCHEDULES_PER_CHUNK, (chunk + 1) * SCHEDULES_PER_CHUNK):
        drawn = Drawn(seed, step_ahead="on", stages=1, speculate_tokens_max=0)
        try:
            drawn.run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise
        early_steps += drawn.play.early
    assert early_steps > SCHEDULES_PER_CHUNK


def async_play(**settings: object) -> Play:
    return Play(step_ahead="on", **settings)  # type: ignore[arg-type]


def test_steps_are_planned_early_while_all_sequences_decode() -> None:
    play = async_play()
    sequence_ids = [play.submit(text(3, seed), 20) for seed in range(3)]
    play.finish()
    # One prefill step, then nineteen decode steps.
    assert (len(play.steps), play.early) == (20, 19)
    assert [len(play.tokens[sequence_id]) for sequence_id in sequence_ids] == [20] * 3


def test_a_stopped_sequence_is_reported_at_once_and_its_early_row_dropped() -> None:
    play = async_play()
    stopped = play.submit(text(3), 20, stop_token_ids=tuple(range(50)))
    other = play.submit(text(3, 1), 20)
    play.plan()
    step = play.plan()
    assert step is not None and len(step.slots) == 2  # The end is not known yet.
    play.commit()
    assert play.last_outputs[stopped].end == "stop" and len(play.tokens[stopped]) == 1
    assert play.scheduler.stats.running == 2  # Its slot is free after the early step.
    next_step = play.plan()
    assert next_step is not None and len(next_step.slots) == 1
    play.commit()
    assert play.scheduler.stats.running == 1
    play.finish()
    assert play.last_outputs[other].end == "length"


def test_no_early_step_is_planned_while_sequences_wait_or_prefill() -> None:
    play = async_play(step_tokens_max=4)
    play.submit(text(3), 30)
    while play.early < 3:
        play.step()
    late = play.submit(text(10, 1), 2)
    assert len(play.flights) == 1 and play.plan() is None
    play.commit()
    step = play.plan()
    assert step is not None and step.slot_inits
    assert play.plan() is None  # Unplanned prefill prevents an early step.
    play.finish()
    assert len(play.tokens[late]) == 2


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1.2}, {"min_new_tokens": 3, "stop_token_ids": (1,)}]
)
def test_stateful_sampling_prevents_early_steps(sampling: dict[str, object]) -> None:
    assert not SamplingParams(**sampling).is_stateless  # type: ignore[arg-type]
    play = async_play()
    play.submit(text(3), 5, **sampling)
    play.submit(text(3, 1), 5, **sampling)
    play.finish()
    assert play.early == 0


def test_early_steps_work_with_preemption_when_blocks_run_short() -> None:
    play = async_play(blocks=12, context=40)
    for seed in range(4):
        play.submit(text(5, seed), 20)
    play.finish()
    assert play.scheduler.stats.preemptions > 0 and play.early > 0
