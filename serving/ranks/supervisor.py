"""Supervisor: the ranks of one node as processes of ours, started, watched, and started again.

`Keeper` is what every link to rank processes does: hand messages over, tell a loss at once, keep
the reason of a refusal. `Supervisor` starts the processes itself. They inherit all they need by
descriptors, and the kernel ends them when this process ends, however it does.
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
from contextlib import suppress

import msgspec

from gpt.child_processes import child_environment
from gpt.errors import CheckpointError, PreambleError
from serving.config import ServerConfig
from serving.engine.transport import Receiver
from serving.messages import Close, Dump, Ready, ToPlanner, encode
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import Charge, Place
from serving.ranks.watchdog import Loss, Running, Waker, Watch, close_all, gone
from serving.worker.flight_recorder import crash_path

log = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
HEALTHY_S = 60.0  # Having answered for so long, a loss is the first again.
STARTS_MAX = 3  # So often ranks may be lost before they ever answered.
DUMP_S = 0.5
KILL_S = 10.0


class Keeper(ABC):
    """A link to ranks that come and go. A thread of its own waits for them and watches them."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._receiver: Receiver | None = None
        self._running: Running | None = None
        self._channel: Channel | None = None  # While submissions are taken.
        self._facts: Ready | None = None
        self._changed = threading.Condition()  # Guards _facts and refusal.
        self._closing, self._close_s = False, 0.0
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self.refusal: PreambleError | None = None  # Set: no `ready` will follow.

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread.start()

    def send(self, message: ToPlanner) -> None:
        channel = self._channel
        if channel is not None:
            channel.send(encode(message))

    def dump(self, path: str | None = None) -> str:
        """Have the last steps written down; returns where. By default where crashes are."""
        path = path or str(crash_path(self._config.flight_dir))
        self.send(Dump(path, self._config.flight_ids))
        return path

    def wait_ready(self, timeout_s: float | None = None) -> Ready:
        """What the ranks are; raises their refusal, or TimeoutError."""
        with self._changed:
            self._changed.wait_for(lambda: self._facts or self.refusal, timeout_s)
            if self.refusal is not None:
                raise self.refusal
            if self._facts is None:
                raise TimeoutError(f"the ranks were not ready within {timeout_s:g} s")
            return self._facts

    def close(self, timeout_s: float = 10.0) -> None:
        if self._closing:
            return
        self._closing, self._close_s = True, timeout_s
        if self._thread.is_alive():
            self._waker.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout_s + KILL_S)
        if not self._thread.is_alive():
            self._waker.close()

    @abstractmethod
    def _gather(self) -> Running | None:
        """A set of ranks that begins to load; None: there will be none."""

    @abstractmethod
    def _end(self, running: Running) -> None:
        """End what is left of them, by force."""

    @abstractmethod
    def _pause(self, loss: Loss) -> bool:
        """Wait before the next set; False: there is to be none."""

    def _run(self) -> None:
        assert self._receiver is not None
        try:
            while not self._closing and (running := self._gather()) is not None:
                self._running = running
                watch = Watch(running, self._config, self._receiver, self._waker, self._ready)
                loss = watch.until_lost()
                self._lost(running, loss)
                self._running = None
                if loss.kind == "closed" or not self._pause(loss):
                    return
        except Exception as error:
            log.exception("event=link_failed")
            self._refuse(f"the ranks could not be started ({error}); the log says more")
            self._receiver.lost(str(self.refusal))
        finally:
            self._channel = None
            if self._running is not None:
                self._end(self._running)

    def _ready(self, facts: Ready) -> None:
        assert self._running is not None
        self._channel = self._running.channel
        with self._changed:
            self._facts = facts
            self._changed.notify_all()

    def _lost(self, running: Running, loss: Loss) -> None:
        assert self._receiver is not None
        self._channel = None
        with self._changed:
            answered, self._facts = self._facts is not None, None
        if loss.kind == "closed":
            if answered:  # Who still loads does not listen, and has nothing to finish.
                running.channel.send(encode(Close()))
                gone(running.descriptors, self._close_s)
            self._receiver.lost("the engine was closed")
        else:
            log.error("event=ranks_lost kind=%s reason=%r", loss.kind, loss.reason)
            self._judge(loss)
            self._receiver.lost(loss.reason)
            if answered:
                self._ask_why(running, loss)
        self._end(running)
        running.channel.close()

    @abstractmethod
    def _judge(self, loss: Loss) -> None:
        """Whether to refuse; before the receiver is told, so that it may look."""

    def _refuse(self, reason: str) -> None:
        with self._changed:
            self.refusal = CheckpointError(reason)
            self._changed.notify_all()

    def _ask_why(self, running: Running, loss: Loss) -> None:
        """Let rank 0 write down the last steps. Where a rank is dead it does so by itself."""
        rank_0 = {rank: it for rank, it in running.descriptors.items() if rank == 0}
        if loss.kind != "hung":
            gone(rank_0, DUMP_S)
            return
        try:
            path = crash_path(self._config.flight_dir)
        except OSError as error:  # There is no folder left to write to.
            log.warning("event=flight_not_written reason=%r", str(error))
            return
        running.channel.send(encode(Dump(str(path), self._config.flight_ids)))
        end = time.monotonic() + DUMP_S
        while time.monotonic() < end and not path.exists() and not gone(rank_0, 0.01):
            pass


