"""Runs that are killed, lack disk space or get bad inputs: states stay complete and resume."""

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from gpt.formats.registry import open_checkpoint
from ptuning.__main__ import main
from ptuning.run.training_state import STATE_PATTERN
from tests.support.models import lively
from tests.support.servers import CONFIG, ROOT, eventually, serving, write_checkpoint
from tests.support.tuning_runs import (
    END_S,
    MANY,
    Start,
    adapters,
    count_rows,
    latest,
    logged,
    starting,
    states,
    table,
    write_run_settings,
)

pytestmark = pytest.mark.slow

KILLS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with starting() as start_run:
        yield start_run


def test_run_killed_twenty_times_has_the_same_result(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"steps": 120, "method": "lstm", "encoder_dropout": 0.2, "learning_rate": 0.01}
    settings |= {"batch_examples": 2, "virtual_tokens": 4}
    assert start(write_run_settings(tmp_path / "whole", checkpoint, **settings)).end() == 0
    file = write_run_settings(tmp_path / "killed", checkpoint, **settings)
    random_delays = random.Random(1)
    kills = 0
    folder = file.parent
    while kills < KILLS:
        run = start(file)
        rows_before = count_rows(folder)
        if kills % 5 == 4:
            time.sleep(random_delays.uniform(0, 0.5))  # Mostly while it loads.
        else:
            # A resumed run first truncates the tables to its state, then continues.
            eventually(lambda run=run: "tuning" in run.stderr, END_S)  # type: ignore[misc]
            run.reach(min((rows_before if run.resumed else 0) + random_delays.randint(0, 3), 116))
        run.kill()
        assert run.end() == -signal.SIGKILL
        assert adapters(folder) == []
        kills += 1
    assert 0 < count_rows(folder) < 120
    assert start(file).end() == 0
    assert logged(folder) == logged(tmp_path / "whole")
    assert len(logged(folder)) == 120
    assert torch.equal(table(folder), table(tmp_path / "whole"))
    assert states(folder) == []


@pytest.mark.parametrize("method", ["mlp", "full"])
def test_run_killed_while_it_ends_leaves_one_result(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"steps": 4, "method": method, "learning_rate": 1e-3}
    artifact = "answer-1" if method == "full" else "answer@1.safetensors"
    random_delays = random.Random(2)
    unfinished = 0
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        file = write_run_settings(folder, checkpoint, **settings)
        run = start(file)
        run.reach(4)
        time.sleep(random_delays.uniform(0, 0.01 * attempt))
        run.kill()
        run.end()
        assert set(adapters(folder)) <= {artifact}
        if any(map(STATE_PATTERN.fullmatch, states(folder))) or not adapters(folder):
            unfinished += 1
            assert start(file).end() == 0
            assert states(folder) == []
        assert adapters(folder) == [artifact]
        assert len(logged(folder)) == 4
    assert unfinished


