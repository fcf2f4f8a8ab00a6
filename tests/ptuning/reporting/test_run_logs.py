"""Run logs and progress display: rows of the tables, resumed runs, full disks.

RLIMIT_FSIZE simulates a full disk. The TensorBoard events are compared with bytes from the writer
of TensorBoard itself.
"""

import io
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ptuning.reporting import tensorboard_events
from ptuning.reporting.progress_bar import (
    ActivityDisplay,
    format_duration,
    format_time_left,
    open_display,
)
from ptuning.reporting.run_logs import (
    EVENTS_FOLDER,
    METRICS_FILE,
    REPORT_FILE,
    TASK_METRICS_FILE,
    VALIDATIONS_FILE,
    RunLogs,
    read_logs,
)
from ptuning.run_facts import GroupMetrics, StepMetrics, Validation
from tests.support.full_disk import full_disk

# Written by TensorBoard's own writer.
GOLDEN = Path(__file__).parents[2] / "golden/tensorboard-events.bin"
TIME_S = 1_700_000_000.0
STEPS = 40


def step_metrics(step: int, **changes: float | bool) -> StepMetrics:
    metrics = StepMetrics(step, STEPS, 3 / step, 640, 512, 0.25, 1e-3 * step / 7, 0.1 * step)
    return replace(metrics, **changes)  # type: ignore[arg-type]


def measured(step: int) -> Validation:
    by_task = {"refunds": {"f1": step / 70}, "tone, or so": {"f1": step / 90}}
    return Validation(step, 2 / 3, {"exact_match": step / 60, "f1": step / 80}, by_task)


