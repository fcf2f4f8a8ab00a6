"""Engine: requests in, streams of pieces out; a thread of its own runs the model.

The queue in front is bounded, and a request that is in it will end. Each turn the thread starts
those that wait, as a new group beside the groups that run, and takes every group one step further;
who is cancelled or late is dropped between steps. Knows nothing of any wire.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.generate import Piece as Step
from gpt.generate import stream
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from serving.request import (
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Piece,
    Request,
    Token,
    UnavailableError,
)
from serving.text import CertainText

log = logging.getLogger(__name__)

Outcome = Token | Exception

NOT_FINITE = (
    "the model's numbers became infinite or not a number on this request; try another prompt or "
    "adapter, or serve in a wider --dtype"
)


@dataclass(eq=False)
class _Job:
    """A request on its way. The thread writes to `outcomes` through the stream's event loop."""

    request: Request
    table: Tensor | None
    deadline: float | None  # On the monotonic clock.
    loop: asyncio.AbstractEventLoop
    outcomes: asyncio.Queue[Outcome] = field(default_factory=asyncio.Queue)
    ended: bool = False  # No more outcomes will come, or nobody waits for them.


@dataclass(eq=False)
class _Group:
    """Jobs that started together; `steps` makes a token for each until all are done.

    The steps leave out the rows in `dropped`, whose jobs have ended.
    """

    jobs: Sequence[_Job]
    steps: Iterator[list[Step]]
    dropped: set[int]
    started: bool = False

    @property
    def live(self) -> list[_Job]:
        return [job for job in self.jobs if not job.ended]


class Stream:
    """The pieces of one request. Close it; closing it early cancels the request."""

    def __init__(self, job: _Job, text: CertainText, forget: Callable[[_Job], None]) -> None:
        self._job, self._text, self._forget = job, text, forget
        self._over = False

    @property
    def request(self) -> Request:
        return self._job.request

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Piece:
        """Everything that came since the last call, so a slow reader gets fewer, larger pieces."""
        if self._over:
            raise StopAsyncIteration
        ids: list[int] = []
        text = ""
        outcome = await self._job.outcomes.get()
        while True:
            if isinstance(outcome, Exception):
                self.close()
                raise outcome
            ids.append(outcome.id)
            # A token that stops is a sign to us, not a part of the text.
            text += "" if outcome.finish == "stop" else self._text.push(outcome.id)
            finish = outcome.finish
            if finish is not None:
                text += self._text.finish()
            if self._text.stopped:
                finish = "stop"
            if finish is not None:
                self.close()
                return Piece(tuple(ids), text, finish)
            if self._job.outcomes.empty():
                return Piece(tuple(ids), text, None)
            outcome = self._job.outcomes.get_nowait()

    def close(self) -> None:
        self._over = True
        self._forget(self._job)


