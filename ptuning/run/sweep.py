"""Hyperparameter sweep: one run per combination of settings; the best adapter is published.

Each run has its own folder, which contains its adapters and, after the run has finished without an
error, its result file. When the same command is started again, it executes only the runs without a
valid result file, so failed runs are repeated. A sweep that began in version 0.1 continues with the
defaults of that version. The runs are compared by `monitor`. The caller passes the function that
executes one run; this module is independent of training.
"""

import csv
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from gpt.adapters.adapter_file import (
    check_publish_directory,
    latest_adapter,
    open_adapter,
    publish_adapter,
)
from gpt.errors import AdapterError, ConfigError, PreambleError
from gpt.files.atomic_files import write_atomic
from gpt.json_output import nonfinite_to_none
from gpt.settings import read_yaml, setting_fields, short_repr, suggest_nearest
from ptuning.config import TuneConfig, ValidationConfig
from ptuning.launch import under_torchrun
from ptuning.run.artifacts import RunOutcome
from ptuning.run.preparation import PreparedRun, prepare
from ptuning.run.resumed_settings import defaults_of_version_0_1, resumed_settings
from ptuning.run.training_loop import run_folder
from ptuning.run.training_state import (
    RunFingerprint,
    lock_folder,
    read_settings,
    unfinished_state,
)
from ptuning.run_facts import RunFacts

RUNS_MAX = 64  # Maximum number of runs of a sweep.
SWEEP_FOLDER = "sweep"
RESULT_FILE = "result.json"
TABLE_FILE = "sweep.csv"
# Exceptions if a result file does not exist, or does not have the structure that is expected.
UNREADABLE_RESULT = (OSError, ValueError, TypeError, KeyError, AttributeError)
# Settings that must be equal in all runs, because they identify the sweep or because runs with
# different values are not comparable.
FIXED_SETTINGS = (
    "name",
    "output",
    "run",
    "model",
    "tasks",
    "task_templates",
    "validation",
    "validation_examples",
    "measure",
    "monitor",
)
# Combinations that can be folder names: short, with ASCII letters, digits and a few signs.
SAFE_LABEL_PATTERN = re.compile(r"[\w.=,+-]{1,120}", re.ASCII)


