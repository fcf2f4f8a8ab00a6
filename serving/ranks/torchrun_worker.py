"""Under torchrun: a worker becomes a rank, and one of them sees to it that there is a front end.

The workers of one round first tell each other where they are, through torchrun's own store, which
may hold what earlier rounds have left. Mesh rank 0 is on the front end's node, so ranks are turned
round. A worker that is asked to end passes that on to the front end, and ends when it has drained.
"""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec

from gpt.child_processes import child_environment, end_with
from gpt.errors import ConfigError
from serving.config import ServerConfig, loopback
from serving.logs import log_to_stderr
from serving.ranks.launcher import AGENT, FOLDER
from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import Store
from serving.ranks.rank_position import Place
from serving.ranks.torchrun_supervisor import connect, folder_of, read_card

log = logging.getLogger(__name__)

MUSTER_S = 300.0
FRONT_S = 60.0
LOOK_S = 0.02
# A worker that is told to end while another rank is being lost is about to be started again.
DOUBT_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# torch 2.13 tells the address of that store in the first round only (dynamic_rendezvous.py).
SHARED_STORE = (
    "the agents share their store with the workers, so a node that is started again cannot come "
    "back; start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
)
# What torchrun sets for its workers, and a front end must not take for its own.
_SET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_SET_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


class Presence(msgspec.Struct, frozen=True):
    """A worker of this round, as it tells the others."""

    node: int
    pid: int
    host: str  # Where the others reach it.
    front: bool  # A front end of this run lives on its node.


