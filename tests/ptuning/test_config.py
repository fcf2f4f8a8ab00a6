"""The parts of TuneConfig are built from flat keys, and docs/tuning.md lists exactly these keys.

The document also lists the defaults and choices. The tests find its tables by their headings and
compare them with the dataclasses of the settings. The example files that the document links are
trained for a few steps.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

import preamble
from examples.demo import tasks
from gpt.adapters.card import GOLDEN_EXAMPLES_MAX
from gpt.errors import ConfigError
from gpt.settings import setting_fields
from ptuning.config import (
    CHOICES,
    METHOD_LEARNING_RATES,
    SETTING_RANGES,
    ParallelConfig,
    TrainingConfig,
    TuneConfig,
)
from ptuning.evaluation.answer_metrics import compute_metrics
from ptuning.task import NemoTask, Task

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tuning.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples" / "tune").glob("*.yaml"))
# They have a default only because settings of several tasks do not need them.
REQUIRED = {"name", "data"}
PART_TYPES = get_type_hints(TuneConfig)


def test_each_key_belongs_to_one_part() -> None:
    keys = [field.name for part_type in PART_TYPES.values() for field in fields(part_type)]
    assert len(keys) == len(set(keys)) == len(setting_fields(TuneConfig))
    assert not set(keys) & set(PART_TYPES)


def test_the_parts_have_the_values_and_the_defaults_of_the_keys() -> None:
    config = TuneConfig("m", data="d", name="n", steps=9, tp=2, dp=3)
    assert config.model_config.model == "m"
    assert config.training_config == TrainingConfig(steps=9)
    assert config.parallel_config == ParallelConfig(tp=2, dp=3)
    assert config.parallel_config.ranks == 6


def test_record_has_a_flat_value_for_each_key_and_a_dict_for_each_task() -> None:
    tasks = (Task("a", virtual_tokens=2), Task("b", data="e"))
    record = TuneConfig("m", data="d", tasks=tasks, stop=("x",), steps=9).to_record()
    assert list(record) == list(setting_fields(TuneConfig))
    assert (record["model"], record["stop"], record["steps"]) == ("m", ("x",), 9)
    assert [Task(**task) for task in record["tasks"]] == list(tasks)
    assert not any(isinstance(value, dict) for value in record.values())
    assert json.loads(json.dumps(record)).keys() == record.keys()


def test_changed_settings_are_checked_across_the_parts() -> None:
    config = TuneConfig("m", data="d", name="n", optimizer="adafactor", method="tpmlp")
    assert config.with_fields(pp=3).parallel_config == ParallelConfig(pp=3)
    with pytest.raises(ConfigError, match="adafactor needs whole rows and columns"):
        config.with_fields(tp=2)
    with pytest.raises(ConfigError, match="patience is 2, but has an effect only if validate_ev"):
        config.with_fields(patience=2, validate_every=0)
    with pytest.raises(ConfigError, match="name is missing"):
        config.with_fields(name="")
    with pytest.raises(TypeError, match="unexpected keyword argument 'training_config'"):
        config.with_fields(training_config=TrainingConfig())


@pytest.mark.parametrize(
    ("settings", "interval", "patience"),
    [
        ({}, 25, 3),
        ({"steps": 3}, 1, 2),
        ({"validate_every": 10}, 10, 8),
        ({"validate_every": 0}, 0, 0),
        ({"validate_every": 50, "patience": 0}, 50, 0),
        ({"patience": 7}, 25, 7),
        ({"method": "full"}, 25, 0),
        ({"method": "full", "patience": 2}, 25, 2),
    ],
)
def test_a_run_is_validated_eight_times_and_stops_after_three_eighths_of_its_steps(
    settings: dict[str, Any], interval: int, patience: int
) -> None:
    config = TuneConfig("m", data="d", name="n", **settings)
    steps, method = config.training_config.steps, config.method_config.method
    assert config.validation_config.interval(steps) == interval
    assert config.validation_config.patience_validations(steps, method) == patience


def test_the_old_name_of_monitor_is_accepted() -> None:
    config = TuneConfig.from_dict({"model": "m", "data": "d", "name": "n", "measure": "f1"}, "here")
    assert config.validation_config.monitor == "f1"
    assert config.validation_config.measure == "sample"
    assert TuneConfig("m", data="d", name="n", measure="f1") == config
    assert config.with_fields(measure="loss").validation_config.monitor == "loss"
    assert config.with_fields(measure="all").validation_config.monitor == "f1"
    with pytest.raises(
        ConfigError, match="measure is 'f1'; choose one of: all, first, none, sample"
    ):
        TuneConfig.from_dict(
            {"model": "m", "data": "d", "name": "n", "measure": "f1", "monitor": "loss"}, "here"
        )


def test_the_field_that_ends_the_template_is_the_answer() -> None:
    settings = {"model": "m", "data": "d", "name": "n", "template": "<|VIRTUAL_PROMPT_0|>{a} {b-c}"}
    (task,) = TuneConfig.from_dict(settings, "here").data_config.resolved_tasks
    assert task.answer_field == "b-c"
    tasks = [{"name": "x", "template": "{q}<|VIRTUAL_PROMPT_0|>{label}"}, {"name": "y"}]
    config = TuneConfig.from_dict({"model": "m", "data": "d", "tasks": tasks}, "here")
    assert [task.answer_field for task in config.data_config.resolved_tasks] == [
        *("label", "completion")
    ]
    for template in ("<|VIRTUAL_PROMPT_0|>{a}.", "{}", "text"):
        with pytest.raises(ConfigError, match="answer_field is missing, and the template"):
            TuneConfig.from_dict({**settings, "template": template}, "here")


@pytest.mark.parametrize("name", SETTING_RANGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 2**62, 1e308])
def test_a_number_outside_the_range_of_its_setting_is_refused(name: str, value: float) -> None:
    if value == 2**62 and SETTING_RANGES[name].maximum >= value:
        return
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be .* and .*"):
        TuneConfig("m", data="d", name="n", **{name: value})


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the tables under a heading, without the header rows."""
    section = TEXT.split(f"\n{heading}\n", 1)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield [cell.strip().replace("\\|", "|") for cell in cells]


