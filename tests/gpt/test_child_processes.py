"""Child processes: time-outs, escalation to SIGKILL, descendants, and the death of the parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpt.child_processes import (
    ChildProcess,
    child_environment,
    module_command,
    read_log_tail,
)

WAIT_S = 60.0
SHORT_S = 0.05
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


@contextmanager
def running(program: str, folder: Path | None = None) -> Iterator[ChildProcess]:
    child = ChildProcess(
        [sys.executable, "-c", program],
        folder=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.stop(SHORT_S)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def test_a_child_leads_a_session_of_its_own_and_imports_our_packages(tmp_path: Path) -> None:
    program = "import gpt.errors, os; print(os.getpid() == os.getsid(0) == os.getpgid(0))"
    with running(program, tmp_path) as child:
        assert child.communicate(timeout=WAIT_S)[0] == "True\n"
    assert child.returncode == 0


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    program = r"import sys; sys.stdout.buffer.write(b'caf\xc3\xa9 \xff\n')"
    with running(program) as child:
        assert child.read_line(WAIT_S) == "café \ufffd\n"


def test_a_line_is_read_within_a_time_limit() -> None:
    with running("print(input(), flush=True); input()") as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.read_line(SHORT_S)
        assert child.stdin is not None
        child.stdin.write("hello\n")
        child.stdin.flush()
        assert child.read_line(WAIT_S) == "hello\n"
        child.stdin.close()
        assert child.read_line(WAIT_S) == ""
        assert child.wait(WAIT_S) == 1


def test_sigterm_ends_a_child_in_order() -> None:
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + SLEEP
    with running(program) as child:
        assert child.read_line(WAIT_S) == "ready\n"
        child.stop(WAIT_S)
        assert child.returncode == 7
        assert child.stdout is not None and child.stdout.closed


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    with running(IGNORE) as child:
        assert child.read_line(WAIT_S) == "ready\n"
        child.stop(SHORT_S)
        assert child.returncode == -signal.SIGKILL
        child.stop(SHORT_S)  # A second call has nothing to do.


@pytest.mark.parametrize("ends_first", [True, False])
def test_the_descendants_of_a_child_are_killed(ends_first: bool) -> None:
    """They hold the pipes, too: without the kill, reading to the end of stdout would not return."""
    descendant = IGNORE.replace("print('ready'", "print('ready', file=sys.stderr")
    program = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', 'import sys; ' + {descendant!r}]\n"
        "other = subprocess.Popen(command, stderr=subprocess.PIPE)\n"
        "other.stderr.readline()\n"  # It ignores SIGTERM from here on.
        "print(other.pid, flush=True)\n"
    ) + ("" if ends_first else "input()")
    with running(program) as child:
        pid = int(child.read_line(WAIT_S))
        if ends_first:
            child.wait(WAIT_S)
        assert not has_ended(pid)
        child.stop(WAIT_S)
        wait_for_end(pid)


def test_a_wait_ends_with_a_kill_after_its_time_limit() -> None:
    with running(SLEEP) as child:
        assert child.wait_or_kill(SHORT_S) == -signal.SIGKILL
    with running("raise SystemExit(3)") as child:
        assert child.wait_or_kill(WAIT_S) == 3


def test_a_given_environment_and_inherited_descriptors_reach_the_child() -> None:
    reading, writing = os.pipe()
    with open(reading, closefd=True) as pipe:
        program = f"import os, sys; os.write({writing}, os.environ['NAME'].encode())"
        child = ChildProcess(
            [sys.executable, "-c", program], environment={"NAME": "value"}, pass_fds=[writing]
        )
        os.close(writing)
        assert pipe.read() == "value"
    assert child.wait(WAIT_S) == 0


def test_a_module_runs_as_the_main_program_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "printed_words.py").write_text("import sys; print(__name__, sys.argv[1:])")
    environment = child_environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    child = ChildProcess(
        module_command(["printed_words", tmp_path, "x y"]),
        environment=environment,
        stdout=subprocess.PIPE,
    )
    assert child.communicate(timeout=WAIT_S)[0] == f"__main__ {[str(tmp_path), 'x y']}\n"


def test_a_module_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEP)
    program = (
        "import subprocess, time; from gpt.child_processes import ChildProcess, module_command\n"
        "child = ChildProcess(module_command(['sleeper']), stdout=subprocess.PIPE)\n"
        "assert child.read_line(60) == 'ready\\n'\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = ChildProcess(
        [sys.executable, "-c", program],
        environment=child_environment({**os.environ, "PYTHONPATH": str(tmp_path)}),
        stdout=subprocess.PIPE,
    )
    pid = int(parent.read_line(WAIT_S))
    assert not has_ended(pid)
    parent.kill()
    parent.communicate()
    wait_for_end(pid)


def test_a_process_with_another_parent_ends_at_once() -> None:
    program = "from gpt.child_processes import die_with_parent; die_with_parent(1); print('runs')"
    with running(program) as child:
        assert child.communicate(timeout=WAIT_S)[0] == ""
    assert child.returncode == 1


def test_the_tail_of_a_log_is_decoded_whatever_its_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_log_tail(log) == ""
    log.write_bytes(b"\xc3\xa9" + b"x" * 10 + b"\nlast line\n")
    assert read_log_tail(log) == "é" + "x" * 10 + "\nlast line\n"
    assert read_log_tail(log, 10) == "last line\n"
    assert read_log_tail(log, 22) == "\ufffd" + "x" * 10 + "\nlast line\n"
