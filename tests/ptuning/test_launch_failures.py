"""Failure reason of a run on several ranks: the rank that failed first is named, not its peers."""

import sys
from pathlib import Path

import pytest

from gpt.child_processes import ChildProcess
from ptuning.launch import failure_reason

SUCCESS = "pass"
ABORT = "import os; os.abort()"
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
EXIT_4 = "raise SystemExit(4)"


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ((ABORT, SUCCESS, KILL), "rank 3 was killed by signal 9, perhaps out of memory"),
        ((ABORT, EXIT_4), "rank 2 ended with code 4"),
        ((SUCCESS, ABORT), "rank 2 was killed by signal 6"),
        ((SUCCESS, SUCCESS), "a rank lost its connection to another rank (no reason)"),
    ],
)
def test_an_abort_is_named_only_if_no_other_rank_failed(
    programs: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """gloo aborts a rank whose peer has died, so an abort is often a consequence."""
    processes = [ChildProcess([sys.executable, "-c", program]) for program in programs]
    assert failure_reason(processes, tmp_path, "no reason").startswith(reason)
    for process in processes:
        process.stop(1.0)
