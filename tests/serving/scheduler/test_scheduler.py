"""What the scheduler promises, case by case; test_random_schedules.py holds all of it at random."""

import pytest

from gpt.sampling_params import Sampling
from serving.messages import Made, Outcome, Rows, Submission
from tests.support.fake_ranks import VOCAB_SIZE, Play, adapter, text, virtual

# ------------------------------------------------------------------------------------ sharing


@pytest.mark.parametrize("length", [40, 41, 43])
def test_n_answers_compute_their_prompt_once(length: int) -> None:
    play = Play()
    for _ in range(8):
        play.submit(text(length), 5)
    play.finish()
    # Each computes the last token for its own logits.
    assert play.ranks.prompt_tokens == length + 7
    assert [play.cached[number] for number in range(8)] == [0] + [length - 1] * 7


def test_many_tasks_on_one_document_compute_it_once() -> None:
    play = Play(blocks=200, step_tokens_max=64)
    document = text(101)
    for task in range(8):
        play.submit([*document, *virtual(3), 7], 5, rows=adapter(f"task{task}", 3))
    play.finish()
    assert play.ranks.prompt_tokens == 101 + 8 * 4
    assert play.cached[7] == 101


def test_a_leading_virtual_prompt_is_shared_with_its_partly_filled_block() -> None:
    play, rows = Play(), adapter("task", 6)
    play.submit([*virtual(6), *text(5, 1)], rows=rows)
    play.finish()
    second = play.submit([*virtual(6), *text(5, 2)], rows=rows)
    play.finish()
    assert play.cached[second] == 6
    assert sum(len(step.copies) for step in play.steps) == 1


def test_an_adapter_whose_tokens_are_cached_needs_no_rows() -> None:
    play = Play(adapter_rows_max=6)
    for name in ("one", "two", "one"):
        play.submit([*virtual(6), *text(5, len(name))], rows=adapter(name, 6))
        play.finish()
    assert play.scheduler.load.adapter_loads == 2
    play.submit([7, *virtual(6)], rows=adapter("one", 6))  # Elsewhere they are other tokens.
    play.finish()
    assert play.scheduler.load.adapter_loads == 3


def test_what_was_made_is_found_by_the_next_turn_of_a_talk() -> None:
    play = Play()
    first = play.submit(text(10), 9)
    play.finish()
    play.submit([*text(10), *play.tokens[first], *text(3, 5)])
    play.finish()
    assert play.cached[1] == 16  # Whole blocks of the 18 tokens that have keys and values.


def test_tenants_share_nothing() -> None:
    play = Play()
    for tenant in ("one", "two", "one"):
        play.submit(text(21), tenant=tenant)
        play.finish()
    assert [play.cached[number] for number in range(3)] == [0, 0, 20]


def test_nothing_is_shared_when_the_cache_is_off() -> None:
    play = Play(prefix_cache=False)
    for _ in range(3):
        play.submit(text(20))
    play.finish()
    assert play.ranks.prompt_tokens == 60 and play.scheduler.load.blocks_cached == 0


def test_who_waits_for_another_goes_on_when_that_one_is_cancelled() -> None:
    play = Play(step_tokens_max=8)
    for _ in range(3):
        play.submit(text(32))
    play.step()
    assert play.scheduler.load.running == 1
    play.scheduler.cancel([0])
    play.finish()
    assert play.made[0].end == "cancelled"
    assert play.ranks.prompt_tokens == 32 + 1


def test_the_latency_class_does_not_wait_for_the_throughput_class() -> None:
    play = Play(step_tokens_max=8)
    play.submit(text(32), service="throughput")
    play.step()
    quick = play.submit(text(32), service="latency")
    play.finish()
    assert play.first_at[quick] < play.first_at[0]


def test_a_block_that_is_being_written_is_not_copied() -> None:
    broken = False
    play = Play(stages=2, breaks=lambda number: broken and number == 0)
    play.submit(text(6), 8)
    play.step()
    broken = True
    play.plan()  # What is not finite is written behind the prompt,
    play.submit(text(6), 8)
    play.plan()  # and nobody knows yet.
    play.finish()
    assert (play.made[0].end, play.made[1].end) == ("fault", "length")


# ------------------------------------------------------------------------------------- turns


