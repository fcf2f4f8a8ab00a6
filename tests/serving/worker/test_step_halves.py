"""Out of device memory: a step of the only rank is run in halves, with the same outcome."""

import logging
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.sampling_params import SamplingParams
from serving.messages import Outcome, Step
from serving.worker.model_runner import ModelRunner
from serving.worker.step_halves import halve_step, merge_outcomes
from tests.support.graph_runners import eager_capturer, make_runner, run_step, sampled_token
from tests.support.graph_steps import RULES, next_step, prefill_step

SCORED = SamplingParams(prompt_logprobs=1, logprobs=1, repetition_penalty=1.3)


def limit_tokens(runner: ModelRunner, tokens_max: int, patch: pytest.MonkeyPatch) -> None:
    """Let a forward pass of more tokens exhaust the memory."""
    forward_hidden = runner.model.forward_hidden

    def forward_or_fail(x: Tensor, batch: Batch, *pools: Any) -> Tensor:
        if batch.tokens > tokens_max:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_hidden(x, batch, *pools)

    patch.setattr(runner.model, "forward_hidden", forward_or_fail)


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.tokens == expected.tokens and outcome.faults == expected.faults
    for name in ("scores", "prompt_scores"):
        lists, expected_lists = getattr(outcome, name), getattr(expected, name)
        if name == "scores":
            lists, expected_lists = [lists], [expected_lists]
        for scores, expected_scores in zip(lists, expected_lists, strict=True):
            for score, expected_score in zip(scores, expected_scores, strict=True):
                assert abs(score.logprob - expected_score.logprob) < 1e-9
                assert score.rank == expected_score.rank


def scored_prefill() -> Step:
    step = prefill_step([*RULES[:2], SCORED, RULES[3], RULES[0]])
    return msgspec.structs.replace(step, prompt_score_counts=[0, 0, step.lengths[2] - 1, 0, 0])


@pytest.mark.parametrize("tokens_max", [20, 5, 1])
def test_halves_have_the_outcome_of_the_whole_step(
    tokens_max: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference_runner, limited = make_runner("modern", None), make_runner("modern", None)
    limit_tokens(limited, tokens_max, monkeypatch)
    step = scored_prefill()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            expected = run_step(reference_runner, step)
            assert_equal(run_step(limited, step), expected)
            step = next_step(step, expected, sampled_token)
    line = "event=step_halved sequences=5 tokens=35 reason='CUDA out of memory'"
    assert caplog.messages[0] == line


def test_a_step_of_one_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("modern", None)
    limit_tokens(runner, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        run_step(runner, prefill_step(RULES[:2]))


@pytest.mark.parametrize("is_sampled", [False, True])
def test_sampling_is_repeated_only_if_no_token_was_sampled(
    is_sampled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference_runner, limited = make_runner("modern", None), make_runner("modern", None)
    assert limited._sampler is not None
    launch_sampling = limited._sampler.launch_sampling

    def sample_or_fail(logits: Tensor, slots: Any, positions: Any) -> Any:
        if not is_sampled and len(slots) == 5:
            raise torch.OutOfMemoryError
        return launch_sampling(logits, slots, positions)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(limited._sampler, "launch_sampling", sample_or_fail)
    if is_sampled:
        monkeypatch.setattr(limited._sampler, "read_output", fail)
        with pytest.raises(torch.OutOfMemoryError):
            run_step(limited, prefill_step(RULES))
        assert "event=step_halved" not in caplog.text
        return
    assert_equal(run_step(limited, scored_prefill()), run_step(reference_runner, scored_prefill()))


def test_a_replayed_step_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner("classic", eager_capturer)
    step = prefill_step(RULES)
    step = next_step(step, run_step(runner, step), sampled_token)
    assert runner._sampler is not None

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner._sampler, "launch_sampling", fail)
    with pytest.raises(torch.OutOfMemoryError):
        run_step(runner, step)
    assert "event=step_halved" not in caplog.text


def test_graphs_are_turned_off_if_an_idle_capture_exhausts_the_memory() -> None:
    def fail(_: object) -> Any:
        raise torch.OutOfMemoryError

    runner = make_runner("classic", fail)
    run_step(runner, Step(1))
    assert runner.failed_captures == 1 and runner.graph_sizes == ()


def test_sequences_are_divided_by_tokens_and_drafts_are_not_divided() -> None:
    step = Step(1, [0, 1, 2], [0, 5, 6], [9, 2, 3], list(range(14)), [True] * 3, [0] * 3)
    step = msgspec.structs.replace(step, draft_counts=[0, 1, 2])
    halves = halve_step(step)
    assert halves is not None
    assert [half.slots for half in halves] == [[0], [1, 2]]
    assert [half.token_ids for half in halves] == [list(range(9)), list(range(9, 14))]
    assert [half.draft_counts for half in halves] == [[0], [1, 2]]
    outcomes = Outcome(1, [5], faults=[0]), Outcome(1, [6, 7, 8, 9, 10], faults=[1], stuck=[0])
    merged = merge_outcomes(step, halves, outcomes)
    assert merged == Outcome(1, list(range(5, 11)), faults=[0, 2], stuck=[1])
    last = halve_step(halves[1])
    assert last is not None and [half.slots for half in last] == [[1], [2]]
    assert halve_step(last[1]) is None
