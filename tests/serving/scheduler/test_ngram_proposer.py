"""Guesses: what repeats itself is seen, and guessed only as far as it pays; nothing else changes.

The schedules draw tokens that repeat themselves often;
tests/serving/scheduler/test_random_schedules.py holds the rest of it at random, and
tests/equivalence/test_batch_invariance.py with models.
"""

from random import Random

import pytest

from gpt.errors import ConfigError
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Guide, Step, Submission
from serving.scheduler.ngram_proposer import PLACES_MAX, READ_MAX, REST_LOOKS, Guesses
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE, Play, adapter, text, virtual

# ----------------------------------------------------------------------------------- one sequence


@pytest.mark.parametrize(
    ("tokens", "most", "guess"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 0, []),
        # The longest run decides, and of equal ones the last.
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [5]),
        ([8, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [6]),
        # A run that reaches its own end goes on with itself.
        ([3, 1, 2, 1, 2], 6, [1, 2, 1, 2, 1, 2]),
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 4, 5], 3, []),
        ([1, 2, 3, 2], 3, []),
        ([4], 3, []),
        # Virtual tokens are nobody's: they are neither guessed nor a reason to.
        ([1, 2, 50, 9, 1, 2], 3, []),
        ([1, 2, 3, 50, 9, 1, 2], 3, [3]),
        ([50, 51, 3, 50, 51], 3, []),
        ([50, 1, 2, 8, 1, 2, 9, 50, 1, 2], 1, [9]),
    ],
)
def test_what_stood_before_is_guessed_to_go_on_alike(
    tokens: list[int], most: int, guess: list[int]
) -> None:
    guesses = Guesses(tokens, VOCAB_SIZE)
    guesses.learn(30, 30)  # It is trusted with any number.
    assert guesses.next(most) == guess


def plainly(tokens: list[int]) -> list[int]:
    """The next token by a plain look at the places where the last two stood before."""
    places = [at for at in range(2, len(tokens)) if tokens[at - 2 : at] == tokens[-2:]]
    runs = {}
    for place in places[-PLACES_MAX:]:
        four = place >= 4 and tokens[place - 4 : place] == tokens[-4:]
        three = place >= 3 and tokens[place - 3 : place] == tokens[-3:]
        runs[4 if four else 3 if three else 2] = tokens[place]
    return [runs[max(runs)]] if runs else []


@pytest.mark.parametrize("kinds", [2, 4, 9])
def test_the_longest_run_is_found_as_tokens_grow(kinds: int) -> None:
    random = Random(kinds)
    tokens = [random.randrange(kinds)]
    guesses = Guesses(tokens, VOCAB_SIZE)
    guesses.learn(30, 30)
    for _ in range(200):
        assert guesses.next(1) == plainly(tokens)
        tokens.append(random.randrange(kinds))


def test_a_long_prompt_is_read_over_some_looks() -> None:
    tokens = [1, 2, 3, *range(4, 4 + 2 * READ_MAX), 1, 2]
    guesses = Guesses(tokens, 10**6)
    assert [guesses.next(1) for _ in range(4)] == [[], [], [3], [3]]


def test_who_guesses_wrong_guesses_less_then_rests_and_tries_again() -> None:
    guesses = Guesses([7] * 9, VOCAB_SIZE)
    counts = []
    for _ in range(REST_LOOKS + 8):
        counts.append(len(guesses.next(3)))
        if counts[-1]:
            guesses.learn(counts[-1], 0)
    tried = [look for look, count in enumerate(counts) if count]
    assert counts[0] == 2 and counts[1] == 1
    assert len(tried) == 5 and tried[-1] - tried[-2] == REST_LOOKS
    for _ in range(8):  # Right guesses bring it back.
        guesses.learn(1, 1)
    assert len(guesses.next(3)) == 3


@pytest.mark.parametrize(
    ("guess", "drawn", "kept", "end"),
    [
        ([], [8], [8], None),
        ([5, 6], [5, 6, 7], [5, 6, 7], None),
        ([5, 6], [5, 9, 7], [5, 9], None),
        ([5, 6], [9, 6, 7], [9], None),
        ([5, 3, 6], [5, 3, 6, 7], [5, 3], "stop"),  # It stops at 3, though it was right.
        ([5, 6], [5, 3, 7], [5, 3], "stop"),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], "length"),
        ([5, 6, 7], [5, 6, 7, 3], [5, 6, 7, 3], "stop"),
    ],
)
def test_as_much_is_kept_as_would_have_come_without_guesses(
    guess: list[int], drawn: list[int], kept: list[int], end: str | None
) -> None:
    most = 7 if end == "length" or drawn[-1] == 3 else 8
    rule = Sampling(max_new_tokens=most - 2, stop_token_ids=(3,))
    one = Sequence(
        Submission(0, [1, 2], rule),
        order=0,
        tokens=[1, 2, 5],
        prompt=2,
        most=most,
        latency=True,
        queued_at=0.0,
    )
    one.guess = guess
    assert one.accept(drawn) == kept
    assert (one.tokens, one.ending, one.guess) == ([1, 2, 5, *kept], end, [])


# -------------------------------------------------------------------------------------- all of them


def guesses_of(steps: list[Step]) -> list[int]:
    return [sum(step.drafts) for step in steps]


