"""The engine in this process: a planner and its only rank, in a thread.

For a program that has a model already: `preamble generate`, the Python API, tests. It keeps the
promises of a link but one: what is lost stays lost, since the model it was given is all it has.
Several ranks, and starting again after a loss, are the supervisor's business.
"""

import logging
import threading

from gpt.backends.cpu_packing import batch_invariant
from gpt.cpu import kernels
from gpt.errors import ConfigError, PreambleError
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.messages import Close, Failed, FromPlanner, Ready, ToPlanner, Update, Warming
from serving.scheduler.scheduler import Scheduler
from serving.worker.adapter_cache import fill_tokens_max
from serving.worker.engine_loop import Planner
from serving.worker.model_runner import Runner, blocks_that_fit

log = logging.getLogger(__name__)


class Inside:
    """A link to a model of one rank. The tokenizer is for guides only; `digest` names the model."""

    def __init__(
        self,
        model: GPT,
        config: ServerConfig,
        tokenizer: Tokenizer | None = None,
        *,
        digest: str = "",
        warm: bool = False,
        weight_bytes: int | None = None,  # None: of the parameters. A packed model has fewer.
    ) -> None:
        mesh = model.mesh
        if mesh.tp * mesh.pp > 1:
            raise ConfigError(f"a model of {mesh.tp * mesh.pp} ranks needs as many processes")
        self._warm = warm
        if weight_bytes is None:
            weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._weight_bytes = weight_bytes
        blocks = blocks_that_fit(model, config)
        slots = config.running_requests_max
        self._runner = Runner(model, config, blocks=blocks, slots=slots, tokenizer=tokenizer)
        scheduler = Scheduler(
            vocab_size=model.config.vocab_size,
            blocks=blocks,
            config=config,
            context_tokens_max=model.config.max_position_embeddings,
            digest=digest,
            fill_tokens_max=fill_tokens_max(model.config),
            ahead=config.steps_ahead(mesh.device.type),
        )
        self._config = config
        self._planner = Planner(scheduler, self._runner, config, self._give)
        self._receiver: Receiver | None = None
        self._gone = False
        self.refusal: PreambleError | None = None  # Set: no `ready` will follow.
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def start(self, receiver: Receiver) -> None:
        """Begin to answer; returns at once."""
        self._receiver = receiver
        kernels.rest()  # This thread has loaded the model; another runs it.
        self._thread.start()

    def send(self, message: ToPlanner) -> None:
        """Thread-safe, never waits for a step. What is sent after a loss is dropped."""
        if not self._gone:
            self._planner.put(message)

    def close(self, timeout_s: float = 10.0) -> None:
        """End what runs, and the thread."""
        self._planner.put(Close())
        if self._receiver is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        assert self._receiver is not None
        model = self._runner.model
        try:
            if self._warm:
                self._planner.warm_up()
            ready = Ready(
                kv_tokens=(self._runner.blocks - 1) * self._config.kv_block_tokens,
                weight_bytes=self._weight_bytes,
                dtype=str(model.dtype).removeprefix("torch."),
                batch_invariant=batch_invariant(model),
            )
            self._receiver.ready(ready)
            self._runner.populate()
        except Exception as error:
            log.exception("event=not_ready")
            self._lose(f"{type(error).__name__}: {error}")
            return
        if self._planner.run() is None:
            self._lose("the engine was closed")

    def _give(self, message: FromPlanner) -> None:
        assert self._receiver is not None
        match message:
            case Update():
                self._receiver.update(message)
            case Failed():
                self._lose(message.reason)
            case Ready() | Warming():
                raise AssertionError("a planner does not know when it is ready")

    def _lose(self, reason: str) -> None:
        self._gone = True
        self.refusal = PreambleError(f"the engine has ended ({reason}); open it again")
        assert self._receiver is not None
        self._receiver.lost(reason)
