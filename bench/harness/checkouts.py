"""Checkout processes: starts child processes that run the code of this or of another checkout.

A child process uses the interpreter of its checkout. A comparison of two checkouts uses only the
interfaces that are equal in both: the command line, the wire protocols and the documented Python
API. Each child process checks that it imports the modules of its checkout, and it is killed when
the parent process ends.
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
START_S = 300.0
ERROR_CHARACTERS = 600
# Arguments: the parent's process id, the checkout's root, `-m` or `-c`, the module or the source,
# and the program's own arguments. PR_SET_PDEATHSIG is 1.
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
        for needed in ("preamble.py", "pyproject.toml"):
            if not (root / needed).is_file():
                raise CheckoutError(
                    f"{path} has no {needed}; give the root of a checkout of this repository"
                )
        return cls(name, root, environment or {})

    @property
    def python(self) -> str:
        """Return the checkout's interpreter if it has one, else the interpreter of this process."""
        own = self.root / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    @property
    def commit(self) -> str:
        """Return the short commit id, followed by `+` if there are changed or new files."""

        def git(*words: str) -> str:
            line = ["git", "-C", str(self.root), *words]
            return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

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
        printed = self._output(["-c", source], folder, within_s, json.dumps(argument) + "\n")
        try:
            result: dict[str, Any] = json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            raise CheckoutError(f"{self.name}: a measurement printed no JSON") from None
        return result

    @contextmanager
    def server(
        self, words: Sequence[str | Path], folder: Path, within_s: float = START_S
    ) -> Iterator[Server]:
        """Run `preamble serve WORDS...` on free ports until the `with` block ends."""
        line = ["-m", "preamble", "serve", *map(str, words), "--port", "0", "--http-port", "0"]
        with self.started(line, folder) as (process, log):
            ready = ""
            with suppress(subprocess.TimeoutExpired):
                ready = process.read_line(within_s)
            addresses = dict(re.findall(r"\b(grpc|http)=(\S+)", ready))
            if len(addresses) < 2:
                raise CheckoutError(f"{self.name}: the server did not start: {_tail(log)}")
            yield Server(process.pid, addresses["grpc"], addresses["http"])

    @contextmanager
    def started(
        self, words: Sequence[str], folder: Path, with_input: bool = False
    ) -> Iterator[tuple[ChildProcess, Path]]:
        """Start a child process; yield it and the file that receives its standard error.

        The process is ended at the end of the `with` block. The kernel also kills it when the
        thread that started it ends, so one thread must start and use a server.
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
                printed, _ = process.communicate(input_text or None, timeout=within_s)
            except subprocess.TimeoutExpired:
                raise CheckoutError(
                    f"{self.name}: {_shown(words)} was not done after {within_s:.0f} s"
                ) from None
            if process.returncode:
                raise CheckoutError(
                    f"{self.name}: {_shown(words)} ended with code {process.returncode}: "
                    f"{_tail(log)}"
                )
        return printed

    def _environment(self) -> dict[str, str]:
        variables = {**os.environ, **self.environment}
        # The child process must import only modules of its checkout, not modules of this checkout
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


def _shown(words: Sequence[str]) -> str:
    """Return the command line for an error message, without the source text of a program."""
    return " ".join(words[1:8]) if words[0] == "-m" else "a measurement"


def _tail(log: Path) -> str:
    text = read_log_tail(log).strip()
    return text[-ERROR_CHARACTERS:] if text else "without any output on standard error"