def test_full_disk_loses_logs_and_states_but_not_the_adapter(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(write_run_settings(tmp_path, checkpoint, steps=40), file_bytes_max=5000)
    assert run.end() == 0
    assert run.stderr.count("no state could be saved") == 1, run.stderr
    assert run.stderr.count("cannot write") == 1, run.stderr
    assert run.stderr.count("warning") == 2
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert states(tmp_path) == []


@pytest.mark.parametrize("method", ["prompt-tuning", "lstm", "full"])
def test_artifacts_are_written_after_disk_space_is_freed(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    """The error is one line without a traceback, and the same command then writes the artifact."""
    rate = {"prompt-tuning": 0.5, "lstm": 0.01, "full": 1e-4}[method]
    file = write_run_settings(tmp_path, checkpoint, steps=80, method=method, learning_rate=rate)
    run = start(file)
    run.reach(4)
    assert run.process.pid is not None
    # The limit fits the adapter of an lstm, but not its network.
    file_bytes_max = 5000 if method == "lstm" else 100
    resource.prlimit(
        run.process.pid, resource.RLIMIT_FSIZE, (file_bytes_max, resource.RLIM_INFINITY)
    )
    assert run.end() == 1
    assert run.stderr.splitlines()[-1].startswith("preamble tune: "), run.stderr
    assert "cannot be written" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert adapters(tmp_path) == (["answer@1.safetensors"] if method == "lstm" else [])
    (state,) = [state for state in states(tmp_path) if STATE_PATTERN.fullmatch(state)]
    assert int(state[-8:]) >= 3

    second_run = start(file)
    assert second_run.end() == 0, second_run.stderr
    name = "answer-1" if method == "full" else "answer@1.safetensors"
    assert adapters(tmp_path) == [name]
    assert states(tmp_path) == []
    assert [row[0] for row in logged(tmp_path)] == [str(step) for step in range(1, 81)]


def rewrite(checkpoint: Path, model: Checkpoint) -> None:
    """Replace the model at the same path with another valid model."""
    tokenizer = checkpoint.parent / "tokenizer.model"
    shutil.rmtree(checkpoint)
    write_native(model, checkpoint, tokenizer=tokenizer)


@pytest.mark.parametrize("tp", [1, 2])
def test_nan_loss_is_an_error_with_the_step(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    wild = {"method": "mlp", "learning_rate": 10, "dtype": "float16"}
    run = start(write_run_settings(tmp_path, checkpoint, save_every=1, tp=tp, **wild))
    assert run.end() == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.count("loss is nan") == 1, run.stderr
    last_line = run.stderr.splitlines()[-1]
    assert last_line.startswith(
        f"preamble tune: the loss is nan at step {run.rows + 1}; try a smaller"
    )
    assert run.rows >= 1
    assert states(tmp_path) == [f"state-{run.rows:08d}"]
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_non_finite_base_model_is_refused_once(tp: int, tmp_path: Path, start: Start) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    sound = lively(CONFIG)
    tensors = {name: sound.read(name).clone() for name in sound.tensors}
    tensors["embedding.word_embeddings.weight"][-1] = torch.nan
    rewrite(checkpoint, checkpoint_from_tensors(CONFIG, tensors))
    run = start(write_run_settings(tmp_path, checkpoint, tp=tp))
    assert run.end() == 1
    line = run.only_stderr_line
    assert "holds values that are not finite" in line


def test_changed_base_model_refuses_the_resume(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    file = write_run_settings(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(4)
    run.kill()
    run.end()
    rewrite(checkpoint, lively(CONFIG, seed=5))

    assert main(["tune", str(file)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "the base model has changed since the unfinished run" in line
    assert [state for state in states(tmp_path) if STATE_PATTERN.fullmatch(state)]


def test_second_run_in_a_locked_folder_is_refused(
    checkpoint: Path, tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run_settings(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(1)
    assert run.process.is_alive()
    assert main(["tune", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is in use by another `preamble tune`" in line
    rows_before = run.rows
    run.reach(rows_before + 3)
    run.kill()
    run.end()


CLOSED = {
    "stderr is closed": "2>&-",
    "nobody reads stderr": "2> >(exec 0<&-)",
    "nobody reads stdout": "> >(exec 0<&-)",
}


@pytest.mark.parametrize("redirections", CLOSED)
def test_run_works_with_closed_output_streams(
    redirections: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = write_run_settings(tmp_path, checkpoint, steps=6)
    line = f"{sys.executable} -m preamble tune {file} {CLOSED[redirections]}"
    completed = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, timeout=END_S, check=False
    )
    assert completed.returncode == (1 if redirections == "nobody reads stdout" else 0), (
        completed.stderr
    )
    assert b"Traceback" not in completed.stderr
    expected = b"" if "stdout" in redirections else b"answer@1.safetensors\n"
    assert completed.stdout.endswith(expected)
    assert completed.stdout.count(b"\n") == (1 if expected else 0), completed.stdout
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert len(logged(tmp_path)) == 6
    assert (latest(tmp_path) / "metrics.csv").read_text().count("\n") == 7


def test_running_server_serves_a_new_adapter(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    digest_before = base_digest(open_checkpoint(checkpoint))
    file = write_run_settings(tmp_path, checkpoint, steps=80)
    folder = str(tmp_path / "adapters")
    with (
        serving(checkpoint, tmp_path / "serve.yaml", adapters=folder) as server,
        server.client() as client,
    ):
        plain = client.generate("the", Options(max_new_tokens=4)).token_ids
        assert start(file).end() == 0
        # An unknown name triggers a directory scan before it is refused.
        answer = client.generate({"prompt": "the"}, Options(adapter="answer"))
        assert answer.text == " dog"
        assert start(file).end() == 0
        eventually(
            lambda: client.generate({"prompt": "the"}, Options(adapter="answer@2")).text == " dog"
        )
        assert client.generate("the", Options(max_new_tokens=4)).token_ids == plain
    assert adapters(tmp_path) == ["answer@1.safetensors", "answer@2.safetensors"]
    assert base_digest(open_checkpoint(checkpoint)) == digest_before
