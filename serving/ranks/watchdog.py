"""Watchdog: detects dead ranks and hung ranks; learns its step time-out from measured step times.

One thread waits for three events at once: a message of rank 0, the exit of a rank process, and the
end of a time limit. A rank is dead if its process exits before the supervisor is closed. The ranks
are hung if rank 0 sends no message for longer than the limit of the current phase: loading, warming
up or running. In the running phase, rank 0 sends a message after each step; an idle engine loop
runs a step without sequences every second as a heartbeat. The watchdog forwards `Ready` and the
updates of rank 0 to the receiver.

No fixed limit fits all steps: a long prefill step may take 10 s on slow hardware, but a decode step
of 10 s means that a rank hangs. The limit of a step (`StepTimeout`) is therefore learned. It is the
largest of three times: a minimum, 10 times the p99 of the recent step times, and 10 times the
expected time of the longest step in flight. The expected time is computed from the measured seconds
per token. While Triton compiles a kernel on any rank, the limit of the warm-up applies instead.

This module is independent of how ranks are started and of what happens after a loss.
"""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from serving.config import ParallelConfig
from serving.engine.transport import Receiver
from serving.messages import (
    HEARTBEAT_INTERVAL_S,
    Failed,
    KernelCompilation,
    Ready,
    StepSize,
    StepTime,
    Update,
    WarmingUp,
    decode_from_engine_loop,
)
from serving.ranks.message_socket import Channel

log = logging.getLogger(__name__)

# If poll() returns later than its time-out by more than this, this process itself was stopped or
# starved of CPU, perhaps together with the ranks. The delay then does not count as silence of the
# ranks.
LATE_WAKEUP_S = 0.5
# Longest wait of one poll(), whose time-out is a 32-bit number of milliseconds.
POLL_S_MAX = 3600.0
# A rank's sockets close shortly before its process exits. When rank 0's channel closes, or rank 0
# reports that another rank is lost, the watchdog waits at most this time for the exit, so that its
# report of the loss can contain the exit code.
EXIT_WAIT_S = 0.5

# For the learned limit of a step (`StepTimeout`): its minimum, the factor by which the measured and
# expected step times are multiplied, and the number of step times that are kept.
TIMEOUT_MIN_S = 2.0
TIMEOUT_FACTOR = 10.0
RECENT_STEPS = 256


@dataclass(frozen=True)
class RankSet:
    """The running ranks: rank 0's channel, and a pidfd for each rank process of this node."""

    channel: Channel
    descriptors: Mapping[int, int]  # pidfd by rank.
    # How a rank's process exited, such as "exited with code 1". None: the process still runs, or
    # the exit code is unknown.
    describe_exit: Callable[[int], str | None]


@dataclass(frozen=True)
class RankLoss:
    """Why the ranks were lost, or must be stopped."""

    reason: str
    # "dead": a rank process exited. "hung": rank 0 was silent beyond the limit.
    # "failed": rank 0 sent a `Failed` that is not permanent, or an invalid message.
    # "refused": rank 0 sent a permanent `Failed`. "closed": the supervisor closes.
    kind: str
    healthy_s: float = 0.0  # Seconds from `Ready` to the loss; 0: the ranks were never ready.


