"""Checkout processes: starts child processes that run the code of this or of another checkout.

A child process uses the interpreter of its checkout. A comparison of two checkouts uses only the
interfaces that are equal in both: the command line, the wire protocols and the documented Python
API. Each child process checks that it imports the modules of its checkout. When the parent process
ends, the kernel kills the child process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.child_processes import ChildProcess, read_log_tail
from gpt.errors import PreambleError

STOP_S = 30.0  # Time that a server gets for an orderly shutdown.
START_S = 300.0  # Default time limit of a command, and of the start of a server.
ERROR_CHARACTERS = 600  # Characters of standard error in an error message.
# BOOT is the program of each child process; it runs a module or a source text. Its arguments are:
# - the process id of the parent;
# - the root of the checkout;
# - `-m` and the name of the module, or `-c` and the source text;
# - the arguments of the module or of the source text.
# In the call of prctl, 1 is PR_SET_PDEATHSIG.
BOOT = """
import ctypes, importlib.util, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
parent, root, kind, program = sys.argv[1:5]
if os.getppid() != int(parent):
    os._exit(1)
spec = importlib.util.find_spec("preamble")
origin = os.path.realpath(spec.origin) if spec and spec.origin else "nowhere"
if os.path.dirname(origin) != root:
    sys.exit(f"preamble would be imported from {origin} instead of {root}")
sys.argv = [program if kind == "-m" else "-c", *sys.argv[5:]]
if kind == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    exec(compile(program, "<measurement>", "exec"), {"__name__": "__main__"})
"""


class CheckoutError(PreambleError):
    """The checkout cannot be used, or one of its child processes failed."""


@dataclass(frozen=True)
class Server:
    """A running `preamble serve`: its process id, and HOST:PORT of both protocols."""

    pid: int
    grpc: str
    http: str


@dataclass(frozen=True)
class Checkout:
    """One checkout of the repository. `environment` overrides variables of its child processes."""

    name: str
    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, name: str, path: Path, environment: Mapping[str, str] | None = None) -> "Checkout":
        root = path.resolve()
        for file_name in ("preamble.py", "pyproject.toml"):
            if not (root / file_name).is_file():
                raise CheckoutError(
                    f"{path} has no {file_name}; give the root of a checkout of this repository"
                )
        return cls(name, root, environment or {})

    @property
    def python(self) -> str:
        """Return the checkout's interpreter if it has one, else the interpreter of this process."""
        checkout_python = self.root / ".venv" / "bin" / "python"
        return str(checkout_python) if checkout_python.exists() else sys.executable

    @property
    def commit(self) -> str:
        """Return the short commit id, with `+` if there are changed or new files.

        Outside of a git checkout, the text is `unknown`.
        """

        def git(*arguments: str) -> str:
            command = ["git", "-C", str(self.root), *arguments]
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()

        try:
            return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain"))
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    def command(
        self,
        words: Sequence[str | Path],
        folder: Path,
        within_s: float = START_S,
        input_text: str = "",
    ) -> str:
        """Run `python -m WORDS...` in `folder` and return its output."""
        return self._output(["-m", *map(str, words)], folder, within_s, input_text)

    def call(
        self, source: str, argument: Any, folder: Path, within_s: float = START_S
    ) -> dict[str, Any]:
        """Run Python source text in a child process and return the JSON of its last line.

        The program reads `argument` as JSON from standard input.
        """
        output = self._output(["-c", source], folder, within_s, json.dumps(argument) + "\n")
        try:
            result: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            raise CheckoutError(
                f"{self.name}: a measurement printed no JSON in its last line"
            ) from None
        return result

    @contextmanager
    def server(
        self, words: Sequence[str | Path], folder: Path, within_s: float = START_S
    ) -> Iterator[Server]:
        """Run `preamble serve WORDS...` on free ports until the `with` block ends."""
        command = ["-m", "preamble", "serve", *map(str, words), "--port", "0", "--http-port", "0"]
        with self.started(command, folder) as (process, log):
            ready_line = ""
            with suppress(subprocess.TimeoutExpired):
                ready_line = process.read_line(within_s)
            addresses = dict(re.findall(r"\b(grpc|http)=(\S+)", ready_line))
            if len(addresses) < 2:
                raise CheckoutError(f"{self.name}: the server did not start: {_tail(log)}")
            yield Server(process.pid, addresses["grpc"], addresses["http"])

    @contextmanager
    def started(
        self, words: Sequence[str], folder: Path, with_input: bool = False
    ) -> Iterator[tuple[ChildProcess, Path]]:
        """Start a child process; yield it and the file that receives its standard error.

        The process is ended at the end of the `with` block. The kernel also kills it when the
        thread that started it ends, so one thread must start and use the process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="stderr-", dir=folder)
        with os.fdopen(descriptor, "w") as stderr:
            process = ChildProcess(
                [self.python, "-c", BOOT, str(os.getpid()), str(self.root), *words],
                environment=self._environment(),
                folder=folder,
                stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        try:
            yield process, Path(name)
        finally:
            process.stop(STOP_S)
            Path(name).unlink(missing_ok=True)

    def _output(self, words: Sequence[str], folder: Path, within_s: float, input_text: str) -> str:
        with self.started(words, folder, bool(input_text)) as (process, log):
            try:
                output, _ = process.communicate(input_text or None, timeout=within_s)
            except subprocess.TimeoutExpired:
                raise CheckoutError(
                    f"{self.name}: {_describe_command(words)} was not done after {within_s:.0f} s"
                ) from None
            if process.returncode:
                raise CheckoutError(
                    f"{self.name}: {_describe_command(words)} ended with code "
                    f"{process.returncode}: {_tail(log)}"
                )
        return output

    def _environment(self) -> dict[str, str]:
        variables = {**os.environ, **self.environment}
        # The child process must import the modules of its checkout, not modules of this checkout
        # from PYTHONPATH, from the working directory or from an installation.
        variables["PYTHONPATH"] = str(self.root)
        variables["PYTHONSAFEPATH"] = "1"
        variables.pop("PYTHONHOME", None)
        variables.pop("VIRTUAL_ENV", None)
        return variables


def this_checkout(environment: Mapping[str, str] | None = None) -> Checkout:
    """Return the checkout whose code this process runs."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "preamble.py").is_file():
            return Checkout.at("this", folder, environment)
    raise CheckoutError("this process runs an installed package; run it from a checkout instead")


def _describe_command(words: Sequence[str]) -> str:
    """Return the command line for an error message, without the source text of a measurement."""
    return " ".join(words[1:8]) if words[0] == "-m" else "a measurement"


def _tail(log: Path) -> str:
    text = read_log_tail(log).strip()
    return text[-ERROR_CHARACTERS:] if text else "no output on standard error"
