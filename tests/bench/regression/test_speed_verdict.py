"""Speed verdict: medians within three per cent are equal, and a noisy row is not counted."""

import pytest

from bench.regression.speed_verdict import UNSETTLED, Samples, SpeedRow, judge

SPEED = SpeedRow("x/speed", "a speed", "tokens/s")
COST = SpeedRow("x/cost", "a cost", "ms")
OTHER = [100.0, 101.0, 99.0, 100.0, 140.0, 100.0, 100.0]  # One outlier does not change the median.


@pytest.mark.parametrize(
    ("this", "speed", "cost"),
    [(102.5, "equal", "equal"), (104.0, "faster", "SLOWER"), (96.0, "SLOWER", "faster")],
)
def test_medians_within_three_per_cent_are_equal(this: float, speed: str, cost: str) -> None:
    samples = Samples(OTHER, [this] * 7, OTHER)
    assert judge(SPEED, samples).verdict == speed
    assert judge(COST, samples).verdict == cost
    assert judge(SPEED, samples).failed == (speed == "SLOWER")


def test_a_row_whose_two_runs_of_the_other_checkout_differ_is_unsettled() -> None:
    noisy = judge(SPEED, Samples([100.0] * 7, [50.0] * 7, [106.0] * 7))
    assert noisy.verdict == "unsettled" and not noisy.failed
    assert UNSETTLED in str(noisy)
    assert judge(SPEED, Samples([100.0] * 7, [50.0] * 7, [104.0] * 7)).verdict == "SLOWER"
