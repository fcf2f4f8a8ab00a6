"""Host and Origin checks, CORS, request ids and early headers, on an HTTP server with test routes.

The server runs in this process and is called over sockets, without a model.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from gpt.errors import ConfigError
from serving.config import NetworkConfig, SecurityConfig
from serving.frontend.call import CallFailure
from serving.frontend.http_transport import (
    OPENING_COMMENT,
    EventStream,
    HttpServer,
    Routes,
    TextPage,
    call_origin,
    page_handlers,
)
from serving.service.error_reasons import REASONS

PAGE = "http://evil.example"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]


async def send(port: int, method: str = "GET", path: str = "/page", **headers: str) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    names = {"Connection": "close", "Host": "localhost"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in names.items()]
    writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())
    reply = await reader.read()
    writer.close()
    status_line, *header_lines = reply.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    pairs = (line.partition(": ") for line in header_lines)
    return Reply(int(status_line.split()[1]), {name.lower(): value for name, _, value in pairs})


def run(
    test: Callable[[int], Awaitable[None]],
    security: SecurityConfig | None = None,
    host: str = "127.0.0.1",
    routes: Routes | None = None,
) -> None:
    """Run a test against a server; it gets the server's port."""

    async def work() -> None:
        all_routes = {"/page": page_handlers(lambda: TextPage(200, b"a page")), **(routes or {})}
        config = NetworkConfig(http_port=0, host=host)
        async with HttpServer(config, all_routes, security=security) as server:
            await test(server.port)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST.:9001", 200),
        ("app.localhost", 200),
        ("127.0.0.1:1", 200),
        ("127.8.8.8", 200),
        ("[::1]:9001", 200),
        ("[::1]", 200),
        ("proxy.example:443", 200),
        ("evil.example", 403),
        ("evil.example:9001", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.7", 403),
        ("[2001:db8::1]", 403),
        ("0.0.0.0", 403),
    ],
)
def test_open_loopback_servers_accept_only_loopback_and_allowed_hosts(
    host: str, status: int
) -> None:
    async def test(port: int) -> None:
        for path in ("/page", "/nowhere"):
            reply = await send(port, path=path, Host=host)
            assert reply.status == (404 if path == "/nowhere" and status == 200 else status)

    run(test, SecurityConfig(allowed_hosts=("Proxy.example",)))


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:80", 200),
        ("https://localhost:80", 200),  # A proxy may add TLS.
        ("HTTP://LOCALHOST:80", 200),
        ("https://chat.example", 200),
        ("http://localhost", 403),
        ("http://localhost:81", 403),
        (PAGE, 403),
        ("null", 403),
        ("http://[", 403),
        ("https://chat.example.evil.example", 403),
    ],
)
def test_open_loopback_servers_accept_only_same_and_allowed_origins(
    origin: str, status: int
) -> None:
    async def test(port: int) -> None:
        reply = await send(port, Host="localhost:80", Origin=origin)
        assert reply.status == status

    run(test, SecurityConfig(allowed_origins=("https://chat.example",)))


def test_servers_with_tokens_or_other_addresses_check_no_host_by_default() -> None:
    async def accepts(port: int) -> None:
        assert (await send(port, Host="evil.example", Origin=PAGE)).status == 200

    run(accepts, SecurityConfig(tokens="tokens.yaml"))
    run(accepts, SecurityConfig(insecure=True), host="0.0.0.0")
    run(accepts, SecurityConfig(allowed_hosts=("*",), allowed_origins=("*",)))


def test_allowed_hosts_are_checked_on_every_address() -> None:
    async def test(port: int) -> None:
        for host, status in (
            ("api.example", 200),
            ("localhost", 200),
            ("10.0.0.7:9001", 200),  # A probe.
            ("evil.example", 403),
        ):
            assert (await send(port, Host=host)).status == status, host

    run(test, SecurityConfig(allowed_hosts=("api.example",), insecure=True), host="0.0.0.0")