def readable_descriptors(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Wait until a file descriptor is readable, and return the readable ones.

    The set is empty after `timeout_s` or POLL_S_MAX, whichever is shorter. If `timeout_s` is None,
    there is no time limit. `select` would refuse descriptors of 1024 or more, which a server with
    many connections has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    wait_ms = None if timeout_s is None else 1000 * min(timeout_s, POLL_S_MAX)
    return {descriptor for descriptor, _ in poll.poll(wait_ms)}


class Waker:
    """Wakes the watchdog's thread from another thread, by an eventfd."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a call of `wake`; return whether `wake` was ever called."""
        return bool(readable_descriptors([self._descriptor], timeout_s))

    def close(self) -> None:
        os.close(self._descriptor)


class Watchdog:
    """Watches one set of ranks from its start to its loss.

    `on_ready` is called before `receiver.ready`.
    """

    def __init__(
        self,
        rank_set: RankSet,
        config: ParallelConfig,
        receiver: Receiver,
        waker: Waker,
        on_ready: Callable[[], None],
    ) -> None:
        self._rank_set = rank_set
        self._config = config
        self._receiver = receiver
        self._waker = waker
        self._on_ready = on_ready
        self._step_timeout = StepTimeout(config.step_timeout_s, config.warmup_s)
        self._phase = "loading"
        self._last_message_at = time.monotonic()
        self._ready_at: float | None = None
        self._compilations = 0  # Compilations that run now, on all ranks.

    def watch_until_lost(self) -> RankLoss:
        """Forward rank 0's messages until the ranks are lost or the waker is woken."""
        poll = select.poll()
        rank_by_descriptor = {
            descriptor: rank for rank, descriptor in self._rank_set.descriptors.items()
        }
        waker_descriptor = self._waker.fileno()
        channel_descriptor = self._rank_set.channel.fileno()
        for descriptor in (waker_descriptor, channel_descriptor, *rank_by_descriptor):
            poll.register(descriptor, select.POLLIN)
        while True:
            wait_s = max(0.0, self._wait_limit_s() - (time.monotonic() - self._last_message_at))
            wait_started = time.monotonic()
            readable = {descriptor for descriptor, _ in poll.poll(min(wait_s, POLL_S_MAX) * 1000)}
            late_s = time.monotonic() - wait_started - wait_s
            if late_s > LATE_WAKEUP_S:
                self._last_message_at += late_s
            if waker_descriptor in readable:
                return self._new_loss("the supervisor was closed", "closed")
            # The messages are read before exits are checked: rank 0's last messages may contain the
            # reason of an exit.
            loss = self._read_messages()
            exited_ranks = sorted(
                rank for descriptor, rank in rank_by_descriptor.items() if descriptor in readable
            )
            if loss is None and exited_ranks:
                loss = self._new_loss(self._exit_reason(exited_ranks[0]), "dead")
            if loss is None and not readable:
                loss = self._check_silence()
            if loss is not None:
                return loss

    def _wait_limit_s(self) -> float:
        """Return after how many seconds of silence `_check_silence` is called.

        In the running phase this is `limit_min_s`, which is cheap to compute. Once the silence has
        lasted for `limit_min_s`, it is `limit_s()`.
        """
        if self._phase == "loading":
            return self._config.load_s
        if self._phase == "warming up" or self._compilations > 0:
            return self._config.warmup_s
        silent_s = time.monotonic() - self._last_message_at
        limit_min_s = self._step_timeout.limit_min_s
        return limit_min_s if silent_s < limit_min_s else self._step_timeout.limit_s()

    def _check_silence(self) -> RankLoss | None:
        limit_s = self._wait_limit_s()
        if self._phase == "running" and not self._compilations:
            limit_s = self._step_timeout.limit_s()
        silent_s = time.monotonic() - self._last_message_at
        if silent_s < limit_s:
            return None
        return self._new_loss(
            f"the ranks sent no message for {silent_s:.1f} s while {self._phase} "
            f"(limit {limit_s:.1f} s)",
            "hung",
        )

    def _read_messages(self) -> RankLoss | None:
        """Handle every message that rank 0 has sent; return the loss that a message reports."""
        channel = self._rank_set.channel
        while channel.poll():
            frame = channel.receive()
            if frame is None:
                rank_zero = {
                    rank: descriptor
                    for rank, descriptor in self._rank_set.descriptors.items()
                    if rank == 0
                }
                wait_for_exit(rank_zero, EXIT_WAIT_S)
                return self._new_loss(self._exit_reason(0), "dead")
            try:
                loss = self._handle_frame(frame)
            except msgspec.DecodeError as error:
                loss = self._new_loss(f"rank 0 sent an invalid message ({error})", "failed")
            if loss is not None:
                return loss
        return None

    def _handle_frame(self, frame: bytes) -> RankLoss | None:
        message = decode_from_engine_loop(frame)
        self._last_message_at = time.monotonic()
        match message:
            case Update():
                self._step_timeout.record_steps(message.completed_steps, message.steps_in_flight)
                # An update before `Ready` has a step time from the warm-up, and no outputs.
                if self._phase == "running":
                    self._receiver.update(message)
            case KernelCompilation():
                self._compilations += 1 if message.seconds is None else -1
            case WarmingUp():
                self._phase = "warming up"
            case Ready():
                self._phase = "running"
                self._ready_at = self._last_message_at
                self._on_ready()
                self._receiver.ready(message)
            case Failed():
                if message.is_permanent:
                    return self._new_loss(message.reason, "refused")
                self._wait_for_exit_of_another_rank()
                return self._new_loss("; ".join([message.reason, *self._exit_reasons()]), "failed")
        return None

    def _wait_for_exit_of_another_rank(self) -> None:
        """Wait up to EXIT_WAIT_S until a rank other than rank 0 has exited.

        After a `Failed`, the other ranks exit at once, if the exit of one of them is not the cause.
        """
        others = [descriptor for rank, descriptor in self._rank_set.descriptors.items() if rank]
        if others:
            readable_descriptors(others, EXIT_WAIT_S)

    def _exit_reason(self, rank: int) -> str:
        return "; ".join(self._exit_reasons()) or f"rank {rank} exited"

    def _exit_reasons(self) -> list[str]:
        """Describe the exits of all rank processes: the exit noticed first may not be the cause."""
        exits = {rank: self._rank_set.describe_exit(rank) for rank in self._rank_set.descriptors}
        return [
            f"rank {rank} {description}"
            for rank, description in exits.items()
            if description is not None
        ]

    def _new_loss(self, reason: str, kind: str) -> RankLoss:
        healthy_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return RankLoss(reason, kind, healthy_s)


class StepTimeout:
    """Time limit of a step: the ranks count as hung when a step takes longer.

    `fixed_s`: the setting `step_timeout_s`; None: the limit is learned from the last `RECENT_STEPS`
    steps. `first_step_s`: the limit of a step while no step time is known.
    """

    def __init__(self, fixed_s: float | None, first_step_s: float) -> None:
        self._fixed_s = fixed_s
        self._first_step_s = first_step_s
        self._in_flight: Sequence[StepSize] = ()
        self._recent: deque[StepTime] = deque(maxlen=RECENT_STEPS)

    def record_steps(
        self, completed_steps: Iterable[StepTime], steps_in_flight: Sequence[StepSize]
    ) -> None:
        """Record the steps completed since the last call, and replace the steps in flight."""
        self._recent.extend(completed_steps)
        self._in_flight = steps_in_flight

    @property
    def limit_min_s(self) -> float:
        """Lower bound of `limit_s()`. Unlike `limit_s()`, it is cheap to compute."""
        return TIMEOUT_MIN_S if self._fixed_s is None else self._fixed_s

    def limit_s(self) -> float:
        """Seconds that the ranks may be silent, counted from their last message."""
        is_idle = not self._in_flight
        idle_s = HEARTBEAT_INTERVAL_S if is_idle else 0.0
        if self._fixed_s is not None:
            return self._fixed_s + idle_s
        if not self._recent:
            return TIMEOUT_MIN_S + idle_s if is_idle else self._first_step_s
        times = sorted(step_time.seconds for step_time in self._recent)
        p99_s = times[(len(times) - 1) * 99 // 100]
        expected_s = max((self._expected_s(size) for size in self._in_flight), default=0.0)
        return max(TIMEOUT_MIN_S, TIMEOUT_FACTOR * p99_s, TIMEOUT_FACTOR * expected_s) + idle_s

    def _expected_s(self, size: StepSize) -> float:
        """Expected seconds of a step: the time of its new tokens plus the time of its context."""
        new_tokens_s = _expected_seconds(
            ((step_time.tokens, step_time.seconds) for step_time in self._recent), size.tokens
        )
        context_s = _expected_seconds(
            ((step_time.context_tokens, step_time.seconds) for step_time in self._recent),
            size.context_tokens,
        )
        if size.context_tokens and not context_s:
            # No recent step had context tokens, so their time is unknown. `limit_s` multiplies the
            # returned time by TIMEOUT_FACTOR: the limit of this step is at least `first_step_s`.
            return self._first_step_s / TIMEOUT_FACTOR
        return new_tokens_s + context_s


def _expected_seconds(measurements: Iterable[tuple[int, float]], count: int) -> float:
    """Estimate the seconds for `count` tokens: `count` * max(seconds / tokens) over some steps.

    `measurements`: (tokens, seconds) of each step. The maximum is over the steps of at least
    `count` / 2 tokens. If all steps are smaller, it is over the steps with the most tokens. The
    estimate is then rather too high, because larger steps take fewer seconds per token. If no step
    has tokens, the estimate is 0.
    """
    measured_steps = [(tokens, seconds) for tokens, seconds in measurements if tokens > 0]
    if not measured_steps:
        return 0.0
    tokens_min = min(count / 2, max(tokens for tokens, _ in measured_steps))
    # The parentheses avoid a rounding error: count / tokens is exactly 1 for a step of `count`
    # tokens, so the estimate is not below the measured seconds of that step.
    return max(
        seconds * (count / tokens) for tokens, seconds in measured_steps if tokens >= tokens_min
    )


def wait_for_exit(descriptors: Mapping[int, int], timeout_s: float) -> bool:
    """Wait until all processes have exited; return False if some still run after `timeout_s`.

    `descriptors`: a pidfd by rank.
    """
    deadline = time.monotonic() + timeout_s
    open_descriptors = set(descriptors.values())
    while open_descriptors:
        wait_s = deadline - time.monotonic()
        ended = readable_descriptors(open_descriptors, max(0.0, wait_s))
        open_descriptors -= ended
        if not ended and wait_s <= 0:
            return False
    return True


def close_descriptors(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors.values():
        with suppress(OSError):
            os.close(descriptor)
