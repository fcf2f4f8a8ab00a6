"""Writes of adapter weights: in pieces, pinned until the sequences end, and evicted."""

import pytest

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import AdapterRef, Step
from serving.scheduler.scheduler import (
    IDLE_WRITE_BYTES_MAX,
    LINEAR_WRITE_BYTES_MAX,
    PREFILL_WRITE_BYTES_MAX,
)
from tests.support.fake_ranks import make_adapter_ref, text_ids
from tests.support.scheduler_harness import SchedulerHarness

MEMORY_MB = 32
PAGES = MEMORY_MB * 1_000_000 // ADAPTER_PAGE_BYTES


def make_harness() -> SchedulerHarness:
    return SchedulerHarness(adapter_memory_mb=MEMORY_MB)


def adapter(name: str, pages: int, linears: int = 48) -> AdapterRef:
    return make_adapter_ref(name, 0, "linears", linears=linears, pages=pages)


def next_step(harness: SchedulerHarness) -> Step:
    step = harness.plan()
    assert step is not None
    harness.commit()
    return step


def written_bytes(step: Step, ref: AdapterRef) -> int:
    count = sum(write.count for write in step.linear_writes)
    return count * (ref.linear_bytes // ref.linear_count)


def test_a_small_adapter_is_written_in_the_step_of_its_first_tokens() -> None:
    harness = make_harness()
    harness.submit(text_ids(5), adapter_ref=adapter("a", 48))
    step = harness.plan()
    assert step is not None and len(step.token_ids) == 5
    assert [(write.first, write.count) for write in step.linear_writes] == [(0, 48)]


def test_a_large_adapter_is_written_in_pieces_beside_running_sequences() -> None:
    harness = make_harness()
    running = harness.submit(text_ids(4), new=60)
    next_step(harness)
    large = adapter("a", 7680)  # 30 MiB.
    waiting = harness.submit(text_ids(4), adapter_ref=large)
    steps = []
    while waiting not in harness.first_token_steps:
        steps.append(next_step(harness))
    writing = [step for step in steps if step.linear_writes]
    assert [write.first for step in writing for write in step.linear_writes] == [0, 16, 32]
    for step in writing:
        assert written_bytes(step, large) <= LINEAR_WRITE_BYTES_MAX
        assert running in harness.first_token_steps and step.token_ids
    # The first tokens are in the step after the last piece.
    assert [len(step.slots) for step in steps] == [1, 1, 1, 2]


@pytest.mark.parametrize("is_small", [True, False])
def test_beside_running_sequences_a_prefill_is_not_in_the_step_of_a_long_write(
    is_small: bool,
) -> None:
    harness = make_harness()
    harness.submit(text_ids(4), new=60)
    next_step(harness)
    small, other = adapter("a", 48), adapter("b", 480)
    assert small.linear_bytes <= PREFILL_WRITE_BYTES_MAX < other.linear_bytes
    harness.submit(text_ids(4), adapter_ref=small if is_small else other)
    first, second = next_step(harness), next_step(harness)
    assert first.linear_writes and not second.linear_writes
    assert [len(first.slots), len(second.slots)] == ([2, 2] if is_small else [1, 2])


def test_several_adapters_are_written_in_one_step_before_their_prefills() -> None:
    harness = make_harness()
    harness.submit(text_ids(4), new=60)
    next_step(harness)
    for name in "abc":
        harness.submit(text_ids(4), adapter_ref=adapter(name, 480))
    first, second = next_step(harness), next_step(harness)
    assert [write.digest for write in first.linear_writes] == ["a", "b", "c"]
    assert [len(first.slots), len(second.slots)] == [1, 4]


def test_without_running_sequences_larger_pieces_are_written() -> None:
    harness = make_harness()
    large = adapter("a", 7680)  # 30 MiB.
    harness.submit(text_ids(4), adapter_ref=large)
    first, second = next_step(harness), next_step(harness)
    assert LINEAR_WRITE_BYTES_MAX < written_bytes(first, large) <= IDLE_WRITE_BYTES_MAX
    assert not first.slots and second.slots


def test_an_adapter_is_pinned_until_its_last_sequence_ends() -> None:
    harness = make_harness()
    half = PAGES // 2 + 1
    first = harness.submit(text_ids(3), new=6, adapter_ref=adapter("a", half))
    second = harness.submit(text_ids(3), new=2, adapter_ref=adapter("b", half))
    base = harness.submit(text_ids(3), new=2)
    harness.finish()
    # The base model needs no memory; "b" waits for the end of "a".
    assert harness.end_steps[base] < harness.end_steps[first]
    assert harness.first_token_steps[second] > harness.end_steps[first]
    stats = harness.scheduler.stats
    assert (stats.adapter_loads, stats.adapter_evictions) == (2, 1)
    assert stats.adapter_memory_bytes == half * ADAPTER_PAGE_BYTES, "of the adapter that is left"
    third = harness.submit(text_ids(3), new=2, adapter_ref=adapter("b", half))
    harness.finish()
    assert harness.scheduler.stats.adapter_loads == 2 and third in harness.end_steps


def test_a_cancelled_sequence_frees_a_write_in_progress() -> None:
    harness = make_harness()
    harness.submit(text_ids(4), new=200)
    next_step(harness)
    cancelled = harness.submit(text_ids(4), adapter_ref=adapter("a", PAGES))
    assert next_step(harness).linear_writes
    harness.scheduler.cancel([cancelled])
    assert not next_step(harness).linear_writes
    other = harness.submit(text_ids(4), adapter_ref=adapter("b", PAGES))
    harness.finish()
    assert harness.last_outputs[other].end == "length"


@pytest.mark.parametrize("pages", [PAGES + 1, 10 * PAGES])
def test_an_adapter_that_exceeds_the_memory_is_rejected(pages: int) -> None:
    harness = make_harness()
    number = harness.submit(text_ids(3), adapter_ref=adapter("a", pages))
    assert harness.last_outputs[number].end == "adapter"
    assert "raise adapter_memory_mb" in harness.last_outputs[number].reason
