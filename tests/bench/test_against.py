"""`python -m bench --against`: order of measurements, failures, and usage errors."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.against import measure_rounds
from bench.harness.checkouts import Checkout, CheckoutError
from bench.regression.speed_measurements import BenchInputs, MeasurementGroup
from bench.regression.speed_verdict import Samples, SpeedRow, judge

SPEED = SpeedRow("x/speed", "a speed", "tokens/s")


def two_checkouts(tmp_path: Path) -> tuple[Checkout, Checkout]:
    return Checkout("this", tmp_path / "this"), Checkout("other", tmp_path / "other")


def test_a_round_measures_this_checkout_between_two_runs_of_the_other(tmp_path: Path) -> None:
    this, other = two_checkouts(tmp_path)
    order: list[str] = []

    def measure(checkout: Checkout, inputs: BenchInputs) -> dict[str, float]:
        order.append(checkout.name)
        return {"x/speed": float(len(order))}

    lines: list[str] = []
    group = MeasurementGroup("x", "", measure, (SPEED,))
    samples = measure_rounds([group], this, other, BenchInputs(tmp_path), 2, lines.append)
    assert order == ["other", "this", "other"] * 2
    assert samples["x/speed"] == Samples([1.0, 4.0], [2.0, 5.0], [3.0, 6.0])
    assert len(lines) == 6 and "round 2 of 2" in lines[-1]


@pytest.mark.parametrize("failing", ["this", "other"])
def test_only_a_failure_of_this_checkout_makes_the_row_fail(tmp_path: Path, failing: str) -> None:
    this, other = two_checkouts(tmp_path)

    def measure(checkout: Checkout, inputs: BenchInputs) -> dict[str, float]:
        if checkout.name == failing:
            raise CheckoutError("the process ended")
        return {"x/speed": 1.0}

    group = MeasurementGroup("x", "", measure, (SPEED,))
    samples = measure_rounds([group], this, other, BenchInputs(tmp_path), 3, lambda line: None)
    row = judge(SPEED, samples["x/speed"])
    assert row.verdict == "not run" and "the process ended" in str(row)
    assert row.failed == (failing == "this")


USAGE_ERRORS = (
    (["--against", ".", "--only", "planner"], "--against measures"),
    (["--json", "x"], "--json requires --against"),
    (["--against", ".", "--rounds", "0"], "--rounds must be at least 1"),
)


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS)
def test_usage_errors_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_that_is_not_a_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--against", str(tmp_path)]) == 1
    assert "has no preamble.py" in capsys.readouterr().err
