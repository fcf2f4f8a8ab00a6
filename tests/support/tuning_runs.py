"""Runs of `preamble tune` for tests: started, watched, starved, and read afterwards.

Each is the command itself in a process of its own, forked from a server that has torch loaded; its
other ranks it starts itself. Every wait has an end.
"""

import csv
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from signal import SIGKILL
from threading import Thread

import torch

from gpt.adapters.adapter_file import open_adapter
from tests.support.ranks import FORKSERVER, PRELOAD
from tests.support.servers import ROOT
from tests.support.tuning_settings import write_settings

# What a run imports beside what ranks do. Only a server that starts with a run has it loaded.
MORE = (
    "torch._dynamo",
    "preamble",
    "ptuning.__main__",
    "ptuning.run.training_loop",
    "ptuning.reporting.observer",
)
END_S = 180.0
MANY = 100_000  # Steps: it does not end by itself.

Start = Callable[..., "Run"]


@dataclass
class Run:
    """`preamble tune`, running."""

    process: ForkServerProcess
    folder: Path
    listener: Thread  # Until all that it has started has ended.

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def wrote(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def ranks(self) -> list[int]:
        """The processes that it has started, in that order, which those numbers may not keep."""
        pids: list[int] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # A thread that ended meanwhile.
                pids += map(int, children.read_text().split())
        return pids

    @property
    def rows(self) -> int:
        return count_rows(self.folder)

    @property
    def goes_on(self) -> bool:
        return "going on" in self.said

    def kill(self, number: int = SIGKILL) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # Its exit code says so.
            os.kill(self.process.pid, number)

    def end(self, timeout_s: float = END_S) -> int:
        """Its exit code. All that it has started ends with it."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout_s} s; said {self.said!r}"
        self.listener.join(timeout_s)
        assert not self.listener.is_alive(), "somebody still holds its stderr"
        return code

    def reach(self, rows: int) -> None:
        """Wait for so many steps."""
        end = time.monotonic() + END_S
        while self.rows < rows and self.process.is_alive():
            assert time.monotonic() < end, f"{self.rows} rows; said {self.said!r}"
            time.sleep(0.002)


@contextmanager
def starting() -> Iterator[Start]:
    """What starts runs; those that still go on in the end are ended."""
    FORKSERVER.set_forkserver_preload([*PRELOAD, *MORE])
    runs: list[Run] = []

    def one(file: Path, *words: str, room: int | None = None) -> Run:
        """`room`: the most bytes that it can write into a file."""
        folder = file.parent
        for name in ("out", "err"):
            (folder / name).write_bytes(b"")
        ours, theirs = FORKSERVER.Pipe(duplex=False)
        arguments = (folder, theirs, [str(file), *words], room)
        process = FORKSERVER.Process(target=_command, args=arguments)
        process.start()
        theirs.close()
        listener = Thread(target=_keep, args=(ours, folder / "err"), daemon=True)
        listener.start()
        runs.append(Run(process, folder, listener))
        return runs[-1]

    try:
        yield one
    finally:
        for run in runs:
            run.process.kill()
            run.process.join()


def _keep(pipe: Connection, file: Path) -> None:
    """What is said goes through a pipe, which has room where the disk has none."""
    with pipe, file.open("ab", buffering=0) as out:
        while said := os.read(pipe.fileno(), 10_000):
            out.write(said)


def _command(folder: Path, stderr: Connection, words: list[str], room: int | None) -> None:
    import preamble

    os.chdir(ROOT)
    torch.set_num_threads(1)
    os.dup2(os.open(folder / "out", os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    sys.exit(preamble.main(["tune", *words]))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def latest(folder: Path) -> Path:
    """Of the runs there. One that was killed before its first state does not go on."""
    runs = (folder / "runs/answer").glob("[1-9]*")
    return max(runs, key=lambda one: int(one.name), default=folder / "runs/answer/1")


def logged(folder: Path) -> list[tuple[str, ...]]:
    """What a run tells of its steps that a clock has no part in, as it is written."""
    with suppress(FileNotFoundError), open(latest(folder) / "metrics.csv") as file:
        names = ("step", "loss", "rate", "gradient_norm", "skipped")
        return [tuple(row[name] or "" for name in names) for row in csv.DictReader(file)]
    return []


def count_rows(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (latest(folder) / "metrics.csv").read_bytes().count(b"\n") - 1
    return 0


def states(folder: Path) -> list[str]:
    return sorted(one.name for one in latest(folder).iterdir() if "state-" in one.name)


def adapters(folder: Path) -> list[str]:
    """What a server would see."""
    return sorted(one.name for one in (folder / "adapters").iterdir() if one.name[0] != ".")


def table(folder: Path) -> torch.Tensor:
    return open_adapter(folder / "adapters" / "answer@1.safetensors").table


def made(folder: Path, checkpoint: Path, **changes: object) -> Path:
    """Settings of a run in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return write_settings(folder, checkpoint, **{"save_every": 3, **changes})
