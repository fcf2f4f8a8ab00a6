"""Many runs for one adapter: every combination of some settings, of which the best is published.

Each is a run like any other, with a folder of its own that takes its adapters too. What it came to
is left there when it has ended, so the same command runs only what is missing. Runs are compared
by what they were measured by. How a run is made is not known here.
"""

import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from rich.table import Table

from gpt.adapters.adapter_file import check_folder, latest_adapter, open_adapter, publish_adapter
from gpt.errors import AdapterError, ConfigError, PreambleError
from gpt.settings import nearest, read_yaml, shown
from ptuning.config import TuneConfig
from ptuning.launch import under_torchrun
from ptuning.run.artifacts import Outcome
from ptuning.run.preparation import Prepared, prepare
from ptuning.run.training_loop import run_folder
from ptuning.run.training_state import Origin, hold
from ptuning.run_facts import RunFacts

RUNS_MAX = 64
FOLDER, RESULT, TABLE = "sweep", "result.json", "sweep.csv"
# What runs are told apart from others by, and what they are compared by.
SAME = (
    *("name", "output", "run", "model", "tasks", "task_templates"),
    *("validation", "validation_examples", "measure"),
)
PLAIN = re.compile(r"[\w.=,+-]{1,120}", re.ASCII)


@dataclass(frozen=True)
class Variant:
    """One combination, and the run that it makes."""

    values: Mapping[str, Any]
    config: TuneConfig
    folder: Path  # All of its own, its adapters too.

    def __str__(self) -> str:
        return ", ".join(f"{key} {shown(value)}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    config: TuneConfig  # As the file has it.
    variants: tuple[Variant, ...]
    folder: Path

    @property
    def compared_by(self) -> str:
        """In words: without records to measure with there is only what was learned from."""
        if self.config.measure != "loss":
            return self.config.measure
        held_out = any(task.validation for task in self.config.wanted)
        return "validation_loss" if held_out else "last_loss"


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    state: str  # As an outcome's; or "failed".
    trouble: str = ""  # Why it failed.
    steps: int = 0
    best_step: int | None = None
    first_loss: float = math.nan
    last_loss: float = math.nan
    validation_loss: float | None = None  # Of what was written.
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    paths: tuple[str, ...] = ()  # Of its adapters, in its folder.

    def score(self, compared_by: str) -> float | None:
        """More is better; None: there is nothing to compare."""
        numbers = {"last_loss": self.last_loss, "validation_loss": self.validation_loss}
        found = {**numbers, **self.measures}.get(compared_by)
        if self.state == "failed" or found is None or not math.isfinite(found):
            return None
        return -found if compared_by in numbers else found


@dataclass(frozen=True)
class Swept:
    """How a sweep ended."""

    sweep: Sweep
    results: tuple[Result, ...]  # Of the variants, as far as it came.
    best: int | None = None  # Its number among them; None: the sweep was interrupted.
    paths: tuple[Path, ...] = ()  # What was published.


# Runs one, and tells how it ended. The second word is whether to begin anew.
Run = Callable[[Prepared, bool], tuple[Outcome, RunFacts]]


def read_sweep(path: str, words: Sequence[str]) -> Sweep:
    """Every combination of `key=value,value` as a run, all of them checked."""
    if under_torchrun():
        raise ConfigError("--sweep starts the ranks of each run by itself; leave torchrun out")
    record = read_yaml(Path(path))
    config = TuneConfig.of(record, path)
    if config.method == "full":
        raise ConfigError("--sweep publishes an adapter, and method: full makes none; set another")
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, values = _wish(word, config)
        if key in grid:
            raise ConfigError(f"--sweep has {key} twice; give all of its values in one")
        grid[key] = values
    count = math.prod(map(len, grid.values()))
    if count > RUNS_MAX:
        raise ConfigError(
            f"--sweep makes {count} runs, and at most {RUNS_MAX} may be; take some values out"
        )
    folder, found = run_folder(config) / FOLDER, dict[str, Variant]()
    for chosen in itertools.product(*grid.values()):
        wished = dict(zip(grid, chosen, strict=True))
        with _named(wished):
            one = TuneConfig.of({**record, **wished}, path)
        if one.method == "full":
            raise ConfigError("--sweep publishes an adapter, and method: full makes none")
        typed = {key: getattr(one, key) for key in grid}
        own = folder / _label(typed)
        places = {"run": str(own), "output": str(own / "adapters")}
        # As settings know them: 1e-3 and 0.001 are one.
        found[own.name] = Variant(typed, TuneConfig.of({**record, **wished, **places}, path), own)
    return Sweep(config, tuple(found.values()), folder)


def _wish(word: str, config: TuneConfig) -> tuple[str, list[Any]]:
    key, sign, text = word.partition("=")
    known = {one.name for one in fields(TuneConfig)}
    if not sign:
        raise ConfigError(f"--sweep is {shown(word)}; write it as learning_rate=1e-3,1e-2")
    if key in SAME:
        raise ConfigError(
            f"--sweep: {key} must be the same in all runs, or they could not be compared and "
            "published as one; take it out"
        )
    if key == "answer_only_loss" and config.measure == "loss":
        raise ConfigError(
            "--sweep: with answer_only_loss a loss means something else, so runs cannot be "
            "compared by it; set another measure, or take it out"
        )
    if key not in known:
        raise ConfigError(f"--sweep: unknown key {shown(key)}; {nearest(key, known - set(SAME))}")
    try:
        values = yaml.safe_load(f"[{text}]")
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"--sweep: {key} has the values {shown(text)}; give them as YAML would have them, with "
            "commas between"
        )
    return key, values


