"""Measurement rounds: runs a plan's top candidates, corrects the predictions of the others, ranks.

Later rounds run the best candidates again for longer. Each result is written to a journal
immediately, so that the same command continues after an interruption. A candidate that crashes,
runs out of memory or times out becomes a failed row with the reason of the failure. A `Trial` runs
one candidate and scores the candidate's figures.
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
from planning.plan import Confidence, Feasibility, Plan, Row

JOURNAL_NAME, JOURNAL_VERSION = "measured.jsonl", 1
DEFAULT_FOLDER = "preamble-plan"  # The default folder for results.
LATER_ROUND_SIZES = (4, 2)  # The number of candidates in the second and in the third round.
# After this many results, the prediction errors decide whether another candidate can be the best.
RESULTS_MIN = 3
SINGLE_RUN_ERROR = 0.05  # Assumed relative error of a candidate that was run only once.


class TrialError(PreambleError):
    """A candidate crashed or exceeded its time-out; the message is the reason."""


class Trial(Protocol):
    """Runs candidates of one plan."""

    @property
    def efforts(self) -> Sequence[int]:
        """The amount of work of a run in each round, such as seconds of load."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """The model, machine and load that results are valid for; other results are discarded."""
        ...

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        """Run a candidate and return its figures, named as in the plan, or raise TrialError."""
        ...

    def score(self, figures: Mapping[str, float]) -> float:
        """Return the score for the objective; higher is better."""
        ...

    def violated_limit(self, figures: Mapping[str, float]) -> str:
        """Describe the limit that the figures violate; return "" if they satisfy all limits."""
        ...

    def finalize_plan(self, plan: Plan, best: Row | None) -> Plan:
        """Return the plan with the settings file and the command of the best row."""
        ...


@dataclass(frozen=True)
class TrialResult:
    """The result of a candidate in one round: figures, or the reason of a failure."""

    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


class Journal:
    """A file of results, one JSON line each; it includes results of an interrupted run."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], log: Callable[[str], None]):
        self._path = folder / JOURNAL_NAME
        self._results: dict[str, TrialResult] = {}
        # Converted to JSON and back, so that it can equal the first line of the file.
        head = json.loads(json.dumps({"version": JOURNAL_VERSION, **identity}))
        lines = _read_journal(self._path)
        if lines and lines[0] == head:
            for line in lines[1:]:
                self._results[_result_key(line["settings"], line["effort"])] = TrialResult(
                    line.get("figures", {}), line.get("failure", "")
                )
            log(f"continuing with {len(self._results)} results from {self._path}")
            return
        if lines:
            log(
                f"{self._path} has results of another model, machine, load or version; discarding "
                "them and starting again"
            )
        self._write_record(head, "w")

    def get_result(self, row: Row, effort: int) -> TrialResult | None:
        return self._results.get(_result_key(row.settings, effort))

    def record_result(self, row: Row, effort: int, result: TrialResult) -> None:
        self._results[_result_key(row.settings, effort)] = result
        result_fields = (
            {"failure": result.failure} if result.failure else {"figures": dict(result.figures)}
        )
        self._write_record({"settings": dict(row.settings), "effort": effort, **result_fields}, "a")

    def _write_record(self, record: Mapping[str, Any], mode: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}; set a writable folder with --output"
            ) from None


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines, and truncate a last incomplete line, which a kill can leave."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    complete_lines = text[: text.rfind(b"\n") + 1]
    if len(complete_lines) < len(text):
        os.truncate(path, len(complete_lines))
    try:
        records = [json.loads(line) for line in complete_lines.splitlines()]
    except ValueError:
        return [{}]
    return records if all(isinstance(line, dict) for line in records) else [{}]


def _result_key(settings: Mapping[str, Any], effort: int) -> str:
    return json.dumps([dict(settings), effort], sort_keys=True)


def _settings_key(row: Row) -> str:
    return json.dumps(dict(row.settings), sort_keys=True)


def measure_plan(
    plan: Plan, trial: Trial, folder: Path, top: int, log: Callable[[str], None]
) -> Plan:
    """Measure the best `top` candidates, and return the plan with their figures, re-ranked."""
    if top < 1:
        raise ConfigError(f"--measure is {top}; set the number of candidates to run, at least 1")
    rounds = _MeasurementRounds(plan, trial, Journal(folder, trial.identity, log), folder, log)
    effort, *longer = trial.efforts
    ranked_rows = rounds.run_first_round(effort, top)
    for rows_max, effort in zip(LATER_ROUND_SIZES, longer, strict=False):
        if len(ranked_rows) > 1:
            ranked_rows = rounds.run_next_round(effort, ranked_rows[:rows_max])
    return rounds.make_plan()


