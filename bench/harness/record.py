"""A run of the bench as a file: what ran where, every row with its samples, and what is missing.

It is written anew after each thing that was measured, so a run that is killed loses nothing. The
folder's files, one for each run, are what a graph of them is drawn from. Judges nothing.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.roofline import Limit
from bench.harness.targets import Row, Settings
from gpt.errors import ConfigError

FOLDER = Path("build/bench")
VERSION = 1

# What a part of the bench gives, one after another: rows, what they stand on, and talk.
Item = str | Row | Settings | Limit


@dataclass
class Record:
    """One run. What is told is kept, and written at once."""

    path: Path
    facts: Mapping[str, Any]
    settings: list[Mapping[str, Any]] = field(default_factory=list)
    limits: list[Mapping[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def begun(cls, asked: Sequence[str], folder: Path = FOLDER) -> "Record":
        """`asked`: the words of the command."""
        when, what = time.strftime("%Y-%m-%dT%H:%M:%S"), commit()
        name = f"{when.replace(':', '').replace('T', '-')}-{what.replace('+', '-changed')}.json"
        facts = {
            "version": VERSION,
            "begun": when,
            "commit": what,
            "asked": list(asked),
            "machine": machine(),
        }
        return cls(folder / name, facts)

    def note(self, item: Item) -> None:
        match item:
            case Row():
                self.rows[item.promise.name] = item
            case Settings():
                self.settings.append({"title": item.title, "sides": dict(item.sides)})
            case Limit():
                some = {way: list(samples) for way, samples in item.ways.items()}
                limit = {"name": item.name, "unit": f"{item.unit}/s", "value": item.value}
                self.limits.append({**limit, "way": item.best, "samples": some})
            case str():
                return
        self._write()

    def _write(self) -> None:
        whole = {
            **self.facts,
            "settings": self.settings,
            "limits": self.limits,
            "rows": [_figures(row) for row in self.rows.values()],
        }
        half = self.path.with_suffix(".part")
        try:
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
            half.replace(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}); run it where that can be"
            ) from None


def _figures(row: Row) -> dict[str, Any]:
    promise = row.promise
    told: dict[str, Any] = {
        "name": promise.name,
        "what": promise.what,
        "unit": promise.unit,
        "target": promise.target,
        "at_most": promise.at_most,
        "verdict": row.verdict,
    }
    if row.missing:
        return told | {"missing": row.missing}
    samples = {side: [x for x in some if math.isfinite(x)] for side, some in row.samples.items()}
    medians = {side: statistics.median(some) for side, some in samples.items() if some}
    told |= {"value": _finite(row.value), "told": row.told, "medians": medians, "samples": samples}
    return told | {"share_of_bound": None if row.share is None else _finite(row.share)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def commit() -> str:
    """Of this checkout, `+` where files differ from it; `none` where it is none."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        line = ["git", "-C", str(root), *words]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "none"


def machine() -> dict[str, str]:
    """What this runs on, in words."""
    import torch

    from gpt.cpu.kernels import machine as kind

    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    numbers = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{numbers / (1 << 30):.0f} GiB",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "library": kind() or "not built",
    }


def runs(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Every run that stands in the folder, the oldest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = json.loads(path.read_text())
            version = run["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a run of the bench ({error!r}); move it away"
            ) from None
        if version != VERSION:
            raise ConfigError(
                f"{path} has version {version}, and this reads {VERSION}; move it away"
            )
        found.append(run)
    return sorted(found, key=lambda run: str(run["begun"]))
