"""Stage runner: runs the stages of a proof one after another, each in a process of its own.

A stage that crashes, hangs or runs out of memory ends alone. A stage writes its figures to a file
of JSON lines, one figure a line; they are in the proof file within a second, even if the stage then
fails. A stage gets its own time limit or the rest of the budget, whichever is shorter.

A line is {"figure": NAME, "value": VALUE}, {"row": NAME, "value": ROW} for a target's row, or
{"skipped": REASON} or {"failed": REASON}. The module does not import torch.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.gpu_proof.proof_file import TABLE_FIGURE, ProofFile, StageResult
from gpt.child_processes import ChildProcess

POLL_S = 0.25
LIMIT_S_MIN = 5.0  # A stage does not start if less of the budget is left.
REASON_CHARACTERS_MAX = 500


@dataclass(frozen=True)
class Stage:
    """A part of the proof. `command` runs it; it gets the path of its figures as last argument."""

    name: str
    title: str
    command: Sequence[str]
    limit_s: float


class FiguresFile:
    """The figures that a stage writes, in the stage's process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, name: str, value: Any) -> None:
        """Record a figure: a value that JSON can represent."""
        self._write({"figure": name, "value": value})

    def add_table(self, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """Record the stage's table as far as it is measured; it replaces the one before."""
        self.add(TABLE_FIGURE, {"columns": list(columns), "lines": [list(line) for line in lines]})

    def add_row(self, name: str, row: Any) -> None:
        """Record the row of a performance target."""
        self._write({"row": name, "value": row})

    def skip(self, reason: str) -> None:
        """Say that the stage cannot run on this machine."""
        self._write({"skipped": reason})

    def fail(self, reason: str) -> None:
        """Say why the stage fails; its process must exit with a code other than 0."""
        self._write({"failed": reason})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def run_stages(
    stages: Sequence[Stage],
    proof: ProofFile,
    budget_s: float,
    print_line: Callable[[str], None],
) -> None:
    """Run the stages within `budget_s` seconds, and keep the proof file up to date."""
    end = time.monotonic() + budget_s
    results = [StageResult(stage.name, stage.title) for stage in stages]
    proof.add_stages(results)
    proof.write()
    for stage, result in zip(stages, results, strict=True):
        remaining_s = end - time.monotonic()
        if remaining_s < LIMIT_S_MIN:
            result.reason = f"only {max(0.0, remaining_s):.0f} s of the budget were left"
        else:
            _run_stage(stage, result, proof, min(stage.limit_s, remaining_s))
        proof.write()
        reason = f": {result.reason}" if result.reason else ""
        print_line(f"{stage.name:12} {result.status:10} {result.seconds:6.1f} s{reason}")


def _run_stage(stage: Stage, result: StageResult, proof: ProofFile, limit_s: float) -> None:
    logs = proof.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    figures_path, log_path = logs / f"{stage.name}.jsonl", logs / f"{stage.name}.log"
    figures_path.write_text("")
    result.status, result.reason = "failed", "the run ended during this stage"
    proof.write()
    start = time.monotonic()
    with log_path.open("w") as log_file:
        child = ChildProcess(
            [*stage.command, figures_path], stdout=log_file.fileno(), stderr=log_file
        )
        try:
            exit_code = _wait(child, figures_path, result, proof, start + limit_s)
        finally:
            child.stop(timeout_s=0)
    result.seconds = round(time.monotonic() - start, 2)
    outcome_lines = _read_figures(figures_path, result)
    if exit_code is None:
        result.status, result.reason = "timed out", f"it did not end within {limit_s:.0f} s"
    elif exit_code == 0:
        result.status = "skipped" if "skipped" in outcome_lines else "passed"
        result.reason = outcome_lines.get("skipped", "")
    else:
        result.status = "failed"
        result.reason = outcome_lines.get("failed") or _failure_text(exit_code, log_path)
    result.reason = result.reason[:REASON_CHARACTERS_MAX]


def _wait(
    child: ChildProcess, figures_path: Path, result: StageResult, proof: ProofFile, end: float
) -> int | None:
    """Wait for the stage, and copy its figures; return its exit code, or None after the limit."""
    figures_bytes = 0
    while (remaining_s := end - time.monotonic()) > 0:
        try:
            return child.wait(min(POLL_S, remaining_s))
        except subprocess.TimeoutExpired:
            if (size := figures_path.stat().st_size) != figures_bytes:
                figures_bytes = size
                _read_figures(figures_path, result)
                proof.write()
    return None


def _read_figures(path: Path, result: StageResult) -> dict[str, str]:
    """Copy the figures into the result; return the other lines. A partial last line is left out."""
    outcome_lines: dict[str, str] = {}
    for text in path.read_text("utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "figure" in line:
            result.figures[line["figure"]] = line["value"]
        elif "row" in line:
            result.figures.setdefault("rows", {})[line["row"]] = line["value"]
        else:
            outcome_lines |= line
    return outcome_lines


def _failure_text(exit_code: int, log_path: Path) -> str:
    """Say how the process ended, with the last line of its log."""
    log_lines = log_path.read_text("utf-8", errors="replace").split("\n")
    last_lines = [line.strip() for line in log_lines if line.strip()][-1:]
    ended = f"exit code {exit_code}"
    if exit_code < 0:
        ended = f"killed by {signal.Signals(-exit_code).name}"
    return ": ".join([ended, *last_lines])