def test_one_tenant_cannot_crowd_out_another() -> None:
    play = Play(running_requests_max=4)
    for number in range(60):
        play.submit(text(6, number), 6, tenant="many")
    for number in range(20):
        play.submit(text(6, 100 + number), 6, tenant="few")
    while any(number not in play.ended_at for number in range(60, 80)):
        play.step()
        if play.scheduler.load.waiting:
            few = sum(number in play.first_at for number in range(60, 80))
            many = sum(number in play.first_at for number in range(60))
            # Within what runs at once.
            assert abs(few - many) <= 4 or few == 20
    play.finish()


def test_higher_priority_goes_first() -> None:
    play = Play(running_requests_max=1)
    for priority in (0, 2, 1):
        play.submit(text(6, priority), 2, priority=priority, service="throughput")
    play.finish()
    assert sorted(play.first_at, key=play.first_at.__getitem__) == [1, 2, 0]


def test_a_low_priority_is_served_though_higher_ones_keep_coming() -> None:
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


def test_the_throughput_class_is_served_though_the_other_keeps_coming() -> None:
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


def test_the_next_token_is_not_held_up_by_prompts() -> None:
    # The ranks take 0.1 ms for a token.
    play = Play(blocks=2000, step_tokens_max=256, prefill_stall_ms_max=2.0)
    play.submit(text(600, 1), 1, service="throughput")
    play.submit(text(700, 1), 1, service="throughput")
    play.finish()
    assert max(sum(step.lengths) for step in play.steps) == 256
    play.steps.clear()
    play.submit(text(5, 2), 40, service="latency")
    play.step()
    play.submit(text(900, 3), 1, service="throughput")
    while 2 not in play.ended_at:
        play.step()
    guarded = [sum(step.lengths) - 1 for step in play.steps if 1 in step.lengths]
    assert len(guarded) > 30 and max(guarded) <= 24 and min(guarded[1:]) >= 16
    play.finish()
    assert len(play.steps[-1].ids) > 100  # Nobody waits for a token any more.


def test_decodes_come_before_prompts_and_chunks_end_with_blocks() -> None:
    play = Play(step_tokens_max=10)
    play.submit(text(3), 20, service="throughput")
    play.step()
    play.submit(text(50, 1), 1, service="latency")
    play.finish()
    assert [step.lengths for step in play.steps[1:4]] == [[1, 8], [1, 8], [1, 8]]


def test_every_stage_has_its_part_of_the_decodes() -> None:
    play = Play(stages=4, blocks=200)
    for number in range(8):
        play.submit(text(3, number), 60)
    for _ in range(100):
        play.step()
    assert [len(step.slots) for step in play.steps[40:80]] == [2] * 40
    play.finish()


def test_a_long_prompt_fills_all_stages() -> None:
    play = Play(stages=3)
    play.submit(text(64), 1)
    while play.plan():
        pass
    assert [step.past for step in play.steps] == [[0], [16], [32]]
    play.finish()


# ---------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("kinds", "loser"),
    [
        ([("throughput", 0), ("latency", 0), ("latency", 0)], 0),
        ([("throughput", 9), ("latency", 0), ("latency", 5)], 0),
        ([("latency", 5), ("latency", 0), ("latency", 1)], 1),
        ([("throughput", 5), ("throughput", 0), ("latency", 0)], 1),
        ([("latency", 0), ("latency", 0), ("latency", 0)], 2),
    ],
)
def test_the_lowest_loses_its_place(kinds: list[tuple[str, int]], loser: int) -> None:
    # There is room for three of 12 tokens, and each becomes longer.
    play = Play(blocks=1 + 9, step_tokens_max=64)
    for number, (service, priority) in enumerate(kinds):
        play.submit(text(8, number), 12, service=service, priority=priority)
    while not play.scheduler.load.preemptions:
        assert play.scheduler.load.running in (0, 3)
        play.step()
    slots = {begin.slot: begin.sampling.seed for step in play.steps for begin in step.begins}
    assert {slots[slot] for slot in play.steps[-1].slots} == {0, 1, 2} - {loser}
    play.finish()


def test_two_that_do_not_fit_together_both_get_through() -> None:
    play = Play(blocks=1 + 10, prefix_cache=False)
    play.submit(text(8, 0), 30)
    play.submit(text(8, 1), 30)
    play.finish()
    assert play.scheduler.load.preemptions > 0
    assert play.ended_at[0] < play.ended_at[1]  # The first one kept its place.


