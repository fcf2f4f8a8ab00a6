"""OpenAI Responses API (/v1/responses): text in and text out, in one response or as events.

A request becomes a chat completion (`chat`), so that both endpoints have the same prompts and
completions. This module has the fields of the Responses API, and the format of its responses and
events. The server stores no responses: fields that refer to stored responses are refused.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Literal, get_args

import msgspec

from gpt.errors import RequestError
from serving.frontend.call import CallFailure
from serving.frontend.field_names import translate_message
from serving.frontend.http_transport import error_text
from serving.frontend.json_body import JSON_NULL, RequestBody, RequestPart
from serving.protocols.openai.chat import ChatCompletionRequest, ChatMessage, ContentPart
from serving.protocols.openai.completion_request import (
    CHAT_COMPLETIONS_PATH,
    TEMPERATURE_DEFAULT,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
)
from serving.protocols.openai.responses import JsonObject
from serving.protocols.openai.streaming import CompletionRun
from serving.request import RefusedError

RESPONSES_PATH = "/v1/responses"
# Value of `include` that requests log-probabilities.
LOGPROBS_INCLUDE = "message.output_text.logprobs"
# The names of fields that have another name in a chat completion request or in an `Ask`.
FIELD_NAMES = {
    "messages": "input",
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), "max_output_tokens"),
    "response_format": "text.format",
}
# Fields with the same name and meaning in chat completion requests.
CHAT_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "frequency_penalty",
    "ignore_eos",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "stop",
    "top_k",
)
Role = Literal["user", "assistant", "system", "developer"]
ROLES: tuple[Role, ...] = get_args(Role)


class InputItem(msgspec.Struct):
    """An item of the input: a message.

    Unknown fields are accepted, because clients send items of earlier responses back, with fields
    that need no processing (such as `id` and `status`).
    """

    type: str = "message"
    role: Role | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(RequestPart):
    """The format of the output text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = JSON_NULL
    strict: bool | None = None


class TextOptions(RequestPart):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # Ignored.


class Reasoning(RequestPart):
    """The field `reasoning`. The models have no reasoning effort."""

    effort: str | None = None
    summary: str | None = None  # This field and the next are ignored: there is nothing to sum up.
    generate_summary: str | None = None


class ResponsesRequest(RequestBody):
    """A request for a response. None (JSON null) means unset."""

    FIELD_HINTS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_output_tokens"),
        "messages": f"use input, or {CHAT_COMPLETIONS_PATH}",
        "n": f"a response has one output; use {CHAT_COMPLETIONS_PATH}",
        "response_format": "use text.format",
    }

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    reasoning: Reasoning | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = JSON_NULL
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = JSON_NULL
    prompt: msgspec.Raw = JSON_NULL
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None  # This field and the fields up to `user` are ignored.
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    # vLLM's extensions.
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None

    def check(self) -> None:
        if not self.input:
            raise RequestError("input is unset or empty; send a text or messages", "input")
        for field in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, field) not in (None, JSON_NULL):
                raise RefusedError(
                    "UNSUPPORTED",
                    f"{field} is set, but this server stores no responses, conversations or "
                    "prompts; send the whole conversation in input",
                    field,
                )
        for field in ("store", "background"):
            if getattr(self, field):
                raise RefusedError(
                    "UNSUPPORTED",
                    f"{field} is true, but this server stores no responses; remove {field}",
                    field,
                )
        if self.truncation not in (None, "disabled"):
            raise RefusedError(
                "UNSUPPORTED",
                f"truncation is {self.truncation[:80]!a}; it can only be 'disabled' here",
                "truncation",
            )
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort not in (None, "none"):
            raise RefusedError(
                "UNSUPPORTED",
                f"reasoning.effort is {effort[:80]!a}; this server's models have no reasoning "
                "effort: remove reasoning",
                "reasoning",
            )


