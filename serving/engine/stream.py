"""Stream: the text of a request's answers in pieces, read on the caller's event loop.

Output is detokenized as it arrives, so a stop string ends its answer at once, even if the caller
reads slowly. Text that may belong to a stop string is held back. Output that arrives between two
reads becomes one piece per answer: slow readers, and all readers when many streams have output, get
fewer and larger pieces. The module is independent of transports and threads.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpt.errors import AdapterError, PreambleError, RequestError
from gpt.generation.stop_strings import StopStringDetokenizer
from gpt.tokenizers.tokenizer import Tokenizer, piece_decoder
from serving.engine.beam_search import BeamResult
from serving.messages import EndReason, Phases, SequenceOutput, TokenScore
from serving.request import (
    AnswerSpec,
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    FinishReason,
    OverloadedError,
    Piece,
    Request,
    UnavailableError,
)

# The finish reason of each successful end of a sequence.
FINISH_BY_END: Mapping[EndReason | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "scored": "scored",
}
DEADLINE_MESSAGE = "the deadline passed before the answer was finished"


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """Timing of an answer that has its first token, or whose prompt was only scored."""

    index: int
    phases: Phases
    cached_tokens: int
    first_token_at: float  # On the monotonic clock.
    ended_at: float  # On the monotonic clock; the present time if the answer has not ended.
    finish: FinishReason | None  # None: the answer has not ended, or it failed.

    @property
    def decode_s(self) -> float:
        return self.ended_at - self.first_token_at


@dataclass
class _AnswerState:
    """State of an answer: its unread output, and how it ended."""

    detokenizer: StopStringDetokenizer
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    new_text: str = ""
    cached_tokens: int = 0
    beam_score: float | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: PreambleError | None = None
    finished: bool = False
    started: bool = False  # Whether a piece was read.
    # The next three fields are set at the first output with phases. `first_cached_tokens` is the
    # number of prompt tokens from the prefix cache. Unlike `cached_tokens`, it is not reset when a
    # piece is read.
    phases: Phases | None = None
    first_token_at: float = 0.0
    first_cached_tokens: int = 0
    ended_at: float | None = None

    def add_output(self, output: SequenceOutput) -> None:
        if output.phases is not None:
            self.phases = output.phases
            self.first_cached_tokens = output.cached_tokens
            self.first_token_at = time.monotonic() - output.phases.decode_s
        self.prompt_scores += output.prompt_scores
        self.cached_tokens += output.cached_tokens
        if isinstance(output, BeamResult):
            self.beam_score = output.beam_score
        last_index = len(output.tokens) - 1
        for index, token in enumerate(output.tokens):
            self.token_ids.append(token)
            self.scores += output.scores[index : index + 1]
            # A stop token is not part of the text.
            if not (output.end == "stop" and index == last_index):
                self.new_text += self.detokenizer.push(token)
            if self.detokenizer.is_stopped:
                return self.mark_finished("stop", self.detokenizer.matched_stop)
        if output.end in FINISH_BY_END:
            self.new_text += self.detokenizer.finish()
            if self.detokenizer.is_stopped:
                return self.mark_finished("stop", self.detokenizer.matched_stop)
            self.mark_finished(
                FINISH_BY_END[output.end], output.tokens[-1] if output.end == "stop" else None
            )

    def mark_finished(self, finish: FinishReason, stop: str | int | None = None) -> None:
        self.finish = finish
        self.stop = stop
        self.finished = True
        self.ended_at = time.monotonic()

    def take_piece(self, index: int) -> Piece:
        """Remove all unread output and return it as one piece."""
        piece = Piece(
            tuple(self.token_ids),
            self.new_text,
            self.finish,
            index=index,
            scores=tuple(self.scores),
            prompt_scores=tuple(self.prompt_scores),
            cached_tokens=self.cached_tokens,
            beam_score=self.beam_score,
            stop=self.stop,
            error=self.error,
        )
        self.token_ids = []
        self.scores = []
        self.prompt_scores = []
        self.new_text = ""
        self.cached_tokens = 0
        self.started = True
        return piece


def answer_detokenizer(tokenizer: Tokenizer, answer: AnswerSpec) -> StopStringDetokenizer:
    """Return the detokenizer of an answer, without any token."""
    decoder = piece_decoder(
        tokenizer,
        keep_special_tokens=answer.keep_special_tokens,
        text_token_ids=answer.text_token_ids,
    )
    return StopStringDetokenizer(
        decoder,
        answer.stop_strings,
        answer.sampling.min_new_tokens,
        include_stop=answer.stop_in_text,
    )


class Stream:
    """The pieces of one request. The caller must close it; this cancels unfinished answers.

    An error that ends the whole request (its deadline, a lost engine, the failure of its only
    answer) is raised after the earlier pieces. If one of several answers fails, its last piece has
    an `error` and the other answers continue.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        cancel: Callable[[Iterable[int]], None],
    ) -> None:
        """`cancel` is called with the indices of answers that are no longer needed."""
        self.request = request
        self._cancel = cancel
        self._states = [
            _AnswerState(answer_detokenizer(tokenizer, answer)) for answer in request.answers
        ]
        for state, answer in zip(self._states, request.answers, strict=True):
            for token in answer.resumed_tokens:  # The client has their text.
                state.detokenizer.push(token)
        self._ready_indices: dict[int, None] = {}  # Answers with unread output, in order.
        # Whether unread output may be read now; False during the pause of `push_output`.
        self._can_deliver = False
        self._delivered_at = float("-inf")  # When the last piece was read, on the monotonic clock.
        self._pause_timer: asyncio.TimerHandle | None = None
        self._wakeup = asyncio.Event()
        self._error: PreambleError | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._closed = False
        if request.time_limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(request.time_limit_s, self.finish_at_time_limit))

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Piece:
        while not self._closed:
            if self._ready_indices and self._can_deliver:
                index = next(iter(self._ready_indices))
                del self._ready_indices[index]
                self._can_deliver = bool(self._ready_indices)
                self._delivered_at = time.monotonic()
                return self._states[index].take_piece(index)
            if self._error is not None:
                error = self._error
                self.close()
                raise error
            if all(state.finished for state in self._states):
                self.close()
                break
            self._wakeup.clear()
            await self._wakeup.wait()
        raise StopAsyncIteration

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._cancel_unfinished()
        self._schedule_delivery()

    @property
    def timings(self) -> list[AnswerTiming]:
        """The timing of each answer that has its first token, or whose prompt was only scored."""
        now = time.monotonic()
        return [
            AnswerTiming(
                index,
                state.phases,
                state.first_cached_tokens,
                state.first_token_at,
                now if state.ended_at is None else state.ended_at,
                state.finish,
            )
            for index, state in enumerate(self._states)
            if state.phases is not None
        ]

    def expire_in(self, seconds: float) -> None:
        """Fail the request with a deadline error after `seconds`, unless it has finished."""
        error = DeadlinePassedError(DEADLINE_MESSAGE)
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, self.fail, error))

    def finish_at_time_limit(self) -> None:
        """End all unfinished answers with their present text and the finish reason "time"."""
        if self._is_finished:
            return
        unfinished = [index for index, state in enumerate(self._states) if not state.finished]
        for index in unfinished:
            state = self._states[index]
            state.new_text += state.detokenizer.finish()
            state.mark_finished("time")
            self._ready_indices[index] = None
        self._cancel(unfinished)
        self._schedule_delivery()

    def push_output(self, index: int, output: SequenceOutput, pause_s: float = 0.0) -> None:
        """Add output of the engine to an answer.

        The first and the last piece of an answer are delivered at once, others at least `pause_s`
        seconds after the previous piece.
        """
        state = self._states[index]
        if self._is_finished or state.finished:
            return
        state.add_output(output)
        if output.tokens or output.prompt_scores or state.finished:
            self._ready_indices[index] = None
            self._schedule_delivery(0.0 if state.finished or not state.started else pause_s)
        if state.finished and output.end is None:
            # A stop string ended the answer. The engine loop does not know stop strings, and would
            # continue.
            self._cancel([index])
        if state.finished or output.end is None:
            return
        error = _output_error(output)
        if len(self._states) == 1 or isinstance(error, DeadlinePassedError | UnavailableError):
            return self.fail(error)
        state.error = error
        state.finished = True
        self._ready_indices[index] = None
        self._schedule_delivery()

    def fail(self, error: PreambleError) -> None:
        """End the whole request with an error; unread output can still be read before it."""
        if not self._is_finished:
            self._error = error
            self._cancel_unfinished()
            self._schedule_delivery()

    def _schedule_delivery(self, pause_s: float = 0.0) -> None:
        """Wake the reader now, or `pause_s` seconds after the previous piece.

        If `pause_s` is infinite, only a later call wakes the reader.
        """
        if pause_s and self._pause_timer is not None:
            return
        wait_s = self._delivered_at + pause_s - time.monotonic() if pause_s else 0.0
        if wait_s <= 0:
            if self._pause_timer is not None:
                self._pause_timer.cancel()
                self._pause_timer = None
            self._can_deliver = True
            self._wakeup.set()
        elif wait_s != float("inf"):
            self._pause_timer = asyncio.get_running_loop().call_later(
                wait_s, self._schedule_delivery
            )

    @property
    def _is_finished(self) -> bool:
        return (
            self._closed or self._error is not None or all(state.finished for state in self._states)
        )

    def _cancel_unfinished(self) -> None:
        unfinished = [index for index, state in enumerate(self._states) if not state.finished]
        for index in unfinished:
            self._states[index].finished = True
        if unfinished:
            self._cancel(unfinished)


