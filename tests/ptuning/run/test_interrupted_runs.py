"""Runs that are killed, starved and misled: what was learned stays whole, and goes on."""

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
from gpt.checkpoint.logical_tensor import Checkpoint, in_memory
from gpt.formats.registry import open_checkpoint
from ptuning.__main__ import main
from ptuning.run.training_state import STATE
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
    made,
    starting,
    states,
    table,
)

pytestmark = pytest.mark.slow

KILLS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with starting() as one:
        yield one


def test_a_run_that_is_killed_twenty_times_learns_what_it_would_have(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"steps": 120, "method": "lstm", "encoder_dropout": 0.2, "learning_rate": 0.01}
    settings |= {"batch_examples": 2, "virtual_tokens": 4}
    assert start(made(tmp_path / "whole", checkpoint, **settings)).end() == 0
    file, dice, kills = made(tmp_path / "killed", checkpoint, **settings), random.Random(1), 0
    folder = file.parent
    while kills < KILLS:
        run, before = start(file), count_rows(folder)
        if kills % 5 == 4:
            time.sleep(dice.uniform(0, 0.5))  # While it loads, mostly.
        else:
            # A run that goes on cuts off rows first; then it makes them again.
            eventually(lambda run=run: "tuning" in run.said, END_S)  # type: ignore[misc]
            run.reach(min((before if run.goes_on else 0) + dice.randint(0, 3), 116))
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
def test_a_run_that_is_killed_while_it_ends_leaves_one_result(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"steps": 4, "method": method, "learning_rate": 1e-3}
    result = "answer-1" if method == "full" else "answer@1.safetensors"
    dice, unfinished = random.Random(2), 0
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        file = made(folder, checkpoint, **settings)
        run = start(file)
        run.reach(4)
        time.sleep(dice.uniform(0, 0.01 * attempt))
        run.kill()
        run.end()
        assert set(adapters(folder)) <= {result}
        if any(map(STATE.fullmatch, states(folder))) or not adapters(folder):
            unfinished += 1
            assert start(file).end() == 0
            assert states(folder) == []
        assert adapters(folder) == [result]
        assert len(logged(folder)) == 4
    assert unfinished


def test_a_full_disk_keeps_logs_and_states_from_a_run_but_not_its_adapter(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=40), room=5000)
    assert run.end() == 0
    assert run.said.count("no state could be saved") == 1, run.said
    assert run.said.count("cannot write") == 1, run.said
    assert run.said.count("warning") == 2
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert states(tmp_path) == []


