"""Requests that share a batch, run on any split, beside each alone."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gpt.generation.generate import Completion, generate
from gpt.generation.reference_sampler import Score
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.messages import Scored, Submission
from tests.support.engine_scenarios import Answer, Played, Scene, Shelf, play
from tests.support.models import CONFIGS, MARGIN, build
from tests.support.ranks import ranks

# Sums in another order: logits of about 10 in fp64 and in fp32.
EXACT = {"float64": 1e-9, "float32": 1e-3}
SIZES = [1, 3, 5]  # Rows of the adapters.


@cache
def oracle(name: str, dtype: str) -> GPT:
    return build(CONFIGS[name], dtype=getattr(torch, dtype))


@cache
def alone(
    name: str, dtype: str, prompt: tuple[int, ...], sampling: Sampling, table: Tensor | None
) -> Completion:
    """What a caller gets who is the only one. Splits play the same scenes, so it is kept."""
    return generate(oracle(name, dtype), [prompt], sampling, table=table)[0]


@dataclass
class Tally:
    """What the scenes made happen, so that a test can say that it did."""

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
    drafted: int = 0  # Tokens that were guessed,
    accepted: int = 0  # and those of them that were right.
    replayed: int = 0  # Steps that were recorded,
    early: int = 0  # and those that began before what they follow was known.

    def add(self, scene: Scene, played: Played) -> None:
        answers = played.answers
        self.requests += len(answers)
        self.tokens += sum(len(answer.tokens) for answer in answers.values())
        self.preemptions += played.load.preemptions
        self.cached += played.load.cached_tokens
        self.loads += played.load.adapter_loads
        self.drafted += played.load.drafted_tokens
        self.accepted += played.load.accepted_tokens
        self.replayed += played.load.replayed_steps
        self.early += played.load.early_steps
        self.cancelled += sum(answer.end == "cancelled" for answer in answers.values())
        budget = scene.config.step_tokens_max
        self.chunked += sum(len(one.prompt) > budget for _, one in scene.asks)
        self.in_flight = max(self.in_flight, played.in_flight)


def check(scene: Scene, played: Played, shelf: Shelf, tally: Tally) -> None:
    """Every answer of a scene against what its caller would have got alone."""
    tally.add(scene, played)
    cancelled = {number for _, number in scene.cancels}
    assert played.largest <= scene.config.step_tokens_max
    assert sorted(played.answers) == sorted(one.number for _, one in scene.asks)
    for _, one in scene.asks:
        answer = played.answers[one.number]
        table = shelf.table(one)
        want = alone(scene.name, scene.dtype, tuple(one.prompt), one.sampling, table)
        where = f"{scene.name}, request {one.number}: {one.sampling}"
        if want.finish_reason == "fault":
            assert (answer.end, answer.tokens) == ("fault", []), where
            tally.faults += 1
            continue
        same = _until(want, scene.dtype)
        tally.ties += same < len(want.token_ids)
        made = min(len(answer.tokens), same)
        assert answer.tokens[:same] == want.token_ids[:made], where
        if answer.end == "cancelled" and one.number in cancelled:
            continue
        assert answer.end == want.finish_reason, (where, answer.reason)
        if same == len(want.token_ids):
            assert len(answer.tokens) == same, where
        _check_scores(scene.dtype, one, answer, want, same)


def _until(want: Completion, dtype: str) -> int:
    """How many tokens must be the same."""
    if dtype == "float64":
        return len(want.token_ids)
    margins = [score.tops[0][1] - score.tops[1][1] for score in want.scores]
    return next((n for n, margin in enumerate(margins) if margin < MARGIN), len(margins))


def _check_scores(dtype: str, one: Submission, answer: Answer, want: Completion, same: int) -> None:
    for made, alone_made in zip(answer.scores[:same], want.scores[:same], strict=True):
        _close(made, alone_made, dtype, one.sampling.logprobs)
    if one.sampling.prompt_logprobs is None:
        assert answer.prompt_scores == []
        return
    assert len(answer.prompt_scores) == len(one.prompt)
    for scored, wanted in zip(answer.prompt_scores, want.prompt_scores, strict=True):
        assert (scored is None) == (wanted is None)
        if scored is not None and wanted is not None:
            _close(scored, wanted, dtype, one.sampling.prompt_logprobs)


def _close(got: Scored, want: Score, dtype: str, tops: int | None) -> None:
    assert abs(got.logprob - want.logprob) < EXACT[dtype]
    if tops and dtype == "float64":
        assert got.rank == want.rank
        assert [token for token, _ in got.tops] == [token for token, _ in want.tops]
        for (_, mine), (_, theirs) in zip(got.tops, want.tops, strict=True):
            assert abs(mine - theirs) < EXACT[dtype]


def run(
    scenes: list[Scene], split: tuple[int, int], folder: Path, shelf: Shelf, timeout_s: float = 60.0
) -> Tally:
    """Play them, and compare every answer."""
    tp, pp = split
    if tp * pp == 1:
        results = play(0, 1, 1, scenes, str(folder))
    else:
        arguments = (tp, pp, scenes, str(folder))
        results = ranks(tp * pp, play, *arguments, timeout_s=timeout_s)[0]
    tally = Tally()
    for scene, played in zip(scenes, results, strict=True):
        check(scene, played, shelf, tally)
    print(f"\ntp {tp}, pp {pp}: {tally}")
    return tally
