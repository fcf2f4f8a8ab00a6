"""An engine whose ranks a test can lose."""

from gpt.errors import PreambleError
from gpt.model.gpt_model import GPT
from serving.engine.engine import Engine
from serving.engine.transport import Receiver
from serving.messages import Ready, ToEngineLoop, Update
from serving.ranks.in_process import InProcessTransport
from tests.support.engine_requests import CONFIG, TOKENIZER
from tests.support.recording_receiver import Gate


class LossyTransport:
    """A transport to a real engine loop whose ranks can be lost, and restarted."""

    refusal: PreambleError | None = None

    def __init__(self, model: GPT) -> None:
        self.gate = Gate()
        self._model = model
        self._receiver: Receiver | None = None
        self._transport: InProcessTransport | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._transport = InProcessTransport(self._model, CONFIG)
        self._transport.start(self)

    def ready(self, facts: Ready) -> None:
        assert self._receiver is not None
        self._receiver.ready(facts)

    def update(self, update: Update) -> None:
        assert self._receiver is not None
        self.gate.passes(update)
        if self._transport is not None:
            self._receiver.update(update)

    def ranks_lost(self, reason: str) -> None:
        """The engine loop reports that it was closed."""

    def send(self, message: ToEngineLoop) -> None:
        if self._transport is not None:
            self._transport.send(message)

    def lose(self) -> None:
        assert self._transport is not None and self._receiver is not None
        transport = self._transport
        self._transport = None
        self.gate.allow(None)  # The step that the gate holds is lost with the ranks.
        transport.close()
        self._receiver.ranks_lost("rank 0 was ended by SIGKILL")

    def close(self, timeout_s: float = 10.0) -> None:
        self.gate.allow(None)
        if self._transport is not None:
            self._transport.close(timeout_s)


def engine_with_lossy_transport(model: GPT) -> tuple[LossyTransport, Engine]:
    link = LossyTransport(model)
    engine = Engine(
        link,
        TOKENIZER,
        CONFIG.scheduler_config,
        CONFIG.parallel_config,
        CONFIG.observability_config,
    )
    engine.start()
    engine.wait()
    return link, engine
