"""Scheduler behaviour, case by case; test_random_schedules.py checks it with random schedules."""

import pytest

from serving.messages import Outcome, SequenceOutput
from tests.support.fake_ranks import make_adapter_ref, text_ids, virtual_ids
from tests.support.scheduler_harness import SchedulerHarness

# ------------------------------------------------------------------------------ prefix sharing


@pytest.mark.parametrize("length", [40, 41, 43])
def test_n_answers_prefill_their_prompt_once(length: int) -> None:
    harness = SchedulerHarness()
    for _ in range(8):
        harness.submit(text_ids(length), 5)
    harness.finish()
    # Each sequence computes the last prompt token for its own logits.
    assert harness.ranks.prompt_tokens == length + 7
    assert [harness.cached_tokens[number] for number in range(8)] == [0] + [length - 1] * 7


def test_many_tasks_on_a_document_prefill_it_once() -> None:
    harness = SchedulerHarness(blocks=200, step_tokens_max=64)
    document = text_ids(101)
    for task in range(8):
        harness.submit(
            [*document, *virtual_ids(3), 7], 5, adapter_ref=make_adapter_ref(f"task{task}", 3)
        )
    harness.finish()
    assert harness.ranks.prompt_tokens == 101 + 8 * 4
    assert harness.cached_tokens[7] == 101


def test_a_leading_virtual_prompt_is_shared_with_its_partly_filled_block() -> None:
    harness = SchedulerHarness()
    adapter_ref = make_adapter_ref("task", 6)
    harness.submit([*virtual_ids(6), *text_ids(5, 1)], adapter_ref=adapter_ref)
    harness.finish()
    second = harness.submit([*virtual_ids(6), *text_ids(5, 2)], adapter_ref=adapter_ref)
    harness.finish()
    assert harness.cached_tokens[second] == 6
    assert sum(len(step.block_copies) for step in harness.steps) == 1


def test_an_adapter_whose_tokens_are_cached_needs_no_rows() -> None:
    harness = SchedulerHarness(adapter_rows_max=6)
    for name in ("first", "second", "first"):
        harness.submit(
            [*virtual_ids(6), *text_ids(5, len(name))], adapter_ref=make_adapter_ref(name, 6)
        )
        harness.finish()
    assert harness.scheduler.stats.adapter_loads == 2
    harness.submit(
        [7, *virtual_ids(6)], adapter_ref=make_adapter_ref("first", 6)
    )  # Other positions: no cache hit.
    harness.finish()
    assert harness.scheduler.stats.adapter_loads == 3


def test_generated_tokens_are_cached_for_the_next_chat_turn() -> None:
    harness = SchedulerHarness()
    first = harness.submit(text_ids(10), 9)
    harness.finish()
    harness.submit([*text_ids(10), *harness.tokens[first], *text_ids(3, 5)])
    harness.finish()
    assert harness.cached_tokens[1] == 16  # Full blocks of the 18 tokens that have keys and values.


def test_tenants_share_no_cached_blocks() -> None:
    harness = SchedulerHarness()
    for tenant in ("first", "second", "first"):
        harness.submit(text_ids(21), tenant=tenant)
        harness.finish()
    assert [harness.cached_tokens[number] for number in range(3)] == [0, 0, 20]


def test_no_blocks_are_shared_when_the_prefix_cache_is_off() -> None:
    harness = SchedulerHarness(prefix_cache=False)
    for _ in range(3):
        harness.submit(text_ids(20))
    harness.finish()
    assert harness.ranks.prompt_tokens == 60 and harness.scheduler.stats.blocks_cached == 0


def test_a_parked_sequence_continues_when_the_computing_sequence_is_cancelled() -> None:
    harness = SchedulerHarness(step_tokens_max=8)
    for _ in range(3):
        harness.submit(text_ids(32))
    harness.step()
    assert harness.scheduler.stats.running == 1
    harness.scheduler.cancel([0])
    harness.finish()
    assert harness.last_outputs[0].end == "cancelled"
    assert harness.ranks.prompt_tokens == 32 + 1


def test_the_latency_class_does_not_wait_for_the_throughput_class() -> None:
    harness = SchedulerHarness(step_tokens_max=8)
    harness.submit(text_ids(32), service="throughput")
    harness.step()
    urgent = harness.submit(text_ids(32), service="latency")
    harness.finish()
    assert harness.first_token_steps[urgent] < harness.first_token_steps[0]


def test_a_block_with_a_write_in_flight_is_not_copied() -> None:
    is_nonfinite = False
    harness = SchedulerHarness(stages=2, breaks=lambda number: is_nonfinite and number == 0)
    harness.submit(text_ids(6), 8)
    harness.step()
    is_nonfinite = True
    harness.plan()  # NaN is written after the prompt,
    harness.submit(text_ids(6), 8)
    harness.plan()  # and the outcome is not known yet.
    harness.finish()
    assert (harness.last_outputs[0].end, harness.last_outputs[1].end) == ("fault", "length")


