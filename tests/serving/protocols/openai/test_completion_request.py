"""Completion request bodies: JSON schemas pass through unchanged."""

import json
from typing import Any

import pytest

from gpt.errors import RequestError
from serving.frontend.json_body import parse_request
from serving.messages import Guide
from serving.protocols.openai.completion_request import CompletionRequest, build_asks


@pytest.mark.parametrize("schema", [{"type": "integer", "enum": [1, 2]}, True, None])
def test_json_schemas_pass_through_unchanged(schema: Any) -> None:
    for schema_or_text in (schema, None if schema is None else json.dumps(schema)):
        payload = json.dumps({"prompt": "a", "guided_json": schema_or_text}).encode()
        ask = build_asks(parse_request(payload, CompletionRequest), (), 1)[0]
        assert ask.guide == (None if schema is None else Guide("json", json.dumps(schema)))


SCHEMA = {"properties": {"a": {"type": "integer"}}}
CLOSED_SCHEMA = {**SCHEMA, "additionalProperties": False}


def read_guide(**fields: Any) -> Guide | None:
    payload = json.dumps({"prompt": "a", **fields}).encode()
    return build_asks(parse_request(payload, CompletionRequest), (), 1)[0].guide


@pytest.mark.parametrize(
    ("response_format", "guide"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Guide("json", '{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            Guide("json", json.dumps(SCHEMA)),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
            Guide("json", json.dumps(CLOSED_SCHEMA)),
        ),
        # The forms of TGI.
        ({"type": "json", "value": SCHEMA}, Guide("json", json.dumps(SCHEMA))),
        ({"type": "json_object", "value": SCHEMA}, Guide("json", json.dumps(SCHEMA))),
        ({"type": "json", "value": json.dumps(SCHEMA)}, Guide("json", json.dumps(SCHEMA))),
        (
            {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA, "strict": True}},
            Guide("json", json.dumps(CLOSED_SCHEMA)),
        ),
        ({"type": "regex", "value": "a+"}, Guide("regex", "a+")),
    ],
    ids=str,
)
def test_response_formats_of_openai_and_tgi(response_format: Any, guide: Guide | None) -> None:
    assert read_guide(response_format=response_format) == guide


def test_structured_outputs_can_be_any_object() -> None:
    outputs = {"json_object": True, "regex": None}
    assert read_guide(structured_outputs=outputs) == Guide("json", '{"type": "object"}')


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "json_schema"}, "json_schema without json_schema.schema"),
        ({"type": "json_schema", "json_schema": {}}, "without json_schema.schema"),
        ({"type": "json"}, "type json without value"),
        ({"type": "regex"}, "type regex without value"),
        ({"type": "regex", "value": {}}, "not a text"),
        ({"type": "json_schema", "value": {"schema": {}, "scheme": 1}}, "unknown field `scheme`"),
        ({"type": "json", "value": {}, "json_schema": {"schema": {}}}, "only one of them"),
        (
            {"type": "json_schema", "json_schema": {"schema": "{", "strict": True}},
            "the schema is no JSON",
        ),
    ],
    ids=str,
)
def test_incomplete_response_formats_are_refused(response_format: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_guide(response_format=response_format)
    assert caught.value.field == "response_format"
