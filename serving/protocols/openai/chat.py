"""OpenAI chat completions: request fields, conversion of messages to a prompt, and choices.

`completion_request` has the fields that chats share with plain completions. The chat template comes
from the model or the operator, never from a request. The models generate no tool calls, but
messages may contain earlier tool calls as part of the conversation.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from gpt.errors import RequestError
from serving.engine.stream import DEADLINE_MESSAGE, Stream
from serving.frontend.call import Call
from serving.messages import TokenScore
from serving.protocols.openai.completion_request import (
    COMPLETIONS_PATH,
    FIELD_NAMES,
    JSON_NULL,
    JSON_PARTS_MAX,
    BaseCompletionRequest,
    RequestPart,
    ask_fields,
    drop_none,
)
from serving.protocols.openai.responses import (
    FINISH_REASONS,
    LOGPROB_MIN,
    Choice,
    CompletionFormat,
    JsonObject,
    format_token,
)
from serving.request import AnswerSpec, Ask, DeadlinePassedError, Piece
from serving.service.service import Service


class ContentPart(msgspec.Struct):
    """A part of a message's content.

    Unknown fields are accepted, because `_content_text` refuses the parts that are not text (such
    as images) with an error that names their `type`.
    """

    type: str
    text: str | None = None


class FunctionCall(RequestPart):
    """The name and the JSON arguments of a called function."""

    name: str
    arguments: str = "{}"


class ToolCall(RequestPart):
    """A tool call of an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(RequestPart):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None  # Ignored, as by OpenAI.
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # OpenAI's client sends an earlier answer back with these fields. They are ignored, because this
    # server's answers leave them empty.
    refusal: str | None = None
    annotations: list[msgspec.Raw] | None = None
    audio: None = None
    function_call: None = None


class ChatCompletionRequest(BaseCompletionRequest):
    """A request for the next message of a chat."""

    FIELD_HINTS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "echo", "suffix", "inputs"), f"use {COMPLETIONS_PATH}"),
        "prompt_logprobs": f"chats do not return the prompt; use {COMPLETIONS_PATH}",
        "truncate_prompt_tokens": "a chat cannot be truncated; remove messages instead",
        "chat_template": "the template comes from the model or the operator, not from requests",
        "functions": "the models cannot call functions: remove it, or send tools with tool_choice "
        "'none' (such tools are ignored)",
        "function_call": "the models cannot call functions: remove it",
    }

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = JSON_NULL
    parallel_tool_calls: bool | None = None  # This field and the next three are ignored.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None

    @property
    def field_names(self) -> Mapping[str, str]:
        uses_max_tokens = self.max_completion_tokens is None
        return {
            **{
                name: "messages" if openai_field == "prompt" else openai_field
                for name, openai_field in FIELD_NAMES.items()
            },
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "max_new_tokens": "max_tokens" if uses_max_tokens else "max_completion_tokens",
        }

    def check(self) -> None:
        if not self.messages:
            raise RequestError("messages is unset or empty; send at least one message", "messages")
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise RequestError(
                f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}; they mean "
                "the same: set only one of them",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        tool_choice = bytes(self.tool_choice).strip()
        # Without tools, "auto" has the effect of "none", so it is accepted.
        if tool_choice != b'"none"' and (self.tools or tool_choice not in (b"null", b'"auto"')):
            raise RequestError(
                "this server's models cannot call tools; remove tools, or set tool_choice to "
                "'none'",
                "tools" if self.tools else "tool_choice",
            )
        if self.store:
            raise RequestError("this server stores no completions; remove store", "store")
        super().check()


async def build_ask(
    body: ChatCompletionRequest, template_messages: list[JsonObject], call: Call
) -> Ask:
    """Build the `Ask` of a chat. `template_messages`: the input of the chat template."""
    service = call.service
    try:
        with service.admission_slot():
            async with asyncio.timeout_at(call.deadline):
                ids = await service.chat.encode(template_messages)
    except TimeoutError:
        raise DeadlinePassedError(DEADLINE_MESSAGE) from None
    adapters = call.requested_adapters(body.model)
    fields = ask_fields(body)
    if body.max_completion_tokens is not None:
        fields["max_new_tokens"] = body.max_completion_tokens
    tokens_left = service.admission.tokens_max - len(ids)
    # By default, a completion may fill the rest of the context. For a request with an adapter,
    # max_new_tokens stays unset here, and the admission applies the adapter's default.
    if "max_new_tokens" not in fields and not adapters and tokens_left > 0:
        fields["max_new_tokens"] = tokens_left
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return Ask(ids, adapters=adapters, **fields)


def to_template_messages(body: ChatCompletionRequest) -> list[JsonObject]:
    """Convert the messages to the input of a chat template; unset fields are omitted."""
    messages = body.messages or []
    arguments = [
        call.function.arguments for message in messages for call in message.tool_calls or ()
    ]
    if sum(text.count(delimiter) for text in arguments for delimiter in ",[{") > JSON_PARTS_MAX:
        raise RequestError(
            f"the arguments of the tool calls have more than {JSON_PARTS_MAX} JSON values; remove "
            "messages",
            "messages",
        )
    return [
        _template_message(f"messages[{index}]", message) for index, message in enumerate(messages)
    ]


