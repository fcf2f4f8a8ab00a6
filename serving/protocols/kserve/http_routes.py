"""KServe v2 HTTP routes below /v2: health, metadata, inference, and Triton's generate extension.

The paths, inputs and outputs are those of Triton's HTTP port. The routes use the methods of the
gRPC service (`service`) for metadata, and `inference` for requests; `http_messages` has the JSON
format. Errors have KServe's format `{"error": "text"}`. As at /health, a health probe needs no
token.
"""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from google.protobuf.json_format import MessageToDict

from gpt.errors import RequestError
from serving.admission.auth import Role
from serving.frontend.call import Call, CallFailure, Frontend
from serving.frontend.http_transport import (
    HEADERS,
    JSON_TYPE,
    ErrorFormat,
    EventStream,
    Handler,
    Routes,
    TextPage,
    WrongMethodError,
    call_origin,
    credential,
    error_text,
    json_response,
    page_handlers,
)
from serving.frontend.json_body import maybe_in_thread, parse_object, read_json_body
from serving.protocols.kserve import service
from serving.protocols.kserve.http_messages import (
    JSON_SIZE_HEADER,
    HttpInferRequest,
    generate_fields,
    infer_body,
    parse_generate,
    parse_infer,
)
from serving.protocols.kserve.inference import Inference
from serving.protocols.kserve.models import find_model
from serving.request import RefusedError
from serving.service.error_reasons import REASONS

PROTOCOL = "kserve_http"  # The `wire` label in metrics.
BINARY_TYPE = "application/octet-stream"
MODEL_ROUTE = "/v2/models/{model}"
# A model's name may contain "/", so the path is parsed from its end.
_MODEL_PATH = re.compile(
    r"/v2/models/(?P<model>.+?)(/versions/(?P<version>[^/]+))?"
    r"(/(?P<action>ready|config|infer|generate|generate_stream|stats|trace/setting))?"
)
_REPOSITORY_PATH = re.compile(r"/v2/repository/models/(?P<model>.+)/(?P<action>load|unload)")
LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
# Paths of Triton that this server does not support. As in gRPC, the error has advice.
UNSUPPORTED_PATHS = (
    "/v2/models/stats",
    "/v2/systemsharedmemory/",
    "/v2/cudasharedmemory/",
    "/v2/trace/setting",
    "/v2/logging",
)


def routes(frontend: Frontend) -> Routes:
    """Return the handlers of KServe's paths, by path and HTTP method."""
    handlers = _KServeHandlers(frontend)
    unsupported: Mapping[str, Handler] = dict.fromkeys(("GET", "POST"), handlers.refuse)
    return {
        "/v2": {"GET": handlers.server_metadata, "HEAD": handlers.server_metadata},
        LIVE_PATH: page_handlers(handlers.live_page),
        READY_PATH: page_handlers(handlers.ready_page),
        "/v2/models/": {
            "GET": handlers.get_model,
            "HEAD": handlers.get_model,
            "POST": handlers.post_model,
        },
        "/v2/repository/index": {"POST": handlers.repository_index},
        "/v2/repository/models/": {"POST": handlers.load_model},
        **dict.fromkeys(UNSUPPORTED_PATHS, unsupported),
    }


def error_body(error: CallFailure) -> dict[str, Any]:
    """Return the error in KServe's format."""
    return {"error": error_text(error)}


ERROR_FORMATS: Mapping[str, ErrorFormat] = dict.fromkeys(("/v2", "/v2/"), ErrorFormat(error_body))


