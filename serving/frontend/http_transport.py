"""HTTP/1.1, on the server's own event loop: paths, bodies within bounds, and one shape of error.

A path has a function for each method. All that HTTP itself can have wrong ends here, in the words
in which every error on this port is said: OpenAI's, since those are what clients of it read. Knows
no model and no prompt.
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
from serving.config import ServerConfig
from serving.frontend.call import Ended
from serving.frontend.call_origin import Came, label_of
from serving.service.error_reasons import REASONS

log = logging.getLogger(__name__)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# By path, then by method. A path like "/v1/models/" stands for all that begin with it.
Routes = Mapping[str, Mapping[str, Answer]]

JSON = "application/json"
# Answers that run on when the server closes its connections get this long to end.
GOODBYE_S = 1.0
# What is said back of a bad request is short, whatever it was.
PATH_CHARACTERS_MAX = 100
BACKLOG = 1024
HEADERS = {"Server": "preamble"}  # The library's own tells its version.
NAME = "X-Request-Id"  # A caller that names its request finds the name on the answer.
NOTHING: Mapping[str, str] = {}
VERSIONS = (HttpVersion10, HttpVersion11)


@dataclass(frozen=True)
class Page:
    """A whole answer in plain text."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def paged(make: Callable[[], Page | Awaitable[Page]]) -> Mapping[str, Answer]:
    """The methods of a page, which can be looked at only."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        made = make()
        page = made if isinstance(made, Page) else await made
        headers = {**HEADERS, "Content-Type": page.content_type, "Cache-Control": "no-store"}
        return web.Response(status=page.status, body=page.body, headers=headers)

    return {"GET": answer, "HEAD": answer}


class WrongMethodError(Ended):
    """What a path takes instead is a header too."""

    def __init__(self, path: str, allow: str) -> None:
        shown = ascii(path[:PATH_CHARACTERS_MAX])
        super().__init__(REASONS["WRONG_METHOD"], f"{shown} takes {allow}")
        self.allow = allow


def record_of(ended: Ended) -> dict[str, Any]:
    """A bad end in OpenAI's shape; `code` is the reason's name."""
    status = ended.reason.status
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message, field = _writable(str(ended)), ended.field and _writable(ended.field)
    return {"error": {"message": message, "type": kind, "param": field, "code": ended.reason.name}}


def _writable(text: str) -> str:
    """Without what no UTF-8 can be of, as a name of the caller's may have it."""
    return text.encode(errors="replace").decode()


def refusal(ended: Ended) -> web.Response:
    """The answer of a call that ended badly before anything was said."""
    headers = {}
    if ended.retry_s is not None:
        # The second is finer, and what OpenAI's own client looks for first.
        headers["Retry-After"] = str(max(1, math.ceil(ended.retry_s)))
        headers["Retry-After-Ms"] = str(round(1000 * ended.retry_s))
    if ended.reason.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(ended, WrongMethodError):
        headers["Allow"] = ended.allow
    return answered(record_of(ended), ended.reason.status, headers)