class Engine:
    """Runs requests against one model. `tables` gives the rows of an adapter by its digest."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        tables: Callable[[str], Tensor],
        *,
        running_requests_max: int,
        queue_requests_max: int,
    ) -> None:
        self._model, self._tokenizer, self._tables = model, tokenizer, tables
        self._running_max, self._queue_max = running_requests_max, queue_requests_max
        self._waiting: deque[_Job] = deque()
        self._groups: list[_Group] = []
        self._changed = threading.Condition()  # Guards _waiting and _closed.
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(group.live) for group in self._groups)

    def submit(self, request: Request, deadline: float | None = None) -> Stream:
        """Accept a request, or refuse it at once. `deadline` is on the monotonic clock."""
        table = self._tables(request.digest) if request.digest else None
        job = _Job(request, table, deadline, asyncio.get_running_loop())
        text = CertainText(self._tokenizer, request.stop_strings)
        with self._changed:
            if self._closed or not self.alive:
                raise UnavailableError("the engine has stopped; try another server")
            if len(self._waiting) >= self._queue_max:
                raise OverloadedError(
                    f"{len(self._waiting)} requests wait already, as many as this server lets "
                    "wait (queue_requests_max); try again later"
                )
            self._waiting.append(job)
            self._changed.notify()
        return Stream(job, text, self._forget)

    def close(self, timeout_s: float = 10.0) -> None:
        """End what waits and what runs, with an error each, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _forget(self, job: _Job) -> None:
        with self._changed:
            job.ended = True
            if job in self._waiting:
                self._waiting.remove(job)

    def _run(self) -> None:
        try:
            while (arrivals := self._arrivals()) is not None:
                if arrivals:
                    self._groups.append(self._group(arrivals))
                for group in list(self._groups):
                    self._step(group)
                self._groups = [group for group in self._groups if group.live]
        finally:
            with self._changed:
                self._closed = True
                jobs = [*self._waiting, *(job for group in self._groups for job in group.live)]
                self._waiting.clear()
            self._groups = []
            stopped = UnavailableError("the engine stopped before the answer was done; try again")
            self._give([(job, stopped) for job in jobs])

    def _arrivals(self) -> list[_Job] | None:
        """Jobs to start now; waits for one if nothing runs. None: there will be no more."""
        with self._changed:
            while not (self._closed or self._groups or self._waiting):
                self._changed.wait()
            if self._closed:
                return None
            room = max(0, self._running_max - self.running)
            taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            late = [job for job in self._waiting if self._late(job)]
            for job in late:
                self._waiting.remove(job)
        self._end_late(late + taken)
        return [job for job in taken if not job.ended]

    def _late(self, job: _Job) -> bool:
        return job.deadline is not None and time.monotonic() >= job.deadline

    def _end_late(self, jobs: Iterable[_Job]) -> None:
        passed = DeadlinePassedError("the deadline passed before the answer was done")
        self._give([(job, passed) for job in jobs if self._late(job)])

    def _group(self, jobs: Sequence[_Job]) -> _Group:
        """Start jobs together. Each adapter's rows get their place in one table for all."""
        vocabulary = self._model.config.vocab_size
        tables: dict[str, Tensor] = {}
        for job in jobs:
            if job.table is not None:
                tables[job.request.digest] = job.table
        first, rows = {"": 0}, 0
        for digest, table in tables.items():
            first[digest], rows = rows, rows + len(table)
        prompts = [
            [
                token + first[job.request.digest] if token >= vocabulary else token
                for token in job.request.prompt
            ]
            for job in jobs
        ]
        samplings = [job.request.sampling for job in jobs]
        joined = None
        if tables:
            joined = torch.cat(list(tables.values())).to(self._model.mesh.device)
        dropped: set[int] = set()
        steps = stream(self._model, prompts, samplings, table=joined, dropped=dropped)
        return _Group(jobs, steps, dropped)

    def _step(self, group: _Group) -> None:
        self._end_late(group.live)
        # Asked once: a job that ends from here on is in this step still.
        group.dropped.update(row for row, job in enumerate(group.jobs) if job.ended)
        if len(group.dropped) == len(group.jobs):
            return
        try:
            steps = next(group.steps)
        except Exception:
            self._failed(group)
            return
        group.started = True
        outcomes: list[tuple[_Job, Outcome]] = []
        for step in steps:
            job = group.jobs[step.row]
            if job.ended:
                continue
            if step.finish_reason == "fault":
                log.error("event=logits_not_finite adapter=%s", job.request.adapter or "none")
                outcomes.append((job, EngineFaultError(NOT_FINITE)))
            else:
                outcomes.append((job, Token(step.token_id, step.finish_reason)))
        self._give(outcomes)

    def _failed(self, group: _Group) -> None:
        if len(group.jobs) > 1 and not group.started:
            # One of them may have been the cause, and the others should not suffer for it.
            log.exception("event=group_failed requests=%d next=one_by_one", len(group.jobs))
            self._groups += [self._group([job]) for job in group.live]
            group.jobs = []
            return
        log.exception("event=request_failed requests=%d", len(group.live))
        fault = EngineFaultError("the engine failed on this request; the server's log says why")
        self._give([(job, fault) for job in group.live])

    def _give(self, outcomes: Sequence[tuple[_Job, Outcome]]) -> None:
        """Hand outcomes to their streams, waking each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Outcome]]] = {}
        for job, outcome in outcomes:
            job.ended |= isinstance(outcome, Exception) or outcome.finish is not None
            loops.setdefault(job.loop, []).append((job, outcome))
        for loop, theirs in loops.items():
            try:
                loop.call_soon_threadsafe(_put, theirs)
            except RuntimeError:  # The loop is closed: nobody listens any more.
                for job, _ in theirs:
                    job.ended = True


def _put(outcomes: Sequence[tuple[_Job, Outcome]]) -> None:
    for job, outcome in outcomes:
        job.outcomes.put_nowait(outcome)