def test_guesses_save_steps_and_change_no_answer() -> None:
    play = Play(speculate_tokens_max=3, blocks=400)
    play.submit(text(9), 300)
    play.finish()  # Which compares the answer with the one without.
    load = play.scheduler.load
    assert 0 < load.accepted_tokens < load.drafted_tokens
    assert play.committed == 300 - load.accepted_tokens + load.steps - play.committed
    assert play.committed < 200
    assert (load.drafted_tokens, load.accepted_tokens) == (play.ranks.guessed, play.ranks.right)


def test_guesses_are_off_at_0_and_never_less() -> None:
    assert ServerConfig("model").speculate_tokens_max == 0
    with pytest.raises(ConfigError, match=r"speculate_tokens_max is -1; it must be 0 \(off\)"):
        ServerConfig("model", speculate_tokens_max=-1)
    with pytest.raises(ConfigError, match="speculate_rows_max is 0"):
        ServerConfig("model", speculate_rows_max=0)


def test_nobody_is_guessed_unless_it_is_asked_for() -> None:
    play = Play()
    play.submit(text(9), 50)
    play.finish()
    assert all(step.drafts == [] for step in play.steps)


@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"min_new_tokens": 30},
        {"bad_words": ((1, 2),)},
        {"guide": Guide("choice", '["a"]')},
    ],
)
def test_whose_choice_depends_on_what_was_made_is_not_guessed(how: dict[str, object]) -> None:
    play = Play(speculate_tokens_max=3)
    play.submit(text(9), 50, **how)
    play.submit(text(9), 50, bad_words=((1,),), logprobs=2, temperature=0.5)
    play.finish()
    slots = {begin.sampling.seed: begin.slot for step in play.steps for begin in step.begins}
    guessed = {
        slot
        for step in play.steps
        for slot, count in zip(step.slots, step.drafts, strict=False)
        if count
    }
    assert guessed == {slots[1]}


def test_rows_are_bounded_and_all_that_decode_come_before_guesses() -> None:
    play = Play(speculate_tokens_max=3, speculate_rows_max=6, blocks=600)
    for number in range(4):
        play.submit(text(4, number), 20 + 80 * (number > 1))
    play.finish()
    busy = [step for step in play.steps if len(step.slots) == 4 and sum(step.draws) == 4]
    assert max(guesses_of(busy)) == 2
    assert max(guesses_of(play.steps)) == 4


def test_a_prompt_comes_before_guesses() -> None:
    play = Play(speculate_tokens_max=5, speculate_rows_max=100, step_tokens_max=8, blocks=800)
    for number in range(3):
        play.submit(text(4, number), 400)
    for _ in range(60):
        play.step()
    late, begun = play.submit(text(80, 9), 2), play.committed
    while late not in play.first_at:
        play.step()
    assert play.first_at[late] - begun <= 22
    assert max(guesses_of(play.steps[begun:])) > 0
    play.finish()


def test_a_guess_takes_no_block_that_another_may_need_next() -> None:
    play = Play(speculate_tokens_max=5, kv_block_tokens=1, blocks=1 + 80, prefix_cache=False)
    for number in range(3):
        play.submit(text(8, number), 40)
    taken = short = 0
    while play.scheduler.busy:
        step, load = play.plan(), play.scheduler.load
        assert step is not None
        left = load.blocks - load.blocks_held
        short += left < load.running
        for table in step.tables if all(step.draws) else ():
            if table.start > step.past[step.slots.index(table.slot)]:  # Not for its next token.
                taken += 1
                assert left >= load.running
        play.commit()
    play.check_over()
    assert taken and short and play.scheduler.load.preemptions > 0


def test_what_guesses_wrote_is_never_in_the_cache() -> None:
    play = Play(speculate_tokens_max=5, kv_block_tokens=2, blocks=500)
    play.submit(text(8), 60)
    play.finish()
    assert play.ranks.guessed > play.ranks.right
    for cut in range(57, 8, -3):  # Its first tokens, then what may have been guessed.
        first = play.numbers
        for token in (0, 1, 7):
            play.submit([*text(8), *play.tokens[0][:cut], token], 2)
        play.finish()  # Whose reads are held against the prefix.
        # But every block of what was made is.
        assert play.cached[first] >= (8 + cut) // 2 * 2


def test_numbers_that_only_a_guess_broke_are_not_its_sequences_fault() -> None:
    step: Step | None = None
    play = Play(speculate_tokens_max=3, breaks=lambda number: step is not None and any(step.drafts))
    run = play.ranks.run

    def watched(planned: Step) -> object:
        nonlocal step
        step = planned
        return run(planned)

    play.ranks.run = watched  # type: ignore[assignment, method-assign]
    rows = adapter("task", 3)
    play.submit([*virtual(3), *text(9)], 60, rows=rows)
    play.finish()
    assert play.made[0].end == "length"
    # Once it was; then it went on without guesses, from what it had.
    assert [count > 0 for count in guesses_of(play.steps)].count(True) == 1
    assert sum(len(step.begins) for step in play.steps) == 2
    play.submit(text(3), 1)
    play.finish()  # Nothing is left to be cleared.
    assert sum(bool(step.clears) for step in play.steps) == 1
    assert play.scheduler.load.preemptions == 0