class _KServeHandlers:
    """The HTTP handlers of KServe's paths."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    # ------------------------------------------------------------------------ health and metadata

    def live_page(self) -> TextPage:
        return _flag_page("live", is_set=self._frontend.is_live)

    def ready_page(self) -> TextPage:
        return _flag_page("ready", is_set=self._frontend.is_ready)

    async def server_metadata(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._open_call(
            request, "ServerMetadata", "/v2", while_draining=True, is_probe=True
        ) as call:
            message = service.pb.ServerMetadataRequest()
            return json_response(_to_record(await service.server_metadata(message, call)))

    async def get_model(self, request: web.BaseRequest) -> web.StreamResponse:
        model, version, action = _split_model_path(request)
        match action:
            case "":
                return await self._model_metadata(request, model, version)
            case "config":
                return await self._model_config(request, model, version)
            case "ready":
                return await self._model_ready(request, model, version)
            case "stats" | "trace/setting":
                return await self.refuse(request)
        raise WrongMethodError(request.path, "POST")

    async def _model_metadata(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        async with self._open_call(request, "ModelMetadata", MODEL_ROUTE, is_probe=True) as call:
            message = service.pb.ModelMetadataRequest(name=model, version=version)
            record = _to_record(await service.model_metadata(message, call))
            _parse_sizes(record["inputs"] + record["outputs"], "shape")
            return json_response(record)

    async def _model_config(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        route = f"{MODEL_ROUTE}/config"
        async with self._open_call(request, "ModelConfig", route, is_probe=True) as call:
            message = service.pb.ModelConfigRequest(name=model, version=version)
            record = _to_record(await service.model_config(message, call))["config"]
            _parse_sizes(record["input"] + record["output"], "dims")
            return json_response(record)

    async def _model_ready(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        route = f"{MODEL_ROUTE}/ready"
        async with self._open_call(
            request, "ModelReady", route, while_draining=True, is_probe=True
        ) as call:
            served_model = await find_model(call, model, version, "name")
            is_ready = self._frontend.is_ready and served_model.is_eligible
            record = {"name": served_model.name, "ready": is_ready}
            return json_response(record, 200 if is_ready else 503)

    async def repository_index(self, request: web.BaseRequest) -> web.StreamResponse:
        route = "/v2/repository/index"
        async with self._open_call(request, "RepositoryIndex", route, is_probe=True) as call:
            fields = await _read_optional_object(request, call)
            ready = fields.pop("ready", None)
            if fields or not isinstance(ready, bool | None):
                raise RequestError("the body may have only the field ready, true or false", "ready")
            message = service.pb.RepositoryIndexRequest(ready=bool(ready))
            record = _to_record(await service.repository_index(message, call))
            return json_response(record["models"])

    async def load_model(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _REPOSITORY_PATH.fullmatch(request.path.rstrip("/"))
        if match is None or match["action"] == "unload":
            return await self.refuse(request)
        route = "/v2/repository/models/{model}/load"
        async with self._open_call(request, "RepositoryModelLoad", route, role="adapters") as call:
            message = service.pb.RepositoryModelLoadRequest(model_name=match["model"])
            fields = await _read_optional_object(request, call)
            parameters = fields.get("parameters")
            for name in parameters if isinstance(parameters, dict) else ():
                message.parameters[name].bool_param = True  # The method refuses each parameter.
            await service.repository_model_load(message, call)
            return json_response({})

    async def refuse(self, request: web.BaseRequest) -> web.StreamResponse:
        """Refuse a path of Triton that this server does not support."""
        async with self._open_call(request, "unsupported", "/v2"):
            raise RefusedError(
                "UNSUPPORTED",
                f"{request.path[:100]!a} is not served here; GET /v2 lists the supported "
                "extensions",
            )

    # ---------------------------------------------------------------------------------- inference

    async def post_model(self, request: web.BaseRequest) -> web.StreamResponse:
        model, version, action = _split_model_path(request)
        match action:
            case "infer":
                return await self._infer(request, model, version)
            case "generate":
                return await self._generate(request, model, version)
            case "generate_stream":
                return await self._generate_stream(request, model, version)
            case "trace/setting":
                return await self.refuse(request)
        raise WrongMethodError(request.path, "GET, HEAD")

    async def _infer(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        async with self._open_call(request, "infer", f"{MODEL_ROUTE}/infer") as call:
            body = await read_json_body(request, call, json_type_only=False)
            json_size = request.headers.get(JSON_SIZE_HEADER)
            message = await maybe_in_thread(body, parse_infer, body, json_size)
            inference = await _open_inference(message, model, version, call)
            inference.check_unary("infer", "generate_stream")
            outputs = await inference.final_outputs()
        text, binary = infer_body(message, inference.model, outputs)
        headers = {**HEADERS, "Content-Type": JSON_TYPE}
        if message.binary_outputs != frozenset():
            headers = {**HEADERS, "Content-Type": BINARY_TYPE, JSON_SIZE_HEADER: str(len(text))}
        return web.Response(body=text + binary, headers=headers)

    async def _generate(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        async with self._open_call(request, "generate", f"{MODEL_ROUTE}/generate") as call:
            message = await _read_generate(request, call, stream=False)
            inference = await _open_inference(message, model, version, call)
            inference.check_unary("generate", "generate_stream")
            outputs = await inference.final_outputs()
            return json_response(generate_fields(message, inference.model, outputs))

    async def _generate_stream(
        self, request: web.BaseRequest, model: str, version: str
    ) -> web.StreamResponse:
        route = f"{MODEL_ROUTE}/generate_stream"
        async with EventStream(request) as events:
            try:
                async with self._open_call(request, "generate_stream", route) as call:
                    message = await _read_generate(request, call, stream=True)
                    events.open_in(call.service.config.network_config.stream_headers_s)
                    inference = await _open_inference(message, model, version, call)
                    async with aclosing(inference.output_chunks()) as chunks:
                        async for outputs, _ in chunks:
                            fields = generate_fields(message, inference.model, outputs)
                            await call.send_part(events.send(msgspec.json.encode(fields)))
                    return await events.finish()
            except CallFailure as error:
                return await events.finish_with_error(error, error_body(error))

    @asynccontextmanager
    async def _open_call(
        self,
        request: web.BaseRequest,
        method: str,
        route: str,
        *,
        role: Role = "generate",
        while_draining: bool = False,
        is_probe: bool = False,
    ) -> AsyncIterator[Call]:
        async with self._frontend.call(
            PROTOCOL,
            method,
            credential(request),
            while_draining=while_draining,
            is_probe=is_probe,
            origin=call_origin(request, route),
        ) as call:
            call.caller.require_role(role)
            yield call


def _split_model_path(request: web.BaseRequest) -> tuple[str, str, str]:
    """Return model, version and action of a path; version and action may be empty."""
    match = _MODEL_PATH.fullmatch(request.path.rstrip("/"))
    if match is None:
        raise CallFailure(REASONS["UNKNOWN_MODEL"], "the path names no model; use /v2/models/MODEL")
    return match["model"], match["version"] or "", match["action"] or ""


async def _read_generate(request: web.BaseRequest, call: Call, *, stream: bool) -> HttpInferRequest:
    body = await read_json_body(request, call, json_type_only=False)
    return await maybe_in_thread(body, lambda: parse_generate(body, stream=stream))


async def _open_inference(
    message: HttpInferRequest, name: str, version: str, call: Call
) -> Inference:
    return Inference.build(message.content, await find_model(call, name, version), call)


async def _read_optional_object(request: web.BaseRequest, call: Call) -> dict[str, Any]:
    """Read the body of a request that needs no body; an empty body has no fields."""
    body = await read_json_body(request, call, json_type_only=False)
    return await maybe_in_thread(body, parse_object, body) if body else {}


def _flag_page(name: str, *, is_set: bool) -> TextPage:
    return TextPage(200 if is_set else 503, msgspec.json.encode({name: is_set}), JSON_TYPE)


def _to_record(message: Any) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _parse_sizes(records: list[dict[str, Any]], field: str) -> None:
    """Convert the sizes in a field to numbers, in place; protobuf's JSON has them as strings."""
    for record in records:
        record[field] = [int(size) for size in record[field]]
