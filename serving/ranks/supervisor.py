"""Rank supervisor: starts this node's rank processes, watches them and restarts them.

`RankSupervisor` is the base of all transports to rank processes. It forwards messages to the ranks,
and reports each loss of the ranks at once. If the ranks must not be started again, it sets
`refusal`, the error of the permanent failure. `LocalSupervisor` starts the processes itself. They
inherit their sockets and files as descriptors, and the kernel kills them when this process exits
for any reason.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from gpt.child_processes import ChildProcess
from gpt.errors import CheckpointError, PreambleError
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.engine_core.flight_recorder import crash_path
from serving.messages import Close, DumpFlightRecorder, ToEngineLoop, encode
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import RankPosition, WorkerSpec
from serving.ranks.watchdog import (
    RankLoss,
    RankSet,
    Waker,
    Watchdog,
    close_descriptors,
    wait_for_exit,
)

log = logging.getLogger(__name__)

RANK_MODULE = "serving.ranks.rank_process"  # The program of a rank.
# The waits in seconds before a restart, after 1, 2, 3, ... consecutive losses. After more losses
# than waits, the last wait applies.
BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# If the ranks were ready for at least this time, their loss counts as the first loss again.
HEALTHY_RESET_S = 60.0
FAILED_STARTS_MAX = 3  # Number of losses that end the engine if the ranks were never ready.
DUMP_TIMEOUT_S = 0.5  # Rank 0 has this time to write its flight recorder after a loss.
KILL_TIMEOUT_S = 10.0  # Killed ranks have this time to exit.


class RankSupervisor(ABC):
    """A transport to ranks that may be lost and restarted; one thread starts and watches them."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._receiver: Receiver | None = None
        self._rank_set: RankSet | None = None
        self._channel: Channel | None = None  # Set only while the ranks are ready.
        self._is_closing = False
        self._close_timeout_s = 0.0
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self.refusal: PreambleError | None = None  # If set, the engine failed permanently.

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread.start()

    def send(self, message: ToEngineLoop) -> None:
        channel = self._channel
        if channel is not None:
            channel.send(encode(message))

    def close(self, timeout_s: float = 10.0) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._close_timeout_s = timeout_s
        if self._thread.is_alive():
            self._waker.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout_s + KILL_TIMEOUT_S)
        if not self._thread.is_alive():
            self._waker.close()

    @abstractmethod
    def _start_ranks(self) -> RankSet | None:
        """Start all ranks, or wait until torchrun has started them; return the set of ranks.

        Return None if no ranks will be started again.
        """

    @abstractmethod
    def _kill_ranks(self, rank_set: RankSet) -> None:
        """Kill the rank processes that still run, and close their descriptors."""

    @abstractmethod
    def _wait_before_restart(self, loss: RankLoss) -> bool:
        """Wait before a restart of the ranks; return False if they must not be restarted."""

    def _run(self) -> None:
        assert self._receiver is not None
        try:
            while not self._is_closing and (rank_set := self._start_ranks()) is not None:
                self._rank_set = rank_set
                watchdog = Watchdog(
                    rank_set,
                    self._config.parallel_config,
                    self._receiver,
                    self._waker,
                    self._on_ready,
                )
                loss = watchdog.watch_until_lost()
                self._on_lost(rank_set, loss)
                self._rank_set = None
                if loss.kind == "closed" or not self._wait_before_restart(loss):
                    return
        except Exception as error:
            # The event's name is historical: what has failed is the thread of this supervisor.
            log.exception("event=link_failed")
            self._set_refusal(
                f"the supervisor of the ranks has failed ({error}); see the server log"
            )
            self._receiver.ranks_lost(str(self.refusal))
        finally:
            self._channel = None
            if self._rank_set is not None:
                self._kill_ranks(self._rank_set)

    def _on_ready(self) -> None:
        assert self._rank_set is not None
        self._channel = self._rank_set.channel

    def _on_lost(self, rank_set: RankSet, loss: RankLoss) -> None:
        assert self._receiver is not None
        was_ready = self._channel is not None
        self._channel = None
        if loss.kind == "closed":
            if was_ready:  # Only ready ranks can handle `Close`; other ranks are killed below.
                rank_set.channel.send(encode(Close()))
                wait_for_exit(rank_set.descriptors, self._close_timeout_s)
            self._receiver.ranks_lost("the engine was closed")
        else:
            log.error("event=ranks_lost kind=%s reason=%r", loss.kind, loss.reason)
            self._record_loss(loss)
            self._receiver.ranks_lost(loss.reason)
            if was_ready:
                self._wait_for_flight_recorder(rank_set, loss)
        self._kill_ranks(rank_set)
        rank_set.channel.close()

    @abstractmethod
    def _record_loss(self, loss: RankLoss) -> None:
        """Set the refusal if the ranks must not be restarted.

        Called before `receiver.ranks_lost`, in which the receiver reads `refusal`.
        """

    def _set_refusal(self, reason: str) -> None:
        # The class of the original error is unknown, because a rank sends only the text. Any
        # PreambleError will do: callers treat all of them in the same way.
        self.refusal = CheckpointError(reason)

    def _wait_for_flight_recorder(self, rank_set: RankSet, loss: RankLoss) -> None:
        """Wait until rank 0 has written its flight recorder.

        If the ranks hang, rank 0 still runs, and this method requests the file. After any other
        loss, this method waits for the exit of rank 0, which writes the file before it exits unless
        it is killed.
        """
        rank_0 = {
            rank: descriptor for rank, descriptor in rank_set.descriptors.items() if rank == 0
        }
        if loss.kind != "hung":
            wait_for_exit(rank_0, DUMP_TIMEOUT_S)
            return
        # In a thread, because the directory of flight recordings may be on a disk that does not
        # answer.
        thread = threading.Thread(
            target=self._request_dump, args=(rank_set, rank_0), name="flight", daemon=True
        )
        thread.start()
        # A little longer than the thread waits, so that it does not use closed descriptors.
        thread.join(DUMP_TIMEOUT_S + 0.1)

    def _request_dump(self, rank_set: RankSet, rank_0: dict[int, int]) -> None:
        """Request the flight recorder of rank 0, and wait up to `DUMP_TIMEOUT_S` for its file."""
        deadline = time.monotonic() + DUMP_TIMEOUT_S
        config = self._config.observability_config
        try:
            path = crash_path(config.flight_dir)
        except OSError as error:  # No writable temporary directory was found.
            log.warning("event=flight_not_written reason=%r", str(error))
            return
        if time.monotonic() >= deadline:  # The caller waits no longer, and closes the channel.
            return
        rank_set.channel.send(encode(DumpFlightRecorder(str(path), config.flight_ids)))
        # The dump is written atomically: it is complete as soon as its path exists.
        while time.monotonic() < deadline and not path.exists() and not wait_for_exit(rank_0, 0.01):
            pass


