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
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from gpt.errors import ConfigError
from serving.config import ServerConfig
from serving.front import Ended
from serving.reasons import REASONS

log = logging.getLogger(__name__)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# By path, then by method. A path that ends with "/" stands for all that begin with it.
Routes = Mapping[str, Mapping[str, Answer]]

JSON = "application/json"
# Answers that run on when the server closes its connections get this long to end.
GOODBYE_S = 1.0
# What is said back of a bad request is short, whatever it was.
PATH_CHARACTERS_MAX = 100
BACKLOG = 1024
HEADERS = {"Server": "preamble"}  # The library's own tells its version.


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


class BadRequestError(Ended):
    """HTTP itself is wrong. The status says more than a reason's own."""

    def __init__(self, status: int, message: str, allow: str = "") -> None:
        super().__init__(REASONS["UNREADABLE"], message)
        self.status, self.allow = status, allow


def record_of(ended: Ended) -> dict[str, Any]:
    """A bad end in OpenAI's shape; `code` is the reason's name."""
    status = status_of(ended)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    said = {"message": str(ended), "type": kind, "param": ended.field, "code": ended.reason.name}
    return {"error": said}


def status_of(ended: Ended) -> int:
    return ended.status if isinstance(ended, BadRequestError) else ended.reason.status


def refusal(ended: Ended) -> web.Response:
    """The answer of a call that ended badly before anything was said."""
    headers = {}
    if ended.retry_s is not None:
        # The second is finer, and what OpenAI's own client looks for first.
        headers["Retry-After"] = str(max(1, math.ceil(ended.retry_s)))
        headers["Retry-After-Ms"] = str(round(1000 * ended.retry_s))
    if status_of(ended) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(ended, BadRequestError) and ended.allow:
        headers["Allow"] = ended.allow
    return answered(record_of(ended), status_of(ended), headers)


def answered(
    record: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(record)
    all_headers = {**HEADERS, **(headers or {})}
    return web.Response(status=status, body=body, content_type=JSON, headers=all_headers)


async def body_of(request: web.BaseRequest, bytes_max: int, patience_s: float) -> bytes:
    """What a client sends, within bounds of size and time; also of what it sends compressed."""
    over = BadRequestError(
        413,
        f"the body is over {bytes_max} bytes, the most that this server takes (message_bytes_max)",
    )
    if (request.content_length or 0) > bytes_max:
        raise over
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
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
        raise BadRequestError(408, f"the body did not come within {patience_s:g} s") from None
    except (web.RequestPayloadError, HttpProcessingError, ClientError):
        raise BadRequestError(
            400, "the body is not what its headers say: it is cut, or coded in another way"
        ) from None
    return b"".join(parts)


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
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

    def cut(self) -> None:
        """End the connection in the middle, since nothing more can be said on it."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


class _Connection(web.RequestHandler):
    """The library's, but for how it says that it could not read something."""

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
            response = refusal(BadRequestError(400, f"that is no HTTP request: {said}"))
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
        self._protocols = web.Server(self._answer, handler_cancellation=True)
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
        if len(self._protocols.connections) >= self._config.http_connections_max:
            return _Refused()
        return _Connection(
            self._protocols,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.http_idle_s,
            access_log=None,  # type: ignore[arg-type] # None is what its own callers give.
            logger=logging.getLogger(f"{__name__}.connection"),
        )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._find(request)(request)
        except Ended as ended:
            response = refusal(ended)
            if not request.content.is_eof():
                response.force_close()  # What is left of the body is not waited for.
            return response

    def _find(self, request: web.BaseRequest) -> Answer:
        path = request.path
        parent = path[: path.rfind("/") + 1]
        methods = self._routes.get(path) or self._routes.get(parent)
        if methods is None:
            known = ", ".join(path for path in self._routes if not path.endswith("/"))
            shown = ascii(path[:PATH_CHARACTERS_MAX])
            raise BadRequestError(404, f"there is no {shown} here; known are: {known}")
        answer = methods.get(request.method)
        if answer is None:
            allow = ", ".join(methods)
            raise BadRequestError(405, f"{path} takes {allow}", allow)
        return answer


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