@dataclass
class _MeasurementRounds:
    """The state of the measurement of a plan."""

    plan: Plan
    trial: Trial
    journal: Journal
    folder: Path
    log: Callable[[str], None]
    results: dict[str, list[TrialResult]] = field(default_factory=dict)

    def run_first_round(self, effort: int, rows_max: int) -> list[Row]:
        """Run up to `rows_max` candidates and rank them.

        The next candidate is always the most promising one according to the results so far. The
        round ends early if no other candidate can be the best.
        """
        pool = {_settings_key(row): row for row in self.plan.rows if self._is_runnable(row)}
        measured_rows: list[Row] = []
        while pool and len(measured_rows) < rows_max:
            factors = self._correction_factors()
            row = max(pool.values(), key=lambda candidate: self._expected_rank(candidate, factors))
            if self._cannot_win(row, factors):
                self.log("given the prediction errors so far, no other candidate can be the best")
                break
            del pool[_settings_key(row)]
            measured_rows.append(row)
            self._run(
                row,
                effort,
                f"{len(measured_rows)} of {min(rows_max, len(measured_rows) + len(pool))}",
            )
        return self._rank_rows(measured_rows)

    def run_next_round(self, effort: int, rows: Sequence[Row]) -> list[Row]:
        """Run the candidates for longer, and rank them by the new results."""
        for number, row in enumerate(rows, 1):
            self._run(row, effort, f"{number} of the best {len(rows)}")
        return self._rank_rows(rows)

    def _is_runnable(self, row: Row) -> bool:
        """Return whether a row can run.

        A row can run if it fits in memory, even if it is rejected because it is predicted to
        violate a limit: the prediction may be wrong.
        """
        is_simulated = row.feasibility == "rejected" and bool(row.figures)
        return row.feasibility in ACCEPTABLE or (
            is_simulated and bool(self.trial.violated_limit(row.figures))
        )

    def _run(self, row: Row, effort: int, progress: str) -> None:
        result = self.journal.get_result(row, effort)
        cached_note = " (from the journal)" if result is not None else ""
        self.log(f"{progress}: {row.name}{cached_note}")
        if result is None:
            try:
                result = TrialResult(self.trial.run(row, effort, self.folder))
            except TrialError as error:
                result = TrialResult(failure=str(error))
            self.journal.record_result(row, effort, result)
        if result.failure:
            self.log(f"{row.name} failed: {result.failure}")
        self.results.setdefault(_settings_key(row), []).append(result)

    def _rank_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Sort the rows that did not fail: rows within the limits first, then by score."""

        def sort_key(row: Row) -> tuple[bool, float]:
            figures = self.results[_settings_key(row)][-1].figures
            return not self.trial.violated_limit(figures), self.trial.score(figures)

        finished = [row for row in rows if not self.results[_settings_key(row)][-1].failure]
        return sorted(finished, key=sort_key, reverse=True)

    # ------------------------------------------------------------------------------- expectations

    def _finished_results(self) -> list[tuple[Row, TrialResult]]:
        """Return each row that has run with its last result, except rows that failed."""
        rows = {_settings_key(row): row for row in self.plan.rows}
        last = [(rows[name], results[-1]) for name, results in self.results.items()]
        return [(row, result) for row, result in last if not result.failure]

    def _correction_factors(self) -> dict[str, float]:
        """Return the median ratio of measured to predicted values of each figure."""
        ratios: dict[str, list[float]] = {}
        for row, result in self._finished_results():
            for name, value in result.figures.items():
                if row.figures.get(name):
                    ratios.setdefault(name, []).append(value / row.figures[name])
        return {name: median(figure_ratios) for name, figure_ratios in ratios.items()}

    def _expected_rank(self, row: Row, factors: Mapping[str, float]) -> tuple[bool, bool, float]:
        """Return the sort key of a row that has not run; the largest key runs first.

        Tight rows run last, because they may fail.
        """
        figures = correct_figures(row, factors)
        return (
            row.feasibility != "tight",
            not self.trial.violated_limit(figures),
            self.trial.score(figures),
        )

    def _cannot_win(self, row: Row, factors: Mapping[str, float]) -> bool:
        """Return whether a row would not be the best even with the largest prediction error so far.

        The error of a single run is added to the prediction error. The answer is False before there
        are RESULTS_MIN results.
        """
        finished, score = self._finished_results(), self.trial.score
        valid_scores = [
            score(trial_result.figures)
            for _, trial_result in finished
            if not self.trial.violated_limit(trial_result.figures)
        ]
        if len(finished) < RESULTS_MIN or not valid_scores:
            return False
        gains = [
            score(result.figures) - score(correct_figures(measured_row, factors))
            for measured_row, result in finished
        ]
        score_margin = max(0.0, *gains) + SINGLE_RUN_ERROR * max(
            abs(valid_score) for valid_score in valid_scores
        )
        return score(correct_figures(row, factors)) + score_margin < max(valid_scores)

    # ------------------------------------------------------------------------------------- ranking

    def make_plan(self) -> Plan:
        valid_results = {
            _settings_key(row): result
            for row, result in self._finished_results()
            if not self.trial.violated_limit(result.figures)
        }
        # Only candidates that ran in the most rounds can win, because later rounds are longer.
        rounds_max = max((len(self.results[name]) for name in valid_results), default=0)
        finals = [name for name in valid_results if len(self.results[name]) == rounds_max]
        winner = max(
            finals, key=lambda name: self.trial.score(valid_results[name].figures), default=None
        )
        factors = self._correction_factors()
        rows = [
            self._measured_row(row, factors, best=_settings_key(row) == winner)
            for row in self.plan.rows
        ]
        rows.sort(key=self._sort_rank)
        best = next((row for row in rows if row.feasibility == "best"), None)
        advice = [*self.plan.advice, *self._advice(best)]
        return self.trial.finalize_plan(replace(self.plan, rows=rows, advice=advice), best)

    def _sort_rank(self, row: Row) -> int:
        """Return the sort key: best row, measured rows, rows that fit, tight rows, all others."""
        if row.feasibility not in ACCEPTABLE:
            return 4
        if row.feasibility == "best":
            return 0
        return 1 if row.measured else 2 if row.feasibility == "fits" else 3

    def _measured_row(self, row: Row, factors: Mapping[str, float], *, best: bool) -> Row:
        results = self.results.get(_settings_key(row), ())
        if not results:
            return self._corrected_row(row, factors)
        failure = next((run_result.failure for run_result in results if run_result.failure), "")
        if failure:
            return replace(row, feasibility="failed", reason=failure)
        figures = results[-1].figures
        scores = [self.trial.score(run_result.figures) for run_result in results]
        mean_score = abs(sum(scores) / len(scores)) or 1.0
        error = (
            (max(scores) - min(scores)) / 2 / mean_score if len(scores) > 1 else SINGLE_RUN_ERROR
        )
        violation = self.trial.violated_limit(figures)
        return replace(
            row,
            feasibility="best" if best else "rejected" if violation else "fits",
            reason=f"measured: {violation}" if violation else "",
            measured=figures,
            confidence=Confidence("measured", max(0.01, error)),
        )

    def _corrected_row(self, row: Row, factors: Mapping[str, float]) -> Row:
        """Return a row that has not run, with its predictions corrected by the measured rows.

        A row that cannot run is returned unchanged.
        """
        if not row.figures or not self._is_runnable(row):
            return row
        figures = correct_figures(row, factors)
        violation = self.trial.violated_limit(figures)
        feasibility: Feasibility = "tight" if row.feasibility == "tight" else "fits"
        note = (
            f"corrected by {len(self._finished_results())} measured candidates" if factors else ""
        )
        confidence = (
            replace(row.confidence, note=note or row.confidence.note)
            if row.confidence is not None
            else None
        )
        return replace(
            row,
            feasibility="rejected" if violation else feasibility,
            reason=violation or ("" if row.feasibility == "rejected" else row.reason),
            figures=figures,
            confidence=confidence,
        )

    def _advice(self, best: Row | None) -> list[str]:
        """Return lines on the prediction error, and advice if no candidate satisfies the limits."""
        axis, lines = self.plan.y, list[str]()
        ratios = [
            result.figures[axis.figure] / row.figures[axis.figure]
            for row, result in self._finished_results()
            if row.figures.get(axis.figure) and axis.figure in result.figures
        ]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            lines.append(
                f"{axis.label}, measured / predicted: median {median(ratios):.2f}, worst "
                f"{worst:.2f}, of {len(ratios)} candidates"
            )
        if best is None:
            lines.append(
                f"none of the {len(self.results)} measured candidates satisfies all limits: relax "
                "a limit, or run more candidates (--measure)"
            )
        return lines


def correct_figures(row: Row, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the predictions of a row, multiplied by the correction factors."""
    return {name: value * factors.get(name, 1.0) for name, value in row.figures.items()}
