"""`preamble serve` in a process of its own, for what is measured from outside of it.

Where it listens is what its first line says; what it and its ranks spend is what the system says.
Knows no load and no verdict.
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
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from planning.measurement.child_command import server

START_S = 180.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """CPU seconds since the start."""

    front_s: float
    ranks_s: float

    def since(self, before: "Spent") -> "Spent":
        return Spent(self.front_s - before.front_s, self.ranks_s - before.ranks_s)


@dataclass(frozen=True)
class Served:
    """A server that answers at `address`."""

    pid: int
    address: str

    @property
    def spent(self) -> Spent:
        ranks = [pid for child in _children(self.pid) for pid in (child, *_children(child))]
        return Spent(cpu_s(self.pid), sum(map(cpu_s, ranks)))

    @property
    def front_bytes(self) -> int:
        """Anonymous memory of the front end."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(match[1]) << 10 if match else 0


def cpu_s(pid: int) -> float:
    """Of a process with all its threads, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@contextmanager
def served(
    model: Path, words: Sequence[str] = (), limits: Mapping[str, object] | None = None
) -> Iterator[Served]:
    """On free ports; `words` are flags of the command, `limits` settings."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        line: list[str | Path] = [model, *words]
        if limits:
            settings = Path(folder) / "limits.yaml"
            settings.write_text(yaml.safe_dump(dict(limits)))
            line += ["--config", settings]
        with server(line, Path(folder) / "log", START_S) as (started, address):
            yield Served(started.process.pid, address)


@contextmanager
def random_checkpoint(network: GPTConfig) -> Iterator[Path]:
    """Without a tokenizer, so that texts are numbers and nothing ends them early."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_native(fresh(network, 0), Path(folder) / "model")
        yield Path(folder) / "model"