def to_chat_request(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat completion request that has the same completion."""
    assert body.input is not None, "check() refuses a request without input"
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    wants_logprobs = LOGPROBS_INCLUDE in (body.include or ()) or bool(body.top_logprobs)
    request = ChatCompletionRequest(
        messages=[_to_message(f"input[{index}]", item) for index, item in enumerate(items)],
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        **{name: getattr(body, name) for name in CHAT_FIELDS},
    )
    request.check()
    return request


def _to_message(path: str, item: InputItem) -> ChatMessage:
    if item.type != "message":
        raise RefusedError(
            "UNSUPPORTED",
            f"{path} has type {item.type[:80]!a}; only messages are supported here",
            "input",
        )
    if item.role is None:
        raise RequestError(f"{path} has no role; choose one of: {', '.join(ROLES)}", "input")
    return ChatMessage(role=item.role, content=item.content)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    text_format = text.format
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    json_schema = JsonSchema(
        name=text_format.name,
        description=text_format.description,
        schema=text_format.schema,
        strict=text_format.strict,
    )
    return ResponseFormat(type="json_schema", json_schema=json_schema)


def with_request_field(error: CallFailure, body: ResponsesRequest | None) -> CallFailure:
    """Return an error of the chat completion with the field names of this API."""
    if body is None or error.field is None:
        return error
    chat_name = ChatCompletionRequest().field_names.get(error.field, error.field)
    if error.field.partition(".")[0] == "guide":
        chat_name = "response_format"
    if chat_name == "max_tokens":
        chat_name = "max_completion_tokens"
    name = FIELD_NAMES.get(chat_name, chat_name)
    message = translate_message(str(error), error.field, name, FIELD_NAMES)
    return CallFailure(error.reason, message, name, error.retry_s)


# ---------------------------------------------------------------------------------------- responses


class ResponseRun:
    """The response of one call: an object with one output message, or the events of a stream."""

    def __init__(self, body: ResponsesRequest, run: CompletionRun) -> None:
        self._body = body
        self._run = run
        self._id = f"resp_{secrets.token_hex(24)}"
        self._item_id = f"msg_{secrets.token_hex(24)}"
        self._created_at = int(time.time())
        self._text = ""
        self._logprobs: list[JsonObject] = []
        self._finish_reason: str | None = None  # None: in progress.
        self._sequence_number = 0

    async def final_response(self) -> JsonObject:
        """Return the response object, for a request without `stream`."""
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        return self._response()

    async def events(self) -> AsyncGenerator[JsonObject, None]:
        """Yield the events, for a request with `stream`."""
        part_ids = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())
        yield self._event(
            "response.output_item.added", output_index=0, item={**self._item(), "content": []}
        )
        yield self._event("response.content_part.added", **part_ids, part=self._part())
        async with aclosing(self._deltas()) as deltas:
            async for text, logprobs in deltas:
                if text or logprobs:
                    yield self._event(
                        "response.output_text.delta", **part_ids, delta=text, logprobs=logprobs
                    )
        yield self._event(
            "response.output_text.done", **part_ids, text=self._text, logprobs=self._logprobs
        )
        yield self._event("response.content_part.done", **part_ids, part=self._part())
        yield self._event("response.output_item.done", output_index=0, item=self._item())
        yield self._event(f"response.{self._status}", response=self._response())

    def failed_event(self, error: CallFailure) -> JsonObject:
        """Return the event that ends a stream after an error."""
        code = "rate_limit_exceeded" if error.reason.status == 429 else "server_error"
        response = self._response() | {
            "status": "failed",
            "error": {"code": code, "message": error_text(error)},
        }
        return self._event("response.failed", response=response)

    async def _deltas(self) -> AsyncGenerator[tuple[str, list[JsonObject]], None]:
        """Yield the text and the log-probabilities of each chunk of the chat completion."""
        async with aclosing(self._run.pieces()) as pieces:
            async for choice, piece in pieces:
                chunk = choice.render(piece)
                if chunk is None:
                    continue
                text = chunk["delta"].get("content") or ""
                logprobs = (chunk["logprobs"] or {}).get("content") or []
                self._text += text
                self._logprobs += logprobs
                self._finish_reason = chunk["finish_reason"]
                yield text, logprobs

    @property
    def _status(self) -> str:
        if self._finish_reason is None:
            return "in_progress"
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _event(self, event_type: str, **fields: Any) -> JsonObject:
        event = {"type": event_type, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _part(self) -> JsonObject:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _item(self) -> JsonObject:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": [self._part()],
        }

    def _response(self) -> JsonObject:
        body, status = self._body, self._status
        is_started = status != "in_progress"
        text_format = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._run.model,
            "output": [self._item()] if is_started else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": TEMPERATURE_DEFAULT if body.temperature is None else body.temperature,
            "text": {"format": _format_fields(text_format), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_started else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> JsonObject:
        usage = self._run.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _format_fields(text_format: TextFormat | None) -> JsonObject:
    if text_format is None or text_format.type != "json_schema":
        return {"type": "text" if text_format is None else text_format.type}
    return {
        "type": "json_schema",
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.schema,
        "strict": text_format.strict is not False,
    }
