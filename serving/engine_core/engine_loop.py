"""Engine loop: plans, launches and commits steps, publishes outputs, sends idle heartbeats.

The loop runs on rank 0, between the front end and the ranks. It has no policy: the scheduler
chooses the sequences, and the model runner computes them. At most one step per pipeline stage is in
flight, and one more with asynchronous scheduling. When a step has completed, its outcome is
committed to the scheduler, and its outputs are published before the loop launches another step.

An idle engine loop runs a heartbeat each second: a step without sequences, in which all ranks take
part. The update after it shows the watchdog (`serving.ranks.watchdog`) that no rank hangs.

`serving.ranks.rank` and `serving.ranks.in_process` create the engine loop. They call `warm_up`
(optional in process), send `ready_message` to the front end, and call `run`. This module is
independent of sockets and processes.
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

from gpt.cpu_inference.weight_packing import is_batch_invariant
from gpt.dtypes import FLOAT_DTYPE_NAMES
from serving.config import (
    AdapterConfig,
    CacheConfig,
    ObservabilityConfig,
    SchedulerConfig,
    ServerConfig,
)
from serving.engine_core.adapter_cache import AdapterCache, prefix_write_tokens_max
from serving.engine_core.adapter_reader import AdapterReadResult
from serving.engine_core.flight_recorder import FlightRecorder, crash_path
from serving.engine_core.warmup import warmup_steps
from serving.messages import (
    HEARTBEAT_INTERVAL_S,
    Cancel,
    Close,
    DumpFlightRecorder,
    EngineStats,
    Failed,
    FromEngineLoop,
    Halt,
    Outcome,
    Ready,
    SequenceOutput,
    Step,
    StepSize,
    StepTime,
    Submission,
    ToEngineLoop,
    Update,
    decode_outcome,
    encode,
)
from serving.scheduler.scheduler import Scheduler
from serving.worker.model_runner import ModelRunner, PendingOutcome
from serving.worker.startup import WorkerReport

log = logging.getLogger(__name__)

# If the scheduler has sequences but plans no step, and no step is in flight, the loop plans again
# after this time.
STALL_RETRY_S = 0.01
# If no sequence was in a step for this time although the scheduler has sequences, the engine fails,
# so that the waiting requests end with an error.
STALL_LIMIT_S = 10.0
CAPTURE_BUDGET_S = 60.0  # The time that start-up may spend on CUDA graph capture.


@dataclass(frozen=True)
class _LaunchedStep:
    """A step in flight. `pending` waits for the outcome; None: another rank sends the outcome."""

    step: Step
    size: StepSize
    pending: PendingOutcome | None


@dataclass(slots=True)
class _LiveSequence:
    """The engine loop's record of a sequence, from its submission to its end."""

    arrived_at: float
    adapter_digest: str = ""  # The adapter that the sequence pins in the adapter cache, if any.


