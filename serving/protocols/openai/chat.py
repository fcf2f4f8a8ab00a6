"""OpenAI chat completions: request fields, conversion of messages to a prompt, and choices.

`completion_request` has the fields that chats share with plain completions. The chat template comes
from the model or the operator, never from a request. `tool_calls` reads the tools of a request, and
`tool_call_parsing` finds the calls in an answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from gpt.errors import RequestError
from serving.admission.chat_prompt import ChatPromptOptions
from serving.engine.stream import DEADLINE_MESSAGE, Stream, answer_detokenizer
from serving.frontend.call import Call
from serving.frontend.json_body import JSON_NULL, JSON_PARTS_MAX, RequestPart
from serving.messages import TokenScore
from serving.protocols.openai.completion_request import (
    COMPLETIONS_PATH,
    FIELD_NAMES,
    BaseCompletionRequest,
    ask_fields,
    drop_none,
)
from serving.protocols.openai.responses import (
    FINISH_REASONS,
    LOGPROB_MIN,
    Choice,
    CompletionFormat,
    JsonObject,
    PromptTokenFields,
    TokenNotation,
)
from serving.protocols.openai.tool_call_chunks import ToolCallChunks, merge_deltas
from serving.protocols.openai.tool_call_parsing import MARKERS
from serving.protocols.openai.tool_calls import ToolChoice, read_tool_choice
from serving.protocols.openai.unsupported_fields import can_ignore_in_message
from serving.request import AnswerSpec, Ask, DeadlinePassedError, Piece
from serving.service.service import Service

# Types of content parts that have a text, and the fields with the text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ContentPart(msgspec.Struct):
    """A part of a message's content.

    Unknown fields are accepted, because `_content_text` refuses the parts that are not text (such
    as images) with an error that names their `type`.
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class ReplayedPart(RequestPart):
    """A part of an earlier answer, which clients send back with fields that have no effect."""

    @classmethod
    def has_no_effect(cls, name: str, value: Any) -> bool:
        return can_ignore_in_message(name, value)


class FunctionCall(ReplayedPart):
    """The name and the JSON arguments of a called function."""

    name: str
    arguments: str = "{}"


class ToolCall(ReplayedPart):
    """A tool call of an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(ReplayedPart):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None  # For the chat template, like the reasoning.
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # The reasoning of an earlier answer, under its newer and its older name.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None  # The content of an earlier answer that has no other content.
    # OpenAI's client sends these fields with null. Other values would change the conversation.
    audio: None = None
    function_call: None = None


class ChatCompletionRequest(BaseCompletionRequest, dict=True):
    """A request for the next message of a chat."""

    FIELD_HINTS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "suffix", "inputs"), f"use {COMPLETIONS_PATH}"),
        "truncate_prompt_tokens": "a chat cannot be truncated; remove messages instead",
        "chat_template": "the template comes from the model or the operator, not from requests",
        "functions": "use tools, which replaced it",
        "function_call": "use tool_choice, which replaced it",
    }

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = JSON_NULL
    parallel_tool_calls: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # Ignored.
    reasoning_effort: str | None = None  # A variable of the chat template.

    # vLLM's extensions.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Further variables of the chat template.

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

    @property
    def guide_field(self) -> str:
        choice = self.parsed_tool_choice
        return "tools" if choice and choice.mode != "auto" else super().guide_field

    @cached_property
    def parsed_tool_choice(self) -> ToolChoice | None:
        """The tools and the choice among them; None: the answer calls no tool."""
        return read_tool_choice(self.tools, self.tool_choice, self.parallel_tool_calls)

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
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        _ = self.parsed_tool_choice  # Raises an error if it is invalid.
        check_prompt_fields(self)
        super().check()


class ChatPromptFields(Protocol):
    """The fields of a request that set the options of a chat's prompt. None: unset."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    parse_special_tokens: bool | None


