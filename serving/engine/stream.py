"""Stream: one request's answers, piece by piece, on the event loop of who asked.

What the engine made is turned into text as it comes, so a stop string ends its answer at once,
however slowly the pieces are taken. What comes between two looks becomes one piece for each answer,
so a slow reader gets fewer, larger ones, and so does everyone where many streams are busy at once.
Knows no link and no threads.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpt.errors import AdapterError, PreambleError, RequestError
from gpt.generation.stop_strings import CertainText
from gpt.tokenizers.tokenizer import Tokenizer
from serving.engine.beam_search import Found
from serving.messages import End, Made, Phases, Scored
from serving.request import (
    Answer,
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    Finish,
    OverloadedError,
    Piece,
    Request,
    UnavailableError,
)

# How an answer can end well.
FINISHES: Mapping[End | None, Finish] = {"stop": "stop", "length": "length", "scored": "scored"}
PASSED = "the deadline passed before the answer was done"


@dataclass(frozen=True, slots=True)
class Spent:
    """Where an answer's time went, once it had its first token; or its end, if it wants none."""

    index: int
    phases: Phases
    cached_tokens: int
    first_at: float  # When that token came, on the monotonic clock,
    ended_at: float  # and when all ended, or what is known just now.
    finish: Finish | None  # None: it has not ended, or not well.

    @property
    def decode_s(self) -> float:
        return self.ended_at - self.first_at


@dataclass
class _State:
    """Where an answer stands: what was not yet taken of it, and whether more will come."""

    text: CertainText
    token_ids: list[int] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    prompt_scores: list[Scored | None] = field(default_factory=list)
    words: str = ""
    cached_tokens: int = 0
    beam_score: float | None = None
    finish: Finish | None = None
    stop: str | int | None = None
    error: PreambleError | None = None
    over: bool = False
    begun: bool = False  # Whether a piece of it was given.
    # From its first token on; when that came, and how much of its prompt was there before.
    phases: Phases | None = None
    first_at: float = 0.0
    first_cached: int = 0
    ended_at: float | None = None

    def add(self, made: Made) -> None:
        if made.phases is not None:
            self.phases, self.first_cached = made.phases, made.cached_tokens
            self.first_at = time.monotonic() - made.phases.decode_s
        self.prompt_scores += made.prompt_scores
        self.cached_tokens += made.cached_tokens
        if isinstance(made, Found):
            self.beam_score = made.beam_score
        last = len(made.tokens) - 1
        for place, token in enumerate(made.tokens):
            self.token_ids.append(token)
            self.scores += made.scores[place : place + 1]
            # A token that stops is a sign to us, not a part of the text.
            if not (made.end == "stop" and place == last):
                self.words += self.text.push(token)
            if self.text.stopped:
                return self.end("stop", self.text.stop)
        if made.end in FINISHES:
            self.words += self.text.finish()
            if self.text.stopped:
                return self.end("stop", self.text.stop)
            self.end(FINISHES[made.end], made.tokens[-1] if made.end == "stop" else None)

    def end(self, finish: Finish, stop: str | int | None = None) -> None:
        self.finish, self.stop, self.over = finish, stop, True
        self.ended_at = time.monotonic()

    def piece(self, index: int) -> Piece:
        """All that was not yet taken."""
        piece = Piece(
            tuple(self.token_ids),
            self.words,
            self.finish,
            index=index,
            scores=tuple(self.scores),
            prompt_scores=tuple(self.prompt_scores),
            cached_tokens=self.cached_tokens,
            beam_score=self.beam_score,
            stop=self.stop,
            error=self.error,
        )
        self.token_ids, self.scores, self.prompt_scores = [], [], []
        self.words, self.cached_tokens = "", 0
        self.begun = True
        return piece


