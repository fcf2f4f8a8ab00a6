"""`preamble serve` in a process of its own, for what is measured from outside of it.

Where it listens is what its first line says; what it and its ranks spend is what the system says.
Every wait has an end. Knows no load and no verdict.
"""

import os
import re
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from checkpoints_tools.convert import write_native
from gpt.config import GPTConfig
from gpt.fresh import fresh

ROOT = Path(__file__).resolve().parent.parent
START_S = 180.0
STOP_S = 30.0
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
        line = [sys.executable, "-m", "preamble", "serve", str(model), *words]
        line += ["--port", "0", "--http-port", "0"]
        if limits:
            settings = Path(folder) / "limits.yaml"
            settings.write_text(yaml.safe_dump(dict(limits)))
            line += ["--config", str(settings)]
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                line, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        try:
            yield Served(process.pid, _address(process, log))
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _address(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        said = process.stdout.readline() if selector.select(START_S) else ""
    match = re.search(r"\bgrpc=(\S+)", said)
    if match is None:
        tail = log.read_text()[-2000:]
        raise RuntimeError(f"the server did not come up within {START_S:g} s:\n{tail}")
    return match[1]


@contextmanager
def random_checkpoint(network: GPTConfig) -> Iterator[Path]:
    """Without a tokenizer, so that texts are numbers and nothing ends them early."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_native(fresh(network, 0), Path(folder) / "model")
        yield Path(folder) / "model"
