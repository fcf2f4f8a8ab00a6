"""The loop that turns requests into steps: commit the oldest outcome, plan, tell, run.

It runs on rank 0, between the front end's messages and the ranks, and decides nothing itself: who
runs is the scheduler's business, how is the runner's. As many steps are in flight as there are
stages. What a step made is told before the next one runs, and an idle engine shows each second that
it lives. Neither sockets nor processes are known here.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serving.config import ServerConfig
from serving.messages import (
    Cancel,
    Close,
    Dump,
    Failed,
    FromPlanner,
    Halt,
    Load,
    Made,
    Outcome,
    Step,
    Submission,
    ToPlanner,
    Update,
    encode,
    outcome,
)
from serving.scheduler.scheduler import Scheduler
from serving.worker.adapter_cache import Loaded, Tables
from serving.worker.flight_recorder import Flight, crash_path
from serving.worker.model_runner import Landing, Runner, recordings, rehearsal

log = logging.getLogger(__name__)

IDLE_S = 1.0  # An engine with nothing to do steps this often.
STALL_S = 0.01  # Something waits and nothing can run: look again after this,
STALLS_S = 10.0  # and after this give up: whoever waits is owed an end.
RECORD_S = 20.0  # A start may take so much longer for steps to be recorded.


@dataclass(frozen=True)
class Warm:
    """What the first steps took, when everything had been allocated."""

    chunk_ms_per_token: float
    decode_ms: float  # Of a step in which as many sequences decode as there may be.
    decodes: int


@dataclass(frozen=True)
class _Flying:
    """A step in flight. Its outcome comes from here if this rank is the last stage, too."""

    step: Step
    landing: Landing | None


@dataclass(slots=True)
class _Live:
    """What is known here of a sequence until it ends."""

    came_at: float
    digest: str = ""  # Of the adapter whose rows it holds.


class Planner:
    """`put` is for any thread, `give` is called from the one that runs, and must not wait long.

    `send_step` hands a packed step to every other rank without waiting for it. `take_outcome` waits
    for the next packed outcome, where the last stage is elsewhere; both raise if ranks are gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        config: ServerConfig,
        give: Callable[[FromPlanner], None],
        *,
        send_step: Callable[[bytes], None] | None = None,
        take_outcome: Callable[[], bytes] | None = None,
    ) -> None:
        self._scheduler, self._runner, self._config, self._give = scheduler, runner, config, give
        self._send_step, self._take_outcome = send_step, take_outcome
        self._depth = runner.model.mesh.pp + config.steps_ahead(runner.model.mesh.device.type)
        self._replayed = self._early = 0  # Steps that were recorded, or began early.
        self._inbox: queue.SimpleQueue[ToPlanner | Loaded] = queue.SimpleQueue()
        network = runner.model.config
        self._tables = Tables(network, config.adapter_bytes_max, self._inbox.put)
        self._live: dict[int, _Live] = {}  # What has not ended, by number.
        self._aside: dict[int, Submission] = {}  # Those that wait for an adapter's rows.
        self._live_max = config.queue_requests_max + config.running_requests_max
        self._flying: deque[_Flying] = deque()
        self._made: list[Made] = []  # Not told yet.
        self._seconds = 0.0
        self._stepped = self._advanced = time.monotonic()
        self._patience_s = 0.0  # How long the next look at the inbox may wait.
        self._closed = False
        self._crash = threading.Lock()
        self._crash_written = False
        self.flight = Flight(config.flight_steps_max)

    def put(self, message: ToPlanner) -> None:
        """Hand over a message; thread-safe, never waits."""
        self._inbox.put(message)

    def run(self) -> str | None:
        """Until it is closed, or something breaks: then the reason, which was given as well."""
        reason = None
        try:
            while not self._closed:
                self._turn()
        except Exception as error:
            log.exception("event=planner_failed")
            reason = f"{type(error).__name__}: {error}"
            self.write_crash(reason)
        finally:
            self._tables.close()
            self._end_ranks()
        if reason is not None:
            try:
                self._give(Failed(reason))
            except Exception:  # The front end is gone: that may be what has broken.
                log.warning("event=failure_not_given reason=%r", reason)
        return reason

    def _turn(self) -> None:
        """One round: land what must land, read, plan, and launch what was planned."""
        if len(self._flying) >= self._depth:
            self._land()
        self._read()
        now = time.monotonic()
        self._drop_late(now)
        step = self._scheduler.plan(now)
        self._note(self._scheduler.ended())
        if step is not None:
            self._tell(step)
            self._launch(step)
        elif self._flying:
            if self._made:  # The wait for the next outcome may be long.
                self._tell(None)
            self._land()
        elif now - self._stepped >= IDLE_S:
            self._launch(self._scheduler.idle_step())
            self._land()
            self._tell(None)
        elif self._made:
            self._tell(None)
        else:
            self._patience_s = self._until_needed(now)

    def _until_needed(self, now: float) -> float:
        """How long nothing has to be done, if nobody says anything."""
        if self._scheduler.busy:
            if now - self._advanced > STALLS_S:
                raise RuntimeError(f"requests wait, and none could run for {STALLS_S:g} s")
            return STALL_S
        self._advanced = now
        times = [self._stepped + IDLE_S]
        times += [one.deadline for one in self._aside.values() if one.deadline is not None]
        return max(0.0, min(times) - now)

    # ------------------------------------------------------------------------------------- steps

    def _launch(self, step: Step) -> None:
        if step.rewrites:
            filled = [
                msgspec.structs.replace(rewrite, data=self._tables.data(rewrite.digest))
                for rewrite in step.rewrites
            ]
            step = msgspec.structs.replace(step, rewrites=filled)
        if step.fills:
            fills = [
                msgspec.structs.replace(
                    fill, data=self._tables.prefix(fill.digest, fill.start, fill.count)
                )
                for fill in step.fills
            ]
            step = msgspec.structs.replace(step, fills=fills)
        self.flight.begin(step)
        if self._send_step is not None:
            self._send_step(encode(step))
        self._early += len(self._flying) >= self._runner.model.mesh.pp
        self._flying.append(_Flying(step, self._runner.launch(step)))
        self._stepped = time.monotonic()
        if step.slots:
            self._advanced = self._stepped

    def _land(self) -> None:
        """Take the oldest step's outcome; waits for it if it is not there."""
        came = self._outcome()
        self._note(self._scheduler.commit(came, time.monotonic()))
        self._scheduler.check()

    def _outcome(self) -> Outcome:
        flying = self._flying.popleft()
        if flying.landing is not None:
            came = flying.landing()
        else:
            assert self._take_outcome is not None, "the last stage is elsewhere"
            came = outcome(self._take_outcome())
        if came.number != flying.step.number:
            raise RuntimeError(f"step {flying.step.number} was answered as {came.number}")
        self.flight.end(came)
        self._replayed += came.replayed
        self._seconds = came.seconds if flying.step.slots else 0.0
        self._stepped = time.monotonic()
        return came

    def _tell(self, step: Step | None) -> None:
        """Give what was made, and how large the step is that begins."""
        made, self._made = self._made, []
        seconds, self._seconds = self._seconds, 0.0
        tokens, context = (sum(step.lengths), sum(step.past)) if step is not None else (0, 0)
        counts = {"replayed_steps": self._replayed, "early_steps": self._early}
        load = msgspec.structs.replace(self._scheduler.load, **counts)
        if self._aside:
            load = msgspec.structs.replace(load, waiting=load.waiting + len(self._aside))
        self._give(Update(made, load, tokens, context, seconds))

    # ---------------------------------------------------------------------------------- messages

    def _read(self) -> None:
        """Obey what is in the inbox; waits for a first message as long as there is time."""
        wait_s, self._patience_s = self._patience_s, 0.0
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                self._obey(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _obey(self, message: ToPlanner | Loaded) -> None:
        match message:
            case Submission():
                self._submit(message)
            case Cancel():
                for number in message.numbers:
                    if self._aside.pop(number, None) is not None:
                        self._note([Made(number, end="cancelled")])
                self._scheduler.cancel(message.numbers)
            case Loaded():
                self._take_rows(message)
            case Dump():
                self.write_flight(message.path, "asked", ids=message.ids)
            case Close():
                self._closed = True

    def _submit(self, submission: Submission) -> None:
        assert submission.number not in self._live, "a number is used twice"
        if len(self._live) >= self._live_max:
            reason = (
                f"{len(self._live)} requests wait and run already, as many as this server lets "
                "(queue_requests_max, running_requests_max); try again later"
            )
            self._made.append(Made(submission.number, end="full", reason=reason))
            return
        self._live[submission.number] = _Live(time.monotonic())
        self._aside[submission.number] = submission
        self._admit(submission)

    def _admit(self, submission: Submission) -> None:
        """Hand one that stands aside to the scheduler, if its adapter is at hand."""
        rows, live, now = submission.rows, self._live[submission.number], time.monotonic()
        if rows is not None:
            if self._tables.pin(rows) != "here":
                return
            live.digest = rows.digest
        del self._aside[submission.number]
        refused = self._scheduler.add(submission, now, now - live.came_at)
        if refused is not None:
            self._note([refused])

    def _take_rows(self, loaded: Loaded) -> None:
        self._tables.take(loaded)
        if loaded.reason:
            out = [one.number for one in self._aside.values() if one.rows == loaded.rows]
            self._end_aside(out, lambda number: Made(number, end="adapter", reason=loaded.reason))
        self._retry()

    def _retry(self) -> None:
        for submission in list(self._aside.values()):
            # One that is refused may let go of rows that another waited for.
            if submission.number in self._aside:
                self._admit(submission)

    def _drop_late(self, now: float) -> None:
        """End those that stand aside and whose deadline has passed."""
        late = [
            number
            for number, one in self._aside.items()
            if one.deadline is not None and now >= one.deadline
        ]
        self._end_aside(late, lambda number: Made(number, end="deadline"))

    def _end_aside(self, numbers: Sequence[int], end: Callable[[int], Made]) -> None:
        for number in numbers:
            del self._aside[number]
            self._note([end(number)])

    def _note(self, made: Sequence[Made]) -> None:
        """Keep what was made until it is told, and let go of what has ended."""
        self._made += made
        released = False
        for one in made:
            if one.end is not None:
                digest = self._live.pop(one.number).digest
                if digest:
                    self._tables.release(digest)
                    released = True
        if released and self._aside:
            self._retry()

    # ---------------------------------------------------------------------------------- the ends

    def warm_up(self) -> Warm:
        """Run the largest chunk and a full decode batch, twice each, and forget them.

        All ranks take part, so that the first request finds everything allocated and compiled.
        """
        *steps, clearing = rehearsal(self._config, self._runner)
        took = [self._rehearse(step) for step in steps]
        until = time.monotonic() + RECORD_S
        for step in recordings(self._config, self._runner):
            # What is not recorded by then is when it is first needed.
            if time.monotonic() < until:
                self._rehearse(step)
        self._rehearse(clearing)
        chunk, decodes = steps[1], steps[3]
        return Warm(took[1] * 1e3 / sum(chunk.lengths), took[3] * 1e3, len(decodes.slots))

    def _rehearse(self, step: Step) -> float:
        self._launch(step)
        return self._outcome().seconds

    def write_flight(self, path: str | Path, why: str, *, ids: bool) -> None:
        """Write down the last steps; from any thread, even if the planner is stuck or broken."""
        try:
            load = self._scheduler.load
        except Exception:  # It may be what has broken.
            log.exception("event=load_unknown")
            load = Load()
        self.flight.write(path, why, load, ids=ids)

    def write_crash(self, why: str) -> None:
        """The same where the configuration says, beside those of earlier crashes; but once.

        A rank's death is told by the kernel, and breaks a collective: whichever is heard first
        writes. The other waits for it, since the process ends next.
        """
        with self._crash:
            if self._crash_written:
                return
            self._crash_written = True
            try:
                path = crash_path(self._config.flight_dir)
                self.write_flight(path, why, ids=self._config.flight_ids)
            except OSError as error:  # Whoever waits must hear of the end, with or without it.
                log.warning("event=flight_not_written reason=%r", str(error))

    def _end_ranks(self) -> None:
        if self._send_step is None:
            return
        try:
            self._send_step(encode(Halt()))
        except Exception as error:  # They are gone, which is what was wanted.
            log.info("event=halt_not_sent reason=%r", str(error))
