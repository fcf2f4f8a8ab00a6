"""Rank launcher of a run: a single process, local child processes, or torchrun workers.

Without torchrun, this process is rank 0 and starts the other ranks as child processes. The child
ranks read all settings from their standard input and end when rank 0 ends. Rank 0 writes the
progress, and the error messages of all ranks, to the terminal. This module is independent of the
training code.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gpt.child_processes import ChildProcess, die_with_parent
from gpt.cpu_threads import set_thread_count
from gpt.errors import ConfigError, PreambleError
from gpt.files.abandoned_files import temporary_folder
from gpt.files.atomic_files import write_atomic
from gpt.parallel.mesh import Mesh
from ptuning.config import SHARED_TASK_SETTINGS, ParallelConfig, TuneConfig

# Exit code of a rank whose only error is a lost connection to another rank.
EXIT_PEER_LOST = 3
# Parts of the messages with which gloo and NCCL report a lost connection.
PEER_LOST_MESSAGES = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
# Maximum duration of each of the two waits after a child rank has failed:
# - `_watch_children` waits until rank 0 notices the failure in a collective;
# - `failure_reason` waits until all child ranks have ended and have written their errors.
PEER_FAILURE_WAIT_S = 5.0
WATCH_INTERVAL_S = 0.2  # Time between two checks of the child processes.
SHUTDOWN_WAIT_S = 20.0  # Time for the child ranks to end after rank 0 has finished.
SHUTDOWN_AFTER_ERROR_WAIT_S = 1.0  # Time for the child ranks to end after an error on rank 0.
# Timeout of a collective. It is long, because the other ranks wait in a collective while rank 0
# computes the digest of the base model, which can require reading all weights.
COLLECTIVE_TIMEOUT_S = 1800.0


class PeerLostError(ConfigError):
    """A lost connection to another rank; the cause is a failure of that rank."""


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_rank_zero() -> bool:
    """Return whether this process is rank 0.

    Child ranks must not call this function, because it always returns True without torchrun.
    """
    return not under_torchrun() or int(os.environ["RANK"]) == 0


def is_peer_lost(error: RuntimeError) -> bool:
    """Return whether the error is a lost connection to another rank, not an error of this rank."""
    return isinstance(error, dist.DistError) or any(
        message in str(error) for message in PEER_LOST_MESSAGES
    )


@contextmanager
def join_mesh(config: TuneConfig, restart: bool) -> Iterator[Mesh]:
    """Join this process to the mesh and yield the mesh; on exit, all child ranks have ended."""
    parallel_config, device = config.parallel_config, config.model_config.device
    if under_torchrun():
        try:
            yield _join_torchrun(parallel_config, device)
        except RuntimeError as error:
            if not is_peer_lost(error):
                raise
            raise PeerLostError(_peer_lost_message(str(error))) from error
        except PreambleError:
            # Another rank waits with its own error (`_report_error`) and keeps its connections: if
            # it closed them, rank 0 would print a lost connection before that error.
            if is_rank_zero():
                _destroy_process_group()
            raise
        _destroy_process_group()
    elif parallel_config.ranks == 1:
        set_thread_count()
        yield Mesh.single(device)
    else:
        _check_devices(parallel_config, device)
        with temporary_folder("tune") as folder:
            try:
                with _child_ranks(config, folder, restart=restart):
                    yield _join_local(parallel_config, device, 0, folder)
                    _destroy_process_group()
            finally:
                # After an error, the child ranks have ended, so no collective is pending.
                _destroy_process_group()


def _destroy_process_group() -> None:
    """End the process group, if any, and its threads.

    A thread of gloo that still runs at the finalization of the interpreter can abort the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class RankSpec:
    """Settings, rank number and folder that rank 0 sends to a child rank."""

    config: TuneConfig
    restart: bool
    rank: int
    folder: Path  # Contains the rendezvous store and the error files of the ranks.

    def join(self) -> Mesh:
        device = self.config.model_config.device
        return _join_local(self.config.parallel_config, device, self.rank, self.folder)


def start_child_rank(stdin: TextIO) -> RankSpec:
    """Set up this process as a child rank; return the RankSpec that rank 0 has sent."""
    message = json.loads(stdin.read())
    die_with_parent(message["parent"])
    # Rank 0 handles these signals and ends all ranks.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    config = TuneConfig.from_dict(message["config"], "the run's settings")
    return RankSpec(config, message["restart"], message["rank"], Path(message["folder"]))


def report_rank_error(folder: Path, rank: int, message: str) -> None:
    """Write a rank's error message to the file that rank 0 reads."""
    write_atomic(folder / f"trouble-{rank}", message.encode(), durable=False)


