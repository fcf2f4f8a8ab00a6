"""Torchrun supervisor: the front end's transport to ranks that torchrun starts and restarts.

The front end runs as long as torchrun's agent on its node, so it outlives the workers. It listens
on a Unix socket in a private directory of its user. A file in the same directory has a secret,
which mesh rank 0 must send first. If the ranks hang, the supervisor kills the ranks of this node.
The ranks of other nodes detect this loss and exit, and torchrun starts all ranks again.
"""

import hmac
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic
from serving.config import ServerConfig
from serving.ranks.message_socket import Channel
from serving.ranks.supervisor import KILL_TIMEOUT_S, RankSupervisor
from serving.ranks.watchdog import (
    RankLoss,
    RankSet,
    close_descriptors,
    readable_descriptors,
    wait_for_exit,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
ADDRESS_FILE = "address"


class RankZeroHello(msgspec.Struct, frozen=True):
    """The first message of mesh rank 0."""

    secret: str
    pids: dict[int, int]  # Process IDs of the ranks on rank 0's node, by mesh rank.


class FrontendAddress(msgspec.Struct, frozen=True):
    """The content of the address file beside the socket: the front end's process and secret."""

    pid: int
    secret: str
    start_ticks: int  # Distinguishes the front end from a later process with the same ID.


def frontend_folder(run_id: str, port: int, agent: int) -> Path:
    """Return the private directory of the front end of this run, port and torchrun agent."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = blake2b(f"{run_id} {port}".encode(), digest_size=8).hexdigest()
    return Path(runtime_folder) / f"preamble-{os.getuid()}" / f"{name}-{agent}"


def read_frontend_address(folder: Path) -> FrontendAddress | None:
    """Read the address file in a front end's directory; return None if no front end runs."""
    try:
        _check_private(folder.parent)
        address = msgspec.json.decode((folder / ADDRESS_FILE).read_bytes(), type=FrontendAddress)
        is_running = _start_ticks(address.pid) == address.start_ticks
    except (OSError, msgspec.DecodeError):
        return None
    return address if is_running else None


def connect_to_frontend(folder: Path, address: FrontendAddress, pids: dict[int, int]) -> Channel:
    """Return rank 0's channel to the front end at `address`."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(folder / "socket"))
    channel = Channel(sock)
    channel.send(msgspec.json.encode(RankZeroHello(address.secret, pids)))
    return channel


class TorchrunSupervisor(RankSupervisor):
    """Accepts the ranks that torchrun starts, until torchrun's agent exits.

    The ranks connect to a socket in `folder`.
    """

    def __init__(self, config: ServerConfig, folder: Path, agent_pid: int) -> None:
        super().__init__(config)
        self._folder = folder
        self._agent_descriptor = os.pidfd_open(agent_pid)
        self._server = socket.socket(socket.AF_UNIX)
        self._secret = secrets.token_hex(32)
        try:
            self._listen()
        except (ConfigError, OSError) as error:
            self._close_descriptors()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"cannot create the ranks' socket in {folder} ({error}); set XDG_RUNTIME_DIR to a "
                "writable directory with a short path"
            ) from None

    def close(self, timeout_s: float = 10.0) -> None:
        if self._is_closing:
            # The descriptors are already closed, and must not be closed again: the process may have
            # reused their numbers for other files.
            return
        super().close(timeout_s)
        # If the supervisor's thread still runs, it no longer accepts ranks, so it does not use
        # these descriptors.
        self._close_descriptors()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_descriptors(self) -> None:
        self._server.close()
        os.close(self._agent_descriptor)

    def _listen(self) -> None:
        """Listen on the socket, then publish the address file beside it."""
        folder = self._folder
        _make_private(folder.parent)
        _remove_stale_folders(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._server.bind(str(folder / "socket"))
        self._server.listen()
        address = FrontendAddress(os.getpid(), self._secret, _start_ticks(os.getpid()))
        write_atomic(folder / ADDRESS_FILE, msgspec.json.encode(address), durable=False)

    def _start_ranks(self) -> RankSet | None:
        while True:
            waker = self._waker.fileno()
            agent = self._agent_descriptor
            server = self._server.fileno()
            readable = readable_descriptors([waker, agent, server], None)
            if waker in readable:
                return None
            if agent in readable:
                self._on_agent_ended()
                return None
            channel = Channel(self._server.accept()[0])
            rank_set = self._authenticate(channel)
            if rank_set is not None:
                return rank_set
            channel.close()

    def _authenticate(self, channel: Channel) -> RankSet | None:
        try:
            frame = channel.receive(HELLO_TIMEOUT_S)
            hello = msgspec.json.decode(frame or b"", type=RankZeroHello)
        except (TimeoutError, msgspec.DecodeError):
            hello = None
        if hello is None or not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            log.warning("event=stranger_refused")
            return None
        descriptors: dict[int, int] = {}
        try:
            for rank, pid in hello.pids.items():
                descriptors[rank] = os.pidfd_open(pid)
        except OSError:  # One rank has exited already, so the other ranks exit, too.
            close_descriptors(descriptors)
            return None
        pids = ",".join(map(str, hello.pids.values()))
        parallel = self._config.parallel_config
        sizes = (parallel.tp, parallel.pp, parallel.ep)
        log.info("event=ranks_came pids=%s tp=%d pp=%d ep=%d", pids, *sizes)
        return RankSet(channel, descriptors, lambda rank: None)

    def _on_agent_ended(self) -> None:
        """Stop serving: without torchrun's agent, ranks are not started again."""
        assert self._receiver is not None
        log.error("event=agent_ended")
        self._set_refusal(
            "torchrun's agent on this node has exited with its ranks; run torchrun again"
        )
        self._receiver.ranks_lost(str(self.refusal))
        os.kill(os.getpid(), signal.SIGTERM)  # The server's signal handler drains, then exits.

    def _record_loss(self, loss: RankLoss) -> None:
        # A permanent failure is final. If it occurs before the first `Ready`, the front end exits.
        # If it occurs after the first `Ready`, the front end does not exit, but its liveness check
        # fails, and it accepts no more ranks.
        if loss.kind == "refused":
            self._set_refusal(loss.reason)

    def _wait_before_restart(self, loss: RankLoss) -> bool:
        return self.refusal is None

    def _kill_ranks(self, rank_set: RankSet) -> None:
        for descriptor in rank_set.descriptors.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not wait_for_exit(rank_set.descriptors, KILL_TIMEOUT_S):
            log.error("event=ranks_not_ended")
        close_descriptors(rank_set.descriptors)


def _start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; raise OSError if it has exited."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])  # Field 22, starttime: the first of `fields` is field 3.


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)


def _check_private(folder: Path) -> None:
    folder_stat = folder.lstat()
    is_private = stat.S_ISDIR(folder_stat.st_mode) and not folder_stat.st_mode & 0o077
    if not is_private or folder_stat.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} must be a directory that only this user can access, because the ranks "
            "connect there; remove it, or set XDG_RUNTIME_DIR to another directory"
        )


def _remove_stale_folders(folder: Path) -> None:
    """Remove the directories of front ends whose torchrun agent no longer runs."""
    for stale_folder in folder.iterdir():
        agent = stale_folder.name.rpartition("-")[2]
        if agent.isdecimal() and not Path(f"/proc/{agent}").exists():
            shutil.rmtree(stale_folder, ignore_errors=True)
