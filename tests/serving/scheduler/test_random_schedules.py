"""Thousands of random schedules: each sequence has the same output as alone."""

import gc
import time
import tracemalloc

import pytest

from tests.support.random_schedules import RandomSchedule

CHUNKS = 20
SCHEDULES_PER_CHUNK = 100


@pytest.mark.parametrize(
    "chunk",
    [0, 1, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(2, CHUNKS))],
)
def test_a_sequence_in_kv_groups_with_windows_has_the_same_output_as_alone(chunk: int) -> None:
    for seed in range(chunk * SCHEDULES_PER_CHUNK, (chunk + 1) * SCHEDULES_PER_CHUNK):
        try:
            RandomSchedule(seed, has_windows=True).run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_sequence_in_a_random_schedule_has_the_same_output_as_alone(chunk: int) -> None:
    for seed in range(chunk * SCHEDULES_PER_CHUNK, (chunk + 1) * SCHEDULES_PER_CHUNK):
        try:
            RandomSchedule(seed).run(arrivals=8)
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise


SOAK_SERVERS = 20
SOAK_SERVER_S = 30.0
SOAK_ROUND_ARRIVALS = 50
# Memory that Python itself does not free between rounds.
SOAK_GROWTH_BYTES = 200_000


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SOAK_SERVERS))
def test_the_memory_of_a_long_running_scheduler_does_not_grow(seed: int) -> None:
    schedule = RandomSchedule(seed)
    schedule.run(SOAK_ROUND_ARRIVALS)
    schedule.harness.discard_records()
    tracemalloc.start()
    try:
        sizes = list[int]()
        end = time.monotonic() + SOAK_SERVER_S
        while time.monotonic() < end:
            schedule.run(SOAK_ROUND_ARRIVALS)
            schedule.harness.discard_records()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    half = len(sizes) // 2
    harness = schedule.harness
    counts = f"{harness.submissions} sequences, {harness.committed} steps"
    print(f"server {seed}: {counts}, {sizes[-1]} bytes")
    assert half and max(sizes[half:]) < max(sizes[:half]) + SOAK_GROWTH_BYTES