class LocalSupervisor(RankSupervisor):
    """Starts the tp x pp rank processes of a model on this node."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._processes: list[ChildProcess] = []
        self._losses = 0  # Consecutive losses.
        self._has_been_ready = False  # Whether ranks of this supervisor were ready at any time.

    @property
    def pids(self) -> list[int]:
        """The process IDs of the ranks, in rank order."""
        return [process.pid for process in self._processes]

    def _start_ranks(self) -> RankSet | None:
        while True:
            try:
                return self._start_processes()
            except OSError as error:  # For example, no free file descriptor, or too little memory.
                self._losses += 1
                if not self._has_been_ready and self._losses >= FAILED_STARTS_MAX:
                    raise
                log.error("event=ranks_not_started reason=%r", str(error))
                if self._waker.wait(self._backoff_s):
                    return None

    def _start_processes(self) -> RankSet:
        # The file of torch's FileStore. It is in memory, only the rank processes can open it, and
        # the kernel removes it when the last of them exits.
        store = os.memfd_create("preamble-store", os.MFD_CLOEXEC)
        try:
            return self._start_with_store(store)
        finally:
            os.close(store)

    def _start_with_store(self, store: int) -> RankSet:
        world_size = self._config.parallel_config.ranks
        descriptors: dict[int, int] = {}
        own_channel, peer_socket = Channel.pair()
        try:
            with peer_socket:
                for rank in range(world_size):
                    spec = WorkerSpec(
                        RankPosition(rank, world_size, rank, world_size),
                        os.getpid(),
                        self._config.to_dict(),
                        store_fd=store,
                        frontend_fd=peer_socket.fileno() if rank == 0 else None,
                    )
                    self._processes.append(start_rank(spec))
            for rank, pid in enumerate(self.pids):
                descriptors[rank] = os.pidfd_open(pid)
        except BaseException:
            own_channel.close()
            self._kill_processes()
            close_descriptors(descriptors)
            raise
        parallel, pids = self._config.parallel_config, ",".join(map(str, self.pids))
        sizes = (parallel.tp, parallel.pp, parallel.ep)
        log.info("event=ranks_started pids=%s tp=%d pp=%d ep=%d", pids, *sizes)
        return RankSet(own_channel, descriptors, self._describe_exit)

    def _on_ready(self) -> None:
        self._has_been_ready = True
        super()._on_ready()

    def _record_loss(self, loss: RankLoss) -> None:
        self._losses = 1 if loss.healthy_s >= HEALTHY_RESET_S else self._losses + 1
        if self._has_been_ready:
            return  # After the first `Ready`, even a permanent `Failed` leads to a restart.
        if loss.kind == "refused":
            self._set_refusal(loss.reason)
        elif self._losses >= FAILED_STARTS_MAX:
            self._set_refusal(
                f"the ranks were lost {self._losses} times before they were ready; last reason: "
                f"{loss.reason}; see the server log"
            )

    def _wait_before_restart(self, loss: RankLoss) -> bool:
        if self.refusal is not None:
            return False
        log.info("event=ranks_restart losses=%d wait_s=%g", self._losses, self._backoff_s)
        return not self._waker.wait(self._backoff_s)

    @property
    def _backoff_s(self) -> float:
        """Time before the next start, which depends on the number of consecutive losses."""
        return BACKOFF_S[min(self._losses, len(BACKOFF_S)) - 1]

    def _kill_ranks(self, rank_set: RankSet) -> None:
        self._kill_processes()
        close_descriptors(rank_set.descriptors)

    def _kill_processes(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("event=rank_not_ended pid=%d", process.pid)
        self._processes = []

    def _describe_exit(self, rank: int) -> str | None:
        code = self._processes[rank].poll()
        return None if code is None else describe_exit_code(code)


def describe_exit_code(code: int) -> str:
    """Describe the exit code of a rank's process, as `RankSet.describe_exit` does."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def start_rank(spec: WorkerSpec, environment: Mapping[str, str] | None = None) -> ChildProcess:
    """Start a rank process; `environment` is as in `ChildProcess`.

    Its spec goes to its standard input, because all users of the machine can read command lines.
    """
    own_socket, peer_socket = socket.socketpair()
    with own_socket, peer_socket:
        descriptors = (spec.store_fd, spec.frontend_fd)
        process = ChildProcess(
            [sys.executable, "-m", RANK_MODULE],
            stdin=peer_socket.fileno(),
            stdout=2,  # Libraries may print to stdout, which is reserved for the server's results.
            pass_fds=[descriptor for descriptor in descriptors if descriptor is not None],
            environment=environment,
        )
        own_socket.sendall(msgspec.json.encode(spec))
    return process
