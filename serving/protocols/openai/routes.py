"""OpenAI HTTP routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /tokenize.

In this API, each adapter is a model, like the base model. Each prompt of a request becomes an
`Ask`, and the pieces of its stream become choices, in one response or in server-sent events. Other
modules define the details:

- `completion_request` and `chat`: the meaning of request fields
- `responses` and `chat`: the format of choices
- `tokenization`: /tokenize, /detokenize and /tokenizer_info
- `lora_adapters`: /v1/load_lora_adapter and /v1/unload_lora_adapter
- `streaming`: the chunks of a stream
- `responses_api`: everything of the Responses API that differs from chats
- `serving.frontend.http_transport`: the HTTP transport
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from aiohttp import web

from serving.adapters.registry import LoadedAdapter
from serving.frontend.call import Call, CallFailure, Frontend
from serving.frontend.field_names import translate_message
from serving.frontend.http_transport import (
    EventStream,
    Handler,
    Routes,
    call_origin,
    credential,
    error_body,
    json_response,
)
from serving.frontend.json_body import (
    BodyT,
    RequestBody,
    maybe_in_thread,
    parse_request,
    read_json_body,
)
from serving.protocols.openai import chat as openai_chat
from serving.protocols.openai import lora_adapters, responses_api, tokenization
from serving.protocols.openai.chat import CHAT_FORMAT, build_ask, to_template_messages
from serving.protocols.openai.completion_request import (
    CHAT_COMPLETIONS_PATH,
    COMPLETIONS_PATH,
    BaseCompletionRequest,
    CompletionRequest,
    RequestT,
    build_asks,
    unknown_model_error,
)
from serving.protocols.openai.responses import TEXT_FORMAT, CompletionFormat
from serving.protocols.openai.responses_api import (
    RESPONSES_PATH,
    ResponseRun,
    ResponsesRequest,
    to_chat_request,
)
from serving.protocols.openai.streaming import CompletionRun
from serving.protocols.openai.tokenization import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    TOKENIZER_INFO_PATH,
    DetokenizeRequest,
    TokenizeRequest,
)
from serving.request import Ask
from serving.service.error_reasons import REASONS

PROTOCOL = "openai"


def routes(frontend: Frontend) -> Routes:
    """Return the handlers of the OpenAI endpoints, by path and HTTP method."""
    handlers = _OpenAIHandlers(frontend)
    models: Mapping[str, Handler] = {"GET": handlers.models, "HEAD": handlers.models}
    return {
        COMPLETIONS_PATH: {"POST": handlers.completions},
        CHAT_COMPLETIONS_PATH: {"POST": handlers.chat},
        RESPONSES_PATH: {"POST": handlers.responses},
        f"{RESPONSES_PATH}/": dict.fromkeys(("GET", "POST", "DELETE"), handlers.stored_response),
        "/v1/models": models,
        "/v1/models/": models,
        TOKENIZE_PATH: {"POST": handlers.tokenize},
        DETOKENIZE_PATH: {"POST": handlers.detokenize},
        TOKENIZER_INFO_PATH: {"GET": handlers.tokenizer_info, "HEAD": handlers.tokenizer_info},
        **lora_adapters.routes(frontend),
    }


def _root(adapter: LoadedAdapter | None, call: Call) -> str | None:
    """Return the path of an imported adapter, as in vLLM, for callers that may import adapters."""
    if adapter is None:
        return None
    return call.service.importer.source_of(adapter) if "adapters" in call.caller.roles else None


class _OpenAIHandlers:
    """The HTTP handlers of the OpenAI endpoints."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created = int(time.time())

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = call_origin(request, "/v1/models")
        async with self._frontend.call(
            PROTOCOL, "models", credential(request), is_probe=True, origin=origin
        ) as call:
            call.caller.require_role("generate")
            service, tenant = call.service, call.caller.tenant
            base_name, context = service.name, service.admission.context_tokens_max
            base_names = service.listed_names(tenant)
            models = {
                name: self._model_record(name, base_name, None, context) for name in base_names
            }
            for entry in service.adapters.list_all(tenant):
                names = (entry.name, entry.key) if entry.is_current else (entry.key,)
                for name in names:
                    if name not in models:
                        root = _root(entry.adapter, call) or base_name
                        models[name] = self._model_record(name, root, base_name, None)
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
            return await maybe_in_thread(data, build_asks, body, adapters, prompts_max)

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
                    body,
                    await maybe_in_thread(data, to_template_messages, body.messages or ()),
                    call,
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

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answer(
            request, TOKENIZE_PATH, "tokenize", TokenizeRequest, tokenization.tokenize
        )

    async def detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._answer(
            request, DETOKENIZE_PATH, "detokenize", DetokenizeRequest, tokenization.detokenize
        )

    async def tokenizer_info(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = call_origin(request, TOKENIZER_INFO_PATH)
        async with self._frontend.call(
            PROTOCOL, "tokenizer_info", credential(request), origin=origin
        ) as call:
            call.caller.require_role("generate")
            return json_response(call.service.tokenizer_info)

    async def _answer(
        self,
        request: web.BaseRequest,
        path: str,
        method: str,
        body_type: type[BodyT],
        respond: Callable[[BodyT, Call], Awaitable[dict[str, Any]]],
    ) -> web.StreamResponse:
        """Run a call that is answered with one JSON object and generates nothing."""
        body = None
        try:
            async with self._frontend.call(
                PROTOCOL, method, credential(request), origin=call_origin(request, path)
            ) as call:
                call.caller.require_role("generate")
                data = await read_json_body(request, call)
                body = await maybe_in_thread(data, parse_request, data, body_type)
                return json_response(await respond(body, call))
        except CallFailure as error:
            raise _with_request_field(error, body) from None

    async def _respond(
        self, request: web.BaseRequest, endpoint: "_Endpoint[RequestT]"
    ) -> web.StreamResponse:
        body = None
        async with EventStream(request) as events:
            try:
                origin = call_origin(
                    request, endpoint.path, {"gen_ai.operation.name": endpoint.operation}
                )
                async with self._frontend.call(
                    PROTOCOL, endpoint.method, credential(request), origin=origin
                ) as call:
                    call.caller.require_role("generate")
                    data = await read_json_body(request, call)
                    body = await maybe_in_thread(data, parse_request, data, endpoint.request_type)
                    if body.timeout is not None:
                        call.deadline = call.arrival + body.timeout
                    if body.stream:
                        events.open_in(call.service.config.network_config.stream_headers_s)
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
                return await events.finish_with_error(client_error, error_body(client_error))

    async def responses(self, request: web.BaseRequest) -> web.StreamResponse:
        events, body, run = EventStream(request), None, None
        try:
            origin = call_origin(request, RESPONSES_PATH, {"gen_ai.operation.name": "chat"})
            async with self._frontend.call(
                PROTOCOL, "responses", credential(request), origin=origin
            ) as call:
                call.caller.require_role("generate")
                data = await read_json_body(request, call)
                body = await maybe_in_thread(data, parse_request, data, ResponsesRequest)
                chat = await maybe_in_thread(data, to_chat_request, body)
                messages = await maybe_in_thread(data, to_template_messages, chat.messages or ())
                if body.instructions is not None:
                    messages.insert(0, {"role": "system", "content": body.instructions})
                ask = await build_ask(chat, messages, call)
                run = ResponseRun(body, await CompletionRun.start(chat, [ask], call, CHAT_FORMAT))
                if not body.stream:
                    return json_response(await run.final_response())
                async with aclosing(run.events()) as response_events:
                    async for event in response_events:
                        data = msgspec.json.encode(event)
                        await call.send_part(events.send(data, event_type=event["type"]))
                return await events.finish()
        except CallFailure as error:
            client_error = responses_api.with_request_field(error, body)
            if run is None:
                raise client_error from None
            event = run.failed_event(client_error)
            return await events.finish_with_error(client_error, event, event["type"])

    async def stored_response(self, request: web.BaseRequest) -> web.StreamResponse:
        raise CallFailure(
            REASONS["UNKNOWN_PATH"],
            f"this server stores no responses; POST {RESPONSES_PATH} without an id",
        )


@dataclass(frozen=True)
class _Endpoint(Generic[RequestT]):
    """One endpoint; its fields are the differences between plain completions and chats."""

    path: str
    method: str
    operation: str  # OpenTelemetry's `gen_ai.operation.name`.
    request_type: type[RequestT]
    make_asks: Callable[[bytes, RequestT, Call], Awaitable[list[Ask]]]
    completion_format: CompletionFormat


def _with_request_field(error: CallFailure, body: RequestBody | None) -> CallFailure:
    """Return the error with OpenAI's field names in place of the field names of `Ask`."""
    if body is None or error.field is None:
        return error  # The error names no field, or the parser raised it with OpenAI's names.
    name = body.field_names.get(error.field, error.field)
    if error.field.partition(".")[0] == "guide" and isinstance(body, BaseCompletionRequest):
        name = body.guide_field
    message = translate_message(str(error), error.field, name, body.field_names)
    return CallFailure(error.reason, message, name, error.retry_s)
