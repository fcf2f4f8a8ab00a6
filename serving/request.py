"""Requests: Ask (from the caller), Request (for the engine), Completion, Piece and errors.

An `Ask` has the fields that the caller set. A `Request` has validated token ids, with one
`AnswerSpec` for each completion; the engine runs it. `serving.admission.admission` converts an
`Ask` to a `Request`, in the same way for every protocol. The errors that end a request are also
defined here. The module imports neither torch nor gRPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpt.errors import PreambleError, RequestError
from gpt.sampling_params import SamplingParams, uniform_draw
from serving.messages import AdapterRef, Guide, ServiceClass, TokenScore

# "scored": only prompt scores were requested, and no new token. "time": `time_limit_s` of the
# request was reached.
FinishReason = Literal["stop", "length", "scored", "time"]
# When beam search ends. True: as soon as it has `beam_width` hypotheses. False: when a heuristic
# finds no likely improvement. "never": when no live beam can improve the hypotheses.
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class ResumedOutput:
    """The output so far of an answer that another server has begun."""

    seed: int
    token_ids: tuple[int, ...]
    base_fingerprint: str  # Of the base model that generated the tokens.


@dataclass(frozen=True)
class Ask:
    """The fields that a caller set for a generation. None: the caller did not set the field."""

    # A text, token ids, or the fields of the adapters' templates.
    prompt: str | tuple[int, ...] | Mapping[str, str] | None
    # The prompt is completed with each of these adapters. Each pair of prompt and adapter is
    # called a task. The name "" means the base model; an empty tuple means the same as ("",).
    adapters: tuple[str, ...] = ()
    # Whether control tokens in the texts (prompt, fields, continuations) become their ids. None: if
    # the prompt is a text and `parse_by_default` is set.
    parse_special_tokens: bool | None = None
    parse_by_default: bool = False  # Set by protocols whose clients send rendered chats as text.
    add_special_tokens: bool = True  # Add BOS and EOS to a text prompt as the tokenizer does.
    # Texts to score after the prompt. Each text is an answer; `answers` then has no effect.
    continuations: tuple[str, ...] = ()
    answers: int = 1  # Number of answers per task; each has its own seed.
    max_new_tokens: int | None = None
    # Reduce a max_new_tokens that does not fit after the prompt, instead of refusing the request.
    fit_new_tokens: bool = False
    min_new_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: int = 0
    # (start, factor): after n > start new tokens, the logit x of each stop token becomes x + g |x|,
    # with g = factor ** (n - start) - 1.
    length_decay: tuple[int, float] | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # Number of alternatives to report with each token.
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    ignore_ends: bool = False  # Do not stop at the model's end-of-text tokens.
    stop_in_text: bool = False  # Include the matched stop string in the answer's text.
    keep_special_tokens: bool = False  # Include the texts of control tokens in the answer's text.
    # Special tokens that are part of the answer's text, such as a marker of tool calls.
    text_token_ids: tuple[int, ...] = ()
    truncate_tokens: int | None = None  # Keep at most this number of tokens, from the prompt's end.
    time_limit_s: float | None = None  # After this time the answer ends without an error.
    beam_width: int = 1  # 1: no beam search; more: the answers are the best beams, best first.
    length_penalty: float = 1.0  # A beam's score is its log-probability / length ** this value.
    early_stopping: EarlyStopping = False
    service: ServiceClass = "latency"
    priority: int = 0
    tenant: str = ""
    # Only requests of the tenant with an equal salt share cached prefixes.
    cache_salt: str = ""
    resume: ResumedOutput | None = None  # Continue this answer.


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of the beam search of each task; the best `answers` beams are returned."""

    width: int
    answers: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class AdapterInfo:
    """The method by which an adapter was made, its largest rank, and its size in fp32."""

    method: str = ""  # Empty: unknown.
    rank: int = 0  # 0: the adapter has no low-rank products.
    nbytes: int = 0


NO_INFO = AdapterInfo()