class Stream:
    """The pieces of one request. Close it; closing it early cancels what is left.

    What ends the whole request (its deadline, an engine that is gone) is raised, after the pieces
    that came before. So is the fault of an answer that is its request's only one; that of one of
    many is a piece with an `error`, and the others go on.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        drop: Callable[[Iterable[int]], None],
    ) -> None:
        """`drop` is told the indices of answers that nobody wants any more."""
        self.request = request
        self._drop = drop
        self._states = [
            _State(
                CertainText(
                    tokenizer,
                    answer.stop_strings,
                    answer.sampling.min_new_tokens,
                    included=answer.stop_in_text,
                )
            )
            for answer in request.answers
        ]
        self._fresh: dict[int, None] = {}  # Answers with something to take, in order.
        self._ripe = False  # Whether it may be taken already.
        self._given_s = float("-inf")  # When the last piece was taken, on the monotonic clock.
        self._pause: asyncio.TimerHandle | None = None
        self._came = asyncio.Event()
        self._error: PreambleError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._closed = False
        if request.time_limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(request.time_limit_s, self.cut))

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Piece:
        while not self._closed:
            if self._fresh and self._ripe:
                index = next(iter(self._fresh))
                del self._fresh[index]
                self._ripe, self._given_s = bool(self._fresh), time.monotonic()
                return self._states[index].piece(index)
            if self._error is not None:
                error = self._error
                self.close()
                raise error
            if all(state.over for state in self._states):
                self.close()
                break
            self._came.clear()
            await self._came.wait()
        raise StopAsyncIteration

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._abandon()
        self._ripen()

    @property
    def spent(self) -> list[Spent]:
        """Of each answer that has begun, where its time went until now."""
        now = time.monotonic()
        return [
            Spent(
                index,
                state.phases,
                state.first_cached,
                state.first_at,
                now if state.ended_at is None else state.ended_at,
                state.finish,
            )
            for index, state in enumerate(self._states)
            if state.phases is not None
        ]

    def expire_in(self, seconds: float) -> None:
        """End by then, if the engine has not."""
        passed = DeadlinePassedError(PASSED)
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, self.fail, passed))

    def cut(self) -> None:
        """End every answer well, with what there is of it: the caller's time for it is over."""
        if self._over:
            return
        left = [index for index, state in enumerate(self._states) if not state.over]
        for index in left:
            state = self._states[index]
            state.words += state.text.finish()
            state.end("time")
            self._fresh[index] = None
        self._drop(left)
        self._ripen()

    def take(self, index: int, made: Made, pause_s: float = 0.0) -> None:
        """What the engine made for an answer. An answer's first piece and its last come at once,
        others not before `pause_s` have passed since the one before.
        """
        state = self._states[index]
        if self._over or state.over:
            return
        state.add(made)
        if made.tokens or made.prompt_scores or state.over:
            self._fresh[index] = None
            self._ripen(0.0 if state.over or not state.begun else pause_s)
        if state.over and made.end is None:
            self._drop([index])  # By a stop string, of which the engine does not know.
        if state.over or made.end is None:
            return
        error = _error(made)
        if len(self._states) == 1 or isinstance(error, DeadlinePassedError | UnavailableError):
            return self.fail(error)
        state.error, state.over = error, True
        self._fresh[index] = None
        self._ripen()

    def fail(self, error: PreambleError) -> None:
        """End the request as a whole; what came before can still be taken."""
        if not self._over:
            self._error = error
            self._abandon()
            self._ripen()

    def _ripen(self, pause_s: float = 0.0) -> None:
        """Have it taken: now, or as soon as the pause is over."""
        if pause_s and self._pause is not None:
            return
        wait_s = pause_s and self._given_s + pause_s - time.monotonic()
        if wait_s <= 0:
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            self._ripe = True
            self._came.set()
        elif wait_s != float("inf"):
            self._pause = asyncio.get_running_loop().call_later(wait_s, self._ripen)

    @property
    def _over(self) -> bool:
        return self._closed or self._error is not None or all(state.over for state in self._states)

    def _abandon(self) -> None:
        left = [index for index, state in enumerate(self._states) if not state.over]
        for index in left:
            self._states[index].over = True
        if left:
            self._drop(left)


def _error(made: Made) -> PreambleError:
    match made.end:
        case "deadline":
            return DeadlinePassedError(PASSED)
        case "fault":
            return EngineFaultError(made.reason)
        case "stuck":
            return RequestError(made.reason, "guide")
        case "refused":
            return RequestError(made.reason)
        case "adapter":
            return AdapterError(made.reason)
        case "full":
            return OverloadedError(made.reason)
    return UnavailableError("the engine dropped this request; try again")


async def completions(stream: Stream) -> list[Completion]:
    """All answers, whole, by index. One that failed has its error, and what it had made."""
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    ended: PreambleError | None = None
    try:
        async for piece in stream:
            pieces[piece.index].append(piece)
    except PreambleError as error:
        ended = error
    finally:
        stream.close()
    return [
        completion(index, answer, pieces[index], ended)
        for index, answer in enumerate(stream.request.answers)
    ]


def failed(request: Request, error: PreambleError) -> list[Completion]:
    """The completions of a request that was refused."""
    answers = enumerate(request.answers)
    return [completion(index, answer, (), error) for index, answer in answers]


def completion(
    index: int, answer: Answer, pieces: Sequence[Piece], ended: PreambleError | None = None
) -> Completion:
    """An answer of its pieces. `ended`: what ended all of its request early."""
    finish = pieces[-1].finish if pieces else None
    error = (pieces[-1].error if pieces else None) or ended
    return Completion(
        index,
        tuple(token for piece in pieces for token in piece.token_ids),
        "".join(piece.text for piece in pieces),
        finish,
        prompt=answer.prompt,
        seed=answer.sampling.seed,
        adapter=answer.adapter,
        prompt_tokens=answer.prompt_tokens,
        virtual_tokens=answer.virtual_tokens,
        cached_tokens=sum(piece.cached_tokens for piece in pieces),
        scores=tuple(score for piece in pieces for score in piece.scores),
        prompt_scores=tuple(score for piece in pieces for score in piece.prompt_scores),
        beam_score=pieces[-1].beam_score if pieces else None,
        stop=pieces[-1].stop if pieces else None,
        error=None if finish else error,
    )
