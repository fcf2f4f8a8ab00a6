"""Thousands of random schedules: whatever comes, each sequence ends as it would have alone."""

import gc
import time
import tracemalloc

import pytest

from tests.support.drawn_schedules import ADAPTERS, Drawn
from tests.support.fake_ranks import adapter

ADAPTERS += [adapter(f"prefix-{count}", count, "prefix") for count in (1, 4, 6)]
CHUNKS, SCHEDULES_EACH = 20, 100


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules_end_as_each_would_alone(chunk: int) -> None:
    for seed in range(chunk * SCHEDULES_EACH, (chunk + 1) * SCHEDULES_EACH):
        try:
            Drawn(seed).run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise


SOAK_SERVERS, SOAK_SERVER_S, SOAK_ROUND = 20, 30.0, 50
# What Python itself keeps from round to round.
SOAK_GROWTH_BYTES = 200_000


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SOAK_SERVERS))
def test_a_server_that_runs_long_keeps_nothing_of_what_is_over(seed: int) -> None:
    drawn = Drawn(seed)
    drawn.run(SOAK_ROUND)
    drawn.play.forget()
    tracemalloc.start()
    try:
        sizes, end = list[int](), time.monotonic() + SOAK_SERVER_S
        while time.monotonic() < end:
            drawn.run(SOAK_ROUND)
            drawn.play.forget()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    half, play = len(sizes) // 2, drawn.play
    print(f"server {seed}: {play.numbers} sequences, {play.committed} steps, {sizes[-1]} bytes")
    assert half and max(sizes[half:]) < max(sizes[:half]) + SOAK_GROWTH_BYTES