@contextmanager
def _named(values: Mapping[str, Any]) -> Iterator[None]:
    """Say which combination is refused."""
    try:
        yield
    except ConfigError as error:
        which = ", ".join(f"{key}={shown(value)}" for key, value in values.items())
        raise ConfigError(f"--sweep with {which}: {error}") from None


def _label(values: Mapping[str, Any]) -> str:
    """A folder's name: the values, where a path can hold them."""
    plain = ",".join(f"{key}={value}" for key, value in values.items())
    exact = json.dumps(values, sort_keys=True)
    return plain if PLAIN.fullmatch(plain) else hashlib.sha256(exact.encode()).hexdigest()[:16]


def run_sweep(sweep: Sweep, run: Run, say: Callable[[str], None], *, restart: bool) -> Swept:
    """One run after another, but for those that have ended before; then the best is published."""
    if sweep.compared_by == "last_loss":
        say(
            "warning: there are no records to measure with (`validation`), so runs are compared by "
            "the loss on what they learn from, which favours those that learn it by heart"
        )
    try:
        check_folder(Path(sweep.config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    with hold(sweep.folder):
        # All of them before anything is spent on one.
        origins = []
        for variant in sweep.variants:
            with _named(variant.values):
                origins.append(prepare(variant.config).origin())
        if restart:
            for variant in sweep.variants:
                (variant.folder / RESULT).unlink(missing_ok=True)
        results: list[Result] = []
        for number, (variant, origin) in enumerate(zip(sweep.variants, origins, strict=True), 1):
            result = _earlier(variant, origin)
            which = f"run {number} of {len(sweep.variants)}: {variant}"
            say(f"{which}{' (done before)' if result is not None else ''}")
            if result is None:
                result = _attempt(variant, run, restart=restart)
                if result.state == "interrupted":
                    return Swept(sweep, tuple(results))
                if result.trouble:
                    say(f"warning: {variant}: {result.trouble}")
                else:
                    _leave(variant, origin, result)
            results.append(result)
            _write(
                sweep.folder / TABLE, _csv(Swept(sweep, tuple(results), best_of(sweep, results)))
            )
        best = best_of(sweep, results)
        if best is None:
            raise ConfigError(f"none of the {len(results)} runs came to anything; see their words")
        return Swept(sweep, tuple(results), best, _publish(sweep, best, results[best]))


def _attempt(variant: Variant, run: Run, *, restart: bool) -> Result:
    """A run that fails, as where a rate is too high, does not end the others."""
    try:
        outcome, facts = run(prepare(variant.config), restart)
    except PreambleError as error:
        if dist.is_initialized():
            dist.destroy_process_group()  # The next run's ranks meet anew.
        return Result("failed", str(error))
    last = facts.validations[-1] if facts.validations else None
    return Result(
        outcome.state,
        steps=outcome.step,
        best_step=outcome.best_step,
        first_loss=outcome.first_loss,
        last_loss=outcome.last_loss,
        validation_loss=None if last is None else last.loss,
        measures={} if last is None else dict(last.measures),
        seconds=sum(one.seconds for one in facts.progress),
        paths=tuple(str(path.relative_to(variant.folder)) for path in outcome.paths),
    )


def _earlier(variant: Variant, origin: Origin) -> Result | None:
    """What the same run came to, of the same records and the same base, if it has ended."""
    try:
        record = json.loads((variant.folder / RESULT).read_text())
        if record["origin"] != asdict(origin):
            return None
        result = Result(**{**record["result"], "paths": tuple(record["result"]["paths"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return result if all((variant.folder / path).is_file() for path in result.paths) else None


def _leave(variant: Variant, origin: Origin, result: Result) -> None:
    record = {"origin": asdict(origin), "result": asdict(result)}
    _write(variant.folder / RESULT, json.dumps(record, indent=2) + "\n")


def best_of(sweep: Sweep, results: Sequence[Result]) -> int | None:
    """Of equal ones the one with the lower loss, and then the first."""
    scores = {number: one.score(sweep.compared_by) for number, one in enumerate(results)}

    def worth(number: int) -> tuple[float, float]:
        loss = results[number].validation_loss
        return scores[number] or 0.0, -math.inf if loss is None else -loss

    known = [number for number, score in scores.items() if score is not None]
    return max(known, key=worth) if known else None


def _publish(sweep: Sweep, best: int, result: Result) -> tuple[Path, ...]:
    """The next versions of its names, if the newest are not these already."""
    folder, found = Path(sweep.config.output), []
    for path in result.paths:
        adapter = open_adapter(sweep.variants[best].folder / path)
        newest = latest_adapter(folder, adapter.card.name)
        same = newest is not None and newest[1].digest == adapter.digest
        found.append(newest[0] if same and newest else publish_adapter(adapter, folder))
    return tuple(found)


def records(swept: Swept) -> list[dict[str, Any]]:
    """A line for each run: its settings, and what came of them."""
    found = []
    for number, (variant, result) in enumerate(
        zip(swept.sweep.variants, swept.results, strict=False)
    ):
        measured = asdict(result)
        named = measured.pop("measures")
        del measured["paths"]
        found.append(
            {
                **variant.values,
                **{key: _finite(value) for key, value in {**measured, **named}.items()},
                "best": number == swept.best,
                "folder": str(variant.folder),
            }
        )
    return found


def summary(swept: Swept) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "compared_by": swept.sweep.compared_by,
        "runs": records(swept),
        "table": str(swept.sweep.folder / TABLE),
        "paths": [str(path) for path in swept.paths],
    }


def table(swept: Swept) -> Table:
    """For people: what tells the runs apart. All else is in the file."""
    compared, rows = swept.sweep.compared_by, records(swept)
    numbers = dict.fromkeys((compared, "validation_loss", "last_loss"))
    columns = [name for name in numbers if any(one.get(name) is not None for one in rows)]
    if any(one["state"] != "finished" for one in rows):
        columns.append("state")
    keys = list(swept.sweep.variants[0].values)
    found = Table(title=f"runs, compared by {compared}", box=None)
    for name in keys:
        found.add_column(name.replace("_", " "), overflow="fold")
    for name in (*columns, ""):
        found.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for record in rows:
        cells = [_cell(record.get(name)) for name in (*keys, *columns)]
        style = "bold" if record["best"] else None
        found.add_row(*cells, "best" if record["best"] else "", style=style)
    return found


def _csv(swept: Swept) -> str:
    rows = records(swept)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); make room, and give the same command: "
            "runs that have ended stand"
        ) from None
