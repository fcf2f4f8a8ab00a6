"""JSON bodies: bounds that hold before a body is parsed.

The parts of a body are counted without parsing it, and compared with a parser's count.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.frontend.json_body import (
    JSON_PARTS_MAX,
    RequestBody,
    _count_json_parts,
    count_outside_strings,
    parse_object,
    parse_request,
)
from serving.request import RefusedError

TEXTS = st.text(st.sampled_from('"\\[]{},: aé\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


class Body(RequestBody):
    """A request with one field."""

    prompt: Any = None


def count_parts(value: Any) -> int:
    """Strings, lists and objects, by a parser."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count_parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(count_parts, value))
    return isinstance(value, str)


def count_separators(value: Any) -> int:
    """Commas between the members of lists and objects, by a parser."""
    if not isinstance(value, dict | list):
        return 0
    members = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(members) - 1) + sum(map(count_separators, members))


@settings(deadline=None, derandomize=True)
@given(VALUES, st.booleans())
def test_part_counts_equal_those_of_a_parser(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert _count_json_parts(text) == count_parts(value)
    assert count_outside_strings(text, ",") == count_separators(value)


@pytest.mark.parametrize("repeated", ["[1],", '"",', "{},", '"a",'])
def test_bodies_with_too_many_parts_are_refused_before_parsing(repeated: str) -> None:
    payload = ('{"prompt": [' + repeated * JSON_PARTS_MAX + "1]}").encode()
    for parse in (lambda: parse_request(payload, Body), lambda: parse_object(payload)):
        with pytest.raises(RefusedError, match="send several") as caught:
            parse()
        assert caught.value.reason == "BODY_TOO_LARGE"


def test_brackets_inside_strings_are_not_counted() -> None:
    text = '[{"\\' * JSON_PARTS_MAX
    assert parse_request(json.dumps({"prompt": text}).encode(), Body).prompt == text