def test_a_quick_request_takes_the_place_of_a_slow_one() -> None:
    play = Play(running_requests_max=2, blocks=200)
    for number in range(2):
        play.submit(text(8, number), 50, service="throughput")
    for _ in range(10):
        play.step()
    quick = play.submit(text(8, 2), 3, service="latency")
    play.step()
    assert quick in play.first_at
    assert play.scheduler.load.preemptions == 1
    play.finish()
    assert play.ended_at[0] < play.ended_at[1]  # The newer one gave way.


def test_a_prompt_that_runs_short_takes_from_lower_ones_that_decode() -> None:
    play = Play(blocks=1 + 24, step_tokens_max=5)
    play.submit(text(4), 50, service="throughput")
    for _ in range(3):
        play.step()
    # It is let in with room for itself; while it is computed the other grows, too.
    quick, begun = play.submit(text(80, 9), 2, service="latency"), play.committed
    play.finish()
    assert play.first_at[quick] - begun <= 22
    assert play.scheduler.load.preemptions > 0


def test_nobody_takes_the_place_of_an_equal() -> None:
    play = Play(running_requests_max=2, priority_age_s=0.01)
    for number in range(6):
        play.submit(text(8, number), 10)
    play.finish()
    assert play.scheduler.load.preemptions == 0


def test_the_adapter_that_waits_for_rows_gets_them_though_others_come() -> None:
    play = Play(adapter_rows_max=6, step_tokens_max=4, kv_block_tokens=4, running_requests_max=3)
    play.submit([*virtual(2), *text(20, 1), *virtual(2)], rows=adapter("small", 2))
    play.step()
    large = play.submit([*virtual(6), 1], rows=adapter("large", 6))
    for number in range(40):
        play.submit([*text(4, number), *virtual(2)], rows=adapter("small", 2))
        play.step()
    play.finish()
    assert play.first_at[large] < play.first_at[5]


# ------------------------------------------------------------------------------------- ends


def test_a_cancel_gives_the_blocks_back_at_once() -> None:
    play = Play()
    play.submit(text(30), 30)
    for _ in range(5):
        play.step()
    assert play.scheduler.load.blocks_held > 0
    play.scheduler.cancel([0, 17])
    assert play.scheduler.ended() == [Made(0, end="cancelled")]
    assert play.scheduler.load.blocks_held == 0 and not play.scheduler.busy


def test_a_cancel_in_flight_ends_with_its_step() -> None:
    play = Play()
    play.submit(text(5), 30)
    play.plan()
    play.scheduler.cancel([0])
    assert play.scheduler.ended() == [] and play.scheduler.busy
    play.commit()
    assert play.made[0].end == "cancelled" and not play.scheduler.busy


def test_a_thousand_cancels_at_once() -> None:
    play = Play(blocks=500, running_requests_max=16)
    numbers = [play.submit(text(9, number), 20) for number in range(1000)]
    for _ in range(5):
        play.step()
    play.plan()
    play.scheduler.cancel(numbers)
    play.finish()
    assert {one.end for one in play.made.values()} == {"cancelled"}


def test_a_deadline_passes_for_one_that_waits() -> None:
    play = Play(running_requests_max=1)
    play.submit(text(5), 50)
    play.submit(text(5, 1), 5, deadline=0.1)
    play.submit(text(5, 2), 50, deadline=0.7)
    play.finish()
    assert [play.made[number].end for number in range(3)] == ["length", "deadline", "deadline"]
    assert play.tokens[1] == [] and 0 < len(play.tokens[2]) < 50


def test_what_is_not_finite_is_cleared_and_harms_nobody() -> None:
    play = Play(step_tokens_max=64, breaks=lambda number: number == 1)
    for number in range(4):
        play.submit(text(11, number), 6)
    play.finish()
    assert [play.made[number].end for number in range(4)] == ["length", "fault", *["length"] * 2]
    assert "not finite" in play.made[1].reason
    assert sum(len(step.clears) for step in play.steps) == 3


def test_a_stop_token_ends_a_sequence_and_is_told() -> None:
    play = Play()
    stop = play.alone(text(5), 10).tokens[3]
    play.submit(text(5), 10, stop_token_ids=(stop,))
    play.finish()
    assert play.made[0].end == "stop" and play.tokens[0][-1] == stop


