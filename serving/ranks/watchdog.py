"""Watching ranks: their messages are handed on, and their end is seen, whether dead or hung.

One thread waits at once for rank 0's channel, for the end of each process and for a limit of time.
Dead is an end that was not asked for; hung is silence beyond the limit of the phase: loading,
warming up, a step, idleness. How ranks are started, and what is done about a loss, is not known
here.
"""

import logging
import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.messages import Failed, Ready, Update, Warming, from_planner
from serving.ranks.message_socket import Channel
from serving.ranks.step_timeout import Patience

log = logging.getLogger(__name__)

# A wait that takes this much longer than asked: it is this process that was stopped or starved, and
# the ranks perhaps with it, so they get that time again.
LATE_S = 0.5
ENDING_S = 0.5


@dataclass(frozen=True)
class Running:
    """A set of ranks: rank 0's channel, and for each rank here a descriptor that tells its end."""

    channel: Channel
    descriptors: Mapping[int, int]  # By rank.
    # How a rank ended, as a sentence, for one that has. None: nobody knows.
    ending: Callable[[int], str | None]


@dataclass(frozen=True)
class Loss:
    """Why the ranks are gone, or have to go."""

    reason: str
    kind: str  # "dead", "hung", "failed", "refused" or "closed".
    healthy_s: float = 0.0  # How long they had answered.


class Waker:
    """What another thread wakes the watching one with."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was woken, now or at any time before."""
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def close(self) -> None:
        os.close(self._descriptor)


class Watch:
    """One set of ranks, from its start to its loss. `ready` is called before the receiver's."""

    def __init__(
        self,
        running: Running,
        config: ServerConfig,
        receiver: Receiver,
        waker: Waker,
        ready: Callable[[Ready], None],
    ) -> None:
        self._running, self._config, self._receiver = running, config, receiver
        self._waker, self._tell_ready = waker, ready
        self._patience = Patience(config.step_timeout_s, config.warmup_s, config.pp)
        self._phase = "loading"
        self._heard = time.monotonic()
        self._ready_at: float | None = None

    def until_lost(self) -> Loss:
        poll = select.poll()
        ranks = {number: rank for rank, number in self._running.descriptors.items()}
        for number in (self._waker.fileno(), self._running.channel.fileno(), *ranks):
            poll.register(number, select.POLLIN)
        while True:
            wait_s = max(0.0, self._look_s() - (time.monotonic() - self._heard))
            asked = time.monotonic()
            ready = {number for number, _ in poll.poll(wait_s * 1000)}
            late_s = time.monotonic() - asked - wait_s
            if late_s > LATE_S:
                self._heard += late_s
            if self._waker.fileno() in ready:
                return self._loss("it was closed", "closed")
            # What rank 0 said last may be the reason, so it is read before an end is believed.
            loss = self._listen()
            ended = sorted(ranks[number] for number in ready if number in ranks)
            if loss is None and ended:
                loss = self._loss(self._ended(ended[0]), "dead")
            if loss is None and not ready:
                loss = self._silence()
            if loss is not None:
                return loss

    def _look_s(self) -> float:
        """How long to wait before the limit is asked for, which costs something."""
        if self._phase == "loading":
            return self._config.load_s
        if self._phase == "warming up":
            return self._config.warmup_s
        silent_s = time.monotonic() - self._heard
        least_s = self._patience.least_s
        return least_s if silent_s < least_s else self._patience.limit_s()

    def _silence(self) -> Loss | None:
        limit_s = self._look_s()
        if self._phase == "running":
            limit_s = self._patience.limit_s()
        silent_s = time.monotonic() - self._heard
        if silent_s < limit_s:
            return None
        what = f"said nothing for {silent_s:.1f} s while {self._phase} (limit {limit_s:.1f} s)"
        return self._loss(f"the ranks {what}", "hung")

    def _listen(self) -> Loss | None:
        """Take all that is there."""
        channel = self._running.channel
        while channel.poll():
            frame = channel.receive()
            if frame is None:
                own = {rank: it for rank, it in self._running.descriptors.items() if rank == 0}
                gone(own, ENDING_S)  # Its channel ends a little before it does.
                return self._loss(self._ended(0), "dead")
            try:
                loss = self._take(frame)
            except msgspec.DecodeError as error:
                loss = self._loss(f"rank 0 said what is no message ({error})", "failed")
            if loss is not None:
                return loss
        return None

    def _take(self, frame: bytes) -> Loss | None:
        message = from_planner(frame)
        self._heard = time.monotonic()
        match message:
            case Update():
                self._patience.note(message.step_tokens, message.step_context, message.seconds)
                if self._phase == "running":  # Before, they tell how long first steps took.
                    self._receiver.update(message)
            case Warming():
                self._phase = "warming up"
            case Ready():
                self._phase = "running"
                self._ready_at = self._heard
                self._tell_ready(message)
                self._receiver.ready(message)
            case Failed():
                if message.refused:
                    return self._loss(message.reason, "refused")
                return self._loss("; ".join([message.reason, *self._endings()]), "failed")
        return None

    def _ended(self, rank: int) -> str:
        return "; ".join(self._endings()) or f"rank {rank} has ended"

    def _endings(self) -> list[str]:
        """Of all that have ended: the first that we hear of may be a victim of another's end."""
        ends = {rank: self._running.ending(rank) for rank in self._running.descriptors}
        return [f"rank {rank} {how}" for rank, how in ends.items() if how is not None]

    def _loss(self, reason: str, kind: str) -> Loss:
        healthy_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return Loss(reason, kind, healthy_s)


def gone(descriptors: Mapping[int, int], timeout_s: float) -> bool:
    """Whether all these processes have ended, before the time is over."""
    end = time.monotonic() + timeout_s
    left = set(descriptors.values())
    while left:
        wait_s = end - time.monotonic()
        ended = select.select(list(left), [], [], max(0.0, wait_s))[0]
        left -= set(ended)
        if not ended and wait_s <= 0:
            return False
    return True


def close_all(descriptors: Mapping[int, int]) -> None:
    for number in descriptors.values():
        with suppress(OSError):
            os.close(number)
