"""OpenAI HTTP routes: /v1/completions, /v1/chat/completions and /v1/models.

In this API, each adapter is a model, like the base model. Each prompt of a request becomes an
`Ask`, and the pieces of its stream become choices, in one response or in server-sent events. Other
modules define the details:

- `completion_request` and `chat`: the meaning of request fields
- `responses` and `chat`: the format of choices
- `streaming`: the chunks of a stream
- `serving.frontend.http_transport`: the HTTP transport
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from serving.frontend.call import Call, CallFailure, Frontend
from serving.frontend.field_names import translate_message
from serving.frontend.http_transport import (
    JSON_TYPE,
    SHUTDOWN_TIMEOUT_S,
    EventStream,
    Handler,
    Routes,
    call_origin,
    error_body,
    json_response,
    read_body,
)
from serving.protocols.openai import chat as openai_chat
from serving.protocols.openai.chat import CHAT_FORMAT, build_ask, to_template_messages
from serving.protocols.openai.completion_request import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    LARGE_BODY_BYTES,
    BaseCompletionRequest,
    CompletionRequest,
    RequestT,
    build_asks,
    parse_request,
    unknown_model_error,
)
from serving.protocols.openai.responses import TEXT_FORMAT, CompletionFormat
from serving.protocols.openai.streaming import CompletionRun
from serving.request import Ask, RefusedError

T = TypeVar("T")

PROTOCOL = "openai"


def routes(frontend: Frontend) -> Routes:
    """Return the handlers of the OpenAI endpoints, by path and HTTP method."""
    handlers = _OpenAIHandlers(frontend)
    models: Mapping[str, Handler] = {"GET": handlers.models, "HEAD": handlers.models}
    return {
        COMPLETIONS_PATH: {"POST": handlers.completions},
        CHAT_COMPLETIONS_PATH: {"POST": handlers.chat},
        "/v1/models": models,
        "/v1/models/": models,
    }


class _OpenAIHandlers:
    """The HTTP handlers of the OpenAI endpoints."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created = int(time.time())

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._frontend.call(
            PROTOCOL, "models", _credential(request), origin=call_origin(request, "/v1/models")
        ) as call:
            call.caller.require_role("generate")
            service, tenant = call.service, call.caller.tenant
            base_name, context = service.name, service.admission.context_tokens_max
            base_names = service.listed_names(tenant)
            models = {
                name: self._model_record(name, base_name, None, context) for name in base_names
            }
            for adapter, is_current in service.adapters.list_visible(tenant):
                names = (adapter.name, adapter.key) if is_current else (adapter.key,)
                for name in names:
                    if name not in models:
                        models[name] = self._model_record(name, base_name, base_name, None)
            model_id = request.path.removeprefix("/v1/models").removeprefix("/")
            if not model_id:
                return json_response({"object": "list", "data": list(models.values())})
            if model_id in models:
                return json_response(models[model_id])
            # The base model has names that are not listed, for example its path.
            if service.adapter_name(model_id, tenant) is None:
                return json_response({**models[base_name], "id": model_id})
            raise unknown_model_error(model_id)

    def _model_record(
        self, name: str, root: str, parent: str | None, context: int | None
    ) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "preamble"}
        return model | {"root": root, "parent": parent, "max_model_len": context}

    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        async def make_asks(data: bytes, body: CompletionRequest, call: Call) -> list[Ask]:
            adapters = call.requested_adapters(body.model)
            prompts_max = call.service.config.limits_config.prompts_max
            return await _maybe_in_thread(data, build_asks, body, adapters, prompts_max)

        return await self._respond(
            request,
            _Endpoint(
                COMPLETIONS_PATH,
                "completions",
                "text_completion",
                CompletionRequest,
                make_asks,
                TEXT_FORMAT,
            ),
        )

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        async def make_asks(
            data: bytes, body: openai_chat.ChatCompletionRequest, call: Call
        ) -> list[Ask]:
            return [
                await build_ask(
                    body, await _maybe_in_thread(data, to_template_messages, body), call
                )
            ]

        return await self._respond(
            request,
            _Endpoint(
                CHAT_COMPLETIONS_PATH,
                "chat",
                "chat",
                openai_chat.ChatCompletionRequest,
                make_asks,
                CHAT_FORMAT,
            ),
        )

    async def _respond(
        self, request: web.BaseRequest, endpoint: "_Endpoint[RequestT]"
    ) -> web.StreamResponse:
        events, body = EventStream(request), None
        try:
            origin = call_origin(
                request, endpoint.path, {"gen_ai.operation.name": endpoint.operation}
            )
            async with self._frontend.call(
                PROTOCOL, endpoint.method, _credential(request), origin=origin
            ) as call:
                call.caller.require_role("generate")
                data = await _read_json_body(request, call)
                body = await _maybe_in_thread(data, parse_request, data, endpoint.request_type)
                if body.timeout is not None:
                    call.deadline = call.arrival + body.timeout
                asks = await endpoint.make_asks(data, body, call)
                run = await CompletionRun.start(body, asks, call, endpoint.completion_format)
                if not body.stream:
                    return json_response(await run.final_response())
                async with aclosing(run.chunks()) as chunks:
                    async for chunk in chunks:
                        await call.send_part(events.send(chunk))
                await call.send_part(events.send(b"[DONE]"))
                return await events.finish()
        except CallFailure as error:
            client_error = _with_request_field(error, body)
            if not events.started:
                raise client_error from None
            return await _end_broken_stream(events, client_error)


