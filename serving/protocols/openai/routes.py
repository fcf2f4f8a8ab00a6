"""OpenAI's completions, chats and `/v1/models`: the base is a model, and so is each adapter.

A body becomes an `Ask` for each prompt, pieces become choices: whole, or event by event. What a
field means is in `completion_request` and `chat`, what an answer looks like in `responses`
and there; what HTTP is, in `serving.frontend.http_transport`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from gpt.errors import RequestError
from serving.engine.stream import Stream
from serving.frontend.call import Call, Ended, Front
from serving.frontend.field_names import worded
from serving.frontend.http_transport import (
    GOODBYE_S,
    JSON,
    Answer,
    Events,
    Routes,
    answered,
    body_of,
    came,
    record_of,
)
from serving.protocols.openai import chat as openai_chat
from serving.protocols.openai.chat import CHAT, ask_of, records_of
from serving.protocols.openai.completion_request import (
    CHATS,
    LARGE_BYTES,
    Body,
    Common,
    Said,
    asks_of,
    guide_field,
    parsed,
)
from serving.protocols.openai.responses import TEXT, Choice, Shape
from serving.request import Ask, Piece, RefusedError

T = TypeVar("T")

WIRE = "openai"
TEXTS = "/v1/completions"


def routes(front: Front) -> Routes:
    """The endpoints, by path."""
    surface = _Surface(front)
    models: Mapping[str, Answer] = {"GET": surface.models, "HEAD": surface.models}
    return {
        TEXTS: {"POST": surface.completions},
        CHATS: {"POST": surface.chat},
        "/v1/models": models,
        "/v1/models/": models,
    }


class _Surface:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._front.call(
            WIRE, "models", _credential(request), came=came(request, "/v1/models")
        ) as call:
            call.caller.must("generate")
            base = call.service.name
            wanted = request.path.removeprefix("/v1/models").lstrip("/")
            found = {base: self._model(base, None, call.service.admission.context_tokens_max)}
            for resident, current in call.service.adapters.list(call.caller.tenant):
                names = (resident.name, resident.key) if current else (resident.key,)
                for name in names:
                    if name not in call.service.base_names:
                        found[name] = self._model(name, base, None)
            if not wanted:
                return answered({"object": "list", "data": list(found.values())})
            if wanted in call.service.base_names:  # By the name that is not listed, too.
                found[wanted] = {**found[base], "id": wanted}
            if wanted not in found:
                raise _unknown(wanted)
            return answered(found[wanted])

    def _model(self, name: str, parent: str | None, context: int | None) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "preamble"}
        return model | {"root": parent or name, "parent": parent, "max_model_len": context}

    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        async def asks(data: bytes, body: Body, call: Call) -> list[Ask]:
            service = call.service
            return await _apart(data, asks_of, body, service.base_names, service.config.prompts_max)

        return await self._answer(
            request, _Kind(TEXTS, "completions", "text_completion", Body, asks, TEXT)
        )

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        async def asks(data: bytes, body: openai_chat.Body, call: Call) -> list[Ask]:
            return [await ask_of(body, await _apart(data, records_of, body), call)]

        return await self._answer(
            request, _Kind(CHATS, "chat", "chat", openai_chat.Body, asks, CHAT)
        )

    async def _answer(self, request: web.BaseRequest, kind: "_Kind[Said]") -> web.StreamResponse:
        events, said = Events(request), None
        try:
            how = came(request, kind.path, {"gen_ai.operation.name": kind.operation})
            async with self._front.call(WIRE, kind.method, _credential(request), came=how) as call:
                call.caller.must("generate")
                data = await _data(request, call)
                said = await _apart(data, parsed, data, kind.body)
                if said.timeout is not None:
                    call.deadline = call.arrival + said.timeout
                asks = await kind.asks(data, said, call)
                run = await _Run.start(said, asks, call, kind.shape)
                if not said.stream:
                    return answered(await run.whole())
                async with aclosing(run.chunks()) as chunks:
                    async for chunk in chunks:
                        await call.send(events.send(chunk))
                await call.send(events.send(b"[DONE]"))
                return await events.end()
        except Ended as ended:
            named = _named(ended, said)
            if not events.begun:
                raise named from None
            return await _broken(events, named)


@dataclass(frozen=True)
class _Kind(Generic[Said]):
    """In what completions of prompts and chats differ."""

    path: str
    method: str
    operation: str  # As OpenTelemetry calls it.
    body: type[Said]
    asks: Callable[[bytes, Said, Call], Awaitable[list[Ask]]]
    shape: Shape


async def _broken(events: Events, ended: Ended) -> web.StreamResponse:
    """The end of a stream that had begun well."""
    if ended.reason.name != "SLOW_READER":
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await events.send(msgspec.json.encode(record_of(ended)))
                return await events.end()
    events.cut()
    return await events.end()


def _credential(request: web.BaseRequest) -> str | None:
    return request.headers.get("Authorization")


async def _data(request: web.BaseRequest, call: Call) -> bytes:
    config = call.service.config
    # A page that a browser is tricked into showing can send other kinds without being asked.
    if request.content_type != JSON or "Content-Type" not in request.headers:
        kind = ascii(request.headers.get("Content-Type", ""))[:100]
        raise RefusedError("UNREADABLE", f"the content type is {kind}; it must be {JSON}")
    return await body_of(request, config.message_bytes_max, config.slow_reader_s)


async def _apart(data: bytes, work: Callable[..., T], *given: object) -> T:
    """In a thread if the body is large: others' tokens are not to wait for it."""
    if len(data) <= LARGE_BYTES:
        return work(*given)
    return await asyncio.to_thread(work, *given)


