"""In-process transport: the engine loop and its only rank in a thread of this process.

It serves programs that have already loaded a model: `preamble generate`, the Python API, tests. It
is an `EngineTransport` (serving/engine/transport.py) with one exception to the protocol: it does
not restart a lost rank, because it cannot load the caller's model again. The transports that run
ranks as processes are in `supervisor` and `torchrun_supervisor`.
"""

import logging
import threading

import torch

from gpt.errors import ConfigError, PreambleError
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer
from gpt.triton_runtime.compilations import observe_compilations
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.engine_core.engine_loop import build_engine_loop
from serving.messages import (
    Close,
    Failed,
    FromEngineLoop,
    KernelCompilation,
    Ready,
    ToEngineLoop,
    Update,
    WarmingUp,
)
from serving.ranks.rank_resources import with_index
from serving.worker.model_runner import ModelRunner
from serving.worker.startup import WorkerReport, measure_model

log = logging.getLogger(__name__)


class InProcessTransport:
    """Transport to a model that runs on one rank in this process.

    `tokenizer` is needed for guided decoding. `warm_up`: run the engine loop's warm-up steps before
    the engine is ready. `report`: the measurements of the worker's start-up (numbers of KV blocks
    and of weight bytes); None: the constructor makes these measurements.
    """

    def __init__(
        self,
        model: GPT,
        config: ServerConfig,
        tokenizer: Tokenizer | None = None,
        *,
        warm_up: bool = False,
        report: WorkerReport | None = None,
    ) -> None:
        mesh = model.mesh
        if mesh.ranks > 1:
            raise ConfigError(
                f"a model of {mesh.ranks} ranks cannot run in one process; serve it with "
                "`preamble serve`, or load it with tp = pp = ep = 1"
            )
        self._warm_up = warm_up
        self._has_adapters = config.adapter_config.adapters is not None
        self._device = with_index(mesh.device)
        self._report = report or measure_model(model, config.scheduler_config, config.cache_config)
        self._model_runner = ModelRunner(
            model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=config.uses_async_scheduling(mesh.device.type),
            blocks=self._report.kv_blocks,
            slots=config.scheduler_config.running_requests_max,
            tokenizer=tokenizer,
        )
        self._engine_loop = build_engine_loop(self._model_runner, config, self._on_message)
        if mesh.device.type == "cuda":
            observe_compilations(self._engine_loop.record_compilation)
        self._receiver: Receiver | None = None
        self._is_lost = False
        self.refusal: PreambleError | None = None  # If set, the engine failed permanently.
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def start(self, receiver: Receiver) -> None:
        """Start the engine loop's thread; returns at once."""
        self._receiver = receiver
        self._thread.start()

    def send(self, message: ToEngineLoop) -> None:
        """Queue a message for the engine loop; drop it if the loop has stopped. Thread-safe."""
        if not self._is_lost:
            self._engine_loop.put_message(message)

    def close(self, timeout_s: float = 10.0) -> None:
        """End all running sequences and the engine loop; wait up to `timeout_s` for its thread."""
        self._engine_loop.put_message(Close())
        if self._receiver is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        assert self._receiver is not None
        try:
            if self._device.type == "cuda":
                # Each thread has its own current device, which is GPU 0 in a new thread.
                torch.cuda.set_device(self._device)
            if self._warm_up:
                self._engine_loop.warm_up()
            self._receiver.ready(self._engine_loop.ready_message(self._report))
            self._model_runner.prefault_memory(has_adapters=self._has_adapters)
        except Exception as error:
            log.exception("event=not_ready")
            self._report_loss(f"{type(error).__name__}: {error}")
            return
        if self._engine_loop.run() is None:
            self._report_loss("the engine was closed")
        # Otherwise the engine loop has failed, and has sent `Failed`.

    def _on_message(self, message: FromEngineLoop) -> None:
        assert self._receiver is not None
        match message:
            case Update():
                self._receiver.update(message)
            case Failed():
                self._report_loss(message.reason)
            case Ready() | WarmingUp() | KernelCompilation():
                raise AssertionError("the transport sends Ready, not the engine loop")

    def _report_loss(self, reason: str) -> None:
        self._is_lost = True
        # The engine loop cannot be started again. Therefore `refusal` is set after every loss, even
        # after `close`.
        self.refusal = PreambleError(f"the engine has stopped ({reason}); create a new engine")
        assert self._receiver is not None
        self._receiver.ranks_lost(reason)
