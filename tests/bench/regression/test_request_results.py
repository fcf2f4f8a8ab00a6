"""Comparison of answers: repeated requests are equal if both checkouts have a common answer."""

import json

from bench.regression.checkout_pair import compare
from bench.regression.request_results import common_answers


def encode(*answers: str) -> bytes:
    return json.dumps(answers).encode()


def test_repeated_requests_with_a_common_answer_are_equal() -> None:
    this = {"a": encode("1", "2"), "b": encode("1"), "c": encode("1", "3")}
    other = {"a": encode("2", "3"), "b": encode("1"), "c": encode("2", "4")}
    rows = compare("requests", *common_answers(this, other))
    assert [(row.name, row.equal) for row in rows] == [("a", True), ("b", True), ("c", False)]
