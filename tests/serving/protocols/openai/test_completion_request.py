"""Bodies of completions: how much there is in a large one, and JSON that is handed on as it came.

What is in one is counted without reading it, so it is held against what a reader finds. Knows no
server.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.messages import Guide
from serving.protocols.openai.completion_request import PARTS_MAX, Body, _parts, asks_of, parsed
from serving.request import RefusedError

TEXTS = st.text(st.sampled_from('"\\[]{},: aé\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Strings, lists and objects, by a reader."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    return isinstance(value, str)


@settings(deadline=None, derandomize=True)
@given(VALUES, st.booleans())
def test_what_is_in_a_body_is_counted_as_a_reader_finds_it(value: Any, ascii_only: bool) -> None:
    assert _parts(json.dumps(value, ensure_ascii=ascii_only).encode()) == counted(value)


@pytest.mark.parametrize("many", ["[1],", '"",', "{},", '"a",'])
def test_a_body_of_too_many_parts_is_refused_before_it_is_read(many: str) -> None:
    data = '{"prompt": [' + many * PARTS_MAX + "1]}"
    with pytest.raises(RefusedError, match="send several") as refused:
        parsed(data.encode(), Body)
    assert refused.value.reason == "BODY_TOO_LARGE"


def test_what_looks_like_parts_inside_a_text_is_none() -> None:
    text = '[{"\\' * PARTS_MAX
    assert parsed(json.dumps({"prompt": text}).encode(), Body).prompt == text


@pytest.mark.parametrize("schema", [{"type": "integer", "enum": [1, 2]}, True, None])
def test_a_schema_is_handed_on_as_it_came(schema: Any) -> None:
    for said in (schema, None if schema is None else json.dumps(schema)):
        data = json.dumps({"prompt": "a", "guided_json": said}).encode()
        ask = asks_of(parsed(data, Body), ("m",), 1)[0]
        assert ask.guide == (None if schema is None else Guide("json", json.dumps(schema)))
