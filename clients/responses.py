"""What a server answers, as plain values: completions, pieces of them, scores.

Both clients read their messages here, so they answer alike. Enums become words, what is unset None.
Knows no connection.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clients.transport import CallError
from protos.preamble.v1 import generation_pb2 as pb

FinishReason = Literal["stop", "length", "time_limit"]

FINISH: Mapping[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
}


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int  # Of the prompt's text,
    virtual_tokens: int  # and the adapter's.
    completion_tokens: int
    cached_tokens: int = 0  # Of both parts of the prompt, what needed no computing.


@dataclass(frozen=True)
class TokenScore:
    """What the model thought of a token."""

    token_id: int
    logprob: float | None  # None: a prompt's first token, or a virtual one.
    rank: int  # 1: none was likelier. 0: not told.
    tops: list[tuple[int, float]]  # The likeliest and their log-probabilities, best first.
    virtual: bool = False


@dataclass(frozen=True)
class Failure:
    """Why one answer failed, where others of its call went on."""

    reason: str
    message: str


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None: it failed.
    usage: Usage
    seed: int
    adapter: str  # As `name@version`; empty: none.
    stop: str | int | None  # The stop string or token that ended it.
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]
    beam_score: float | None
    failure: Failure | None


@dataclass(frozen=True)
class Piece:
    """A part of a completion; the last has a finish reason, or a failure, and the usage."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: Usage | None
    index: int  # Which completion it is a part of.
    seed: int  # In the first piece of each; 0 elsewhere.
    adapter: str  # In the first piece of each; empty elsewhere.
    stop: str | int | None
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]
    beam_score: float | None
    failure: Failure | None


@dataclass(frozen=True)
class TextScore:
    """How likely a text is."""

    logprob: float  # The sum of its tokens'.
    greedy: bool  # Whether each of its tokens was the likeliest.
    tokens: list[TokenScore]


@dataclass(frozen=True)
class Scores:
    """One for each continuation; without any, one for the prompt."""

    texts: list[TextScore]
    usage: Usage
    adapter: str


def completions_of(response: pb.GenerateResponse) -> list[Completion]:
    return [
        Completion(
            one.text,
            list(one.token_ids),
            FINISH.get(one.finish_reason),
            _usage(one.usage),
            one.seed,
            one.adapter,
            **_rest(one),
        )
        for one in response.completions
    ]


def first_of(response: pb.GenerateResponse) -> Completion:
    """The first, which must not have failed."""
    first = completions_of(response)[0]
    if first.failure is not None:
        raise CallError("UNKNOWN", first.failure.message, first.failure.reason)
    return first


def piece_of(response: pb.GenerateStreamResponse) -> Piece:
    return Piece(
        response.text,
        list(response.token_ids),
        FINISH.get(response.finish_reason),
        _usage(response.usage) if response.HasField("usage") else None,
        response.index,
        response.seed,
        response.adapter,
        **_rest(response),
    )


def scores_of(response: pb.ScoreResponse) -> Scores:
    texts = [TextScore(one.logprob, one.greedy, _scores(one.tokens)) for one in response.scores]
    return Scores(texts, _usage(response.usage), response.adapter)


def _rest(one: pb.Completion | pb.GenerateStreamResponse) -> dict[str, Any]:
    """What a completion and its last piece have alike."""
    stop = one.WhichOneof("stop")
    failure = Failure(one.failure.reason, one.failure.message) if one.HasField("failure") else None
    return {
        "stop": None if stop is None else getattr(one, stop),
        "scores": _scores(one.scores),
        "prompt_scores": _scores(one.prompt_scores),
        "beam_score": one.beam_score if one.HasField("beam_score") else None,
        "failure": failure,
    }


def _scores(scores: Iterable[pb.TokenScore]) -> list[TokenScore]:
    return [
        TokenScore(
            one.token_id,
            one.logprob if one.HasField("logprob") else None,
            one.rank,
            [(top.token_id, top.logprob) for top in one.top_tokens],
            one.virtual,
        )
        for one in scores
    ]


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.virtual_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )
