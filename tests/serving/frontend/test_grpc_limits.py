"""Limits of the gRPC server: compressed messages, unknown callers, and messages of many parts."""

import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import adapters_pb2, admin_pb2
from protos.preamble.v1 import generation_pb2 as pb
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import Server, serving, write_checkpoint
from tests.support.tokens_file import CREW, sha256, tokens_file

pytestmark = pytest.mark.slow

BOMB_BYTES = 256 << 20
GROWTH_MAX = 100 << 20  # Of the server's memory; without a limit it grows by BOMB_BYTES.
AUTHORIZED = (("authorization", f"Bearer {CREW}"),)
GENERATE = "/preamble.v1.GenerationService/Generate"
UNARY = {
    GENERATE: pb.GenerateRequest(text="hello world", max_new_tokens=3),
    "/preamble.v1.GenerationService/Tokenize": pb.TokenizeRequest(text="hello " * 9000),
    "/preamble.v1.AdminService/GetLoad": admin_pb2.GetLoadRequest(),
    "/preamble.v1.AdapterService/ListAdapters": adapters_pb2.ListAdaptersRequest(),
    "/inference.GRPCInferenceService/ServerLive": load_package("kserve").ServerLiveRequest(),
    "/fmaas.GenerationService/ModelInfo": load_package("tgis").ModelInfoRequest(model_id="x"),
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(service="liveness"),
}
OPEN = ("/grpc.health.v1.Health/Check",)  # Methods that need no token.
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    roles = ["generate", "adapters", "operator"]
    tokens = tokens_file(
        folder / "tokens.yaml", {"crew": {"token_sha256": sha256(CREW), "roles": roles}}
    )
    (folder / "adapters").mkdir()
    settings: dict[str, Any] = {
        "tokens": tokens,
        "slow_reader_s": 3.0,
        "adapters": str(folder / "adapters"),
    }
    with serving(write_checkpoint(folder), **settings) as running:
        yield running


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as opened:
        yield opened


def call(
    channel: grpc.Channel, method: str, data: bytes, metadata: Any = AUTHORIZED, **options: Any
) -> bytes:
    unary: Any = channel.unary_unary(method)
    response: bytes = unary(data, metadata=metadata, timeout=60, **options)
    return response


@pytest.mark.parametrize("method", UNARY)
def test_compressed_requests_get_the_same_answers(channel: grpc.Channel, method: str) -> None:
    data = UNARY[method].SerializeToString()
    answers = {
        call(channel, method, data, compression=compression)
        for compression in (None, grpc.Compression.Gzip, grpc.Compression.Deflate)
    }
    if method == GENERATE:
        answers = {pb.GenerateResponse.FromString(answer).text.encode() for answer in answers}
    assert len(answers) == 1


def test_compressed_reflection_requests_are_answered(channel: grpc.Channel) -> None:
    request = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="preamble.v1." + "a" * 99
    )
    listing = reflection_pb2.ServerReflectionRequest(list_services="*")
    reflect: Any = channel.stream_stream(REFLECTION)
    data = [message.SerializeToString() for message in (request, listing)]
    plain = list(reflect(iter(data), timeout=60))
    assert len(plain) == 2
    assert plain == list(reflect(iter(data), timeout=60, compression=grpc.Compression.Gzip))


@cache
def bomb() -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    parts = [compressor.compress(zeros) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.parametrize("metadata", [AUTHORIZED, ()], ids=["token", "no token"])
@pytest.mark.parametrize("method", [*UNARY, REFLECTION])
def test_message_that_decompresses_to_much_costs_little(
    server: Server, channel: grpc.Channel, method: str, metadata: Any
) -> None:
    before, data = anonymous_bytes(server.process.pid), bomb()
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, data, metadata)
    needs_token = method not in (*OPEN, REFLECTION) and not metadata
    code = caught.value.code()
    expected = grpc.StatusCode.UNAUTHENTICATED if needs_token else grpc.StatusCode.INVALID_ARGUMENT
    assert code == expected, caught.value.details()
    assert anonymous_bytes(server.process.pid) - before < GROWTH_MAX


def test_memory_does_not_grow_with_the_number_of_refused_messages(
    server: Server, channel: grpc.Channel
) -> None:
    """A refused message of 16 MiB must not wait for the garbage collector."""
    before = anonymous_bytes(server.process.pid)
    for _ in range(40):
        with pytest.raises(grpc.RpcError, match="message_bytes_max"):
            call(channel, GENERATE, bomb())
    assert anonymous_bytes(server.process.pid) - before < GROWTH_MAX


@pytest.mark.parametrize("method", [name for name in UNARY if name not in OPEN])
def test_unknown_callers_are_refused_before_their_message(
    channel: grpc.Channel, method: str
) -> None:
    sent = threading.Event()

    def messages() -> Iterator[bytes]:
        sent.wait(60)
        yield b""

    stream: Any = channel.stream_unary(method)
    with pytest.raises(grpc.RpcError) as caught:
        stream(messages(), timeout=60)
    sent.set()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", [GENERATE, *OPEN])
def test_message_that_does_not_arrive_ends_the_call(channel: grpc.Channel, method: str) -> None:
    ended = threading.Event()

    def messages() -> Iterator[bytes]:
        ended.wait(60)
        yield b""

    stream: Any = channel.stream_unary(method)
    with pytest.raises(grpc.RpcError) as caught:
        stream(messages(), timeout=60, metadata=AUTHORIZED)
    ended.set()
    assert "slow_reader_s" in (caught.value.details() or "")


def test_call_without_a_message_is_unreadable(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(GENERATE)(iter(()), timeout=60, metadata=AUTHORIZED)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_messages_of_many_parts_do_not_delay_other_calls(
    server: Server, channel: grpc.Channel
) -> None:
    messages: list[Message] = [
        pb.GenerateRequest(inputs=pb.Inputs(fields={str(i): "" for i in range(1_300_000)})),
        pb.GenerateRequest(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(1_200_000), 1.0))),
    ]
    for message in messages:
        data = message.SerializeToString()
        with pytest.raises(grpc.RpcError, match="more than 100000 fields"):
            call(channel, GENERATE, data)
        finished = threading.Event()
        latencies: list[float] = []
        thread = threading.Thread(target=watch, args=(server, finished, latencies))
        thread.start()
        with pytest.raises(grpc.RpcError):
            call(channel, GENERATE, data)
        finished.set()
        thread.join()
        assert max(latencies) < 0.6  # Usually 0.1 s; 1.8 s without the count.


def watch(server: Server, finished: threading.Event, latencies: list[float]) -> None:
    while True:
        start = time.monotonic()
        with urllib.request.urlopen(f"http://{server.http_address}/health/live", timeout=60):
            latencies.append(time.monotonic() - start)
        if finished.wait(0.01):
            return
