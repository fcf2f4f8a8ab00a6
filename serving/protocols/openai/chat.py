"""OpenAI's chats: what a client may say, the one prompt that its messages become, the answers.

Fields that other completions have too are in `completion_request`. The template that makes the
prompt is the model's, or the operator's, and never comes from a request. Tools are not for these
models: the calls of an earlier conversation are taken as part of it, but none are made.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from gpt.errors import RequestError
from serving.engine.stream import PASSED, Stream
from serving.frontend.call import Call
from serving.messages import Scored
from serving.protocols.openai.completion_request import (
    NAMES,
    NONE,
    PARTS_MAX,
    Common,
    Part,
    adapters_of,
    fields_of,
    said,
)
from serving.protocols.openai.responses import FINISH, LOGPROB_MIN, Choice, Record, Shape, spelled
from serving.request import Answer as Asked
from serving.request import Ask, DeadlinePassedError, Piece
from serving.service.service import Service

PLAIN = "/v1/completions"


class Content(msgspec.Struct):
    """A part of a message. Others than texts have fields of their own, and are refused by kind."""

    type: str
    text: str | None = None


class Function(Part):
    name: str
    arguments: str = "{}"


class ToolCall(Part):
    function: Function
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Content] | None = None
    name: str | None = None  # Ignored, as there.
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What OpenAI's client sends back of an answer. Only nothing can be in them here.
    refusal: str | None = None
    annotations: list[msgspec.Raw] | None = None
    audio: None = None
    function_call: None = None


class Body(Common):
    """A request for the next message of a chat."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("prompt", "echo", "suffix", "inputs"), f"it is of {PLAIN}"),
        "prompt_logprobs": f"the template's text is not told: ask {PLAIN}",
        "truncate_prompt_tokens": "half a chat is none: leave out messages instead",
        "chat_template": "templates come with the model or from the operator, not from requests",
        "functions": "give tools, with tool_choice none: no calls are made here",
        "function_call": "give tool_choice",
    }

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = NONE
    parallel_tool_calls: bool | None = None  # This one and the next say nothing of an answer.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None

    @property
    def names(self) -> Mapping[str, str]:
        plain = self.max_completion_tokens is None
        return {
            **{name: "messages" if other == "prompt" else other for name, other in NAMES.items()},
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "max_new_tokens": "max_tokens" if plain else "max_completion_tokens",
        }

    def check(self) -> None:
        if not self.messages:
            raise RequestError("messages is not set; give at least one", "messages")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; they are the "
                "same: give one of them",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs are for logprobs; set that to true", "top_logprobs")
        choice = bytes(self.tool_choice).strip()
        # Without tools there is nothing to choose, and "auto" asks for nothing.
        if choice != b'"none"' and (self.tools or choice not in (b"null", b'"auto"')):
            raise RequestError(
                "tools cannot be called by this server's models; leave out tools, or set "
                "tool_choice to 'none'",
                "tools" if self.tools else "tool_choice",
            )
        if self.store:
            raise RequestError("nothing is stored here; leave out store", "store")
        super().check()


async def ask_of(body: Body, records: list[Record], call: Call) -> Ask:
    """A chat is one prompt. `records`: its messages."""
    service = call.service
    try:
        with service.coming():
            async with asyncio.timeout_at(call.deadline):
                ids = await service.chat.ids(records)
    except TimeoutError:
        raise DeadlinePassedError(PASSED) from None
    adapters = adapters_of(body, service.base_names)
    given = fields_of(body)
    if body.max_completion_tokens is not None:
        given["max_new_tokens"] = body.max_completion_tokens
    room = service.admission.tokens_max - len(ids)
    if "max_new_tokens" not in given and not adapters and room > 0:
        given["max_new_tokens"] = room  # As long as it can be; an adapter knows how long.
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return Ask(ids, adapters=adapters, **given)


