"""Test suites: parameters of a test for the slow suite and for the soak suite.

The slow suite must end within half an hour on two cores, so some of its tests run a part of their
cases. The soak suite runs all of them.
"""

from collections.abc import Sequence
from typing import Any

import pytest


def by_suite(slow: object, soak: object) -> list[Any]:
    """Return a value for each suite, such as a number of random cases."""
    return [
        pytest.param(slow, marks=pytest.mark.slow, id="slow"),
        pytest.param(soak, marks=pytest.mark.soak, id="soak"),
    ]


def cases_by_suite(slow: Sequence[object], soak: Sequence[object]) -> list[Any]:
    """Return the cases of the slow suite, and those that only the soak suite has."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for cases, mark in ((slow, pytest.mark.slow), (soak, pytest.mark.soak))
        for case in cases
    ]
