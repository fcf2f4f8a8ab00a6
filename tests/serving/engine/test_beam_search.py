"""The search for the best beams, fed by hand, and what may be asked of it.

The oracles are transformers, and all that there is to be found. The engine has a file of its own.
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
from serving.config import ServerConfig
from serving.engine.beam_search import Beams
from serving.messages import Guide
from serving.request import Ask, BeamRule
from tests.support.beam_cases import cases, expected, flat, same, searched
from tests.support.engine_requests import VOCABULARY
from tests.support.models import CONFIGS


def check_cases(model: GPT, count: int, seed: int) -> None:
    ends = Counter[str]()
    for case in cases(model, count, seed):
        beams = searched(model, case)
        best = beams.hypotheses[: case.rule.answers]
        same([(one.beam.tokens, one.worth) for one in best], expected(model, case))
        ends.update({one.end for one in beams.hypotheses})
    assert min(ends["stop"], ends["length"]) >= count // 4, "the cases show too little"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_search_finds_what_transformers_finds(name: str) -> None:
    check_cases(flat(CONFIGS[name]), 6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("name", CONFIGS)
def test_many_searches_find_what_transformers_finds(name: str, seed: int) -> None:
    check_cases(flat(CONFIGS[name]), 120, seed)


Language = Callable[[tuple[int, ...]], list[tuple[int, float]]]


def language(seed: int, size: int) -> Language:
    """Made-up log-probabilities of each token after each beginning, best first."""

    @cache
    def after(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        luck = Random(f"{seed} {tokens}")
        row = torch.tensor([luck.gauss(0, 2) for _ in range(size)], dtype=torch.float64)
        pairs = enumerate(row.log_softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])

    return after


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(-2, 2), st.booleans())
def test_a_search_as_wide_as_all_there_is_finds_the_best_of_all(
    seed: int, penalty: float, late: bool
) -> None:
    size, most, end, after = 4, 3, 0, language(seed, 4)
    least = 1 if late else 0
    every = []
    for ids in product(range(size), repeat=most):
        cut = next((place for place in range(least, most) if ids[place] == end), most - 1)
        # Before the least length nothing ends, and nothing that would end is drawn.
        if end in ids[:cut] or (late and ids[0] == end):
            continue
        kept = ids[: cut + 1]
        total = sum(dict(after(kept[:place]))[token] for place, token in enumerate(kept))
        every.append((kept, total / len(kept) ** penalty))
    whole = dict(every)

    beams = Beams(BeamRule(100, 1, penalty), most, least, [end])
    while not beams.over:
        beams.feed([after(beam.tokens) for beam in beams.live])

    found = {one.beam.tokens: one.worth for one in beams.hypotheses}
    assert found == pytest.approx(whole)
    assert list(found.values()) == sorted(found.values(), reverse=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(2, 5),
    st.integers(1, 9),
    st.sets(st.integers(0, 11), max_size=4),
    st.sampled_from([True, False, "never"]),
)
def test_beams_are_as_many_as_asked_for_all_different_and_nonegoes_on_behind_an_end(
    seed: int, width: int, most: int, ends: set[int], early: Any
) -> None:
    after = language(seed, 12)
    beams = Beams(BeamRule(width, early_stopping=early), most, ends=ends)
    rounds = 0
    while not beams.over:
        beams.feed([after(beam.tokens)[: beams.tops_max] for beam in beams.live], told=2)
        rounds += 1
        assert rounds == most or len(beams.live) == width
        assert all(not ends & {*beam.tokens} for beam in beams.live)
        assert beams.live == sorted(beams.live, key=lambda beam: -beam.total)
    found = beams.hypotheses
    assert len({one.beam.tokens for one in found}) == len(found) == width and rounds <= most
    for one in found:
        ids = one.beam.tokens
        assert (one.end == "stop") == (ids[-1] in ends) and not ends & {*ids[:-1]}
        assert one.worth == pytest.approx(sum(s.logprob for s in one.beam.scores) / len(ids))
        for place, score in enumerate(one.beam.scores):
            row = after(ids[:place])
            assert row[score.rank - 1] == (ids[place], score.logprob)
            assert score.tops == row[:2]


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"temperature": 0.5}, "temperature", "does not go with beams"),
        ({"top_k": 4}, "top_k", "leave top_k out"),
        ({"top_p": 0.5}, "top_p", "does not go with beams"),
        ({"min_p": 0.5}, "min_p", "does not go with beams"),
        ({"typical_p": 0.5}, "typical_p", "does not go with beams"),
        ({"repetition_penalty": 1.5}, "repetition_penalty", "does not go with beams"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size", "does not go with beams"),
        ({"length_decay": (1, 2.0)}, "length_decay", "does not go with beams"),
        ({"logit_bias": {1: 2.0}}, "logit_bias", "own log-probabilities"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids", "does not go with beams"),
        ({"bad_words": ("a",)}, "bad_words", "does not go with beams"),
        ({"stop_strings": ("a",)}, "stops.strings", "end at tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "does not go with beams"),
        ({"guide": Guide("choice", '["a"]')}, "guide", "does not go with beams"),
        ({"answers": 5}, "answers", "beam_width is 4"),
        ({"length_penalty": float("nan")}, "length_penalty", "from -10 to 10"),
        ({"length_penalty": 11.0}, "length_penalty", "from -10 to 10"),
        ({"early_stopping": "always"}, "early_stopping", "True, False or 'never'"),
        ({"beam_width": 17}, "beam_width", "from 1 .* to 16 .beam_width_max"),
        ({"beam_width": 0}, "beam_width", "from 1"),
        ({"adapters": ("a",) * 17}, "answers", "17 adapters x 4 answers"),
        ({"beam_width": 1, "length_penalty": 2.0}, "length_penalty", "is for beams"),
        ({"beam_width": 1, "early_stopping": True}, "early_stopping", "is for beams"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(
    fields: dict[str, Any], name: str, words: str
) -> None:
    ask = Ask("a", **{"beam_width": 4} | fields)
    with pytest.raises(RequestError, match=words) as refused:
        check_ask(ask, ServerConfig("none"), VOCABULARY)
    assert refused.value.field == name


def test_what_says_nothing_goes_with_beams() -> None:
    ask = Ask("a", beam_width=4, answers=4, temperature=0.0, top_p=1.0, seed=3, logprobs=2)
    check_ask(ask, ServerConfig("none"), VOCABULARY)
