"""Torchrun worker: rendezvous of the workers; each becomes a rank, and one starts the front end.

Torchrun starts all workers again after a loss; each start is a round. In the rendezvous the workers
of a round exchange their addresses through torchrun's own store, which may still contain entries of
earlier rounds. Mesh rank 0 must be on the front end's node, but torchrun's rank 0 may be on another
node. If torchrun's rank r becomes mesh rank 0, a worker's mesh rank is (its torchrun rank - r)
mod world size. A worker that receives SIGTERM informs mesh rank 0, which sends SIGTERM to the front
end. The front end drains and then ends the ranks.
"""

import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec

from gpt.child_processes import ChildProcess, child_environment, die_with_parent
from gpt.cpu_threads import set_thread_count
from gpt.errors import ConfigError
from serving.config import ServerConfig, is_loopback
from serving.logs import log_to_stderr
from serving.ranks.launcher import AGENT_VARIABLE, FOLDER_VARIABLE
from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import Store
from serving.ranks.rank_position import RankPosition
from serving.ranks.torchrun_supervisor import (
    connect_to_frontend,
    frontend_folder,
    read_frontend_address,
)

log = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 300.0
FRONTEND_START_S = 60.0
POLL_S = 0.02
# A worker waits this long before it forwards a signal. Torchrun also sends SIGTERM to the workers
# that it restarts after the loss of a rank. Such a worker exits within this delay because of the
# lost rank, so it does not ask the front end to drain.
STOP_DELAY_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Logged if workers on several nodes use the store of torchrun's agents: torch 2.13 publishes the
# address of this store in the first round only (dynamic_rendezvous.py).
SHARED_STORE_WARNING = (
    "torchrun's agents share their store with the workers, so a node that is restarted cannot "
    "rejoin; start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or, with the static "
    "rendezvous, restart all nodes together, as LeaderWorkerSet does"
)
# Variables that torchrun sets for its workers, removed from the front end's environment.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


class WorkerInfo(msgspec.Struct, frozen=True):
    """The record that a worker publishes in the rendezvous."""

    node: int
    pid: int
    host: str  # The address at which other workers reach this worker.
    has_frontend: bool  # A front end of this run already runs on this worker's node.