@dataclass(frozen=True)
class Variant:
    """One combination of swept values and the settings of its run."""

    values: Mapping[str, Any]  # The swept values, keyed by setting.
    config: TuneConfig  # All settings of the run.
    file: Mapping[str, Any]  # The settings without the defaults: as the file of a single run.
    folder: Path  # Folder of this run, including its adapters; no other run writes into it.

    def __str__(self) -> str:
        return ", ".join(f"{key} {short_repr(value)}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    config: TuneConfig  # The settings of the YAML file, without the swept values.
    variants: tuple[Variant, ...]
    folder: Path

    @property
    def compared_by(self) -> str:
        """Name of the metric by which runs are compared.

        The metric is `monitor`. For the metric "loss" it is the validation loss, or the last
        training loss if there are no validation records.
        """
        monitor = self.config.validation_config.monitor
        if monitor != "loss":
            return monitor
        has_validation = any(task.validation for task in self.config.data_config.resolved_tasks)
        return "validation_loss" if has_validation else "last_loss"


@dataclass(frozen=True)
class VariantResult:
    """Result of one run. The field names are keys of the result file and of `--json`."""

    state: str  # RunOutcome.state, or "failed".
    trouble: str = ""  # Error message of a failed run; empty: the run did not fail.
    steps: int = 0
    best_step: int | None = None
    first_loss: float = math.nan
    last_loss: float = math.nan
    validation_loss: float | None = None  # Validation loss of the written adapter.
    # Answer metrics of the written adapter.
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # Sum of the durations of all steps.
    paths: tuple[str, ...] = ()  # Adapter files, relative to the run's folder.

    def score(self, compared_by: str) -> float | None:
        """Return the metric `compared_by`, negated if it is a loss, so that higher is better.

        Return None if the run failed, or if the metric is missing or not finite.
        """
        numbers = {"last_loss": self.last_loss, "validation_loss": self.validation_loss}
        measured = {**numbers, **self.measures}.get(compared_by)
        if self.state == "failed" or measured is None or not math.isfinite(measured):
            return None
        return -measured if compared_by in numbers else measured


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep, which may have been interrupted or may still run."""

    sweep: Sweep
    results: tuple[VariantResult, ...]  # Results of the variants so far, in the sweep's order.
    # Index of the best result. None: the sweep was interrupted, or no run has a score yet.
    best: int | None = None
    paths: tuple[Path, ...] = ()  # Published adapters.


# Executes one run; the second argument is `restart`.
RunFunction = Callable[[PreparedRun, bool], tuple[RunOutcome, RunFacts]]


def read_sweep(path: str, assignments: Sequence[str]) -> Sweep:
    """Return the sweep over all combinations of values, and check the settings of each run.

    `path` is the YAML file; each assignment is `KEY=VALUE,VALUE`, as given with --sweep.
    """
    if under_torchrun():
        raise ConfigError("--sweep starts the ranks of each run itself; run it without torchrun")
    settings = read_yaml(Path(path))
    config = TuneConfig.from_dict(settings, path)
    if config.method_config.method == "full":
        raise ConfigError(
            "--sweep publishes an adapter, but method: full makes none; set another method"
        )
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, values = _parse_assignment(assignment, config.validation_config)
        if key in grid:
            raise ConfigError(f"--sweep has {key} twice; give all of its values in one --sweep")
        grid[key] = values
    count = math.prod(map(len, grid.values()))
    if count > RUNS_MAX:
        raise ConfigError(
            f"--sweep makes {count} runs, and at most {RUNS_MAX} are allowed; remove some values"
        )
    folder = run_folder(config.output_config, config.data_config) / SWEEP_FOLDER
    # Keyed by folder name. The names contain the parsed values, so 1e-3 and 0.001 are the same run.
    variants: dict[str, Variant] = {}
    for combination in itertools.product(*grid.values()):
        overrides = dict(zip(grid, combination, strict=True))
        with _errors_name_values(overrides):
            variant_config = TuneConfig.from_dict({**settings, **overrides}, path)
        if variant_config.method_config.method == "full":
            raise ConfigError(
                "--sweep publishes an adapter, but method: full makes none; remove full"
            )
        variant_settings = variant_config.to_dict()
        typed_values = {key: variant_settings[key] for key in grid}
        variant_folder = folder / _folder_label(typed_values)
        folders = {"run": str(variant_folder), "output": str(variant_folder / "adapters")}
        file = {**settings, **overrides, **folders}
        variants[variant_folder.name] = Variant(
            typed_values, TuneConfig.from_dict(file, path), file, variant_folder
        )
    return Sweep(config, tuple(variants.values()), folder)


def _parse_assignment(
    assignment: str, validation_config: ValidationConfig
) -> tuple[str, list[Any]]:
    """Return the key and the YAML values of `KEY=VALUE,VALUE`."""
    key, equals, text = assignment.partition("=")
    setting_names = set(setting_fields(TuneConfig))
    if not equals:
        raise ConfigError(
            f"--sweep is {short_repr(assignment)}; give a key and values, such as "
            "learning_rate=1e-3,1e-2"
        )
    if key in FIXED_SETTINGS:
        raise ConfigError(
            f"--sweep: {key} must be the same in all runs, because the runs are compared and the "
            f"best one is published under one name; remove --sweep {key}"
        )
    if key == "answer_only_loss" and validation_config.monitor == "loss":
        raise ConfigError(
            "--sweep: answer_only_loss changes the meaning of the loss, so the loss cannot compare "
            "these runs; set another monitor, or remove answer_only_loss"
        )
    if key not in setting_names:
        raise ConfigError(
            f"--sweep: unknown key {short_repr(key)}; "
            f"{suggest_nearest(key, setting_names - set(FIXED_SETTINGS))}"
        )
    try:
        values = yaml.safe_load(f"[{text}]")
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"--sweep: {key} has the values {short_repr(text)}; give YAML values, separated by "
            "commas"
        )
    return key, values


@contextmanager
def _errors_name_values(values: Mapping[str, Any]) -> Iterator[None]:
    """Add the combination of values to the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        combination = ", ".join(f"{key}={short_repr(value)}" for key, value in values.items())
        raise ConfigError(f"--sweep with {combination}: {error}") from None


def _folder_label(values: Mapping[str, Any]) -> str:
    """Return the folder name of a combination.

    The name has the keys and values if it matches SAFE_LABEL_PATTERN; otherwise it is their hash.
    """
    readable = ",".join(f"{key}={value}" for key, value in values.items())
    exact = json.dumps(values, sort_keys=True)
    return (
        readable
        if SAFE_LABEL_PATTERN.fullmatch(readable)
        else hashlib.sha256(exact.encode()).hexdigest()[:16]
    )


def run_sweep(
    sweep: Sweep,
    run: RunFunction,
    print_line: Callable[[str], None],
    *,
    restart: bool,
    complete_run: Callable[[RunOutcome], None],
) -> SweepResult:
    """Execute the runs without a saved result, one after another; publish the best run's adapters.

    `complete_run` is called after the result of a run is saved. With `restart`, saved results are
    removed first. If a run is interrupted, return the results so far; their `best` is None.
    """
    if not restart:
        sweep = _with_earlier_defaults(sweep, print_line)
        sweep = replace(sweep, variants=tuple(map(_with_resumed_settings, sweep.variants)))
    if sweep.compared_by == "last_loss":
        print_line(
            "warning: there are no validation records (`validation`), so runs are compared by "
            "their training loss, which favors overfitting; set `validation` to a file of held-out "
            "records"
        )
    try:
        check_publish_directory(Path(sweep.config.output_config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    with lock_folder(sweep.folder):
        # All combinations are checked before the first run starts.
        fingerprints = []
        for variant in sweep.variants:
            with _errors_name_values(variant.values):
                fingerprints.append(prepare(variant.config).fingerprint())
        if restart:
            for variant in sweep.variants:
                (variant.folder / RESULT_FILE).unlink(missing_ok=True)
        results: list[VariantResult] = []
        for number, (variant, fingerprint) in enumerate(
            zip(sweep.variants, fingerprints, strict=True), 1
        ):
            result = _load_result(variant, fingerprint)
            title = f"run {number} of {len(sweep.variants)}: {variant}"
            print_line(f"{title}{' (already finished)' if result is not None else ''}")
            if result is None:
                outcome, result = _run_variant(variant, run, restart=restart)
                if result.state == "interrupted":
                    return SweepResult(sweep, tuple(results))
                if result.trouble:
                    print_line(f"warning: {variant}: {result.trouble}")
                else:
                    _save_result(variant, fingerprint, result)
                if outcome is not None:
                    complete_run(outcome)
            results.append(result)
            _write_atomic(
                sweep.folder / TABLE_FILE,
                _format_csv(SweepResult(sweep, tuple(results), best_variant(sweep, results))),
            )
        best = best_variant(sweep, results)
        if best is None:
            raise ConfigError(
                f"none of the {len(results)} runs has a result to compare; see the warnings above"
            )
        return SweepResult(sweep, tuple(results), best, _publish(sweep, best, results[best]))


def _with_earlier_defaults(sweep: Sweep, print_line: Callable[[str], None]) -> Sweep:
    """Return the sweep with the defaults of version 0.1, if it began in that version.

    Its finished runs are then valid, and the scores of all of its runs are comparable.
    """
    defaults = [defaults_of_version_0_1(variant.config, variant.file) for variant in sweep.variants]
    if not any(defaults) or not any(map(_evaluates_first_records, sweep.variants)):
        return sweep
    print_line(
        "the sweep began in version 0.1, and keeps its defaults for validations; give --restart to "
        "start over with those of this release"
    )
    variants = tuple(
        replace(variant, config=variant.config.with_fields(**settings))
        for variant, settings in zip(sweep.variants, defaults, strict=True)
    )
    return replace(sweep, variants=variants)


def _evaluates_first_records(variant: Variant) -> bool:
    """Return whether a finished or unfinished run evaluates the records of version 0.1."""
    state = unfinished_state(variant.folder)
    try:
        record = _read_result_file(variant) if state is None else state.facts
        return bool(read_settings(record["origin"])["measure"] == "first")
    except UNREADABLE_RESULT:
        return False


def _with_resumed_settings(variant: Variant) -> Variant:
    """Return the run with the settings with which it began, if it is unfinished."""
    settings = resumed_settings(variant.config, variant.file)
    return replace(variant, config=variant.config.with_fields(**settings))


def _run_variant(
    variant: Variant, run: RunFunction, *, restart: bool
) -> tuple[RunOutcome | None, VariantResult]:
    """Execute one run; the outcome of a failed run is None.

    A failed run does not end the sweep: if one learning rate is too large, only the run with this
    learning rate fails.
    """
    try:
        outcome, facts = run(prepare(variant.config), restart)
    except PreambleError as error:
        return None, VariantResult("failed", str(error))
    last_validation = facts.validations[-1] if facts.validations else None
    result = VariantResult(
        outcome.state,
        steps=outcome.step,
        best_step=outcome.best_step,
        first_loss=outcome.first_loss,
        last_loss=outcome.last_loss,
        validation_loss=None if last_validation is None else last_validation.loss,
        measures={} if last_validation is None else dict(last_validation.measures),
        seconds=sum(step.seconds for step in facts.progress),
        paths=tuple(str(path.relative_to(variant.folder)) for path in outcome.paths),
    )
    return outcome, result


def _load_result(variant: Variant, fingerprint: RunFingerprint) -> VariantResult | None:
    """Return the saved result of a run.

    Return None if there is no readable result, if the result has another fingerprint than
    `fingerprint`, or if one of its adapters does not exist.
    """
    try:
        record = _read_result_file(variant)
        if not fingerprint.matches(record["origin"]):
            return None
        result = VariantResult(**{**record["result"], "paths": tuple(record["result"]["paths"])})
    except UNREADABLE_RESULT:
        return None
    return result if all((variant.folder / path).is_file() for path in result.paths) else None


def _read_result_file(variant: Variant) -> Any:
    return json.loads((variant.folder / RESULT_FILE).read_text())


def _save_result(variant: Variant, fingerprint: RunFingerprint, result: VariantResult) -> None:
    record = {"origin": asdict(fingerprint), "result": asdict(result)}
    _write_atomic(variant.folder / RESULT_FILE, json.dumps(record, indent=2) + "\n")


def best_variant(sweep: Sweep, results: Sequence[VariantResult]) -> int | None:
    """Return the index of the result with the best score; None if no result has a score.

    If scores are equal, the lower validation loss decides, and then the earlier run.
    """
    scores = {number: result.score(sweep.compared_by) for number, result in enumerate(results)}

    def sort_key(number: int) -> tuple[float, float]:
        loss = results[number].validation_loss
        return scores[number] or 0.0, -math.inf if loss is None else -loss

    scored = [number for number, score in scores.items() if score is not None]
    return max(scored, key=sort_key) if scored else None


def _publish(sweep: Sweep, best: int, result: VariantResult) -> tuple[Path, ...]:
    """Publish each adapter of the best run as the next version of its name.

    An adapter that equals the newest version is not published again.
    """
    folder, paths = Path(sweep.config.output_config.output), []
    for path in result.paths:
        adapter = open_adapter(sweep.variants[best].folder / path)
        newest = latest_adapter(folder, adapter.card.name)
        if newest is not None and newest[1].digest == adapter.digest:
            paths.append(newest[0])
        else:
            paths.append(publish_adapter(adapter, folder, "tune"))
    return tuple(paths)


def result_rows(sweep_result: SweepResult) -> list[dict[str, Any]]:
    """Return one row for each run that has a result, with its swept values and its result."""
    rows = []
    for index, (variant, result) in enumerate(
        zip(sweep_result.sweep.variants, sweep_result.results, strict=False)
    ):
        variant_fields = asdict(result)
        measures = variant_fields.pop("measures")
        del variant_fields["paths"]
        rows.append(
            {
                **variant.values,
                **{
                    key: nonfinite_to_none(value)
                    for key, value in {**variant_fields, **measures}.items()
                },
                "best": index == sweep_result.best,
                "folder": str(variant.folder),
            }
        )
    return rows


def summary(sweep_result: SweepResult) -> dict[str, Any]:
    """Return the output of `--json`."""
    return {
        "compared_by": sweep_result.sweep.compared_by,
        "runs": result_rows(sweep_result),
        "table": str(sweep_result.sweep.folder / TABLE_FILE),
        "paths": [str(path) for path in sweep_result.paths],
    }


def render_table(sweep_result: SweepResult) -> Table:
    """Return a table of swept values and metrics for the terminal.

    The CSV file has more columns.
    """
    compared_by = sweep_result.sweep.compared_by
    rows = result_rows(sweep_result)
    metric_names = dict.fromkeys((compared_by, "validation_loss", "last_loss"))
    columns = [name for name in metric_names if any(row.get(name) is not None for row in rows)]
    if any(row["state"] != "finished" for row in rows):
        columns.append("state")
    keys = list(sweep_result.sweep.variants[0].values)
    table = Table(title=f"runs, compared by {compared_by}", box=None)
    for name in keys:
        table.add_column(name.replace("_", " "), overflow="fold")
    for name in (*columns, ""):
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        cells = [_format_cell(row.get(name)) for name in (*keys, *columns)]
        style = "bold" if row["best"] else None
        table.add_row(*cells, "best" if row["best"] else "", style=style)
    return table


def _format_csv(sweep_result: SweepResult) -> str:
    rows = result_rows(sweep_result)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _write_atomic(path: Path, text: str) -> None:
    partial_path = path.with_name(f".{path.name}.part")
    try:
        write_atomic(path, text.encode(), partial_path=partial_path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free disk space, and run the same "
            "command again: finished runs are kept"
        ) from None
