"""Child commands: run `preamble` subcommands as processes with time-outs and failure reasons.

A child process ends with its parent. Its stderr goes to a log file, from which the failure reason
is read. `run_server` yields the address of a running server; the stdout of other commands is read
until they end.
"""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt.child_processes import ChildProcess, module_command, read_log_tail
from gpt.errors import PreambleError

STOP_TIMEOUT_S = 30.0  # Time for a server to shut down before it is killed.
# Log lines of a failed allocation, and the error line of a failed `preamble` command.
OUT_OF_MEMORY_LINE = re.compile(r"^.*(?:out of memory|OutOfMemory|Cannot allocate).*$", re.M | re.I)
OWN_ERROR_LINE = re.compile(r"^preamble \w+: (?!warning)(.+)$", re.M)


class ChildError(PreambleError):
    """A command failed or exceeded its time-out; the message is the reason."""


class ChildCommand:
    """A running Python module. `module_args` are the name of the module and its arguments."""

    def __init__(self, module_args: Sequence[str | Path], log: Path, stdin_text: str = "") -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = ChildProcess(
                module_command(module_args),
                stdin=subprocess.PIPE if stdin_text else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._stdin_text = stdin_text or None

    def read_first_line(self, timeout_s: float) -> str:
        """Wait for the first line of stdout and return the line."""
        try:
            line = self.process.read_line(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildError(f"the process was not ready after {timeout_s:g} s") from None
        if not line:
            self.process.wait(STOP_TIMEOUT_S)
            raise ChildError(self.failure_reason())
        return line

    def read_output(self, timeout_s: float) -> str:
        """Wait for the end of the command, and return its stdout."""
        try:
            stdout, _ = self.process.communicate(self._stdin_text, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildError(f"the process did not finish within {timeout_s:.0f} s") from None
        if self.process.returncode:
            raise ChildError(self.failure_reason())
        return stdout

    def failure_reason(self) -> str:
        """Return why the command failed or is failing, from its log and exit code."""
        text = read_log_tail(self._log)
        allocation_errors = OUT_OF_MEMORY_LINE.findall(text)
        if allocation_errors:
            return f"out of memory: {allocation_errors[-1].strip()[:200]}"
        command_errors = OWN_ERROR_LINE.findall(text)
        if command_errors:
            return str(command_errors[-1])[:400]
        code = self.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            oom_note = ", probably by the kernel's OOM killer" if -code == signal.SIGKILL else ""
            return f"the process was killed by {name}{oom_note}"
        last_line = text.strip().rpartition("\n")[2][:200]
        reason = f"the process ended with exit code {code}"
        return f"{reason}: {last_line}" if last_line else reason


@contextmanager
def run_child(
    module_args: Sequence[str | Path], log: Path, stdin_text: str = ""
) -> Iterator[ChildCommand]:
    """Run a command for the duration of the `with` block."""
    command = ChildCommand(module_args, log, stdin_text)
    try:
        yield command
    finally:
        command.process.stop(STOP_TIMEOUT_S)


@contextmanager
def run_server(
    server_args: Sequence[str | Path], log: Path, timeout_s: float
) -> Iterator[tuple[ChildCommand, str]]:
    """Run `preamble serve` on free ports; yield the command and HOST:PORT of its gRPC server."""
    module_args = ["preamble", "serve", *server_args, "--port", "0", "--http-port", "0"]
    with run_child(module_args, log) as command:
        first_line = command.read_first_line(timeout_s)
        match = re.search(r"\bgrpc=(\S+)", first_line)
        if match is None:
            raise ChildError(
                f"the server printed {first_line.strip()[:80]!r} instead of its gRPC address"
            )
        yield command, match[1]


def remove_run_folder(folder: Path) -> None:
    """Remove the folder of a successful run, and its parent folder if it is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
