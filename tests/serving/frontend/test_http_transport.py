"""The HTTP transport, by raw sockets: pages, malformed requests, and clients that vanish.

The model's tokens are numbers, so only the length ends a completion, and a long one can be
interrupted.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from serving.config import NetworkConfig
from serving.frontend.http_transport import (
    PROBE_CONNECTION_S,
    PROBE_CONNECTIONS_MAX,
    HttpServer,
)
from serving.service.error_reasons import REASONS
from tests.support.servers import (
    START_S,
    WAIT_S,
    Server,
    eventually,
    free_port,
    is_idle,
    serving,
    without_model_name,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


BODY_BYTES_MAX = 100_000
IDLE_S = 5.0
LONG = {"prompt": [1, 2, 3], "max_tokens": 4000, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    limits: dict[str, Any] = {
        "message_bytes_max": BODY_BYTES_MAX,
        "http_idle_s": IDLE_S,
        "http_connections_max": 20,
        "slow_reader_s": 3.0,
        "metrics_port": free_port(),
        "metrics_host": "0.0.0.0",
        "reflection": False,
    }
    observed_states: dict[str, str] = {}
    watching = threading.Thread(
        target=record_startup, args=(limits["metrics_port"], observed_states)
    )
    watching.start()
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        watching.join()
        metrics_address = f"http={server.address.rpartition(':')[0]}:{limits['metrics_port']}"
        yield MetricsServer(server.process, server.ready, metrics_address, observed_states)
        log = (folder / "log").read_text()
        assert "Traceback" not in log
        assert log.count("event=metrics_exposed host=0.0.0.0 ") == 1


@dataclass
class MetricsServer(Server):
    """A server whose metrics have an address of their own."""

    metrics: str
    startup_responses: Mapping[str, str]  # Responses before it was ready.

    def metric(self, series: str) -> float:
        return Server(self.process, self.metrics).metric(series)


def record_startup(port: int, observed_states: dict[str, str]) -> None:
    """Record the responses of a starting server until it is ready."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            ready = send(port, request("/health/ready", method="GET"))
            if ready.status == 200:
                return
            for path in ("/health/live", "/metrics"):
                page = send(port, request(path, method="GET")).body.decode()
                observed_states.setdefault(path, page)
            observed_states.setdefault("/health/ready", f"{ready.status} {ready.body.decode()}")
        except (AssertionError, OSError):
            time.sleep(0.01)


@pytest.fixture
def port(server: Server) -> Iterator[int]:
    yield int(server.ready_field("http").rpartition(":")[2])
    eventually(lambda: is_idle(server))


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> Mapping[str, Any]:
        error_body: Mapping[str, Any] = json.loads(self.body)["error"]
        return error_body


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def send(port: int, payload: bytes) -> Reply:
    """Send one request as it is, and read its response."""
    with connect(port) as client:
        client.sendall(payload)
        return read_reply(client)


def read_reply(client: socket.socket, *, head: bool = False) -> Reply:
    raw = b""
    while b"\r\n\r\n" not in raw:
        chunk = client.recv(1)
        assert chunk, f"closed after {raw!r}"
        raw += chunk
    status_line, *lines = raw.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    while not head and (remaining := int(headers.get("content-length", 0)) - len(body)):
        body += client.recv(remaining)
    return Reply(int(status_line.split()[1]), headers, body)


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    all_headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def completion_request(record: object, **headers: str) -> bytes:
    return request("/v1/completions", json.dumps(record).encode(), **headers)


