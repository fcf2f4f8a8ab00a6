"""Runs of `preamble tune` in tests: start, watch, starve, and read their files.

Each is the command in a process of its own, forked from a server that has torch loaded; the run
starts its other ranks itself. Every wait has a time-out.
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
from tests.support.ranks import FORKSERVER
from tests.support.servers import ROOT
from tests.support.tuning_settings import write_settings

END_S = 180.0
MANY = 100_000  # Steps: the run does not end by itself.

Start = Callable[..., "Run"]


@dataclass
class Run:
    """`preamble tune`, running."""

    process: ForkServerProcess
    folder: Path
    listener: Thread  # Runs until every process of the run has ended.

    @property
    def stderr(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def only_stderr_line(self) -> str:
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]

    @property
    def stdout(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def ranks(self) -> list[int]:
        """The processes that it has started, in their order of start unless pids wrapped."""
        pids: list[int] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # The thread has ended.
                pids += map(int, children.read_text().split())
        return pids

    @property
    def rows(self) -> int:
        return count_rows(self.folder)

    @property
    def resumed(self) -> bool:
        return "resuming from" in self.stderr

    def kill(self, number: int = SIGKILL) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # The process has ended; `end` returns its exit code.
            os.kill(self.process.pid, number)

    def end(self, timeout_s: float = END_S) -> int:
        """The exit code. All processes of the run end with it."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout_s} s; said {self.stderr!r}"
        self.listener.join(timeout_s)
        assert not self.listener.is_alive(), "somebody still holds its stderr"
        return code

    def reach(self, rows: int) -> None:
        """Wait until this number of steps is logged."""
        end = time.monotonic() + END_S
        while self.rows < rows and self.process.is_alive():
            assert time.monotonic() < end, f"{self.rows} rows; said {self.stderr!r}"
            time.sleep(0.002)


@contextmanager
def starting() -> Iterator[Start]:
    """A function that starts runs; those that still run in the end are killed."""
    runs: list[Run] = []

    def start(file: Path, *words: str, file_bytes_max: int | None = None) -> Run:
        """Start a run; `file_bytes_max` is the largest file in bytes that it can write."""
        folder = file.parent
        for name in ("out", "err"):
            (folder / name).write_bytes(b"")
        parent_end, child_end = FORKSERVER.Pipe(duplex=False)
        arguments = (folder, child_end, [str(file), *words], file_bytes_max)
        process = FORKSERVER.Process(target=_command, args=arguments)
        process.start()
        child_end.close()
        listener = Thread(target=_keep, args=(parent_end, folder / "err"), daemon=True)
        listener.start()
        runs.append(Run(process, folder, listener))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.process.kill()
            run.process.join()


def _keep(pipe: Connection, file: Path) -> None:
    """Write stderr from a pipe to a file. The pipe also works for a run whose disk is full."""
    with pipe, file.open("ab", buffering=0) as out:
        while chunk := os.read(pipe.fileno(), 10_000):
            out.write(chunk)


def _command(
    folder: Path, stderr: Connection, arguments: list[str], file_bytes_max: int | None
) -> None:
    import preamble

    os.chdir(ROOT)
    torch.set_num_threads(1)
    os.dup2(os.open(folder / "out", os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    if file_bytes_max is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, resource.RLIM_INFINITY))
    sys.exit(preamble.main(["tune", *arguments]))


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def latest(folder: Path) -> Path:
    """The latest run. A run that was killed before its first state is not resumed."""
    runs = (folder / "runs/answer").glob("[1-9]*")
    return max(runs, key=lambda run: int(run.name), default=folder / "runs/answer/1")


def logged(folder: Path) -> list[tuple[str, ...]]:
    """The logged columns of each step that do not depend on a clock."""
    with suppress(FileNotFoundError), open(latest(folder) / "metrics.csv") as file:
        names = ("step", "loss", "rate", "gradient_norm", "skipped")
        return [tuple(row[name] or "" for name in names) for row in csv.DictReader(file)]
    return []


def count_rows(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (latest(folder) / "metrics.csv").read_bytes().count(b"\n") - 1
    return 0


def states(folder: Path) -> list[str]:
    return sorted(state.name for state in latest(folder).iterdir() if "state-" in state.name)


def adapters(folder: Path) -> list[str]:
    """The adapters that a server would see."""
    return sorted(
        adapter.name for adapter in (folder / "adapters").iterdir() if adapter.name[0] != "."
    )


def table(folder: Path) -> torch.Tensor:
    return open_adapter(folder / "adapters" / "answer@1.safetensors").table


def write_run_settings(folder: Path, checkpoint: Path, **changes: object) -> Path:
    """Settings of a run in its own folder."""
    folder.mkdir(exist_ok=True)
    return write_settings(folder, checkpoint, **{"save_every": 3, **changes})
