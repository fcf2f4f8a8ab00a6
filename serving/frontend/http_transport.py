"""HTTP/1.1 transport on aiohttp: routes, body limits, server-sent events and JSON errors.

The transport runs on the server's event loop; a route maps a path and a method to a handler. This
module reports HTTP errors itself (unknown path, oversized body). Every error response has OpenAI's
error format, which OpenAI's clients parse. The module is independent of models and prompts.
"""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import ClientError, HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from gpt.errors import ConfigError
from serving.config import NetworkConfig
from serving.frontend.call import CallFailure
from serving.frontend.call_origin import CallOrigin, printable_request_id
from serving.service.error_reasons import REASONS

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# Handlers by path, then by method. A path with a final "/" also matches all longer paths, unless a
# longer entry matches. Exception: the path "/" matches only itself.
Routes = Mapping[str, Mapping[str, Handler]]

JSON_TYPE = "application/json"
# When the server closes its connections, running responses may take this long to end.
SHUTDOWN_TIMEOUT_S = 1.0
# Error messages and trace attributes contain at most this number of characters of a path.
PATH_CHARACTERS_MAX = 100
BACKLOG = 1024  # Connections that may wait until the server accepts them.
HEADERS = {"Server": "preamble"}  # aiohttp's default would reveal its version.
REQUEST_ID_HEADER = "X-Request-Id"  # Copied from the request to the response.
NO_HEADERS: Mapping[str, str] = {}
HTTP_VERSIONS = (HttpVersion10, HttpVersion11)


@dataclass(frozen=True)
class TextPage:
    """A complete response with a body of text."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def page_handlers(render: Callable[[], TextPage | Awaitable[TextPage]]) -> Mapping[str, Handler]:
    """Return GET and HEAD handlers of a page; `render` is called for each request."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        page = render()
        if not isinstance(page, TextPage):
            page = await page
        headers = {**HEADERS, "Content-Type": page.content_type, "Cache-Control": "no-store"}
        return web.Response(status=page.status, body=page.body, headers=headers)

    return {"GET": handle, "HEAD": handle}


class WrongMethodError(CallFailure):
    """The path does not support the method; `allow` lists the supported methods."""

    def __init__(self, path: str, allow: str) -> None:
        quoted_path = ascii(path[:PATH_CHARACTERS_MAX])
        super().__init__(REASONS["WRONG_METHOD"], f"{quoted_path} supports only: {allow}")
        self.allow = allow


def error_body(error: CallFailure) -> dict[str, Any]:
    """Return the error in OpenAI's format; `code` is the reason's name."""
    status = error.reason.status
    types_by_status = {
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
    }
    error_type = types_by_status.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    message = _replace_surrogates(str(error))
    field = error.field and _replace_surrogates(error.field)
    return {
        "error": {"message": message, "type": error_type, "param": field, "code": error.reason.name}
    }


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which a caller's text may contain and UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def error_response(error: CallFailure) -> web.Response:
    """Return the response of a call that failed before its response was started."""
    headers = {}
    if error.retry_s is not None:
        # Retry-After-Ms has a finer resolution, and OpenAI's client prefers it.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_s)))
        headers["Retry-After-Ms"] = str(round(1000 * error.retry_s))
    if error.reason.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethodError):
        headers["Allow"] = error.allow
    return json_response(error_body(error), error.reason.status, headers)


