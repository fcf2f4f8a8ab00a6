"""An engine whose ranks can be lost when a test says so."""

import time

from gpt.errors import PreambleError
from gpt.model.gpt_model import GPT
from serving.engine.engine import Engine
from serving.engine.transport import Receiver
from serving.messages import Ready, ToPlanner, Update
from serving.ranks.in_process import Inside
from tests.support.engine_requests import CONFIG, TOKENIZER


class Fragile:
    """A link whose ranks can be lost, and come back when asked; behind it is a real planner."""

    refusal: PreambleError | None = None

    def __init__(self, model: GPT) -> None:
        self.pace_s = 0.0  # So much longer each step takes, for what has to happen in between.
        self._model = model
        self._receiver: Receiver | None = None
        self._inside: Inside | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._inside = Inside(self._model, CONFIG)
        self._inside.start(self)

    def ready(self, facts: Ready) -> None:
        assert self._receiver is not None
        self._receiver.ready(facts)

    def update(self, update: Update) -> None:
        assert self._receiver is not None
        time.sleep(self.pace_s)
        if self._inside is not None:
            self._receiver.update(update)

    def lost(self, reason: str) -> None:
        """The planner's own word that it was closed."""

    def send(self, message: ToPlanner) -> None:
        if self._inside is not None:
            self._inside.send(message)

    def lose(self) -> None:
        assert self._inside is not None and self._receiver is not None
        inside, self._inside = self._inside, None
        inside.close()
        self._receiver.lost("rank 0 was ended by SIGKILL")

    def close(self, timeout_s: float = 10.0) -> None:
        if self._inside is not None:
            self._inside.close(timeout_s)


def broken_engine(model: GPT) -> tuple[Fragile, Engine]:
    link = Fragile(model)
    engine = Engine(link, TOKENIZER, CONFIG)
    engine.start()
    engine.wait()
    return link, engine
