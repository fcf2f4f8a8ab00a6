"""The ranks of a run: this process alone, processes of our own on one machine, or torchrun's.

This process is rank 0 and starts the others, which are told all by their standard input and end
with it. Who talks to people is rank 0; another rank's trouble is told by it. Knows nothing of what
the ranks do.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gpt.child_processes import child_environment, end_with
from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import OF_ALL_TASKS, TuneConfig

LOST = 3  # The exit code of a rank that has nothing to tell but that another one has gone.
LOST_WORDS = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
LOST_S = 5.0  # For rank 0 to notice by itself that another has failed, and for that to say why.
WATCH_S = 0.2  # Between two looks at whether the others are there.
END_S = 20.0  # For ranks to end by themselves, once rank 0 has.
COLLECTIVE_S = 1800.0  # The longest that a rank may wait for another, as in a validation.


class LostError(ConfigError):
    """Ranks have lost each other. Why, another one knows."""


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process is the rank that talks to people."""
    return not under_torchrun() or int(os.environ["RANK"]) == 0


def lost(error: RuntimeError) -> bool:
    """Whether it says that another rank has gone, and is no trouble of this rank's own."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in LOST_WORDS)


@contextmanager
def joined(config: TuneConfig, restart: bool) -> Iterator[Mesh]:
    """The mesh, with this process in it; whoever was started here has ended after it."""
    count = config.tp * config.pp * config.dp
    if under_torchrun():
        try:
            yield _join_torchrun(config, count)
        except RuntimeError as error:
            if not lost(error):
                raise
            raise LostError(_lost(str(error))) from error
        dist.destroy_process_group()
    elif count == 1:
        yield Mesh.single(config.device)
    else:
        _check_devices(config, count)
        with (
            tempfile.TemporaryDirectory(prefix="preamble-tune-") as folder,
            _others(config, count, Path(folder), restart=restart),
        ):
            yield _join(config, 0, count, Path(folder))
            dist.destroy_process_group()


@dataclass(frozen=True)
class Charge:
    """What a rank that was started here is told."""

    config: TuneConfig
    restart: bool
    rank: int
    ranks: int
    folder: Path  # Where the ranks meet, and leave word of their trouble.

    def join(self) -> Mesh:
        return _join(self.config, self.rank, self.ranks, self.folder)


def follow(stdin: TextIO) -> Charge:
    """Be a rank of a run whose first rank has started this process."""
    told = json.loads(stdin.read())
    end_with(told["parent"])
    for one in (signal.SIGINT, signal.SIGTERM):  # Rank 0 hears them, and tells.
        signal.signal(one, signal.SIG_IGN)
    config = TuneConfig.of(told["config"], "the run's settings")
    return Charge(config, told["restart"], told["rank"], told["ranks"], Path(told["folder"]))


def report_trouble(folder: Path, rank: int, words: str) -> None:
    """Leave a sentence where rank 0 looks for it."""
    part = folder / f".trouble-{rank}"
    part.write_text(words)
    part.rename(folder / f"trouble-{rank}")


@contextmanager
def _others(config: TuneConfig, count: int, folder: Path, *, restart: bool) -> Iterator[None]:
    processes: list[subprocess.Popen[str]] = []
    over = threading.Event()
    try:
        for rank in range(1, count):
            process = subprocess.Popen(
                [sys.executable, "-m", "ptuning", "rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env=child_environment(os.environ),
                start_new_session=True,  # So that Ctrl-C does not reach it while it starts.
            )
            processes.append(process)
            assert process.stdin is not None
            told = {
                "config": plain(config),
                "restart": restart,
                "rank": rank,
                "ranks": count,
                "folder": str(folder),
                "parent": os.getpid(),
            }
            with suppress(BrokenPipeError):  # It has gone already; that is noticed below.
                process.stdin.write(json.dumps(told))
                process.stdin.close()
        watch = threading.Thread(target=_watch, args=(processes, folder, over), daemon=True)
        watch.start()
        try:
            yield
        except RuntimeError as error:
            over.set()
            if not lost(error):
                raise
            # Why a rank has gone is told better by itself.
            raise LostError(_why(processes, folder, str(error))) from error
    finally:
        over.set()
        _end(processes)


def _watch(
    processes: Sequence["subprocess.Popen[str]"], folder: Path, over: threading.Event
) -> None:
    """End this process if it still waits for a rank that has failed.

    Where ranks meet first, and in NCCL, that would last as long as a collective may; and what waits
    there hears no exception. It is no worse than being killed: what was saved is whole.
    """
    while not over.wait(WATCH_S):
        if any(process.poll() for process in processes) and not over.wait(LOST_S):
            words = _why(processes, folder, "a rank has failed")
            with suppress(OSError):
                os.write(2, f"preamble tune: {words}\n".encode(errors="replace"))
            for process in processes:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _why(processes: Sequence["subprocess.Popen[str]"], folder: Path, said: str) -> str:
    """What the first rank with a trouble of its own says, or how it ended."""
    end = time.monotonic() + LOST_S
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for path in sorted(folder.glob("trouble-*")):
        return path.read_text()
    for rank, code in enumerate(codes, 1):
        if code not in (None, 0, LOST):
            assert code is not None
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            more = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
            return (
                f"rank {rank} {how}{more}; the last state that was saved is good: the same "
                "command goes on from it"
            )
    return _lost(said)


def _lost(said: str) -> str:
    return f"the ranks lost each other ({' '.join(said.split())[:200]}); run it again to go on"


def _end(processes: Sequence["subprocess.Popen[str]"]) -> None:
    for process in processes:
        try:
            process.wait(END_S if sys.exc_info()[0] is None else 1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def plain(config: TuneConfig) -> dict[str, Any]:
    """The settings as a YAML file would hold them."""
    record = json.loads(json.dumps(asdict(config)))
    if record["tasks"]:
        own = set(record["tasks"][0]) - OF_ALL_TASKS
        record = {key: value for key, value in record.items() if key not in own}
    return dict(record)


def _join(config: TuneConfig, rank: int, ranks: int, folder: Path) -> Mesh:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    return _mesh(config, local=rank, store=store, rank=rank, world_size=ranks)


def _join_torchrun(config: TuneConfig, count: int) -> Mesh:
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if world != count:
        raise ConfigError(
            f"tp {config.tp} x pp {config.pp} x dp {config.dp} is {count} ranks, torchrun has "
            f"started {world}; let nnodes x nproc-per-node be {count}"
        )
    torch.set_num_threads(
        max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
    )
    return _mesh(config, local=local)


def _mesh(config: TuneConfig, *, local: int, **how: Any) -> Mesh:
    cuda = config.device.startswith("cuda")
    device = torch.device("cuda", local) if cuda else torch.device(config.device)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=COLLECTIVE_S), **how
    )
    return Mesh.create(
        config.tp,
        config.pp,
        config.dp,
        device=device,
        sequence_parallel=config.sequence_parallel,
    )


def _check_devices(config: TuneConfig, count: int) -> None:
    if config.device.startswith("cuda") and torch.cuda.device_count() < count:
        raise ConfigError(
            f"tp {config.tp} x pp {config.pp} x dp {config.dp} needs {count} GPUs, this machine "
            f"has {torch.cuda.device_count()}; ask for fewer, or start it by torchrun on several"
        )
