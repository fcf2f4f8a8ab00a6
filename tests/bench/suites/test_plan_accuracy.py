"""Plan accuracy and plan choice benchmarks, end to end on tiny models."""

import pytest

from bench.suites import plan_choice
from bench.suites.plan_accuracy import TARGETS, FigureSeries, PlanAccuracySizes, run_suite
from bench.suites.plan_choice import pick_verdicts
from planning.plan import Row
from tests.support.models import CLASSIC

TINY = PlanAccuracySizes(
    rounds=1,
    seconds=0.2,
    single_calls=2,
    streams=2,
    calls=4,
    prompt_tokens=(4, 8),
    new_tokens=(4, 8),
    predicts_from_reference=False,
)


def test_the_prediction_error_compares_medians() -> None:
    series = FigureSeries([9.0, 10.0, 100.0], [8.0, 1.0, 11.0])
    assert series.error == pytest.approx(0.25)
    assert "MISSED" in series.format_line("itl", 0.2) and "met" in series.format_line("itl", 0.3)
    assert "target" not in series.format_line("itl", None)


def test_chosen_settings_are_judged_against_the_grid() -> None:
    rows = [Row(name, "fits", {"batch": index}) for index, name in enumerate("abc")]
    measured = [{"tokens_per_s": speed, "itl_ms_p95": speed / 10} for speed in (100.0, 95.0, 90.0)]
    lines = list(pick_verdicts(rows, measured, 9.2, (rows[1], rows[2])))
    assert "95.0 % of the best of 3" in lines[0] and lines[0].endswith("met")
    assert "9.0 ms" in lines[1] and lines[1].endswith("met")
    lines = list(pick_verdicts(rows, measured, 9.2, (rows[2], rows[0])))
    assert lines[0].endswith("MISSED") and lines[1].endswith("MISSED")


@pytest.mark.soak
def test_the_plan_choice_suite_measures_the_grid_and_the_chosen_settings() -> None:
    sizes = plan_choice.PlanChoiceSizes(1, 0.2, 1, 2, (1, 2), (8.0, 12.0), (6.0, 8.0))
    lines = list(plan_choice.run_suite(CLASSIC, sizes))
    assert "chosen for throughput" in lines[-2] and "chosen for ITL" in lines[-1]
    assert sum(line.startswith("batch") for line in lines) == 6


@pytest.mark.slow
def test_the_plan_accuracy_suite_predicts_and_measures_a_server() -> None:
    lines = list(run_suite(("tiny",), TINY, {"tiny": CLASSIC}))
    judged = [line for line in lines if "target" in line]
    assert len(judged) == len(TARGETS)
    assert all("predicted" in line and "measured" in line for line in judged)
