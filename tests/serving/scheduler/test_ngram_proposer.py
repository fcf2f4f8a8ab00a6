"""N-gram proposer: repetitions are proposed, acceptance sets draft length, output is unchanged.

The fake ranks sample tokens that repeat often. Random schedules with drafts are in
tests/serving/scheduler/test_random_schedules.py, the acceptance of drafts in
tests/serving/scheduler/test_draft_verification.py, and real models in
tests/equivalence/test_batch_invariance.py.
"""

from random import Random

import pytest

from gpt.errors import ConfigError
from serving.config import ServerConfig
from serving.messages import Guide, Step
from serving.scheduler.ngram_proposer import (
    CANDIDATES_MAX,
    INDEXED_TOKENS_MAX,
    PROBE_INTERVAL,
    NgramProposer,
)
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids
from tests.support.scheduler_harness import SchedulerHarness

# ----------------------------------------------------------------------------------- one sequence


@pytest.mark.parametrize(
    ("tokens", "tokens_max", "draft"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 0, []),
        # The longest match is used; of equally long matches, the latest.
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [5]),
        ([8, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [6]),
        # A match that reaches the end continues with the draft itself.
        ([3, 1, 2, 1, 2], 6, [1, 2, 1, 2, 1, 2]),
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 4, 5], 3, []),
        ([1, 2, 3, 2], 3, []),
        ([4], 3, []),
        # Virtual tokens are never proposed and never match.
        ([1, 2, 50, 9, 1, 2], 3, []),
        ([1, 2, 3, 50, 9, 1, 2], 3, [3]),
        ([50, 51, 3, 50, 51], 3, []),
        ([50, 1, 2, 8, 1, 2, 9, 50, 1, 2], 1, [9]),
    ],
)
def test_the_continuation_of_an_earlier_match_is_proposed(
    tokens: list[int], tokens_max: int, draft: list[int]
) -> None:
    proposer = NgramProposer(tokens, VOCAB_SIZE)
    proposer.record_acceptance(30, 30)  # Any draft length is allowed now.
    assert proposer.propose(tokens_max) == draft


def reference_proposal(tokens: list[int]) -> list[int]:
    """The next token by comparison of all earlier positions."""
    positions = [
        position
        for position in range(2, len(tokens))
        if tokens[position - 2 : position] == tokens[-2:]
    ]
    next_tokens = {}  # By length of the match; a later position replaces an earlier one.
    for position in positions[-CANDIDATES_MAX:]:
        match_length = 2
        for length in (3, 4):
            if position >= length and tokens[position - length : position] == tokens[-length:]:
                match_length = length
        next_tokens[match_length] = tokens[position]
    return [next_tokens[max(next_tokens)]] if next_tokens else []


@pytest.mark.parametrize("token_count", [2, 4, 9])
def test_proposals_continue_the_longest_match_as_tokens_grow(token_count: int) -> None:
    random = Random(token_count)
    tokens = [random.randrange(token_count)]
    proposer = NgramProposer(tokens, VOCAB_SIZE)
    proposer.record_acceptance(30, 30)
    for _ in range(200):
        assert proposer.propose(1) == reference_proposal(tokens)
        tokens.append(random.randrange(token_count))


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    tokens = [1, 2, 3, *range(4, 4 + 2 * INDEXED_TOKENS_MAX), 1, 2]
    proposer = NgramProposer(tokens, 10**6)
    assert [proposer.propose(1) for _ in range(4)] == [[], [], [3], [3]]


def test_rejections_shorten_drafts_then_pause_and_probe_again() -> None:
    proposer = NgramProposer([7] * 9, VOCAB_SIZE)
    counts = []
    for _ in range(PROBE_INTERVAL + 8):
        counts.append(len(proposer.propose(3)))
        if counts[-1]:
            proposer.record_acceptance(counts[-1], 0)
    calls_with_draft = [call for call, count in enumerate(counts) if count]
    assert counts[0] == 2 and counts[1] == 1
    assert len(calls_with_draft) == 5
    assert calls_with_draft[-1] - calls_with_draft[-2] == PROBE_INTERVAL
    for _ in range(8):  # Accepted drafts raise the rate again.
        proposer.record_acceptance(1, 1)
    assert len(proposer.propose(3)) == 3


# ------------------------------------------------------------------------- speculation in steps


def draft_tokens_of(steps: list[Step]) -> list[int]:
    return [sum(step.draft_counts) for step in steps]


def test_drafts_save_steps_and_change_no_output() -> None:
    harness = SchedulerHarness(speculate_tokens_max=3, blocks=400)
    harness.submit(text_ids(9), 300)
    harness.finish()  # Compares the output with that without drafts.
    stats = harness.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert harness.committed == 300 - stats.accepted_tokens + stats.steps - harness.committed
    assert harness.committed < 200
    assert (stats.drafted_tokens, stats.accepted_tokens) == (
        harness.ranks.draft_tokens,
        harness.ranks.accepted_tokens,
    )


def test_speculate_tokens_max_0_disables_speculation_and_negative_is_refused() -> None:
    assert ServerConfig("model").scheduler_config.speculate_tokens_max == 0
    with pytest.raises(ConfigError, match="speculate_tokens_max is -1; it must be 0 or more"):
        ServerConfig("model", speculate_tokens_max=-1)
    with pytest.raises(ConfigError, match="speculate_rows_max is 0"):
        ServerConfig("model", speculate_rows_max=0)