class EngineLoop:
    """Receives submissions, runs steps, and sends their outputs to the front end.

    `put_message` may be called from any thread. The callbacks are called from the thread of `run`:

    - `send_to_frontend` sends a message to the front end. It must return quickly.
    - `send_step` sends an encoded `Step` or `Halt` to every other rank without waiting, and raises
      an exception if ranks are lost. It is None if there is no other rank.
    - `receive_outcome` waits for the next encoded outcome, and raises an exception if ranks are
      lost. It is None if this rank samples the tokens, because there is only one pipeline stage.

    The engine loop relies on the scheduler for this: each sequence passed to `add_sequence` ends
    with exactly one output whose `end` is set, returned by `add_sequence`, `commit` or `pop_ended`.
    The sequence's adapter stays pinned in the adapter cache until that output, so a planned step
    writes only rows of pinned adapters.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        observability_config: ObservabilityConfig,
        send_to_frontend: Callable[[FromEngineLoop], None],
        *,
        send_step: Callable[[bytes], None] | None = None,
        receive_outcome: Callable[[], bytes] | None = None,
        adapter_read_s: float = AdapterConfig.adapter_read_s,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._scheduler_config = scheduler_config
        self._block_tokens = cache_config.kv_block_tokens
        self._observability_config = observability_config
        self._send_to_frontend = send_to_frontend
        self._send_step = send_step
        self._receive_outcome = receive_outcome
        self._in_flight_max = runner.model.mesh.pp + runner.async_scheduling
        self._replayed_steps = 0  # Steps that replayed a CUDA graph.
        # Whether every step may capture a CUDA graph. After a warm-up only heartbeats may, so that
        # no request waits for a capture.
        self._captures_in_steps = True
        self._early_steps = 0  # Steps that asynchronous scheduling launched early.
        self._compiled_kernels = 0  # Kernels that Triton has compiled since `run` was called.
        self._inbox: queue.SimpleQueue[ToEngineLoop | AdapterReadResult] = queue.SimpleQueue()
        model_config = runner.model.config
        self._adapter_cache = AdapterCache(
            model_config,
            cache_config.adapter_bytes_max,
            self._inbox.put,
            read_limit_s=adapter_read_s,
        )
        self._live: dict[int, _LiveSequence] = {}  # Sequences that have not ended, by id.
        # By id: sequences that are not in the scheduler yet, because their adapter is not cached.
        self._waiting_for_adapter: dict[int, Submission] = {}
        self._live_max = scheduler_config.queue_requests_max + scheduler_config.running_requests_max
        self._in_flight: deque[_LaunchedStep] = deque()
        self._outputs: list[SequenceOutput] = []  # Not published yet.
        self._completed_steps: list[StepTime] = []  # Not published yet.
        self._last_step_at = self._last_progress_at = time.monotonic()
        self._inbox_wait_s = 0.0  # Seconds that the next read of the inbox may block.
        self._closed = False
        self._crash_lock = threading.Lock()
        self._is_crash_written = False
        self.flight_recorder = FlightRecorder(observability_config.flight_steps_max)

    def put_message(self, message: ToEngineLoop) -> None:
        """Queue a message for the loop; thread-safe, never waits for a step or a file."""
        self._inbox.put(message)
        # After the message: the loop must handle the result of the read after the submission.
        if isinstance(message, Submission) and message.adapter_ref is not None:
            self._adapter_cache.prefetch(message.adapter_ref)

    def record_compilation(self, kernel: str, seconds: float | None) -> None:
        """Count a kernel that Triton has compiled; `seconds` is None while it compiles the kernel.

        The next update contains the count.
        """
        if seconds is not None:
            self._compiled_kernels += 1

    def run(self) -> str | None:
        """Run until `Close` arrives, and return None.

        `Close` drops the steps in flight and the outputs that are not published; the front end has
        ended all requests before it sends `Close`. After an error, the error's text is sent to the
        front end in a `Failed` message, and returned.
        """
        reason = None
        self._compiled_kernels = 0  # The warm-up compiles the kernels that requests need.
        try:
            while not self._closed:
                self._iterate()
        except Exception as error:
            log.exception("event=planner_failed")
            reason = f"{type(error).__name__}: {error}"
            self.write_crash_dump(reason)
        finally:
            self._adapter_cache.close()
            self._halt_ranks()
        if reason is not None:
            try:
                self._send_to_frontend(Failed(reason))
            except Exception:  # The front end is lost, which may itself be the first error.
                log.warning("event=failure_not_given reason=%r", reason)
        return reason

    def _iterate(self) -> None:
        """One iteration: commit a completed step, read messages, plan a step and launch it."""
        if len(self._in_flight) >= self._in_flight_max:
            self._wait()
        self._read_inbox()
        now = time.monotonic()
        self._end_expired(now)
        step = self._scheduler.plan(now)
        self._record(self._scheduler.pop_ended())
        if step is not None:
            size = _size_of(step)
            self._publish(size)
            self._launch(step, size)
        elif self._in_flight:
            # The wait for the next outcome may be long. The watchdog counts the silence from the
            # last update, so each completed step is published before the wait for the next one.
            if self._outputs or self._completed_steps:
                self._publish()
            self._wait()
        elif now - self._last_step_at >= HEARTBEAT_INTERVAL_S:
            heartbeat = msgspec.structs.replace(self._scheduler.idle_step(), may_capture_graph=True)
            self._launch(heartbeat, StepSize())
            self._wait()
            self._publish()
        elif self._outputs or self._completed_steps:
            self._publish()
        else:
            self._inbox_wait_s = self._idle_wait_s(now)

    def _idle_wait_s(self, now: float) -> float:
        """Return the number of seconds that the idle loop may wait for a message."""
        if self._scheduler.has_unfinished:
            if now - self._last_progress_at > STALL_LIMIT_S:
                raise RuntimeError(
                    f"requests are waiting, but none could run for {STALL_LIMIT_S:g} s"
                )
            return STALL_RETRY_S
        self._last_progress_at = now
        wakeups = [self._last_step_at + HEARTBEAT_INTERVAL_S]
        wakeups += [
            submission.deadline
            for submission in self._waiting_for_adapter.values()
            if submission.deadline is not None
        ]
        return max(0.0, min(wakeups) - now)

    # ------------------------------------------------------------------------------------- steps

    def _launch(self, step: Step, size: StepSize) -> None:
        """Add the adapters' data to a step, send it to the other ranks, and launch it here."""
        if step.adapter_writes:
            adapter_writes = [
                msgspec.structs.replace(
                    adapter_write, data=self._adapter_cache.pinned_rows(adapter_write.digest)
                )
                for adapter_write in step.adapter_writes
            ]
            step = msgspec.structs.replace(step, adapter_writes=adapter_writes)
        if step.linear_writes:
            linear_writes = [
                msgspec.structs.replace(
                    linears_write,
                    linears=self._adapter_cache.pinned_linears(
                        linears_write.digest, linears_write.first, linears_write.count
                    ),
                )
                for linears_write in step.linear_writes
            ]
            step = msgspec.structs.replace(step, linear_writes=linear_writes)
        if step.prefix_writes:
            prefix_writes = [
                msgspec.structs.replace(
                    prefix_write,
                    data=self._adapter_cache.pinned_prefix_rows(
                        prefix_write.digest, prefix_write.start, prefix_write.count
                    ),
                )
                for prefix_write in step.prefix_writes
            ]
            step = msgspec.structs.replace(step, prefix_writes=prefix_writes)
        if self._captures_in_steps:
            step = msgspec.structs.replace(step, may_capture_graph=True)
        self.flight_recorder.record_step(step)
        if self._send_step is not None:
            self._send_step(encode(step))
        self._early_steps += len(self._in_flight) >= self._runner.model.mesh.pp
        self._in_flight.append(_LaunchedStep(step, size, self._runner.launch(step)))
        self._last_step_at = time.monotonic()
        if step.slots:
            self._last_progress_at = self._last_step_at

    def _wait(self) -> None:
        """Wait for the outcome of the oldest step in flight, and commit it."""
        size = self._in_flight[0].size
        step_outcome = self._next_outcome()
        if size.tokens:
            self._completed_steps.append(
                StepTime(size.tokens, size.context_tokens, step_outcome.seconds)
            )
        self._record(self._scheduler.commit(step_outcome, time.monotonic()))
        self._scheduler.check()

    def _next_outcome(self) -> Outcome:
        launched_step = self._in_flight.popleft()
        if launched_step.pending is not None:
            step_outcome = launched_step.pending()
        else:
            assert self._receive_outcome is not None, "the last stage is another rank"
            step_outcome = decode_outcome(self._receive_outcome())
        if step_outcome.step_id != launched_step.step.step_id:
            raise RuntimeError(
                f"expected the outcome of step {launched_step.step.step_id}, but received the "
                f"outcome of step {step_outcome.step_id}"
            )
        self.flight_recorder.record_outcome(step_outcome)
        self._replayed_steps += step_outcome.replayed
        self._last_step_at = time.monotonic()
        return step_outcome

    def _publish(self, next_size: StepSize | None = None) -> None:
        """Send an `Update`: outputs, statistics, the completed steps and the steps in flight.

        `next_size`: the size of the step that is launched directly after this call, if any. It
        already counts as a step in flight.
        """
        outputs, self._outputs = self._outputs, []
        completed_steps, self._completed_steps = self._completed_steps, []
        sizes = [launched_step.size for launched_step in self._in_flight]
        if next_size is not None:
            sizes.append(next_size)
        steps_in_flight = [size for size in sizes if size.tokens]
        counts = {
            "replayed_steps": self._replayed_steps,
            "early_steps": self._early_steps,
            "compiled_kernels": self._compiled_kernels,
            "failed_captures": self._runner.failed_captures,
        }
        stats = msgspec.structs.replace(self._scheduler.stats, **counts)
        if self._waiting_for_adapter:
            stats = msgspec.structs.replace(
                stats, waiting=stats.waiting + len(self._waiting_for_adapter)
            )
        adapter_changes = self._scheduler.pop_adapter_changes()
        self._send_to_frontend(
            Update(outputs, stats, completed_steps, steps_in_flight, adapter_changes)
        )

    # ---------------------------------------------------------------------------------- messages

    def _read_inbox(self) -> None:
        """Handle all messages in the inbox; block up to `_inbox_wait_s` for the first one."""
        wait_s, self._inbox_wait_s = self._inbox_wait_s, 0.0
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, message: ToEngineLoop | AdapterReadResult) -> None:
        match message:
            case Submission():
                self._submit(message)
            case Cancel():
                for sequence_id in message.sequence_ids:
                    if self._waiting_for_adapter.pop(sequence_id, None) is not None:
                        self._record([SequenceOutput(sequence_id, end="cancelled")])
                self._scheduler.cancel(message.sequence_ids)
            case AdapterReadResult():
                self._on_adapter_read(message)
            case DumpFlightRecorder():
                self.write_flight(message.path, "asked", with_token_ids=message.with_token_ids)
            case Close():
                self._closed = True

    def _submit(self, submission: Submission) -> None:
        assert submission.sequence_id not in self._live, "a sequence id is used twice"
        if len(self._live) >= self._live_max:
            reason = (
                f"{len(self._live)} requests are waiting or running already, the most that this "
                "server allows (queue_requests_max + running_requests_max); try again later"
            )
            self._outputs.append(SequenceOutput(submission.sequence_id, end="full", reason=reason))
            return
        self._live[submission.sequence_id] = _LiveSequence(time.monotonic())
        self._waiting_for_adapter[submission.sequence_id] = submission
        self._admit(submission)

    def _admit(self, submission: Submission) -> None:
        """Add a sequence to the scheduler; if its adapter is not cached, the sequence waits."""
        adapter_ref = submission.adapter_ref
        live = self._live[submission.sequence_id]
        now = time.monotonic()
        if adapter_ref is not None:
            if self._adapter_cache.pin(adapter_ref) != "pinned":
                return
            live.adapter_digest = adapter_ref.digest
        del self._waiting_for_adapter[submission.sequence_id]
        rejection = self._scheduler.add_sequence(submission, now, now - live.arrived_at)
        if rejection is not None:
            self._record([rejection])

    def _on_adapter_read(self, read_result: AdapterReadResult) -> None:
        self._adapter_cache.insert(read_result)
        if read_result.reason:
            failed_ids = [
                submission.sequence_id
                for submission in self._waiting_for_adapter.values()
                if submission.adapter_ref == read_result.adapter_ref
            ]
            self._end_waiting(
                failed_ids,
                lambda sequence_id: SequenceOutput(
                    sequence_id, end="adapter", reason=read_result.reason
                ),
            )
        self._retry_waiting()

    def _retry_waiting(self) -> None:
        for submission in list(self._waiting_for_adapter.values()):
            # If the scheduler rejects a sequence, `_record` unpins its adapter and calls this
            # method again. That inner call may have admitted later sequences of this list.
            if submission.sequence_id in self._waiting_for_adapter:
                self._admit(submission)

    def _end_expired(self, now: float) -> None:
        """End the sequences whose deadline has passed while they wait for an adapter."""
        expired_ids = [
            sequence_id
            for sequence_id, submission in self._waiting_for_adapter.items()
            if submission.deadline is not None and now >= submission.deadline
        ]
        self._end_waiting(
            expired_ids, lambda sequence_id: SequenceOutput(sequence_id, end="deadline")
        )

    def _end_waiting(
        self, sequence_ids: Sequence[int], make_output: Callable[[int], SequenceOutput]
    ) -> None:
        for sequence_id in sequence_ids:
            del self._waiting_for_adapter[sequence_id]
            self._record([make_output(sequence_id)])

    def _record(self, outputs: Sequence[SequenceOutput]) -> None:
        """Queue outputs for publication, and unpin the adapters of sequences that ended."""
        self._outputs += outputs
        has_released = False
        for output in outputs:
            if output.end is not None:
                digest = self._live.pop(output.sequence_id).adapter_digest
                if digest:
                    self._adapter_cache.unpin(digest)
                    has_released = True
        if has_released and self._waiting_for_adapter:
            self._retry_waiting()

    # ----------------------------------------------------------------------- warm-up and shutdown

    def warm_up(self) -> float:
        """Run the largest prefill chunk and full decode batches, and capture CUDA graphs.

        To be called before `run`; all ranks take part. The steps bypass the scheduler. Afterwards
        memory is allocated, kernels are compiled, and the KV blocks that were written are zero.
        Returns the seconds per token of the prefill chunk, measured in its second run, when all
        memory is allocated.
        """
        steps = warmup_steps(self._scheduler_config, self._block_tokens, self._runner)
        self._captures_in_steps = False
        durations_s = [self._run_warmup_step(step) for step in steps]
        capture_deadline = time.monotonic() + CAPTURE_BUDGET_S
        # Graphs that are not captured by the deadline are captured by heartbeats.
        while self._runner.has_missing_graphs and time.monotonic() < capture_deadline:
            self._run_warmup_step(Step(0, may_capture_graph=True))
        return durations_s[1] / sum(steps[1].lengths)

    def ready_message(self, report: WorkerReport) -> Ready:
        """Return the `Ready` message, which the caller sends after the warm-up.

        `report`: the combined start-up report of all ranks.
        """
        return Ready(
            kv_tokens=(self._runner.blocks - 1) // len(self._runner.windows) * self._block_tokens,
            sequence_kv_tokens=self._scheduler.sequence_kv_tokens,
            kv_blocks=self._runner.blocks - 1,  # Block 0 is never assigned.
            weight_bytes=report.weight_bytes,
            step_bytes=report.step_bytes,
            dtype=FLOAT_DTYPE_NAMES[self._runner.model.dtype],
            proof=report.proof,
            divergence=report.divergence,
            batch_invariant=is_batch_invariant(self._runner.model),
        )

    def _run_warmup_step(self, step: Step) -> float:
        self._launch(step, _size_of(step))
        return self._next_outcome().seconds

    def write_flight(self, path: str | Path, reason: str, *, with_token_ids: bool) -> None:
        """Write the flight recorder to a file. Thread-safe.

        It also works if the loop hangs or has failed: `serving.ranks.rank` handles a
        `DumpFlightRecorder` message by calling this from the thread that reads messages.
        """
        try:
            stats = self._scheduler.stats
        except Exception:  # The scheduler itself may be the cause of the crash.
            log.exception("event=load_unknown")
            stats = EngineStats()
        self.flight_recorder.write(path, reason, stats, with_token_ids=with_token_ids)

    def write_crash_dump(self, reason: str) -> None:
        """Write the flight recorder to a new file in `flight_dir`, once per process.

        Two threads may detect the exit of a rank: one by a closed channel, the other by a failed
        collective. The first of them writes the dump. The second one waits here until the dump is
        complete, because each of them ends the process after this call.
        """
        with self._crash_lock:
            if self._is_crash_written:
                return
            self._is_crash_written = True
            try:
                path = crash_path(self._observability_config.flight_dir)
                with_token_ids = self._observability_config.flight_ids
                self.write_flight(path, reason, with_token_ids=with_token_ids)
            except OSError as error:  # The crash must be reported even without a dump.
                log.warning("event=flight_not_written reason=%r", str(error))

    def _halt_ranks(self) -> None:
        if self._send_step is None:
            return
        try:
            self._send_step(encode(Halt()))
        except Exception as error:  # The ranks have exited already.
            log.info("event=halt_not_sent reason=%r", str(error))


def _size_of(step: Step) -> StepSize:
    return StepSize(sum(step.lengths), sum(step.past))


def build_engine_loop(
    runner: ModelRunner,
    config: ServerConfig,
    send_to_frontend: Callable[[FromEngineLoop], None],
    *,
    send_step: Callable[[bytes], None] | None = None,
    receive_outcome: Callable[[], bytes] | None = None,
) -> EngineLoop:
    """Return an engine loop for a model runner, with a scheduler for its KV blocks."""
    model_config, mesh = runner.model.config, runner.model.mesh
    scheduler = Scheduler(
        vocab_size=model_config.vocab_size,
        blocks=runner.blocks,
        scheduler_config=config.scheduler_config,
        cache_config=config.cache_config,
        context_tokens_max=model_config.max_position_embeddings,
        stages=mesh.pp,
        prefix_write_tokens_max=prefix_write_tokens_max(model_config),
        async_scheduling=runner.async_scheduling,
        windows=runner.windows,
    )
    return EngineLoop(
        scheduler,
        runner,
        config.scheduler_config,
        config.cache_config,
        config.observability_config,
        send_to_frontend,
        send_step=send_step,
        receive_outcome=receive_outcome,
        adapter_read_s=config.adapter_config.adapter_read_s,
    )
