"""`--measure`: candidates run for real, against each other, and what becomes of the plan."""

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

from gpt.child_processes import child_environment
from gpt.errors import ConfigError
from planning.measurement.child_command import BOOT, ChildError, child
from planning.measurement.rounds import JOURNAL, TrialError, measure
from planning.plan import Axis, Plan, Row, Trust

# All near to each other, so that each of them may be the best.
CLOSE = {size: 9000 + 100.0 * size + (150 if size == 6 else 0) for size in range(1, 9)}
SLEEP = ["timeit", "-n1", "-r1", "import time; time.sleep(60)"]


@dataclass
class Scripted:
    """A trial whose candidates do what they are told: their speed by size, or an end."""

    speeds: Mapping[int, float]
    identity: Mapping[str, Any] = field(default_factory=lambda: {"of": "a test"})
    efforts: Sequence[int] = (5, 20, 50)
    most_ms: float = 1e9
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

    def broken(self, figures: Mapping[str, float]) -> str:
        return "itl" if figures["itl_ms_p95"] > self.most_ms else ""

    def settle(self, plan: Plan, best: Row | None) -> Plan:
        return replace(plan, settings_yaml="" if best is None else best.name)


def plan(count: int = 8, *, least: float = 0.0, **others: Row) -> Plan:
    """Larger is predicted to be faster; ten times as fast as it will turn out to be."""
    rows = [
        Row(
            f"size {size}",
            "best" if size == count else "fits",
            {"size": size},
            {"tokens_per_s": 10 * least + 1000.0 * size, "itl_ms_p95": 10.0 * size},
            trust=Trust("calibrated", 0.1),
        )
        for size in range(count, 0, -1)
    ]
    rows = [others.get(f"size_{row.settings['size']}", row) for row in rows]
    axes = Axis("itl_ms_p95", "ITL", "low"), Axis("tokens_per_s", "tokens/s", "high")
    return Plan("serving", [], "", rows, *axes)


def quiet(line: str) -> None:
    pass


def test_the_better_ones_run_again_for_longer(tmp_path: Path) -> None:
    trial = Scripted(CLOSE)
    made = measure(plan(least=9000), trial, tmp_path, 6, quiet)
    rounds = [[size for size, effort in trial.ran if effort == one] for one in trial.efforts]
    assert rounds[0] == [8, 7, 6, 5, 4, 3]
    assert sorted(rounds[1]) == [5, 6, 7, 8] and sorted(rounds[2]) == [6, 8]
    assert made.best is not None and made.best.name == "size 8"
    assert made.settings_yaml == "size 8" and made.best.measured["tokens_per_s"] == 9800
    assert made.best.trust is not None and made.best.trust.source == "measured"
    assert "median 0.10, worst" in made.advice[0]
    # Those that were not run are expected to be as far off as the others.
    last = next(row for row in made.rows if row.name == "size 1")
    assert not last.measured and last.figures["tokens_per_s"] == pytest.approx(9100, rel=0.1)


def test_what_cannot_win_any_more_is_not_run(tmp_path: Path) -> None:
    trial = Scripted({size: 100.0 * size for size in range(1, 9)}, efforts=(5,))
    said: list[str] = []
    measure(plan(), trial, tmp_path, 8, said.append)
    assert [size for size, _ in trial.ran] == [8, 7, 6]
    assert "none of the others can be the best" in said[-1]


def test_a_crash_is_a_row_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    trial = Scripted({7: 700.0, 6: 600.0})
    made = measure(plan(), trial, tmp_path, 3, quiet)
    assert made.best is not None and made.best.name == "size 7"
    failed = [row for row in made.rows if row.standing == "failed"]
    assert [(row.name, row.reason) for row in failed] == [("size 8", "out of memory: 3 GiB")]
    again = Scripted({}, ran=[])
    again.identity = trial.identity
    assert measure(plan(), again, tmp_path, 3, quiet).rows == made.rows and not again.ran