class Supervisor(Keeper):
    """Starts tp x pp ranks on this node."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._losses = 0  # In a row.
        self._answered = False  # Ever.

    @property
    def pids(self) -> list[int]:
        """Of the ranks that run, in their order."""
        return [process.pid for process in self._processes]

    def _gather(self) -> Running | None:
        ranks = self._config.tp * self._config.pp
        ours, theirs = Channel.pair()
        # A file that only these processes can open, and that is gone when they are.
        store = os.memfd_create("preamble-store", os.MFD_CLOEXEC)
        try:
            with theirs:
                for rank in range(ranks):
                    charge = Charge(
                        Place(rank, ranks, rank, ranks),
                        os.getpid(),
                        self._config,
                        store,
                        theirs.fileno() if rank == 0 else None,
                    )
                    self._processes.append(_start_rank(charge))
        except BaseException:
            ours.close()
            self._end_processes()
            raise
        finally:
            os.close(store)
        descriptors = {rank: os.pidfd_open(pid) for rank, pid in enumerate(self.pids)}
        log.info("event=ranks_started pids=%s", ",".join(map(str, self.pids)))
        return Running(ours, descriptors, self._ending)

    def _ready(self, facts: Ready) -> None:
        self._answered = True
        super()._ready(facts)

    def _judge(self, loss: Loss) -> None:
        self._losses = 1 if loss.healthy_s >= HEALTHY_S else self._losses + 1
        if self._answered:
            return
        if loss.kind == "refused":
            self._refuse(loss.reason)
        elif self._losses >= STARTS_MAX:
            self._refuse(
                f"the ranks were lost {self._losses} times before they answered, at last because "
                f"{loss.reason}; the log says more"
            )

    def _pause(self, loss: Loss) -> bool:
        if self.refusal is not None:
            return False
        wait_s = BACKOFF_S[min(self._losses, len(BACKOFF_S)) - 1]
        log.info("event=ranks_restart losses=%d wait_s=%g", self._losses, wait_s)
        return not self._waker.wait(wait_s)

    def _end(self, running: Running) -> None:
        self._end_processes()
        close_all(running.descriptors)

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                log.error("event=rank_not_ended pid=%d", process.pid)
        self._processes = []

    def _ending(self, rank: int) -> str | None:
        code = self._processes[rank].poll()
        if code is None:
            return None
        if code >= 0:
            return f"has ended with exit code {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"


def _start_rank(charge: Charge) -> "subprocess.Popen[bytes]":
    """Flags are for all to see, so what a rank has to know goes through its standard input."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inherited = [charge.store]
        if charge.front is not None:
            inherited.append(charge.front)
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.ranks.rank_process"],
            stdin=theirs.fileno(),
            stdout=2,  # What others print is talk, and the server's own output is not theirs.
            pass_fds=inherited,
            env=child_environment(os.environ),
            start_new_session=True,  # Ctrl-C is for the front end, which then drains.
        )
        ours.sendall(msgspec.json.encode(charge))
    return process