def answered(
    record: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(record)
    all_headers = {**HEADERS, **(headers or {})}
    return web.Response(status=status, body=body, content_type=JSON, headers=all_headers)


async def body_of(request: web.BaseRequest, bytes_max: int, patience_s: float) -> bytes:
    """What a client sends, within bounds of size and time; also of what it sends compressed."""
    over = Ended(
        REASONS["BODY_TOO_LARGE"],
        f"the body is over {bytes_max} bytes, the most that this server takes (message_bytes_max)",
    )
    if (request.content_length or 0) > bytes_max:
        raise over
    if request.headers.get("Expect", "").lower() == "100-continue":
        try:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        except ConnectionError:
            raise asyncio.CancelledError from None  # Nobody hears it any more.
        request.writer.output_size = 0  # Else it would count as an answer's beginning.
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > bytes_max:
                    raise over
                parts.append(part)
    except TimeoutError:
        message = f"the body did not come within {patience_s:g} s (slow_reader_s)"
        raise Ended(REASONS["BODY_TOO_LATE"], message) from None
    except (web.RequestPayloadError, HttpProcessingError, ClientError):
        raise Ended(
            REASONS["UNREADABLE"],
            "the body is not what its headers say: it is cut, or coded in another way",
        ) from None
    return b"".join(parts)


def came(request: web.BaseRequest, route: str, more: Mapping[str, str] = NOTHING) -> Came:
    """How a call came. `route`: its path, as one of few."""
    facts = {
        **more,
        "http.request.method": request.method,
        "http.route": route,
        "url.path": request.path[:PATH_CHARACTERS_MAX],
        "url.scheme": request.scheme,
    }
    return Came(f"{request.method} {route}", request.headers, facts)


def _named(request: web.BaseRequest) -> Mapping[str, str]:
    name = label_of(request.headers.get(NAME, ""))
    return {NAME: name} if name else NOTHING


class Events:
    """An answer in events (SSE), begun with the first one."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def send(self, *events: bytes) -> None:
        """Returns when the client has taken enough of what was sent."""
        data = b"".join(b"data: " + event + b"\n\n" for event in events)
        try:
            await (await self._begin()).write(data)
        except ConnectionError:
            raise asyncio.CancelledError from None  # Nobody hears it any more.

    async def end(self) -> web.StreamResponse:
        """To be called once, after the last event."""
        return await self._begin()

    async def _begin(self) -> web.StreamResponse:
        if self._response is None:
            headers = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
            # A proxy that collects events would make a stream of them one late answer.
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            headers |= _named(self._request)
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

    def cut(self) -> None:
        """End the connection in the middle, since nothing more can be said on it."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


class _Request(web.BaseRequest):
    """The library's, but that it is answered in a version that we speak.

    The library reads a few others as well, and says them back.
    """

    ATTRS = web.BaseRequest.ATTRS | {"_said"}

    def __init__(self, message: RawRequestMessage, *rest: Any, **more: Any) -> None:
        self._said = message.version
        if self._said not in VERSIONS:
            message = message._replace(version=HttpVersion11, should_close=True)
        super().__init__(message, *rest, **more)

    def check(self) -> None:
        if self._said not in VERSIONS:
            number = ".".join(map(str, self._said))
            said = f"HTTP/{number} is not spoken here; use HTTP/1.1"
            raise Ended(REASONS["UNREADABLE"], said)


class _Connection(web.RequestHandler):
    """The library's, but for how it says that it could not read something, or takes no more."""

    def __init__(self, server: web.Server, connections_max: int, **kw: Any) -> None:
        super().__init__(server, **kw)
        self._server, self._max = server, connections_max

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not earlier: of those that come at once none is counted before all have been accepted.
        if len(self._server.connections) < self._max:
            return super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(asyncio.Protocol())
        _turn_away(transport, self._max)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, and cannot become another")
        if status == 400:
            said = " ".join((message or "").split())[:PATH_CHARACTERS_MAX]
            response = refusal(Ended(REASONS["UNREADABLE"], f"that is no HTTP request: {said}"))
        else:
            log.error("event=http_failed status=%d", status, exc_info=exc)
            response = refusal(Ended(REASONS["INTERNAL"], "a fault of this server; see its log"))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What a client sent wrong is told to the client, and is no fault to log a stack for."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


def family(host: str) -> socket.AddressFamily:
    """IPv6 if the address is of that kind; a name is taken for IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class HttpServer:
    """Serves `routes` while it is open. The port is taken at once, so that it can be refused."""

    def __init__(
        self,
        config: ServerConfig,
        routes: Routes,
        *,
        address: tuple[str, int] | None = None,
        tls: ssl.SSLContext | None = None,
        setting: str = "http_port",
    ) -> None:
        """`address`: another one than the API's; `setting` is what is to blame if it is taken."""
        host, port = address or (config.host, config.http_port)
        self._config, self._routes, self._tls = config, routes, tls
        self._socket = socket.socket(family(host))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"{setting} {port} of {host} cannot be bound ({error.strerror}); "
                "choose another, or 0 for any that is free"
            ) from None
        self.port: int = self._socket.getsockname()[1]

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # A client that leaves takes the call along.
        self._protocols = web.Server(
            self._answer, request_factory=partial(_Request, loop=loop), handler_cancellation=True
        )
        self._listening = await loop.create_server(
            self._connect,
            sock=self._socket,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=self._config.handshake_s if self._tls else None,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listening.close()
        self._protocols.pre_shutdown()  # Idle connections end, and others after their answers.
        await self._protocols.shutdown(GOODBYE_S)

    def _connect(self) -> asyncio.Protocol:
        return _Connection(
            self._protocols,
            self._config.http_connections_max,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.http_idle_s,
            access_log=None,
            logger=logging.getLogger(f"{__name__}.connection"),
        )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, _Request)
        try:
            request.check()
            response = await self._find(request)(request)
        except Ended as ended:
            response = refusal(ended)
            if not request.content.is_eof():
                response.force_close()  # What is left of the body is not waited for.
        if not response.prepared:
            response.headers.update(_named(request))
        return response

    def _find(self, request: web.BaseRequest) -> Answer:
        path = request.path
        parent = path[: path.rfind("/") + 1]
        # All paths begin with "/", so that one stands for itself only.
        methods = self._routes.get(path) or (self._routes.get(parent) if parent != "/" else None)
        if methods is None:
            known = ", ".join(path for path in self._routes if not path.endswith("/"))
            shown = ascii(path[:PATH_CHARACTERS_MAX])
            message = f"there is no {shown} here; known are: {known}"
            raise Ended(REASONS["UNKNOWN_PATH"], message)
        answer = methods.get(request.method)
        if answer is None:
            raise WrongMethodError(path, ", ".join(methods))
        return answer


def _turn_away(transport: asyncio.Transport, connections_max: int) -> None:
    """Say that it is a connection too many, whatever it would have asked, and end it."""
    response = refusal(
        Ended(
            REASONS["QUEUE_FULL"],
            f"this server has {connections_max} connections, and takes no more at once "
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
