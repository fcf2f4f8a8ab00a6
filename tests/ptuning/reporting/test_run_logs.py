"""A run's logs and talk: what a row holds, what a resumed run keeps, what a full disk costs.

The disk is filled by the system's own limit on a file's size. TensorBoard's bytes are held against
records that its own writer made.
"""

import io
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ptuning.reporting import tensorboard_events
from ptuning.reporting.progress_bar import duration, telling
from ptuning.reporting.run_logs import EVENTS, METRICS, REPORT, VALIDATIONS, Logs, read_logs
from ptuning.run_facts import Progress, Validation

GOLDEN = (
    Path(__file__).parents[2] / "golden/tensorboard-events.bin"
)  # From TensorBoard's own writer.
TIME_S = 1_700_000_000.0
STEPS = 40


def made(step: int, **changed: float | bool) -> Progress:
    one = Progress(step, STEPS, 3 / step, 640, 512, 0.25, 1e-3 * step / 7, 0.1 * step)
    return replace(one, **changed)  # type: ignore[arg-type]


def measured(step: int) -> Validation:
    by_task = {"refunds": {"f1": step / 70}, "tone, or so": {"f1": step / 90}}
    return Validation(step, 2 / 3, {"exact_match": step / 60, "f1": step / 80}, by_task)


def told(logs: Logs, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logs.step(made(step, skipped=step == 3))
        if step % 5 == 0:
            logs.validated(measured(step))


def tables(folder: Path) -> tuple[str, str]:
    return (folder / METRICS).read_text("utf-8"), (folder / VALIDATIONS).read_text("utf-8")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond a size: the system takes what fits, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_step_is_a_row_that_is_there_at_once_and_reads_back_exactly(tmp_path: Path) -> None:
    with Logs(tmp_path) as logs:
        told(logs, 1, 10)
        logs.step(made(11, loss=float("nan"), skipped=True))
        earlier = read_logs(tmp_path, STEPS)
        lines = tables(tmp_path)[0].splitlines()
    assert lines[0] == "step,loss,rate,gradient_norm,tokens,text_tokens,seconds,skipped"
    assert lines[3] == f"3,1.0,{1e-3 * 3 / 7!r},{0.1 * 3!r},640,512,0.25,1"
    assert earlier.progress[:10] == [made(step, skipped=step == 3) for step in range(1, 11)]
    assert earlier.progress[10].loss != earlier.progress[10].loss
    assert earlier.validations == [measured(5), measured(10)]


@pytest.mark.parametrize("torn", [b"", b"18,0.2,0.001", b'18,"0.2'])
def test_a_resumed_run_leaves_the_tables_of_one_that_never_stopped(
    tmp_path: Path, torn: bytes
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    with Logs(whole) as logs:
        told(logs, 1, STEPS)
    with Logs(killed) as logs:
        told(logs, 1, 17)
    for table in (METRICS, VALIDATIONS):
        with (killed / table).open("ab") as file:
            file.write(torn)
    with Logs(killed, after=12) as logs:
        assert [one.step for one in read_logs(killed, STEPS).progress] == list(range(1, 13))
        told(logs, 13, STEPS)
    assert tables(killed) == tables(whole)
    assert [one.step for one in read_logs(killed, STEPS, after=5).validations] == [5]
    assert not list(tmp_path.glob("*/*.part"))


def test_a_new_run_begins_with_empty_tables(tmp_path: Path) -> None:
    with Logs(tmp_path) as logs:
        told(logs, 1, 5)
    Logs(tmp_path).close()
    assert [table.count("\n") for table in tables(tmp_path)] == [1, 1]
    assert read_logs(tmp_path, STEPS).progress == []


def test_a_table_of_another_program_is_not_misread(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("epoch,loss\n1,2\n")
    assert read_logs(tmp_path, STEPS).progress == []
    assert read_logs(tmp_path / "nowhere", STEPS).validations == []


@pytest.mark.parametrize("size", [0, 250, 1000])
def test_a_full_disk_costs_one_warning_and_no_row(tmp_path: Path, size: int) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    for folder in (whole, full):
        folder.mkdir()
    with Logs(whole, tensorboard=True, clock=lambda: TIME_S) as logs:
        told(logs, 1, STEPS)
    warnings: list[str] = []
    with full_disk(size):
        logs = Logs(full, tensorboard=True, clock=lambda: TIME_S, warn=warnings.append)
        told(logs, 1, 30)
        logs.report("x" * 2000)
        assert all(file.stat().st_size <= size for file in full.rglob("*") if file.is_file())
    told(logs, 31, STEPS)
    logs.close()
    assert tables(full) == tables(whole)
    assert event_bytes(full) == event_bytes(whole)
    assert len(warnings) == 1
    assert "the run goes on" in warnings[0] and str(full) in warnings[0]


def test_the_report_is_replaced_whole(tmp_path: Path) -> None:
    warnings: list[str] = []
    with Logs(tmp_path, warn=warnings.append) as logs:
        logs.report("<p>first</p>")
        with full_disk(100), (tmp_path / REPORT).open() as watching:
            logs.report("x" * 200)
            assert watching.read() == (tmp_path / REPORT).read_text() == "<p>first</p>"
        logs.report("<p>жlast</p>")
    assert (tmp_path / REPORT).read_text("utf-8") == "<p>жlast</p>"
    assert len(warnings) == 1 and not list(tmp_path.glob("*.part"))


def test_events_are_byte_for_byte_those_of_tensorboards_own_writer() -> None:
    """The golden file was written by TensorBoard 2.21's RecordWriter from its own messages."""
    ours = (
        tensorboard_events.opening(TIME_S + 0.25)
        + tensorboard_events.resumed(TIME_S + 0.5, 101)
        + tensorboard_events.scalars(TIME_S + 1, 101, {"loss": 0.75, "learning rate": 1e-3})
        + tensorboard_events.scalars(TIME_S + 2, 70_000, {"валидация/f1": 0.0})
    )
    assert ours == GOLDEN.read_bytes()
    assert tensorboard_events.crc32c(b"123456789") == 0xE3069283  # RFC 3720's.


def test_a_resumed_run_tells_tensorboard_which_steps_are_void(tmp_path: Path) -> None:
    with Logs(tmp_path, tensorboard=True, clock=lambda: TIME_S) as logs:
        told(logs, 1, 5)
    with Logs(tmp_path, after=3, tensorboard=True, clock=lambda: TIME_S) as logs:
        logs.step(made(4))
    first, second = sorted((tmp_path / EVENTS).iterdir())
    begun, going_on = records(first.read_bytes()), records(second.read_bytes())
    assert "tfevents" in first.name and "tfevents" in second.name
    assert len(begun) == 1 + 5 + 1
    assert b"validation/tone, or so/f1" in begun[-1]
    assert struct.pack("<f", 3 / 5) in begun[-2] and b"train/loss" in begun[-2]
    assert going_on[1] == records(tensorboard_events.resumed(TIME_S, 4))[0]
    assert len(going_on) == 3


def event_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / EVENTS).iterdir()))


