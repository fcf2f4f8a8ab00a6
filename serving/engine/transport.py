"""Between the front end and whatever runs the model: a link to send on, a receiver that is called.

The engine does not know whether its planner is a thread here or ranks on many nodes. A link loses
its ranks and gets new ones by itself; who uses it is told.
"""

from typing import Protocol

from gpt.errors import PreambleError
from serving.messages import Ready, ToPlanner, Update


class Receiver(Protocol):
    """Called from a thread of the link's own, one call at a time."""

    def ready(self, facts: Ready) -> None:
        """Submissions are taken from now on. Again after every loss."""

    def update(self, update: Update) -> None: ...

    def lost(self, reason: str) -> None:
        """The ranks are gone, and all that was sent to them.

        A `ready` follows, unless the link was closed or has a refusal.
        """


class Link(Protocol):
    @property
    def refusal(self) -> PreambleError | None:
        """Why no `ready` will follow any more. Set before `lost` is called."""

    def start(self, receiver: Receiver) -> None:
        """Begin to start the ranks; returns at once."""

    def send(self, message: ToPlanner) -> None:
        """Thread-safe, never waits for a step. What is sent while the ranks are gone is dropped."""

    def close(self, timeout_s: float = 10.0) -> None:
        """End the ranks. Returns when they have ended, by force after the timeout."""
