"""Requests in one batch, on any split, compared with each request alone."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gpt.generation.generate import Completion, generate
from gpt.generation.reference_sampler import Score
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.messages import Submission, TokenScore
from tests.support.engine_scenarios import (
    AdapterFiles,
    Answer,
    Scenario,
    ScenarioRun,
    run_scenarios,
)
from tests.support.models import MARGIN, SERVED_CONFIGS, build
from tests.support.ranks import ranks

# Tolerance of logits of about 10, in fp64 and in fp32: batches add in another order.
EXACT = {"float64": 1e-9, "float32": 1e-3}
SIZES = [1, 3, 5]  # Rows of the adapters.


@cache
def oracle(name: str, dtype: str) -> GPT:
    return build(SERVED_CONFIGS[name], dtype=getattr(torch, dtype))


@cache
def complete_alone(
    name: str, dtype: str, prompt: tuple[int, ...], sampling: SamplingParams, table: Tensor | None
) -> Completion:
    """The completion of a request alone. It is cached, because every split compares with it."""
    return generate(oracle(name, dtype), [prompt], sampling, adapter_table=table)[0]


@dataclass
class Coverage:
    """What the scenarios exercised, so that a test can assert coverage."""

    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached: int = 0
    chunked: int = 0
    cancelled: int = 0
    loads: int = 0
    faults: int = 0
    ties: int = 0  # Requests that fp32 rounding may have decided.
    in_flight: int = 0
    drafted: int = 0  # Speculative tokens.
    accepted: int = 0  # Speculative tokens that were accepted.
    replayed: int = 0  # Steps that replayed a CUDA graph.
    early: int = 0  # Steps launched before the previous step's tokens were known.

    def add(self, scenario: Scenario, scenario_run: ScenarioRun) -> None:
        answers = scenario_run.answers
        self.requests += len(answers)
        self.tokens += sum(len(answer.tokens) for answer in answers.values())
        self.preemptions += scenario_run.load.preemptions
        self.cached += scenario_run.load.cached_tokens
        self.loads += scenario_run.load.adapter_loads
        self.drafted += scenario_run.load.drafted_tokens
        self.accepted += scenario_run.load.accepted_tokens
        self.replayed += scenario_run.load.replayed_steps
        self.early += scenario_run.load.early_steps
        self.cancelled += sum(answer.end == "cancelled" for answer in answers.values())
        budget = scenario.config.scheduler_config.step_tokens_max
        self.chunked += sum(
            len(submission.prompt) > budget for _, submission in scenario.submissions
        )
        self.in_flight = max(self.in_flight, scenario_run.in_flight)


def check(
    scenario: Scenario, scenario_run: ScenarioRun, adapters: AdapterFiles, coverage: Coverage
) -> None:
    """Compare every answer of a scenario with the request's completion alone."""
    coverage.add(scenario, scenario_run)
    cancelled = {number for _, number in scenario.cancels}
    assert scenario_run.largest <= scenario.config.scheduler_config.step_tokens_max
    assert sorted(scenario_run.answers) == sorted(
        submission.sequence_id for _, submission in scenario.submissions
    )
    for _, submission in scenario.submissions:
        answer = scenario_run.answers[submission.sequence_id]
        table = adapters.table(submission)
        want = complete_alone(
            scenario.name, scenario.dtype, tuple(submission.prompt), submission.sampling, table
        )
        label = f"{scenario.name}, request {submission.sequence_id}: {submission.sampling}"
        if want.finish_reason == "fault":
            assert (answer.end, answer.tokens) == ("fault", []), label
            coverage.faults += 1
            continue
        equal = _comparable_tokens(want, scenario.dtype)
        coverage.ties += equal < len(want.token_ids)
        compared = min(len(answer.tokens), equal)
        assert answer.tokens[:equal] == want.token_ids[:compared], label
        if answer.end == "cancelled" and submission.sequence_id in cancelled:
            continue
        assert answer.end == want.finish_reason, (label, answer.reason)
        if equal == len(want.token_ids):
            assert len(answer.tokens) == equal, label
        _check_scores(scenario.dtype, submission, answer, want, equal)


def _comparable_tokens(want: Completion, dtype: str) -> int:
    """The number of leading tokens that must be equal."""
    if dtype == "float64":
        return len(want.token_ids)
    margins = [score.tops[0][1] - score.tops[1][1] for score in want.scores]
    return next((n for n, margin in enumerate(margins) if margin < MARGIN), len(margins))


def _check_scores(
    dtype: str, submission: Submission, answer: Answer, want: Completion, equal: int
) -> None:
    for score, expected in zip(answer.scores[:equal], want.scores[:equal], strict=True):
        _close(score, expected, dtype, submission.sampling.logprobs)
    if submission.sampling.prompt_logprobs is None:
        assert answer.prompt_scores == []
        return
    assert len(answer.prompt_scores) == len(submission.prompt)
    for prompt_score, expected_prompt_score in zip(
        answer.prompt_scores, want.prompt_scores, strict=True
    ):
        assert (prompt_score is None) == (expected_prompt_score is None)
        if prompt_score is not None and expected_prompt_score is not None:
            _close(prompt_score, expected_prompt_score, dtype, submission.sampling.prompt_logprobs)


def _close(score: TokenScore, want: Score, dtype: str, tops: int | None) -> None:
    assert abs(score.logprob - want.logprob) < EXACT[dtype]
    if tops and dtype == "float64":
        assert score.rank == want.rank
        assert [token for token, _ in score.tops] == [token for token, _ in want.tops]
        for (_, token_logprob), (_, expected_logprob) in zip(score.tops, want.tops, strict=True):
            assert abs(token_logprob - expected_logprob) < EXACT[dtype]


def run_and_check(
    scenarios: list[Scenario],
    split: tuple[int, int],
    folder: Path,
    adapters: AdapterFiles,
    timeout_s: float = 600.0,
    ep: int = 1,
) -> Coverage:
    """Run the scenarios on a split, and compare every answer."""
    tp, pp = split
    rank_count = max(tp, ep) * pp
    if rank_count == 1:
        results = run_scenarios(0, 1, 1, scenarios, str(folder))
    else:
        arguments = (tp, pp, scenarios, str(folder), ep)
        results = ranks(rank_count, run_scenarios, *arguments, timeout_s=timeout_s)[0]
    coverage = Coverage()
    for scenario, scenario_run in zip(scenarios, results, strict=True):
        check(scenario, scenario_run, adapters, coverage)
    print(f"\ntp {tp}, pp {pp}, ep {ep}: {coverage}")
    return coverage
