"""A sweep: every combination is a run, the best is published, and what has ended stays."""

import csv
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt.adapters.adapter_file import open_adapter
from gpt.errors import ConfigError
from ptuning.__main__ import _run, main
from ptuning.run.artifacts import Outcome
from ptuning.run.preparation import Prepared
from ptuning.run.sweep import RUNS_MAX, Result, best_of, read_sweep, run_sweep
from ptuning.run_facts import RunFacts
from tests.support.servers import ROOT, WAIT_S, command, write_checkpoint

RATES = "learning_rate=1e-6,0.5"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sweep"))


def write_settings(folder: Path, checkpoint: Path, **changes: object) -> str:
    records = [{"prompt": f"the {word}", "completion": " dog"} for word in ("quick", "lazy")]
    (folder / "records.jsonl").write_text("\n".join(json.dumps(one) for one in records))
    settings: dict[str, object] = {
        "model": str(checkpoint),
        "data": str(folder / "records.jsonl"),
        "validation": str(folder / "records.jsonl"),
        "name": "answer",
        "output": str(folder / "adapters"),
        "virtual_tokens": 2,
        "steps": 3,
        "warmup_steps": 1,
        "max_new_tokens": 2,
    }
    file = folder / "tune.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return str(file)


def swept(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["tune", *words, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_the_best_of_all_combinations_is_published_and_none_is_run_twice(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint)
    words = [file, "--sweep", RATES, "--sweep", "virtual_tokens=1,2"]

    told, err = swept(capsys, *words)

    grid = [(one["learning_rate"], one["virtual_tokens"]) for one in told["runs"]]
    assert grid == [(1e-6, 1), (1e-6, 2), (0.5, 1), (0.5, 2)]
    losses = [one["validation_loss"] for one in told["runs"]]
    best = losses.index(min(losses))
    assert [one["best"] for one in told["runs"]] == [number == best for number in range(4)]
    assert losses[2] < losses[0] and told["compared_by"] == "validation_loss"
    assert "compared by validation_loss" in err and "run 4 of 4" in err
    (path,) = map(Path, told["paths"])
    assert path == tmp_path / "adapters" / "answer@1.safetensors"
    own = Path(told["runs"][best]["folder"]) / "adapters" / "answer@1.safetensors"
    adapter = open_adapter(path)
    assert adapter.digest == open_adapter(own).digest
    assert adapter.card.metrics["validation"]["loss"] == pytest.approx(min(losses))
    with open(told["table"], newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["validation_loss"]) for row in rows] == losses

    again, err = swept(capsys, *words)

    assert again == told and err.count("(done before)") == 4
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_an_interrupted_sweep_goes_on_with_what_is_missing(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, validation="", steps=1)
    made: list[float] = []
    said: list[str] = []

    def run(prepared: Prepared, restart: bool) -> tuple[Outcome, RunFacts]:
        if made == [1e-6]:
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(prepared.config.rate)
        return _run(prepared, restart)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(read_sweep(file, [RATES]), run, said.append, restart=False)
    assert not list((tmp_path / "adapters").iterdir())
    # A value that comes in between is run too; what has ended is not.
    ended = run_sweep(
        read_sweep(file, ["learning_rate=1e-6,0.1,0.5"]), run, said.append, restart=False
    )
    assert made == [1e-6, 0.0, 0.1, 0.5]
    assert len(ended.results) == 3 and len(ended.paths) == 1
    assert "warning: there are no records to measure with" in said[0]
    run_sweep(read_sweep(file, ["learning_rate=0.1"]), run, said.append, restart=True)
    assert made[4:] == [0.1]
    # Of other records, it is another run.
    with open(tmp_path / "records.jsonl", "a") as records:
        records.write('\n{"prompt": "a", "completion": " dog"}')
    run_sweep(read_sweep(file, ["learning_rate=0.1"]), run, said.append, restart=False)
    assert made[5:] == [0.1]


def test_a_run_that_fails_does_not_end_the_others(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, dtype="float64", steps=2)
    told, err = swept(capsys, file, "--sweep", "learning_rate=1e300,0.1")
    assert [one["state"] for one in told["runs"]] == ["failed", "finished"]
    assert told["runs"][1]["best"] and "warning: learning_rate 1e+300: " in err
    assert main(["tune", file, "--sweep", "learning_rate=1e300"]) == 1
    assert "none of the 1 runs came to anything" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning_rte=1"], "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        (["learning_rate"], "write it as learning_rate=1e-3,1e-2"),
        (["learning_rate="], "learning_rate has the values ''"),
        (["learning_rate=[1"], "has the values '\\[1'; give them as YAML"),
        (["learning_rate=0.1,0"], "learning_rate is 0"),
        (["learning_rate=0.1,many"], "learning_rate is 'many'; it must be a number"),
        (["optimizer=adafactor,adam"], "optimizer is 'adam'; did you mean 'adamw'?"),
        (["seed=1", "seed=2"], "has seed twice"),
        (["measure=loss,f1"], "measure must be the same in all runs"),
        (["answer_only_loss=true,false"], "a loss means something else"),
        (["method=mlp,full"], "method: full makes none"),
        ([f"seed={','.join(map(str, range(RUNS_MAX + 1)))}"], "makes 65 runs, and at most 64"),
        (["virtual_tokens=2,100000"], "virtual_tokens is 100000; this model takes at most"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(
    checkpoint: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    file = write_settings(tmp_path, checkpoint)

    def run(prepared: Prepared, restart: bool) -> tuple[Outcome, RunFacts]:
        raise AssertionError("a run began")

    said: list[str] = []
    with pytest.raises(ConfigError, match=message):
        run_sweep(read_sweep(file, words), run, said.append, restart=False)
    assert not said


def test_values_are_what_yaml_says_and_equal_ones_are_one_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, virtual_tokens=3, template="PQ", answer_field="x")
    sweep = read_sweep(file, ["learning_rate=1e-3,0.001,0.0010001", 'stop=[a, "b,c"],[]'])
    assert [(one.values["learning_rate"], one.values["stop"]) for one in sweep.variants] == [
        *((0.001, ("a", "b,c")), (0.001, ())),
        *((0.0010001, ("a", "b,c")), (0.0010001, ())),
    ]
    assert len({one.folder for one in sweep.variants}) == 4
    assert all(one.config.output.startswith(str(one.folder)) for one in sweep.variants)


def test_what_is_not_a_number_is_never_the_best_and_a_loss_decides_between_equals(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, measure="f1")
    sweep = read_sweep(file, ["seed=1,2,3,4"])
    ended = [
        Result("finished", measures={"f1": f1}, validation_loss=loss)
        for f1, loss in ((0.25, 0.1), (0.5, 3.0), (0.5, 2.0), (float("nan"), 0.1))
    ]
    assert best_of(sweep, ended) == 2
    assert best_of(sweep, [ended[3], Result("failed")]) is None
    assert Result("finished", last_loss=float("nan")).score("last_loss") is None
    assert Result("failed", last_loss=1.0).score("last_loss") is None
    assert Result("finished", measures={"f1": 0.5}).score("f1") == 0.5
    assert Result("finished", last_loss=0.5).score("last_loss") == -0.5


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_end_saves_the_run_that_it_is_in(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, steps=100_000)
    process = subprocess.Popen(
        command("tune", file, "--sweep", RATES),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "run 1 of 2: learning_rate 1e-06" in process.stderr.readline()
        assert "tuning" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert "the same command goes on from there" in err and "run 2" not in err
    assert not list((tmp_path / "adapters").iterdir())
    states = tmp_path.glob("runs/answer/sweep/learning_rate=1e-06/1/state-*")
    assert len(list(states)) == 1


@pytest.mark.slow
def test_runs_on_several_ranks_follow_each_other_whatever_comes_of_them(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, dtype="float64", steps=2)
    alone, _ = swept(capsys, file, "--sweep", "learning_rate=0.1,1e300,0.2", "--restart")
    file = write_settings(tmp_path, checkpoint, dtype="float64", steps=2, tp=2)
    split, _ = swept(capsys, file, "--sweep", "learning_rate=0.1,1e300,0.2", "--restart")
    assert [one["state"] for one in split["runs"]] == ["finished", "failed", "finished"]
    for number in (0, 2):
        one, other = alone["runs"][number], split["runs"][number]
        assert one["last_loss"] == pytest.approx(other["last_loss"], rel=1e-9)
        assert one["best"] == other["best"]