def write_steps(logs: RunLogs, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logs.log_step(step_metrics(step, skipped=step == 3))
        if step % 5 == 0:
            logs.log_validation(measured(step))


def read_tables(folder: Path) -> tuple[str, str]:
    return (folder / METRICS_FILE).read_text("utf-8"), (folder / VALIDATIONS_FILE).read_text(
        "utf-8"
    )


def test_each_step_is_written_at_once_and_reads_back_exactly(tmp_path: Path) -> None:
    with RunLogs(tmp_path) as logs:
        write_steps(logs, 1, 10)
        logs.log_step(step_metrics(11, loss=float("nan"), skipped=True))
        earlier = read_logs(tmp_path, STEPS)
        lines = read_tables(tmp_path)[0].splitlines()
    assert lines[0] == "step,loss,rate,gradient_norm,tokens,text_tokens,seconds,skipped"
    assert lines[3] == f"3,1.0,{1e-3 * 3 / 7!r},{0.1 * 3!r},640,512,0.25,1"
    assert earlier.progress[:10] == [step_metrics(step, skipped=step == 3) for step in range(1, 11)]
    assert earlier.progress[10].loss != earlier.progress[10].loss
    assert earlier.validations == [measured(5), measured(10)]


@pytest.mark.parametrize("torn", [b"", b"18,0.2,0.001", b'18,"0.2'])
def test_resumed_run_writes_the_same_tables_as_an_uninterrupted_one(
    tmp_path: Path, torn: bytes
) -> None:
    uninterrupted = tmp_path / "whole"
    killed = tmp_path / "killed"
    for folder in (uninterrupted, killed):
        folder.mkdir()
    with RunLogs(uninterrupted) as logs:
        write_steps(logs, 1, STEPS)
    with RunLogs(killed) as logs:
        write_steps(logs, 1, 17)
    for table in (METRICS_FILE, VALIDATIONS_FILE):
        with (killed / table).open("ab") as file:
            file.write(torn)
    with RunLogs(killed, start_step=12) as logs:
        assert [metrics.step for metrics in read_logs(killed, STEPS).progress] == list(range(1, 13))
        write_steps(logs, 13, STEPS)
    assert read_tables(killed) == read_tables(uninterrupted)
    assert [
        validation.step for validation in read_logs(killed, STEPS, last_step=5).validations
    ] == [5]
    assert not list(tmp_path.glob("*/*.part"))


def test_new_run_starts_with_empty_tables(tmp_path: Path) -> None:
    with RunLogs(tmp_path) as logs:
        write_steps(logs, 1, 5)
    RunLogs(tmp_path).close()
    assert [table.count("\n") for table in read_tables(tmp_path)] == [1, 1]
    assert read_logs(tmp_path, STEPS).progress == []


def test_table_with_other_columns_is_not_read(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("epoch,loss\n1,2\n")
    assert read_logs(tmp_path, STEPS).progress == []
    assert read_logs(tmp_path / "nowhere", STEPS).validations == []


@pytest.mark.parametrize("size", [0, 250, 1000])
def test_full_disk_gives_one_warning_and_loses_no_row(tmp_path: Path, size: int) -> None:
    uninterrupted = tmp_path / "whole"
    full = tmp_path / "full"
    for folder in (uninterrupted, full):
        folder.mkdir()
    with RunLogs(uninterrupted, tensorboard=True, clock=lambda: TIME_S) as logs:
        write_steps(logs, 1, STEPS)
    warnings: list[str] = []
    with full_disk(size):
        logs = RunLogs(full, tensorboard=True, clock=lambda: TIME_S, warn=warnings.append)
        write_steps(logs, 1, 30)
        logs.write_report("x" * 2000)
        assert all(file.stat().st_size <= size for file in full.rglob("*") if file.is_file())
    write_steps(logs, 31, STEPS)
    logs.close()
    assert read_tables(full) == read_tables(uninterrupted)
    assert event_bytes(full) == event_bytes(uninterrupted)
    assert len(warnings) == 1
    assert "the run continues" in warnings[0] and str(full) in warnings[0]


def test_report_is_replaced_atomically(tmp_path: Path) -> None:
    warnings: list[str] = []
    with RunLogs(tmp_path, warn=warnings.append) as logs:
        logs.write_report("<p>first</p>")
        with full_disk(100), (tmp_path / REPORT_FILE).open() as watching:
            logs.write_report("x" * 200)
            assert watching.read() == (tmp_path / REPORT_FILE).read_text() == "<p>first</p>"
        logs.write_report("<p>жlast</p>")
    assert (tmp_path / REPORT_FILE).read_text("utf-8") == "<p>жlast</p>"
    assert len(warnings) == 1 and not list(tmp_path.glob("*.part"))


def test_events_equal_the_bytes_of_tensorboards_writer() -> None:
    """The golden file was written by TensorBoard 2.21's RecordWriter from its own messages."""
    events = (
        tensorboard_events.version_event(TIME_S + 0.25)
        + tensorboard_events.session_start_event(TIME_S + 0.5, 101)
        + tensorboard_events.scalars_event(TIME_S + 1, 101, {"loss": 0.75, "learning rate": 1e-3})
        + tensorboard_events.scalars_event(TIME_S + 2, 70_000, {"валидация/f1": 0.0})
    )
    assert events == GOLDEN.read_bytes()
    assert tensorboard_events.crc32c(b"123456789") == 0xE3069283  # RFC 3720's.


def test_resumed_run_marks_repeated_steps_for_tensorboard(tmp_path: Path) -> None:
    with RunLogs(tmp_path, tensorboard=True, clock=lambda: TIME_S) as logs:
        write_steps(logs, 1, 5)
    with RunLogs(tmp_path, start_step=3, tensorboard=True, clock=lambda: TIME_S) as logs:
        logs.log_step(step_metrics(4))
    first_file, second_file = sorted((tmp_path / EVENTS_FOLDER).iterdir())
    first_records = records(first_file.read_bytes())
    second_records = records(second_file.read_bytes())
    assert "tfevents" in first_file.name and "tfevents" in second_file.name
    assert len(first_records) == 1 + 5 + 1
    assert b"validation/tone, or so/f1" in first_records[-1]
    assert struct.pack("<f", 3 / 5) in first_records[-2] and b"train/loss" in first_records[-2]
    assert second_records[1] == records(tensorboard_events.session_start_event(TIME_S, 4))[0]
    assert len(second_records) == 3


def test_metrics_of_independent_tasks_have_a_row_for_each_step_and_task(tmp_path: Path) -> None:
    def by_task(step: int) -> dict[str, GroupMetrics]:
        own = {
            "a": GroupMetrics(1 / step, 1e-3, 0.5),
            "b, c": GroupMetrics(2 / step, 0.0, 3.0, True),
        }
        return own if step < 4 else {"a": own["a"]}  # The other task has stopped.

    with RunLogs(tmp_path) as logs:
        for step in range(1, 6):
            logs.log_step(replace(step_metrics(step), by_task=by_task(step)))
    expected = [by_task(step) for step in range(1, 6)]
    assert [metrics.by_task for metrics in read_logs(tmp_path, STEPS).progress] == expected
    with RunLogs(tmp_path, start_step=2) as logs:
        logs.log_step(replace(step_metrics(3), by_task=by_task(1)))
    assert [metrics.by_task for metrics in read_logs(tmp_path, STEPS).progress] == [
        *expected[:2],
        by_task(1),
    ]


def test_a_run_without_independent_tasks_has_no_file_of_them(tmp_path: Path) -> None:
    with RunLogs(tmp_path) as logs:
        write_steps(logs, 1, 3)
    assert not (tmp_path / TASK_METRICS_FILE).exists()


def event_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / EVENTS_FOLDER).iterdir()))


