"""Server process: runs `preamble serve` in a child and reads its CPU time and memory.

The CPU time of the front end and of its rank processes, and the memory of the front end, are read
from /proc.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from planning.measurement.child_command import run_server

START_S = 180.0  # Time limit for the start of a server.
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of the front end and of its rank processes since they started."""

    frontend_s: float
    ranks_s: float

    def since(self, earlier: "CpuTime") -> "CpuTime":
        return CpuTime(self.frontend_s - earlier.frontend_s, self.ranks_s - earlier.ranks_s)


@dataclass(frozen=True)
class ServerProcess:
    """A running server that accepts requests at `address`."""

    pid: int
    address: str

    @property
    def cpu_time(self) -> CpuTime:
        # The rank processes are among the children and grandchildren of the front end.
        children = _children(self.pid)
        ranks = [pid for child in children for pid in (child, *_children(child))]
        return CpuTime(cpu_s(self.pid), sum(map(cpu_s, ranks)))

    @property
    def frontend_bytes(self) -> int:
        """Return the bytes of anonymous memory of the front-end process; 0 if unknown."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(match[1]) << 10 if match else 0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process: all threads, user and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@contextmanager
def running_server(
    model: Path, arguments: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Iterator[ServerProcess]:
    """Run `preamble serve` on free ports.

    `arguments` are command-line flags; `settings` is the content of the config file.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command: list[str | Path] = [model, *arguments]
        if settings:
            settings_file = Path(folder) / "limits.yaml"
            settings_file.write_text(yaml.safe_dump(dict(settings)))
            command += ["--config", settings_file]
        with run_server(command, Path(folder) / "log", START_S) as (started, address):
            yield ServerProcess(started.process.pid, address)


@contextmanager
def saved_random_checkpoint(network: GPTConfig) -> Iterator[Path]:
    """Save a model with random weights and yield its path.

    The model has no tokenizer and no end token; its prompts are token ids.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_native(random_init_checkpoint(network, 0), Path(folder) / "model")
        yield Path(folder) / "model"
