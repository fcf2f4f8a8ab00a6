"""Beam search: live beams, finished hypotheses, and the rounds of one-token answers.

`BeamSearchScorer` is the algorithm alone: `advance` extends the `live` beams by their most likely
next tokens. `BeamSearch` gets these tokens in rounds: in each round, the engine generates an answer
of one token for each live beam, with the beam's tokens as a part of the prompt. From the second
round on, the prefix cache normally holds each prompt except its last few tokens. Options that beam
search does not support are refused here by name. The module is independent of transport, clock and
model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

import msgspec

from gpt.errors import RequestError
from gpt.sampling_params import LOGPROBS_MAX, SamplingParams
from serving.messages import EndReason, Phases, SequenceOutput, TokenScore
from serving.request import AnswerSpec, Ask, BeamSearchParams, Request

LENGTH_PENALTY_MAX = 10.0
# Fields of an `Ask` that beam search supports, besides its own `_BEAM_FIELDS`.
_COMPATIBLE_FIELDS = (
    "prompt",
    "adapters",
    "answers",
    "max_new_tokens",
    "min_new_tokens",
    "stop_token_ids",
    "seed",
    "logprobs",
    "service",
    "priority",
    "tenant",
)
_BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
_FIELD_ALIASES = {"stop_strings": "stops.strings"}  # Names that errors use for a field.
_DEFAULT_ASK = Ask(None)
# Two more fields are accepted, if they have values that change nothing in beam search: temperature
# 0 (no sampling) and top_p 1 (all tokens).
_NEUTRAL_VALUES = {"temperature": 0.0, "top_p": 1.0}

TopLogprobs = Sequence[tuple[int, float]]  # Token ids and log-probabilities, best first.


class BeamResult(SequenceOutput, frozen=True):
    """A complete answer of beam search, in the form of one step's output."""

    beam_score: float = 0.0


@dataclass(frozen=True, slots=True)
class Beam:
    """A partial completion: tokens, their scores, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    sum_logprobs: float = 0.0

    def with_token(self, tops: TopLogprobs, index: int, alternatives: int) -> "Beam":
        """Return this beam extended by the token `tops[index]`.

        The `TokenScore` of that token lists the first `alternatives` entries of `tops`.
        """
        token, logprob = tops[index]
        score = TokenScore(logprob, index + 1, list(tops[:alternatives]))
        return Beam((*self.tokens, token), (*self.scores, score), self.sum_logprobs + logprob)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished completion. Score: sum of log-probabilities / length ** length penalty."""

    beam: Beam
    score: float
    end: EndReason