def records(text: bytes) -> list[bytes]:
    payloads = []
    while text:
        (size,) = struct.unpack("<Q", text[:8])
        payloads.append(text[12 : 12 + size])
        text = text[16 + size :]
    return payloads


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_ten_lines() -> None:
    stream = io.StringIO()
    with open_display(STEPS, stream, measure="exact_match") as display:
        for step in range(1, STEPS + 1):
            display.on_step(step_metrics(step, skipped=step == 3))
            if step in (10, 20):
                display.on_validation(Validation(step, 0.5, {"exact_match": 0.9 - step / 100}))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tuning, 40 steps"
    steps = [line for line in lines if line.startswith("step ")]
    assert 10 <= len(steps) <= 12 and steps[-1].startswith("step 40/40  loss ")
    assert "validation at step 10: loss 0.5000, exact match 80.0 %" in lines
    assert "(last 0.0750, 1 skipped)  2,048 text tokens/s" in steps[-1]
    assert steps[-1].endswith("best exact match 80.0 % at step 10") and "left" not in steps[-1]
    assert "  10 s left" in steps[0] and "0 s left" not in steps[-1]


def test_smoothed_loss_starts_at_the_first_loss_and_ignores_non_finite_ones() -> None:
    stream = io.StringIO()
    with open_display(3, stream) as display:
        for step, loss in enumerate((4.0, float("inf"), 1.0), 1):
            display.on_step(step_metrics(step, loss=loss))
    losses = [line.split("  ")[1] for line in stream.getvalue().splitlines()[1:]]
    mean = (0.9 * 4 + 1) / 1.9
    assert losses == [
        "loss 4.0000 (last 4.0000)",
        "loss 4.0000 (last inf)",
        f"loss {mean:.4f} (last 1.0000)",
    ]


def test_progress_of_a_resumed_run_starts_at_its_step() -> None:
    stream = io.StringIO()
    with open_display(STEPS, stream, start_step=30) as display:
        for step in range(31, STEPS + 1):
            display.on_step(step_metrics(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tuning, 40 steps, from step 31"
    assert lines[1].startswith("step 31/40") and lines[-1].startswith("step 40/40")


def test_progress_on_a_terminal_is_a_bar_without_markup_in_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    screen = Screen()
    with open_display(STEPS, screen, measure="[red]exact") as display:
        for step in range(1, STEPS + 1):
            display.on_step(step_metrics(step))
        display.on_validation(Validation(STEPS, 0.5, {"[red]exact": 0.75}))
    output = screen.getvalue()
    assert "40/40" in output and "2,048 text tokens/s" in output
    assert "[red]exact 75.0 %" in output


def test_activity_without_a_terminal_is_a_line_per_interval_with_the_time_left() -> None:
    stream = io.StringIO()
    display = ActivityDisplay(stream, line_s=0)
    for activity in ("loading", "measuring"):
        for completed in range(4):
            display.show(activity, completed, 3)
    assert re.sub(r"[\d.]+ s left", "TIME left", stream.getvalue()).splitlines() == [
        "loading: 0 of 3",
        "loading: 1 of 3, TIME left",
        "loading: 2 of 3, TIME left",
        "measuring: 0 of 3",
        "measuring: 1 of 3, TIME left",
        "measuring: 2 of 3, TIME left",
    ]
    quiet_stream = io.StringIO()
    quiet_display = ActivityDisplay(quiet_stream)  # A line every ten seconds.
    for completed in range(4):
        quiet_display.show("loading", completed, 3)
    assert quiet_stream.getvalue() == ""


def test_activity_on_a_terminal_is_a_bar_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    screen = Screen()
    display = ActivityDisplay(screen)
    display.show("loading [red]weights", 0, 8)
    display.show("loading [red]weights", 2, 8)
    display.close()
    assert "loading [red]weights" in screen.getvalue() and "2/8" in screen.getvalue()

    screen = Screen()
    with open_display(STEPS, screen) as run_display:
        run_display.on_step(step_metrics(1))
        run_display.activities.show("measuring", 0, 8)
        run_display.activities.show("measuring", 4, 8)
        run_display.activities.show("measuring", 8, 8)
        run_display.on_step(step_metrics(2))
    output = screen.getvalue()
    assert "measuring" in output and "tuning" in output
    assert "measuring" not in output[output.rindex("tuning") :]


@pytest.mark.parametrize(
    ("elapsed_s", "completed", "total", "expected"),
    [(9.0, 0, 3, ""), (9.0, 1, 3, ", 18 s left"), (60.0, 2, 4, ", 1 min left"), (9.0, 4, 3, "")],
)
def test_time_left_follows_from_the_mean_speed(
    elapsed_s: float, completed: int, total: int, expected: str
) -> None:
    assert format_time_left(elapsed_s, completed, total) == expected


def test_display_that_cannot_write_does_not_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream, full_disk(10), open_display(STEPS, stream) as display:
        for step in range(1, STEPS + 1):
            display.on_step(step_metrics(step))
        assert display.current_step == STEPS and path.read_text() == "tuning, 40"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3599, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_duration_has_at_most_two_units(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
