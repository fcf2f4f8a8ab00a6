"""What passes between a surface, the admission and the engine: plain data.

An `Ask` is what a caller wants, in the caller's words; a `Request` is what the engine runs, checked
and all ids. Between them stands `serving.admission`, the same for every surface. Here are also the
ways in which a request can end badly. No torch, no gRPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpt.errors import PreambleError, RequestError
from gpt.sampling import Sampling

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Ask:
    """What a caller wants. None means: not said."""

    # A text, token ids, or the fields of the adapter's template.
    prompt: str | tuple[int, ...] | Mapping[str, str] | None
    adapter: str = ""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """What the engine runs."""

    prompt: tuple[int, ...]  # An id at or above the vocabulary is a row of the adapter's table.
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    adapter: str = ""  # As `name@version`; empty: none.
    digest: str = ""  # The adapter's, by which the engine knows its table.
    virtual_tokens: int = 0  # How many of the prompt's ids are rows.

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) - self.virtual_tokens


@dataclass(frozen=True)
class Token:
    """One token that the engine made."""

    id: int
    finish: Finish | None


@dataclass(frozen=True)
class Piece:
    """What a stream gives: the tokens since the last piece, and the text that is certain by now."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


class UnknownAdapterError(RequestError):
    """No adapter has that name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "adapter")


class OverloadedError(PreambleError):
    """The queue is full; later there will be room."""


class UnavailableError(PreambleError):
    """This server takes no requests now, or stopped before it could finish one."""


class DeadlinePassedError(PreambleError):
    """The caller's time was over before the answer was."""


class EngineFaultError(PreambleError):
    """A bug or a fault in the machine ended the request; the log has the cause."""