# ---------------------------------------------------------------------------------- scores


def test_a_prompt_is_scored_in_chunks_and_not_from_the_cache() -> None:
    play = Play()
    prompt = [*text(9), *virtual(3), *text(30, 1)]
    for _ in range(2):
        play.submit(prompt, 0, rows=adapter("task", 3), prompt_logprobs=0)
        play.finish()
    assert play.ranks.prompt_tokens == 2 * len(prompt)
    assert play.made[1].end == "scored"
    missing = [at for at, one in enumerate(play.prompt_scores[1]) if one is None]
    assert missing == [0, 9, 10, 11]  # The first token, and the virtual ones.


def test_continuations_of_a_prompt_compute_it_once_though_they_are_scored() -> None:
    play = Play(step_tokens_max=64)
    prompt = [*text(29), *virtual(3), *text(5, 1)]  # Its end fills no block.
    tails = [text(3, 2), text(1, 3), text(20, 4), text(3, 5)]
    for tail in tails:
        whole = [*prompt, *tail]
        play.submit(whole, 0, rows=adapter("task", 3), prompt_logprobs=0, unscored=len(prompt))
    play.finish()
    assert [len(play.prompt_scores[number]) for number in range(4)] == [3, 1, 20, 3]
    # The row before a continuation is computed with it: its first token's score comes from there.
    assert play.ranks.prompt_tokens == len(prompt) + sum(1 + len(tail) for tail in tails) - 1
    assert not any(step.scores[0] for step in play.steps if step.past[0] + step.lengths[0] < 32)


def test_scores_are_given_to_those_who_asked() -> None:
    play = Play(step_tokens_max=64)
    play.submit(text(5), 3, logprobs=0)
    play.submit(text(5, 1), 3)
    play.plan()
    outcome = play.flights[0][1]
    made = play.scheduler.commit(outcome, 0.0)
    assert [len(one.scores) for one in made] == [1, 0]


def test_a_sequence_goes_on_after_what_was_made_elsewhere() -> None:
    play = Play()
    whole = play.alone(text(5), 10).tokens
    play.submit(text(5), 10, made=whole[:6])
    play.finish()
    assert play.tokens[0] == whole and play.ranks.decodes == 3


def test_what_was_over_elsewhere_is_over() -> None:
    play = Play()
    whole = play.alone(text(5), 4).tokens
    play.submit(text(5), 4, made=whole)
    assert play.made[0].end == "length" and not play.scheduler.busy


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "new", "rows", "reason"),
    [
        ([], 4, None, "empty"),
        ([VOCAB_SIZE], 4, None, "outside the vocabulary of 50"),
        ([-1], 4, None, "token id -1"),
        ([VOCAB_SIZE + 2], 4, adapter("task", 2), "token id 52"),
        (text(30), 11, None, "41, over the 40 tokens of context; cut 1"),
        (text(30), 2**31, None, "over the 40 tokens of context"),
        (virtual(9), 4, adapter("task", 9), "raise adapter_rows_max"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: list[int], new: int, rows: Rows | None, reason: str
) -> None:
    play = Play(context=40, adapter_rows_max=8)
    submission = Submission(0, prompt, Sampling(max_new_tokens=new), rows=rows)
    made = play.scheduler.add(submission, 0.0)
    end = "adapter" if reason == "raise adapter_rows_max" else "refused"
    assert made is not None and made.end == end and reason in made.reason


def test_what_is_longer_than_the_memory_is_refused_and_what_fills_it_is_not() -> None:
    play = Play(blocks=1 + 3)
    play.submit(text(8), 5)
    play.finish()
    assert play.made[0].end == "length"
    refused = play.scheduler.add(Submission(1, text(8), Sampling(max_new_tokens=6)), 0.0)
    assert refused is not None and "13 tokens of memory for keys and values" in refused.reason


def test_an_idle_step_is_numbered_and_answered_like_others() -> None:
    play = Play()
    idle = play.scheduler.idle_step()
    assert (idle.number, idle.slots) == (0, [])
    assert play.scheduler.commit(Outcome(0), 0.0) == []
    play.submit(text(3), 1)
    assert play.plan() is not None and play.steps[0].number == 1
    play.finish()
