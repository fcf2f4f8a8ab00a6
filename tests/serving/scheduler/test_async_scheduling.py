"""A step that begins before it is known what it follows: everybody ends as without it."""

import pytest

from gpt.sampling_params import Sampling
from tests.support.drawn_schedules import Drawn
from tests.support.fake_ranks import Play, text

CHUNKS, SCHEDULES_EACH = 3, 100


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules_that_step_ahead_end_as_each_would_alone(chunk: int) -> None:
    early = 0
    for seed in range(chunk * SCHEDULES_EACH, (chunk + 1) * SCHEDULES_EACH):
        drawn = Drawn(seed, step_ahead="on", stages=1, speculate_tokens_max=0)
        try:
            drawn.run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise
        early += drawn.play.early
    assert early > SCHEDULES_EACH


def ahead(**settings: object) -> Play:
    return Play(step_ahead="on", **settings)  # type: ignore[arg-type]


def test_while_all_decode_every_step_begins_before_the_last_one_is_over() -> None:
    play = ahead()
    numbers = [play.submit(text(3, seed), 20) for seed in range(3)]
    play.finish()
    # The prompts, then nineteen tokens each.
    assert (len(play.steps), play.early) == (20, 19)
    assert [len(play.tokens[number]) for number in numbers] == [20] * 3


def test_who_ends_by_what_it_drew_is_told_at_once_and_dropped_from_the_next_step() -> None:
    play = ahead()
    first = play.submit(text(3), 20, stop_token_ids=tuple(range(50)))
    other = play.submit(text(3, 1), 20)
    play.plan()
    step = play.plan()
    assert step is not None and len(step.slots) == 2  # Nobody knows yet.
    play.commit()
    assert play.made[first].end == "stop" and len(play.tokens[first]) == 1
    assert play.scheduler.load.running == 2  # Its place is free when the step is over.
    following = play.plan()
    assert following is not None and len(following.slots) == 1
    play.commit()
    assert play.scheduler.load.running == 1
    play.finish()
    assert play.made[other].end == "length"


def test_who_comes_or_has_a_prompt_left_waits_for_no_more_than_the_steps_in_flight() -> None:
    play = ahead(step_tokens_max=4)
    play.submit(text(3), 30)
    while play.early < 3:
        play.step()
    late = play.submit(text(10, 1), 2)
    assert len(play.flights) == 1 and play.plan() is None
    play.commit()
    step = play.plan()
    assert step is not None and step.begins
    assert play.plan() is None  # Its prompt goes on, and that must be planned.
    play.finish()
    assert len(play.tokens[late]) == 2


@pytest.mark.parametrize(
    "rule", [{"repetition_penalty": 1.2}, {"min_new_tokens": 3, "stop_token_ids": (1,)}]
)
def test_whose_choice_looks_at_what_was_made_is_waited_for(rule: dict[str, object]) -> None:
    assert not Sampling(**rule).stateless  # type: ignore[arg-type]
    play = ahead()
    play.submit(text(3), 5, **rule)
    play.submit(text(3, 1), 5, **rule)
    play.finish()
    assert play.early == 0


def test_short_of_blocks_nobody_loses_a_place_to_a_step_ahead() -> None:
    play = ahead(blocks=12, context=40)
    for seed in range(4):
        play.submit(text(5, seed), 20)
    play.finish()
    assert play.scheduler.load.preemptions > 0 and play.early > 0