def check_prompt_fields(body: ChatPromptFields) -> None:
    """Raise a RequestError if two fields contradict each other."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true; set only one of them",
            "continue_final_message",
        )


def prompt_options(
    body: ChatPromptFields, reasoning_effort: str | None = None
) -> ChatPromptOptions:
    """Return the options of the chat template that the fields set."""
    return ChatPromptOptions(
        False if body.continue_final_message else body.add_generation_prompt,
        bool(body.continue_final_message),
        reasoning_effort,
        body.chat_template_kwargs or {},
        parse_special_tokens=bool(body.parse_special_tokens),
    )


async def build_ask(
    body: ChatCompletionRequest, template_messages: list[JsonObject], call: Call
) -> Ask:
    """Build the `Ask` of a chat. `template_messages`: the input of the chat template."""
    service = call.service
    tool_choice = body.parsed_tool_choice
    ids = await encode_messages(
        template_messages,
        call,
        prompt_options(body, body.reasoning_effort),
        tool_choice.declarations if tool_choice else None,
        add_special_tokens=bool(body.add_special_tokens),
    )
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
    if tool_choice:
        fields |= await _tool_fields(tool_choice, fields, service)
    return Ask(ids, adapters=adapters, **fields)


async def _tool_fields(
    tool_choice: ToolChoice, fields: Mapping[str, Any], service: Service
) -> dict[str, Any]:
    """Return the `Ask` fields of tools. `fields`: the other fields of the `Ask`."""
    controls = service.tokenizer.control_tokens
    markers = {text: controls[text].id for text in MARKERS if text in controls}
    guide = tool_choice.guide()
    if guide is None and "guide" in fields:
        raise RequestError(
            "tools and a format of the answer are both set, and tool_choice is auto; set "
            "tool_choice to 'required' or 'none'",
            "tool_choice",
        )
    if guide is None and service.tokenizer.stop_ids and not fields.get("ignore_ends"):
        guide = await asyncio.to_thread(
            tool_choice.optional_guide,
            service.chat.call_format,
            {text: token for text, token in markers.items() if controls[text].special},
        )
    return {"text_token_ids": tuple(markers.values()), **drop_none(guide=guide)}


async def encode_messages(
    template_messages: list[JsonObject],
    call: Call,
    options: ChatPromptOptions,
    tools: list[JsonObject] | None = None,
    *,
    add_special_tokens: bool,
) -> tuple[int, ...]:
    """Return the ids of a chat's prompt.

    `add_special_tokens`: add the tokenizer's BOS and EOS tokens to what the template renders.
    """
    service = call.service
    prompt_tokenizer = service.admission.prompt_tokenizer
    prompt_tokenizer.check_parsing(options.parse_special_tokens)
    try:
        with service.admission_slot():
            async with asyncio.timeout_at(call.deadline):
                ids = await service.chat.encode(template_messages, options, tools)
    except TimeoutError:
        raise DeadlinePassedError(DEADLINE_MESSAGE) from None
    return prompt_tokenizer.add_special_tokens(ids).ids if add_special_tokens else ids


def to_template_messages(messages: Sequence[ChatMessage]) -> list[JsonObject]:
    """Convert the messages to the input of a chat template; unset fields are omitted."""
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
    # An earlier answer may have no content: the model refused, called tools, or only reasoned.
    if content is None and message.role != "assistant":
        raise RequestError(f"{path} has no content; send a text", "messages")
    # "developer" is OpenAI's newer name for "system"; chat templates support only "system".
    role = "system" if message.role == "developer" else message.role
    optional_fields = drop_none(
        name=message.name,
        tool_calls=tool_calls or None,
        tool_call_id=message.tool_call_id,
        **_reasoning_fields(path, message),
    )
    return {"role": role, "content": content or message.refusal or "", **optional_fields}


def _reasoning_fields(path: str, message: ChatMessage) -> dict[str, str | None]:
    """Return the reasoning of an earlier answer under the names that chat templates read."""
    reasoning = message.reasoning or message.reasoning_content or None
    if reasoning is not None and message.role != "assistant":
        raise RequestError(
            f"{path} has a reasoning and role {message.role}; the role must be assistant",
            "messages",
        )
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _content_text(path: str, content: str | list[ContentPart] | None) -> str | None:
    """Return the text of a message's content. Text parts are joined by newlines."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise RequestError(
                f"{path}[{index}] has type {part.type[:100]!a}; this server's models accept text "
                "only",
                "messages",
            )
        field = TEXT_PARTS[part.type]
        text = part.refusal if field == "refusal" else part.text
        if text is None:
            raise RequestError(
                f"{path}[{index}] has type {part.type!r}, but no field {field!r}; add the field",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _template_tool_call(tool_call: ToolCall) -> JsonObject:
    """Convert a tool call to the input of a template.

    Arguments that are the text of a JSON object become an object; other arguments stay a text.
    """
    arguments: Any = tool_call.function.arguments or "{}"
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
        self.generated_tokens, self.cached_tokens = len(answer.resumed_tokens), 0
        self._tokenizer = service.tokenizer
        self._token_notation = TokenNotation(
            service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._prompt_tokens = PromptTokenFields(answer, body, service)
        self._return_token_ids = bool(body.return_token_ids)
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._started = False
        self._calls: ToolCallChunks | None = None
        tool_choice = body.parsed_tool_choice
        if tool_choice is not None:
            self._calls = ToolCallChunks(tool_choice, service.chat.call_format)
            if answer.resumed_tokens:  # The client has the deltas of their text.
                detokenizer = answer_detokenizer(service.tokenizer, answer)
                text = "".join(map(detokenizer.push, answer.resumed_tokens))
                self._calls.render(text, is_last=False)

    def render(self, piece: Piece) -> JsonObject | None:
        """Return this choice's chunk for one piece; None if the piece adds nothing."""
        self.generated_tokens += len(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        self._prompt_tokens.scores += piece.prompt_scores
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        delta: JsonObject = {"content": piece.text}
        if self._calls is not None:
            delta = self._calls.render(piece.text, is_last=piece.finish is not None)
            if not (delta or piece.finish or self._top_logprobs is not None):
                return None
        role_field: JsonObject = {}
        first_fields: JsonObject = {}
        if not self._started:
            role_field = {"role": "assistant"}
            first_fields = {"seed": self.answer.sampling.seed, **self._prompt_tokens.to_json()}
        self._started = True
        return {
            "index": self.index,
            "delta": {**role_field, **delta},
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish_reason(piece),
            **drop_none(
                stop_reason=piece.stop,
                token_ids=piece.token_ids if self._return_token_ids else None,
            ),
            **first_fields,
        }

    def _finish_reason(self, piece: Piece) -> str | None:
        if piece.finish is None:
            return None
        if piece.finish == "stop" and self._calls is not None and self._calls.has_calls:
            return "tool_calls"
        return FINISH_REASONS.get(piece.finish, "length")

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
            "token": self._token_notation.format(token),
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
    merged = {**choice, **chunk, "delta": merge_deltas(choice["delta"], chunk["delta"])}
    if choice["logprobs"] is not None:
        logprobs = choice["logprobs"]["content"] + chunk["logprobs"]["content"]
        merged["logprobs"] = {"content": logprobs, "refusal": None}
    if "token_ids" in choice:
        merged["token_ids"] = choice["token_ids"] + chunk["token_ids"]
    return merged


def _final_choice(choice: JsonObject) -> JsonObject:
    """Build the choice of a final response: the merged delta becomes the message."""
    fields = {name: value for name, value in choice.items() if name != "delta"}
    message = {"role": "assistant", "content": None, **choice["delta"]}
    if "tool_calls" in message:
        # The index is a field of stream events only.
        message["tool_calls"] = [
            {name: field for name, field in call.items() if name != "index"}
            for call in message["tool_calls"]
        ]
    elif message["content"] is None:
        message["content"] = ""
    return {**fields, "message": {**message, "refusal": None}}


CHAT_FORMAT = CompletionFormat(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    _build_choices,
    _merge_chunks,
    _final_choice,
    response_fields=("prompt_token_ids", "prompt_logprobs"),
)
