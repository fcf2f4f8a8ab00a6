"""The top of a plan, run for real: each candidate by itself, and the better ones again for longer.

What a candidate came to is noted at once, so the same command goes on where it was interrupted. One
that crashes, runs out of memory or out of time is a row with its reason, and the others go on. How
a candidate is run, and what its figures are worth, a trial knows.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from gpt.errors import ConfigError, PreambleError
from planning.figures import ACCEPTABLE
from planning.plan import Plan, Row, Standing, Trust

JOURNAL, VERSION = "measured.jsonl", 1
UNNAMED = "preamble-plan"  # The folder for results where nobody names one.
LATER = (4, 2)  # How many of the best run again, for longer; and of these, once more.
# So many results say how far predictions are off, and whether the next one is worth running.
TELLING = 3
ERROR = 0.05  # Of one that was run once, where nothing tells how results scatter.


class TrialError(PreambleError):
    """A candidate that did not come to its end: it has crashed, or has taken too long."""


class Trial(Protocol):
    """Runs candidates of one plan."""

    @property
    def efforts(self) -> Sequence[int]:
        """What a round asks of each, such as seconds of load."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that results depend on besides a row's settings: what differs is measured anew."""
        ...

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        """Its figures, by the names that the plan predicts them under; or a TrialError."""
        ...

    def score(self, figures: Mapping[str, float]) -> float:
        """By the objective: more is better."""
        ...

    def broken(self, figures: Mapping[str, float]) -> str:
        """Which limit these break, in words; empty: none."""
        ...

    def settle(self, plan: Plan, best: Row | None) -> Plan:
        """The plan with the settings file and the command of what is best now."""
        ...


@dataclass(frozen=True)
class Result:
    """What became of a candidate in one round."""

    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


