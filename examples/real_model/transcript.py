"""Transcript of an example: its commands with their output and durations, on disk and as a report.

A `Transcript` prints every command and its output while the command runs, and keeps both. The
record of a finished step is a file, so that the next run can skip the step and still report it.
The module does not know what the commands do.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpt.child_processes import ChildProcess, module_command
from gpt.files.atomic_files import write_atomic
from gpt.host_limits import usable_cores
from gpt.software_versions import library_version, preamble_version

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = re.compile(r", [^,]+ left$")  # Lines such as "evaluating: 53 of 60, 3 s left".
STOP_S = 120.0  # Time for an interrupted `preamble tune` to finish its step and save its state.


class CommandError(Exception):
    """A command of the example failed; `output` is what it printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass
class Entry:
    command: str  # As the report shows it; empty for lines that the example itself prints.
    output: str
    seconds: float


@dataclass
class StepRecord:
    """The commands of a step and its duration."""

    seconds: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    def save(self, file: Path) -> None:
        write_atomic(file, json.dumps(asdict(self), indent=1).encode())


def read_record(file: Path) -> StepRecord | None:
    """Return the record of a finished step; None if the step is not finished."""
    if not file.exists():
        return None
    fields = json.loads(file.read_text("utf-8"))
    return StepRecord(fields["seconds"], [Entry(**entry) for entry in fields["entries"]])


class Transcript:
    """Runs the commands of one step, prints them with their output, and records them."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record

    def run(
        self,
        command: Sequence[str | Path],
        *,
        shown: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command to its end and return its output; a failure raises CommandError."""
        title = shlex.join(map(str, command)) if shown is None else shown
        print(f"\n$ {title}", flush=True)
        start = time.monotonic()
        process = ChildProcess(
            command,
            environment=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(hide_root(line))
                print(lines[-1], end="", flush=True)
            process.wait()
        finally:
            process.stop(STOP_S)
        output = "".join(lines)
        if process.returncode != 0:
            raise CommandError(f"the command above ended with {process.returncode}", output)
        self.add(title, output, time.monotonic() - start)
        return output

    def preamble(self, *words: str | Path) -> str:
        """Run a `preamble` command, which ends when this process ends."""
        shown = f"preamble {shlex.join(map(str, words))}"
        return self.run(module_command(["preamble", *words]), shown=shown)

    def add(self, command: str, output: str, seconds: float) -> None:
        self._record.entries.append(Entry(command, output.rstrip("\n"), seconds))

    def write(self, output: str, *, command: str = "") -> None:
        """Print and record lines that the example itself computes, or a request and its answer."""
        print(f"\n$ {command}\n{output}" if command else f"\n{output}", flush=True)
        self.add(command, output, 0.0)


def hide_root(text: str) -> str:
    """Return the text with paths relative to the repository, which is where the example runs."""
    return text.replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), ".")


@dataclass(frozen=True)
class Section:
    """A step in the report."""

    heading: str
    text: str
    record: StepRecord


def report(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return the steps with their commands and durations as a Markdown page."""
    machine = (
        f"Preamble {preamble_version()}, torch {library_version('torch')}, Python "
        f"{platform.python_version()}, {usable_cores()} CPU cores with a load average of "
        f"{os.getloadavg()[2]:.0f}."
    )
    rows = [f"| {section.heading} | {section.record.seconds:.0f} |" for section in sections]
    total = sum(section.record.seconds for section in sections)
    table = ["| step | seconds |", "|---|---|", *rows, f"| total | {total:.0f} |"]
    parts = [f"# {title}", introduction, machine, "\n".join(table)]
    for section in sections:
        parts += [f"## {section.heading}", section.text, *map(code_block, section.record.entries)]
    return "\n\n".join(parts) + "\n"


def code_block(entry: Entry) -> str:
    """Return the command and its output, without lines of progress."""
    lines = [*([f"$ {entry.command}"] if entry.command else []), *entry.output.splitlines()]
    lines = [line.rstrip() for line in lines if not PROGRESS.search(line)]
    return "\n".join(["```text", *lines, "```"])
