"""Measurement rounds of `--measure`: order of the runs, journal, re-ranking, and failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpt.child_processes import BOOTSTRAP_CODE, child_environment
from gpt.errors import ConfigError
from planning.measurement.child_command import ChildError, run_child
from planning.measurement.rounds import JOURNAL_NAME, TrialError, measure_plan
from planning.plan import Axis, Confidence, Plan, Row
from tests.support.servers import WAIT_S, eventually

# Close to each other, so that each may be the best.
CLOSE = {size: 9000 + 100.0 * size + (150 if size == 6 else 0) for size in range(1, 9)}
SLEEP = ["timeit", "-n1", "-r1", "import time; time.sleep(600)"]


@dataclass
class ScriptedTrial:
    """A trial with scripted candidates: a speed for each size, or a failure."""

    speeds: Mapping[int, float]
    identity: Mapping[str, Any] = field(default_factory=lambda: {"of": "a test"})
    efforts: Sequence[int] = (5, 20, 50)
    itl_ms_max: float = 1e9
    ran: list[tuple[int, int]] = field(default_factory=list)
    at: Callable[[int], None] = lambda count: None

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        size = int(row.settings["size"])
        self.at(len(self.ran))
        self.ran.append((size, effort))
        if size not in self.speeds:
            raise TrialError("out of memory: 3 GiB")
        return {"tokens_per_s": self.speeds[size], "itl_ms_p95": 10.0 * size}

    def score(self, figures: Mapping[str, float]) -> float:
        return figures["tokens_per_s"]

    def violated_limit(self, figures: Mapping[str, float]) -> str:
        return "itl" if figures["itl_ms_p95"] > self.itl_ms_max else ""

    def finalize_plan(self, plan: Plan, best: Row | None) -> Plan:
        return replace(plan, settings_yaml="" if best is None else best.name)


def plan(count: int = 8, *, tokens_per_s_min: float = 0.0, **extra_rows: Row) -> Plan:
    """A plan that predicts larger sizes to be faster, at ten times the scripted speed."""
    rows = [
        Row(
            f"size {size}",
            "best" if size == count else "fits",
            {"size": size},
            {"tokens_per_s": 10 * tokens_per_s_min + 1000.0 * size, "itl_ms_p95": 10.0 * size},
            confidence=Confidence("calibrated", 0.1),
        )
        for size in range(count, 0, -1)
    ]
    rows = [extra_rows.get(f"size_{row.settings['size']}", row) for row in rows]
    axes = Axis("itl_ms_p95", "ITL", "low"), Axis("tokens_per_s", "tokens/s", "high")
    return Plan("serving", [], "", rows, *axes)


def ignore_message(line: str) -> None:
    pass


def test_best_candidates_run_again_for_longer(tmp_path: Path) -> None:
    trial = ScriptedTrial(CLOSE)
    measured = measure_plan(plan(tokens_per_s_min=9000), trial, tmp_path, 6, ignore_message)
    rounds = [
        [size for size, effort in trial.ran if effort == effort_level]
        for effort_level in trial.efforts
    ]
    assert rounds[0] == [8, 7, 6, 5, 4, 3]
    assert sorted(rounds[1]) == [5, 6, 7, 8] and sorted(rounds[2]) == [6, 8]
    assert measured.best is not None and measured.best.name == "size 8"
    assert measured.settings_yaml == "size 8" and measured.best.measured["tokens_per_s"] == 9800
    assert measured.best.confidence is not None and measured.best.confidence.source == "measured"
    assert "median 0.10, worst" in measured.advice[0]
    # Candidates that were not run get the mean correction of the others.
    last_row = next(row for row in measured.rows if row.name == "size 1")
    assert not last_row.measured and last_row.figures["tokens_per_s"] == pytest.approx(
        9100, rel=0.1
    )


def test_candidates_that_cannot_win_are_not_run(tmp_path: Path) -> None:
    trial = ScriptedTrial({size: 100.0 * size for size in range(1, 9)}, efforts=(5,))
    messages: list[str] = []
    measure_plan(plan(), trial, tmp_path, 8, messages.append)
    assert [size for size, _ in trial.ran] == [8, 7, 6]
    assert "no other candidate can be the best" in messages[-1]


def test_crashed_candidate_becomes_a_failed_row(tmp_path: Path) -> None:
    trial = ScriptedTrial({7: 700.0, 6: 600.0})
    measured = measure_plan(plan(), trial, tmp_path, 3, ignore_message)
    assert measured.best is not None and measured.best.name == "size 7"
    failed = [row for row in measured.rows if row.feasibility == "failed"]
    assert [(row.name, row.reason) for row in failed] == [("size 8", "out of memory: 3 GiB")]
    repeated = ScriptedTrial({}, ran=[])
    repeated.identity = trial.identity
    assert (
        measure_plan(plan(), repeated, tmp_path, 3, ignore_message).rows == measured.rows
        and not repeated.ran
    )


def test_best_candidate_satisfies_limits_by_measurement(tmp_path: Path) -> None:
    trial = ScriptedTrial({size: 100.0 * size for size in range(1, 9)}, itl_ms_max=65.0)
    measured = measure_plan(plan(), trial, tmp_path, 4, ignore_message)
    assert measured.best is not None and measured.best.name == "size 6"
    # A candidate whose prediction violates a limit runs only when no other is left.
    assert {size for size, _ in trial.ran} == {6, 5, 4}
    trial = ScriptedTrial(
        {size: 100.0 * size for size in range(1, 9)}, itl_ms_max=5.0, efforts=(5,)
    )
    measured = measure_plan(plan(), trial, tmp_path / "none", 2, ignore_message)
    assert measured.best is None and measured.settings_yaml == ""
    assert "none of the 2 measured candidates finished its run" in measured.advice[-1]


def test_tight_candidates_run_last_and_oversized_ones_never(tmp_path: Path) -> None:
    rows = {row.name: row for row in plan().rows}
    tight = replace(rows["size 8"], feasibility="tight")
    too_large = replace(rows["size 7"], feasibility="rejected", reason="90 of 80 GB")
    trial = ScriptedTrial({size: 100.0 * size for size in range(1, 9)}, efforts=(5,))
    measure_plan(plan(3, size_3=too_large), trial, tmp_path / "a", 3, ignore_message)
    assert all(size != 7 for size, _ in trial.ran)
    trial = ScriptedTrial(dict.fromkeys(range(1, 9), 1.0), efforts=(5,))
    measure_plan(plan(8, size_8=tight, size_7=too_large), trial, tmp_path / "b", 8, ignore_message)
    sizes = [size for size, _ in trial.ran]
    assert sizes[:2] == [6, 5] and 7 not in sizes


def test_interrupted_measurement_continues(tmp_path: Path) -> None:
    def interrupt(count: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    speeds = CLOSE
    close = plan(tokens_per_s_min=9000)
    first_trial = ScriptedTrial(speeds, at=interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_plan(close, first_trial, tmp_path, 6, ignore_message)
    with (tmp_path / JOURNAL_NAME).open("ab") as journal:
        journal.write(b'{"settings": {"si')  # A line torn by a kill.
    second_trial = ScriptedTrial(speeds)
    uninterrupted = ScriptedTrial(speeds)
    measured = measure_plan(close, second_trial, tmp_path, 6, ignore_message)
    assert second_trial.ran[0] == (5, 5) and not set(first_trial.ran) & set(second_trial.ran)
    assert (
        measured.rows
        == measure_plan(close, uninterrupted, tmp_path / "whole", 6, ignore_message).rows
    )
    # With another load it starts again.
    other_load = ScriptedTrial(speeds, identity={"of": "another load"})
    messages: list[str] = []
    measure_plan(close, other_load, tmp_path, 6, messages.append)
    assert other_load.ran == uninterrupted.ran and "starting again" in messages[0]
    assert json.loads((tmp_path / JOURNAL_NAME).read_text().splitlines()[0])["of"] == "another load"


def test_measuring_less_than_one_candidate_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        measure_plan(plan(), ScriptedTrial({}), tmp_path, 0, ignore_message)


# ------------------------------------------------------------------------------------ processes


def test_hanging_command_is_terminated(tmp_path: Path) -> None:
    with run_child(SLEEP, tmp_path / "log") as running:
        with pytest.raises(ChildError, match="did not finish within 0 s"):
            running.read_output(0.3)
        number = running.process.pid
    assert running.process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "killed by SIGKILL, probably by the kernel's OOM killer",
        ),
        (
            "raise SystemExit('CUDA out of memory. Tried to allocate 2 GiB')",
            "out of memory: SystemExit: CUDA",
        ),
        ("raise SystemExit('preamble serve: kv_tokens_max is 9; say less')", "kv_tokens_max is 9"),
        ("1 / 0", "code 1: ZeroDivisionError"),
    ],
)
def test_failed_command_has_a_reason(program: str, reason: str, tmp_path: Path) -> None:
    arguments = ["timeit", "-n1", "-r1", program]
    with run_child(arguments, tmp_path / "log") as failed, pytest.raises(ChildError, match=reason):
        failed.read_output(10 * WAIT_S)


def test_command_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; "
        "from planning.measurement.child_command import ChildCommand; "
        f"command = ChildCommand({SLEEP!r}, Path({str(tmp_path / 'log')!r})); "
        "print(command.process.pid, flush=True); time.sleep(600)"
    )
    line = [sys.executable, "-c", program]
    parent = subprocess.Popen(
        line, env=child_environment(os.environ), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and "die_with_parent" in BOOTSTRAP_CODE
    number = int(parent.stdout.readline())
    time.sleep(1.0)  # The child must register its parent-death signal; later it checks itself.
    parent.kill()
    parent.communicate()
    eventually(lambda: _state(number) == "Z")


def _state(number: int) -> str:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
