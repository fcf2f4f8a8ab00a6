"""Sweep: one run per combination; the best is published and finished runs are kept."""

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
from ptuning.__main__ import _complete_run, _run_on_rank_zero, main
from ptuning.config import TuneConfig
from ptuning.run.artifacts import RunOutcome
from ptuning.run.preparation import PreparedRun
from ptuning.run.sweep import RUNS_MAX, VariantResult, best_variant, read_sweep, run_sweep
from ptuning.run_facts import RunFacts
from tests.support.servers import ROOT, WAIT_S, command, write_checkpoint

RATES = "learning_rate=1e-6,0.5"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sweep"))


def write_settings(folder: Path, checkpoint: Path, **changes: object) -> str:
    records = [{"prompt": f"the {word}", "completion": " dog"} for word in ("quick", "lazy")]
    (folder / "records.jsonl").write_text("\n".join(json.dumps(record) for record in records))
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


def run_sweep_command(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[dict[str, Any], str]:
    assert main(["tune", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_sweep_publishes_the_best_and_repeats_no_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint)
    arguments = [file, "--sweep", RATES, "--sweep", "virtual_tokens=1,2"]

    report, err = run_sweep_command(capsys, *arguments)

    grid = [(run["learning_rate"], run["virtual_tokens"]) for run in report["runs"]]
    assert grid == [(1e-6, 1), (1e-6, 2), (0.5, 1), (0.5, 2)]
    losses = [run["validation_loss"] for run in report["runs"]]
    best = losses.index(min(losses))
    assert [run["best"] for run in report["runs"]] == [number == best for number in range(4)]
    assert losses[2] < losses[0] and report["compared_by"] == "validation_loss"
    assert "compared by validation_loss" in err and "run 4 of 4" in err
    (path,) = map(Path, report["paths"])
    assert path == tmp_path / "adapters" / "answer@1.safetensors"
    best_adapter = Path(report["runs"][best]["folder"]) / "adapters" / "answer@1.safetensors"
    adapter = open_adapter(path)
    assert adapter.digest == open_adapter(best_adapter).digest
    assert adapter.card.metrics["validation"]["loss"] == pytest.approx(min(losses))
    with open(report["table"], newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["validation_loss"]) for row in rows] == losses

    second_report, err = run_sweep_command(capsys, *arguments)

    assert second_report == report and err.count("(already finished)") == 4
    assert [run.name for run in path.parent.iterdir()] == [path.name]


def test_interrupted_sweep_runs_the_missing_combinations(checkpoint: Path, tmp_path: Path) -> None:
    file = write_settings(tmp_path, checkpoint, validation="", steps=1)
    rates_run: list[float] = []
    messages: list[str] = []

    def run(prepared: PreparedRun, restart: bool) -> tuple[RunOutcome, RunFacts]:
        if rates_run == [1e-6]:
            rates_run.append(0.0)
            raise KeyboardInterrupt
        rates_run.append(prepared.config.group_learning_rates[0])
        return _run_on_rank_zero(prepared, restart)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(
            read_sweep(file, [RATES]),
            run,
            messages.append,
            restart=False,
            complete_run=_complete_run,
        )
    assert not list((tmp_path / "adapters").iterdir())
    # A new value is run; finished runs are not repeated.
    outcomes = run_sweep(
        read_sweep(file, ["learning_rate=1e-6,0.1,0.5"]),
        run,
        messages.append,
        restart=False,
        complete_run=_complete_run,
    )
    assert rates_run == [1e-6, 0.0, 0.1, 0.5]
    assert len(outcomes.results) == 3 and len(outcomes.paths) == 1
    assert "warning: there are no validation records" in messages[0]
    run_sweep(
        read_sweep(file, ["learning_rate=0.1"]),
        run,
        messages.append,
        restart=True,
        complete_run=_complete_run,
    )
    assert rates_run[4:] == [0.1]
    # With other records it is another run.
    with open(tmp_path / "records.jsonl", "a") as records:
        records.write('\n{"prompt": "a", "completion": " dog"}')
    run_sweep(
        read_sweep(file, ["learning_rate=0.1"]),
        run,
        messages.append,
        restart=False,
        complete_run=_complete_run,
    )
    assert rates_run[5:] == [0.1]


def test_sweep_of_version_0_1_keeps_its_finished_runs(checkpoint: Path, tmp_path: Path) -> None:
    """Its other runs are evaluated as in version 0.1, because the scores are compared."""
    evaluation: dict[str, Any] = {
        "measure": "first",
        "validation_examples": 200,
        "validate_every": 0,
    }
    configs_run: list[TuneConfig] = []
    messages: list[str] = []

    def run(prepared: PreparedRun, restart: bool) -> tuple[RunOutcome, RunFacts]:
        configs_run.append(prepared.config)
        return _run_on_rank_zero(prepared, restart)

    def sweep(rates: str, restart: bool = False, **changes: Any) -> list[dict[str, object]]:
        """Return the evaluation settings of the runs that were executed."""
        configs_run.clear()
        messages.clear()
        file = write_settings(tmp_path, checkpoint, **changes)
        run_sweep(
            read_sweep(file, [f"learning_rate={rates}"]),
            run,
            messages.append,
            restart=restart,
            complete_run=_complete_run,
        )
        records = [config.to_dict() for config in configs_run]
        return [{key: record[key] for key in evaluation} for record in records]

    assert sweep("1e-6", **evaluation) == [evaluation]
    (result_file,) = tmp_path.glob("runs/answer/sweep/*/result.json")
    record = json.loads(result_file.read_text())
    settings = record["origin"]["settings"]
    del settings["monitor"]
    settings |= {"measure": "loss", "validate_every": None, "patience": None}
    result_file.write_text(json.dumps(record))

    assert sweep("1e-6,0.1") == [evaluation]
    assert "the sweep began in version 0.1" in messages[0]
    assert sweep("0.1") == []
    assert sweep("1e-6,0.1", measure="loss") == []  # Until version 0.1, the name of `monitor`.
    assert len(sweep("1e-6,0.1", measure="all")) == 2
    default = {"measure": "sample", "validation_examples": 100, "validate_every": None}
    assert sweep("1e-6,0.1", restart=True) == [default] * 2
    assert sweep("1e-6,0.1") == [] and "version 0.1" not in "".join(messages)


# With this learning rate, the rows of the second step overflow in fp16, but not in wider dtypes.
DIVERGING = {"method": "mlp", "learning_rate": 10, "steps": 3}


def test_failed_run_does_not_end_the_sweep(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_settings(tmp_path, checkpoint, **DIVERGING)
    report, err = run_sweep_command(capsys, file, "--sweep", "dtype=float16,float32")
    assert [run["state"] for run in report["runs"]] == ["failed", "finished"]
    assert report["runs"][1]["best"] and "warning: dtype 'float16': the " in err
    assert main(["tune", file, "--sweep", "dtype=float16"]) == 1
    assert "none of the 1 runs has a result to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning_rte=1"], "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        (["learning_rate"], "give a key and values, such as learning_rate=1e-3,1e-2"),
        (["learning_rate="], "learning_rate has the values ''"),
        (["learning_rate=[1"], "has the values '\\[1'; give YAML values"),
        (["learning_rate=0.1,0"], "learning_rate is 0"),
        (["learning_rate=0.1,many"], "learning_rate is 'many'; it must be a number"),
        (["optimizer=adafactor,adam"], "optimizer is 'adam'; did you mean 'adamw'?"),
        (["seed=1", "seed=2"], "has seed twice"),
        (["measure=none,all"], "measure must be the same in all runs"),
        (["monitor=loss,f1"], "monitor must be the same in all runs"),
        (["answer_only_loss=true,false"], "changes the meaning of the loss"),
        (["method=mlp,full"], "method: full makes none"),
        ([f"seed={','.join(map(str, range(RUNS_MAX + 1)))}"], "makes 65 runs, and at most 64"),
        (["virtual_tokens=2,100000"], "virtual_tokens is 100000; the maximum for this model is"),
    ],
)
def test_invalid_sweep_is_refused_before_any_run(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = write_settings(tmp_path, checkpoint)

    def run(prepared: PreparedRun, restart: bool) -> tuple[RunOutcome, RunFacts]:
        raise AssertionError("a run began")

    messages: list[str] = []
    with pytest.raises(ConfigError, match=message):
        run_sweep(
            read_sweep(file, arguments),
            run,
            messages.append,
            restart=False,
            complete_run=_complete_run,
        )
    assert not messages


def test_sweep_values_are_yaml_and_equal_values_are_one_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = write_settings(tmp_path, checkpoint, virtual_tokens=3, template="PQ", answer_field="x")
    sweep = read_sweep(file, ["learning_rate=1e-3,0.001,0.0010001", 'stop=[a, "b,c"],[]'])
    assert [
        (variant.values["learning_rate"], variant.values["stop"]) for variant in sweep.variants
    ] == [
        *((0.001, ("a", "b,c")), (0.001, ())),
        *((0.0010001, ("a", "b,c")), (0.0010001, ())),
    ]
    assert len({variant.folder for variant in sweep.variants}) == 4
    for variant in sweep.variants:
        assert variant.config.output_config.output.startswith(str(variant.folder))


def test_nan_is_never_the_best_and_the_loss_breaks_ties(checkpoint: Path, tmp_path: Path) -> None:
    file = write_settings(tmp_path, checkpoint, monitor="f1")
    sweep = read_sweep(file, ["seed=1,2,3,4"])
    finished = [
        VariantResult("finished", measures={"f1": f1}, validation_loss=loss)
        for f1, loss in ((0.25, 0.1), (0.5, 3.0), (0.5, 2.0), (float("nan"), 0.1))
    ]
    assert best_variant(sweep, finished) == 2
    assert best_variant(sweep, [finished[3], VariantResult("failed")]) is None
    assert VariantResult("finished", last_loss=float("nan")).score("last_loss") is None
    assert VariantResult("failed", last_loss=1.0).score("last_loss") is None
    assert VariantResult("finished", measures={"f1": 0.5}).score("f1") == 0.5
    assert VariantResult("finished", last_loss=0.5).score("last_loss") == -0.5


@pytest.mark.slow
def test_stopped_sweep_saves_the_current_run(checkpoint: Path, tmp_path: Path) -> None:
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
    assert "the same command resumes the sweep" in err and "run 2" not in err
    assert not list((tmp_path / "adapters").iterdir())
    states = tmp_path.glob("runs/answer/sweep/learning_rate=1e-06/1/state-*")
    assert len(list(states)) == 1


@pytest.mark.slow
def test_sweep_runs_on_several_ranks_after_a_failed_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--sweep", "dtype=float64,float16,float32", "--restart"]
    file = write_settings(tmp_path, checkpoint, **DIVERGING)
    single_rank, _ = run_sweep_command(capsys, file, *arguments)
    file = write_settings(tmp_path, checkpoint, **DIVERGING, tp=2)
    split, _ = run_sweep_command(capsys, file, *arguments)
    assert [run["state"] for run in split["runs"]] == ["finished", "failed", "finished"]
    for number in (0, 2):
        run = single_rank["runs"][number]
        split_run = split["runs"][number]
        tolerance = 1e-9 if run["dtype"] == "float64" else 1e-3
        assert run["last_loss"] == pytest.approx(split_run["last_loss"], rel=tolerance)
        assert run["best"] == split_run["best"]