@dataclass(frozen=True)
class _Endpoint(Generic[RequestT]):
    """One endpoint; its fields are the differences between plain completions and chats."""

    path: str
    method: str
    operation: str  # OpenTelemetry's `gen_ai.operation.name`.
    request_type: type[RequestT]
    make_asks: Callable[[bytes, RequestT, Call], Awaitable[list[Ask]]]
    completion_format: CompletionFormat


async def _end_broken_stream(events: EventStream, error: CallFailure) -> web.StreamResponse:
    """End a stream that failed after its first event.

    The error is sent as an event. If the client reads too slowly, the connection is aborted.
    """
    if error.reason.name != "SLOW_READER":
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await events.send(msgspec.json.encode(error_body(error)))
                return await events.finish()
    events.abort()
    return await events.finish()


def _credential(request: web.BaseRequest) -> str | None:
    return request.headers.get("Authorization")


async def _read_json_body(request: web.BaseRequest, call: Call) -> bytes:
    limits = call.service.config.limits_config
    # Only JSON is accepted. If text/plain were accepted too, any web page could let a browser send
    # requests to this server, because browsers send text/plain without a CORS preflight.
    if request.content_type != JSON_TYPE or "Content-Type" not in request.headers:
        content_type = ascii(request.headers.get("Content-Type", ""))[:100]
        raise RefusedError("UNREADABLE", f"the content type is {content_type}; send {JSON_TYPE}")
    return await read_body(request, limits.message_bytes_max, call.frontend.slow_reader_s)


async def _maybe_in_thread(data: bytes, function: Callable[..., T], *args: object) -> T:
    """Call `function`, in a thread if the body is large, so that the event loop is not blocked."""
    if len(data) <= LARGE_BODY_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def _with_request_field(error: CallFailure, body: BaseCompletionRequest | None) -> CallFailure:
    """Return the error with OpenAI's field names in place of the field names of `Ask`."""
    if body is None or error.field is None:
        return error  # The error names no field, or the parser raised it with OpenAI's names.
    name = body.field_names.get(error.field, error.field)
    if error.field.partition(".")[0] == "guide":
        name = body.guide_field
    message = translate_message(str(error), error.field, name, body.field_names)
    return CallFailure(error.reason, message, name, error.retry_s)
