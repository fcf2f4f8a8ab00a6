"""TGI HTTP routes: /generate, /generate_stream, /info, and POST / of text-generation-inference.

POST / is TGI's route for clients of Hugging Face's hosted API: the field `stream` selects between
the two responses. Errors have TGI's format. `request` defines the fields and `outputs` the
responses.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from gpt.errors import RequestError
from gpt.software_versions import preamble_version
from serving.engine.stream import Stream, build_completion
from serving.frontend.call import Call, CallFailure, Frontend
from serving.frontend.field_names import translate_error
from serving.frontend.http_transport import (
    ErrorFormat,
    EventStream,
    Routes,
    call_origin,
    credential,
    error_text,
    json_response,
)
from serving.frontend.json_body import maybe_in_thread, parse_request, read_json_body
from serving.protocols.tgi.outputs import JsonObject, StreamEvents, build_response
from serving.protocols.tgi.request import FIELD_NAMES, GenerateRequest, build_ask
from serving.request import Piece

PROTOCOL = "tgi"  # The `wire` label in metrics.
GENERATE_PATH, STREAM_PATH, INFO_PATH = "/generate", "/generate_stream", "/info"


def routes(frontend: Frontend) -> Routes:
    """Return the handlers of TGI's paths, by path and HTTP method."""
    handlers = _TgiHandlers(frontend)
    return {
        "/": {"POST": handlers.generate_by_field},
        GENERATE_PATH: {"POST": handlers.generate},
        STREAM_PATH: {"POST": handlers.generate_stream},
        INFO_PATH: {"GET": handlers.info, "HEAD": handlers.info},
    }


def error_body(error: CallFailure) -> JsonObject:
    """Return the error in TGI's format."""
    status = error.reason.status
    error_type = "validation"
    if status == 429:
        error_type = "overloaded"
    elif status >= 500 and error.reason.name != "UNSUPPORTED":
        error_type = "generation"
    return {"error": error_text(error), "error_type": error_type}


STATUSES = {400: 422, 501: 422}  # TGI reports an invalid field with status 422.
ERROR_FORMATS: Mapping[str, ErrorFormat] = {
    "/": ErrorFormat(error_body, STATUSES, frozenset({"POST"})),
    **dict.fromkeys((GENERATE_PATH, STREAM_PATH, INFO_PATH), ErrorFormat(error_body, STATUSES)),
}


class _TgiHandlers:
    """The HTTP handlers of TGI's paths."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def info(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._open_call(request, "info", INFO_PATH, is_probe=True) as call:
            return json_response(_describe_server(call))

    async def generate_by_field(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(request, "/", stream=None)

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(request, GENERATE_PATH, stream=False)

    async def generate_stream(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(request, STREAM_PATH, stream=True)

    async def _respond(
        self, request: web.BaseRequest, path: str, *, stream: bool | None
    ) -> web.StreamResponse:
        """Serve a request. `stream` None: the field `stream` decides, as in POST /."""
        async with EventStream(request) as events:
            try:
                async with self._open_call(request, path.removeprefix("/") or "root", path) as call:
                    data = await read_json_body(request, call, json_type_only=False)
                    body = await maybe_in_thread(data, parse_request, data, GenerateRequest)
                    if stream is False and body.stream:
                        raise RequestError(
                            f"stream is true, but {path} sends one response; use {STREAM_PATH}, or "
                            "remove stream",
                            "stream",
                        )
                    if stream or (stream is None and body.stream):
                        events.open_in(call.service.config.network_config.stream_headers_s)
                        return await _send_events(body, call, events)
                    response = await _generate(body, call)
                    return json_response([response] if path == "/" else response)
            except CallFailure as error:
                return await events.finish_with_error(error, error_body(error))

    @asynccontextmanager
    async def _open_call(
        self, request: web.BaseRequest, method: str, route: str, *, is_probe: bool = False
    ) -> AsyncIterator[Call]:
        origin = call_origin(request, route)
        async with self._frontend.call(
            PROTOCOL, method, credential(request), is_probe=is_probe, origin=origin
        ) as call:
            call.caller.require_role("generate")
            yield call


async def _generate(body: GenerateRequest, call: Call) -> JsonObject:
    stream = await _start_stream(body, call, stream=False)
    pieces: list[list[Piece]] = [[] for _ in stream.request.answers]
    async for piece in call.pieces(stream):
        pieces[piece.index].append(piece)
    completions = [
        build_completion(index, answer, pieces[index])
        for index, answer in enumerate(stream.request.answers)
    ]
    return build_response(body, completions, call.service)


async def _send_events(
    body: GenerateRequest, call: Call, events: EventStream
) -> web.StreamResponse:
    body.check_stream()
    stream = await _start_stream(body, call, stream=True)
    builder = StreamEvents(body, stream.request.answers[0], call.service)
    async for piece in call.pieces(stream):
        piece_events = [msgspec.json.encode(event) for event in builder.build(piece)]
        if piece_events:
            await call.send_part(events.send(*piece_events))
    return await events.finish()


async def _start_stream(body: GenerateRequest, call: Call, *, stream: bool) -> Stream:
    try:
        return await call.start(build_ask(body, stream=stream), final_only=not stream)
    except RequestError as error:
        raise translate_error(error, FIELD_NAMES) from None


def _describe_server(call: Call) -> dict[str, Any]:
    """Return the response of /info."""
    service, config = call.service, call.service.config
    tokens_max = service.admission.tokens_max
    return {
        "model_id": service.name,
        "model_sha": None,
        "model_dtype": service.dtype,
        "model_device_type": config.model_config.device.partition(":")[0],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.scheduler_config.queue_requests_max,
        "max_best_of": config.limits_config.answers_max,
        "max_stop_sequences": config.limits_config.stops_max,
        "max_input_tokens": tokens_max - 1,
        "max_input_length": tokens_max - 1,  # The name in older versions of TGI.
        "max_total_tokens": tokens_max,
        "max_client_batch_size": 1,
        "validation_workers": 1,
        "router": "preamble",
        "version": preamble_version(),
        "sha": None,
        "docker_label": None,
    }