def test_cors_permits_allowed_origins_only() -> None:
    preflight: dict[str, Any] = {
        "method": "OPTIONS",
        "Access_Control_Request_Method": "GET",
        "Access_Control_Request_Headers": "authorization,content-type,x-stainless-lang",
    }

    async def test(port: int) -> None:
        allowed = await send(port, Origin="https://chat.example", **preflight)
        assert allowed.status == 204
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert allowed.headers["access-control-allow-methods"] == "GET, HEAD"
        assert allowed.headers["access-control-allow-headers"].endswith("x-stainless-lang")
        assert allowed.headers["vary"] == "Origin"
        for path, status in (("/page", 200), ("/nowhere", 404)):
            reply = await send(port, path=path, Origin="https://chat.example")
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "https://chat.example"
            assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
        refused = await send(port, Origin=PAGE, **preflight)
        assert refused.status == 405
        for reply in (refused, await send(port, Origin=PAGE), await send(port)):
            assert "access-control-allow-origin" not in reply.headers
            assert reply.headers["vary"] == "Origin"

    # With tokens, a request of another origin is answered, but its script cannot read the answer.
    run(test, SecurityConfig(allowed_origins=("https://chat.example",), tokens="tokens.yaml"))


def test_cors_is_off_by_default() -> None:
    async def test(port: int) -> None:
        preflight = {"Origin": "http://localhost", "Access_Control_Request_Method": "GET"}
        reply = await send(port, "OPTIONS", **preflight)
        assert reply.status == 405
        assert not {"vary", "access-control-allow-origin"} & set(reply.headers)

    run(test)


def test_every_origin_can_be_allowed() -> None:
    async def test(port: int) -> None:
        for origin in (PAGE, "null"):
            reply = await send(port, Origin=origin)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")

    run(test, SecurityConfig(allowed_origins=("*",)))


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_origins": ("chat.example",)},
        {"allowed_origins": ("https://chat.example/",)},
        {"allowed_origins": ("https://*.example",)},
        {"allowed_hosts": ("https://chat.example",)},
        {"allowed_hosts": ("chat.example:80",)},
        {"allowed_hosts": ("",)},
    ],
    ids=str,
)
def test_invalid_origins_and_hosts_are_refused(settings: Any) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name} has "):
        SecurityConfig(**settings)


def test_every_response_has_a_request_id() -> None:
    async def fail(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("a bug")

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        events = EventStream(request)
        await events.send(call_origin(request, "/stream").request_id.encode())
        return await events.finish()

    async def test(port: int) -> None:
        paths = {"/page": 200, "/nowhere": 404, "/fail": 500, "/stream": 200, "/page%": 400}
        ids = set()
        for path, status in paths.items():
            reply = await send(port, path=path)
            assert reply.status == status or path == "/page%"
            ids.add(reply.headers["x-request-id"])
            if path != "/page%":
                sent = await send(port, path=path, X_Request_Id="an id")
                assert sent.headers["x-request-id"] == "an id"
        assert len(ids) == len(paths)
        assert all(len(request_id) == 32 for request_id in ids)
        refused = await send(port, Host="evil.example", X_Request_Id="an id")
        assert (refused.status, refused.headers["x-request-id"]) == (403, "an id")
        correlated = await send(port, X_Correlation_Id="theirs")
        assert correlated.headers["x-request-id"] == "theirs"

    run(test, routes={"/fail": {"GET": fail}, "/stream": {"GET": stream}})


async def read_head(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode()


def test_headers_of_a_slow_stream_precede_its_first_event() -> None:
    proceed = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        events = EventStream(request)
        events.open_in(0.0)
        await proceed.wait()
        await events.send(b"1")
        await events.send(b"2")
        return await events.finish()

    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head = await read_head(reader)
        assert head.startswith("HTTP/1.1 200") and "text/event-stream" in head
        await reader.readuntil(OPENING_COMMENT)
        proceed.set()
        rest = (await reader.read()).decode()
        writer.close()
        assert "data: 1\n\n" in rest and "data: 2\n\n" in rest
        assert OPENING_COMMENT.decode() not in rest

    run(test, routes={"/slow": {"GET": slow}})


def test_fast_streams_and_refusals_have_no_comment() -> None:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        async with EventStream(request) as events:
            events.open_in(60.0)
            return await events.finish_with_error(CallFailure(REASONS["QUEUE_FULL"], "full"), {})

    async def fast(request: web.BaseRequest) -> web.StreamResponse:
        events = EventStream(request)
        events.open_in(60.0)
        await events.send(b"1")
        return await events.finish()

    async def test(port: int) -> None:
        assert (await send(port, path="/refuse")).status == 429
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /fast HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        body = await reader.read()
        writer.close()
        assert b"data: 1\n\n" in body and OPENING_COMMENT not in body

    run(test, routes={"/refuse": {"GET": refuse}, "/fast": {"GET": fast}})