def _template_message(path: str, message: ChatMessage) -> JsonObject:
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{path} has tool_calls and role {message.role}; the role must be assistant", "messages"
        )
    if message.tool_call_id is not None and message.role != "tool":
        raise RequestError(
            f"{path} has a tool_call_id and role {message.role}; the role must be tool", "messages"
        )
    tool_calls = [_template_tool_call(tool_call) for tool_call in message.tool_calls or ()]
    content = _content_text(f"{path}.content", message.content)
    if content is None and not tool_calls:
        raise RequestError(f"{path} has no content; send a text", "messages")
    # "developer" is OpenAI's newer name for "system"; chat templates support only "system".
    role = "system" if message.role == "developer" else message.role
    tool_fields = drop_none(tool_calls=tool_calls or None, tool_call_id=message.tool_call_id)
    return {"role": role, "content": content or "", **tool_fields}


def _content_text(path: str, content: str | list[ContentPart] | None) -> str | None:
    """Return the text of a message's content. Text parts are joined by newlines."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise RequestError(
                f"{path}[{index}] has type {part.type[:100]!a}; this server's models accept text "
                "only",
                "messages",
            )
        if part.text is None:
            raise RequestError(
                f"{path}[{index}] has type 'text', but no field 'text'; add the field", "messages"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _template_tool_call(tool_call: ToolCall) -> JsonObject:
    """Convert a tool call to the input of a template.

    Arguments that are the text of a JSON object become an object; other arguments stay a text.
    """
    arguments: Any = tool_call.function.arguments
    try:
        parsed_arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed_arguments = None
    if isinstance(parsed_arguments, dict):
        arguments = parsed_arguments
    function = {"name": tool_call.function.name, "arguments": arguments}
    return {**drop_none(id=tool_call.id), "type": "function", "function": function}


# ---------------------------------------------------------------------------------------- responses


class ChatChoice:
    """A choice of a chat completion in progress: converts each piece to a chunk with a delta."""

    def __init__(
        self, index: int, answer: AnswerSpec, body: ChatCompletionRequest, service: Service
    ) -> None:
        self.index = index
        self.answer = answer
        self.generated_tokens = self.cached_tokens = 0
        self._tokenizer = service.tokenizer
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._started = False

    def render(self, piece: Piece) -> JsonObject | None:
        """Return this choice's chunk for one piece; None if the piece adds nothing."""
        self.generated_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        role_field = {} if self._started else {"role": "assistant"}
        seed_field = {} if self._started else {"seed": self.answer.sampling.seed}
        self._started = True
        return {
            "index": self.index,
            "delta": {**role_field, "content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": None
            if piece.finish is None
            else FINISH_REASONS.get(piece.finish, "length"),
            **drop_none(stop_reason=piece.stop),
            **seed_field,
        }

    def _logprobs(self, piece: Piece) -> JsonObject | None:
        if self._top_logprobs is None:
            return None
        pairs = zip(piece.token_ids, piece.scores, strict=True)
        return {"content": [self._token_logprob(*pair) for pair in pairs], "refusal": None}

    def _token_logprob(self, token: int, score: TokenScore) -> JsonObject:
        alternatives = [
            self._token_json(top_token, logprob)
            for top_token, logprob in score.tops[: self._top_logprobs]
        ]
        return self._token_json(token, score.logprob) | {"top_logprobs": alternatives}

    def _token_json(self, token: int, logprob: float) -> JsonObject:
        token_bytes = self._tokenizer.token_bytes(token)
        return {
            "token": format_token(self._tokenizer, token),
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": None if token_bytes is None else list(token_bytes),
        }


def _build_choices(
    body: ChatCompletionRequest, streams: Sequence[Stream], service: Service
) -> list[list[Choice]]:
    (stream,) = streams
    answers = enumerate(stream.request.answers)
    return [[ChatChoice(index, answer, body, service) for index, answer in answers]]


def _merge_chunks(choice: JsonObject, chunk: JsonObject) -> JsonObject:
    content = choice["delta"]["content"] + chunk["delta"]["content"]
    merged = {**choice, **chunk, "delta": {**choice["delta"], "content": content}}
    if choice["logprobs"] is not None:
        logprobs = choice["logprobs"]["content"] + chunk["logprobs"]["content"]
        merged["logprobs"] = {"content": logprobs, "refusal": None}
    return merged


def _final_choice(choice: JsonObject) -> JsonObject:
    """Build the choice of a final response: the merged delta becomes the message."""
    fields = {name: value for name, value in choice.items() if name != "delta"}
    return {**fields, "message": {**choice["delta"], "refusal": None}}


CHAT_FORMAT = CompletionFormat(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    _build_choices,
    _merge_chunks,
    _final_choice,
)
