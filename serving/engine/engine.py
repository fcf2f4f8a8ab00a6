"""Engine: requests in, streams of pieces out, over a link to whatever runs the model.

What is accepted is bounded, and ends exactly once: with a finish, or with an error that says why.
When the ranks are lost, what had told nobody a token waits for new ones. Knows no wire, no model
and no policy: whose turn it is decides the planner behind the link.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from gpt.errors import PreambleError, RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from serving.config import ServerConfig
from serving.engine.job import Job, News, Wanted, gathered, waits
from serving.engine.stream import PASSED, Stream, completions, failed
from serving.engine.transport import Link
from serving.messages import Cancel, Dump, Load, Made, Phases, Ready, Submission, Update
from serving.request import (
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
)
from serving.worker.flight_recorder import crash_path

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.01
# A message costs a front end about 100 us, whatever is in it. So the more streams a step has news
# for, the longer each lets its tokens gather: messages take this part of a core at most.
MESSAGE_S = 100e-6
MESSAGES_SHARE = 0.4
# Of an answer that is wanted whole, tokens may wait so long for each other: to be woken for each
# would cost who asks, and a model in the same process, a tenth of a millisecond.
WHOLE_S = 0.2
LOSSES_MAX = 1  # As often may a request's ranks be lost before it is taken for the cause.
STOPPED = "the engine stopped before the answer was done; try again"


class Engine:
    """Runs requests over `link`, and is its receiver."""

    def __init__(self, link: Link, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._link, self._tokenizer, self._config = link, tokenizer, config
        self._lock = threading.Lock()  # Guards all below; no one waits long for it.
        self._sequences: dict[int, Wanted] = {}  # By number: what the planner has.
        self._kept: list[Job] = []  # What waits for new ranks.
        self._searching: set[Job] = set()  # What has beams.
        self._unwanted: list[int] = []  # Numbers to cancel.
        self._later: list[News] = []  # What can wait,
        self._given_s = 0.0  # since when.
        self._number = 0
        self._closed = False
        self._up = False
        self._known = threading.Event()  # It came up, or never will.
        self._patience: threading.Timer | None = None
        self.reason = ""  # Why it is not up.
        self.facts: Ready | None = None  # What it said of itself when it last came up.
        self.load = Load()
        self.restarts = 0
        # Called from the link's thread: when it comes up or goes down, and after each step.
        self.on_change: Callable[[], object] = lambda: None
        self.on_step: Callable[[float], None] = lambda seconds: None

    def start(self) -> None:
        self._link.start(self)

    def wait(self) -> Ready:
        """Until the model is loaded and answers; raises why it never will."""
        self._known.wait()
        if self._link.refusal is not None:
            raise self._link.refusal
        if self.facts is None:
            raise UnavailableError(self.reason)
        return self.facts

    @property
    def up(self) -> bool:
        return self._up

    @property
    def gone(self) -> bool:
        """It is not up, and will not be."""
        return self._link.refusal is not None

    @property
    def accepted(self) -> int:
        """Sequences that were accepted and have not ended."""
        with self._lock:
            return self._accepted()

    @property
    def waiting(self) -> int:
        return max(0, self.accepted - self.load.running)

    def submit(
        self, request: Request, deadline: float | None = None, *, whole: bool = False
    ) -> Stream:
        """Accept a request, or refuse it at once. `deadline` is on the monotonic clock.

        `whole`: nothing is passed on before the end, so that a loss of the ranks need not be told.
        """
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlinePassedError(PASSED)
        job = Job(request, deadline, whole, asyncio.get_running_loop())
        job.stream = Stream(request, self._tokenizer, lambda indices: self._drop(job, indices))
        with self._lock:
            self._check_room(request.places)
            self._send(job.left)
            if request.beams is not None:
                self._searching.add(job)
        if left is not None:
            job.stream.expire_in(left)
        return job.stream

    def check_room(self, coming: int = 0) -> None:
        """Refuse at once what would be refused later, where `coming` others will be submitted."""
        with self._lock:
            self._check_room(1, coming)

    def generate(
        self, requests: Sequence[Request], deadline: float | None = None
    ) -> list[Completion]:
        """Every request's answers, in order; waits for room and for all of them.

        One that fails has an `error` among the others.
        """
        return apart(self._generate(requests, deadline))

    async def _generate(
        self, requests: Sequence[Request], deadline: float | None
    ) -> list[Completion]:
        largest = max((request.places for request in requests), default=1)
        room = asyncio.Semaphore(max(1, self._room // largest))

        async def one(request: Request) -> list[Completion]:
            async with room:
                while True:
                    try:
                        stream = self.submit(request, deadline, whole=True)
                    except OverloadedError:  # Others use the engine too.
                        await asyncio.sleep(RETRY_S)
                    except PreambleError as error:
                        return failed(request, error)
                    else:
                        return await completions(stream)

        answers = await asyncio.gather(*map(one, requests))
        return [completion for each in answers for completion in each]

    def dump(self) -> str:
        """Have the last steps written down by whoever took them; where."""
        path = str(crash_path(self._config.flight_dir))
        self._link.send(Dump(path, self._config.flight_ids))
        return path

    def close(self, timeout_s: float = 10.0) -> None:
        """End what was accepted, with an error each, and the ranks."""
        with self._lock:
            self._closed, self._up = True, False
            self.reason = self.reason or "the engine was closed"
            jobs = self._forget_all()
            self._known.set()
        self._give([(job, 0, UnavailableError(STOPPED, "STOPPED")) for job in jobs])
        self._link.close(timeout_s)

    # --------------------------------------------------------------- from the link's own thread

    def ready(self, facts: Ready) -> None:
        with self._lock:
            if self._closed:
                return
            self.facts, self._up, self.reason = facts, True, ""
            kept, self._kept = self._kept, []
            self._rest()
            for job in kept:
                self._send(job.left)
            self._known.set()
        if kept:
            log.info("event=resubmitted requests=%d", len(kept))
        self.on_change()

    def update(self, update: Update) -> None:
        news: list[News] = []
        with self._lock:
            stepped, self.load = update.load.steps > self.load.steps, update.load
            for made in update.made:
                sequence = self._sequences.get(made.number)
                if sequence is not None:
                    news += self._made(sequence, made)
            self._cancel_unwanted()
        self._give(news)
        if stepped:
            self.on_step(update.seconds)

    def lost(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.restarts += self._up
            self._up, self.reason, self.load = False, reason, Load()
            held = list(self._kept)
            jobs = self._forget_all()
            news: list[News] = []
            for job in jobs:
                job.losses += job not in held
                error = self._loss(job)
                if error is None:
                    self._kept.append(job)
                else:
                    news.append((job, 0, error))
            if self._kept and self._patience is None:
                self._be_patient()
            if self._link.refusal is not None:
                self._known.set()
        counts = len(jobs) - len(news), len(news)
        log.error("event=engine_lost kept=%d ended=%d reason=%r", *counts, reason)
        self._give(news)
        self.on_change()

    # -------------------------------------------------------------------------- under the lock

    @property
    def _room(self) -> int:
        return self._config.running_requests_max + self._config.queue_requests_max

    def _accepted(self) -> int:
        spare = sum(job.spare for job in self._searching)
        return len(self._sequences) + sum(len(job.left) for job in self._kept) + spare

    def _check_room(self, more: int, coming: int = 0) -> None:
        if self._closed:
            raise UnavailableError("the engine has stopped; try another server", "STOPPED")
        if not self._up:
            raise UnavailableError(
                f"the model is being loaded again ({self.reason or 'it was never up'}); try again "
                "in a moment",
                "ENGINE_RESTARTING",
            )
        if more > self._room:
            raise RequestError(
                f"the request wants {more} answers at once, this server runs and holds "
                f"{self._room} (running_requests_max + queue_requests_max); ask for fewer",
                "answers",
            )
        if (there := self._accepted() + coming) + more > self._room:
            raise OverloadedError(
                f"{there} answers run or wait already, and this server takes "
                f"{self._room} (running_requests_max + queue_requests_max); try again later"
            )

    def _send(self, sequences: Iterable[Wanted]) -> None:
        now = time.monotonic()
        for sequence in sequences:
            job, request = sequence.job, sequence.job.request
            sequence.sent_at = now if sequence.sent_at is None else sequence.sent_at
            sequence.lost_s = now - sequence.sent_at
            self._number += 1
            sequence.number, sequence.repeated = self._number, sequence.scored
            self._sequences[self._number] = sequence
            answer = sequence.answer
            self._link.send(
                Submission(
                    self._number,
                    list(answer.prompt),
                    answer.sampling,
                    rows=answer.rows,
                    tenant=request.tenant,
                    service=request.service,
                    priority=request.priority + sequence.lead,
                    deadline=job.deadline,
                    guide=request.guide,
                    made=list(sequence.made),
                    unscored=len(answer.prompt) - answer.continued if answer.continued else 0,
                )
            )

    def _made(self, sequence: Wanted, made: Made) -> list[News]:
        """Take note of it. What was told before a loss is not told again."""
        job = sequence.job
        if made.end is not None:
            del self._sequences[made.number]
        if sequence.over:
            return []
        if made.end == "fault":
            log.error("event=sequence_fault adapter=%s", sequence.answer.adapter or "none")
        if made.phases is not None and sequence.lost_s:
            made = msgspec.structs.replace(made, phases=_since(sequence, made.phases))
        if sequence.search is not None:
            return self._searched(sequence, made)
        if job.losses:
            again = min(sequence.repeated, len(made.prompt_scores))
            sequence.repeated -= again
            cached = 0 if sequence.made else made.cached_tokens
            scores = made.prompt_scores[again:]
            made = msgspec.structs.replace(made, prompt_scores=scores, cached_tokens=cached)
        sequence.over = made.end is not None
        sequence.scored += len(made.prompt_scores)
        sequence.made += made.tokens
        job.told = job.told or bool(made.tokens)
        return [(job, index, made) for index in sequence.indices]

    def _searched(self, beam: Wanted, made: Made) -> list[News]:
        """A beam's token came. With a round's last one comes the next round, or the end."""
        job, search, beam.over = beam.job, beam.search, True
        assert search is not None
        if search.take(beam.place, made):
            self._send(job.go_on(search))
        if not search.over:
            return []
        job.told = True
        self._forsake(job, [one for one in job.left if one.search is search])
        return [(job, *found) for found in zip(search.indices, search.found, strict=True)]

    def _forsake(self, job: Job, sequences: Iterable[Wanted]) -> None:
        """Nobody wants these any more."""
        for sequence in sequences:
            sequence.over = True
            self._unwanted.append(sequence.number)
        if not job.left:
            self._searching.discard(job)

    def _forget_all(self) -> list[Job]:
        """Everything that has not ended."""
        jobs = dict.fromkeys(one.job for one in self._sequences.values() if one.job.left)
        jobs.update(dict.fromkeys(self._kept))
        self._sequences.clear()
        self._kept.clear()
        self._unwanted.clear()
        return list(jobs)

    def _loss(self, job: Job) -> PreambleError | None:
        """What a loss of the ranks means for a request; None: nothing, it goes on with new ones."""
        if job.losses > LOSSES_MAX:
            return EngineFaultError(
                "the engine was lost twice while this request was with it, which may be the "
                "cause; the server's log says more"
            )
        if self._link.refusal is not None:
            return UnavailableError(
                f"the engine is gone ({self.reason}); try another server", "STOPPED"
            )
        if job.told and not job.whole:
            return UnavailableError(
                f"the engine was lost in the middle of the answer ({self.reason}); try again in a "
                "moment"
            )
        return None

    def _cancel_unwanted(self) -> None:
        numbers = [number for number in self._unwanted if number in self._sequences]
        self._unwanted.clear()
        if numbers:
            self._link.send(Cancel(numbers))

    def _rest(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _be_patient(self) -> None:
        """What waits for new ranks waits as long as these may take to start, and no longer."""
        limit_s = self._config.load_s + self._config.warmup_s
        self._patience = threading.Timer(limit_s, self._give_up)
        self._patience.daemon = True
        self._patience.start()

    # ------------------------------------------------------------------------ from any thread

    def _give_up(self) -> None:
        with self._lock:
            self._patience = None
            jobs, self._kept = self._kept, []
        gone = UnavailableError(f"the engine did not come back ({self.reason}); try again later")
        self._give([(job, 0, gone) for job in jobs])

    def _drop(self, job: Job, indices: Iterable[int]) -> None:
        """Nobody wants these any more. Those of one turn of a loop are cancelled together."""
        with self._lock:
            first = not self._unwanted
            dropped = set(indices)
            wanted = [one for one in job.left if not dropped.isdisjoint(one.indices)]
            self._forsake(job, wanted)
            if job in self._kept and not job.left:
                self._kept.remove(job)
        if first:
            try:
                asyncio.get_running_loop().call_soon(self._cancel)
            except RuntimeError:  # Called from elsewhere.
                self._cancel()

    def _cancel(self) -> None:
        with self._lock:
            self._cancel_unwanted()

    def _give(self, news: Sequence[News]) -> None:
        """Hand news to their streams, waking each event loop once; what can wait, with the next."""
        now = time.monotonic()
        with self._lock:
            self._later += news
            if now - self._given_s < WHOLE_S and all(map(waits, news)):
                return
            news, self._later, self._given_s = self._later, [], now
        loops: dict[asyncio.AbstractEventLoop, list[News]] = {}
        for item in gathered(news):
            loops.setdefault(item[0].loop, []).append(item)
        for loop, theirs in loops.items():
            try:
                loop.call_soon_threadsafe(_put, theirs, self._config.gather_ms / 1000)
            except RuntimeError:  # The loop is closed: nobody listens any more.
                for job, _, _ in theirs:
                    self._drop(job, range(len(job.request.answers)))


def _put(news: Sequence[News], gather_s: float) -> None:
    pause_s = max(gather_s, len(news) * MESSAGE_S / MESSAGES_SHARE)
    for job, index, what in news:
        assert job.stream is not None
        if isinstance(what, PreambleError):
            job.stream.fail(what)
        else:
            job.stream.take(index, what, float("inf") if job.whole else pause_s)


def _since(sequence: Wanted, phases: Phases) -> Phases | None:
    """As the one who waits has seen it: what ranks that were lost did for it was waiting too.

    None: it had its first token from them, and its time since then is all decoding.
    """
    if sequence.made:
        return None
    return msgspec.structs.replace(phases, queue_s=phases.queue_s + sequence.lost_s)


def apart(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end on an event loop in a thread of its own, so that anyone may call."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T] | None]] = Future()
    outcome: Future[T] = Future()

    async def main() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="apart", daemon=True)
    thread.start()
    loop, task = started.result()
    try:
        return outcome.result()
    except BaseException:
        # The caller's Ctrl-C ends the work too; if the work itself failed, its loop is closed.
        with suppress(RuntimeError):
            assert task is not None
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
