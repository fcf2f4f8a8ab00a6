"""Web page at `/` and its read-only JSON routes: server info, load, adapters.

The files of the page are served unchanged from the folder `page`, also to callers without a token,
because these files contain no data of this server. A JSON route needs the credential, role and
quota of the `preamble.v1` method that it calls (`READ_ROUTES`). The Content-Security-Policy forbids
everything that the page does not need. This module generates no HTML.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from gpt.errors import RequestError
from serving.frontend.call import Frontend
from serving.frontend.grpc_transport import RpcMethod
from serving.frontend.http_transport import HEADERS, Handler, Routes, call_origin, json_response
from serving.protocols.preamble import adapters, admin

PROTOCOL = "http"
READ_ROUTES = {
    "/v1/server": ("GetServerInfo", admin.methods()),
    "/v1/load": ("GetLoad", admin.methods()),
    "/v1/adapters": ("ListAdapters", adapters.methods()),
}
QUOTED_CHARACTERS_MAX = 100
FOLDER = Path(__file__).resolve().parent / "page"
JAVASCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", JAVASCRIPT),
    "/conversation.js": ("conversation.js", JAVASCRIPT),
    "/adapter_picker.js": ("adapter_picker.js", JAVASCRIPT),
    "/requests.js": ("requests.js", JAVASCRIPT),
    "/elements.js": ("elements.js", JAVASCRIPT),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # Browsers validate their copy with the ETag at every load.
}


def routes(frontend: Frontend, *, page: bool) -> Routes:
    """Return the JSON routes and, if `page` is true, the routes of the page's files."""
    rpc_routes: dict[str, Mapping[str, Handler]] = {}
    for path, (name, methods) in READ_ROUTES.items():
        method = next(method for method in methods if method.name == name)
        rpc_routes[path] = _get_and_head(_rpc_handler(frontend, method))
    if not page:
        return rpc_routes
    file_routes = {path: _get_and_head(_file_handler(*file)) for path, file in FILES.items()}
    return {**file_routes, **rpc_routes}


def _get_and_head(handler: Handler) -> Mapping[str, Handler]:
    return {"GET": handler, "HEAD": handler}


def _rpc_handler(frontend: Frontend, method: RpcMethod) -> Handler:
    """Return a GET handler for a unary gRPC method; the query string has the request's fields."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        credential = request.headers.get("Authorization")
        origin = call_origin(request, request.path)
        async with frontend.call(
            PROTOCOL,
            method.name,
            credential,
            while_draining=method.while_draining,
            is_probe=method.is_probe,
            origin=origin,
        ) as call:
            call.caller.require_role(method.role)
            response = await method.handle(_parse_query(request, method), call)
            assert response is not None
            # A thread is used, because the conversion of many adapters would block the event loop.
            record = await asyncio.to_thread(
                MessageToDict,
                response,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            return json_response(record, headers={"Cache-Control": "no-store"})

    return handle


def _parse_query(request: web.BaseRequest, method: RpcMethod) -> Message:
    """Return the request message of a method with the fields of the query string."""
    message = method.request_type()
    fields = method.request_type.DESCRIPTOR.fields_by_name
    for name, value in request.query.items():
        quoted_name = ascii(name)[:QUOTED_CHARACTERS_MAX]
        if name not in fields:
            advice = f"choose one of: {', '.join(fields)}" if fields else "this path has none"
            raise RequestError(f"unknown query parameter {quoted_name}; {advice}", name[:100])
        try:
            ParseDict({name: value}, message)
        except ParseError:
            quoted_value = ascii(value)[:QUOTED_CHARACTERS_MAX]
            raise RequestError(
                f"{name} is {quoted_value}; it must be a whole number, 0 or more", name
            ) from None
    return message


def _file_handler(name: str, content_type: str) -> Handler:
    body = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**SECURITY_HEADERS, "Content-Type": content_type, "ETag": etag}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    return handle
