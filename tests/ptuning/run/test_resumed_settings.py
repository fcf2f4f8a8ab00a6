"""Settings of resumed runs: saved values replace defaults, and no keys of the settings file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ptuning.config import TuneConfig
from ptuning.run.resumed_settings import (
    defaults_of_version_0_1,
    describe_settings,
    resumed_settings,
)
from ptuning.run.training_state import FACTS_FILE, FORMAT, VERSION, RunFingerprint


def settings_of_run(folder: Path, file: dict[str, Any], **saved: Any) -> dict[str, Any]:
    """Return the resumed settings if a run with the settings `saved` is unfinished."""
    file = {"model": "m", "data": "d.jsonl", "run": str(folder), **file}
    config = TuneConfig.from_dict(file, "file")
    settings = json.loads(json.dumps(config.to_record())) | saved
    state = folder / "1" / "state-00000003"
    state.mkdir(parents=True)
    facts = {"format": FORMAT, "version": VERSION, "step": 3, "origin": {"settings": settings}}
    (state / FACTS_FILE).write_text(json.dumps(facts))
    return resumed_settings(config, file)


def test_a_default_that_has_changed_keeps_the_value_of_the_run(tmp_path: Path) -> None:
    changes = {"steps": 300, "stop": ["."], "patience": None}
    assert settings_of_run(tmp_path, {"name": "x"}, **changes) == {"steps": 300, "stop": ["."]}


def test_keys_of_the_file_and_free_settings_are_not_replaced(tmp_path: Path) -> None:
    file = {"name": "x", "steps": 100}
    assert settings_of_run(tmp_path, file, steps=300, save_every=7) == {}


@pytest.mark.parametrize(
    ("validation", "resumed"),
    [
        ({"validate_every": None, "patience": None}, {"validate_every": 0}),
        ({"validate_every": 5, "patience": None}, {"validate_every": 5, "patience": 0}),
        ({"validate_every": 5, "patience": 3}, {"validate_every": 5, "patience": 3}),
    ],
)
def test_a_run_of_version_0_1_keeps_its_validations(
    tmp_path: Path, validation: dict[str, Any], resumed: dict[str, Any]
) -> None:
    """Its `measure` was the metric, and None meant never."""
    file = {"model": "m", "data": "d.jsonl", "run": str(tmp_path), "name": "x"}
    config = TuneConfig.from_dict(file, "file")
    saved = json.loads(json.dumps(config.to_record())) | {"measure": "loss", **validation}
    del saved["monitor"]
    state = tmp_path / "1" / "state-00000003"
    state.mkdir(parents=True)
    facts = {"format": FORMAT, "version": VERSION, "step": 3, "origin": {"settings": saved}}
    (state / FACTS_FILE).write_text(json.dumps(facts))
    assert resumed_settings(config, file) == {"measure": "first", **resumed}
    config.with_fields(measure="first", **resumed)


@pytest.mark.parametrize(
    ("file", "defaults"),
    [
        ({}, {"measure": "first", "validation_examples": 200, "validate_every": 0}),
        ({"measure": "f1", "validation_examples": 9}, {"measure": "first", "validate_every": 0}),
        (
            {"validate_every": 5},
            {"measure": "first", "validation_examples": 200, "patience": 0},
        ),
        ({"patience": 3}, {"measure": "first", "validation_examples": 200}),
        ({"measure": "all"}, {}),
    ],
)
def test_defaults_of_version_0_1_do_not_replace_keys_of_the_file(
    file: dict[str, Any], defaults: dict[str, Any]
) -> None:
    file = {"model": "m", "data": "d.jsonl", "name": "x", **file}
    config = TuneConfig.from_dict(file, "file")
    assert defaults_of_version_0_1(config, file) == defaults
    config.with_fields(**defaults)


def test_settings_that_no_longer_exist_are_ignored(tmp_path: Path) -> None:
    assert settings_of_run(tmp_path, {"name": "x"}, removed_setting=1) == {}


def test_tasks_keep_the_values_that_their_mappings_do_not_set(tmp_path: Path) -> None:
    tasks = [{"name": "a"}, {"name": "b", "virtual_tokens": 5}]
    config = TuneConfig.from_dict({"model": "m", "data": "d", "tasks": tasks}, "file")
    saved = json.loads(json.dumps([asdict(task) for task in config.data_config.tasks]))
    for task in saved:
        task |= {"virtual_tokens": 9, "stop": ["."]}
    settings = settings_of_run(tmp_path, {"tasks": tasks}, tasks=saved)
    assert [(task.virtual_tokens, task.stop) for task in settings["tasks"]] == [
        (9, (".",)),
        (5, (".",)),
    ]
    config.with_fields(**settings)


def test_tasks_of_an_earlier_release_lack_the_settings_that_were_added_later() -> None:
    tasks = [{"name": "a"}, {"name": "b", "virtual_tokens": 5}]
    config = TuneConfig.from_dict({"model": "m", "data": "d", "tasks": tasks}, "file")
    fingerprint = RunFingerprint.compute(config, [], "base")
    saved = json.loads(json.dumps(asdict(fingerprint)))
    for task in saved["settings"]["tasks"]:
        for name in ("rank", "method", "invocation", "learning_rate"):
            del task[name]
    assert fingerprint.matches(saved)
    fingerprint.check_matches(saved, Path("state"))
    saved["settings"]["tasks"][1]["virtual_tokens"] = 6
    assert not fingerprint.matches(saved)


def test_without_an_unfinished_run_nothing_is_replaced(tmp_path: Path) -> None:
    file = {"model": "m", "data": "d", "name": "x", "run": str(tmp_path / "none")}
    assert resumed_settings(TuneConfig.from_dict(file, "file"), file) == {}


def test_the_line_names_the_settings() -> None:
    line = describe_settings({"steps": 300, "beta1": 0.8})
    assert line.endswith("beta1: 0.8, steps: 300")
