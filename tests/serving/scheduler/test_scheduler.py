"""Scheduler behaviour, case by case; test_random_schedules.py checks it with random schedules."""

import pytest

from serving.messages import Outcome, SequenceOutput
from tests.support.fake_ranks import Play, adapter, text, virtual

# ------------------------------------------------------------------------------ prefix sharing


@pytest.mark.parametrize("length", [40, 41, 43])
def test_n_answers_prefill_their_prompt_once(length: int) -> None:
    play = Play()
    for _ in range(8):
        play.submit(text(length), 5)
    play.finish()
    # Each sequence computes the last prompt token for its own logits.
    assert play.ranks.prompt_tokens == length + 7
    assert [play.cached[number] for number in range(8)] == [0] + [length - 1] * 7


def test_many_tasks_on_a_document_prefill_it_once() -> None:
    play = Play(blocks=200, step_tokens_max=64)
    document = text(101)
    for task in range(8):
        play.submit([*document, *virtual(3), 7], 5, adapter_ref=adapter(f"task{task}", 3))
    play.finish()
    assert play.ranks.prompt_tokens == 101 + 8 * 4
    assert play.cached[7] == 101


def test_a_leading_virtual_prompt_is_shared_with_its_partly_filled_block() -> None:
    play = Play()
    adapter_ref = adapter("task", 6)
    play.submit([*virtual(6), *text(5, 1)], adapter_ref=adapter_ref)
    play.finish()
    second = play.submit([*virtual(6), *text(5, 2)], adapter_ref=adapter_ref)
    play.finish()
    assert play.cached[second] == 6
    assert sum(len(step.block_copies) for step in play.steps) == 1


def test_an_adapter_whose_tokens_are_cached_needs_no_rows() -> None:
    play = Play(adapter_rows_max=6)
    for name in ("first", "second", "first"):
        play.submit([*virtual(6), *text(5, len(name))], adapter_ref=adapter(name, 6))
        play.finish()
    assert play.scheduler.stats.adapter_loads == 2
    play.submit([7, *virtual(6)], adapter_ref=adapter("first", 6))  # Other positions: no cache hit.
    play.finish()
    assert play.scheduler.stats.adapter_loads == 3


def test_generated_tokens_are_cached_for_the_next_chat_turn() -> None:
    play = Play()
    first = play.submit(text(10), 9)
    play.finish()
    play.submit([*text(10), *play.tokens[first], *text(3, 5)])
    play.finish()
    assert play.cached[1] == 16  # Full blocks of the 18 tokens that have keys and values.


def test_tenants_share_no_cached_blocks() -> None:
    play = Play()
    for tenant in ("first", "second", "first"):
        play.submit(text(21), tenant=tenant)
        play.finish()
    assert [play.cached[number] for number in range(3)] == [0, 0, 20]


def test_no_blocks_are_shared_when_the_prefix_cache_is_off() -> None:
    play = Play(prefix_cache=False)
    for _ in range(3):
        play.submit(text(20))
    play.finish()
    assert play.ranks.prompt_tokens == 60 and play.scheduler.stats.blocks_cached == 0


def test_a_parked_sequence_continues_when_the_computing_sequence_is_cancelled() -> None:
    play = Play(step_tokens_max=8)
    for _ in range(3):
        play.submit(text(32))
    play.step()
    assert play.scheduler.stats.running == 1
    play.scheduler.cancel([0])
    play.finish()
    assert play.last_outputs[0].end == "cancelled"
    assert play.ranks.prompt_tokens == 32 + 1


def test_the_latency_class_does_not_wait_for_the_throughput_class() -> None:
    play = Play(step_tokens_max=8)
    play.submit(text(32), service="throughput")
    play.step()
    urgent = play.submit(text(32), service="latency")
    play.finish()
    assert play.first_at[urgent] < play.first_at[0]


def test_a_block_with_a_write_in_flight_is_not_copied() -> None:
    is_nonfinite = False
    play = Play(stages=2, breaks=lambda number: is_nonfinite and number == 0)
    play.submit(text(6), 8)
    play.step()
    is_nonfinite = True
    play.plan()  # NaN is written after the prompt,
    play.submit(text(6), 8)
    play.plan()  # and the outcome is not known yet.
    play.finish()
    assert (play.last_outputs[0].end, play.last_outputs[1].end) == ("fault", "length")