@dataclass(frozen=True)
class Post:
    """What torchrun says to a worker."""

    rank: int
    ranks: int
    local: int
    locals: int
    node: int
    run: str
    master: str
    port: int
    shared_store: bool  # That of the agents themselves.

    @classmethod
    def read(cls) -> "Post":
        said = os.environ
        return cls(
            rank=int(said["RANK"]),
            ranks=int(said["WORLD_SIZE"]),
            local=int(said["LOCAL_RANK"]),
            locals=int(said["LOCAL_WORLD_SIZE"]),
            node=int(said["GROUP_RANK"]),
            run=said["TORCHELASTIC_RUN_ID"],
            master=said["MASTER_ADDR"],
            port=int(said["MASTER_PORT"]),
            shared_store=said.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def work(config: ServerConfig, flags: list[str]) -> NoReturn:
    """Be a rank until the end. `flags` are what followed the command's word."""
    post, agent = Post.read(), os.getppid()
    end_with(agent)
    if config.tp * config.pp != post.ranks:
        raise ConfigError(
            f"--tp {config.tp} and --pp {config.pp} need {config.tp * config.pp} workers, torchrun "
            f"has started {post.ranks}; let nnodes x nproc-per-node be tp x pp"
        )
    # Before there are threads: signals are for the one that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    stopping = _Stopping()
    try:
        code = _become_rank(config, flags, post, agent, stopping)
    except BaseException:
        log.exception("event=rank_failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become_rank(
    config: ServerConfig, flags: list[str], post: Post, agent: int, stopping: "_Stopping"
) -> int:
    import torch.distributed as dist

    from serving.ranks.rank import Rank, share_cores

    folder = folder_of(post.run, config.port, agent)
    if post.rank == 0 and post.ranks > post.locals and post.shared_store:
        log.warning("event=restarts_limited reason=%r", SHARED_STORE)
    limit = timedelta(seconds=MUSTER_S)
    store, _, _ = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
    front_here = read_card(folder) is not None
    own = Presence(post.node, os.getpid(), _own_host(post), front_here)
    round_, all_ = muster(store, post.rank, post.ranks, own)
    first = first_rank(all_)
    place = Place((post.rank - first) % post.ranks, post.ranks, post.local, post.locals)
    log_to_stderr(config.log_format, place.rank)
    share_cores(place, said=False)
    if loopback(all_[first].host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    front = None
    if place.rank == 0:
        near = {
            (rank - first) % post.ranks: one.pid
            for rank, one in enumerate(all_)
            if one.node == post.node
        }
        front = _front_end(folder, agent, flags, near, starts=not own.front)
    prefixed = dist.PrefixStore(f"preamble/{round_}", store)  # type: ignore[attr-defined]
    rank = Rank(place, config, prefixed, all_[first].host, front, _FrontEnd(folder).end)
    stopping.ask(rank.ask_to_drain)
    return rank.run()


def first_rank(all_: list[Presence]) -> int:
    """The worker that is to be mesh rank 0: the first one where a front end lives, or the first."""
    return next((rank for rank, one in enumerate(all_) if one.front), 0)


def muster(
    store: Store, rank: int, ranks: int, own: Presence, timeout_s: float = MUSTER_S
) -> tuple[str, list[Presence]]:
    """A name for this round, and who is there. All workers of the round call it.

    The store may have what workers of earlier rounds have put there, so nobody is believed before
    it has answered to a word that is new.
    """
    end = time.monotonic() + timeout_s

    def wait(key: str) -> str:
        while not store.check([key]):
            if time.monotonic() > end:
                raise TimeoutError(f"not all {ranks} workers came within {timeout_s:g} s")
            time.sleep(LOOK_S)
        return store.get(key).decode()

    said = msgspec.json.encode(own).decode()
    if rank > 0:
        word = secrets.token_hex(8)
        store.set(f"preamble/word/{rank}", word)
        round_ = wait(f"preamble/heard/{word}")
        store.set(f"preamble/{round_}/{rank}", said)
        return round_, msgspec.json.decode(wait(f"preamble/{round_}/all"), type=list[Presence])
    round_ = secrets.token_hex(8)
    there: dict[int, str] = {0: said}
    while len(there) < ranks:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(there)} of {ranks} workers came within {timeout_s:g} s")
        for other in set(range(ranks)) - set(there):
            if store.check([f"preamble/word/{other}"]):
                store.set(f"preamble/heard/{store.get(f'preamble/word/{other}').decode()}", round_)
            if store.check([f"preamble/{round_}/{other}"]):
                there[other] = store.get(f"preamble/{round_}/{other}").decode()
        time.sleep(LOOK_S)
    records = [json.loads(there[other]) for other in range(ranks)]
    store.set(f"preamble/{round_}/all", json.dumps(records))
    return round_, msgspec.convert(records, list[Presence])


def _own_host(post: Post) -> str:
    """An address of this node that the others can reach."""
    if post.node == 0:
        return post.master  # The store is here, and they have reached that.
    kind = socket.getaddrinfo(post.master, post.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind[0], kind[1]) as probe:
        probe.connect(kind[4])  # Sends nothing; only finds the way.
        host: str = probe.getsockname()[0]
    return host


def _front_end(
    folder: Path, agent: int, flags: list[str], pids: dict[int, int], *, starts: bool
) -> Channel:
    """A channel to this node's front end, which is started if there is none."""
    process = _start_front(folder, agent, flags) if starts else None
    end = time.monotonic() + FRONT_S
    while (card := read_card(folder)) is None:
        if process is None or process.poll() is not None:
            raise ConfigError("the front end has ended; its own message says why")
        if time.monotonic() > end:
            process.kill()
            raise TimeoutError(f"the front end did not listen within {FRONT_S:g} s")
        time.sleep(LOOK_S)
    return connect(folder, card, pids)


def _start_front(folder: Path, agent: int, flags: list[str]) -> "subprocess.Popen[bytes]":
    environment = {
        name: value
        for name, value in child_environment(os.environ).items()
        if name not in _SET and not name.startswith(_SET_PREFIXES)
    }
    environment |= {FOLDER: str(folder), AGENT: str(agent)}
    # It inherits which signals are held back here, and must get its own.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "serving", "serve", *flags],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # It outlives this worker, and drains when the agent ends.
        )
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class _FrontEnd:
    """This node's front end, to be told once that it must end: a second time would hurry it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asking = threading.Lock()  # Is never given back.

    def end(self) -> None:
        card = read_card(self._folder)
        if card is not None and self._asking.acquire(blocking=False):
            os.kill(card.pid, signal.SIGTERM)


class _Stopping:
    """Waits for a signal to end, in a thread: the main one may be stuck in a collective."""

    def __init__(self) -> None:
        self._ask: Callable[[], None] | None = None
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def ask(self, ask: Callable[[], None]) -> None:
        """From now on, a signal is passed on to who can drain."""
        self._ask = ask

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            if self._ask is None:
                os._exit(128 + number)
            log.info("event=asked_to_end signal=%s", signal.Signals(number).name)
            time.sleep(DOUBT_S)
            self._ask()
