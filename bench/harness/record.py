"""Bench record: one JSON file per run with machine, settings, limits, rows and samples.

The file is rewritten after each measurement, so a killed run keeps the measurements made so far.
`bench/harness/history.py` plots the files of the folder.
"""

import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.roofline import MeasuredLimit
from bench.harness.targets import Row, Settings
from gpt.errors import ConfigError
from gpt.files.atomic_files import write_atomic
from gpt.host_limits import total_memory_bytes, usable_cores
from gpt.json_output import nonfinite_to_none

RECORD_FOLDER = Path("build/bench")
FORMAT_VERSION = 1

# A suite yields result rows, settings of the compared engines, machine limits and lines of text.
SuiteOutput = str | Row | Settings | MeasuredLimit


@dataclass
class RunRecord:
    """The record of one run; each added measurement is written to the file at once."""

    path: Path
    header: Mapping[str, Any]
    settings: list[Mapping[str, Any]] = field(default_factory=list)
    limits: list[Mapping[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def create(cls, arguments: Sequence[str], folder: Path = RECORD_FOLDER) -> "RunRecord":
        """Start a record; `arguments` are the command-line arguments of the run."""
        started_at, commit_id = time.strftime("%Y-%m-%dT%H:%M:%S"), git_commit()
        time_name = started_at.replace(":", "").replace("T", "-")
        name = f"{time_name}-{commit_id.replace('+', '-changed')}.json"
        header = {
            "version": FORMAT_VERSION,
            "begun": started_at,
            "commit": commit_id,
            "asked": list(arguments),
            "machine": describe_machine(),
        }
        return cls(folder / name, header)

    def add(self, output: SuiteOutput) -> None:
        """Add an output and rewrite the file; a line of text is not recorded."""
        match output:
            case Row():
                self.rows[output.target.name] = output
            case Settings():
                self.settings.append({"title": output.title, "sides": dict(output.sides)})
            case MeasuredLimit():
                self.limits.append(limit_record(output))
            case str():
                return
        self._write()

    def _write(self) -> None:
        document = {
            **self.header,
            "settings": self.settings,
            "limits": self.limits,
            "rows": [row_record(row) for row in self.rows.values()],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(document, indent=1, allow_nan=False) + "\n"
            write_atomic(self.path, text.encode(), durable=False)
        except OSError as error:
            raise ConfigError(
                f"cannot write the benchmark record {self.path} ({error.strerror}); "
                "run the benchmark from a writable directory"
            ) from None


def limit_record(limit: MeasuredLimit) -> dict[str, Any]:
    """Return a measured limit as it is written to a record."""
    return {
        "name": limit.name,
        "unit": f"{limit.unit}/s",
        "value": limit.value,
        "way": limit.best_method,
        "samples": {method: list(rates) for method, rates in limit.rates_by_method.items()},
    }


def row_record(row: Row) -> dict[str, Any]:
    """Return a row as it is written to a record."""
    target = row.target
    record: dict[str, Any] = {
        "name": target.name,
        "what": target.title,
        "unit": target.unit,
        "target": target.threshold,
        "at_most": target.is_maximum,
        "verdict": row.verdict,
    }
    if row.not_run_reason:
        return record | {"missing": row.not_run_reason}
    samples = {
        side: [sample for sample in side_samples if math.isfinite(sample)]
        for side, side_samples in row.samples.items()
    }
    medians = {
        side: statistics.median(side_samples)
        for side, side_samples in samples.items()
        if side_samples
    }
    return record | {
        "value": nonfinite_to_none(row.value),
        "told": row.summary,
        "medians": medians,
        "samples": samples,
        "share_of_bound": nonfinite_to_none(row.bound_share),
    }


def git_commit() -> str:
    """Return the short commit id of this checkout, with `+` if there are changed or new files.

    Outside of a git checkout, the text is `none`.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "none"


def describe_machine() -> dict[str, str]:
    """Describe the hardware and software that the benchmark runs on."""
    import torch

    from gpt.cpu.kernels import isa_level

    cpu_file = Path("/proc/cpuinfo")
    cpu_text = cpu_file.read_text() if cpu_file.exists() else ""
    model_names = [
        line.partition(":")[2].strip() for line in cpu_text.splitlines() if "model name" in line
    ]
    memory_bytes = total_memory_bytes(within_limit=False)
    return {
        "processor": model_names[0] if model_names else platform.processor() or platform.machine(),
        "cores": str(usable_cores(within_quota=False)),
        "memory": f"{memory_bytes / (1 << 30):.0f} GiB",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "library": isa_level() or "not built",
    }


def read_runs(folder: Path = RECORD_FOLDER) -> list[dict[str, Any]]:
    """Return the records of all runs in a folder, oldest first."""
    past_runs = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = json.loads(path.read_text())
            version = run["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a benchmark record ({error!r}); move it out of the folder"
            ) from None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {version}; only version {FORMAT_VERSION} is supported; "
                "move it out of the folder"
            )
        past_runs.append(run)
    return sorted(past_runs, key=lambda run: str(run["begun"]))