class BeamSearchScorer:
    """The algorithm of beam search for one prompt, with the rules of transformers' `generate`.

    The caller calls `advance` until `is_done` is true, each time with the `candidates_max` most
    likely tokens after each of the `live` beams. At the end, `hypotheses` has `width` completions,
    best first, if the vocabulary has at least `width` tokens that are not stop tokens.
    """

    def __init__(
        self,
        rule: BeamSearchParams,
        tokens_max: int,
        tokens_min: int = 0,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        assert tokens_max > 0, "beam search needs at least one new token"
        self._rule = rule
        self._tokens_max = tokens_max
        self._tokens_min = tokens_min
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length = 0
        self.live = [Beam()]
        self.hypotheses: list[Hypothesis] = []

    @property
    def candidates_max(self) -> int:
        """Number of top tokens per beam: enough that at least `width` are not stop tokens."""
        return self._rule.width + len(self._stop_token_ids)

    @property
    def is_done(self) -> bool:
        if self._length == self._tokens_max or not self.live:
            return True
        if len(self.hypotheses) < self._rule.width:
            return False
        return self._rule.early_stopping is True or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        """Whether the best live beam scores no better than the worst hypothesis.

        The live beam is scored as if it ended now. With early_stopping "never" and a positive
        length penalty it is scored with the maximum length, at which its score would be best.
        """
        uses_maximum = self._rule.early_stopping == "never" and self._rule.length_penalty > 0
        length = self._tokens_max if uses_maximum else self._length
        return self._score(self.live[0].sum_logprobs, length) <= self.hypotheses[-1].score

    def _score(self, sum_logprobs: float, length: int) -> float:
        score: float = sum_logprobs / length**self._rule.length_penalty
        return score

    def advance(self, tops: Sequence[TopLogprobs], alternatives: int = 0) -> None:
        """Extend the live beams by one token; `tops` has the candidates of each beam, in order.

        The `TokenScore` of each new token lists the `alternatives` best candidates of its beam.
        """
        assert len(tops) == len(self.live) and not self.is_done
        parents = self.live
        width = self._rule.width
        below_minimum = self._length < self._tokens_min
        self._length += 1
        candidates = sorted(
            (-(parent.sum_logprobs + logprob), beam_index, token_index)
            for beam_index, parent in enumerate(parents)
            for token_index, (token, logprob) in enumerate(tops[beam_index])
            if not (below_minimum and token in self._stop_token_ids)
        )
        self.live = []
        at_length_limit = self._length == self._tokens_max
        for rank, (_, beam_index, token_index) in enumerate(candidates):
            is_stop = tops[beam_index][token_index][0] in self._stop_token_ids
            # Only the best `width` candidates may become hypotheses; later ones may only become
            # live beams.
            if rank >= width and (at_length_limit or len(self.live) == width):
                break
            if is_stop or at_length_limit:
                if rank < width:
                    beam = parents[beam_index].with_token(
                        tops[beam_index], token_index, alternatives
                    )
                    score = self._score(beam.sum_logprobs, self._length)
                    self.hypotheses.append(Hypothesis(beam, score, "stop" if is_stop else "length"))
            elif len(self.live) < width:
                self.live.append(
                    parents[beam_index].with_token(tops[beam_index], token_index, alternatives)
                )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[width:]


class BeamSearch:
    """The beam search for one task of a request: a prompt, and an adapter if there is one.

    The search makes rounds of one-token answers, which the engine submits. `indices` are the
    indices of the request's answers that the search produces.
    """

    def __init__(
        self, answers: Sequence[AnswerSpec], indices: range, rule: BeamSearchParams
    ) -> None:
        self._answer = answers[0]
        self.indices = indices
        self.width = rule.width
        sampling = self._answer.sampling
        stop_token_ids = sampling.stop_token_ids
        self._beams = BeamSearchScorer(
            rule, sampling.max_new_tokens, sampling.min_new_tokens, stop_token_ids
        )
        self._logprobs = sampling.logprobs
        logprobs = max(self._beams.candidates_max, self._logprobs or 0)
        self._single_token_sampling = SamplingParams(max_new_tokens=1, logprobs=logprobs)
        # The top tokens after each beam of the round; None: not received yet.
        self._round_tops: list[TopLogprobs | None] = [None]
        self._cached_tokens: int | None = None
        self._first_phases: Phases | None = None  # Phases of the first round.
        # Seconds of the completed rounds after the first, and of this round's slowest beam so far.
        self._later_rounds_s = self._round_s = 0.0
        self.outputs: list[SequenceOutput] = []  # When done: one output for each of `indices`.

    @property
    def has_begun(self) -> bool:
        return self._cached_tokens is not None

    @property
    def is_done(self) -> bool:
        return bool(self.outputs)

    def next_round(self) -> list[AnswerSpec]:
        """The next round: an answer of one token for each live beam."""
        prompt = self._answer.prompt
        self._round_tops = [None] * len(self._beams.live)
        return [
            replace(
                self._answer, prompt=(*prompt, *beam.tokens), sampling=self._single_token_sampling
            )
            for beam in self._beams.live
        ]

    def record_output(self, beam_index: int, output: SequenceOutput) -> bool:
        """Record the output of one beam of the round; returns whether the next round must start.

        A one-token answer that does not end with "length" has failed: its output ends the search
        and becomes the output of all answers of the search.
        """
        if output.end != "length":
            self.outputs = [output] * len(self.indices)
            return False
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
            self._first_phases = output.phases
        elif output.phases is not None:
            self._round_s = max(self._round_s, output.phases.queue_s + output.phases.prefill_s)
        self._round_tops[beam_index] = output.scores[0].tops
        tops = [beam_tops for beam_tops in self._round_tops if beam_tops is not None]
        if len(tops) < len(self._round_tops):
            return False
        self._later_rounds_s += self._round_s
        self._round_s = 0.0
        self._beams.advance(tops, self._logprobs or 0)
        if self._beams.is_done:
            self.outputs = self._best_outputs(self._cached_tokens)
        return not self.is_done

    def _best_outputs(self, cached_tokens: int) -> list[SequenceOutput]:
        hypotheses = self._beams.hypotheses[: len(self.indices)]
        phases = self._first_phases and msgspec.structs.replace(
            self._first_phases, decode_s=self._later_rounds_s
        )
        return [
            BeamResult(
                sequence_id=-1,
                tokens=list(hypothesis.beam.tokens),
                scores=[] if self._logprobs is None else list(hypothesis.beam.scores),
                end=hypothesis.end,
                cached_tokens=cached_tokens,
                phases=phases,
                beam_score=hypothesis.score,
            )
            for hypothesis in hypotheses
        ]


def beam_searches(request: Request) -> list[BeamSearch]:
    """One search for each task of a request; empty without beam search.

    The answers of a task have consecutive indices.
    """
    rule, answers = request.beams, request.answers
    if rule is None:
        return []
    count = rule.answers
    return [
        BeamSearch(answers[start : start + count], range(start, start + count), rule)
        for start in range(0, len(answers), count)
    ]


# ------------------------------------------------------------------------------ request validation


def beam_params(ask: Ask) -> BeamSearchParams | None:
    """The beam search parameters of a call, or None without beam search."""
    if ask.beam_width == 1:
        return None
    return BeamSearchParams(ask.beam_width, ask.answers, ask.length_penalty, ask.early_stopping)


def check_beams(ask: Ask, width_max: int) -> None:
    """Refuse options that beam search does not support, and beam options without beam search."""
    width = ask.beam_width
    if not 1 <= width <= width_max:
        raise RequestError(
            f"beam_width is {width}; it must be from 1 (no beam search) to {width_max} "
            "(beam_width_max)",
            "beam_width",
        )
    if width == 1:
        for name in _BEAM_FIELDS:
            if getattr(ask, name) != getattr(_DEFAULT_ASK, name):
                raise RequestError(
                    f"{name} is for beam search only, and beam_width is 1; set beam_width to 2 or "
                    f"more, or remove {name}",
                    name,
                )
        return
    for name in [field.name for field in fields(ask)]:
        if name in _COMPATIBLE_FIELDS or name in _BEAM_FIELDS:
            continue
        field_name = _FIELD_ALIASES.get(name, name)
        if getattr(ask, name) not in (getattr(_DEFAULT_ASK, name), _NEUTRAL_VALUES.get(name)):
            raise RequestError(
                f"{field_name} is not supported with beam search (beam_width is {width}): beams "
                "are ranked by the model's unmodified log-probabilities and end only at stop "
                f"tokens or at the length limit; remove {field_name}, or set beam_width to 1",
                field_name,
            )
    if ask.answers > width:
        raise RequestError(
            f"answers is {ask.answers}, and beam_width is {width}; the answers are the best beams, "
            f"so answers must be at most {width}",
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


def check_beam_stops(answer: AnswerSpec, width: int, vocab_size: int) -> None:
    """Refuse beam search if the adapter's card has stop strings, or if `width` is too large.

    Beam search needs `width` + (number of stop tokens) top tokens per step; a step returns at most
    `LOGPROBS_MAX`.
    """
    if any(answer.stop_strings):
        raise RequestError(
            f"adapter {answer.adapter!r} has stop strings, and beam search ends only at stop "
            "tokens; set beam_width to 1",
            "beam_width",
        )
    stop_count = len(answer.sampling.stop_token_ids)
    width_max = min(LOGPROBS_MAX, vocab_size) - stop_count
    limit = f"a vocabulary of {vocab_size}"
    if vocab_size > LOGPROBS_MAX:
        limit = f"at most {LOGPROBS_MAX} log-probabilities per token"
    if width > width_max:
        raise RequestError(
            f"beam_width is {width}; with {stop_count} stop token ids and {limit}, it must be at "
            f"most {width_max}",
            "beam_width",
        )
