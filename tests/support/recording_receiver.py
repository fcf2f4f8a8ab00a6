"""A receiver that records an engine transport's messages, in place of the engine.

The module also has a gate between a transport and an engine, for actions while a request runs.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpt.sampling_params import SamplingParams
from serving.engine.engine import Engine
from serving.engine.transport import EngineTransport
from serving.messages import Ready, SequenceOutput, Submission, Update
from tests.support.servers import WAIT_S


class Gate:
    """Blocks the engine loop's thread after a number of updates.

    While the thread is blocked, a test can act before a request ends, even if a busy machine delays
    the test.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None  # Updates that may still pass; None: all.
        self._blocked = 0

    def allow(self, steps: int | None) -> None:
        """Let this number of updates pass, and block the next one; None: block none."""
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def passes(self, update: Update) -> None:
        """The delivering thread calls it. An idle engine's heartbeat is never blocked."""
        if not update.outputs and not update.stats.running:
            return
        with self._changed:
            self._blocked += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._left != 0, WAIT_S), "the gate stayed closed"
            self._blocked -= 1
            if self._left is not None:
                self._left -= 1

    def until_blocked(self) -> None:
        with self._changed:
            shut = self._changed.wait_for(lambda: self._blocked and self._left == 0, WAIT_S)
            assert shut, "no step came to the gate"


@contextmanager
def gate_updates(engine: Engine, steps: int) -> Iterator[Gate]:
    """Block the engine's updates after `steps` of them until the gate lets more pass."""
    gate = Gate()
    deliver = engine.update

    def deliver_gated(update: Update) -> None:
        gate.passes(update)
        deliver(update)

    gate.allow(steps)
    vars(engine)["update"] = deliver_gated
    try:
        yield gate
    finally:
        del vars(engine)["update"]
        gate.allow(None)


class RecordingReceiver:
    """Records every message; waits have a time-out, and times are on the monotonic clock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.readies: list[tuple[float, Ready]] = []
        self.losses: list[tuple[float, str]] = []
        self.updates = 0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, SequenceOutput] = {}

    def ready(self, facts: Ready) -> None:
        with self._changed:
            self.readies.append((time.monotonic(), facts))
            self._changed.notify_all()

    def update(self, update: Update) -> None:
        with self._changed:
            self.updates += 1
            for output in update.outputs:
                self.tokens[output.sequence_id] += output.tokens
                if output.end is not None:
                    self.ends[output.sequence_id] = output
            self._changed.notify_all()

    def ranks_lost(self, reason: str) -> None:
        with self._changed:
            self.losses.append((time.monotonic(), reason))
            self._changed.notify_all()

    def until(self, holds: Callable[[], object], within_s: float) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, within_s), f"still not so after {within_s} s"


def until_ready(link: EngineTransport, receiver: RecordingReceiver, within_s: float) -> Ready:
    """The latest message that the ranks are ready; raises the error of a permanent failure."""
    receiver.until(lambda: receiver.readies or link.refusal, within_s)
    if link.refusal is not None:
        raise link.refusal
    return receiver.readies[-1][1]


def complete(
    link: EngineTransport,
    receiver: RecordingReceiver,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    first: int,
    within_s: float,
) -> list[list[int]]:
    """Greedy completions of all prompts at once. `first` numbers them; each number is used once."""
    numbers = range(first, first + len(prompts))
    for number, prompt in zip(numbers, prompts, strict=True):
        link.send(Submission(number, list(prompt), SamplingParams(max_new_tokens=count)))
    receiver.until(lambda: all(number in receiver.ends for number in numbers), within_s)
    assert {receiver.ends[number].end for number in numbers} == {"length"}
    return [receiver.tokens[number] for number in numbers]
