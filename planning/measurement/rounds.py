"""Measurement rounds: runs a plan's best candidates, and ranks all candidates by the results.

Later rounds run the best candidates again for longer. The predictions of candidates that did not
run are corrected by the measured errors. Each result is written to a journal immediately, so that
the same command continues after an interruption. A candidate that crashes, runs out of memory or
times out becomes a failed row with the reason of the failure. A `Trial` runs one candidate and
scores its figures.
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
# Maximum number of candidates in the second and in the third round.
LATER_ROUND_SIZES = (4, 2)
# The first round cannot end early (`_cannot_win`) before it has this number of results.
RESULTS_MIN = 3
SINGLE_RUN_ERROR = 0.05  # Assumed relative error of a candidate that was run only once.


class TrialError(PreambleError):
    """The run of a candidate failed or exceeded its time-out; the message is the reason."""


class Trial(Protocol):
    """Runs candidates of one plan."""

    @property
    def efforts(self) -> Sequence[int]:
        """The amount of work of a run in each round, such as seconds of load."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """The model, machine and load. Results of a journal with another identity are discarded."""
        ...

    def run(self, row: Row, effort: int, folder: Path) -> Mapping[str, float]:
        """Run a candidate and return its figures, named as in the plan, or raise TrialError."""
        ...

    def score(self, figures: Mapping[str, float]) -> float:
        """Return the score for the objective; higher is better."""
        ...

    def violated_limit(self, figures: Mapping[str, float]) -> str:
        """Describe the limit that the figures violate most; "": they satisfy all limits."""
        ...

    def finalize_plan(self, plan: Plan, best: Row | None) -> Plan:
        """Return the plan with the settings file and the command of the row `best`."""
        ...


@dataclass(frozen=True)
class TrialResult:
    """The result of a candidate in one round."""

    figures: Mapping[str, float] = field(default_factory=dict)  # Empty after a failure.
    failure: str = ""  # The reason of a failure; "": the run succeeded.


class Journal:
    """The results of all runs, in memory and in a file that survives an interruption.

    The first line of the file is the identity of the trial. Each further line is a result, as JSON.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], log: Callable[[str], None]):
        self._path = folder / JOURNAL_NAME
        self._results: dict[str, TrialResult] = {}
        # The conversion to JSON and back turns tuples into lists, as in the file.
        head = json.loads(json.dumps({"version": JOURNAL_VERSION, **identity}))
        records = _read_journal(self._path)
        if records and records[0] == head:
            for record in records[1:]:
                key = _result_key(record["settings"], record["effort"])
                self._results[key] = TrialResult(
                    record.get("figures", {}), record.get("failure", "")
                )
            log(f"continuing with {len(self._results)} results from {self._path}")
            return
        if records:
            log(
                f"{self._path} has results of another model, machine, load or version; starting "
                "again without these results"
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
    """Return the records of the complete lines; an incomplete last line is removed from the file.

    A last line is incomplete if the process was killed while it wrote the line. For an invalid
    file, return one empty record, which differs from every identity.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return []
    complete_lines = content[: content.rfind(b"\n") + 1]
    if len(complete_lines) < len(content):
        os.truncate(path, len(complete_lines))
    try:
        records = [json.loads(line) for line in complete_lines.splitlines()]
    except ValueError:
        return [{}]
    return records if all(isinstance(record, dict) for record in records) else [{}]


def _result_key(settings: Mapping[str, Any], effort: int) -> str:
    return json.dumps([dict(settings), effort], sort_keys=True)


def _settings_key(row: Row) -> str:
    return json.dumps(dict(row.settings), sort_keys=True)


def measure_plan(
    plan: Plan, trial: Trial, folder: Path, top: int, log: Callable[[str], None]
) -> Plan:
    """Measure up to `top` candidates, and return the plan ranked by the measured figures.

    `folder` is the folder of the journal and of the runs.
    """
    if top < 1:
        raise ConfigError(f"--measure is {top}; set the number of candidates to run, at least 1")
    rounds = _MeasurementRounds(plan, trial, Journal(folder, trial.identity, log), folder, log)
    first_effort, *later_efforts = trial.efforts
    ranked_rows = rounds.run_first_round(first_effort, top)
    for rows_max, effort in zip(LATER_ROUND_SIZES, later_efforts, strict=False):
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
    # The results of each row that has run, one per round, keyed by `_settings_key`.
    results: dict[str, list[TrialResult]] = field(default_factory=dict)

    def run_first_round(self, effort: int, rows_max: int) -> list[Row]:
        """Run up to `rows_max` candidates and rank them.

        The next candidate is the one with the best predictions, corrected by the results so far.
        The round ends early if no other candidate can be the best.
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
            runs_max = min(rows_max, len(measured_rows) + len(pool))
            self._run(row, effort, f"{len(measured_rows)} of {runs_max}")
        return self._rank_rows(measured_rows)

    def run_next_round(self, effort: int, rows: Sequence[Row]) -> list[Row]:
        """Run the candidates for longer, and rank them by the new results."""
        for number, row in enumerate(rows, 1):
            self._run(row, effort, f"{number} of the best {len(rows)}")
        return self._rank_rows(rows)

    def _is_runnable(self, row: Row) -> bool:
        """Return whether a row can run.

        A row that fits in memory can run. A row that was rejected because its figures violate a
        limit can run too, because the prediction may be wrong.
        """
        if row.feasibility in ACCEPTABLE:
            return True
        is_rejected_with_figures = row.feasibility == "rejected" and bool(row.figures)
        return is_rejected_with_figures and bool(self.trial.violated_limit(row.figures))

    def _run(self, row: Row, effort: int, progress: str) -> None:
        """Add the result of a row to `results`, from the journal or from a run."""
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
        """Return the rows whose last run succeeded, each with the result of this run."""
        rows = {_settings_key(row): row for row in self.plan.rows}
        last_results = [(rows[key], results[-1]) for key, results in self.results.items()]
        return [(row, result) for row, result in last_results if not result.failure]

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
        """Return whether the largest likely score of a row is below the best measured score.

        The largest likely score is the corrected prediction, plus the largest prediction error so
        far, plus the error of a single run. Return False if there are fewer than RESULTS_MIN
        results, or if no result satisfies the limits.
        """
        finished, score = self._finished_results(), self.trial.score
        valid_scores = [
            score(result.figures)
            for _, result in finished
            if not self.trial.violated_limit(result.figures)
        ]
        if len(finished) < RESULTS_MIN or not valid_scores:
            return False
        prediction_errors = [
            score(result.figures) - score(correct_figures(measured_row, factors))
            for measured_row, result in finished
        ]
        single_run_error = SINGLE_RUN_ERROR * max(abs(valid_score) for valid_score in valid_scores)
        score_margin = max(0.0, *prediction_errors) + single_run_error
        return score(correct_figures(row, factors)) + score_margin < max(valid_scores)

    # ------------------------------------------------------------------------------------- ranking

    def make_plan(self) -> Plan:
        valid_results = {
            _settings_key(row): result
            for row, result in self._finished_results()
            if not self.trial.violated_limit(result.figures)
        }
        # Only candidates that ran in the most rounds can be the best, because the runs of later
        # rounds are longer and therefore more accurate.
        rounds_max = max((len(self.results[key]) for key in valid_results), default=0)
        finalists = [key for key in valid_results if len(self.results[key]) == rounds_max]
        best_key = max(
            finalists, key=lambda key: self.trial.score(valid_results[key].figures), default=None
        )
        factors = self._correction_factors()
        rows = [
            self._measured_row(row, factors, is_best=_settings_key(row) == best_key)
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
        if row.measured:
            return 1
        return 2 if row.feasibility == "fits" else 3

    def _measured_row(self, row: Row, factors: Mapping[str, float], *, is_best: bool) -> Row:
        """Return the row with measured figures, or with corrected predictions if it did not run."""
        results = self.results.get(_settings_key(row), ())
        if not results:
            return self._corrected_row(row, factors)
        failure = next((result.failure for result in results if result.failure), "")
        if failure:
            return replace(row, feasibility="failed", reason=failure)
        figures = results[-1].figures
        scores = [self.trial.score(result.figures) for result in results]
        error = SINGLE_RUN_ERROR
        if len(scores) > 1:
            mean_score = abs(sum(scores) / len(scores)) or 1.0
            error = (max(scores) - min(scores)) / 2 / mean_score
        violation = self.trial.violated_limit(figures)
        feasibility: Feasibility = "rejected" if violation else "fits"
        return replace(
            row,
            feasibility="best" if is_best else feasibility,
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
        confidence = row.confidence
        if confidence is not None and factors:
            note = f"corrected by the errors of {len(self._finished_results())} measured candidates"
            confidence = replace(confidence, note=note)
        return replace(
            row,
            feasibility="rejected" if violation else feasibility,
            reason=violation or ("" if row.feasibility == "rejected" else row.reason),
            figures=figures,
            confidence=confidence,
        )

    def _advice(self, best: Row | None) -> list[str]:
        """Return lines on the prediction error, and advice if no candidate satisfies the limits."""
        axis = self.plan.y
        lines: list[str] = []
        ratios = [
            result.figures[axis.figure] / row.figures[axis.figure]
            for row, result in self._finished_results()
            if row.figures.get(axis.figure) and axis.figure in result.figures
        ]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            lines.append(
                f"{axis.label}, measured / predicted: median {median(ratios):.2f}, worst "
                f"{worst:.2f}, over {len(ratios)} candidates"
            )
        if best is None:
            lines.append(
                f"none of the {len(self.results)} measured candidates finished its run within all "
                "limits: relax a limit, or run more candidates (--measure)"
            )
        return lines


def correct_figures(row: Row, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the predictions of a row, multiplied by the correction factors."""
    return {name: value * factors.get(name, 1.0) for name, value in row.figures.items()}
