"""HTTP/1.1 transport on aiohttp: routes, body limits, server-sent events and JSON errors.

The transport runs on the server's event loop; a route maps a path and a method to a handler. This
module reports HTTP errors itself (unknown path, oversized body). An error response has the format
of the protocol that the path belongs to, else OpenAI's format. The module is independent of models
and prompts.
"""

import asyncio
import logging
import math
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from aiohttp import ClientError, HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from gpt.errors import ConfigError
from serving.config import NetworkConfig, SecurityConfig
from serving.frontend.call import CallFailure
from serving.frontend.call_origin import (
    CallOrigin,
    caller_request_id,
    host_and_port,
    printable_request_id,
)
from serving.frontend.web_origins import OriginPolicy, preflight_headers
from serving.service.error_reasons import REASONS

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# Handlers by path, then by method. A path with a final "/" also matches all longer paths, unless a
# longer entry matches. Exception: the path "/" matches only itself.
Routes = Mapping[str, Mapping[str, Handler]]
T = TypeVar("T")

JSON_TYPE = "application/json"
# When the server closes its connections, running responses may take this long to end.
SHUTDOWN_TIMEOUT_S = 1.0
# Error messages and trace attributes contain at most this number of characters of a path.
PATH_CHARACTERS_MAX = 100
BACKLOG = 1024  # Connections that may wait until the server accepts them.
HEADERS = {"Server": "preamble"}  # aiohttp's default would reveal its version.
# Every response has it: the id that the client sent, or a random one.
REQUEST_ID_HEADER = "X-Request-Id"
OPENING_COMMENT = b": the first event follows\n\n"  # SSE clients ignore comments.
NO_HEADERS: Mapping[str, str] = {}
# Paths that the error of an unknown path names, if the port serves them.
EXAMPLE_PATHS = ("/v1/completions", "/v1/chat/completions", "/v2", "/generate", "/health")
# Connections above `http_connections_max` that an HTTP server accepts for probes, and the time that
# each of them has for its request and the response.
PROBE_CONNECTIONS_MAX = 16
PROBE_CONNECTION_S = 2.0
_GRPC_PATH = re.compile(r"/\w+(\.\w+)+/\w+")
HTTP_VERSIONS = (HttpVersion10, HttpVersion11)


@dataclass(frozen=True)
class TextPage:
    """A complete response with a body of text."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class ErrorFormat:
    """A protocol's format of error responses.

    `body` returns the JSON body for an error. `statuses` has the HTTP statuses that differ from
    those in the table of error reasons. `methods`: the HTTP methods of the protocol; None: all.
    """

    body: Callable[[CallFailure], Any]
    statuses: Mapping[int, int] = field(default_factory=dict)
    methods: frozenset[str] | None = None

    def covers(self, method: str) -> bool:
        return self.methods is None or method in self.methods


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
    message = error_text(error)
    param = error.field and replace_surrogates(error.field)
    return {
        "error": {"message": message, "type": error_type, "param": param, "code": error.reason.name}
    }


OPENAI_ERRORS = ErrorFormat(error_body)


def error_text(error: CallFailure) -> str:
    """Return the message of an error as text that UTF-8 can encode."""
    return replace_surrogates(str(error))


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which a caller's text may contain and UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def error_response(error: CallFailure, error_format: ErrorFormat = OPENAI_ERRORS) -> web.Response:
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
    status = error_format.statuses.get(error.reason.status, error.reason.status)
    return json_response(error_format.body(error), status, headers)


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
    if (request.content_length or 0) > bytes_max:
        raise _body_too_large(bytes_max)
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
                    raise _body_too_large(bytes_max)
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


def _body_too_large(bytes_max: int) -> CallFailure:
    message = f"the body is over {bytes_max} bytes, the limit of this server (message_bytes_max)"
    return CallFailure(REASONS["BODY_TOO_LARGE"], message)


def credential(request: web.BaseRequest) -> str | None:
    """Return the credential of a request's caller; None if it has none."""
    return request.headers.get("Authorization")


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
    assert isinstance(request, _HttpRequest)
    name = f"{request.method} {route}"
    return CallOrigin(name, request.headers, attributes, request.request_id, _peer(request))


