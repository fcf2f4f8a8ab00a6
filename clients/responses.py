"""Client responses: converts gRPC messages to completions, stream pieces, scores and usage.

Both clients use this module. Enum values become strings, and unset optional fields become None.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clients.transport import CallError
from protos.preamble.v1 import generation_pb2 as pb

FinishReason = Literal["stop", "length", "time_limit"]

FINISH_REASONS: Mapping[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
}


@dataclass(frozen=True)
class Usage:
    """Token counts of a completion or a call."""

    prompt_tokens: int  # Text tokens of the prompt, without virtual tokens.
    virtual_tokens: int  # Virtual tokens of the adapter.
    completion_tokens: int
    cached_tokens: int = 0  # Prompt and virtual tokens found in the prefix cache.


@dataclass(frozen=True)
class TokenScore:
    """Log-probability, rank and alternatives of a token."""

    token_id: int
    logprob: float | None  # None for a prompt's first token and for virtual tokens.
    rank: int  # 1: the most likely token. 0: unknown.
    tops: list[tuple[int, float]]  # Most likely tokens: (id, logprob), best first.
    virtual: bool = False  # Whether the token is a virtual token of the adapter.


@dataclass(frozen=True)
class Failure:
    """The error of one completion; other completions of the call may have succeeded."""

    reason: str
    message: str


@dataclass(frozen=True)
class Completion:
    """One finished completion."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None: the completion failed.
    usage: Usage
    seed: int
    adapter: str  # `name@version`; empty for the base model.
    stop: str | int | None  # The stop string or stop token that ended the text, if any.
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]
    beam_score: float | None
    failure: Failure | None


@dataclass(frozen=True)
class Piece:
    """A part of a streamed completion.

    The last piece of a completion has `usage`, and `finish_reason` or `failure`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: Usage | None
    index: int  # Index of the completion that this piece belongs to.
    seed: int  # Set in a completion's first piece, else 0.
    adapter: str  # Set in a completion's first piece, else empty.
    stop: str | int | None
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]
    beam_score: float | None
    failure: Failure | None
    # The server that continues the completion, in its first piece after the loss of another server.
    resumed_at: str = ""


@dataclass(frozen=True)
class TextScore:
    """The score of a continuation or a prompt."""

    logprob: float  # Sum of the log-probabilities of the text's tokens.
    greedy: bool  # Whether each token was the most likely token at its position.
    tokens: list[TokenScore]


@dataclass(frozen=True)
class Scores:
    """The scores of all continuations, or of the prompt if there are no continuations."""

    texts: list[TextScore]
    usage: Usage
    adapter: str


def read_completions(response: pb.GenerateResponse) -> list[Completion]:
    return [
        Completion(
            completion.text,
            list(completion.token_ids),
            FINISH_REASONS.get(completion.finish_reason),
            _read_usage(completion.usage),
            completion.seed,
            completion.adapter,
            **_read_shared_fields(completion),
        )
        for completion in response.completions
    ]


def read_first_completion(response: pb.GenerateResponse) -> Completion:
    """Return the first completion; raise a CallError if it failed."""
    completion = read_completions(response)[0]
    if completion.failure is not None:
        raise CallError("UNKNOWN", completion.failure.message, completion.failure.reason)
    return completion


def read_piece(response: pb.GenerateStreamResponse, resumed_at: str = "") -> Piece:
    return Piece(
        response.text,
        list(response.token_ids),
        FINISH_REASONS.get(response.finish_reason),
        _read_usage(response.usage) if response.HasField("usage") else None,
        response.index,
        response.seed,
        response.adapter,
        **_read_shared_fields(response),
        resumed_at=resumed_at,
    )


def read_scores(response: pb.ScoreResponse) -> Scores:
    texts = [
        TextScore(score.logprob, score.greedy, _read_token_scores(score.tokens))
        for score in response.scores
    ]
    return Scores(texts, _read_usage(response.usage), response.adapter)


def _read_shared_fields(message: pb.Completion | pb.GenerateStreamResponse) -> dict[str, Any]:
    """Read the fields that completions and pieces share."""
    stop = message.WhichOneof("stop")
    failure = (
        Failure(message.failure.reason, message.failure.message)
        if message.HasField("failure")
        else None
    )
    return {
        "stop": None if stop is None else getattr(message, stop),
        "scores": _read_token_scores(message.scores),
        "prompt_scores": _read_token_scores(message.prompt_scores),
        "beam_score": message.beam_score if message.HasField("beam_score") else None,
        "failure": failure,
    }


def _read_token_scores(scores: Iterable[pb.TokenScore]) -> list[TokenScore]:
    return [
        TokenScore(
            score.token_id,
            score.logprob if score.HasField("logprob") else None,
            score.rank,
            [(top.token_id, top.logprob) for top in score.top_tokens],
            score.virtual,
        )
        for score in scores
    ]


def _read_usage(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.virtual_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )
