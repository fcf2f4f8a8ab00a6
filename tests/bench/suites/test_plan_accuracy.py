"""The bench of predictions runs from end to end, on models that are too small to tell anything."""

import pytest

from bench.suites import plan_choice
from bench.suites.plan_accuracy import TARGETS, Series, Sizes, lines
from bench.suites.plan_choice import judged
from planning.plan import Row
from tests.support.models import CLASSIC

TINY = Sizes(
    rounds=1, seconds=0.2, alone=2, streams=2, calls=4, prompt=(4, 8), new=(4, 8), plain=False
)


def test_a_figure_is_judged_by_its_medians() -> None:
    series = Series([9.0, 10.0, 100.0], [8.0, 1.0, 11.0])
    assert series.error == pytest.approx(0.25)
    assert "MISSED" in series.line("itl", 0.2) and "met" in series.line("itl", 0.3)
    assert "target" not in series.line("itl", None)


def test_picks_are_judged_against_all_that_was_measured() -> None:
    rows = [Row(name, "fits", {"batch": place}) for place, name in enumerate("abc")]
    found = [{"tokens_per_s": speed, "itl_ms_p95": speed / 10} for speed in (100.0, 95.0, 90.0)]
    told = list(judged(rows, found, 9.2, (rows[1], rows[2])))
    assert "95.0 % of the best of 3" in told[0] and told[0].endswith("met")
    assert "9.0 ms" in told[1] and told[1].endswith("met")
    told = list(judged(rows, found, 9.2, (rows[2], rows[0])))
    assert told[0].endswith("MISSED") and told[1].endswith("MISSED")


@pytest.mark.slow
def test_what_is_picked_is_measured_with_the_rest() -> None:
    sizes = plan_choice.Sizes(1, 0.2, 1, 2, (1, 2), (8.0, 12.0), (6.0, 8.0))
    told = list(plan_choice.lines(CLASSIC, sizes))
    assert "picked for throughput" in told[-2] and "picked for" in told[-1]
    assert sum(line.startswith("batch") for line in told) == 6


@pytest.mark.slow
def test_our_server_is_predicted_and_measured() -> None:
    told = list(lines(("tiny",), TINY, {"tiny": CLASSIC}))
    judged = [line for line in told if "target" in line]
    assert len(judged) == len(TARGETS)
    assert all("predicted" in line and "measured" in line for line in judged)
