"""What passes between a surface, the admission and the engine: plain data.

An `Ask` is what a caller wants, in the caller's words; a `Request` is what the engine runs, checked
and all ids: one `Answer` for each completion. Between them stands `serving.admission.admission`,
the same for every surface. Here are also the ways in which a request can end badly. No torch, no
gRPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpt.errors import PreambleError, RequestError
from gpt.sampling_params import Sampling, uniform
from serving.messages import Guide, Rows, Scored, ServiceClass

# "scored": no token was asked for, only what the prompt's own are worth. "time": the caller's own
# limit, `time_limit_s`, came first.
Finish = Literal["stop", "length", "scored", "time"]
# Whether a beam search ends as soon as it has its hypotheses; "never": not before none can improve.
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Ask:
    """What a caller wants. None means: not said."""

    # A text, token ids, or the fields of the adapters' templates.
    prompt: str | tuple[int, ...] | Mapping[str, str] | None
    # Many tasks on one prompt: each is answered by itself. "": the model alone. None: that.
    adapters: tuple[str, ...] = ()
    # Texts behind the prompt, to be scored: an answer for each, in place of `answers`.
    continuations: tuple[str, ...] = ()
    answers: int = 1  # To each task; they differ by their seeds.
    max_new_tokens: int | None = None
    fit_new_tokens: bool = False  # Whether that is cut to the room there is, instead of refused.
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
    # So many new tokens, after which the stop tokens' logits grow by that factor with each more.
    length_decay: tuple[int, float] | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # How many alternatives are told with each token.
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    ignore_ends: bool = False  # Whether the tokens that end the model's texts are like any others.
    stop_in_text: bool = False  # Whether the stop string that ended an answer is part of its text.
    truncate_tokens: int | None = None  # Keep so many of a text's or of given ids, the last ones.
    time_limit_s: float | None = None  # Then an answer ends well, with what there is of it.
    beam_width: int = 1  # 1: no beams. Else the best of them are the answers, best first.
    length_penalty: float = 1.0  # A beam's score is its log-probability / length ** this.
    early_stopping: EarlyStopping = False
    service: ServiceClass = "latency"
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class BeamRule:
    """How each task's beams are searched, and how many are answers."""

    width: int
    answers: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class Answer:
    """One completion that a request wants."""

    prompt: tuple[int, ...]  # An id at or above the vocabulary is a row of the adapter's table.
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    stop_in_text: bool = False
    adapter: str = ""  # As `name@version`; empty: none.
    private: bool = False  # Whether that is its tenant's alone, whose name nobody else may learn.
    rows: Rows | None = None  # The adapter's.
    virtual_tokens: int = 0  # How many of the prompt's ids are rows.
    # How many of them, the last ones, are a continuation's: then only these are scored.
    continued: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) - self.virtual_tokens


@dataclass(frozen=True)
class Request:
    """What the engine runs. An answer's place is its index: all of the first task come first."""

    answers: tuple[Answer, ...]
    guide: Guide | None = None
    beams: BeamRule | None = None
    service: ServiceClass = "latency"
    priority: int = 0
    tenant: str = ""
    time_limit_s: float | None = None

    @property
    def places(self) -> int:
        """How many sequences it may have at once."""
        if self.beams is None:
            return len(self.answers)
        return len(self.answers) // self.beams.answers * self.beams.width


@dataclass(frozen=True)
class Piece:
    """What a stream gives: tokens of one answer, and the text of it that is certain by now."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None
    index: int = 0
    scores: tuple[Scored, ...] = ()  # One for each token, if they were asked for.
    # Of the prompt's tokens from the first on, or of its continuation's; None where one has none.
    prompt_scores: tuple[Scored | None, ...] = ()
    cached_tokens: int = 0  # Of the prompt; told once, with the first token.
    beam_score: float | None = None  # With the last piece of an answer that beams found.
    stop: str | int | None = None  # With the last piece: the stop string or token that ended it.
    # Why this answer ends, where another of its request goes on. It is the answer's last piece.
    error: PreambleError | None = None


@dataclass(frozen=True)
class Completion:
    """One answer, whole."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None  # None: it failed, and `error` says why.
    seed: int
    prompt: tuple[int, ...] = ()
    adapter: str = ""
    prompt_tokens: int = 0
    virtual_tokens: int = 0
    cached_tokens: int = 0
    scores: tuple[Scored, ...] = ()
    prompt_scores: tuple[Scored | None, ...] = ()
    beam_score: float | None = None  # What it is worth among the beams.
    stop: str | int | None = None  # What ended it, if it is a stop string or a stop token.
    error: PreambleError | None = None


def seed_of(seed: int, answer: int) -> int:
    """The first answer has the request's own seed; answer i the i-th number that follows from it.

    The numbers are 53 bits wide, so that any surface can say them back, and are taken from the
    seed's complement, so that they are none of those that the first answer's draws use.
    """
    return seed if answer == 0 else int(uniform(~seed % 2**64, answer) * 2**53)


class UnknownAdapterError(RequestError):
    """No adapter has that name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "adapter")


class RefusedError(PreambleError):
    """A surface refuses a call, for a reason of its own (serving/service/error_reasons.py)."""

    def __init__(
        self, reason: str, message: str, field: str | None = None, retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.field, self.retry_s = reason, field, retry_s


class OverloadedError(PreambleError):
    """The queue is full; later there will be room."""


class UnavailableError(PreambleError):
    """This server takes no requests now, or stopped before it could finish one."""

    def __init__(self, message: str, reason: str = "ENGINE_LOST") -> None:
        super().__init__(message)
        self.reason = reason


class DeadlinePassedError(PreambleError):
    """The caller's time was over before the answer was."""


class EngineFaultError(PreambleError):
    """A bug or a fault in the machine ended the request; the log has the cause."""