def documented_settings() -> dict[str, list[str]]:
    names_by_heading = {}
    for heading in re.findall(r"^### .* settings$", TEXT, re.MULTILINE):
        for name, *cells in rows(heading):
            assert name.strip("`") not in names_by_heading, name
            names_by_heading[name.strip("`")] = cells
    return names_by_heading


def format_default(name: str, value: Any) -> str:
    """A default in the notation of the document."""
    if value is MISSING or name in REQUIRED:
        return "needed"
    if value in (None, "", ()):
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_document_lists_exactly_the_settings_and_defaults() -> None:
    documented = documented_settings()
    expected = {
        name: format_default(name, field.default)
        for name, field in setting_fields(TuneConfig).items()
    }
    assert {name: cells[0].strip("`") for name, cells in documented.items()} == expected


def test_document_lists_task_settings_under_one_heading() -> None:
    documented = {name.strip("`") for name, *_ in rows("### Task settings")}
    assert documented == {field.name for field in fields(Task)}


def test_document_lists_every_choice_and_learning_rate() -> None:
    documented = documented_settings()
    for setting, choices in CHOICES.items():
        missing = [choice for choice in choices if f"`{choice}`" not in documented[setting][1]]
        assert not missing, (setting, missing)
    rates = {name.strip("`"): float(rate) for name, _, rate, _ in rows("## Methods")}
    assert rates == METHOD_LEARNING_RATES
    assert {name.strip("`") for name, _ in rows("## Evaluation")} == set(
        compute_metrics([""], [""])
    )
    assert f"at most {GOLDEN_EXAMPLES_MAX}" in documented["golden_examples"][1]


def test_document_maps_every_nemo_setting() -> None:
    documented = {name.strip("`"): text for name, text in rows("## Data")}
    for nemo_field in fields(NemoTask):
        assert re.findall("`(.+?)`", documented[nemo_field.name])[0] in {
            field.name for field in fields(Task)
        }


def test_document_shows_the_smallest_example_file() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load((ROOT / "examples/tune/one.yaml").read_text())
    linked = set(re.findall(r"\(\.\./(examples/tune/.*?\.yaml)\)", TEXT))
    assert linked <= {str(path.relative_to(ROOT)) for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_file_trains(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Trains a few steps of an example file in a temporary directory."""
    settings = yaml.safe_load(example.read_text("utf-8"))
    settings |= {"model": str(ROOT / settings["model"]), "steps": 4, "warmup_steps": 1}
    if "validate_every" in settings:
        settings["validate_every"] = 2
    files = {
        "mood.jsonl": ["mood", "--count", "80"],
        "mood-held-out.jsonl": ["mood", "--count", "20", "--split", "held-out"],
        "several.jsonl": ["mood", "city", "--count", "40"],
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/tune").mkdir(parents=True)
    for name, lines in files.items():
        assert tasks.main(["--task", *lines]) == 0
        (tmp_path / "build/tune" / name).write_text(capsys.readouterr().out, "utf-8")
    file = tmp_path / "tune.yaml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    assert preamble.main(["tune", str(file)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert len(written) == len(settings.get("task_templates", [settings]))
    assert all((tmp_path / path).exists() for path in written)