def json_response(
    payload: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(payload)
    all_headers = {**HEADERS, **(headers or {})}
    return web.Response(status=status, body=body, content_type=JSON_TYPE, headers=all_headers)


async def read_body(request: web.BaseRequest, bytes_max: int, timeout_s: float) -> bytes:
    """Read and return the body; raise CallFailure if it is too large or does not arrive in time.

    `bytes_max` limits both Content-Length and the size after decompression.
    """
    too_large = CallFailure(
        REASONS["BODY_TOO_LARGE"],
        f"the body is over {bytes_max} bytes, the limit of this server (message_bytes_max)",
    )
    if (request.content_length or 0) > bytes_max:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        try:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        except ConnectionError:
            raise asyncio.CancelledError from None  # The client is gone.
        request.writer.output_size = 0  # Otherwise aiohttp would treat the response as started.
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > bytes_max:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s (slow_reader_s)"
        raise CallFailure(REASONS["BODY_TOO_LATE"], message) from None
    except (web.RequestPayloadError, HttpProcessingError, ClientError):
        raise CallFailure(
            REASONS["UNREADABLE"],
            "the body does not match its headers; check Content-Length and Content-Encoding",
        ) from None
    return b"".join(parts)


def call_origin(
    request: web.BaseRequest, route: str, extra: Mapping[str, str] = NO_HEADERS
) -> CallOrigin:
    """Return the origin of a request.

    `route`: the path without variable parts. `extra`: more span attributes.
    """
    attributes = {
        **extra,
        "http.request.method": request.method,
        "http.route": route,
        "url.path": request.path[:PATH_CHARACTERS_MAX],
        "url.scheme": request.scheme,
    }
    return CallOrigin(f"{request.method} {route}", request.headers, attributes)


def _request_id_headers(request: web.BaseRequest) -> Mapping[str, str]:
    request_id = printable_request_id(request.headers.get(REQUEST_ID_HEADER, ""))
    return {REQUEST_ID_HEADER: request_id} if request_id else NO_HEADERS


class EventStream:
    """A response of server-sent events (SSE); its headers are sent with the first event."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        return self._response is not None

    async def send(self, *events: bytes) -> None:
        """Send events; return when the connection's write buffer can take more data."""
        data = b"".join(b"data: " + event + b"\n\n" for event in events)
        try:
            await (await self._start_response()).write(data)
        except ConnectionError:
            raise asyncio.CancelledError from None  # The client is gone.

    async def finish(self) -> web.StreamResponse:
        """Return the response; call once, after the last event."""
        return await self._start_response()

    async def _start_response(self) -> web.StreamResponse:
        if self._response is None:
            headers = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
            # Keep proxies from buffering the events.
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            headers |= _request_id_headers(self._request)
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

    def abort(self) -> None:
        """Abort the connection, the only way in which a started response can report an error."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


class _HttpRequest(web.BaseRequest):
    """aiohttp's request, changed so that the response always has version HTTP/1.0 or 1.1.

    aiohttp accepts some other versions, and would repeat such a version in its response.
    """

    ATTRS = web.BaseRequest.ATTRS | {"_client_version"}

    def __init__(self, message: RawRequestMessage, *args: Any, **kwargs: Any) -> None:
        self._client_version = message.version
        if self._client_version not in HTTP_VERSIONS:
            message = message._replace(version=HttpVersion11, should_close=True)
        super().__init__(message, *args, **kwargs)

    def check_version(self) -> None:
        if self._client_version not in HTTP_VERSIONS:
            version = ".".join(map(str, self._client_version))
            message = f"HTTP/{version} is not supported; use HTTP/1.1"
            raise CallFailure(REASONS["UNREADABLE"], message)


class _HttpConnection(web.RequestHandler):
    """aiohttp's connection with OpenAI's error format and a limit on the number of connections."""

    def __init__(self, server: web.Server, connections_max: int, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._connections_max = connections_max

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The limit is checked before `super().connection_made`, which counts the new connection.
        if len(self._server.connections) < self._connections_max:
            return super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(asyncio.Protocol())
        _reject_connection(transport, self._connections_max)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has started, so no error response can be sent")
        if status == 400:
            detail = " ".join((message or "").split())[:PATH_CHARACTERS_MAX]
            response = error_response(
                CallFailure(REASONS["UNREADABLE"], f"invalid HTTP request: {detail}")
            )
        else:
            log.error("event=http_failed status=%d", status, exc_info=exc)
            response = error_response(
                CallFailure(
                    REASONS["INTERNAL"], "internal error of this server; see the server log"
                )
            )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Do not log a stack for errors in a request body; the client gets an error response."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


def address_family(host: str) -> socket.AddressFamily:
    """Return AF_INET6 for an IPv6 address, else AF_INET; host names are resolved to IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class HttpServer:
    """Serves `routes` inside `async with`. The constructor binds the port."""

    def __init__(
        self,
        config: NetworkConfig,
        routes: Routes,
        *,
        address: tuple[str, int] | None = None,
        tls: ssl.SSLContext | None = None,
        setting: str = "http_port",
    ) -> None:
        """Bind the port.

        `address`: host and port; default: `host` and `http_port` of the settings. `setting`: the
        name of the port's setting, for errors.
        """
        host, port = address or (config.host, config.http_port)
        self._config = config
        self._routes = routes
        self._tls = tls
        self._socket = socket.socket(address_family(host))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"{setting} {port} of {host} cannot be bound ({error.strerror}); "
                "choose another port, or 0 for any free port"
            ) from None
        self.port: int = self._socket.getsockname()[1]

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # A handler is cancelled when its client disconnects.
        self._aiohttp_server = web.Server(
            self._handle,
            request_factory=partial(_HttpRequest, loop=loop),
            handler_cancellation=True,
        )
        self._asyncio_server = await loop.create_server(
            self._new_connection,
            sock=self._socket,
            ssl=self._tls,
            # asyncio accepts up to `backlog` connections before it serves any of them, and logs as
            # many errors if no file descriptor is free. The queue of the kernel is set below.
            backlog=1,
            ssl_handshake_timeout=self._config.handshake_s if self._tls else None,
        )
        self._socket.listen(BACKLOG)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._asyncio_server.close()
        # Idle connections are closed now. A connection with a running response is closed after the
        # response, at the latest after SHUTDOWN_TIMEOUT_S.
        self._aiohttp_server.pre_shutdown()
        await self._aiohttp_server.shutdown(SHUTDOWN_TIMEOUT_S)

    def _new_connection(self) -> asyncio.Protocol:
        return _HttpConnection(
            self._aiohttp_server,
            self._config.http_connections_max,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.http_idle_s,
            access_log=None,
            logger=logging.getLogger(f"{__name__}.connection"),
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, _HttpRequest)
        try:
            request.check_version()
            response = await self._find_handler(request)(request)
        except CallFailure as error:
            response = error_response(error)
            if not request.content.is_eof():
                response.force_close()  # Otherwise aiohttp would read the rest of the body.
        if not response.prepared:
            response.headers.update(_request_id_headers(request))
        return response

    def _find_handler(self, request: web.BaseRequest) -> Handler:
        path = request.path
        methods = self._find_methods(path)
        if methods is None:
            served_paths = ", ".join(path for path in self._routes if not path.endswith("/"))
            quoted_path = ascii(path[:PATH_CHARACTERS_MAX])
            message = f"path {quoted_path} does not exist; choose one of: {served_paths}"
            raise CallFailure(REASONS["UNKNOWN_PATH"], message)
        handler = methods.get(request.method)
        if handler is None:
            raise WrongMethodError(path, ", ".join(methods))
        return handler

    def _find_methods(self, path: str) -> Mapping[str, Handler] | None:
        methods = self._routes.get(path) or self._routes.get(path.rstrip("/") or "/")
        parent = path[: path.rfind("/") + 1]
        while methods is None and len(parent) > 1:
            methods = self._routes.get(parent)
            parent = parent[: parent.rfind("/", 0, -1) + 1]
        return methods


def _reject_connection(transport: asyncio.Transport, connections_max: int) -> None:
    """Send QUEUE_FULL without reading a request, and close the connection."""
    response = error_response(
        CallFailure(
            REASONS["QUEUE_FULL"],
            f"this server has {connections_max} connections, the limit "
            "(http_connections_max); try again in a moment",
        )
    )
    body = response.body
    assert isinstance(body, bytes)
    headers = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    transport.write("\r\n".join([*lines, "", ""]).encode() + body)
    transport.close()