@dataclass(frozen=True)
class TorchrunEnv:
    """The environment variables that torchrun sets for a worker."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    run_id: str
    master_host: str
    master_port: int
    shared_store: bool  # The workers use the store of torchrun's agents.

    @classmethod
    def from_environment(cls) -> "TorchrunEnv":
        environment = os.environ
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            node=int(environment["GROUP_RANK"]),
            run_id=environment["TORCHELASTIC_RUN_ID"],
            master_host=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            shared_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def run_worker(config: ServerConfig, flags: list[str]) -> NoReturn:
    """Run this worker as a rank, then exit. `flags`: the arguments after `preamble serve`."""
    env = TorchrunEnv.from_environment()
    agent_pid = os.getppid()
    die_with_parent(agent_pid)
    parallel = config.parallel_config
    if parallel.ranks != env.world_size:
        raise ConfigError(
            f"{parallel.flags} need {parallel.ranks} workers, but torchrun has started "
            f"{env.world_size}; set nnodes x nproc-per-node to {parallel.ranks}"
        )
    # Only `sigwait` in the thread of `_StopSignals` is to receive the signals. Threads inherit the
    # mask of blocked signals, so the signals are blocked before any thread starts.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    stop_signals = _StopSignals()
    try:
        code = _run_rank(config, flags, env, agent_pid, stop_signals)
    except BaseException:
        log.exception("event=rank_failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_rank(
    config: ServerConfig,
    flags: list[str],
    env: TorchrunEnv,
    agent_pid: int,
    stop_signals: "_StopSignals",
) -> int:
    log_to_stderr(config.observability_config.log_format)

    import torch.distributed as dist

    from serving.ranks.rank import Rank

    folder = frontend_folder(env.run_id, config.network_config.port, agent_pid)
    if env.rank == 0 and env.world_size > env.local_world_size and env.shared_store:
        log.warning("event=restarts_limited reason=%r", SHARED_STORE_WARNING)
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    has_frontend = read_frontend_address(folder) is not None
    own_worker = WorkerInfo(env.node, os.getpid(), _own_host(env), has_frontend)
    round_id, workers = rendezvous(store, env.rank, env.world_size, own_worker)
    first_worker_rank = first_rank(workers)
    position = RankPosition(
        (env.rank - first_worker_rank) % env.world_size,
        env.world_size,
        env.local_rank,
        env.local_world_size,
    )
    log_to_stderr(config.observability_config.log_format, position.rank)  # Adds the mesh rank.
    # torchrun sets OMP_NUM_THREADS to 1.
    set_thread_count(position.local_world_size, respect_environment=False)
    if is_loopback(workers[first_worker_rank].host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    frontend = None
    if position.rank == 0:
        local_pids = {
            (rank - first_worker_rank) % env.world_size: worker.pid
            for rank, worker in enumerate(workers)
            if worker.node == env.node
        }
        frontend = _connect_frontend(
            folder, agent_pid, flags, local_pids, starts=not own_worker.has_frontend
        )
    round_store = dist.PrefixStore(f"preamble/{round_id}", store)  # type: ignore[attr-defined]
    rank = Rank(
        position,
        config,
        round_store,
        workers[first_worker_rank].host,
        frontend,
        _FrontendProcess(folder).stop_once,
    )
    stop_signals.set_handler(rank.request_drain)
    return rank.run()


def first_rank(workers: list[WorkerInfo]) -> int:
    """Return the torchrun rank of the worker that becomes mesh rank 0.

    It is the first worker whose node has a front end; without a front end, it is worker 0.
    """
    return next((rank for rank, worker in enumerate(workers) if worker.has_frontend), 0)


def rendezvous(
    store: Store,
    rank: int,
    world_size: int,
    own_worker: WorkerInfo,
    timeout_s: float = RENDEZVOUS_TIMEOUT_S,
) -> tuple[str, list[WorkerInfo]]:
    """Return a new id for this round, and the workers' records in the order of torchrun's ranks.

    All workers of the round must call this function. The store may contain entries of earlier
    rounds, but those entries have different nonces and ids. Workers join in three steps:

    1. Each worker except worker 0 publishes a random nonce.
    2. Worker 0 answers each nonce with the id of this round.
    3. The worker publishes its record under this id. Worker 0 then publishes all records together.
    """
    deadline = time.monotonic() + timeout_s

    def wait(key: str) -> str:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all {world_size} workers joined within {timeout_s:g} s")
            time.sleep(POLL_S)
        return store.get(key).decode()

    own_record = msgspec.json.encode(own_worker).decode()
    if rank > 0:
        nonce = secrets.token_hex(8)
        store.set(f"preamble/nonces/{rank}", nonce)
        round_id = wait(f"preamble/rounds/{nonce}")
        store.set(f"preamble/{round_id}/{rank}", own_record)
        return round_id, msgspec.json.decode(
            wait(f"preamble/{round_id}/all"), type=list[WorkerInfo]
        )
    round_id = secrets.token_hex(8)
    records_by_rank: dict[int, str] = {0: own_record}
    while len(records_by_rank) < world_size:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"only {len(records_by_rank)} of {world_size} workers joined within {timeout_s:g} s"
            )
        for other in set(range(world_size)) - set(records_by_rank):
            if store.check([f"preamble/nonces/{other}"]):
                nonce = store.get(f"preamble/nonces/{other}").decode()
                store.set(f"preamble/rounds/{nonce}", round_id)
            if store.check([f"preamble/{round_id}/{other}"]):
                records_by_rank[other] = store.get(f"preamble/{round_id}/{other}").decode()
        time.sleep(POLL_S)
    records = [json.loads(records_by_rank[other]) for other in range(world_size)]
    store.set(f"preamble/{round_id}/all", json.dumps(records))
    return round_id, msgspec.convert(records, list[WorkerInfo])


def _own_host(env: TorchrunEnv) -> str:
    """Return an address at which the other workers can reach this node."""
    if env.node == 0:
        return env.master_host  # All workers reach torchrun's store, on node 0, at this address.
    addrinfo = socket.getaddrinfo(env.master_host, env.master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(addrinfo[0], addrinfo[1]) as probe:
        probe.connect(addrinfo[4])  # UDP: sends no packet, only selects the source address.
        host: str = probe.getsockname()[0]
    return host


def _connect_frontend(
    folder: Path, agent_pid: int, flags: list[str], pids: dict[int, int], *, starts: bool
) -> Channel:
    """Return a channel to this node's front end.

    `starts`: whether to start the front end first. `pids`: the process IDs of this node's ranks, by
    mesh rank.
    """
    process = _start_frontend(folder, agent_pid, flags) if starts else None
    deadline = time.monotonic() + FRONTEND_START_S
    while (address := read_frontend_address(folder)) is None:
        if process is None or process.poll() is not None:
            raise ConfigError("the front end has exited; see its error message in the log")
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"the front end did not listen within {FRONTEND_START_S:g} s")
        time.sleep(POLL_S)
    return connect_to_frontend(folder, address, pids)


def _start_frontend(folder: Path, agent_pid: int, flags: list[str]) -> ChildProcess:
    environment = {
        name: value
        for name, value in child_environment(os.environ).items()
        if name not in _TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }
    environment |= {FOLDER_VARIABLE: str(folder), AGENT_VARIABLE: str(agent_pid)}
    # A child inherits the mask of blocked signals, but the front end must receive these signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        # `ChildProcess` starts the front end in a new session, so the front end outlives this
        # worker. When torchrun's agent exits, the front end drains.
        return ChildProcess(
            [sys.executable, "-m", "serving", "serve", *flags], environment=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class _FrontendProcess:
    """This node's front end. Sends SIGTERM once; a second SIGTERM would skip draining."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop_sent = threading.Lock()  # Never released: only the first caller acquires it.

    def stop_once(self) -> None:
        address = read_frontend_address(self._folder)
        if address is not None and self._stop_sent.acquire(blocking=False):
            os.kill(address.pid, signal.SIGTERM)


class _StopSignals:
    """Waits for SIGTERM, SIGINT or SIGHUP in a thread: the main thread may be in a collective."""

    def __init__(self) -> None:
        self._handler: Callable[[], None] | None = None
        threading.Thread(target=self._wait_for_signal, name="signals", daemon=True).start()

    def set_handler(self, handler: Callable[[], None]) -> None:
        """Call `handler` at each later signal. Without a handler, a signal ends the process."""
        self._handler = handler

    def _wait_for_signal(self) -> None:
        while True:
            signal_number = signal.sigwait(SIGNALS)
            if self._handler is None:
                os._exit(128 + signal_number)
            log.info("event=asked_to_end signal=%s", signal.Signals(signal_number).name)
            time.sleep(STOP_DELAY_S)
            self._handler()
