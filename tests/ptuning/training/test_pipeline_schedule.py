"""Schedules of a pipeline, played by stages that are a few numbers: nothing is lost, nobody waits.

The player sends at once and receives in order, as the real channels do; a message that comes out of
order, or a circle of stages that wait for each other, fails.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptuning.training.pipeline import KEPT_MAX
from ptuning.training.pipeline_schedule import Pass, forward_only, interleaved, one_f_one_b

Lists = list[list[Pass]]
Link = tuple[bool, int]  # Forward or not, and the stage that sends.


def lists(stages: int, micros: int, chunks: int) -> Lists:
    """What every stage does; one chunk is 1F1B."""
    if chunks == 1:
        return [one_f_one_b(stage, stages, micros) for stage in range(stages)]
    return [interleaved(stage, stages, micros, chunks) for stage in range(stages)]


@dataclass
class Player:
    """All stages, each at its place in its list; a message waits until its stage takes it."""

    passes: Lists
    chunks: int
    kept_max: int | None = None  # Messages on their way, when a stage goes on; None: any number.
    links: dict[Link, deque[tuple[float, int, int]]] = field(default_factory=dict)
    clocks: list[float] = field(default_factory=list)

    def play(self) -> float:
        """The time at which all is done, if a pass takes one and a message nothing."""
        count = len(self.passes)
        at = [0] * count
        self.clocks = [0.0] * count
        while any(place < len(todo) for place, todo in zip(at, self.passes, strict=True)):
            moved = False
            for stage in range(count):
                while at[stage] < len(self.passes[stage]) and self.step(
                    stage, self.passes[stage][at[stage]]
                ):
                    at[stage] += 1
                    moved = True
            assert moved, f"every stage waits: {at}"
        assert not any(self.links.values()), "messages that nobody took"
        return max(self.clocks)

    def step(self, stage: int, one: Pass) -> bool:
        """Do it if what it needs is there, and what the stage sent before has arrived."""
        count, forward = len(self.passes), one.forward
        ends = (0, 0), (count - 1, self.chunks - 1)
        begin, end = ends if forward else ends[::-1]
        outgoing = [self.links.setdefault((way, stage), deque()) for way in (False, True)]
        if self.kept_max is not None and max(map(len, outgoing)) > self.kept_max:
            return False
        came = 0.0
        if (stage, one.chunk) != begin:
            back = stage - 1 if forward else stage + 1
            incoming = self.links.setdefault((forward, back % count), deque())
            if not incoming:
                return False
            came, micro, chunk = incoming.popleft()
            assert (micro, chunk) == (one.micro, one.chunk), "a message of another pass"
        self.clocks[stage] = max(self.clocks[stage], came) + 1
        if (stage, one.chunk) != end:
            wraps = stage == (count - 1 if forward else 0)
            chunk = one.chunk + (wraps if forward else -wraps)
            outgoing[forward].append((self.clocks[stage], one.micro, chunk))
        return True


def held_most(passes: list[Pass]) -> int:
    """The most activations of chunks that wait for their backward pass at once."""
    held = most = 0
    for one in passes:
        held += 1 if one.forward else -1
        most = max(most, held)
    return most


SIZES = st.tuples(st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))


@given(SIZES)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_pass_is_made_once_and_the_backward_one_after_the_forward_one(
    sizes: tuple[int, int, int],
) -> None:
    _, micros, chunks = sizes
    everything = {
        Pass(way, micro, chunk): 1
        for way in (True, False)
        for micro in range(micros)
        for chunk in range(chunks)
    }
    for passes in lists(*sizes):
        assert Counter(passes) == everything
        place = {one: index for index, one in enumerate(passes)}
        for one in passes:
            assert place[Pass(True, one.micro, one.chunk)] <= place[one]


@given(SIZES, st.sampled_from([None, 1, KEPT_MAX]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_stages_never_wait_in_a_circle_and_messages_keep_their_order(
    sizes: tuple[int, int, int], kept_max: int | None
) -> None:
    Player(lists(*sizes), sizes[2], kept_max).play()


@given(SIZES)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_stage_holds_no_more_activations_than_the_schedules_promise(
    sizes: tuple[int, int, int],
) -> None:
    stages, micros, chunks = sizes
    for stage, passes in enumerate(lists(*sizes)):
        if chunks == 1:
            assert held_most(passes) == min(stages - stage, micros)
        else:
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
            assert held_most(passes) <= min(ahead + 1, micros * chunks)


@given(SIZES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_forward_passes_alone_keep_the_order_of_the_links(sizes: tuple[int, int, int]) -> None:
    stages, micros, chunks = sizes
    passes = forward_only(stages, micros, chunks)
    Player([passes] * stages, chunks, KEPT_MAX).play()
    assert Counter(passes) == {Pass(True, m, c): 1 for m in range(micros) for c in range(chunks)}


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_full_rounds_idle_for_as_many_passes_as_stages_follow(
    stages: int, chunks: int, rounds: int
) -> None:
    micros = rounds * stages
    assert Player(lists(stages, micros, chunks), chunks).play() == 2 * (
        micros * chunks + stages - 1
    )


def told(passes: list[Pass], show: Callable[[Pass], str]) -> str:
    return " ".join(("F" if one.forward else "B") + show(one) for one in passes)


def test_the_orders_are_those_of_the_papers() -> None:
    def micro(one: Pass) -> str:
        return str(one.micro)

    assert told(one_f_one_b(0, 3, 4), micro) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert told(one_f_one_b(2, 3, 4), micro) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert told(one_f_one_b(0, 3, 1), micro) == "F0 B0"

    def both(one: Pass) -> str:
        return f"{one.micro}{'ab'[one.chunk]}"

    assert told(interleaved(1, 2, 4, 2), both) == (
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    )
    assert told(interleaved(0, 2, 1, 2), both) == "F0a F0b B0b B0a"
