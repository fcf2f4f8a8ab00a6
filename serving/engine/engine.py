"""Engine: accepts and submits requests, streams output, and recovers when the ranks are lost.

The number of accepted requests is bounded. Each accepted request ends exactly once: with a finish
reason, or with an error that names the cause. When the ranks are lost, requests that have received
no token, and requests whose callers read only complete answers (`final_only`), wait for new ranks
and are submitted again. All other requests end with an error, and so does a request that has lost
its ranks twice. The module is independent of protocols, of the model and of the scheduling policy:
the scheduler behind the transport decides in which order requests run.
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
from serving.config import ObservabilityConfig, ParallelConfig, SchedulerConfig
from serving.engine.adapter_residency import AdapterResidency, ResidencySnapshot
from serving.engine.job import Job, StreamEvent, TrackedSequence, coalesce_events, is_deferrable
from serving.engine.stream import DEADLINE_MESSAGE, Stream, collect_completions, failed_completions
from serving.engine.transport import EngineTransport
from serving.engine_core.flight_recorder import crash_path
from serving.memory_budget import ADAPTER_ROWS_MAX
from serving.messages import (
    Cancel,
    DumpFlightRecorder,
    EngineStats,
    Phases,
    Ready,
    SequenceOutput,
    Submission,
    Update,
)
from serving.request import (
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.01  # If the engine is full, `generate` submits a request again after this time.
# A message to a client costs the front end about 100 us of CPU time, independent of its size.
# MESSAGE_CPU_SHARE_MAX is the approximate limit of (CPU time of all messages) / (elapsed time). To
# meet it, the more streams get output from a step, the longer each stream gathers tokens before it
# sends a message (`_push_events`).
MESSAGE_COST_S = 100e-6
MESSAGE_CPU_SHARE_MAX = 0.4
# Interval at which deferrable events (`is_deferrable`) are delivered. Each delivery wakes the
# caller, which takes about 100 us of CPU time; a model in the same process loses this time.
FINAL_ONLY_FLUSH_S = 0.2
# A request ends with an error after more rank losses than this, because the request may be their
# cause.
RANK_LOSSES_MAX = 1
STOPPED_MESSAGE = "the engine stopped before the answer was finished; try again"


class Engine:
    """Runs requests over `transport`, and is the transport's receiver."""

    def __init__(
        self,
        transport: EngineTransport,
        tokenizer: Tokenizer,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
        observability_config: ObservabilityConfig,
        *,
        adapter_rows_max: int = ADAPTER_ROWS_MAX,
        adapter_pages: int = 0,
    ) -> None:
        self._transport = transport
        self._tokenizer = tokenizer
        self._scheduler_config = scheduler_config
        self._parallel_config = parallel_config
        self._observability_config = observability_config
        self._lock = threading.Lock()  # Guards the private fields below; held only briefly.
        # Sequences that were submitted and have not ended, by sequence id.
        self._sequences: dict[int, TrackedSequence] = {}
        self._awaiting_ranks: list[Job] = []  # To be submitted when new ranks are ready.
        self._beam_jobs: set[Job] = set()  # Unfinished jobs with beam search.
        self._to_cancel: list[int] = []  # Sequence ids whose cancel was not sent yet.
        self._adapter_residency = AdapterResidency(adapter_rows_max, self._capacity, adapter_pages)
        self._deferred_events: list[StreamEvent] = []  # Not delivered yet (`is_deferrable`).
        self._flushed_at = 0.0  # Last delivery, on the monotonic clock.
        self._last_sequence_id = 0
        self._closed = False
        self._up = False  # The ranks are ready.
        # Set when the ranks become ready for the first time, and when the engine fails permanently
        # or is closed.
        self._startup_settled = threading.Event()
        self._recovery_timer: threading.Timer | None = None
        self.down_reason = ""  # Why the engine is not up.
        self.ready_message: Ready | None = None  # The latest `Ready` message of the ranks.
        self.stats = EngineStats()
        self.restarts = 0
        # Called on the transport's thread when the ranks become ready or are lost.
        self.on_change: Callable[[], object] = lambda: None
        # Called on the transport's thread after each step, with its duration in seconds.
        self.on_step: Callable[[float], None] = lambda seconds: None

    def start(self) -> None:
        self._transport.start(self)

    def wait(self) -> Ready:
        """Wait until the ranks are ready; raises the error if the engine failed permanently."""
        self._startup_settled.wait()
        if self._transport.refusal is not None:
            raise self._transport.refusal
        if self.ready_message is None:
            raise UnavailableError(self.down_reason)
        return self.ready_message

    @property
    def up(self) -> bool:
        return self._up

    @property
    def has_failed(self) -> bool:
        """Whether the engine failed permanently."""
        return self._transport.refusal is not None

    @property
    def unfinished_sequences(self) -> int:
        """Accepted sequences that have not ended, plus those reserved for beam search."""
        with self._lock:
            return self._count_unfinished()

    @property
    def waiting_sequences(self) -> int:
        return max(0, self.unfinished_sequences - self.stats.running)

    def adapter_residency(self) -> ResidencySnapshot:
        """Return which adapters are on the device, and which ones requests wait for."""
        with self._lock:
            waiting = [
                sequence.answer
                for sequence in self._unfinished_sequences()
                if not sequence.has_generated
            ]
            return self._adapter_residency.snapshot(waiting)

    def adapter_files(self) -> set[str]:
        """Return the files of the adapters of unfinished requests.

        They may be read again, for example by new ranks.
        """
        with self._lock:
            adapter_refs = [
                sequence.answer.adapter_ref for sequence in self._unfinished_sequences()
            ]
        return {adapter_ref.file for adapter_ref in adapter_refs if adapter_ref is not None}

    def submit(
        self, request: Request, deadline: float | None = None, *, final_only: bool = False
    ) -> Stream:
        """Accept a request, or raise an error at once. `deadline` is on the monotonic clock.

        `final_only`: the caller uses no output before the end of the request, so after a loss of
        ranks the request can continue on new ranks even if it has tokens.
        """
        remaining_s = None if deadline is None else deadline - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlinePassedError(DEADLINE_MESSAGE)
        job = Job(request, deadline, final_only, asyncio.get_running_loop())
        job.stream = Stream(
            request, self._tokenizer, lambda indices: self._cancel_answers(job, indices)
        )
        with self._lock:
            self._check_capacity(request.sequences_max)
            self._submit_sequences(job.unfinished)
            if request.beams is not None:
                self._beam_jobs.add(job)
        if remaining_s is not None:
            job.stream.expire_in(remaining_s)
        return job.stream

    def check_capacity(self, pending: int = 0) -> None:
        """Raise the error that `submit` would raise for a request with one answer.

        `pending`: a number of answers that are not submitted yet, but count as unfinished too.
        """
        with self._lock:
            self._check_capacity(1, pending)

    def generate(
        self, requests: Sequence[Request], deadline: float | None = None
    ) -> list[Completion]:
        """Run requests and return all their answers in order; waits while the engine is full.

        A failed answer has an `error`; the other answers are not affected.
        """
        return run_in_thread(self._generate(requests, deadline))

    async def _generate(
        self, requests: Sequence[Request], deadline: float | None
    ) -> list[Completion]:
        sequences_max = max((request.sequences_max for request in requests), default=1)
        semaphore = asyncio.Semaphore(max(1, self._capacity // sequences_max))

        async def run_request(request: Request) -> list[Completion]:
            async with semaphore:
                while True:
                    try:
                        stream = self.submit(request, deadline, final_only=True)
                    except OverloadedError:  # Other callers have filled the engine.
                        await asyncio.sleep(RETRY_S)
                    except PreambleError as error:
                        return failed_completions(request, error)
                    else:
                        return await collect_completions(stream)

        per_request = await asyncio.gather(*map(run_request, requests))
        return [
            completion for request_completions in per_request for completion in request_completions
        ]

    def dump(self) -> str:
        """Send the command to write the flight recorder to a file; returns the file's path."""
        path = str(crash_path(self._observability_config.flight_dir))
        self._transport.send(DumpFlightRecorder(path, self._observability_config.flight_ids))
        return path

    def close(self, timeout_s: float = 10.0) -> None:
        """End all accepted requests with an error, and end the ranks."""
        with self._lock:
            self._closed = True
            self._up = False
            self.down_reason = self.down_reason or "the engine was closed"
            jobs = self._take_unfinished_jobs()
            self._startup_settled.set()
        self._deliver([(job, 0, UnavailableError(STOPPED_MESSAGE, "STOPPED")) for job in jobs])
        self._transport.close(timeout_s)

    # --------------------------------------------------- callbacks, on the transport's thread

    def ready(self, message: Ready) -> None:
        with self._lock:
            if self._closed:
                return
            self.ready_message = message
            self._up = True
            self.down_reason = ""
            jobs, self._awaiting_ranks = self._awaiting_ranks, []
            self._cancel_recovery_timer()
            for job in jobs:
                self._submit_sequences(job.unfinished)
            self._startup_settled.set()
        if jobs:
            log.info("event=resubmitted requests=%d", len(jobs))
        self.on_change()

    def update(self, update: Update) -> None:
        events: list[StreamEvent] = []
        with self._lock:
            self.stats = update.stats
            self._adapter_residency.apply_changes(update.adapter_changes)
            for output in update.outputs:
                sequence = self._sequences.get(output.sequence_id)
                if sequence is not None:
                    events += self._record_output(sequence, output)
            self._send_cancels()
        self._deliver(events)
        for step_time in update.completed_steps:
            self.on_step(step_time.seconds)

    def ranks_lost(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self.restarts += self._up
            self._up = False
            self.down_reason = reason
            self.stats = EngineStats()
            self._adapter_residency.clear()
            already_waiting = list(self._awaiting_ranks)
            jobs = self._take_unfinished_jobs()
            events: list[StreamEvent] = []
            for job in jobs:
                job.rank_losses += job not in already_waiting
                error = self._loss_error(job)
                if error is None:
                    self._awaiting_ranks.append(job)
                else:
                    events.append((job, 0, error))
            if self._awaiting_ranks and self._recovery_timer is None:
                self._start_recovery_timer()
            if self._transport.refusal is not None:
                self._startup_settled.set()
        counts = len(jobs) - len(events), len(events)
        log.error("event=engine_lost kept=%d ended=%d reason=%r", *counts, reason)
        self._deliver(events)
        self.on_change()

    # ------------------------------------------------------------- called with the lock held

    @property
    def _capacity(self) -> int:
        return (
            self._scheduler_config.running_requests_max + self._scheduler_config.queue_requests_max
        )

    def _count_unfinished(self) -> int:
        reserved = sum(job.reserved_beams for job in self._beam_jobs)
        return (
            len(self._sequences)
            + sum(len(job.unfinished) for job in self._awaiting_ranks)
            + reserved
        )

    def _unfinished_sequences(self) -> list[TrackedSequence]:
        sequences = list(self._sequences.values())
        return sequences + [sequence for job in self._awaiting_ranks for sequence in job.unfinished]

    def _check_capacity(self, new_sequences: int, pending: int = 0) -> None:
        if self._closed:
            raise UnavailableError("the engine has stopped; try another server", "STOPPED")
        if self.has_failed:
            raise self._permanent_failure_error()
        if not self._up:
            raise UnavailableError(
                f"the model is being loaded ({self.down_reason or 'the engine is starting'}); try "
                "again in a moment",
                "ENGINE_RESTARTING",
            )
        if new_sequences > self._capacity:
            raise RequestError(
                f"the request needs {new_sequences} answers at once, and this server can run and "
                f"queue {self._capacity} (running_requests_max + queue_requests_max); request "
                "fewer",
                "answers",
            )
        unfinished = self._count_unfinished() + pending
        if unfinished + new_sequences > self._capacity:
            raise OverloadedError(
                f"{unfinished} answers are running or waiting, and this server can run and queue "
                f"{self._capacity} (running_requests_max + queue_requests_max); try again later"
            )

    def _submit_sequences(self, sequences: Iterable[TrackedSequence]) -> None:
        now = time.monotonic()
        for sequence in sequences:
            job, request = sequence.job, sequence.job.request
            sequence.submitted_at = now if sequence.submitted_at is None else sequence.submitted_at
            sequence.resubmit_delay_s = now - sequence.submitted_at
            self._last_sequence_id += 1
            sequence.sequence_id = self._last_sequence_id
            sequence.prompt_scores_to_skip = sequence.prompt_scores_received
            self._sequences[self._last_sequence_id] = sequence
            answer = sequence.answer
            self._adapter_residency.record_use(answer)
            self._transport.send(
                Submission(
                    self._last_sequence_id,
                    list(answer.prompt),
                    answer.sampling,
                    adapter_ref=answer.adapter_ref,
                    tenant=request.tenant,
                    service=request.service,
                    priority=request.priority + sequence.priority_boost,
                    deadline=job.deadline,
                    guide=request.guide,
                    output_tokens=list(sequence.output_tokens),
                    unscored_tokens=len(answer.prompt) - answer.continuation_tokens
                    if answer.continuation_tokens
                    else 0,
                    cache_salt=request.cache_salt,
                    adapted_from=answer.adapted_from,
                )
            )

    def _record_output(
        self, sequence: TrackedSequence, output: SequenceOutput
    ) -> list[StreamEvent]:
        """Record the output of a sequence; return the events for the streams.

        After a loss of ranks, the new ranks repeat prompt scores and the number of cached tokens.
        The repeated scores and number are removed from `output`, so that each is delivered once.
        """
        job = sequence.job
        if output.end is not None:
            del self._sequences[output.sequence_id]
        if sequence.finished:
            return []
        if output.end == "fault":
            log.error("event=sequence_fault adapter=%s", sequence.answer.adapter or "none")
        if output.phases is not None and sequence.resubmit_delay_s:
            output = msgspec.structs.replace(output, phases=_add_lost_time(sequence, output.phases))
        if sequence.search is not None:
            return self._record_beam_output(sequence, output)
        if job.rank_losses:
            repeated_scores = min(sequence.prompt_scores_to_skip, len(output.prompt_scores))
            sequence.prompt_scores_to_skip -= repeated_scores
            cached_tokens = 0 if sequence.has_generated else output.cached_tokens
            prompt_scores = output.prompt_scores[repeated_scores:]
            output = msgspec.structs.replace(
                output, prompt_scores=prompt_scores, cached_tokens=cached_tokens
            )
        sequence.finished = output.end is not None
        sequence.prompt_scores_received += len(output.prompt_scores)
        sequence.output_tokens += output.tokens
        job.has_output = job.has_output or bool(output.tokens)
        return [(job, index, output) for index in sequence.answer_indices]

    def _record_beam_output(
        self, beam: TrackedSequence, output: SequenceOutput
    ) -> list[StreamEvent]:
        """Record a beam's token. The last beam of a round starts a new round or ends the search."""
        job = beam.job
        search = beam.search
        beam.finished = True
        assert search is not None
        if search.record_output(beam.beam_index, output):
            self._submit_sequences(job.start_beam_round(search))
        if not search.is_done:
            return []
        job.has_output = True
        self._abandon(job, [sequence for sequence in job.unfinished if sequence.search is search])
        return [
            (job, *indexed_output)
            for indexed_output in zip(search.indices, search.outputs, strict=True)
        ]

    def _abandon(self, job: Job, sequences: Iterable[TrackedSequence]) -> None:
        """Mark sequences as finished, because their output is no longer needed.

        `_send_cancels` later cancels them in the engine loop.
        """
        for sequence in sequences:
            sequence.finished = True
            self._to_cancel.append(sequence.sequence_id)
        if not job.unfinished:
            self._beam_jobs.discard(job)

    def _take_unfinished_jobs(self) -> list[Job]:
        """Remove and return all unfinished jobs."""
        jobs = dict.fromkeys(
            sequence.job for sequence in self._sequences.values() if sequence.job.unfinished
        )
        jobs.update(dict.fromkeys(self._awaiting_ranks))
        self._sequences.clear()
        self._awaiting_ranks.clear()
        self._to_cancel.clear()
        return list(jobs)

    def _permanent_failure_error(self) -> UnavailableError:
        """The error of requests after a permanent failure.

        The transport sets `refusal` before it calls `ranks_lost`, which sets `down_reason`. If
        `down_reason` is not set yet, the error contains the text of `refusal`. A transport whose
        ranks are replaced by another server sets an UnavailableError, which allows a retry.
        """
        if isinstance(self._transport.refusal, UnavailableError):
            return self._transport.refusal
        reason = self.down_reason or str(self._transport.refusal)
        return UnavailableError(f"the engine has failed ({reason}); try another server", "STOPPED")

    def _loss_error(self, job: Job) -> PreambleError | None:
        """The error of a job after a loss of ranks; None: the job continues on new ranks."""
        if job.rank_losses > RANK_LOSSES_MAX:
            return EngineFaultError(
                "the engine was lost twice while this request was queued or running, so the "
                "request may be the cause; see the server's log"
            )
        if self.has_failed:
            return self._permanent_failure_error()
        if job.has_output and not job.final_only:
            return UnavailableError(
                f"the engine was lost after part of the answer was sent ({self.down_reason}); try "
                "again in a moment"
            )
        return None

    def _send_cancels(self) -> None:
        sequence_ids = [
            sequence_id for sequence_id in self._to_cancel if sequence_id in self._sequences
        ]
        self._to_cancel.clear()
        if sequence_ids:
            self._transport.send(Cancel(sequence_ids))

    def _cancel_recovery_timer(self) -> None:
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
            self._recovery_timer = None

    def _start_recovery_timer(self) -> None:
        """Limit the wait for new ranks to `load_s` + `warmup_s`, the time limits of their start."""
        limit_s = self._parallel_config.load_s + self._parallel_config.warmup_s
        self._recovery_timer = threading.Timer(limit_s, self._on_recovery_timeout)
        self._recovery_timer.daemon = True
        self._recovery_timer.start()

    # ----------------------------------------------------------------- called from any thread

    def _on_recovery_timeout(self) -> None:
        with self._lock:
            self._recovery_timer = None
            jobs, self._awaiting_ranks = self._awaiting_ranks, []
        error = UnavailableError(
            f"the engine was not restarted in time ({self.down_reason}); try again later"
        )
        self._deliver([(job, 0, error) for job in jobs])

    def _cancel_answers(self, job: Job, indices: Iterable[int]) -> None:
        """Cancel answers. All cancels of one event-loop iteration are sent in one message."""
        with self._lock:
            is_first = not self._to_cancel
            cancelled = set(indices)
            sequences = [
                sequence
                for sequence in job.unfinished
                if not cancelled.isdisjoint(sequence.answer_indices)
            ]
            self._abandon(job, sequences)
            if job in self._awaiting_ranks and not job.unfinished:
                self._awaiting_ranks.remove(job)
        if is_first:
            try:
                asyncio.get_running_loop().call_soon(self._flush_cancels)
            except RuntimeError:  # Not called from an event loop.
                self._flush_cancels()

    def _flush_cancels(self) -> None:
        with self._lock:
            self._send_cancels()

    def _deliver(self, events: Sequence[StreamEvent]) -> None:
        """Deliver events to their streams, with one wake-up per event loop, or defer them.

        They are deferred, and delivered together with later events, if all of them are deferrable
        (`is_deferrable`) and the last delivery was less than FINAL_ONLY_FLUSH_S ago.
        """
        now = time.monotonic()
        with self._lock:
            self._deferred_events += events
            if now - self._flushed_at < FINAL_ONLY_FLUSH_S and all(map(is_deferrable, events)):
                return
            events = self._deferred_events
            self._deferred_events = []
            self._flushed_at = now
        loops: dict[asyncio.AbstractEventLoop, list[StreamEvent]] = {}
        for event in coalesce_events(events):
            loops.setdefault(event[0].loop, []).append(event)
        for loop, loop_events in loops.items():
            try:
                loop.call_soon_threadsafe(
                    _push_events, loop_events, self._scheduler_config.gather_ms / 1000
                )
            except RuntimeError:  # The caller's event loop is closed.
                for job, _, _ in loop_events:
                    self._cancel_answers(job, range(len(job.request.answers)))


def _push_events(events: Sequence[StreamEvent], gather_s: float) -> None:
    pause_s = max(gather_s, len(events) * MESSAGE_COST_S / MESSAGE_CPU_SHARE_MAX)
    for job, index, payload in events:
        assert job.stream is not None
        if isinstance(payload, PreambleError):
            job.stream.fail(payload)
        else:
            job.stream.push_output(index, payload, float("inf") if job.final_only else pause_s)


def _add_lost_time(sequence: TrackedSequence, phases: Phases) -> Phases | None:
    """Return the phases with the lost time added to `queue_s`.

    The lost time is the time from the first to the latest submission, in which the sequence was on
    ranks that were lost, or waited for new ranks. None: the lost ranks had delivered the first
    token, so the phases have been reported already.
    """
    if sequence.has_generated:
        return None
    return msgspec.structs.replace(phases, queue_s=phases.queue_s + sequence.resubmit_delay_s)


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop in a new thread, and wait for it.

    This also works if an event loop is running in the caller's thread.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T] | None]] = Future()
    completion: Future[T] = Future()

    async def main() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    def run() -> None:
        try:
            completion.set_result(asyncio.run(main()))
        except BaseException as error:
            completion.set_exception(error)

    thread = threading.Thread(target=run, name="run-coroutine", daemon=True)
    thread.start()
    loop, task = started.result()
    try:
        return completion.result()
    except BaseException:
        # Ctrl-C in the caller also cancels the coroutine. If the coroutine itself failed, its loop
        # is closed already.
        with suppress(RuntimeError):
            assert task is not None
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