# ------------------------------------------------------------------------ order and token budget


def test_a_tenant_with_many_requests_does_not_delay_another_tenant() -> None:
    play = Play(running_requests_max=4)
    for number in range(60):
        play.submit(text(6, number), 6, tenant="many")
    for number in range(20):
        play.submit(text(6, 100 + number), 6, tenant="few")
    while any(number not in play.ended_at for number in range(60, 80)):
        play.step()
        if play.scheduler.stats.waiting:
            few_started = sum(number in play.first_at for number in range(60, 80))
            many_started = sum(number in play.first_at for number in range(60))
            # The difference is at most the number of running sequences.
            assert abs(few_started - many_started) <= 4 or few_started == 20
    play.finish()


def test_higher_priority_is_admitted_first() -> None:
    play = Play(running_requests_max=1)
    for priority in (0, 2, 1):
        play.submit(text(6, priority), 2, priority=priority, service="throughput")
    play.finish()
    assert sorted(play.first_at, key=play.first_at.__getitem__) == [1, 2, 0]


def test_aging_prevents_starvation_of_low_priority() -> None:
    play = Play(running_requests_max=1, priority_age_s=0.2)
    play.submit(text(6), 2, priority=0)
    for number in range(1, 200):
        play.submit(text(6, number), 2, priority=3)
        play.step()
        play.step()
        if 0 in play.ended_at:
            break
    assert 0 in play.ended_at
    play.finish()


def test_aging_prevents_starvation_of_the_throughput_class() -> None:
    play = Play(running_requests_max=2, priority_age_s=0.1)
    play.submit(text(60), 3, service="throughput")
    for number in range(1, 300):
        play.submit(text(20, number), 2, service="latency")
        for _ in range(3):
            play.step()
        if 0 in play.ended_at:
            break
    assert 0 in play.ended_at
    play.finish()


def test_decodes_are_divided_among_pipeline_stages() -> None:
    play = Play(stages=4, blocks=200)
    for number in range(8):
        play.submit(text(3, number), 60)
    for _ in range(100):
        play.step()
    assert [len(step.slots) for step in play.steps[40:80]] == [2] * 40
    play.finish()


# ------------------------------------------------------------------------------ adapter rows


def test_an_adapter_waiting_for_rows_does_not_starve() -> None:
    play = Play(adapter_rows_max=6, step_tokens_max=4, kv_block_tokens=4, running_requests_max=3)
    play.submit([*virtual(2), *text(20, 1), *virtual(2)], adapter_ref=adapter("small", 2))
    play.step()
    large = play.submit([*virtual(6), 1], adapter_ref=adapter("large", 6))
    for number in range(40):
        play.submit([*text(4, number), *virtual(2)], adapter_ref=adapter("small", 2))
        play.step()
    play.finish()
    assert play.first_at[large] < play.first_at[5]


# ------------------------------------------------------------------------------------- ends


def test_a_cancel_releases_the_blocks_at_once() -> None:
    play = Play()
    play.submit(text(30), 30)
    for _ in range(5):
        play.step()
    assert play.scheduler.stats.blocks_held > 0
    play.scheduler.cancel([0, 17])
    assert play.scheduler.pop_ended() == [SequenceOutput(0, end="cancelled")]
    assert play.scheduler.stats.blocks_held == 0 and not play.scheduler.has_unfinished


def test_a_cancelled_sequence_in_flight_ends_with_its_step() -> None:
    play = Play()
    play.submit(text(5), 30)
    play.plan()
    play.scheduler.cancel([0])
    assert play.scheduler.pop_ended() == [] and play.scheduler.has_unfinished
    play.commit()
    assert play.last_outputs[0].end == "cancelled" and not play.scheduler.has_unfinished


def test_a_thousand_sequences_are_cancelled_at_once() -> None:
    play = Play(blocks=500, running_requests_max=16)
    sequence_ids = [play.submit(text(9, number), 20) for number in range(1000)]
    for _ in range(5):
        play.step()
    play.plan()
    play.scheduler.cancel(sequence_ids)
    play.finish()
    assert {output.end for output in play.last_outputs.values()} == {"cancelled"}


