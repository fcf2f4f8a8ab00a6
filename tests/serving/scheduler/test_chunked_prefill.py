"""Chunked prefill: cost of a prefill token, stall limit in tokens, and ends of chunks."""

from random import Random

import pytest

from serving.scheduler.chunked_prefill import PrefillCostModel, PrefillTokenBudget, chunk_end
from tests.support.fake_ranks import text_ids
from tests.support.scheduler_harness import SchedulerHarness

# ------------------------------------------------------------------------------- cost model


def test_the_slope_is_independent_of_the_fixed_cost_of_a_step() -> None:
    cost, random = PrefillCostModel(), Random(0)
    for _ in range(200):
        tokens = random.choice([0, 0, 64, 512])
        cost.record_step(tokens, (0.030 + 0.0002 * tokens) * random.uniform(0.9, 1.1))
    assert cost.seconds_per_token == pytest.approx(0.0002, rel=0.15)
    assert cost.tokens_within(0.015, 16) == pytest.approx(75, rel=0.2)


def test_at_least_one_block_of_prefill_is_allowed() -> None:
    cost = PrefillCostModel()
    assert cost.tokens_within(0.015, 16) == 16
    cost.record_step(100, 10.0)
    cost.record_step(0, 0.1)
    assert cost.tokens_within(0.015, 16) == 16


def test_the_slope_follows_slower_steps() -> None:
    cost = PrefillCostModel()
    for scale in (1, 5):
        for step in range(200):
            tokens = 100 * (step % 2)
            cost.record_step(tokens, scale * (0.01 + 0.0001 * tokens))
    assert cost.seconds_per_token == pytest.approx(0.0005, rel=0.05)


def test_noise_does_not_allow_unlimited_prefill() -> None:
    cost = PrefillCostModel()
    for step in range(100):  # The steps with prefill are the faster ones by chance.
        cost.record_step(100 * (step % 2), 0.02 - 0.01 * (step % 2))
    assert 0 < cost.tokens_within(0.015, 1) <= 1000


def test_identical_steps_attribute_all_time_to_tokens() -> None:
    cost = PrefillCostModel()
    for _ in range(10):
        cost.record_step(100, 0.1)
    assert cost.seconds_per_token == pytest.approx(0.001)


# ------------------------------------------------------------------------------- token budget


def fitted_budget(stall_s_max: float) -> PrefillTokenBudget:
    """A budget of blocks of 16 tokens; each prefill token adds 0.125 ms to a step."""
    budget = PrefillTokenBudget(stall_s_max, block_tokens=16)
    for step in range(100):
        tokens = 128 * (step % 2)
        budget.record_step(tokens, 0.0625 + tokens / 8000)
    return budget


def test_the_stall_limit_grows_with_the_first_tokens_that_are_pending() -> None:
    budget = fitted_budget(stall_s_max=0.01253125)
    tokens = [budget.limit_tokens(1000, pending) for pending in (0, 1, 2, 3)]
    assert tokens == [100, 100, 200, 300]


def test_the_stall_limit_never_exceeds_the_tokens_of_the_step() -> None:
    budget = fitted_budget(stall_s_max=0.01253125)
    assert budget.limit_tokens(50, 1) == 50
    assert budget.limit_tokens(0, 1) == 0


def test_a_block_may_be_prefilled_before_the_first_measurement() -> None:
    assert PrefillTokenBudget(0.01, block_tokens=16).limit_tokens(1000, 4) == 16


# --------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("past", "tokens_max", "prefill_target", "end"),
    [
        (0, 10, 50, 8),  # The last block boundary within the limit.
        (8, 10, 50, 16),
        (8, 8, 50, 16),
        (6, 4, 50, 8),  # A chunk may begin inside a block.
        (8, 3, 50, 11),  # No boundary after the begin is within the limit.
        (9, 2, 50, 11),
        (40, 20, 50, 50),  # The last chunk completes the prefill.
        (40, 10, 50, 50),
    ],
)
def test_a_chunk_ends_at_a_block_boundary_or_with_the_prefill(
    past: int, tokens_max: int, prefill_target: int, end: int
) -> None:
    assert chunk_end(past, tokens_max, prefill_target, block_tokens=4) == end


# ------------------------------------------------------------------------------ chunks in steps


def test_prefill_does_not_delay_decodes_beyond_the_stall_limit() -> None:
    # The ranks take 0.1 ms for a token.
    harness = SchedulerHarness(blocks=2000, step_tokens_max=256, prefill_stall_ms_max=2.0)
    harness.submit(text_ids(600, 1), 1, service="throughput")
    harness.submit(text_ids(700, 1), 1, service="throughput")
    harness.finish()
    assert max(sum(step.lengths) for step in harness.steps) == 256
    harness.steps.clear()
    harness.submit(text_ids(5, 2), 40, service="latency")
    harness.step()
    harness.submit(text_ids(900, 3), 1, service="throughput")
    while 2 not in harness.end_steps:
        harness.step()
    chunks = [sum(step.lengths) - 1 for step in harness.steps if 1 in step.lengths]
    assert len(chunks) > 30 and max(chunks) <= 24 and min(chunks[1:]) >= 16
    harness.finish()
    assert len(harness.steps[-1].token_ids) > 100  # No latency sequence decodes any more.


def test_decodes_come_before_prefill_and_chunks_end_at_block_boundaries() -> None:
    harness = SchedulerHarness(step_tokens_max=10)
    harness.submit(text_ids(3), 20, service="throughput")
    harness.step()
    harness.submit(text_ids(50, 1), 1, service="latency")
    harness.finish()
    assert [step.lengths for step in harness.steps[1:4]] == [[1, 8], [1, 8], [1, 8]]


def test_chunks_of_a_long_prompt_fill_all_pipeline_stages() -> None:
    harness = SchedulerHarness(stages=3)
    harness.submit(text_ids(64), 1)
    while harness.plan():
        pass
    assert [step.past for step in harness.steps] == [[0], [16], [32]]
    harness.finish()