def _output_error(output: SequenceOutput) -> PreambleError:
    match output.end:
        case "deadline":
            return DeadlinePassedError(DEADLINE_MESSAGE)
        case "fault":
            return EngineFaultError(output.reason)
        case "stuck":
            return RequestError(output.reason, "guide")
        case "refused":
            return RequestError(output.reason)
        case "adapter":
            return AdapterError(output.reason)
        case "full":
            return OverloadedError(output.reason)
    return UnavailableError("the engine dropped this request; try again")


async def collect_completions(stream: Stream) -> list[Completion]:
    """Read a stream to its end, and return all answers in order of index.

    A failed answer has an error, and the text that was received before the error.
    """
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    stream_error: PreambleError | None = None
    try:
        async for piece in stream:
            pieces[piece.index].append(piece)
    except PreambleError as error:
        stream_error = error
    finally:
        stream.close()
    return [
        build_completion(index, answer, pieces[index], stream_error)
        for index, answer in enumerate(stream.request.answers)
    ]


def failed_completions(request: Request, error: PreambleError) -> list[Completion]:
    """Return completions with this error, one for each answer of a request that was refused."""
    answers = enumerate(request.answers)
    return [build_completion(index, answer, (), error) for index, answer in answers]


def build_completion(
    index: int,
    answer: AnswerSpec,
    pieces: Sequence[Piece],
    stream_error: PreambleError | None = None,
) -> Completion:
    """Join the pieces of an answer. `stream_error` is the error that ended the whole request."""
    finish = pieces[-1].finish if pieces else None
    error = (pieces[-1].error if pieces else None) or stream_error
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
        resumed_tokens=len(answer.resumed_tokens),
        cached_tokens=sum(piece.cached_tokens for piece in pieces),
        scores=tuple(score for piece in pieces for score in piece.scores),
        prompt_scores=tuple(score for piece in pieces for score in piece.prompt_scores),
        beam_score=pieces[-1].beam_score if pieces else None,
        stop=pieces[-1].stop if pieces else None,
        error=None if finish else error,
    )