def test_speculation_is_off_by_default() -> None:
    harness = SchedulerHarness()
    harness.submit(text_ids(9), 50)
    harness.finish()
    assert all(step.draft_counts == [] for step in harness.steps)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"min_new_tokens": 30},
        {"bad_words": ((1, 2),)},
        {"guide": Guide("choice", '["a"]')},
    ],
)
def test_stateful_sampling_is_not_speculated(options: dict[str, object]) -> None:
    harness = SchedulerHarness(speculate_tokens_max=3)
    harness.submit(text_ids(9), 50, **options)
    harness.submit(text_ids(9), 50, bad_words=((1,),), logprobs=2, temperature=0.5)
    harness.finish()
    slots = {
        slot_init.sampling.seed: slot_init.slot
        for step in harness.steps
        for slot_init in step.slot_inits
    }
    slots_with_drafts = {
        slot
        for step in harness.steps
        for slot, count in zip(step.slots, step.draft_counts, strict=False)
        if count
    }
    assert slots_with_drafts == {slots[1]}


def test_draft_rows_are_bounded_and_come_after_all_decodes() -> None:
    harness = SchedulerHarness(speculate_tokens_max=3, speculate_rows_max=6, blocks=600)
    for number in range(4):
        harness.submit(text_ids(4, number), 20 + 80 * (number > 1))
    harness.finish()
    full_steps = [step for step in harness.steps if len(step.slots) == 4 and sum(step.draws) == 4]
    assert max(draft_tokens_of(full_steps)) == 2
    assert max(draft_tokens_of(harness.steps)) == 4


def test_prefill_comes_before_drafts() -> None:
    harness = SchedulerHarness(
        speculate_tokens_max=5, speculate_rows_max=100, step_tokens_max=8, blocks=800
    )
    for number in range(3):
        harness.submit(text_ids(4, number), 400)
    for _ in range(60):
        harness.step()
    late = harness.submit(text_ids(80, 9), 2)
    first_step = harness.committed
    while late not in harness.first_token_steps:
        harness.step()
    assert harness.first_token_steps[late] - first_step <= 22
    assert max(draft_tokens_of(harness.steps[first_step:])) > 0
    harness.finish()


def test_drafts_leave_the_blocks_that_decodes_need_next() -> None:
    harness = SchedulerHarness(
        speculate_tokens_max=5, kv_block_tokens=1, blocks=1 + 80, prefix_cache=False
    )
    for number in range(3):
        harness.submit(text_ids(8, number), 40)
    draft_blocks = 0
    short_steps = 0
    while harness.scheduler.has_unfinished:
        step = harness.plan()
        assert step is not None
        stats = harness.scheduler.stats
        blocks_left = stats.blocks - stats.blocks_held
        short_steps += blocks_left < stats.running
        for update in step.block_table_updates if all(step.draws) else ():
            # A block for drafts, not for the next token.
            if update.start > step.past[step.slots.index(update.slot)]:
                draft_blocks += 1
                assert blocks_left >= stats.running
        harness.commit()
    harness.check_finished()
    assert draft_blocks and short_steps and harness.scheduler.stats.preemptions > 0


def test_kv_of_rejected_drafts_is_not_published() -> None:
    harness = SchedulerHarness(speculate_tokens_max=5, kv_block_tokens=2, blocks=500)
    harness.submit(text_ids(8), 60)
    harness.finish()
    assert harness.ranks.draft_tokens > harness.ranks.accepted_tokens
    for cut in range(57, 8, -3):  # The first tokens, then possible draft tokens.
        first = harness.submissions
        for token in (0, 1, 7):
            harness.submit([*text_ids(8), *harness.tokens[0][:cut], token], 2)
        harness.finish()  # The fake ranks compare KV reads with the prefix.
        # All full blocks of accepted tokens are published.
        assert harness.cached_tokens[first] >= (8 + cut) // 2 * 2


def test_nan_caused_by_a_draft_does_not_fail_the_sequence() -> None:
    step: Step | None = None
    harness = SchedulerHarness(
        speculate_tokens_max=3, breaks=lambda number: step is not None and any(step.draft_counts)
    )
    run = harness.ranks.run

    def run_and_record(planned_step: Step) -> object:
        nonlocal step
        step = planned_step
        return run(planned_step)

    harness.ranks.run = run_and_record  # type: ignore[assignment, method-assign]
    adapter_ref = make_adapter_ref("task", 3)
    harness.submit([*virtual_ids(3), *text_ids(9)], 60, adapter_ref=adapter_ref)
    harness.finish()
    assert harness.last_outputs[0].end == "length"
    # One step failed; then the sequence continued without drafts from its last valid token.
    assert [count > 0 for count in draft_tokens_of(harness.steps)].count(True) == 1
    assert sum(len(step.slot_inits) for step in harness.steps) == 2
    harness.submit(text_ids(3), 1)
    harness.finish()  # No block is left to be cleared.
    assert sum(bool(step.block_clears) for step in harness.steps) == 1
    assert harness.scheduler.stats.preemptions == 0
