"""Runs on several ranks: if one fails, all end with one error message, and the run resumes."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import open_adapter
from tests.support.models import lively
from tests.support.servers import CONFIG, ROOT, eventually, write_checkpoint
from tests.support.tuning_runs import (
    END_S,
    MANY,
    Start,
    adapters,
    count_rows,
    has_exited,
    logged,
    starting,
    states,
    table,
    write_run_settings,
)
from tests.support.tuning_settings import records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with starting() as start_run:
        yield start_run


def test_killed_split_runs_resume_to_the_losses_of_one_rank(tmp_path: Path, start: Start) -> None:
    """A killed or stopped rank ends the whole run, also while validation generates answers."""
    checkpoint = tmp_path / "model"
    write_checkpoint(tmp_path)  # For its tokenizer.
    deep = lively(CONFIG.with_fields(num_layers=4, moe_layers=(False,) * 4))
    write_native(deep, checkpoint, tokenizer=tmp_path / "tokenizer.model")
    validation = tmp_path / "validation.jsonl"
    validation.write_text("\n".join(json.dumps(record) for record in records(7)))
    settings = {
        "steps": 45,
        "validation": str(validation),
        "monitor": "exact_match",
        "validate_every": 15,
        "max_new_tokens": 3,
        "batch_examples": 4,
    }
    assert start(write_run_settings(tmp_path / "one", checkpoint, **settings)).end() == 0
    single_rank_losses = [float(row[1]) for row in logged(tmp_path / "one")]

    splits: dict[str, dict[str, int]] = {
        "tensor": {"tp": 2},
        "all": {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batch_examples": 2},
    }
    for name, split in splits.items():
        file = write_run_settings(tmp_path / name, checkpoint, **settings, **split)
        folder = file.parent
        if name == "tensor":
            run = start(file)
            run.reach(4)
            other_ranks = run.ranks
            assert len(other_ranks) == 1
            run.kill()
            run.end()
            eventually(lambda other_ranks=other_ranks: all(map(has_exited, other_ranks)), 10)  # type: ignore[misc]
        run = start(file)
        run.reach(count_rows(folder) + 8)
        other_ranks = run.ranks
        assert len(other_ranks) == (1 if name == "tensor" else 3)
        os.kill(other_ranks[-1], signal.SIGKILL)
        assert run.end() == 1
        last_line = run.stderr.splitlines()[-1]
        assert last_line.startswith(
            f"preamble tune: rank {len(other_ranks)} was killed by signal 9"
        )
        assert "Traceback" not in run.stderr
        assert all(map(has_exited, other_ranks))
        assert adapters(folder) == []

        run = start(file)
        assert run.end() == 0, run.stderr
        assert "resuming from step" in run.stderr
        losses = [float(row[1]) for row in logged(folder)]
        assert losses == pytest.approx(single_rank_losses, rel=1e-10), name
        torch.testing.assert_close(table(folder), table(tmp_path / "one"), rtol=1e-5, atol=1e-6)
        cards = [
            open_adapter(tmp_path / run_name / "adapters" / "answer@1.safetensors").card
            for run_name in ("one", name)
        ]
        assert cards[0].metrics["validation"].keys() == cards[1].metrics["validation"].keys()
        for metric_group in ("prompt", "adapter"):
            shares = [
                value
                for card in cards
                for key, value in card.metrics["validation"].items()
                if metric_group in key
            ]
            assert len(shares) % 2 == 0
            assert shares[: len(shares) // 2] == shares[len(shares) // 2 :]


def test_rank_failing_at_start_ends_the_others(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    cases = {
        "killed": "rank 1 was killed by signal 9",
        "misled": "cannot be read",
        "apart": "the ranks read different records",
    }
    for name, message in cases.items():
        file = write_run_settings(tmp_path / name, checkpoint, steps=4, tp=2)
        run = start(file)
        eventually(lambda run=run: len(run.ranks) == 1, END_S)  # type: ignore[misc]
        if name == "killed":
            os.kill(run.ranks[0], signal.SIGKILL)
        elif name == "misled":
            (file.parent / "examples.jsonl").unlink()  # Rank 0 has read it.
        else:
            with (file.parent / "examples.jsonl").open("a") as records_file:
                records_file.write('\n{"prompt": "the fox", "completion": "b"}\n')
        assert run.end() == 1
        line = run.only_stderr_line
        assert message in line, line


def test_full_disk_on_one_rank_does_not_end_the_run(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(write_run_settings(tmp_path, checkpoint, steps=60, tp=2))
    run.reach(4)
    (other_rank,) = run.ranks
    resource.prlimit(other_rank, resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    assert run.end() == 0, run.stderr
    assert run.stderr.count("no state could be saved") == 1, run.stderr
    assert run.stderr.count("warning") == 1, run.stderr
    assert len(logged(tmp_path)) == 60
    assert adapters(tmp_path) == ["answer@1.safetensors"]


@pytest.mark.parametrize("tp", [1, 2])
def test_first_signal_saves_and_second_signal_ends_at_once(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    file = write_run_settings(tmp_path, checkpoint, steps=MANY, save_every=MANY, tp=tp)
    for number in (signal.SIGINT, signal.SIGTERM):
        run = start(file)
        run.reach(count_rows(tmp_path) + 2)
        other_ranks = run.ranks
        for pid in [
            *other_ranks,
            run.process.pid or 0,
        ]:  # A service manager signals the whole group.
            os.kill(pid, number)
        assert run.end() == 130, run.stderr
        assert all(map(has_exited, other_ranks))
        assert run.stdout == ""
        assert run.stderr.count("saving the state after this step") == 1
        assert run.stderr.endswith(
            f"saved at step {run.rows}; the same command resumes from there\n"
        ), run.stderr
        assert states(tmp_path) == [f"state-{run.rows:08d}"]
    saved_states = states(tmp_path)
    run = start(file)
    run.reach(run.rows + 2)
    other_ranks = run.ranks
    # A stopped process cannot save; both signals are delivered when it continues.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        run.kill(number)
    assert run.end() == 130
    assert "interrupted" in run.stderr.splitlines()[-1], run.stderr
    assert "Traceback" not in run.stderr
    eventually(lambda: all(map(has_exited, other_ranks)), 10)
    assert states(tmp_path) == saved_states


def torchrun(file: Path) -> "subprocess.Popen[bytes]":
    arguments = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "preamble"]
    with open(file.parent / "err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments, "tune", str(file)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )


def test_torchrun_run_starts_stops_and_reports_once(checkpoint: Path, tmp_path: Path) -> None:
    file = write_run_settings(tmp_path, checkpoint, steps=200, save_every=MANY, tp=2)
    for attempt in ("interrupted", "finished", "refused"):
        if attempt == "refused":
            file = write_run_settings(tmp_path, checkpoint, steps=200, tp=2, name="a@b@c")
        launcher = torchrun(file)
        try:
            if attempt == "interrupted":
                eventually(lambda: count_rows(tmp_path) > 2, END_S)
                launcher.terminate()
            code = launcher.wait(END_S)
        finally:
            launcher.kill()
            launcher.wait()
        stderr_text = (tmp_path / "err").read_text()
        if attempt == "interrupted":
            assert code != 0
            assert stderr_text.count("saving the state after this step") == 1, stderr_text
            assert f"saved at step {count_rows(tmp_path)}" in stderr_text
            assert states(tmp_path) == [f"state-{count_rows(tmp_path):08d}"]
        elif attempt == "finished":
            assert code == 0, stderr_text
            assert stderr_text.count("resuming from step") == 1
            assert adapters(tmp_path) == ["answer@1.safetensors"]
            assert len(logged(tmp_path)) == 200
        else:
            assert code == 1
            assert stderr_text.count("preamble tune: ") == 1, stderr_text
    assert adapters(tmp_path) == ["answer@1.safetensors"]


def test_invalid_data_is_reported_once_for_all_ranks(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    for lines, message in (
        ("", "no usable example"),
        ('{"prompt": "a"}', "line 1: the record has no"),
    ):
        file = write_run_settings(tmp_path, checkpoint, tp=2)
        (tmp_path / "examples.jsonl").write_text(lines)
        run = start(file)
        assert run.end() == 1
        line = run.only_stderr_line
        assert message in line
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("split", [{"tp": 2}, {"dp": 2}])
def test_state_of_another_split_is_refused_once(
    split: dict[str, int], checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(write_run_settings(tmp_path, checkpoint, steps=MANY))
    run.reach(4)
    run.kill()
    run.end()
    run = start(write_run_settings(tmp_path, checkpoint, steps=MANY, **split))
    assert run.end() == 1
    line = run.only_stderr_line
    (name,) = split
    assert f"had {name} 1, now {name} is 2; set {name} back to resume, or give --restart" in line