def test_a_deadline_ends_waiting_and_running_sequences() -> None:
    play = Play(running_requests_max=1)
    play.submit(text(5), 50)
    play.submit(text(5, 1), 5, deadline=0.1)
    play.submit(text(5, 2), 50, deadline=0.7)
    play.finish()
    assert [play.last_outputs[number].end for number in range(3)] == [
        "length",
        "deadline",
        "deadline",
    ]
    assert play.tokens[1] == [] and 0 < len(play.tokens[2]) < 50


def test_nan_rows_are_cleared_and_do_not_affect_other_sequences() -> None:
    play = Play(step_tokens_max=64, breaks=lambda number: number == 1)
    for number in range(4):
        play.submit(text(11, number), 6)
    play.finish()
    assert [play.last_outputs[number].end for number in range(4)] == [
        "length",
        "fault",
        "length",
        "length",
    ]
    assert "not finite" in play.last_outputs[1].reason
    assert sum(len(step.block_clears) for step in play.steps) == 3


def test_a_stop_token_ends_a_sequence_and_is_reported() -> None:
    play = Play()
    stop = play.alone(text(5), 10).tokens[3]
    play.submit(text(5), 10, stop_token_ids=(stop,))
    play.finish()
    assert play.last_outputs[0].end == "stop" and play.tokens[0][-1] == stop


# ---------------------------------------------------------------------------------- scores


def test_a_prompt_is_scored_in_chunks_and_not_from_the_cache() -> None:
    play = Play()
    prompt = [*text(9), *virtual(3), *text(30, 1)]
    for _ in range(2):
        play.submit(prompt, 0, adapter_ref=adapter("task", 3), prompt_logprobs=0)
        play.finish()
    assert play.ranks.prompt_tokens == 2 * len(prompt)
    assert play.last_outputs[1].end == "scored"
    unscored = [position for position, score in enumerate(play.prompt_scores[1]) if score is None]
    assert unscored == [0, 9, 10, 11]  # The first token and the virtual tokens.


def test_scored_continuations_prefill_their_prompt_once() -> None:
    play = Play(step_tokens_max=64)
    prompt = [*text(29), *virtual(3), *text(5, 1)]  # Ends inside a block.
    continuations = [text(3, 2), text(1, 3), text(20, 4), text(3, 5)]
    for continuation in continuations:
        play.submit(
            [*prompt, *continuation],
            0,
            adapter_ref=adapter("task", 3),
            prompt_logprobs=0,
            unscored_tokens=len(prompt),
        )
    play.finish()
    assert [len(play.prompt_scores[number]) for number in range(4)] == [3, 1, 20, 3]
    # The row before a continuation is computed with it, because it scores the first token.
    assert play.ranks.prompt_tokens == len(prompt) + (
        sum(1 + len(continuation) for continuation in continuations) - 1
    )
    assert not any(
        step.prompt_score_counts[0] for step in play.steps if step.past[0] + step.lengths[0] < 32
    )


def test_scores_are_reported_only_if_requested() -> None:
    play = Play(step_tokens_max=64)
    play.submit(text(5), 3, logprobs=0)
    play.submit(text(5, 1), 3)
    play.plan()
    outcome = play.flights[0][1]
    outputs = play.scheduler.commit(outcome, 0.0)
    assert [len(output.scores) for output in outputs] == [1, 0]


def test_a_sequence_continues_after_output_of_lost_ranks() -> None:
    play = Play()
    expected_tokens = play.alone(text(5), 10).tokens
    play.submit(text(5), 10, output_tokens=expected_tokens[:6])
    play.finish()
    assert play.tokens[0] == expected_tokens and play.ranks.decodes == 3


def test_complete_output_of_lost_ranks_ends_the_sequence_at_once() -> None:
    play = Play()
    output_tokens = play.alone(text(5), 4).tokens
    play.submit(text(5), 4, output_tokens=output_tokens)
    assert play.last_outputs[0].end == "length" and not play.scheduler.has_unfinished


# ------------------------------------------------------------------------------ idle steps


def test_an_idle_step_has_an_id_and_an_outcome() -> None:
    play = Play()
    idle = play.scheduler.idle_step()
    assert (idle.step_id, idle.slots) == (0, [])
    assert play.scheduler.commit(Outcome(0), 0.0) == []
    play.submit(text(3), 1)
    assert play.plan() is not None and play.steps[0].step_id == 1
    play.finish()
