"""Beam search: several continuations of a prompt side by side, and the best ones at the end.

`Beams` is the search alone: it says which beams are to be scored next, and is fed the likeliest
tokens after each. `Search` turns its rounds into answers of one token, as any caller might ask for;
what a round's prompts share, and that is all but their last token, the prefix cache has. What does
not go with beams is refused here by name. Knows no link, no clock and no model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

import msgspec

from gpt.errors import RequestError
from gpt.sampling_params import LOGPROBS_MAX, Sampling
from serving.messages import End, Made, Phases, Scored
from serving.request import Answer, Ask, BeamRule, Request

LENGTH_PENALTY_MAX = 10.0
# The fields of an `Ask` that go with beams, besides those that are the beams' own.
_SHARED = (
    *("prompt", "adapters", "answers", "max_new_tokens", "min_new_tokens", "stop_token_ids"),
    *("seed", "logprobs", "service", "priority", "tenant"),
)
_OWN = ("beam_width", "length_penalty", "early_stopping")
# As surfaces call them; and values of theirs that say nothing.
_CALLED = {"stop_strings": "stops.strings"}
_PLAIN = Ask(None)
_SAYS_NOTHING = {"temperature": 0.0, "top_p": 1.0}

Tops = Sequence[tuple[int, float]]  # Tokens and their log-probabilities, best first.


class Found(Made, frozen=True):
    """All of an answer that a search found, as if one step had made it."""

    beam_score: float = 0.0


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens of a completion, each with its score, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    scores: tuple[Scored, ...] = ()
    total: float = 0.0

    def grown(self, tops: Tops, place: int, told: int) -> "Beam":
        """By one of the tokens that may follow; its score tells so many of the others."""
        token, logprob = tops[place]
        score = Scored(logprob, place + 1, list(tops[:told]))
        return Beam((*self.tokens, token), (*self.scores, score), self.total + logprob)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that has ended, and what it is worth: its total over a power of its length."""

    beam: Beam
    worth: float
    end: End


class Beams:
    """`live` are to be scored; `feed` takes the `tops_max` likeliest tokens after each of them.

    The rules are those of transformers' `generate` for one prompt. When it is `over` there are as
    many `hypotheses` as the search is wide, best first, if the vocabulary has as many tokens that
    end nothing.
    """

    def __init__(
        self, rule: BeamRule, tokens_max: int, tokens_min: int = 0, ends: Iterable[int] = ()
    ) -> None:
        assert tokens_max > 0, "a search is for tokens"
        self._rule, self._most, self._least = rule, tokens_max, tokens_min
        self._ends = frozenset(ends)
        self._length = 0
        self.live = [Beam()]
        self.hypotheses: list[Hypothesis] = []

    @property
    def tops_max(self) -> int:
        """So many of a beam's best tokens include as many as may be wanted that end nothing."""
        return self._rule.width + len(self._ends)

    @property
    def over(self) -> bool:
        if self._length == self._most or not self.live:
            return True
        if len(self.hypotheses) < self._rule.width:
            return False
        return self._rule.early_stopping is True or self._hopeless()

    def _hopeless(self) -> bool:
        """Whether the best beam would be worth no more than the worst hypothesis.

        As long as it is now, that is; only "never" grants it all the length that it may reach.
        """
        patient = self._rule.early_stopping == "never" and self._rule.length_penalty > 0
        length = self._most if patient else self._length
        return self._worth(self.live[0].total, length) <= self.hypotheses[-1].worth

    def _worth(self, total: float, length: int) -> float:
        worth: float = total / length**self._rule.length_penalty
        return worth

    def feed(self, tops: Sequence[Tops], told: int = 0) -> None:
        """Go one token further, by the tokens that may follow each of `live`, in order.

        With each token's score so many alternatives are kept.
        """
        assert len(tops) == len(self.live) and not self.over
        parents, width, barred = self.live, self._rule.width, self._length < self._least
        self._length += 1
        ranked = sorted(
            (-(parent.total + logprob), row, place)
            for row, parent in enumerate(parents)
            for place, (token, logprob) in enumerate(tops[row])
            if not (barred and token in self._ends)
        )
        self.live = []
        last = self._length == self._most
        for rank, (_, row, place) in enumerate(ranked):
            ends = tops[row][place][0] in self._ends
            # Only among the best so many may one end; behind them stands who takes their places.
            if rank >= width and (last or len(self.live) == width):
                break
            if ends or last:
                if rank < width:
                    beam = parents[row].grown(tops[row], place, told)
                    worth = self._worth(beam.total, self._length)
                    self.hypotheses.append(Hypothesis(beam, worth, "stop" if ends else "length"))
            elif len(self.live) < width:
                self.live.append(parents[row].grown(tops[row], place, told))
        self.hypotheses.sort(key=lambda one: -one.worth)
        del self.hypotheses[width:]


