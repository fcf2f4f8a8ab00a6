"""Runs of several ranks of which one fails: all end, one sentence says why, and the run goes on."""

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
    gone,
    logged,
    made,
    starting,
    states,
    table,
)
from tests.support.tuning_settings import records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with starting() as one:
        yield one


def test_splits_are_killed_and_go_on_to_the_losses_of_one_rank(
    tmp_path: Path, start: Start
) -> None:
    """Either end of a run, at any rank, ends all of it; validation writes answers meanwhile."""
    checkpoint = tmp_path / "model"
    write_checkpoint(tmp_path)  # For its tokenizer.
    deep = lively(CONFIG.with_fields(num_layers=4, moe_layers=(False,) * 4))
    write_native(deep, checkpoint, tokenizer=tmp_path / "tokenizer.model")
    validation = tmp_path / "validation.jsonl"
    validation.write_text("\n".join(json.dumps(record) for record in records(7)))
    settings = {
        "steps": 90,
        "validation": str(validation),
        "measure": "exact_match",
        "validate_every": 30,
        "max_new_tokens": 3,
        "batch_examples": 4,
    }
    assert start(made(tmp_path / "one", checkpoint, **settings)).end() == 0
    alone = [float(row[1]) for row in logged(tmp_path / "one")]

    splits: dict[str, dict[str, int]] = {
        "tensor": {"tp": 2},
        "all": {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batch_examples": 2},
    }
    for name, split in splits.items():
        file = made(tmp_path / name, checkpoint, **settings, **split)
        folder = file.parent
        if name == "tensor":
            run = start(file)
            run.reach(4)
            others = run.ranks
            assert len(others) == 1
            run.kill()
            run.end()
            eventually(lambda others=others: all(map(gone, others)), 10)  # type: ignore[misc]
        run = start(file)
        run.reach(count_rows(folder) + 8)
        others = run.ranks
        assert len(others) == (1 if name == "tensor" else 3)
        os.kill(others[-1], signal.SIGKILL)
        assert run.end() == 1
        last = run.said.splitlines()[-1]
        assert last.startswith(f"preamble tune: rank {len(others)} was killed by signal 9")
        assert "Traceback" not in run.said
        assert all(map(gone, others))
        assert adapters(folder) == []

        run = start(file)
        assert run.end() == 0, run.said
        assert "going on from step" in run.said
        losses = [float(row[1]) for row in logged(folder)]
        assert losses == pytest.approx(alone, rel=1e-10), name
        torch.testing.assert_close(table(folder), table(tmp_path / "one"), rtol=1e-5, atol=1e-6)
        cards = [
            open_adapter(tmp_path / one / "adapters" / "answer@1.safetensors").card
            for one in ("one", name)
        ]
        assert cards[0].metrics["validation"].keys() == cards[1].metrics["validation"].keys()
        for what in ("prompt", "adapter"):
            shares = [
                value
                for card in cards
                for key, value in card.metrics["validation"].items()
                if what in key
            ]
            assert len(shares) % 2 == 0
            assert shares[: len(shares) // 2] == shares[len(shares) // 2 :]


def test_a_rank_that_fails_while_it_starts_does_not_keep_the_others(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    cases = {
        "killed": "rank 1 was killed by signal 9",
        "misled": "cannot be read",
        "apart": "the ranks were not given the same records",
    }
    for name, words in cases.items():
        file = made(tmp_path / name, checkpoint, steps=4, tp=2)
        run = start(file)
        eventually(lambda run=run: len(run.ranks) == 1, END_S)  # type: ignore[misc]
        if name == "killed":
            os.kill(run.ranks[0], signal.SIGKILL)
        elif name == "misled":
            (file.parent / "examples.jsonl").unlink()  # Rank 0 has read it.
        else:
            with (file.parent / "examples.jsonl").open("a") as data:
                data.write('\n{"prompt": "the fox", "completion": "b"}\n')
        assert run.end() == 1
        (line,) = run.said.splitlines()
        assert words in line, line


def test_a_disk_that_is_full_on_one_of_two_ranks_ends_no_run(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=200, tp=2))
    run.reach(4)
    (other,) = run.ranks
    resource.prlimit(other, resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    assert run.end() == 0, run.said
    assert run.said.count("no state could be saved") == 1, run.said
    assert run.said.count("warning") == 1, run.said
    assert len(logged(tmp_path)) == 200
    assert adapters(tmp_path) == ["answer@1.safetensors"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_kind_signal_saves_and_a_second_one_ends_at_once(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    file = made(tmp_path, checkpoint, steps=MANY, save_every=MANY, tp=tp)
    for number in (signal.SIGINT, signal.SIGTERM):
        run = start(file)
        run.reach(count_rows(tmp_path) + 2)
        others = run.ranks
        for pid in [*others, run.process.pid or 0]:  # As a service manager ends a whole group.
            os.kill(pid, number)
        assert run.end() == 130, run.said
        assert all(map(gone, others))
        assert run.wrote == ""
        assert run.said.count("saving, after this step") == 1
        assert run.said.endswith(
            f"saved at step {run.rows}; the same command goes on from there\n"
        ), run.said
        assert states(tmp_path) == [f"state-{run.rows:08d}"]
    saved = states(tmp_path)
    run = start(file)
    run.reach(run.rows + 2)
    others = run.ranks
    # As long as it is stopped it cannot save; both are heard when it goes on.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        run.kill(number)
    assert run.end() == 130
    assert "interrupted" in run.said.splitlines()[-1], run.said
    assert "Traceback" not in run.said
    eventually(lambda: all(map(gone, others)), 10)
    assert states(tmp_path) == saved


def torchrun(file: Path) -> "subprocess.Popen[bytes]":
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "preamble"]
    with open(file.parent / "err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", *words, "tune", str(file)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )


def test_torchrun_starts_interrupts_and_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    file = made(tmp_path, checkpoint, steps=200, save_every=MANY, tp=2)
    for attempt in ("interrupted", "finished", "refused"):
        if attempt == "refused":
            file = made(tmp_path, checkpoint, steps=200, tp=2, name="a@b@c")
        launcher = torchrun(file)
        try:
            if attempt == "interrupted":
                eventually(lambda: count_rows(tmp_path) > 2, END_S)
                launcher.terminate()
            code = launcher.wait(END_S)
        finally:
            launcher.kill()
            launcher.wait()
        said = (tmp_path / "err").read_text()
        if attempt == "interrupted":
            assert code != 0
            assert said.count("saving, after this step") == 1, said
            assert f"saved at step {count_rows(tmp_path)}" in said
            assert states(tmp_path) == [f"state-{count_rows(tmp_path):08d}"]
        elif attempt == "finished":
            assert code == 0, said
            assert said.count("going on from step") == 1
            assert adapters(tmp_path) == ["answer@1.safetensors"]
            assert len(logged(tmp_path)) == 200
        else:
            assert code == 1
            assert said.count("preamble tune: ") == 1, said
    assert adapters(tmp_path) == ["answer@1.safetensors"]


def test_data_that_is_wrong_is_told_once_for_all_ranks(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    for lines, words in (("", "no usable example"), ('{"prompt": "a"}', "line 1: no field")):
        file = made(tmp_path, checkpoint, tp=2)
        (tmp_path / "examples.jsonl").write_text(lines)
        run = start(file)
        assert run.end() == 1
        (line,) = run.said.splitlines()
        assert words in line
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("split", [{"tp": 2}, {"dp": 2}])
def test_a_state_of_another_split_is_refused_once(
    split: dict[str, int], checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=MANY))
    run.reach(4)
    run.kill()
    run.end()
    run = start(made(tmp_path, checkpoint, steps=MANY, **split))
    assert run.end() == 1
    (line,) = run.said.splitlines()
    (name,) = split
    assert f"had {name} 1, now it is 2; set it back to go on, or give --restart" in line
