"""Completion request bodies: JSON schemas pass through unchanged."""

import json
from typing import Any

import pytest

from serving.frontend.json_body import parse_request
from serving.messages import Guide
from serving.protocols.openai.completion_request import CompletionRequest, build_asks


@pytest.mark.parametrize("schema", [{"type": "integer", "enum": [1, 2]}, True, None])
def test_json_schemas_pass_through_unchanged(schema: Any) -> None:
    for schema_or_text in (schema, None if schema is None else json.dumps(schema)):
        payload = json.dumps({"prompt": "a", "guided_json": schema_or_text}).encode()
        ask = build_asks(parse_request(payload, CompletionRequest), (), 1)[0]
        assert ask.guide == (None if schema is None else Guide("json", json.dumps(schema)))