# ------------------------------------------------------------------------ order and token budget


def test_a_tenant_with_many_requests_does_not_delay_another_tenant() -> None:
    harness = SchedulerHarness(running_requests_max=4)
    for number in range(60):
        harness.submit(text_ids(6, number), 6, tenant="many")
    for number in range(20):
        harness.submit(text_ids(6, 100 + number), 6, tenant="few")
    while any(number not in harness.end_steps for number in range(60, 80)):
        harness.step()
        if harness.scheduler.stats.waiting:
            few_started = sum(number in harness.first_token_steps for number in range(60, 80))
            many_started = sum(number in harness.first_token_steps for number in range(60))
            # The difference is at most the number of running sequences.
            assert abs(few_started - many_started) <= 4 or few_started == 20
    harness.finish()


def test_higher_priority_is_admitted_first() -> None:
    harness = SchedulerHarness(running_requests_max=1)
    for priority in (0, 2, 1):
        harness.submit(text_ids(6, priority), 2, priority=priority, service="throughput")
    harness.finish()
    assert sorted(harness.first_token_steps, key=harness.first_token_steps.__getitem__) == [1, 2, 0]


def test_aging_prevents_starvation_of_low_priority() -> None:
    harness = SchedulerHarness(running_requests_max=1, priority_age_s=0.2)
    harness.submit(text_ids(6), 2, priority=0)
    for number in range(1, 200):
        harness.submit(text_ids(6, number), 2, priority=3)
        harness.step()
        harness.step()
        if 0 in harness.end_steps:
            break
    assert 0 in harness.end_steps
    harness.finish()


def test_aging_prevents_starvation_of_the_throughput_class() -> None:
    harness = SchedulerHarness(running_requests_max=2, priority_age_s=0.1)
    harness.submit(text_ids(60), 3, service="throughput")
    for number in range(1, 300):
        harness.submit(text_ids(20, number), 2, service="latency")
        for _ in range(3):
            harness.step()
        if 0 in harness.end_steps:
            break
    assert 0 in harness.end_steps
    harness.finish()


def test_decodes_are_divided_among_pipeline_stages() -> None:
    harness = SchedulerHarness(stages=4, blocks=200)
    for number in range(8):
        harness.submit(text_ids(3, number), 60)
    for _ in range(100):
        harness.step()
    assert [len(step.slots) for step in harness.steps[40:80]] == [2] * 40
    harness.finish()


# ------------------------------------------------------------------------------ adapter rows


def test_an_adapter_waiting_for_rows_does_not_starve() -> None:
    harness = SchedulerHarness(
        adapter_rows_max=6, step_tokens_max=4, kv_block_tokens=4, running_requests_max=3
    )
    harness.submit(
        [*virtual_ids(2), *text_ids(20, 1), *virtual_ids(2)],
        adapter_ref=make_adapter_ref("small", 2),
    )
    harness.step()
    large = harness.submit([*virtual_ids(6), 1], adapter_ref=make_adapter_ref("large", 6))
    for number in range(40):
        harness.submit(
            [*text_ids(4, number), *virtual_ids(2)], adapter_ref=make_adapter_ref("small", 2)
        )
        harness.step()
    harness.finish()
    assert harness.first_token_steps[large] < harness.first_token_steps[5]


# ------------------------------------------------------------------------------------- ends


def test_a_cancel_releases_the_blocks_at_once() -> None:
    harness = SchedulerHarness()
    harness.submit(text_ids(30), 30)
    for _ in range(5):
        harness.step()
    assert harness.scheduler.stats.blocks_held > 0
    harness.scheduler.cancel([0, 17])
    assert harness.scheduler.pop_ended() == [SequenceOutput(0, end="cancelled")]
    assert harness.scheduler.stats.blocks_held == 0 and not harness.scheduler.has_unfinished


def test_a_cancelled_sequence_in_flight_ends_with_its_step() -> None:
    harness = SchedulerHarness()
    harness.submit(text_ids(5), 30)
    harness.plan()
    harness.scheduler.cancel([0])
    assert harness.scheduler.pop_ended() == [] and harness.scheduler.has_unfinished
    harness.commit()
    assert harness.last_outputs[0].end == "cancelled" and not harness.scheduler.has_unfinished


def test_a_thousand_sequences_are_cancelled_at_once() -> None:
    harness = SchedulerHarness(blocks=500, running_requests_max=16)
    sequence_ids = [harness.submit(text_ids(9, number), 20) for number in range(1000)]
    for _ in range(5):
        harness.step()
    harness.plan()
    harness.scheduler.cancel(sequence_ids)
    harness.finish()
    assert {output.end for output in harness.last_outputs.values()} == {"cancelled"}


