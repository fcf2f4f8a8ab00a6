"""A command of ours in a process of its own, that ends in time, and never outlives us.

What it says to stderr goes to a file, and from there, if it fails, comes the sentence that says
why. Of a server it knows where it listens, else nothing of what a command does.
"""

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt.child_processes import child_environment
from gpt.errors import PreambleError

STOP_S = 30.0  # For a server to end in order.
TAIL_BYTES = 64 << 10
# In a log: what allocators say, and what our own commands say when they fail.
MEMORY = re.compile(r"^.*(?:out of memory|OutOfMemory|Cannot allocate).*$", re.M | re.I)
OWN = re.compile(r"^preamble \w+: (?!warning)(.+)$", re.M)
# It ends with us, whatever we die of; only then is anything imported that takes time.
BOOT = (
    "import os, runpy, sys; from gpt.child_processes import end_with; end_with(int(sys.argv[1])); "
    "sys.argv = sys.argv[2:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class ChildError(PreambleError):
    """A command that has failed, or has taken too long; the text says why."""


class Child:
    """`words` begin with a module's name."""

    def __init__(self, words: Sequence[str | Path], log: Path, asked: str = "") -> None:
        self._log = log
        line = [sys.executable, "-c", BOOT, str(os.getpid()), *map(str, words)]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                line,
                env=child_environment(os.environ),
                stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # So that all of its own processes can be ended with it.
            )
        self._asked = asked or None

    def line(self, within_s: float) -> str:
        """The first line that it prints."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(within_s):
                raise ChildError(f"it was not ready after {within_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(STOP_S)
            raise ChildError(self.reason())
        return line

    def output(self, within_s: float) -> str:
        """All that it prints, to its end."""
        try:
            said, _ = self.process.communicate(self._asked, timeout=within_s)
        except subprocess.TimeoutExpired:
            raise ChildError(f"it was not done after {within_s:.0f} s") from None
        if self.process.returncode:
            raise ChildError(self.reason())
        return said

    def reason(self) -> str:
        """Why it has ended, or is about to, in one sentence."""
        text = _tail(self._log)
        memory = MEMORY.findall(text)
        if memory:
            return f"out of memory: {memory[-1].strip()[:200]}"
        own = OWN.findall(text)
        if own:
            return str(own[-1])[:400]
        code = self.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            likely = ", as the kernel does where memory is short" if -code == signal.SIGKILL else ""
            return f"it was ended by {name}{likely}"
        last = text.strip().rpartition("\n")[2][:200]
        return (
            f"it has ended with code {code}: {last}" if last else f"it has ended with code {code}"
        )

    def end(self) -> None:
        """In order if it can, by force if it must, and with all that it has started."""
        with suppress(ProcessLookupError):
            if self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_S)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextmanager
def child(words: Sequence[str | Path], log: Path, asked: str = "") -> Iterator[Child]:
    """It runs as long as the block does."""
    started = Child(words, log, asked)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def server(words: Sequence[str | Path], log: Path, within_s: float) -> Iterator[tuple[Child, str]]:
    """`preamble serve` with these words, on free ports; and where its gRPC listens, HOST:PORT."""
    line = ["preamble", "serve", *words, "--port", "0", "--http-port", "0"]
    with child(line, log) as started:
        said = started.line(within_s)
        found = re.search(r"\bgrpc=(\S+)", said)
        if found is None:
            raise ChildError(f"a server said {said.strip()[:80]!r} instead of where it is")
        yield started, found[1]


def forget(place: Path) -> None:
    """What a command that went well has left; and the folder of all such, with the last one."""
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.parent.rmdir()


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