class Search:
    """The beams of one task of a request: rounds of answers to ask for, and what came of them.

    `indices` are the places among the request's answers that it is to fill.
    """

    def __init__(self, answers: Sequence[Answer], indices: range, rule: BeamRule) -> None:
        self._answer, self.indices, self.width = answers[0], indices, rule.width
        sampling = self._answer.sampling
        ends = sampling.stop_token_ids
        self._beams = Beams(rule, sampling.max_new_tokens, sampling.min_new_tokens, ends)
        self._told = sampling.logprobs
        tops = max(self._beams.tops_max, self._told or 0)
        self._one = Sampling(max_new_tokens=1, logprobs=tops)
        self._tops: list[Tops | None] = [None]
        self._cached: int | None = None
        self._first: Phases | None = None  # Of the first round; what later ones took
        self._rest_s = self._round_s = 0.0  # together; and the longest of this one so far.
        self.found: list[Made] = []  # Once it is over: for each of `indices`.

    @property
    def begun(self) -> bool:
        return self._cached is not None

    @property
    def over(self) -> bool:
        return bool(self.found)

    def round(self) -> list[Answer]:
        """What is to be asked for next, one token of each."""
        prompt = self._answer.prompt
        self._tops = [None] * len(self._beams.live)
        return [
            replace(self._answer, prompt=(*prompt, *beam.tokens), sampling=self._one)
            for beam in self._beams.live
        ]

    def take(self, place: int, made: Made) -> bool:
        """What came of an answer of the round; whether another round is to be asked for.

        One that fails ends the search, and is what came of all.
        """
        if made.end != "length":
            self.found = [made] * len(self.indices)
            return False
        if self._cached is None:
            self._cached, self._first = made.cached_tokens, made.phases
        elif made.phases is not None:
            self._round_s = max(self._round_s, made.phases.queue_s + made.phases.prefill_s)
        self._tops[place] = made.scores[0].tops
        tops = [one for one in self._tops if one is not None]
        if len(tops) < len(self._tops):
            return False
        self._rest_s, self._round_s = self._rest_s + self._round_s, 0.0
        self._beams.feed(tops, self._told or 0)
        if self._beams.over:
            self.found = self._best(self._cached)
        return not self.over

    def _best(self, cached: int) -> list[Made]:
        best = self._beams.hypotheses[: len(self.indices)]
        phases = self._first and msgspec.structs.replace(self._first, decode_s=self._rest_s)
        return [
            Found(
                number=-1,
                tokens=list(one.beam.tokens),
                scores=[] if self._told is None else list(one.beam.scores),
                end=one.end,
                cached_tokens=cached,
                phases=phases,
                beam_score=one.worth,
            )
            for one in best
        ]


def searches(request: Request) -> list[Search]:
    """One for each task of a request for beams; its answers lie side by side."""
    rule, answers = request.beams, request.answers
    if rule is None:
        return []
    count = rule.answers
    return [
        Search(answers[start : start + count], range(start, start + count), rule)
        for start in range(0, len(answers), count)
    ]


# ------------------------------------------------------------------------------------ what is asked


def rule_of(ask: Ask) -> BeamRule | None:
    """What beams are asked for; None: none are."""
    if ask.beam_width == 1:
        return None
    return BeamRule(ask.beam_width, ask.answers, ask.length_penalty, ask.early_stopping)


def check_beams(ask: Ask, width_max: int) -> None:
    """Refuse what beams cannot do, and what only they can."""
    width = ask.beam_width
    if not 1 <= width <= width_max:
        raise RequestError(
            f"beam_width is {width}; it must be from 1 (no beams) to {width_max} (beam_width_max)",
            "beam_width",
        )
    for name in _OWN if width == 1 else ():
        if getattr(ask, name) != getattr(_PLAIN, name):
            raise RequestError(
                f"{name} is for beams, and beam_width is 1; set beam_width, or leave {name} out",
                name,
            )
    if width == 1:
        return
    for name in [field.name for field in fields(ask) if field.name not in (*_SHARED, *_OWN)]:
        value, called = getattr(ask, name), _CALLED.get(name, name)
        if value not in (getattr(_PLAIN, name), _SAYS_NOTHING.get(name)):
            raise RequestError(
                f"{called} does not go with beams (beam_width is {width}): they are ranked by the "
                f"model's own log-probabilities and end at tokens; leave {called} out, or set "
                "beam_width to 1",
                called,
            )
    if ask.answers > width:
        raise RequestError(
            f"answers is {ask.answers}, and beam_width is {width}; the answers are the best of the "
            "beams, so there can be at most as many",
            "answers",
        )
    if not (isfinite(ask.length_penalty) and abs(ask.length_penalty) <= LENGTH_PENALTY_MAX):
        raise RequestError(
            f"length_penalty is {ask.length_penalty}; it must be from {-LENGTH_PENALTY_MAX:g} to "
            f"{LENGTH_PENALTY_MAX:g}",
            "length_penalty",
        )
    if not (isinstance(ask.early_stopping, bool) or ask.early_stopping == "never"):
        raise RequestError(
            f"early_stopping is {ask.early_stopping!r}; it must be True, False or 'never'",
            "early_stopping",
        )


def check_ends(answer: Answer, width: int, vocab_size: int) -> None:
    """The same, of what only the model's tokenizer and the adapter's card tell."""
    if any(answer.stop_strings):
        raise RequestError(
            f"adapter {answer.adapter!r} ends its answers at stop strings, and beams end at tokens "
            "only; set beam_width to 1",
            "beam_width",
        )
    ends = len(answer.sampling.stop_token_ids)
    most = min(LOGPROBS_MAX, vocab_size) - ends
    if width > most:
        raise RequestError(
            f"beam_width is {width}; with {ends} token ids that end an answer, and a vocabulary of "
            f"{vocab_size}, it must be at most {most}",
            "beam_width",
        )
