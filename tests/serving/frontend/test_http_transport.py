"""The HTTP port, met by raw sockets: pages, what HTTP can have wrong, and clients that vanish.

Its model knows numbers only, so nothing but its length ends a completion, and a long one can be
caught in the middle.
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

from serving.config import ServerConfig
from serving.frontend.http_transport import HttpServer
from serving.service.error_reasons import REASONS
from tests.support.servers import (
    START_S,
    WAIT_S,
    Server,
    eventually,
    free_port,
    serving,
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
    seen: dict[str, str] = {}
    watching = threading.Thread(target=watch, args=(limits["metrics_port"], seen))
    watching.start()
    with serving(checkpoint, folder / "s.yaml", folder / "log", **limits) as server:
        watching.join()
        aside = f"http={server.address.rpartition(':')[0]}:{limits['metrics_port']}"
        yield Aside(server.process, server.ready, aside, seen)
        log = (folder / "log").read_text()
        assert "Traceback" not in log
        assert log.count("event=metrics_exposed host=0.0.0.0 ") == 1


@dataclass
class Aside(Server):
    """A server whose metrics have an address of their own."""

    metrics: str
    seen: Mapping[str, str]  # What was told before it was ready.

    def metric(self, series: str) -> float:
        return Server(self.process, self.metrics).metric(series)


def watch(port: int, seen: dict[str, str]) -> None:
    """What a server says of itself from its first answer on, until it is ready."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            ready = sent(port, request("/health/ready", method="GET"))
            if ready.status == 200:
                return
            for path in ("/health/live", "/metrics"):
                page = sent(port, request(path, method="GET")).body.decode()
                seen.setdefault(path, page)
            seen.setdefault("/health/ready", f"{ready.status} {ready.body.decode()}")
        except (AssertionError, OSError):
            time.sleep(0.01)


@pytest.fixture
def port(server: Server) -> Iterator[int]:
    yield int(server._said("http").rpartition(":")[2])
    eventually(lambda: idle(server))


def idle(server: Server) -> bool:
    states = ("scheduler_running_requests", "scheduler_waiting_requests", "requests_in_flight")
    return all(server.metric(f"preamble_{state}") == 0 for state in states)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self.body)["error"]
        return found


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def sent(port: int, data: bytes) -> Reply:
    """One request, as it is, and the answer to it."""
    with opened(port) as client:
        client.sendall(data)
        return replied(client)