def records(text: bytes) -> list[bytes]:
    found = []
    while text:
        (size,) = struct.unpack("<Q", text[:8])
        found.append(text[12 : 12 + size])
        text = text[16 + size :]
    return found


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_ten_lines_say_how_it_goes() -> None:
    stream = io.StringIO()
    with telling(STEPS, stream, measure="exact_match") as shown:
        for step in range(1, STEPS + 1):
            shown.step(made(step, skipped=step == 3))
            if step in (10, 20):
                shown.validated(Validation(step, 0.5, {"exact_match": 0.9 - step / 100}))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tuning, 40 steps"
    steps = [line for line in lines if line.startswith("step ")]
    assert 10 <= len(steps) <= 12 and steps[-1].startswith("step 40/40  loss ")
    assert "validation at step 10: loss 0.5000, exact match 80.0 %" in lines
    assert "(last 0.0750, 1 skipped)  2,048 text tokens/s" in steps[-1]
    assert steps[-1].endswith("best exact match 80.0 % at step 10") and "left" not in steps[-1]
    assert "  10 s left" in steps[0] and "0 s left" not in steps[-1]


def test_the_smoothed_loss_begins_with_the_first_and_leaves_out_what_is_not_finite() -> None:
    stream = io.StringIO()
    with telling(3, stream) as shown:
        for step, loss in enumerate((4.0, float("inf"), 1.0), 1):
            shown.step(made(step, loss=loss))
    losses = [line.split("  ")[1] for line in stream.getvalue().splitlines()[1:]]
    mean = (0.9 * 4 + 1) / 1.9
    assert losses == [
        "loss 4.0000 (last 4.0000)",
        "loss 4.0000 (last inf)",
        f"loss {mean:.4f} (last 1.0000)",
    ]


def test_a_resumed_run_counts_from_where_it_was() -> None:
    stream = io.StringIO()
    with telling(STEPS, stream, after=30) as shown:
        for step in range(31, STEPS + 1):
            shown.step(made(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "tuning, 40 steps, from step 31"
    assert lines[1].startswith("step 31/40") and lines[-1].startswith("step 40/40")


def test_a_terminal_has_a_bar_and_names_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    screen = Screen()
    with telling(STEPS, screen, measure="[red]exact") as shown:
        for step in range(1, STEPS + 1):
            shown.step(made(step))
        shown.validated(Validation(STEPS, 0.5, {"[red]exact": 0.75}))
    said = screen.getvalue()
    assert "40/40" in said and "2,048 text tokens/s" in said
    assert "[red]exact 75.0 %" in said


def test_talk_that_nobody_can_take_does_not_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream, full_disk(10), telling(STEPS, stream) as shown:
        for step in range(1, STEPS + 1):
            shown.step(made(step))
        assert shown.made == STEPS and path.read_text() == "tuning, 40"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3599, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_a_duration_is_read_at_a_glance(seconds: float, said: str) -> None:
    assert duration(seconds) == said
