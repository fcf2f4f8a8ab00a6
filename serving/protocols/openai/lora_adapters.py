"""vLLM's routes to load and unload adapters: /v1/load_lora_adapter and /v1/unload_lora_adapter.

The answers and the error format are vLLM's, so that its clients work unchanged. The adapter may be
of any kind, not only a LoRA. `serving.adapters.adapter_imports` reads and publishes it; only paths
below the import directory are read.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from aiohttp import web

from gpt.adapters.change_log import ChangeAction
from gpt.errors import RequestError
from serving.frontend.adapter_changes import run_change
from serving.frontend.call import Call, CallFailure, Frontend
from serving.frontend.http_transport import (
    HEADERS,
    ErrorFormat,
    Routes,
    call_origin,
    credential,
    error_text,
)
from serving.frontend.json_body import BodyT, RequestBody, parse_request, read_json_body
from serving.request import RefusedError, UnknownAdapterError

PROTOCOL = "openai"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# Fields in the errors of the adapter store, and their names in these requests.
FIELD_NAMES = {
    "name": "lora_name",
    "adapter": "lora_name",
    "path": "lora_path",
    "data": "lora_path",
}


class LoadLoraAdapterRequest(RequestBody):
    """Loads an adapter from a path. `load_inplace`: the name may be taken; replace its adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None

    def check(self) -> None:
        if not (self.lora_name and self.lora_path):
            field = "lora_path" if self.lora_name else "lora_name"
            raise RequestError("Both 'lora_name' and 'lora_path' must be provided.", field)
        if self.is_3d_lora_weight:
            raise RefusedError(
                "UNSUPPORTED",
                "is_3d_lora_weight is true, but adapters cannot change the linears of experts here",
                "is_3d_lora_weight",
            )


class UnloadLoraAdapterRequest(RequestBody):
    """Unloads an adapter. vLLM's number of the adapter is ignored, as in vLLM."""

    lora_name: str | None = None
    lora_int_id: int | None = None

    def check(self) -> None:
        if not self.lora_name:
            raise RequestError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name"
            )


def error_body(error: CallFailure) -> dict[str, Any]:
    """Return the error in vLLM's format; `code` is the HTTP status."""
    status = ERROR_FORMAT.statuses.get(error.reason.status, error.reason.status)
    types = {
        400: "InvalidUserInput",
        401: "Unauthorized",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        429: "RateLimitError",
        501: "NotImplementedError",
    }
    error_type = types.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    if error.reason.name == "ADAPTER_UNUSABLE":
        error_type = "BadRequestError"
    return {
        "error": {
            "message": error_text(error),
            "type": error_type,
            "param": error.field,
            "code": status,
        }
    }


# vLLM has no status 409. An unusable adapter has vLLM's older status, 400: with the newer one, 500,
# it would look like a fault of this server.
ERROR_FORMAT = ErrorFormat(error_body, {409: 400})
ERROR_FORMATS = dict.fromkeys((LOAD_PATH, UNLOAD_PATH), ERROR_FORMAT)


def routes(frontend: Frontend) -> Routes:
    """Return the handlers of the two routes."""
    load = _Route(LOAD_PATH, "load_lora_adapter", LoadLoraAdapterRequest, "upload", _load)
    unload = _Route(UNLOAD_PATH, "unload_lora_adapter", UnloadLoraAdapterRequest, "unload", _unload)
    return {
        LOAD_PATH: {"POST": partial(_answer, frontend, load)},
        UNLOAD_PATH: {"POST": partial(_answer, frontend, unload)},
    }


@dataclass(frozen=True)
class _Route(Generic[BodyT]):
    path: str
    method: str
    body_type: type[BodyT]
    change: ChangeAction
    respond: Callable[[BodyT, Call], Awaitable[str]]


async def _answer(
    frontend: Frontend, route: _Route[BodyT], request: web.BaseRequest
) -> web.StreamResponse:
    try:
        async with frontend.call(
            PROTOCOL, route.method, credential(request), origin=call_origin(request, route.path)
        ) as call:
            await call.require_role("adapters", route.change)
            body = parse_request(await read_json_body(request, call), route.body_type)
            text = await route.respond(body, call)
            return web.Response(text=text, headers=HEADERS)
    except CallFailure as error:
        field, message = error.field, str(error)
        if field in FIELD_NAMES:
            name = FIELD_NAMES[field]
            message = re.sub(rf"^{field}\b", name, message)
            raise CallFailure(error.reason, message, name, error.retry_s) from None
        raise


async def _load(body: LoadLoraAdapterRequest, call: Call) -> str:
    service, author = call.service, call.change_author
    assert body.lora_name is not None and body.lora_path is not None
    service.check_adapter_name(body.lora_name)
    load = partial(
        service.importer.load,
        body.lora_name,
        body.lora_path,
        author.tenant,
        author,
        replaces=bool(body.load_inplace),
    )
    await run_change(call, "upload", body.lora_name, load)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def _unload(body: UnloadLoraAdapterRequest, call: Call) -> str:
    service, author, name = call.service, call.change_author, body.lora_name
    assert name is not None
    try:
        unload = partial(service.importer.unload, name, author.tenant, author)
        await run_change(call, "unload", name, unload)
    except UnknownAdapterError:
        raise UnknownAdapterError(f"The lora adapter '{name}' cannot be found.") from None
    return f"Success: LoRA adapter '{name}' removed successfully."
