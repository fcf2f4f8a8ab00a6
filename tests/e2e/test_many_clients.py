"""Crowds: a thousand who say nothing, some who read nothing, two hundred who vanish.

Each crowd is a process of its own, or sockets here. Others go on asking meanwhile, and get what
they would get alone: greedily in fp64, where a batch changes no token. The model knows numbers
only, so nothing but its length ends an answer, and a long one can be caught in the middle.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc

from clients.client import Options
from clients.transport import CallError
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.broken.kserve_requests import one, request, texts
from tests.support.client_crowd import APART, OPEN_S, completion, crowd
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint
from tests.support.tritonclient_calls import streaming, text_of

pytestmark = pytest.mark.slow  # Servers of its own, and minutes.

IDLE = 1000
# An idle stream is a call of gRPC's library and a task or two of ours; a connection has buffers.
STREAM_BYTES_MAX = 64 << 10
CONNECTION_BYTES_MAX = 64 << 10
OTHERS = 20  # Short calls, of which the slowest
OTHERS_S = 2.0  # takes no longer. The machine may be crowded too.
SHORT = Options(max_new_tokens=8, temperature=0.0)
LONG = 4000
PROMPT = "1 2 3"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("crowds"), tokenizer=False)


def idle(server: Server) -> bool:
    states = ("scheduler_running_requests", "scheduler_waiting_requests", "requests_in_flight")
    return all(server.metric(f"preamble_{state}") == 0 for state in (*states, "kv_blocks_held"))


def in_flight(server: Server, count: int) -> Callable[[], bool]:
    return lambda: server.metric("preamble_requests_in_flight") == count


def others(server: Server, expected: list[int]) -> float:
    """Short calls, one after the other, each answered rightly; how long the slowest took.

    Who is hindered is so each time; a machine that was busy otherwise is not.
    """
    slowest_s = min(_slowest(server, expected) for _ in range(2))
    assert server.get("/health/ready")[0] == 200
    assert slowest_s < OTHERS_S
    return slowest_s


def _slowest(server: Server, expected: list[int]) -> float:
    slowest_s = 0.0
    with server.client() as client:
        for _ in range(OTHERS):
            began = time.monotonic()
            assert client.generate(PROMPT, SHORT).token_ids == expected
            slowest_s = max(slowest_s, time.monotonic() - began)
    return slowest_s


# --------------------------------------------------------------------------- those who say nothing


@pytest.fixture
def quiet(checkpoint: Path) -> Iterator[Server]:
    limits: dict[str, Any] = {
        # With the streams there is room for ten calls more, and for ten connections more.
        "calls_max": IDLE + 10,
        "http_connections_max": IDLE + 10,
        "connection_calls_max": 300,
        "running_requests_max": 4,
        "queue_requests_max": IDLE,
    }
    with serving(checkpoint, checkpoint.parent / "quiet.yaml", **limits) as server:
        yield server


def test_a_thousand_idle_streams_hinder_nobody_and_leave_nothing(quiet: Server) -> None:
    with quiet.client() as client:
        expected = client.generate(PROMPT, SHORT).token_ids
    others(quiet, expected)  # Whatever is made at first is made.
    before = anonymous_bytes(quiet.process.pid)
    with crowd("idle", quiet.address, IDLE) as held:
        eventually(in_flight(quiet, IDLE), within_s=OPEN_S)
        each = (anonymous_bytes(quiet.process.pid) - before) / IDLE
        slowest_s = others(quiet, expected)
        with crowd("idle", quiet.address, 9):  # One place is left, and then none.
            eventually(in_flight(quiet, IDLE + 9))
            assert others(quiet, expected)
            with crowd("idle", quiet.address, 1), quiet.client() as client:
                eventually(in_flight(quiet, IDLE + 10))
                with pytest.raises(CallError, match=r"takes 1010 \(calls_max\)") as refused:
                    client.generate(PROMPT, SHORT)
                error = refused.value
                assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                assert error.retry_s and client.load().engine_up  # Who looks is let in still.
        eventually(in_flight(quiet, IDLE))
        held.kill()
        eventually(lambda: idle(quiet))
    print(f"\n{IDLE} idle streams: {each / 1024:.1f} KiB each, slowest other {slowest_s:.3f} s")
    assert each < STREAM_BYTES_MAX


def test_a_thousand_idle_connections_hinder_nobody_and_one_too_many_is_told(
    quiet: Server,
) -> None:
    with quiet.client() as client:
        expected = client.generate(PROMPT, SHORT).token_ids
    before = anonymous_bytes(quiet.process.pid)
    with crowd("connections", quiet.http_address, IDLE) as held:
        slowest_s = others(quiet, expected)
        each = (anonymous_bytes(quiet.process.pid) - before) / IDLE
        with ExitStack() as more:
            for _ in range(12):
                more.enter_context(connected(quiet))
            with connected(quiet) as late:
                said = late.recv(4096)
        head, _, body = said.partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        assert head.startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 1\r\n" in head
        assert error["code"] == "QUEUE_FULL" and "http_connections_max" in error["message"]
        held.kill()
        eventually(lambda: quiet.get("/health/live")[0] == 200)
    print(f"\n{IDLE} connections: {each / 1024:.1f} KiB each, slowest other {slowest_s:.3f} s")
    assert each < CONNECTION_BYTES_MAX


def connected(server: Server) -> socket.socket:
    host, _, port = server.http_address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_a_thousand_streams_that_wait_their_turn_hinder_nobody_who_need_not(
    quiet: Server,
) -> None:
    before = anonymous_bytes(quiet.process.pid)
    with crowd("waiting", quiet.address, IDLE + 4, prompt=PROMPT, new=LONG) as held:
        waiting = "preamble_scheduler_waiting_requests"
        eventually(lambda: quiet.metric(waiting) == IDLE, within_s=OPEN_S)
        each = (anonymous_bytes(quiet.process.pid) - before) / IDLE
        with quiet.client() as client:
            began = time.monotonic()
            for _ in range(OTHERS):
                assert client.tokenize(PROMPT) and client.load().waiting_requests == IDLE
            took_s = (time.monotonic() - began) / 2 / OTHERS
            with pytest.raises(CallError, match="queue_requests_max") as refused:
                client.generate(PROMPT, SHORT)
            error = refused.value
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert error.retry_s
        assert quiet.get("/health/ready")[0] == 200
        held.kill()
        eventually(lambda: idle(quiet))
    print(f"\n{IDLE} waiting: {each / 1024:.1f} KiB each, others' calls {took_s:.4f} s")
    assert each < STREAM_BYTES_MAX and took_s < OTHERS_S
    with quiet.client() as client:
        assert client.generate(PROMPT, SHORT).usage.completion_tokens == 8


CARRIED = LONG


def test_a_stream_that_carries_nothing_is_ended_and_one_that_carries_something_is_not(
    checkpoint: Path,
) -> None:
    with serving(checkpoint, checkpoint.parent / "brief.yaml", stream_idle_s=3.0) as server:
        ended = 'preamble_request_errors_total{reason="IDLE_STREAM"}'
        with crowd("idle", server.address, 5):
            eventually(lambda: server.metric(ended) == 5)
            eventually(lambda: idle(server))
        with triton.InferenceServerClient(server.address) as client, streaming(client) as streamed:
            # It is answered for longer than a stream may be idle.
            streamed.send("preamble", "one", text=PROMPT, max_tokens=CARRIED)
            results, errors = streamed.until(1)
            answered = time.monotonic()
            assert server.metric(ended) == 5
            _, error = streamed.next()
            assert time.monotonic() - answered > 1.0
            assert not errors and len("".join(map(text_of, results["one"])).split()) == CARRIED
            assert re.search(r"ABORTED.*for 3 s \(stream_idle_s\).*open another", str(error))
            eventually(lambda: idle(server))


# ------------------------------------------------------- those who read nothing, and who vanish


@pytest.fixture(scope="module")
def busy(checkpoint: Path) -> Iterator[Server]:
    limits: dict[str, Any] = {
        "slow_reader_s": 1.5,
        "running_requests_max": 256,
        "kv_tokens_max": 1 << 18,
        "prefix_cache": False,  # So that what is held is held by somebody.
    }
    with serving(checkpoint, checkpoint.parent / "busy.yaml", **limits) as server:
        yield server


SLOW = 3  # Of each kind.
# A window of a few kilobytes that does not grow, as a slow line has one.
NARROW = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0), APART]


def test_slow_readers_of_every_kind_are_ended_and_nobody_else_notices(busy: Server) -> None:
    with busy.client() as client:
        expected = client.generate(PROMPT, SHORT).token_ids
    ends = [
        f'preamble_requests_total{{code="RESOURCE_EXHAUSTED",method="{method}",wire="{wire}"}}'
        for method, wire in (
            *(("GenerateStream", "preamble"), ("ModelStreamInfer", "kserve")),
            ("completions", "openai"),
        )
    ]
    with ExitStack() as stack:
        for _ in range(SLOW):
            for unread in (unread_stream, unread_infer, unread_events):
                stack.enter_context(unread(busy))
        slowest_s = others(busy, expected)
        eventually(lambda: [busy.metric(one) for one in ends] == [SLOW] * 3)
        eventually(lambda: idle(busy))
    print(f"\n{3 * SLOW} slow readers: slowest other {slowest_s:.3f} s")
    assert busy.metric('preamble_request_errors_total{reason="SLOW_READER"}') == 3 * SLOW
    # What was on a stream that ended is nobody's any more.
    inside = 'preamble_requests_total{code="CANCELLED",method="ModelStreamInfer/request",'
    assert busy.metric(inside + 'wire="kserve"}') == SLOW


@contextmanager
def unread_stream(server: Server) -> Iterator[None]:
    with grpc.insecure_channel(server.address, NARROW) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = pb.GenerateStreamRequest(
            text=PROMPT, max_new_tokens=LONG, details=pb.Details(logprobs=20)
        )
        stream = stub.GenerateStream(message, timeout=2 * WAIT_S)
        next(stream)
        yield
        stream.cancel()


@contextmanager
def unread_infer(server: Server) -> Iterator[None]:
    with grpc.insecure_channel(server.address, NARROW) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = request(
            texts("text_input", PROMPT.encode()),
            one("stream", "BOOL", [1], bool_contents=[True]),
            one("max_tokens", "INT32", [1], int_contents=[LONG]),
        )
        stream = stub.ModelStreamInfer(iter([asked]), timeout=2 * WAIT_S)
        next(stream)
        yield
        stream.cancel()


@contextmanager
def unread_events(server: Server) -> Iterator[None]:
    with closing(socket.socket()) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, _, port = server.http_address.rpartition(":")
        held.connect((host, int(port)))
        # Its answers are far more than what sockets hold for it.
        held.sendall(completion(PROMPT.split(), LONG, n=8, logprobs=20))
        assert held.recv(15) == b"HTTP/1.1 200 OK"
        yield


VANISHED = 100  # Of gRPC, and as many of HTTP.
STAYED = Options(max_new_tokens=600, temperature=0.0)
# Closing a hundred connections takes the front end some milliseconds, and meanwhile steps go on.
# Of one step more the planner may have begun the next when it hears of an end.
STEPS_MAX = 100
STEPS = "preamble_engine_steps_total"


def test_two_hundred_clients_that_are_killed_leave_nothing_held(busy: Server) -> None:
    with busy.client(3 * WAIT_S) as client:
        expected = client.generate(PROMPT, STAYED).token_ids
        stayed: list[int] = []

        def stay() -> None:
            for piece in client.stream(PROMPT, STAYED):
                stayed.extend(piece.token_ids)

        staying = threading.Thread(target=stay)
        with (
            crowd("streams", busy.address, VANISHED, prompt=PROMPT, new=LONG) as streams,
            crowd("events", busy.http_address, VANISHED, prompt=PROMPT, new=LONG) as events,
        ):
            many = 2 * VANISHED
            eventually(lambda: client.load().running_requests == many, within_s=OPEN_S)
            staying.start()
            eventually(lambda: bool(stayed))
            before, steps = client.load(), busy.metric(STEPS)
            assert before.running_requests == 2 * VANISHED + 1
            for clients in (streams, events):
                clients.kill()
            killed = time.monotonic()
            made = [steps]  # While dead ones ran: what the survivor makes alone does not count.
            while client.load().running_requests > 1:
                made.append(busy.metric(STEPS))
                assert time.monotonic() - killed < WAIT_S
            took_s, after = time.monotonic() - killed, client.load()
            steps = made[-1] - steps
            staying.join(3 * WAIT_S)
        print(
            f"\n{2 * VANISHED} clients killed: {before.kv_blocks_held} blocks held before, "
            f"{after.kv_blocks_held} after {steps:.0f} steps ({took_s:.3f} s)"
        )
        assert after.kv_blocks_held <= (len(expected) + len(PROMPT.split())) // 16 + 1
        assert steps <= STEPS_MAX
        assert stayed == expected
    eventually(lambda: idle(busy))
    ended = 'preamble_request_errors_total{reason="CANCELLED"}'
    assert busy.metric(ended) >= 2 * VANISHED
