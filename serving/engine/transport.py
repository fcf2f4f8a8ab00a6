"""Engine transport: the protocol between the engine's front end and the ranks' engine loop.

The engine does not know whether the engine loop is a thread of this process or runs with ranks on
many nodes. A transport that loses its ranks starts new ones itself and notifies its receiver.
"""

from typing import Protocol

from gpt.errors import PreambleError
from serving.messages import Ready, ToEngineLoop, Update


class Receiver(Protocol):
    """The callbacks of a transport; they run on the transport's thread, one call at a time."""

    def ready(self, message: Ready) -> None:
        """Called when the ranks accept submissions: after the start and after each recovery."""

    def update(self, update: Update) -> None:
        """Called with outputs of steps and with statistics, after steps and heartbeats."""

    def ranks_lost(self, reason: str) -> None:
        """Called when the ranks were lost. All messages that were sent to them are lost too.

        `ready` follows when new ranks have started, unless the transport was closed or has failed
        permanently (see `EngineTransport.refusal`).
        """


class EngineTransport(Protocol):
    """Starts the ranks, sends messages to their engine loop, and ends the ranks."""

    @property
    def refusal(self) -> PreambleError | None:
        """The error of a permanent failure, set before `ranks_lost`; None: no such failure.

        After a permanent failure, no `ready` follows.
        """

    def start(self, receiver: Receiver) -> None:
        """Start the ranks in the background and return at once."""

    def send(self, message: ToEngineLoop) -> None:
        """Send a message without waiting for a step. Thread-safe.

        If there are no ranks, the message is dropped.
        """

    def close(self, timeout_s: float = 10.0) -> None:
        """End the ranks and wait until they have ended; kill them after the timeout."""