@pytest.mark.parametrize("method", ["prompt-tuning", "lstm", "full"])
def test_what_has_no_room_at_the_end_is_written_when_there_is_some(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    """Without a word of Python: one sentence, and the same command has little left to do."""
    rate = {"prompt-tuning": 0.5, "lstm": 0.01, "full": 1e-4}[method]
    file = made(tmp_path, checkpoint, steps=150, method=method, learning_rate=rate)
    run = start(file)
    run.reach(4)
    assert run.process.pid is not None
    # Of an lstm the adapter has room, and its network has none.
    room = 5000 if method == "lstm" else 100
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    assert run.end() == 1
    assert run.said.splitlines()[-1].startswith("preamble tune: "), run.said
    assert "cannot be written" in run.said.splitlines()[-1]
    assert "Traceback" not in run.said
    assert adapters(tmp_path) == (["answer@1.safetensors"] if method == "lstm" else [])
    (state,) = [one for one in states(tmp_path) if STATE.fullmatch(one)]
    assert int(state[-8:]) >= 3

    again = start(file)
    assert again.end() == 0, again.said
    name = "answer-1" if method == "full" else "answer@1.safetensors"
    assert adapters(tmp_path) == [name]
    assert states(tmp_path) == []
    assert [row[0] for row in logged(tmp_path)] == [str(step) for step in range(1, 151)]


def rewrite(checkpoint: Path, model: Checkpoint) -> None:
    """Another model at the same path, as whole as the one before."""
    tokenizer = checkpoint.parent / "tokenizer.model"
    shutil.rmtree(checkpoint)
    write_native(model, checkpoint, tokenizer=tokenizer)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_that_is_no_number_is_one_sentence_with_the_step(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    wild = {"method": "mlp", "learning_rate": 1e30, "dtype": None}
    run = start(made(tmp_path, checkpoint, save_every=1, tp=tp, **wild))
    assert run.end() == 1
    assert "Traceback" not in run.said
    assert run.said.count("loss is nan") == 1, run.said
    last = run.said.splitlines()[-1]
    assert last.startswith(f"preamble tune: the loss is nan at step {run.rows + 1}; try a smaller")
    assert run.rows >= 1
    assert states(tmp_path) == [f"state-{run.rows:08d}"]
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_base_that_is_not_finite_is_refused_once(tp: int, tmp_path: Path, start: Start) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    sound = lively(CONFIG)
    tensors = {name: sound.read(name).clone() for name in sound.tensors}
    tensors["embedding.word_embeddings.weight"][-1] = torch.nan
    rewrite(checkpoint, in_memory(CONFIG, tensors))
    run = start(made(tmp_path, checkpoint, tp=tp))
    assert run.end() == 1
    (line,) = run.said.splitlines()
    assert "holds values that are not finite" in line


def test_a_base_that_changed_between_two_halves_is_refused(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    file = made(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(4)
    run.kill()
    run.end()
    rewrite(checkpoint, lively(CONFIG, seed=5))

    assert main(["tune", str(file)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "the base model has changed since; bring back what it learned from" in line
    assert [one for one in states(tmp_path) if STATE.fullmatch(one)]


def test_a_second_run_in_the_same_folder_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file = made(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(1)
    assert run.process.is_alive()
    assert main(["tune", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is in use by another `preamble tune`" in line
    before = run.rows
    run.reach(before + 3)
    run.kill()
    run.end()


CLOSED = {
    "stderr is closed": "2>&-",
    "nobody reads stderr": "2> >(exec 0<&-)",
    "nobody reads stdout": "> >(exec 0<&-)",
}


@pytest.mark.parametrize("how", CLOSED)
def test_a_run_needs_nobody_to_listen(how: str, checkpoint: Path, tmp_path: Path) -> None:
    file = made(tmp_path, checkpoint, steps=6)
    line = f"{sys.executable} -m preamble tune {file} {CLOSED[how]}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, timeout=END_S, check=False
    )
    assert done.returncode == (1 if how == "nobody reads stdout" else 0), done.stderr
    assert b"Traceback" not in done.stderr
    expected = b"" if "stdout" in how else b"answer@1.safetensors\n"
    assert done.stdout.endswith(expected)
    assert done.stdout.count(b"\n") == (1 if expected else 0), done.stdout
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert len(logged(tmp_path)) == 6
    assert (latest(tmp_path) / "metrics.csv").read_text().count("\n") == 7


def test_a_running_server_serves_what_was_just_learned(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    before = base_digest(open_checkpoint(checkpoint))
    file = made(tmp_path, checkpoint, steps=80)
    folder = str(tmp_path / "adapters")
    with (
        serving(checkpoint, tmp_path / "serve.yaml", adapters=folder) as server,
        server.client() as client,
    ):
        plain = client.generate("the", Options(max_new_tokens=4)).token_ids
        assert start(file).end() == 0
        # An unknown name is looked for once more before it is refused.
        first = client.generate({"prompt": "the"}, Options(adapter="answer"))
        assert first.text == " dog"
        assert start(file).end() == 0
        eventually(
            lambda: client.generate({"prompt": "the"}, Options(adapter="answer@2")).text == " dog"
        )
        assert client.generate("the", Options(max_new_tokens=4)).token_ids == plain
    assert adapters(tmp_path) == ["answer@1.safetensors", "answer@2.safetensors"]
    assert base_digest(open_checkpoint(checkpoint)) == before