@contextmanager
def _child_ranks(config: TuneConfig, folder: Path, *, restart: bool) -> Iterator[None]:
    """Start the child ranks; on exit, end them.

    If rank 0 loses its connection to a child rank, raise PeerLostError with the child's error.
    """
    processes: list[ChildProcess] = []
    stopped = threading.Event()
    try:
        for rank in range(1, config.parallel_config.ranks):
            process = ChildProcess(
                [sys.executable, "-m", "ptuning", "rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            processes.append(process)
            assert process.stdin is not None
            message = {
                "config": config_to_dict(config),
                "restart": restart,
                "rank": rank,
                "folder": str(folder),
                "parent": os.getpid(),
            }
            with suppress(BrokenPipeError):  # The child has ended; the watcher reports the failure.
                process.stdin.write(json.dumps(message))
                process.stdin.close()
        watcher = threading.Thread(
            target=_watch_children, args=(processes, folder, stopped), daemon=True
        )
        watcher.start()
        try:
            yield
        except RuntimeError as error:
            stopped.set()
            if not is_peer_lost(error):
                raise
            # The child rank's error message is more useful than this rank's lost connection.
            raise PeerLostError(failure_reason(processes, folder, str(error))) from error
    finally:
        stopped.set()
        _stop_children(processes)


def _watch_children(
    processes: Sequence[ChildProcess], folder: Path, stopped: threading.Event
) -> None:
    """Poll the child ranks; end this process, rank 0, if it does not notice that a child failed.

    In the rendezvous and in NCCL, the main thread of rank 0 would stay blocked until the timeout of
    the collective, and a blocked thread cannot receive an exception. Therefore os._exit ends the
    process. The saved training states stay intact, because a state gets its final name only after
    it is complete.
    """
    while not stopped.wait(WATCH_INTERVAL_S):
        if any(process.poll() for process in processes) and not stopped.wait(PEER_FAILURE_WAIT_S):
            reason = failure_reason(processes, folder, "a rank has failed")
            with suppress(OSError):
                os.write(2, f"preamble tune: {reason}\n".encode(errors="replace"))
            for process in processes:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def failure_reason(processes: Sequence[ChildProcess], folder: Path, fallback: str) -> str:
    """Return why the run failed: the first of these that exists.

    - the error message that a child rank has written;
    - the exit code or the signal of a failed child rank;
    - a message about a lost connection, with `fallback` as the details.
    """
    deadline = time.monotonic() + PEER_FAILURE_WAIT_S
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for path in sorted(folder.glob("trouble-*")):
        return path.read_text("utf-8")
    failures = [
        (rank, code)
        for rank, code in enumerate(codes, 1)
        if code is not None and code not in (0, EXIT_PEER_LOST)
    ]
    if not failures:
        return _peer_lost_message(fallback)
    # gloo may abort a rank (SIGABRT) because another rank has failed, so a rank that ended in
    # another way is the more probable cause.
    rank, code = min(failures, key=lambda failure: failure[1] == -signal.SIGABRT)
    exit_description = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    memory_hint = ", perhaps out of memory" if code == -signal.SIGKILL else ""
    return (
        f"rank {rank} {exit_description}{memory_hint}; the last saved state is intact, "
        "and the same command resumes from it"
    )


def _peer_lost_message(details: str) -> str:
    return (
        f"a rank lost its connection to another rank ({' '.join(details.split())[:200]}); "
        "run the same command again to resume"
    )


def _stop_children(processes: Sequence[ChildProcess]) -> None:
    for process in processes:
        process.wait_or_kill(
            SHUTDOWN_WAIT_S if sys.exc_info()[0] is None else SHUTDOWN_AFTER_ERROR_WAIT_S
        )


def config_to_dict(config: TuneConfig) -> dict[str, Any]:
    """Return the settings as a mapping that TuneConfig.from_dict accepts."""
    settings: dict[str, Any] = json.loads(json.dumps(config.to_record()))
    if settings["tasks"]:
        # If `tasks` is set, TuneConfig.from_dict refuses these settings at the top level.
        task_settings = set(settings["tasks"][0]) - SHARED_TASK_SETTINGS
        settings = {key: value for key, value in settings.items() if key not in task_settings}
    return settings


def _join_local(parallel_config: ParallelConfig, device: str, rank: int, folder: Path) -> Mesh:
    world_size = parallel_config.ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_thread_count(world_size, respect_environment=False)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    return _create_mesh(
        parallel_config, device, local_rank=rank, store=store, rank=rank, world_size=world_size
    )


def _join_torchrun(parallel_config: ParallelConfig, device: str) -> Mesh:
    torchrun_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    ranks = parallel_config.ranks
    if torchrun_size != ranks:
        raise ConfigError(
            f"{_describe_split(parallel_config)} needs {ranks} ranks, but torchrun has started "
            f"{torchrun_size}; set nnodes x nproc-per-node to {ranks}"
        )
    # torchrun sets OMP_NUM_THREADS to 1.
    set_thread_count(int(os.environ["LOCAL_WORLD_SIZE"]), respect_environment=False)
    return _create_mesh(parallel_config, device, local_rank=local_rank)


def _create_mesh(
    parallel_config: ParallelConfig, device: str, *, local_rank: int, **init_options: Any
) -> Mesh:
    cuda = device.startswith("cuda")
    rank_device = torch.device("cuda", local_rank) if cuda else torch.device(device)
    if cuda:
        torch.cuda.set_device(rank_device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), **init_options
    )
    return Mesh.create(
        parallel_config.tp,
        parallel_config.pp,
        parallel_config.dp,
        device=rank_device,
        sequence_parallel=parallel_config.sequence_parallel,
    )


def _check_devices(parallel_config: ParallelConfig, device: str) -> None:
    ranks = parallel_config.ranks
    if device.startswith("cuda") and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"{_describe_split(parallel_config)} needs {ranks} GPUs, but this machine has "
            f"{torch.cuda.device_count()}; reduce tp, pp or dp, or use torchrun on several machines"
        )


def _describe_split(parallel_config: ParallelConfig) -> str:
    return f"tp {parallel_config.tp} x pp {parallel_config.pp} x dp {parallel_config.dp}"
