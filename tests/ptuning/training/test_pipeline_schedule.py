"""Pipeline schedules, simulated: every pass is executed, in order, without a deadlock.

The simulator sends at once and receives in order, as the real links do. A message out of order or a
cycle of waiting stages fails the test.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptuning.training.pipeline import SENDS_PENDING_MAX
from ptuning.training.pipeline_schedule import (
    Pass,
    schedule_1f1b,
    schedule_forward_only,
    schedule_interleaved_1f1b,
)

PassLists = list[list[Pass]]
Link = tuple[bool, int]  # Forward or not, and the sending stage.


def passes_of_stages(stages: int, micros: int, chunks: int) -> PassLists:
    """The passes of every stage; one chunk gives 1F1B."""
    if chunks == 1:
        return [schedule_1f1b(stage, stages, micros) for stage in range(stages)]
    return [schedule_interleaved_1f1b(stage, stages, micros, chunks) for stage in range(stages)]


@dataclass
class ScheduleSimulator:
    """Simulates all stages; a message waits until its stage receives it."""

    passes: PassLists
    chunks: int
    pending_sends_max: int | None = None  # Limit of unfinished sends of a stage; None: no limit.
    links: dict[Link, deque[tuple[float, int, int]]] = field(default_factory=dict)
    clocks: list[float] = field(default_factory=list)

    def simulate(self) -> float:
        """Total time if a pass takes 1 and a message takes 0."""
        count = len(self.passes)
        positions = [0] * count
        self.clocks = [0.0] * count
        while any(
            position < len(passes_of_stage)
            for position, passes_of_stage in zip(positions, self.passes, strict=True)
        ):
            moved = False
            for stage in range(count):
                while positions[stage] < len(self.passes[stage]) and self.step(
                    stage, self.passes[stage][positions[stage]]
                ):
                    positions[stage] += 1
                    moved = True
            assert moved, f"every stage waits: {positions}"
        assert not any(self.links.values()), "messages that nobody took"
        return max(self.clocks)

    def step(self, stage: int, pass_: Pass) -> bool:
        """Execute the next pass of a stage if its input and earlier sends have arrived."""
        count = len(self.passes)
        forward = pass_.forward
        end_chunks = (0, 0), (count - 1, self.chunks - 1)
        begin, end = end_chunks if forward else end_chunks[::-1]
        outgoing = [
            self.links.setdefault((direction, stage), deque()) for direction in (False, True)
        ]
        if self.pending_sends_max is not None and max(map(len, outgoing)) > self.pending_sends_max:
            return False
        arrival_s = 0.0
        if (stage, pass_.chunk) != begin:
            sender = stage - 1 if forward else stage + 1
            incoming = self.links.setdefault((forward, sender % count), deque())
            if not incoming:
                return False
            arrival_s, micro, chunk = incoming.popleft()
            assert (micro, chunk) == (pass_.micro_batch, pass_.chunk), "a message of another pass"
        self.clocks[stage] = max(self.clocks[stage], arrival_s) + 1
        if (stage, pass_.chunk) != end:
            wraps = stage == (count - 1 if forward else 0)
            chunk = pass_.chunk + (wraps if forward else -wraps)
            outgoing[forward].append((self.clocks[stage], pass_.micro_batch, chunk))
        return True


def alive_activations_max(passes: list[Pass]) -> int:
    """Maximum number of activations that wait for their backward pass."""
    alive = alive_max = 0
    for passed in passes:
        alive += 1 if passed.forward else -1
        alive_max = max(alive_max, alive)
    return alive_max


SIZES = st.tuples(st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))


@given(SIZES)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_pass_occurs_once_and_backward_follows_forward(
    sizes: tuple[int, int, int],
) -> None:
    _, micros, chunks = sizes
    expected_passes = {
        Pass(direction, micro, chunk): 1
        for direction in (True, False)
        for micro in range(micros)
        for chunk in range(chunks)
    }
    for passes in passes_of_stages(*sizes):
        assert Counter(passes) == expected_passes
        index_of_pass = {passed: index for index, passed in enumerate(passes)}
        for pass_ in passes:
            assert index_of_pass[Pass(True, pass_.micro_batch, pass_.chunk)] <= index_of_pass[pass_]


@given(SIZES, st.sampled_from([None, 1, SENDS_PENDING_MAX]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_schedules_never_deadlock_and_messages_keep_their_order(
    sizes: tuple[int, int, int], pending_sends_max: int | None
) -> None:
    ScheduleSimulator(passes_of_stages(*sizes), sizes[2], pending_sends_max).simulate()


@given(SIZES)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_stage_keeps_at_most_the_documented_activations(
    sizes: tuple[int, int, int],
) -> None:
    stages, micros, chunks = sizes
    for stage, passes in enumerate(passes_of_stages(*sizes)):
        if chunks == 1:
            assert alive_activations_max(passes) == min(stages - stage, micros)
        else:
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
            assert alive_activations_max(passes) <= min(ahead + 1, micros * chunks)


@given(SIZES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_forward_only_schedule_keeps_the_message_order(sizes: tuple[int, int, int]) -> None:
    stages, micros, chunks = sizes
    passes = schedule_forward_only(stages, micros, chunks)
    ScheduleSimulator([passes] * stages, chunks, SENDS_PENDING_MAX).simulate()
    assert Counter(passes) == {Pass(True, m, c): 1 for m in range(micros) for c in range(chunks)}


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_bubble_of_full_groups_equals_the_formula(stages: int, chunks: int, rounds: int) -> None:
    micros = rounds * stages
    assert ScheduleSimulator(passes_of_stages(stages, micros, chunks), chunks).simulate() == 2 * (
        micros * chunks + stages - 1
    )


def format_passes(passes: list[Pass], show: Callable[[Pass], str]) -> str:
    return " ".join(("F" if passed.forward else "B") + show(passed) for passed in passes)


def test_schedules_equal_the_papers() -> None:
    def micro(pass_: Pass) -> str:
        return str(pass_.micro_batch)

    assert format_passes(schedule_1f1b(0, 3, 4), micro) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert format_passes(schedule_1f1b(2, 3, 4), micro) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert format_passes(schedule_1f1b(0, 3, 1), micro) == "F0 B0"

    def micro_and_chunk(pass_: Pass) -> str:
        return f"{pass_.micro_batch}{'ab'[pass_.chunk]}"

    assert format_passes(schedule_interleaved_1f1b(1, 2, 4, 2), micro_and_chunk) == (
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    )
    assert (
        format_passes(schedule_interleaved_1f1b(0, 2, 1, 2), micro_and_chunk) == "F0a F0b B0b B0a"
    )
