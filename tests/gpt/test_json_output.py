"""JSON output: numbers that are not finite become null, and everything else stays."""

import json
import math

import pytest

from gpt.json_output import nonfinite_to_none


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_null(number: float) -> None:
    nested = {"a": [1.5, number], "b": {"c": (number, "x")}, "d": number}
    text = json.dumps(nonfinite_to_none(nested), allow_nan=False)
    assert text == '{"a": [1.5, null], "b": {"c": [null, "x"]}, "d": null}'


@pytest.mark.parametrize("value", [0.0, -1e300, 7, 10**400, True, None, "nan", [], {}])
def test_other_values_stay(value: object) -> None:
    assert nonfinite_to_none(value) == value and type(nonfinite_to_none(value)) is type(value)
