"""Beam search scorer with given log-probabilities, and validation of beam options.

The references are transformers and exhaustive search. test_beam_search_in_engine.py has the engine.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import RequestError
from gpt.model.gpt_model import GPT
from serving.admission.admission import check_ask
from serving.config import LimitsConfig
from serving.engine.beam_search import BeamSearchScorer
from serving.messages import Guide
from serving.request import Ask, BeamSearchParams
from tests.support.beam_cases import (
    assert_same_beams,
    draw_cases,
    flat_model,
    run_scorer,
    transformers_beams,
)
from tests.support.engine_requests import VOCABULARY
from tests.support.models import CONFIGS
from tests.support.suites import by_suite


def check_cases(model: GPT, count: int, seed: int) -> None:
    ends = Counter[str]()
    for case in draw_cases(model, count, seed):
        beams = run_scorer(model, case)
        answers = beams.hypotheses[: case.rule.answers]
        assert_same_beams(
            [(hypothesis.beam.tokens, hypothesis.score) for hypothesis in answers],
            transformers_beams(model, case),
        )
        ends.update({hypothesis.end for hypothesis in beams.hypotheses})
    assert min(ends["stop"], ends["length"]) >= count // 4, (
        "too few searches end by a stop token, or by length"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_beam_search_matches_transformers(name: str) -> None:
    check_cases(flat_model(CONFIGS[name]), 6, seed=1)


@pytest.mark.parametrize("count", by_suite(60, 200))
@pytest.mark.parametrize(("seed", "name"), list(enumerate(CONFIGS, 2)))
def test_random_beam_searches_match_transformers(seed: int, name: str, count: int) -> None:
    # The scorer knows no network, so each network has its own cases.
    check_cases(flat_model(CONFIGS[name]), count, seed)


Language = Callable[[tuple[int, ...]], list[tuple[int, float]]]


def language(seed: int, size: int) -> Language:
    """Random log-probabilities of each token after each prefix, best first."""

    @cache
    def log_probabilities(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        draw = Random(f"{seed} {tokens}")
        row = torch.tensor([draw.gauss(0, 2) for _ in range(size)], dtype=torch.float64)
        pairs = enumerate(row.log_softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])

    return log_probabilities


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(-2, 2), st.booleans())
def test_an_exhaustive_width_finds_the_best_completions(
    seed: int, penalty: float, has_minimum: bool
) -> None:
    size = 4
    tokens_max = 3
    tokens_min = 1 if has_minimum else 0
    stop_token = 0
    log_probabilities = language(seed, size)
    expected_scores = dict[tuple[int, ...], float]()
    for ids in product(range(size), repeat=tokens_max):
        last = next(
            (index for index in range(tokens_min, tokens_max) if ids[index] == stop_token),
            tokens_max - 1,
        )
        # Below the minimum length no completion ends, and no stop token is taken.
        if stop_token in ids[:last] or (has_minimum and ids[0] == stop_token):
            continue
        completion = ids[: last + 1]
        sum_logprobs = sum(
            dict(log_probabilities(completion[:index]))[token]
            for index, token in enumerate(completion)
        )
        expected_scores[completion] = sum_logprobs / len(completion) ** penalty

    beams = BeamSearchScorer(
        BeamSearchParams(100, 1, penalty), tokens_max, tokens_min, [stop_token]
    )
    while not beams.is_done:
        beams.advance([log_probabilities(beam.tokens) for beam in beams.live])

    scores = {hypothesis.beam.tokens: hypothesis.score for hypothesis in beams.hypotheses}
    assert scores == pytest.approx(expected_scores)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(2, 5),
    st.integers(1, 9),
    st.sets(st.integers(0, 11), max_size=4),
    st.sampled_from([True, False, "never"]),
)
def test_beams_are_complete_distinct_and_end_at_a_stop_token(
    seed: int, width: int, tokens_max: int, stop_tokens: set[int], early_stopping: Any
) -> None:
    log_probabilities = language(seed, 12)
    beams = BeamSearchScorer(
        BeamSearchParams(width, early_stopping=early_stopping),
        tokens_max,
        stop_token_ids=stop_tokens,
    )
    rounds = 0
    while not beams.is_done:
        beams.advance(
            [log_probabilities(beam.tokens)[: beams.candidates_max] for beam in beams.live],
            alternatives=2,
        )
        rounds += 1
        assert rounds == tokens_max or len(beams.live) == width
        assert all(not stop_tokens & {*beam.tokens} for beam in beams.live)
        assert beams.live == sorted(beams.live, key=lambda beam: -beam.sum_logprobs)
    hypotheses = beams.hypotheses
    assert len({hypothesis.beam.tokens for hypothesis in hypotheses}) == len(hypotheses) == width
    assert rounds <= tokens_max
    for hypothesis in hypotheses:
        ids = hypothesis.beam.tokens
        assert (hypothesis.end == "stop") == (ids[-1] in stop_tokens)
        assert not stop_tokens & {*ids[:-1]}
        sum_logprobs = sum(score.logprob for score in hypothesis.beam.scores)
        assert hypothesis.score == pytest.approx(sum_logprobs / len(ids))
        for index, score in enumerate(hypothesis.beam.scores):
            best = log_probabilities(ids[:index])
            assert best[score.rank - 1] == (ids[index], score.logprob)
            assert score.tops == best[:2]


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"temperature": 0.5}, "temperature", "not supported with beam search"),
        ({"top_k": 4}, "top_k", "remove top_k"),
        ({"top_p": 0.5}, "top_p", "not supported with beam search"),
        ({"min_p": 0.5}, "min_p", "not supported with beam search"),
        ({"typical_p": 0.5}, "typical_p", "not supported with beam search"),
        ({"repetition_penalty": 1.5}, "repetition_penalty", "not supported with beam search"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size", "not supported with beam search"),
        ({"length_decay": (1, 2.0)}, "length_decay", "not supported with beam search"),
        ({"logit_bias": {1: 2.0}}, "logit_bias", "unmodified log-probabilities"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids", "not supported with beam search"),
        ({"bad_words": ("a",)}, "bad_words", "not supported with beam search"),
        ({"stop_strings": ("a",)}, "stops.strings", "end only at stop tokens or at"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not supported with beam search"),
        ({"guide": Guide("choice", '["a"]')}, "guide", "not supported with beam search"),
        ({"answers": 5}, "answers", "beam_width is 4"),
        ({"length_penalty": float("nan")}, "length_penalty", "from -10 to 10"),
        ({"length_penalty": 11.0}, "length_penalty", "from -10 to 10"),
        ({"early_stopping": "always"}, "early_stopping", "True, False or 'never'"),
        ({"beam_width": 17}, "beam_width", "from 1 .* to 16 .beam_width_max"),
        ({"beam_width": 0}, "beam_width", "from 1"),
        ({"adapters": ("a",) * 17}, "answers", "beam_width is 4 for each of 17 adapters"),
        ({"beam_width": 1, "length_penalty": 2.0}, "length_penalty", "is for beam search only"),
        ({"beam_width": 1, "early_stopping": True}, "early_stopping", "is for beam search only"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    fields: dict[str, Any], name: str, message: str
) -> None:
    ask = Ask("a", **{"beam_width": 4} | fields)
    with pytest.raises(RequestError, match=message) as refused:
        check_ask(ask, LimitsConfig(), VOCABULARY)
    assert refused.value.field == name


def test_neutral_option_values_are_accepted_with_beam_search() -> None:
    ask = Ask("a", beam_width=4, answers=4, temperature=0.0, top_p=1.0, seed=3, logprobs=2)
    check_ask(ask, LimitsConfig(), VOCABULARY)