@dataclass(frozen=True)
class AnswerSpec:
    """What the engine needs to generate one completion of a request."""

    prompt: tuple[int, ...]  # A virtual token has the id vocabulary size + adapter row.
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    stop_in_text: bool = False
    keep_special_tokens: bool = False
    text_token_ids: tuple[int, ...] = ()  # Special tokens that are part of the text.
    adapter: str = ""  # As `name@version`; empty: none.
    is_private: bool = False  # Whether other tenants must not see the adapter's name.
    adapter_ref: AdapterRef | None = None
    adapter_info: AdapterInfo = NO_INFO
    virtual_tokens: int = 0  # Number of virtual tokens in `prompt`.
    # Number of tokens at the end of the prompt that are a continuation; only these are scored.
    # 0: no continuation.
    continuation_tokens: int = 0
    # The position of the first token on which the adapter's weights act.
    adapted_from: int = 0
    # The tokens that another server has generated. The engine continues behind them.
    resumed_tokens: tuple[int, ...] = ()

    @property
    def new_tokens_max(self) -> int:
        """The largest number of tokens that this server generates."""
        return self.sampling.max_new_tokens - len(self.resumed_tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) - self.virtual_tokens


@dataclass(frozen=True)
class Request:
    """A validated request. In `answers`, the answers of one task are adjacent.

    An answer is identified by its index in `answers`.
    """

    answers: tuple[AnswerSpec, ...]
    guide: Guide | None = None
    beams: BeamSearchParams | None = None
    service: ServiceClass = "latency"
    priority: int = 0
    tenant: str = ""
    time_limit_s: float | None = None
    cache_salt: str = ""

    @property
    def sequences_max(self) -> int:
        """Number of sequences that the request may have at once."""
        if self.beams is None:
            return len(self.answers)
        return len(self.answers) // self.beams.answers * self.beams.width


@dataclass(frozen=True)
class Piece:
    """New output of a stream: tokens and text of one answer.

    `text` does not contain the last characters while they may be the beginning of a stop string.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None  # None: the answer continues, or it failed (`error`).
    index: int = 0
    scores: tuple[TokenScore, ...] = ()  # One per token, if logprobs were requested.
    # Scores of the prompt's (or the continuation's) tokens, in order. None: the token has no score.
    prompt_scores: tuple[TokenScore | None, ...] = ()
    # Prompt tokens from the prefix cache. One piece of an answer reports them; the others have 0.
    cached_tokens: int = 0
    beam_score: float | None = None  # Beam search only, with the last piece.
    stop: str | int | None = None  # In the last piece: the stop string or token that was matched.
    # Set on the last piece of an answer that failed while other answers of the request continue.
    error: PreambleError | None = None


@dataclass(frozen=True)
class Completion:
    """One complete answer."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None  # None: the answer failed, and `error` is set.
    seed: int
    prompt: tuple[int, ...] = ()
    adapter: str = ""
    prompt_tokens: int = 0
    virtual_tokens: int = 0
    resumed_tokens: int = 0  # Tokens before `token_ids`, which another server has generated.
    cached_tokens: int = 0
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore | None, ...] = ()
    beam_score: float | None = None  # Beam search only.
    stop: str | int | None = None  # The stop string or stop token that ended the answer.
    error: PreambleError | None = None


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of an answer: the request's seed for answer 0, else a derived seed.

    Derived seeds have 53 bits, so that every protocol can report them (JSON numbers are doubles).
    Answer 0 uses the random numbers `uniform_draw(seed, position)`. Derived seeds are drawn with
    the bitwise complement of `seed`, so that they are independent of these numbers.
    """
    return seed if index == 0 else int(uniform_draw(~seed % 2**64, index) * 2**53)


class UnknownAdapterError(RequestError):
    """No adapter has the requested name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "adapter")


class RefusedError(PreambleError):
    """A call is refused; `reason` is a name in `serving.service.error_reasons.REASONS`."""

    def __init__(
        self, reason: str, message: str, field: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.retry_s = retry_s


class OverloadedError(PreambleError):
    """The queue is full; the caller may try again later."""


class UnavailableError(PreambleError):
    """This server accepts no requests now, or stopped before the request was finished."""

    def __init__(self, message: str, reason: str = "ENGINE_LOST") -> None:
        super().__init__(message)
        self.reason = reason


class DeadlinePassedError(PreambleError):
    """The deadline passed before the answer was finished."""


class EngineFaultError(PreambleError):
    """A bug or a hardware fault ended the request; the server log contains the cause."""