def _unknown(model: str) -> RefusedError:
    shown = ascii(model)[:100]
    return RefusedError(
        "UNKNOWN_MODEL", f"there is no model {shown} here; GET /v1/models tells of all", "model"
    )


def _named(ended: Ended, body: Common | None) -> Ended:
    """With OpenAI's word for the field that is to blame, where that is another one than ours."""
    if body is None or ended.field is None:
        return ended  # What is wrong with a body is said in its own words.
    name = body.names.get(ended.field, ended.field)
    if ended.field.partition(".")[0] == "guide":
        name = guide_field(body)
    message = worded(str(ended), ended.field, name, body.names)
    return Ended(ended.reason, message, name, ended.retry_s)


# --------------------------------------------------------------------------------- what is answered


class _Run:
    """The streams of one call, one for each prompt, and the choices that they make."""

    def __init__(self, body: Common, call: Call, streams: Sequence[Stream], shape: Shape) -> None:
        self._call, self._streams = call, streams
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_each = bool(options and options.continuous_usage_stats)
        service = call.service
        self._choices, self._shape = shape.made(body, streams, service), shape
        self._head = {
            "id": f"{shape.prefix}-{secrets.token_hex(12)}",
            "object": shape.event if body.stream else shape.whole,
            "created": int(time.time()),
            "model": streams[0].request.answers[0].adapter or service.name,
        }

    @classmethod
    async def start(cls, body: Common, asks: Sequence[Ask], call: Call, shape: Shape) -> "_Run":
        streams = []
        try:
            for ask in asks:
                streams.append(await call.start(ask, whole=not body.stream))
        except RequestError as error:
            if error.field == "adapter" and body.model is not None:
                raise _unknown(body.model) from None
            raise
        return cls(body, call, streams, shape)

    async def whole(self) -> dict[str, Any]:
        told: dict[int, dict[str, Any]] = {}
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                more = choice.told(piece)
                if more is not None:
                    index = choice.index
                    joined = self._shape.joined
                    told[index] = joined(told[index], more) if index in told else more
        choices = [self._shape.ended(told[index]) for index in sorted(told)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        head = {**self._head, "usage": None} if self._include_usage else self._head
        async with aclosing(self._pieces()) as pieces:
            async for choice, piece in pieces:
                told = choice.told(piece)
                if told is not None:
                    if self._usage_each and self._include_usage:
                        head["usage"] = self._usage()
                    yield msgspec.json.encode({**head, "choices": [told]})
        if self._include_usage:
            yield msgspec.json.encode({**self._head, "choices": [], "usage": self._usage()})

    async def _pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Of all streams, as they come. The first that fails ends all: there is no other way to
        say so in this protocol.
        """
        async with aclosing(_merged(self._call, self._streams)) as merged:
            async for place, piece in merged:
                if piece.error is not None:
                    raise piece.error
                yield self._choices[place][piece.index], piece

    def _usage(self) -> dict[str, Any]:
        firsts = [choices[0] for choices in self._choices]  # A prompt counts once.
        prompt = sum(one.answer.prompt_tokens for one in firsts)
        made = sum(one.made for choices in self._choices for one in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "virtual_tokens": sum(one.answer.virtual_tokens for one in firsts),
            "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in firsts)},
        }


async def _merged(call: Call, streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all, each with its stream's place."""
    if len(streams) == 1:
        async for only in call.pieces(streams[0]):
            yield 0, only
        return
    sources = [call.pieces(stream) for stream in streams]

    def ask(place: int) -> "asyncio.Task[Piece | None]":
        return asyncio.ensure_future(anext(sources[place], None))

    waiting = {ask(place): place for place in range(len(sources))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                piece = task.result()
                if piece is not None:
                    yield place, piece
                    waiting[ask(place)] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
