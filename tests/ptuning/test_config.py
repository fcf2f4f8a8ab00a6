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
from ptuning.launch import config_to_dict
from ptuning.task import TASK_METHOD_SETTINGS, NemoTask, Task

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


def several(tasks: list[dict[str, Any]], **changes: object) -> TuneConfig:
    settings = {"model": "m", "data": "d", "tasks": tasks, **changes}
    return TuneConfig.from_dict(settings, "here")


def test_settings_of_the_run_are_the_defaults_of_the_tasks() -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "b", "rank": 2, "targets": ["linear_fc1"], "learning_rate": 1e-2},
        {"name": "c", "method": "ia3", "layers": [1]},
        {"name": "d", "method": "dora", "dropout": 0.0},
    ]
    config = several(tasks, method="lora", rank=4, dropout=0.1)
    own = config.task_method_configs
    assert [settings.method for settings in own] == ["lora", "lora", "ia3", "dora"]
    # The rank and the dropout of the run have no effect on IA3.
    assert [settings.rank for settings in own] == [4, 2, 16, 4]
    assert [settings.dropout for settings in own] == [0.1, 0.1, 0.0, 0.0]
    assert [settings.targets for settings in own] == [(), ("linear_fc1",), (), ()]
    assert [settings.layers for settings in own] == [(), (), (1,), ()]
    assert config.task_learning_rates == (1e-3, 1e-2, 5e-3, 1e-3)
    assert config.with_fields(learning_rate=2e-3).task_learning_rates == (2e-3, 1e-2, 2e-3, 2e-3)
    assert config.task_groups == ((0,), (1,), (2,), (3,))
    assert TuneConfig.from_dict(config_to_dict(config), "rank") == config


def test_tasks_share_batches_unless_their_methods_change_linears() -> None:
    tasks: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}]
    assert several(tasks).task_groups == ((0, 1),)
    assert several(tasks, method="prefix").task_groups == ((0, 1),)
    assert several(tasks, method="ia3").task_groups == ((0,), (1,))
    own_methods = [{"name": "a", "method": "ia3"}, {"name": "b", "method": "lora"}]
    assert several(own_methods).method_config.method == "ia3"


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ({"rank": 2}, {}, "task 'b' sets rank, but a task of the run has the method prompt-tuning"),
        (
            {"method": "lora"},
            {},
            "a task of the run has the method prompt-tuning; only tasks whose",
        ),
        ({"method": "mlp"}, {"method": "lora"}, "a task of the run has the method mlp; only tasks"),
        ({"steps": 9}, {"method": "lora"}, "task 2: steps is the same for all tasks of a run; mov"),
        ({"rank": 0}, {"method": "lora"}, "task 'b': rank is 0; it must be at least 1"),
        (
            {"learning_rate": 11.0},
            {"method": "lora"},
            "learning_rate is 11; it must be more than 0",
        ),
        (
            {"method": "ia3", "rank": 2},
            {"method": "lora"},
            "task 'b' sets rank, which has an effect only if its method is lora, alora, dora or "
            "bottleneck",
        ),
        ({"method": "alora"}, {"method": "lora"}, "invocation is missing"),
        (
            {"method": "dora"},
            {"method": "lora", "dropout": 0.1},
            "task 'b': dropout is 0.1, but method dora computes .*; set dropout: 0",
        ),
        (
            {"learning_rate": 2.0},
            {"method": "lora", "weight_decay": 0.6},
            "learning_rate x weight_decay is 1.2",
        ),
    ],
)
def test_method_settings_that_a_task_cannot_have_are_refused(
    task: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        several([{"name": "a"}, {"name": "b", **task}], **changes)


@pytest.mark.parametrize("method", ["lora", "ia3", "bottleneck", "full"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("initial_text", "x"), ("initial", "random"), ("encoder_from", "x"), ("encoder_dropout", 0.1)],
)
def test_settings_of_virtual_tokens_are_refused_without_them(
    method: str, name: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*learns (no )?virtual tokens; remove it"):
        TuneConfig("m", data="d", name="n", method=method, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rank": 3},
            "rank is 3, but has an effect only if method is lora, alora, dora or bottleneck",
        ),
        ({"learning_rate": 0.1}, "learning_rate is 0.1, but each task sets its own; remove it"),
        ({"method": "full"}, "method is full, but each task sets its own; remove it"),
    ],
)
def test_a_setting_of_the_run_that_each_task_replaces_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    tasks = [
        {"name": "a", "method": "lora", "rank": 2, "learning_rate": 1e-3},
        {"name": "b", "method": "ia3", "learning_rate": 1e-2},
    ]
    with pytest.raises(ConfigError, match=message):
        several(tasks, **changes)


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
    assert documented == {field.name for field in fields(Task)} - set(TASK_METHOD_SETTINGS)
    (paragraph,) = re.findall(r"^A task may also have .*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(TASK_METHOD_SETTINGS)


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
    assert len(written) == len(
        settings.get("tasks") or settings.get("task_templates") or [settings]
    )
    assert all((tmp_path / path).exists() for path in written)
