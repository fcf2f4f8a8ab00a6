"""Several adapters of one run: files, early stopping and reports are as in runs of their own."""

import csv
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpt.adapters.adapter_file import Adapter, open_adapter
from gpt.parallel.mesh import Mesh
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.reporting.run_logs import TASK_METRICS_FILE, read_logs
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import TrainingLoop, load_trainer
from ptuning.run_facts import StepMetrics
from tests.support.servers import write_checkpoint
from tests.support.tuning_runs import adapters, latest, logged, starting
from tests.support.tuning_settings import LossRecorder, records, write_validation

STEPS = 12
RUN: dict[str, Any] = {
    "method": "lora",
    "rank": 4,
    "learning_rate": 1e-2,
    "steps": STEPS,
    "batch_examples": 6,
    "validate_every": 2,
    "patience": 2,
    "golden_examples": 1,
    "dtype": "float64",
    "save_every": 4,
}
TASKS: dict[str, dict[str, Any]] = {
    "answer": {"alpha": 8.0, "dropout": 0.1},
    # Its held-out loss rises, so it stops before the others.
    "wild": {"method": "dora", "rank": 2, "learning_rate": 2.0},
    "late": {
        "method": "alora",
        "template": "{prompt}<|INVOCATION|>{completion}",
        "invocation": "lazy fox",
        "targets": ["linear_qkv", "linear_fc1"],
    },
    "small": {"method": "ia3", "learning_rate": 5e-2, "layers": [0]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("several"))


def task_settings(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a task, whose records are those of no other task."""
    number = list(TASKS).index(name)
    own_folder = folder / name
    own_folder.mkdir(parents=True, exist_ok=True)
    data = own_folder / "examples.jsonl"
    data.write_text("\n".join(map(json.dumps, records(20 + 5 * number)[number:])))
    validation = write_validation(own_folder, 6 + number)["validation"]
    own = {"name": name, "data": str(data), "validation": validation, "max_new_tokens": 4}
    return {**own, **TASKS[name]}


def write(folder: Path, checkpoint: Path, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tune.yaml"
    output = {"model": str(checkpoint), "output": str(folder / "adapters")}
    file.write_text(yaml.safe_dump({**RUN, **output, **settings}))
    return file


def write_all(folder: Path, checkpoint: Path, **settings: object) -> Path:
    tasks = [task_settings(folder, name) for name in TASKS]
    return write(folder, checkpoint, tasks=tasks, **settings)


def write_single(folder: Path, checkpoint: Path, name: str, **settings: object) -> Path:
    file = write(folder, checkpoint, **settings, **task_settings(folder, name))
    if TASKS[name].get("method") == "ia3":
        content = yaml.safe_load(file.read_text())
        del content["rank"]
        file.write_text(yaml.safe_dump(content))
    return file


def logged_steps(folder: Path, name: str) -> list[StepMetrics]:
    """The steps that a run has logged; `name` is its first task."""
    return read_logs(folder / "runs" / name / "1", STEPS).progress


def adapter_of(folder: Path, name: str) -> Adapter:
    return open_adapter(folder / "adapters" / f"{name}@1.safetensors")


def check_same(actual: Adapter, expected: Adapter) -> None:
    """The files have fp32, in which the values of both runs may round differently."""
    assert actual.linears.keys() == expected.linears.keys()
    for key, linear in expected.linears.items():
        for name, value in linear.tensors():
            torch.testing.assert_close(
                getattr(actual.linears[key], name), value, rtol=3e-7, atol=1e-9
            )
    actual_card, expected_card = (
        replace(adapter.card, created="", metrics={}, golden=()) for adapter in (actual, expected)
    )
    assert actual_card == expected_card
    for name in ("steps", "method", "examples"):
        assert actual.card.metrics[name] == expected.card.metrics[name]
    for name in ("loss", "first_loss"):
        assert actual.card.metrics[name] == pytest.approx(expected.card.metrics[name], rel=1e-10)
    validation, expected_validation = (
        adapter.card.metrics["validation"] for adapter in (actual, expected)
    )
    assert validation["adapter"] == expected_validation["adapter"]
    assert validation["loss"] == pytest.approx(expected_validation["loss"], rel=1e-6)
    assert len(actual.card.golden) == len(expected.card.golden) == 1
    for golden, expected_golden in zip(actual.card.golden, expected.card.golden, strict=True):
        assert golden.token_ids == expected_golden.token_ids


@pytest.mark.slow
def test_each_adapter_is_that_of_a_run_of_its_own(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_all(tmp_path / "all", checkpoint)
    assert main(["tune", str(file), "--json"]) == 0
    output = capsys.readouterr()
    assert "wild stops early at step" in output.err
    summary = json.loads(output.out)
    assert [task["name"] for task in summary["tasks"]] == list(TASKS)
    steps = logged_steps(tmp_path / "all", "answer")
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for name in TASKS:
        folder = tmp_path / name
        assert main(["tune", str(write_single(folder, checkpoint, name))]) == 0
        check_same(adapter_of(tmp_path / "all", name), adapter_of(folder, name))
        own_steps = logged_steps(folder, name)
        own = [step.by_task[name] for step in steps if name in step.by_task]
        # A task that has stopped early is not trained any more.
        assert (len(own) < STEPS) == (name == "wild")
        assert len(own) == len(own_steps)
        for actual, expected in zip(own, own_steps, strict=True):
            assert actual.loss == pytest.approx(expected.loss, rel=1e-10)
            assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-8)
            assert actual.rate == expected.rate
    report = (tmp_path / "all" / "runs" / "answer" / "1" / "report.html").read_text()
    assert "Loss of each task" in report


def losses(file: Path, *, ends_after: int | None = None) -> list[float]:
    """Losses of a run in this process; the run may resume an earlier one."""
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    recorder = LossRecorder(ends_after)
    with suppress(EOFError):
        TrainingLoop(prepared, load_trainer(prepared, Mesh.single()), recorder).run()
    return recorder.losses


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 10])
def test_a_run_that_ends_in_a_step_resumes_to_the_same_adapters(
    step: int, checkpoint: Path, tmp_path: Path
) -> None:
    """Before and after one of the tasks has stopped early."""
    expected = losses(write_all(tmp_path / "whole", checkpoint))
    killed = write_all(tmp_path / "killed", checkpoint)
    first = losses(killed, ends_after=step)
    saved_step = (step - 1) // RUN["save_every"] * RUN["save_every"]
    assert first[:saved_step] + losses(killed) == expected
    for name in TASKS:
        uninterrupted, resumed = (
            adapter_of(tmp_path / folder, name) for folder in ("whole", "killed")
        )
        assert uninterrupted.digest == resumed.digest
        assert uninterrupted.card.metrics == resumed.card.metrics


@pytest.mark.slow
def test_a_run_that_is_killed_has_the_same_adapters_and_logs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = [tmp_path / "whole", tmp_path / "killed"]
    files = [write_all(folder, checkpoint, save_every=3) for folder in folders]
    with starting() as start:
        assert start(files[0]).end() == 0
        for rows in (4, 7, 10):
            run = start(files[1])
            run.reach(rows)
            run.kill()
            run.end()
            assert adapters(folders[1]) == []
        assert start(files[1]).end() == 0
    assert logged(folders[0]) == logged(folders[1])
    assert task_rows(folders[0]) == task_rows(folders[1])
    for name in TASKS:
        assert adapter_of(folders[0], name).digest == adapter_of(folders[1], name).digest


def task_rows(folder: Path) -> list[list[str]]:
    with (latest(folder) / TASK_METRICS_FILE).open() as file:
        return list(csv.reader(file))