def test_pages_answer_get_and_head_and_list_allowed_methods(port: int) -> None:
    live = send(port, b"GET /health/live?verbose HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (live.status, live.body) == (200, b"live\n")
    assert live.headers["server"] == "preamble"
    with connect(port) as client:
        client.sendall(b"HEAD /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = read_reply(client, head=True)
        assert (head.status, head.headers["content-length"]) == (200, "6")
        client.sendall(
            b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )  # HEAD had no body.
        assert read_reply(client).body == b"ready\n"

    nowhere = send(port, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (nowhere.status, nowhere.error["code"]) == (404, "UNKNOWN_PATH")
    assert "/v1/completions" in nowhere.error["message"]
    wrong_method = send(port, request("/health/live", method="DELETE"))
    assert (wrong_method.status, wrong_method.headers["allow"]) == (405, "GET, HEAD")
    assert wrong_method.error["code"] == "WRONG_METHOD"


def test_pages_are_answered_while_the_model_loads(server: MetricsServer) -> None:
    assert server.startup_responses["/health/ready"] == "503 loading\n"
    assert server.startup_responses["/health/live"] == "live\n"
    metrics = without_model_name(server.startup_responses["/metrics"])
    assert 'preamble_engine_state{state="loading"} 1.0' in metrics


def test_metrics_can_have_a_separate_address(server: MetricsServer, port: int) -> None:
    metrics_server = Server(server.process, server.metrics)
    assert metrics_server.get("/metrics")[0] == metrics_server.get("/health/ready")[0] == 200
    assert metrics_server.get("/v1/models")[0] == 404
    assert server.get("/metrics")[0] == 404
    assert server.get("/v1/models")[0] == 200


@pytest.mark.parametrize(
    ("payload", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400, "HTTP/2.0 is not supported"),
        (
            b"DELETE /v1/models/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
            400,
            "invalid HTTP request",
        ),
        (
            b"DELETE /v1/models/%ff%f0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            405,
            "supports only: GET, HEAD",
        ),
        (b"GET /health/live HTTP/1.1\r\nno colon\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 20_000 + b"\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", 400, "invalid HTTP request"),
        (request("/v1/completions", content_length="-5"), 400, "invalid HTTP request"),
        (request("/v1/completions", transfer_encoding="chunked"), 400, "invalid HTTP request"),
        (request("/v1/completions", content_length="1000000"), 413, str(BODY_BYTES_MAX)),
        (completion_request({"prompt": "1"}, content_type="text/plain"), 400, "application/json"),
        (
            completion_request({"prompt": "1"}, content_encoding="gzip"),
            400,
            "does not match its headers",
        ),
        (request("/v1/completions", b"{"), 400, "not JSON"),
        (request("/v1/completions", b""), 400, "not JSON"),
        (request("/v1/completions", b"[]"), 400, "object"),
        (request("/v1/completions", b'{"prompt": "\xff"}'), 400, "UTF-8"),
        (request("/v1/completions", b'{"prompt": "\\ud800"}'), 400, "not JSON"),
        (request("/v1/completions", b'{"top_p": NaN}'), 400, "not JSON"),
        (request("/v1/completions", b'{"top_p": 1e999}'), 400, "out of range"),
        (request("/v1/completions", b'{"seed": 1' + b"0" * 5000 + b"}"), 400, "out of range"),
        (request("/v1/completions", b'{"prompt": ' + b"[" * 50_000), 400, "prompt"),
        (request("/v1/completions", b'{"guided_json": ' + b"[" * 50_000), 400, "deeply"),
    ],
)
def test_errors_have_one_format(port: int, payload: bytes, status: int, message: str) -> None:
    reply = send(port, payload)

    assert reply.status == status
    assert reply.headers["content-type"].startswith("application/json")
    assert message in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert REASONS[reply.error["code"]].status == status


def test_chunked_bodies_and_expect_continue_are_read(port: int) -> None:
    body = json.dumps({"prompt": "1 2", "max_tokens": 1, "temperature": 0}).encode()
    plain = send(port, request("/v1/completions", body))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunked = send(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    with connect(port) as client:
        length = f"Content-Length: {len(body)}\r\n".encode()
        client.sendall(head + length + b"Expect: 100-continue\r\n\r\n")
        assert read_reply(client).status == 100
        client.sendall(body)
        expected = read_reply(client)

    texts = [json.loads(reply.body)["choices"][0]["text"] for reply in (plain, chunked, expected)]
    assert texts == [texts[0]] * 3


def test_chunked_bodies_over_the_limit_are_refused(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    reply = send(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2)
    assert reply.status == 413


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    with connect(port) as client:
        payload = completion_request({"prompt": "1 2", "max_tokens": 1})
        client.sendall(payload + request("/health/live", method="GET") + payload)
        replies = [read_reply(client) for _ in range(3)]

    assert [reply.status for reply in replies] == [200] * 3
    assert replies[1].body == b"live\n"


def test_requests_of_disconnected_clients_are_cancelled(server: Server, port: int) -> None:
    for record in (LONG, {**LONG, "stream": False}):
        with connect(port) as client:
            client.sendall(completion_request(record))
            eventually(lambda: server.metric("preamble_scheduler_running_requests") == 1)

        eventually(lambda: is_idle(server))
    cancelled_requests = (
        'preamble_requests_total{code="CANCELLED",method="completions",wire="openai"}'
    )
    eventually(lambda: server.metric(cancelled_requests) >= 2)


def test_slow_readers_are_disconnected_without_delaying_others(server: Server, port: int) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    with closing(connection):
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", port))
        # Its response is far larger than the sockets' buffers.
        connection.sendall(completion_request({**LONG, "n": 8, "logprobs": 20}))
        quick_reply = send(port, completion_request({"prompt": "1", "max_tokens": 1}))
        assert quick_reply.status == 200
        slow = 'preamble_request_errors_total{reason="SLOW_READER"}'
        eventually(lambda: server.metric(slow) >= 1)
        eventually(lambda: is_idle(server))


def test_idle_and_incomplete_connections_are_closed(port: int) -> None:
    started = time.monotonic()
    with connect(port) as silent, connect(port) as halting, connect(port) as stuck:
        halting.sendall(b"GET /health/live HTTP/1.1\r\nHos")
        stuck.sendall(request("/v1/completions", content_length="10"))
        timeout_reply = read_reply(stuck)
        assert silent.recv(1) == halting.recv(1) == b""
    assert (timeout_reply.status, timeout_reply.error["code"]) == (408, "BODY_TOO_LATE")
    assert time.monotonic() - started > 1


def test_connections_are_limited(port: int) -> None:
    connections = [connect(port) for _ in range(30)]
    try:
        connections[0].sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_reply(connections[0]).status == 200
        assert read_reply(connections[-1]).status == 429  # Before any request is sent.
    finally:
        for connection in connections:
            connection.close()
    eventually(lambda: is_accepting(port))


PROBES = ("/health/live", "/health/ready", "/livez/", "/v2/health/ready")


def test_probes_are_answered_while_idle_connections_take_all_others(
    server: MetricsServer, port: int
) -> None:
    metrics_port = int(server.metrics.rpartition(":")[2])
    for filled_port, paths in ((port, PROBES), (metrics_port, ("/health/live", "/metrics"))):
        # More than the bound (20) and the connections for probes: the last ones are rejected later.
        idle = [connect(filled_port) for _ in range(20 + PROBE_CONNECTIONS_MAX + 5)]
        try:
            for _ in range(3):
                for path in paths:
                    probe = send(filled_port, request(path, method="GET"))
                    assert (probe.status, probe.headers["connection"]) == (200, "close"), path
            if filled_port == port:
                refused = send(port, completion_request({"prompt": [1], "max_tokens": 1}))
                assert (refused.status, refused.error["code"]) == (429, "QUEUE_FULL")
                assert "http_connections_max" in refused.error["message"]
        finally:
            for connection in idle:
                connection.close()
        eventually(lambda filled_port=filled_port: is_accepting(filled_port))  # type: ignore[misc]


def test_a_connection_for_a_probe_is_closed_after_two_seconds(port: int) -> None:
    idle = [connect(port) for _ in range(20)]
    try:
        with connect(port) as silent, connect(port) as halting:
            started = time.monotonic()
            halting.sendall(b"GET /health/live HTTP/1.1\r\nHos")
            for probe in (silent, halting):
                refused = read_reply(probe)
                assert (refused.status, refused.error["code"]) == (429, "QUEUE_FULL")
                assert probe.recv(1) == b""
            assert time.monotonic() - started > PROBE_CONNECTION_S / 2
    finally:
        for connection in idle:
            connection.close()
    eventually(lambda: is_accepting(port))


def is_accepting(port: int) -> bool:
    try:
        return send(port, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
    except (AssertionError, OSError):
        return False


def test_disabled_reflection_is_unimplemented(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for version in ("v1", "v1alpha"):
            name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            call: Any = channel.stream_stream(name)
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([b""]), timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_occupied_ports_are_refused_by_setting_name() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        config = NetworkConfig(http_port=occupied.getsockname()[1])
        with pytest.raises(Exception, match=re.escape(f"http_port {config.http_port} of")):
            HttpServer(config, {})