def replied(client: socket.socket, *, head: bool = False) -> Reply:
    raw = b""
    while b"\r\n\r\n" not in raw:
        more = client.recv(1)
        assert more, f"closed after {raw!r}"
        raw += more
    first, *lines = raw.decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    while not head and (left := int(headers.get("content-length", 0)) - len(body)):
        body += client.recv(left)
    return Reply(int(first.split()[1]), headers, body)


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    given = {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def asked(record: object, **headers: str) -> bytes:
    return request("/v1/completions", json.dumps(record).encode(), **headers)


def test_pages_are_there_for_get_and_head_and_say_what_else_there_is(port: int) -> None:
    live = sent(port, b"GET /health/live?verbose HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (live.status, live.body) == (200, b"live\n")
    assert live.headers["server"] == "preamble"
    with opened(port) as client:
        client.sendall(b"HEAD /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        head = replied(client, head=True)
        assert (head.status, head.headers["content-length"]) == (200, "6")
        client.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")  # No body came between.
        assert replied(client).body == b"ready\n"

    nowhere = sent(port, b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (nowhere.status, nowhere.error["code"]) == (404, "UNKNOWN_PATH")
    assert "/v1/completions" in nowhere.error["message"]
    wrong = sent(port, request("/health/live", method="DELETE"))
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.error["code"] == "WRONG_METHOD"


def test_pages_are_answered_while_the_model_loads(server: Aside) -> None:
    assert server.seen["/health/ready"] == "503 loading\n"
    assert server.seen["/health/live"] == "live\n"
    assert 'preamble_engine_state{state="loading"} 1.0' in server.seen["/metrics"]


def test_metrics_may_have_an_address_of_their_own(server: Aside, port: int) -> None:
    own = Server(server.process, server.metrics)
    assert own.get("/metrics")[0] == own.get("/health/ready")[0] == 200
    assert own.get("/v1/models")[0] == 404
    assert server.get("/metrics")[0] == 404
    assert server.get("/v1/models")[0] == 200


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "no HTTP request"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "no HTTP request"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400, "HTTP/2.0 is not spoken here"),
        (b"DELETE /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400, "no HTTP request"),
        (b"DELETE /v1/models/%ff%f0 HTTP/1.1\r\nHost: x\r\n\r\n", 405, "takes GET, HEAD"),
        (b"GET /health/live HTTP/1.1\r\nno colon\r\n\r\n", 400, "no HTTP request"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, "no HTTP request"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 20_000 + b"\r\n\r\n", 400, "no HTTP request"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", 400, "no HTTP request"),
        (request("/v1/completions", content_length="-5"), 400, "no HTTP request"),
        (request("/v1/completions", transfer_encoding="chunked"), 400, "no HTTP request"),
        (request("/v1/completions", content_length="1000000"), 413, str(BODY_BYTES_MAX)),
        (asked({"prompt": "1"}, content_type="text/plain"), 400, "application/json"),
        (asked({"prompt": "1"}, content_encoding="gzip"), 400, "its headers say"),
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
def test_what_is_wrong_with_a_request_is_told_in_one_shape(
    port: int, data: bytes, status: int, said: str
) -> None:
    reply = sent(port, data)

    assert reply.status == status
    assert reply.headers["content-type"].startswith("application/json")
    assert said in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert REASONS[reply.error["code"]].status == status


def test_a_body_in_chunks_and_one_that_waits_to_be_asked_for_are_read(port: int) -> None:
    body = json.dumps({"prompt": "1 2", "max_tokens": 1, "temperature": 0}).encode()
    plain = sent(port, request("/v1/completions", body))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunked = sent(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    with opened(port) as client:
        length = f"Content-Length: {len(body)}\r\n".encode()
        client.sendall(head + length + b"Expect: 100-continue\r\n\r\n")
        assert replied(client).status == 100
        client.sendall(body)
        expected = replied(client)

    texts = [json.loads(one.body)["choices"][0]["text"] for one in (plain, chunked, expected)]
    assert texts == [texts[0]] * 3


def test_a_body_in_chunks_ends_where_it_is_too_large(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    reply = sent(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2)
    assert reply.status == 413


def test_requests_in_one_go_are_answered_in_their_order(port: int) -> None:
    with opened(port) as client:
        one = asked({"prompt": "1 2", "max_tokens": 1})
        client.sendall(one + request("/health/live", method="GET") + one)
        replies = [replied(client) for _ in range(3)]

    assert [reply.status for reply in replies] == [200] * 3
    assert replies[1].body == b"live\n"


def test_a_client_that_leaves_takes_its_request_along(server: Server, port: int) -> None:
    for record in (LONG, {**LONG, "stream": False}):
        with opened(port) as client:
            client.sendall(asked(record))
            eventually(lambda: server.metric("preamble_scheduler_running_requests") == 1)

        eventually(lambda: idle(server))
    ended = 'preamble_requests_total{code="CANCELLED",method="completions",wire="openai"}'
    eventually(lambda: server.metric(ended) >= 2)


def test_a_reader_that_takes_nothing_holds_up_nobody_and_loses_its_connection(
    server: Server, port: int
) -> None:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    with closing(held):
        held.settimeout(WAIT_S)
        held.connect(("127.0.0.1", port))
        # Its answers are far more than what sockets hold for it.
        held.sendall(asked({**LONG, "n": 8, "logprobs": 20}))
        quick = sent(port, asked({"prompt": "1", "max_tokens": 1}))
        assert quick.status == 200
        slow = 'preamble_request_errors_total{reason="SLOW_READER"}'
        eventually(lambda: server.metric(slow) >= 1)
        eventually(lambda: idle(server))


def test_connections_that_say_nothing_or_not_all_are_closed(port: int) -> None:
    started = time.monotonic()
    with opened(port) as silent, opened(port) as halting, opened(port) as stuck:
        halting.sendall(b"GET /health/live HTTP/1.1\r\nHos")
        stuck.sendall(request("/v1/completions", content_length="10"))
        late = replied(stuck)
        assert silent.recv(1) == halting.recv(1) == b""
    assert (late.status, late.error["code"]) == (408, "BODY_TOO_LATE")
    assert time.monotonic() - started > 1


def test_only_so_many_connections_are_taken(port: int) -> None:
    held = [opened(port) for _ in range(30)]
    try:
        held[0].sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert replied(held[0]).status == 200
        assert replied(held[-1]).status == 429  # Before it has asked anything.
    finally:
        for one in held:
            one.close()
    eventually(lambda: free(port))


def free(port: int) -> bool:
    try:
        return sent(port, b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n").status == 200
    except (AssertionError, OSError):
        return False


def test_reflection_that_is_switched_off_is_not_there(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for version in ("v1", "v1alpha"):
            name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            ask: Any = channel.stream_stream(name)
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(iter([b""]), timeout=WAIT_S))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_is_refused_by_the_settings_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServerConfig("m", http_port=taken.getsockname()[1])
        with pytest.raises(Exception, match=re.escape(f"http_port {config.http_port} of")):
            HttpServer(config, {})
