"""Fields of other servers: accepted with neutral values, else refused with a reason."""

import json
import re
from typing import Any

import pytest

from gpt.errors import RequestError
from serving.frontend.json_body import parse_request
from serving.protocols.openai.chat import ChatCompletionRequest
from serving.protocols.openai.completion_request import (
    BaseCompletionRequest,
    CompletionRequest,
)
from serving.protocols.openai.unsupported_fields import REPLAYED_FIELDS, UNSUPPORTED_FIELDS
from tests.support.servers import ROOT

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
# What vllm-router and sglang-router add to each request.
ROUTER: dict[str, Any] = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
CHAT_ROUTER: dict[str, Any] = {
    **ROUTER,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "continue_final_message": False,
}
# The defaults of vLLM, as a router sends them that serializes all fields of a request.
VLLM: dict[str, Any] = {
    "model": "preamble",
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "n": 1,
    "presence_penalty": 0.0,
    "response_format": None,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "user": None,
    "use_beam_search": False,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "priority": 0,
    "request_id": "0f",
    "logits_processors": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "prompt_embeds": None,
}
VLLM_CHAT: dict[str, Any] = {
    **VLLM,
    "logprobs": False,
    "top_logprobs": 0,
    "max_completion_tokens": None,
    "tools": None,
    "tool_choice": "none",
    "reasoning_effort": None,
    "thinking_token_budget": None,
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
}
OPENAI_CHAT: dict[str, Any] = {
    "audio": None,
    "modalities": ["text"],
    "metadata": {"a": None},
    "prediction": None,
    "service_tier": "auto",
    "store": False,
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "none",
    "web_search_options": None,
}


def parse(body: dict[str, Any], request_type: type[BaseCompletionRequest]) -> BaseCompletionRequest:
    return parse_request(json.dumps(body).encode(), request_type)


@pytest.mark.parametrize(
    ("body", "request_type"),
    [
        ({**PROMPT, **ROUTER}, CompletionRequest),
        ({**PROMPT, **VLLM, "echo": False}, CompletionRequest),
        ({**PROMPT, **CHAT_ROUTER, "nvext": {}, "detokenize": True}, CompletionRequest),
        ({**CHAT, **CHAT_ROUTER}, ChatCompletionRequest),
        ({**CHAT, **VLLM_CHAT}, ChatCompletionRequest),
        ({**CHAT, **OPENAI_CHAT}, ChatCompletionRequest),
    ],
    ids=["router", "vllm", "both", "chat router", "vllm chat", "openai chat"],
)
def test_bodies_of_routers_and_clients_are_accepted(
    body: dict[str, Any], request_type: type[BaseCompletionRequest]
) -> None:
    parse(body, request_type)


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatCompletionRequest])
def test_every_neutral_value_is_accepted_and_others_are_refused(
    request_type: type[BaseCompletionRequest],
) -> None:
    prompt = CHAT if request_type is ChatCompletionRequest else PROMPT
    for name, field in UNSUPPORTED_FIELDS.items():
        if name in request_type.__struct_fields__:
            continue
        for neutral_value in (None, *field.neutral_values):
            parse({**prompt, name: neutral_value}, request_type)
        with pytest.raises(RequestError, match=name) as refused:
            parse({**prompt, name: {"never": ["neutral"]}}, request_type)
        assert refused.value.field == name


def test_the_document_names_every_field_of_other_servers() -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "openai.md").read_text()))
    assert {*UNSUPPORTED_FIELDS, *REPLAYED_FIELDS} <= documented


# Assistant messages as clients send them back: OpenAI's SDK (also after `parse`), vLLM's answers,
# litellm's, and those of Mistral's client.
OPENAI_MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "content": "b",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REPLAYED_MESSAGES: dict[str, dict[str, Any]] = {
    "openai": OPENAI_MESSAGE,
    "parsed": {
        **OPENAI_MESSAGE,
        "parsed": {"a": 1},
        "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {}}}],
    },
    "vllm": {
        **OPENAI_MESSAGE,
        "tool_calls": [],
        "annotations": None,
        "reasoning": "c",
        "reasoning_content": "c",
    },
    "litellm": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": {"a": [1]}}],
        "function_call": None,
        "images": [],
        "thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": "b"}],
        "reasoning_content": None,
        "provider_specific_fields": {"refusal": None},
    },
    "mistral": {"role": "assistant", "content": "a", "prefix": False, "tool_calls": None},
    "annotated": {
        "role": "assistant",
        "content": [{"type": "text", "text": "a", "annotations": [], "cache_control": {}}],
        "annotations": [{"type": "url_citation", "url_citation": {"url": "a"}}],
        "id": "msg_1",
    },
}


@pytest.mark.parametrize("message", REPLAYED_MESSAGES.values(), ids=REPLAYED_MESSAGES)
def test_answers_are_accepted_as_messages(message: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "d"}]
    parse({"messages": messages}, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"images": [{"type": "image_url"}]}, "messages[0] has the unknown field 'images'"),
        ({"prefix": True}, "messages[0] has the unknown field 'prefix'"),
        ({"contents": "b"}, "messages[0] has the unknown field 'contents'"),
        (
            {"tool_calls": [{**CALL, "weight": 1}]},
            "messages[0].tool_calls[0] has the unknown field 'weight'",
        ),
    ],
)
def test_fields_of_messages_that_would_have_an_effect_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    message = {"role": "assistant", "content": "a", **fields}
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        parse({"messages": [message]}, ChatCompletionRequest)
    assert refused.value.field == "messages"


def test_null_is_absent_in_nested_objects() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache": None}]},
            {"role": "assistant", "content": "b", "reasoning_content": None, "x": None},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "other": None},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": None}},
        "unknown": None,
        "chat_template": None,
    }
    chat = parse(body, ChatCompletionRequest)
    assert isinstance(chat, ChatCompletionRequest)
    assert chat.messages is not None and chat.messages[1].content == "b"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"service_tier": "flex"}, 'service_tier can only be "auto" or "default" here: '),
        ({"num_draft_tokens": 4}, "'num_draft_tokens' is not a field of this endpoint; remove it"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"maxTokens": 1}, "did you mean 'max_tokens'"),
        ({"max_new_tokens": 1}, "use max_tokens"),
        ({"ignore_eos": False, "detokenize": 1}, "detokenize can only be true here"),
        ({"seed": 1, "echo": 0, "echoo": None}, "echo"),
        ({"tools": [{}]}, "it is a field of chats"),
    ],
)
def test_refusals_name_the_field_and_a_reason(field: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse({**PROMPT, **field}, CompletionRequest)
    assert message in str(refused.value)


def test_types_are_checked_after_fields_without_effect_are_removed() -> None:
    with pytest.raises(RequestError, match="max_tokens: Expected `int") as refused:
        parse({**PROMPT, **ROUTER, "max_tokens": "a", "unknown": None}, CompletionRequest)
    assert refused.value.field == "max_tokens"