def test_a_limit_that_was_measured_to_break_is_kept_by_another(tmp_path: Path) -> None:
    trial = Scripted({size: 100.0 * size for size in range(1, 9)}, most_ms=65.0)
    made = measure(plan(), trial, tmp_path, 4, quiet)
    assert made.best is not None and made.best.name == "size 6"
    # What is predicted to break it is not run while something else is left.
    assert {size for size, _ in trial.ran} == {6, 5, 4}
    trial = Scripted({size: 100.0 * size for size in range(1, 9)}, most_ms=5.0, efforts=(5,))
    made = measure(plan(), trial, tmp_path / "none", 2, quiet)
    assert made.best is None and made.settings_yaml == ""
    assert "none of the 2 that were run keeps all limits" in made.advice[-1]


def test_what_may_not_fit_is_run_last_and_what_does_not_never(tmp_path: Path) -> None:
    rows = {row.name: row for row in plan().rows}
    tight = replace(rows["size 8"], standing="tight")
    over = replace(rows["size 7"], standing="rejected", reason="90 of 80 GB")
    trial = Scripted({size: 100.0 * size for size in range(1, 9)}, efforts=(5,))
    measure(plan(3, size_3=over), trial, tmp_path / "a", 3, quiet)
    assert all(size != 7 for size, _ in trial.ran)
    trial = Scripted(dict.fromkeys(range(1, 9), 1.0), efforts=(5,))
    measure(plan(8, size_8=tight, size_7=over), trial, tmp_path / "b", 8, quiet)
    sizes = [size for size, _ in trial.ran]
    assert sizes[:2] == [6, 5] and 7 not in sizes


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    def interrupt(count: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    speeds, close = CLOSE, plan(least=9000)
    first = Scripted(speeds, at=interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(close, first, tmp_path, 6, quiet)
    with (tmp_path / JOURNAL).open("ab") as journal:
        journal.write(b'{"settings": {"si')  # As a kill in the middle of a line leaves it.
    second, whole = Scripted(speeds), Scripted(speeds)
    made = measure(close, second, tmp_path, 6, quiet)
    assert second.ran[0] == (5, 5) and not set(first.ran) & set(second.ran)
    assert made.rows == measure(close, whole, tmp_path / "whole", 6, quiet).rows
    # Of another load it begins anew.
    other = Scripted(speeds, identity={"of": "another load"})
    said: list[str] = []
    measure(close, other, tmp_path, 6, said.append)
    assert other.ran == whole.ran and "begins anew" in said[0]
    assert json.loads((tmp_path / JOURNAL).read_text().splitlines()[0])["of"] == "another load"


def test_fewer_than_one_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        measure(plan(), Scripted({}), tmp_path, 0, quiet)


# ------------------------------------------------------------------------------------ processes


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path / "log") as running:
        with pytest.raises(ChildError, match="not done after 0 s"):
            running.output(0.3)
        number = running.process.pid
    assert running.process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, as the kernel does where memory"),
        (
            "raise SystemExit('CUDA out of memory. Tried to allocate 2 GiB')",
            "out of memory: SystemExit: CUDA",
        ),
        ("raise SystemExit('preamble serve: kv_tokens_max is 9; say less')", "kv_tokens_max is 9"),
        ("1 / 0", "code 1: ZeroDivisionError"),
    ],
)
def test_a_command_that_fails_tells_why(program: str, reason: str, tmp_path: Path) -> None:
    words = ["timeit", "-n1", "-r1", program]
    with child(words, tmp_path / "log") as failed, pytest.raises(ChildError, match=reason):
        failed.output(30)


def test_a_command_ends_with_us_whatever_we_die_of(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; "
        "from planning.measurement.child_command import Child; "
        f"one = Child({SLEEP!r}, Path({str(tmp_path / 'log')!r})); "
        "print(one.process.pid, flush=True); time.sleep(60)"
    )
    line = [sys.executable, "-c", program]
    parent = subprocess.Popen(
        line, env=child_environment(os.environ), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and "end_with" in BOOT
    number = int(parent.stdout.readline())
    time.sleep(1.0)  # For the child to have said that it ends with us.
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while Path(f"/proc/{number}").exists() and _state(number) != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


def _state(number: int) -> str:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