class Journal:
    """Results as they come, a line each; those of a run that was interrupted are there already."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], say: Callable[[str], None]):
        self._path = folder / JOURNAL
        self._found: dict[str, Result] = {}
        # As JSON has it, so that what is read compares to it.
        head = json.loads(json.dumps({"version": VERSION, **identity}))
        lines = _lines(self._path)
        if lines and lines[0] == head:
            for line in lines[1:]:
                self._found[_key(line["settings"], line["effort"])] = Result(
                    line.get("figures", {}), line.get("failure", "")
                )
            say(f"{len(self._found)} results stand in {self._path}; what is missing is run")
            return
        if lines:
            say(f"{self._path} is of another model, machine, load or version; it begins anew")
        self._write(head, "w")

    def get(self, row: Row, effort: int) -> Result | None:
        return self._found.get(_key(row.settings, effort))

    def note(self, row: Row, effort: int, result: Result) -> None:
        self._found[_key(row.settings, effort)] = result
        told = {"failure": result.failure} if result.failure else {"figures": dict(result.figures)}
        self._write({"settings": dict(row.settings), "effort": effort, **told}, "a")

    def _write(self, record: Mapping[str, Any], mode: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written ({error.strerror}); name a folder that can, with "
                "--output"
            ) from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines. After a kill the last one may be half of one: it is cut off."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    try:
        found = [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        return [{}]
    return found if all(isinstance(line, dict) for line in found) else [{}]


def _key(settings: Mapping[str, Any], effort: int) -> str:
    return json.dumps([dict(settings), effort], sort_keys=True)


def _name(row: Row) -> str:
    return json.dumps(dict(row.settings), sort_keys=True)


def measure(plan: Plan, trial: Trial, folder: Path, top: int, say: Callable[[str], None]) -> Plan:
    """The plan, with what its first `top` candidates really did, and the best of those first."""
    if top < 1:
        raise ConfigError(f"--measure is {top}; it is how many candidates are run, at least 1")
    race = _Race(plan, trial, Journal(folder, trial.identity, say), folder, say)
    effort, *longer = trial.efforts
    chosen = race.first(effort, top)
    for most, effort in zip(LATER, longer, strict=False):
        if len(chosen) > 1:
            chosen = race.again(effort, chosen[:most])
    return race.settled()


@dataclass
class _Race:
    """Candidates against each other, round by round."""

    plan: Plan
    trial: Trial
    journal: Journal
    folder: Path
    say: Callable[[str], None]
    done: dict[str, list[Result]] = field(default_factory=dict)

    def first(self, effort: int, most: int) -> list[Row]:
        """One after another, each the best by what is known when it begins; ranked."""
        pool = {_name(row): row for row in self.plan.rows if self._able(row)}
        run: list[Row] = []
        while pool and len(run) < most:
            factors = self._factors()
            row = max(pool.values(), key=lambda one: self._hope(one, factors))
            if self._hopeless(row, factors):
                self.say("by how predictions are off, none of the others can be the best")
                break
            del pool[_name(row)]
            run.append(row)
            self._run(row, effort, f"{len(run)} of {min(most, len(run) + len(pool))}")
        return self._ranked(run)

    def again(self, effort: int, rows: Sequence[Row]) -> list[Row]:
        """Each of them for longer; ranked by that."""
        for number, row in enumerate(rows, 1):
            self._run(row, effort, f"{number} of the best {len(rows)}")
        return self._ranked(rows)

    def _able(self, row: Row) -> bool:
        """Whether it may be run: what has no room is not; a broken limit is only a prediction."""
        limit = row.standing == "rejected" and bool(row.figures)
        return row.standing in ACCEPTABLE or (limit and bool(self.trial.broken(row.figures)))

    def _run(self, row: Row, effort: int, which: str) -> None:
        result = self.journal.get(row, effort)
        known = " (done before)" if result is not None else ""
        self.say(f"{which}: {row.name}{known}")
        if result is None:
            try:
                result = Result(self.trial.run(row, effort, self.folder))
            except TrialError as error:
                result = Result(failure=str(error))
            self.journal.note(row, effort, result)
        if result.failure:
            self.say(f"{row.name} failed: {result.failure}")
        self.done.setdefault(_name(row), []).append(result)

    def _ranked(self, rows: Sequence[Row]) -> list[Row]:
        """Those that keep the limits first, and of these the better ones; without what failed."""

        def worth(row: Row) -> tuple[bool, float]:
            figures = self.done[_name(row)][-1].figures
            return not self.trial.broken(figures), self.trial.score(figures)

        good = [row for row in rows if not self.done[_name(row)][-1].failure]
        return sorted(good, key=worth, reverse=True)

    # -------------------------------------------------------------------------- what is expected

    def _good(self) -> list[tuple[Row, Result]]:
        """What was run to its end, as it was last."""
        rows = {_name(row): row for row in self.plan.rows}
        last = [(rows[name], results[-1]) for name, results in self.done.items()]
        return [(row, result) for row, result in last if not result.failure]

    def _factors(self) -> dict[str, float]:
        """Measured over predicted, the median of each figure."""
        ratios: dict[str, list[float]] = {}
        for row, result in self._good():
            for name, value in result.figures.items():
                if row.figures.get(name):
                    ratios.setdefault(name, []).append(value / row.figures[name])
        return {name: median(of) for name, of in ratios.items()}

    def _hope(self, row: Row, factors: Mapping[str, float]) -> tuple[bool, bool, float]:
        """What may not fit is run last: when it fails, all others are known."""
        figures = corrected(row, factors)
        return (
            row.standing != "tight",
            not self.trial.broken(figures),
            self.trial.score(figures),
        )

    def _hopeless(self, row: Row, factors: Mapping[str, float]) -> bool:
        """Whether even the luckiest error so far would not make it better than the best one."""
        good, score = self._good(), self.trial.score
        keep = [score(one.figures) for _, one in good if not self.trial.broken(one.figures)]
        if len(good) < TELLING or not keep:
            return False
        gains = [score(result.figures) - score(corrected(one, factors)) for one, result in good]
        spare = max(0.0, *gains) + ERROR * max(abs(one) for one in keep)
        return score(corrected(row, factors)) + spare < max(keep)

    # --------------------------------------------------------------------------------- the verdict

    def settled(self) -> Plan:
        kept = {
            _name(row): result
            for row, result in self._good()
            if not self.trial.broken(result.figures)
        }
        # Of those that came furthest: who was run longest is known best.
        furthest = max((len(self.done[name]) for name in kept), default=0)
        finals = [name for name in kept if len(self.done[name]) == furthest]
        winner = max(finals, key=lambda name: self.trial.score(kept[name].figures), default=None)
        factors = self._factors()
        rows = [self._told(row, factors, best=_name(row) == winner) for row in self.plan.rows]
        rows.sort(key=self._place)
        best = next((row for row in rows if row.standing == "best"), None)
        advice = [*self.plan.advice, *self._advice(best)]
        return self.trial.settle(replace(self.plan, rows=rows, advice=advice), best)

    def _place(self, row: Row) -> int:
        """The best, then what was run and is good, then what else is, as it stood."""
        if row.standing not in ACCEPTABLE:
            return 4
        if row.standing == "best":
            return 0
        return 1 if row.measured else 2 if row.standing == "fits" else 3

    def _told(self, row: Row, factors: Mapping[str, float], *, best: bool) -> Row:
        results = self.done.get(_name(row), ())
        if not results:
            return self._expected(row, factors)
        failure = next((one.failure for one in results if one.failure), "")
        if failure:
            return replace(row, standing="failed", reason=failure)
        figures = results[-1].figures
        scores = [self.trial.score(one.figures) for one in results]
        middle = abs(sum(scores) / len(scores)) or 1.0
        error = (max(scores) - min(scores)) / 2 / middle if len(scores) > 1 else ERROR
        broken = self.trial.broken(figures)
        return replace(
            row,
            standing="best" if best else "rejected" if broken else "fits",
            reason=f"measured: {broken}" if broken else "",
            measured=figures,
            trust=Trust("measured", max(0.01, error)),
        )

    def _expected(self, row: Row, factors: Mapping[str, float]) -> Row:
        """One that was not run, as the others say that it would be."""
        if not row.figures or not self._able(row):
            return row
        figures = corrected(row, factors)
        broken = self.trial.broken(figures)
        standing: Standing = "tight" if row.standing == "tight" else "fits"
        note = f"corrected by {len(self._good())} that were run" if factors else ""
        trust = replace(row.trust, note=note or row.trust.note) if row.trust is not None else None
        return replace(
            row,
            standing="rejected" if broken else standing,
            reason=broken or ("" if row.standing == "rejected" else row.reason),
            figures=figures,
            trust=trust,
        )

    def _advice(self, best: Row | None) -> list[str]:
        """How far predictions were off; and what to do where nothing is left."""
        axis, told = self.plan.y, list[str]()
        ratios = [
            result.figures[axis.figure] / row.figures[axis.figure]
            for row, result in self._good()
            if row.figures.get(axis.figure) and axis.figure in result.figures
        ]
        if ratios:
            worst = max(ratios, key=lambda one: abs(one - 1))
            told.append(
                f"{axis.label}, measured over predicted: median {median(ratios):.2f}, worst "
                f"{worst:.2f}, of {len(ratios)}"
            )
        if best is None:
            told.append(
                f"none of the {len(self.done)} that were run keeps all limits: raise a limit, or "
                "have more of them run (--measure)"
            )
        return told


def corrected(row: Row, factors: Mapping[str, float]) -> dict[str, float]:
    """Its predictions, as far off as those of others were."""
    return {name: value * factors.get(name, 1.0) for name, value in row.figures.items()}