def test_a_deadline_ends_waiting_and_running_sequences() -> None:
    harness = SchedulerHarness(running_requests_max=1)
    harness.submit(text_ids(5), 50)
    harness.submit(text_ids(5, 1), 5, deadline=0.1)
    harness.submit(text_ids(5, 2), 50, deadline=0.7)
    harness.finish()
    assert [harness.last_outputs[number].end for number in range(3)] == [
        "length",
        "deadline",
        "deadline",
    ]
    assert harness.tokens[1] == [] and 0 < len(harness.tokens[2]) < 50


def test_nan_rows_are_cleared_and_do_not_affect_other_sequences() -> None:
    harness = SchedulerHarness(step_tokens_max=64, breaks=lambda number: number == 1)
    for number in range(4):
        harness.submit(text_ids(11, number), 6)
    harness.finish()
    assert [harness.last_outputs[number].end for number in range(4)] == [
        "length",
        "fault",
        "length",
        "length",
    ]
    assert "not finite" in harness.last_outputs[1].reason
    assert sum(len(step.block_clears) for step in harness.steps) == 3


def test_a_stop_token_ends_a_sequence_and_is_reported() -> None:
    harness = SchedulerHarness()
    stop = harness.expected(text_ids(5), 10).tokens[3]
    harness.submit(text_ids(5), 10, stop_token_ids=(stop,))
    harness.finish()
    assert harness.last_outputs[0].end == "stop" and harness.tokens[0][-1] == stop


# ---------------------------------------------------------------------------------- scores


def test_a_prompt_is_scored_in_chunks_and_not_from_the_cache() -> None:
    harness = SchedulerHarness()
    prompt = [*text_ids(9), *virtual_ids(3), *text_ids(30, 1)]
    for _ in range(2):
        harness.submit(prompt, 0, adapter_ref=make_adapter_ref("task", 3), prompt_logprobs=0)
        harness.finish()
    assert harness.ranks.prompt_tokens == 2 * len(prompt)
    assert harness.last_outputs[1].end == "scored"
    unscored = [
        position for position, score in enumerate(harness.prompt_scores[1]) if score is None
    ]
    assert unscored == [0, 9, 10, 11]  # The first token and the virtual tokens.


def test_scored_continuations_prefill_their_prompt_once() -> None:
    harness = SchedulerHarness(step_tokens_max=64)
    prompt = [*text_ids(29), *virtual_ids(3), *text_ids(5, 1)]  # Ends inside a block.
    continuations = [text_ids(3, 2), text_ids(1, 3), text_ids(20, 4), text_ids(3, 5)]
    for continuation in continuations:
        harness.submit(
            [*prompt, *continuation],
            0,
            adapter_ref=make_adapter_ref("task", 3),
            prompt_logprobs=0,
            unscored_tokens=len(prompt),
        )
    harness.finish()
    assert [len(harness.prompt_scores[number]) for number in range(4)] == [3, 1, 20, 3]
    # The row before a continuation is computed with it, because it scores the first token.
    assert harness.ranks.prompt_tokens == len(prompt) + (
        sum(1 + len(continuation) for continuation in continuations) - 1
    )
    assert not any(
        step.prompt_score_counts[0] for step in harness.steps if step.past[0] + step.lengths[0] < 32
    )


def test_scores_are_reported_only_if_requested() -> None:
    harness = SchedulerHarness(step_tokens_max=64)
    harness.submit(text_ids(5), 3, logprobs=0)
    harness.submit(text_ids(5, 1), 3)
    harness.plan()
    outcome = harness.in_flight[0][1]
    outputs = harness.scheduler.commit(outcome, 0.0)
    assert [len(output.scores) for output in outputs] == [1, 0]


def test_a_sequence_continues_after_output_of_lost_ranks() -> None:
    harness = SchedulerHarness()
    expected_tokens = harness.expected(text_ids(5), 10).tokens
    harness.submit(text_ids(5), 10, output_tokens=expected_tokens[:6])
    harness.finish()
    assert harness.tokens[0] == expected_tokens and harness.ranks.decodes == 3


def test_complete_output_of_lost_ranks_ends_the_sequence_at_once() -> None:
    harness = SchedulerHarness()
    output_tokens = harness.expected(text_ids(5), 4).tokens
    harness.submit(text_ids(5), 4, output_tokens=output_tokens)
    assert harness.last_outputs[0].end == "length" and not harness.scheduler.has_unfinished


# ------------------------------------------------------------------------------ idle steps


def test_an_idle_step_has_an_id_and_an_outcome() -> None:
    harness = SchedulerHarness()
    idle = harness.scheduler.idle_step()
    assert (idle.step_id, idle.slots) == (0, [])
    assert harness.scheduler.commit(Outcome(0), 0.0) == []
    harness.submit(text_ids(3), 1)
    assert harness.plan() is not None and harness.steps[0].step_id == 1
    harness.finish()
