"""Outside: ranks that torchrun starts, and starts again; they come to this front end by themselves.

A front end lives as long as torchrun's agent on its node, so it outlives the workers. It is found
in a folder of its user's: a socket, and a secret that whoever connects must know. Of hung ranks
those of this node are ended; the others see that, and torchrun does the rest.
"""

import hmac
import logging
import os
import secrets
import select
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
from serving.config import ServerConfig
from serving.ranks.message_socket import Channel
from serving.ranks.supervisor import KILL_S, Keeper
from serving.ranks.watchdog import Loss, Running, close_all, gone

log = logging.getLogger(__name__)

HELLO_S = 5.0


class Hello(msgspec.Struct, frozen=True):
    """The first words of a planner. `pids`: the ranks on this node and their processes."""

    secret: str
    pids: dict[int, int]


class Card(msgspec.Struct, frozen=True):
    """What lies beside the socket: who listens there, and what it wants to hear."""

    pid: int
    secret: str


def folder_of(run: str, port: int, agent: int) -> Path:
    """Where a front end of this run lives, which serves this port under this agent."""
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = blake2b(f"{run} {port}".encode(), digest_size=8).hexdigest()
    return Path(place) / f"preamble-{os.getuid()}" / f"{name}-{agent}"


def read_card(folder: Path) -> Card | None:
    """Of a front end that lives there; None if none does."""
    try:
        _check_private(folder.parent)
        card = msgspec.json.decode((folder / "card").read_bytes(), type=Card)
        os.kill(card.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return card


def connect(folder: Path, card: Card, pids: dict[int, int]) -> Channel:
    """A planner's channel to that front end."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(folder / "socket"))
    channel = Channel(sock)
    channel.send(msgspec.json.encode(Hello(card.secret, pids)))
    return channel


class Outside(Keeper):
    """Waits for ranks in a folder, for as long as the agent lives."""

    def __init__(self, config: ServerConfig, folder: Path, agent: int) -> None:
        super().__init__(config)
        self._folder = folder
        self._agent = os.pidfd_open(agent)
        _make_private(folder.parent)
        _sweep(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(str(folder / "socket"))
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot have the socket where ranks meet ({error}); point "
                "XDG_RUNTIME_DIR to another place, with a shorter name"
            ) from None
        self._server.listen()
        self._secret = secrets.token_hex(32)
        card = msgspec.json.encode(Card(os.getpid(), self._secret))
        part = folder / "card.part"
        part.write_bytes(card)
        part.rename(folder / "card")

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            os.close(self._agent)

    def _gather(self) -> Running | None:
        while True:
            waker, agent, server = self._waker.fileno(), self._agent, self._server.fileno()
            ready = select.select([waker, agent, server], [], [])[0]
            if waker in ready:
                return None
            if agent in ready:
                self._bereave()
                return None
            channel = Channel(self._server.accept()[0])
            running = self._greet(channel)
            if running is not None:
                return running
            channel.close()

    def _greet(self, channel: Channel) -> Running | None:
        try:
            frame = channel.receive(HELLO_S)
            hello = msgspec.json.decode(frame or b"", type=Hello)
        except (TimeoutError, msgspec.DecodeError):
            hello = None
        if hello is None or not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            log.warning("event=stranger_refused")
            return None
        descriptors: dict[int, int] = {}
        try:
            for rank, pid in hello.pids.items():
                descriptors[rank] = os.pidfd_open(pid)
        except OSError:  # One has ended already; the others will.
            close_all(descriptors)
            return None
        pids = ",".join(map(str, hello.pids.values()))
        log.info("event=ranks_came pids=%s", pids)
        return Running(channel, descriptors, lambda rank: None)

    def _bereave(self) -> None:
        """Nobody starts ranks any more: what waits for them must not wait on."""
        assert self._receiver is not None
        log.error("event=agent_ended")
        self._refuse("torchrun's agent on this node has ended, and the ranks with it")
        self._receiver.lost(str(self.refusal))
        os.kill(os.getpid(), signal.SIGTERM)

    def _judge(self, loss: Loss) -> None:
        if loss.kind == "refused":
            self._refuse(loss.reason)

    def _pause(self, loss: Loss) -> bool:
        return self.refusal is None

    def _end(self, running: Running) -> None:
        for descriptor in running.descriptors.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not gone(running.descriptors, KILL_S):
            log.error("event=ranks_not_ended")
        close_all(running.descriptors)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} is not a directory of this user's alone, so ranks cannot meet there; "
            "remove it, or point XDG_RUNTIME_DIR to another place"
        )


def _sweep(folder: Path) -> None:
    """Remove what is left of front ends that were killed: their agents are gone, too."""
    for old in folder.iterdir():
        agent = old.name.rpartition("-")[2]
        if agent.isdecimal() and not Path(f"/proc/{agent}").exists():
            shutil.rmtree(old, ignore_errors=True)
