"""Rank: a worker process that joins the mesh, loads its shard, and runs steps until it must exit.

Rank 0 also runs the engine loop, which plans the steps; the other ranks run the steps that they
receive. A rank exits when one of its control channels closes, when a collective fails, or when the
front end exits. After the loss of one rank, all ranks are started again. This module is independent
of how a rank's process is started.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from gpt.garbage_collection import freeze_startup_objects, make_full_collections_rare
from gpt.model.loading import check_dtype
from gpt.parallel.collectives import warm_up_groups
from gpt.parallel.mesh import Mesh, join_world
from gpt.parallel.symmetric_memory import use_symmetric_memory
from gpt.triton_runtime.compilations import observe_compilations
from serving.config import ServerConfig
from serving.engine_core.engine_loop import EngineLoop, build_engine_loop
from serving.messages import (
    Close,
    DumpFlightRecorder,
    EngineStats,
    Failed,
    FromEngineLoop,
    Halt,
    KernelCompilation,
    StepTime,
    Update,
    WarmingUp,
    decode_from_engine_loop,
    decode_to_engine_loop,
    decode_to_rank,
    encode,
)
from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import RankChannels, Store, start_reader
from serving.ranks.rank_position import RankPosition
from serving.ranks.rank_resources import RankDevice, select_rank_device
from serving.ranks.startup_exchange import StartupExchange, StartupFailedError
from serving.worker.model_runner import ModelRunner
from serving.worker.startup import (
    WorkerCheckpoint,
    WorkerReport,
    build_worker,
    combine_reports,
    open_for_serving,
)

log = logging.getLogger(__name__)

PACKED_HALT = encode(Halt())
# After a failed collective, a rank waits this long for a control channel to close.
COLLECTIVE_FAILURE_GRACE_S = 0.3
DRAIN_S = 5.0  # Rank 0 waits this long for the other ranks to exit after the last step.


class Rank:
    """One rank: `run` loads its shard of the model and runs steps until the rank is stopped.

    `host`: rank 0's address. `frontend`: rank 0's channel to the front end; None on other ranks.
    `on_drain` is called on rank 0 after a call of `request_drain` on any rank.
    """

    def __init__(
        self,
        position: RankPosition,
        config: ServerConfig,
        store: Store,
        host: str,
        frontend: Channel | None = None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._position = position
        self._config = config
        self._store = store
        self._frontend = frontend
        self._is_stopping = False
        self._engine_loop: EngineLoop | None = None
        self._on_drain = on_drain
        self._channels = RankChannels.connect_ranks(
            store,
            position,
            host,
            config.parallel_config.load_s,
            on_ended=self._on_rank_lost,
            on_drain_requested=on_drain,
            on_notice=self._on_notice,
        )
        if frontend is not None:
            start_reader(
                {0: frontend},
                lambda _, frame: self._handle_message(frame),
                lambda _: self._on_frontend_lost(),
            )

    def run(self) -> int:
        """Start up, run steps until stopped, and return the exit code."""
        try:
            model_runner = self._start_up()
        except StartupFailedError:
            return 1
        freeze_startup_objects()
        make_full_collections_rare()
        # Returns at once: background threads do the work.
        model_runner.prefault_memory(has_adapters=self._config.adapter_config.adapters is not None)
        if self._position.rank > 0:
            return self._run_follower(model_runner)
        assert self._engine_loop is not None
        if self._engine_loop.run() is not None:  # The engine loop failed, and has sent `Failed`.
            return 1
        self._is_stopping = True
        self._channels.drain(DRAIN_S)
        return 0

    def request_drain(self) -> None:
        """Ask the front end to drain. Thread-safe; any rank may call it."""
        if self._position.rank == 0:
            self._on_drain()
        else:
            self._channels.request_drain()

    # ------------------------------------------------------------------------------------ start-up

    def _start_up(self) -> ModelRunner:
        """Join the mesh, load this rank's shard, and return its model runner.

        Rank 0 also creates and warms up the engine loop. Most of the start-up runs in phases, which
        end on all ranks together (`StartupExchange`). Joining the mesh, creating the model runner
        and the warm-up are not phases: after an error in one of them, other ranks may wait in a
        collective and cannot take part in an exchange. The error is logged and ends this process;
        then all ranks are restarted.
        """
        config, position = self._config, self._position
        exchange = StartupExchange(self._channels, position, self._send_to_frontend)
        checkpoint, device = exchange.run_phase(self._open_checkpoint)
        if device.device.type == "cuda":
            observe_compilations(self._report_compilation)
        shares_device = any(exchange.all_gather(device.is_shared))
        worker = build_worker(
            checkpoint,
            self._join_mesh(device.device, shares_device=shares_device),
            config,
            run_phase=exchange.run_phase,
            ranks_sharing_memory=device.ranks_sharing_memory,
        )
        report = combine_reports(exchange.all_gather(worker.report))
        model_runner = ModelRunner(
            worker.model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=config.uses_async_scheduling(device.device.type),
            blocks=report.kv_blocks,
            slots=config.scheduler_config.running_requests_max,
            tokenizer=checkpoint.tokenizer,
        )
        if position.rank == 0:
            self._start_engine_loop(model_runner, report)
        return model_runner

    def _open_checkpoint(self) -> tuple[WorkerCheckpoint, RankDevice]:
        check_dtype(self._config.model_config.dtype)
        device = select_rank_device(self._config.model_config.device, self._position)
        return open_for_serving(self._config, device.device), device

    def _join_mesh(self, device: torch.device, *, shares_device: bool) -> Mesh:
        """Join the mesh of all ranks. `shares_device`: see `join_world`."""
        config, position = self._config.parallel_config, self._position
        if position.world_size == 1:
            return Mesh.single(device)
        join_world(
            device,
            timeout_s=config.load_s,
            stages=config.pp,
            shares_device=shares_device,
            store=dist.PrefixStore("torch", self._store),  # type: ignore[attr-defined,arg-type]
            rank=position.rank,
            world_size=position.world_size,
        )
        mesh = Mesh.create(config.tp, config.pp, ep=config.ep, device=device)
        mesh = use_symmetric_memory(mesh) if device.type == "cuda" else mesh
        warm_up_groups(mesh)  # Before the free memory is measured.
        return mesh

    def _start_engine_loop(self, model_runner: ModelRunner, report: WorkerReport) -> None:
        """Create the engine loop, warm it up, and tell the front end that the ranks are ready."""
        config = self._config
        # Only the first rank of the last stage returns outcomes (`ModelRunner.run_step`).
        last_stage_rank = self._position.world_size - config.parallel_config.stage_ranks
        self._engine_loop = build_engine_loop(
            model_runner,
            config,
            self._send_to_frontend,
            send_step=self._broadcast_step if self._position.world_size > 1 else None,
            receive_outcome=(lambda: self._channels.receive(last_stage_rank))
            if last_stage_rank > 0
            else None,
        )
        self._send_to_frontend(WarmingUp())
        prefill_s_per_token = self._engine_loop.warm_up()
        # The first step time that the watchdog records is an estimate for the largest step:
        # step_tokens_max * (seconds per token in the warm-up).
        tokens = config.scheduler_config.step_tokens_max
        largest_step = StepTime(tokens, 0, prefill_s_per_token * tokens)
        self._send_to_frontend(Update([], EngineStats(), completed_steps=[largest_step]))
        self._send_to_frontend(self._engine_loop.ready_message(report))

    # ---------------------------------------------------------------------------------------- steps

    def _run_follower(self, model_runner: ModelRunner) -> int:
        """Run the steps that rank 0 sends until it sends `Halt`; return the exit code."""
        while True:
            step = decode_to_rank(self._channels.receive(0))
            if isinstance(step, Halt):
                self._is_stopping = True
                return 0
            try:
                outcome = model_runner.run_step(step)
            except RuntimeError:
                # If a collective failed because another rank exited, a control channel closes
                # within the grace time. Its reader thread then logs the lost rank and ends this
                # process without a traceback: tracebacks of all ranks would hide the cause. If no
                # channel closes, the error has another cause and is raised.
                time.sleep(COLLECTIVE_FAILURE_GRACE_S)
                raise
            if outcome is not None:
                self._channels.broadcast(encode(outcome))

    def _broadcast_step(self, frame: bytes) -> None:
        # The engine loop sends `Halt` after `Close`, and also after a failure. A rank that receives
        # `Halt` exits with code 0, which torchrun regards as success. Therefore `Halt` is not sent
        # to the other ranks after a failure.
        if self._is_stopping or frame != PACKED_HALT:
            self._channels.broadcast(frame)

    def _send_to_frontend(self, message: FromEngineLoop) -> None:
        if self._frontend is not None:
            self._frontend.send(encode(message))

    def _report_compilation(self, kernel: str, seconds: float | None) -> None:
        """Tell the front end, through rank 0, that Triton compiles or has compiled a kernel here.

        A step waits for the compilation, and the watchdog must not take the wait for a hang.
        """
        frame = encode(KernelCompilation(kernel, seconds))
        if self._position.rank == 0:
            self._on_notice(frame)
        else:
            self._channels.send_notice(frame)

    def _on_notice(self, frame: bytes) -> None:
        message = decode_from_engine_loop(frame)
        if isinstance(message, Failed):
            # The sender has failed in the start-up, and the main thread of this rank is blocked,
            # probably in a collective with the sender.
            self._send_to_frontend(message)
            log.error("event=ending reason=%r", message.reason)
            exit_now(1)
        assert isinstance(message, KernelCompilation), "ranks send no other notice"
        if self._engine_loop is not None:
            self._engine_loop.record_compilation(message.kernel, message.seconds)
        self._send_to_frontend(message)

    def _handle_message(self, frame: bytes) -> None:
        message = decode_to_engine_loop(frame)
        engine_loop = self._engine_loop
        assert engine_loop is not None, "the front end sends no message before `Ready`"
        if isinstance(message, DumpFlightRecorder):
            # In a new thread, because the engine loop may be hung, and because the disk may not
            # answer, which would block this thread.
            threading.Thread(
                target=engine_loop.write_flight,
                args=(message.path, "asked"),
                kwargs={"with_token_ids": message.with_token_ids},
                name="flight",
                daemon=True,
            ).start()
            return
        if isinstance(message, Close):
            self._is_stopping = True
        engine_loop.put_message(message)

    # ------------------------------------------------------------------------------- lost processes

    def _on_rank_lost(self, rank: int) -> None:
        """Exit because another rank has exited; the main thread may be blocked in a collective.

        On rank 0, a failed collective may end the engine loop at the same time. Then the engine
        loop and this method both send `Failed`. The watchdog uses the first `Failed`, and adds how
        each rank's process exited.
        """
        if self._is_stopping:
            # During a stop, ranks are expected to exit. If this rank's main thread waits for a rank
            # that has exited, the supervisor kills this process.
            return
        if self._position.rank == 0:
            reason = f"rank {rank} has exited"
            if self._engine_loop is not None:
                self._engine_loop.write_crash_dump(reason)
            self._send_to_frontend(Failed(reason))
        log.error("event=ending reason='rank %d has exited'", rank)
        exit_now(1)

    def _on_frontend_lost(self) -> None:
        if not self._is_stopping:
            log.error("event=ending reason='the front end has exited'")
            exit_now(1)


def exit_now(code: int) -> NoReturn:
    """Exit without clean-up, because torch's clean-up waits for other ranks.

    Messages in a channel's outbox are lost. If a `Failed` message is lost, the watchdog reports the
    exit of the rank without the reason in that message.
    """
    sys.stderr.flush()
    os._exit(code)