def _peer(request: web.BaseRequest) -> str:
    transport = request.transport
    address = None if transport is None else transport.get_extra_info("peername")
    return host_and_port(address[0], address[1]) if isinstance(address, tuple) else ""


class EventStream:
    """A response of server-sent events (SSE).

    Its headers are sent with the first event, or earlier after a call of `open_in`.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_opening = False  # Whether the task `_opening` is sending the headers.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop_opening()

    def open_in(self, seconds: float) -> None:
        """Send the headers after this time, unless an event is sent earlier.

        Clients and proxies limit the time to the headers.
        """
        self._opening = asyncio.create_task(self._open(seconds))

    async def _open(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._is_opening = True
        with suppress(ConnectionError):  # The client is gone, so aiohttp cancels the handler.
            await (await self._start_response()).write(OPENING_COMMENT)

    async def _stop_opening(self) -> None:
        """Cancel `open_in`, or wait until the headers are sent."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if self._is_opening:
            await opening
        else:
            opening.cancel()

    async def send(self, *events: bytes, event_type: str = "") -> None:
        """Send events; return when the connection's write buffer can take more data.

        `event_type`: the SSE field `event` of each event; empty: the events have no such field.
        """
        await self._stop_opening()
        prefix = b"event: " + event_type.encode() + b"\n" if event_type else b""
        data = b"".join(prefix + b"data: " + event + b"\n\n" for event in events)
        try:
            await (await self._start_response()).write(data)
        except ConnectionError:
            raise asyncio.CancelledError from None  # The client is gone.

    async def finish(self) -> web.StreamResponse:
        """Return the response; call once, after the last event."""
        await self._stop_opening()
        return await self._start_response()

    async def finish_with_error(
        self, error: CallFailure, event: object, event_type: str = ""
    ) -> web.StreamResponse:
        """End a stream that failed, and return the response.

        The error is sent as `event`, encoded as JSON. If the client reads too slowly, the
        connection is aborted. If the headers are not sent yet, raise `error`: the caller's error
        response has its status.
        """
        error.release_frames()
        await self._stop_opening()
        if self._response is None:
            raise error
        if error.reason.name != "SLOW_READER":
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self.send(msgspec.json.encode(event), event_type=event_type)
                    return await self.finish()
        self.abort()
        return await self.finish()

    async def _start_response(self) -> web.StreamResponse:
        if self._response is None:
            headers = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
            # Keep proxies from buffering the events.
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            assert isinstance(self._request, _HttpRequest)
            headers |= self._request.response_headers
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

    def abort(self) -> None:
        """Abort the connection, the only way in which a started response can report an error."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


class _HttpRequest(web.BaseRequest):
    """aiohttp's request, with an id and with the headers that all its responses have.

    The response always has version HTTP/1.0 or 1.1. aiohttp accepts some other versions, and would
    repeat such a version in its response.
    """

    ATTRS = web.BaseRequest.ATTRS | {"_client_version", "request_id", "response_headers"}

    def __init__(self, message: RawRequestMessage, *args: Any, **kwargs: Any) -> None:
        self._client_version = message.version
        if self._client_version not in HTTP_VERSIONS:
            message = message._replace(version=HttpVersion11, should_close=True)
        super().__init__(message, *args, **kwargs)
        # The caller's id, else a random one.
        self.request_id = (
            printable_request_id(self.headers.get(REQUEST_ID_HEADER, ""))
            or caller_request_id(self.headers)
            or secrets.token_hex(16)
        )
        self.response_headers = {REQUEST_ID_HEADER: self.request_id}

    def check_version(self) -> None:
        if self._client_version not in HTTP_VERSIONS:
            version = ".".join(map(str, self._client_version))
            message = f"HTTP/{version} is not supported; use HTTP/1.1"
            raise CallFailure(REASONS["UNREADABLE"], message)


class _ProbeConnections:
    """The connections that are open in addition to `http_connections_max`.

    Each may send one request, which is answered if it is a probe (`probe_paths`). Therefore probes
    work while idle connections take all others. A connection is closed after its response, or after
    PROBE_CONNECTION_S. If PROBE_CONNECTIONS_MAX are open, the oldest one that has sent no request
    is closed for a new one.
    """

    def __init__(self) -> None:
        self._timers: dict[_HttpConnection, asyncio.TimerHandle] = {}  # The oldest one first.

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, connection: object) -> bool:
        return connection in self._timers

    def add(self, connection: "_HttpConnection") -> bool:
        """Add a connection; return False if PROBE_CONNECTIONS_MAX are open, all with a request."""
        if len(self._timers) >= PROBE_CONNECTIONS_MAX:
            oldest = next((other for other in self._timers if not other.has_request), None)
            if oldest is None:
                return False
            self.discard(oldest)
            oldest.end_probe()
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(PROBE_CONNECTION_S, connection.end_probe)
        return True

    def discard(self, connection: "_HttpConnection") -> None:
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()


class _HttpConnection(web.RequestHandler):
    """aiohttp's connection with OpenAI's error format and a limit on the number of connections."""

    def __init__(
        self,
        server: web.Server,
        connections_max: int,
        probe_connections: _ProbeConnections,
        **kwargs: Any,
    ) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._connections_max = connections_max
        self._probe_connections = probe_connections
        self.has_request = False  # Whether a complete request head has arrived.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # `connections` does not have this connection yet; `super().connection_made` adds it.
        connections = len(self._server.connections) - len(self._probe_connections)
        if connections < self._connections_max or self._probe_connections.add(self):
            return super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(asyncio.Protocol())
        _reject_connection(transport, _too_many_connections(self._connections_max))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._probe_connections.discard(self)
        super().connection_lost(exc)

    def begin_request(self, path: str, probe_paths: Collection[str]) -> None:
        """Record that a request has arrived; raise an error if it must be a probe and is not."""
        self.has_request = True
        if self.is_probe and path not in probe_paths:
            raise _too_many_connections(self._connections_max)

    @property
    def is_probe(self) -> bool:
        """Whether the connection is one above the limit, which may send one probe."""
        return self in self._probe_connections

    def end_probe(self) -> None:
        """Close a connection above the limit; send QUEUE_FULL if it has sent no request."""
        transport = self.transport
        if not isinstance(transport, asyncio.Transport):
            return
        if self.has_request:
            transport.abort()
        else:
            _reject_connection(transport, _too_many_connections(self._connections_max))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        assert isinstance(request, _HttpRequest)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has started, so no error response can be sent")
        if status == 400:
            detail = " ".join((message or "").split())[:PATH_CHARACTERS_MAX]
            response = error_response(
                CallFailure(REASONS["UNREADABLE"], f"invalid HTTP request: {detail}")
            )
        else:
            label = request.request_id
            log.error("event=http_failed status=%d label=%r", status, label, exc_info=exc)
            response = error_response(
                CallFailure(
                    REASONS["INTERNAL"], "internal error of this server; see the server log"
                )
            )
        response.headers.update(request.response_headers)
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
        probe_paths: Collection[str] = (),
        error_formats: Mapping[str, ErrorFormat] | None = None,
        address: tuple[str, int] | None = None,
        tls: ssl.SSLContext | None = None,
        security: SecurityConfig | None = None,
        setting: str = "http_port",
    ) -> None:
        """Bind the port.

        `probe_paths`: paths that are answered even if `http_connections_max` connections are open,
        up to PROBE_CONNECTIONS_MAX at once. `error_formats`: the error formats by path, which is
        matched as in `routes`. `address`: host and port; default: `host` and `http_port` of the
        settings. `security`: the web origins that may call this server, and whether it requires
        tokens. `setting`: the name of the port's setting, for errors.
        """
        host, port = address or (config.host, config.http_port)
        self._origin_policy = OriginPolicy(host, security or SecurityConfig())
        self._config = config
        self._routes = routes
        self._probe_paths = probe_paths
        self._probe_connections = _ProbeConnections()
        self._error_formats = error_formats or {}
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
            self._probe_connections,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.http_idle_s,
            access_log=None,
            logger=logging.getLogger(f"{__name__}.connection"),
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, _HttpRequest)
        connection = request.protocol
        assert isinstance(connection, _HttpConnection)
        try:
            connection.begin_request(request.path.rstrip("/"), self._probe_paths)
            request.check_version()
            self._origin_policy.check(request)
            request.response_headers |= self._origin_policy.response_headers(request)
            response = await self._find_handler(request)(request)
        except CallFailure as error:
            error.release_frames()
            response = error_response(error, self._find_error_format(request))
            if not request.content.is_eof():
                response.force_close()  # Otherwise aiohttp would read the rest of the body.
        if not response.prepared:
            response.headers.update(request.response_headers)
        if connection.is_probe:
            response.force_close()
        return response

    def _find_error_format(self, request: web.BaseRequest) -> ErrorFormat:
        error_format = _match_path(self._error_formats, request.path)
        if error_format is None or not error_format.covers(request.method):
            return OPENAI_ERRORS
        return error_format

    def _find_handler(self, request: web.BaseRequest) -> Handler:
        path = request.path
        methods = _match_path(self._routes, path)
        if methods is None:
            quoted_path = ascii(path[:PATH_CHARACTERS_MAX])
            message = f"path {quoted_path} does not exist; {self._path_advice(request)}"
            raise CallFailure(REASONS["UNKNOWN_PATH"], message)
        handler = methods.get(request.method)
        if handler is None and self._origin_policy.is_preflight(request):
            return partial(_answer_preflight, methods)
        if handler is None:
            raise WrongMethodError(path, ", ".join(methods))
        return handler

    def _path_advice(self, request: web.BaseRequest) -> str:
        """Return advice for the error of an unknown path."""
        is_grpc = request.content_type.startswith("application/grpc")
        if is_grpc or _GRPC_PATH.fullmatch(request.path):
            return "this is the HTTP port, and gRPC calls need the gRPC port (setting port)"
        examples = ", ".join(path for path in EXAMPLE_PATHS if path in self._routes)
        return f"this port serves, for example, {examples}; gRPC has another port (setting port)"


def _match_path(table: Mapping[str, T], path: str) -> T | None:
    """Return the entry of a path; None if no entry matches. See `Routes` for the rule."""
    entry = table.get(path) or table.get(path.rstrip("/") or "/")
    parent = path[: path.rfind("/") + 1]
    while entry is None and len(parent) > 1:
        entry = table.get(parent)
        parent = parent[: parent.rfind("/", 0, -1) + 1]
    return entry


def merge_routes(*tables: Routes) -> Routes:
    """Return one table with the routes of all tables, which may add methods to the same path."""
    merged: dict[str, dict[str, Handler]] = {}
    for table in tables:
        for path, methods in table.items():
            merged.setdefault(path, {}).update(methods)
    return merged


async def _answer_preflight(
    methods: Mapping[str, Handler], request: web.BaseRequest
) -> web.StreamResponse:
    return web.Response(status=204, headers={**HEADERS, **preflight_headers(request, methods)})


def _too_many_connections(connections_max: int) -> CallFailure:
    return CallFailure(
        REASONS["QUEUE_FULL"],
        f"this server has {connections_max} connections, the limit (http_connections_max); try "
        "again in a moment",
    )


def _reject_connection(transport: asyncio.Transport, error: CallFailure) -> None:
    """Send an error without reading a request, and close the connection."""
    response = error_response(error)
    body = response.body
    assert isinstance(body, bytes)
    headers = {
        **response.headers,
        REQUEST_ID_HEADER: secrets.token_hex(16),
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    transport.write("\r\n".join([*lines, "", ""]).encode() + body)
    transport.close()