def records_of(body: Body) -> list[Record]:
    """Its messages as templates know them, where nothing is there that is not said."""
    messages = body.messages or []
    arguments = [call.function.arguments for one in messages for call in one.tool_calls or ()]
    if sum(text.count(sign) for text in arguments for sign in ",[{") > PARTS_MAX:
        raise RequestError(
            f"the arguments of tools have more than {PARTS_MAX} parts; leave out messages",
            "messages",
        )
    return [_record(f"messages[{place}]", one) for place, one in enumerate(messages)]


def _record(where: str, message: Message) -> Record:
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where} is of {message.role}; only an assistant calls tools", "messages"
        )
    if message.tool_call_id is not None and message.role != "tool":
        raise RequestError(
            f"{where} is of {message.role}; only a tool answers with a tool_call_id", "messages"
        )
    calls = [_call(one) for one in message.tool_calls or ()]
    content = _content(f"{where}.content", message.content)
    if content is None and not calls:
        raise RequestError(f"{where} has no content; give a text", "messages")
    # That one is OpenAI's newer word, which no template has.
    role = "system" if message.role == "developer" else message.role
    more = said(tool_calls=calls or None, tool_call_id=message.tool_call_id)
    return {"role": role, "content": content or "", **more}


def _content(where: str, content: str | list[Content] | None) -> str | None:
    """Parts of a text are lines of it."""
    if not isinstance(content, list):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type != "text" or part.text is None:
            kind = "text without a text" if part.type == "text" else part.type[:100]
            raise RequestError(
                f"{where}[{place}] is of type {kind!a}; this server's models read texts only",
                "messages",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: ToolCall) -> Record:
    """Templates take arguments as what they are, not as JSON in a text."""
    arguments: Any = call.function.arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {**said(id=call.id), "type": "function", "function": function}


# --------------------------------------------------------------------------------- what is answered


class ChatChoice:
    """One answer, told bit by bit."""

    def __init__(self, index: int, answer: Asked, body: Body, service: Service) -> None:
        self.index, self.answer = index, answer
        self.made = self.cached = 0
        self._tokenizer = service.tokenizer
        self._tops = (body.top_logprobs or 0) if body.logprobs else None
        self._begun = False

    def told(self, piece: Piece) -> Record | None:
        self.made += len(piece.token_ids)
        self.cached += piece.cached_tokens
        if not (piece.token_ids or piece.text or piece.finish):
            return None
        first = {} if self._begun else {"role": "assistant"}
        seed = {} if self._begun else {"seed": self.answer.sampling.seed}
        self._begun = True
        return {
            "index": self.index,
            "delta": {**first, "content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": None if piece.finish is None else FINISH.get(piece.finish, "length"),
            **said(stop_reason=piece.stop),
            **seed,
        }

    def _logprobs(self, piece: Piece) -> Record | None:
        if self._tops is None:
            return None
        pairs = zip(piece.token_ids, piece.scores, strict=True)
        return {"content": [self._scored(*pair) for pair in pairs], "refusal": None}

    def _scored(self, token: int, scored: Scored) -> Record:
        tops = [self._token(*top) for top in scored.tops[: self._tops]]
        return self._token(token, scored.logprob) | {"top_logprobs": tops}

    def _token(self, token: int, logprob: float) -> Record:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": spelled(self._tokenizer, token),
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": None if raw is None else list(raw),
        }


def _made(body: Body, streams: Sequence[Stream], service: Service) -> list[list[Choice]]:
    (stream,) = streams
    answers = enumerate(stream.request.answers)
    return [[ChatChoice(index, answer, body, service) for index, answer in answers]]


def _joined(told: Record, more: Record) -> Record:
    content = told["delta"]["content"] + more["delta"]["content"]
    joined = {**told, **more, "delta": {**told["delta"], "content": content}}
    if told["logprobs"] is not None:
        scored = told["logprobs"]["content"] + more["logprobs"]["content"]
        joined["logprobs"] = {"content": scored, "refusal": None}
    return joined


def _ended(told: Record) -> Record:
    """The whole message, in place of what was told of it bit by bit."""
    rest = {name: value for name, value in told.items() if name != "delta"}
    return {**rest, "message": {**told["delta"], "refusal": None}}


CHAT = Shape("chatcmpl", "chat.completion", "chat.completion.chunk", _made, _joined, _ended)
