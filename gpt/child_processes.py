"""Child processes: start, waits with time-outs, termination of the child's process group.

A child runs in a session of its own, so Ctrl-C reaches only the parent, which then decides how the
child ends. A child whose command is from `module_command` is killed when its parent ends. The
module imports only the standard library, so that a child can call `die_with_parent` before any slow
import.
"""

import ctypes
import os
import selectors
import signal
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 64 << 10
# Runs a module. `die_with_parent` is called before the module's imports, because the parent may end
# during the imports, which may take seconds.
BOOTSTRAP_CODE = (
    "import os, runpy, sys; from gpt.child_processes import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); sys.argv = sys.argv[2:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class ChildProcess(subprocess.Popen[str]):
    """A running child process with text pipes.

    `environment` is the child's environment; None means `child_environment(os.environ)`. `pass_fds`
    are file descriptors that stay open in the child. `wait` and `read_line` raise TimeoutExpired
    after their time-out.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | IO[str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(
            [str(word) for word in command],
            env=child_environment(os.environ) if environment is None else environment,
            cwd=folder,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def read_line(self, timeout_s: float) -> str:
        """Wait for the next line of stdout, and return it; "" if the child has closed its stdout.

        The child should write a line only after the previous line was read. If two lines are
        waiting, a read can move both into the buffer of `stdout`; the next call does not look into
        the buffer, and waits for more output.
        """
        assert self.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise subprocess.TimeoutExpired(self.args, timeout_s)
        return self.stdout.readline()

    def wait_or_kill(self, timeout_s: float) -> int:
        """Wait for the child to end, or kill it after the time-out; return its exit code."""
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to `timeout_s`, kill the process group, and close the pipes."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                self.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.wait(timeout_s)
            os.killpg(self.pid, signal.SIGKILL)
        self.close_pipes()
        self.wait()

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes.

        Input that is not yet written is discarded if the child has closed its stdin.
        """
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def module_command(module_args: Sequence[str | Path]) -> list[str]:
    """Return the command line that runs a Python module.

    `module_args`: the module's name, then its arguments. The new process calls `die_with_parent`
    before it runs the module.
    """
    return [sys.executable, "-c", BOOTSTRAP_CODE, str(os.getpid()), *map(str, module_args)]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with PYTHONPATH and PYTHONSAFEPATH set for a child process.

    With these variables the child can import our packages in any working directory, and imports no
    modules from the working directory itself.
    """
    variables = dict(environment)
    root = str(Path(__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        paths = [root, *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    # Without this variable, `-m` and `-c` import from the working directory first, which may be a
    # model's directory with untrusted files.
    variables["PYTHONSAFEPATH"] = "1"
    return variables


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    More exactly, the kernel kills this process when the parent's thread that started it ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG is unavailable")
    if os.getppid() != parent_pid:  # The parent had already ended when prctl was called.
        os._exit(1)


def read_log_tail(log: Path, bytes_max: int = TAIL_BYTES) -> str:
    """Return the last `bytes_max` bytes of a log file as text; "" if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - bytes_max))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
