"""Fuzzing of the RPC methods: eighty thousand random messages, over two thousand to each method.

Methods that refuse every message as unimplemented get a hundred. Each call ends with a code that
blames the caller, or succeeds. Afterwards the server gives the same answers, holds no request, and
has not grown.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from clients.client import Options
from serving.frontend.grpc_transport import RpcMethod
from serving.protocols.grpc_services import all_services
from tests.support.broken.protobuf_messages import messages
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import Server, eventually, serving, write_adapter, write_checkpoint
from tests.support.suites import by_suite

WARM_UP_COUNT = 5_000
AT_ONCE = 24
DEADLINE_S = 0.4
# Codes of server faults.
BLAMES_US = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
}
UNTOUCHED = {"Drain"}  # It would drain the server.


def tensor(name: str, kind: str, value: object) -> dict[str, object]:
    """A KServe input, as JSON."""
    field = {"BYTES": "bytes_contents", "INT32": "int_contents", "BOOL": "bool_contents"}[kind]
    return {"name": name, "datatype": kind, "shape": [1], "contents": {field: [value]}}


# Valid requests: fields as JSON, with bytes in base 64.
OWN = {"text": "hello world", "max_new_tokens": 3}
TENSORS = [tensor("text_input", "BYTES", "aGVsbG8gd29ybGQ="), tensor("max_tokens", "INT32", 3)]
FEW = {"stopping": {"max_new_tokens": 3}}
VALID_REQUESTS: dict[str, dict[str, object]] = {
    "preamble.v1.GenerationService/Generate": OWN,
    "preamble.v1.GenerationService/GenerateStream": OWN,
    "preamble.v1.GenerationService/Score": {"text": "hello world"},
    "inference.GRPCInferenceService/ModelInfer": {"model_name": "preamble", "inputs": TENSORS},
    "inference.GRPCInferenceService/ModelStreamInfer": {
        "model_name": "preamble",
        "inputs": [*TENSORS, tensor("stream", "BOOL", True)],
    },
    "fmaas.GenerationService/Generate": {"requests": [{"text": "hello world"}], "params": FEW},
    "fmaas.GenerationService/GenerateStream": {"request": {"text": "hello"}, "params": FEW},
    "fmaas.GenerationService/Tokenize": {"requests": [{"text": "hello world"}]},
}
SUCCESSES_MIN = 200  # Successful calls of each of these.


def valid_request(service: str, method: RpcMethod) -> Message:
    return ParseDict(VALID_REQUESTS.get(f"{service}/{method.name}", {}), method.request_type())


def send(channel: grpc.aio.Channel, path: str, method: RpcMethod, payloads: list[bytes]) -> Any:
    """A call with arbitrary bytes as message."""
    make: dict[str, Any] = {
        "unary": channel.unary_unary,
        "out": channel.unary_stream,
        "in": channel.stream_unary,
        "both": channel.stream_stream,
    }
    messages = iter(payloads) if method.cardinality in ("in", "both") else payloads[0]
    return make[method.cardinality](path)(messages, timeout=DEADLINE_S)


async def status_of(call: Any, method: RpcMethod) -> grpc.StatusCode:
    try:
        if method.cardinality in ("out", "both"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def fuzz(
    address: str, count: int, seed: int, left_out: Collection[str] = ()
) -> dict[str, Counter[grpc.StatusCode]]:
    """Make random calls; return the codes of each method that is not left out."""
    draw = random.Random(seed)
    kinds = [
        (
            f"/{wire.service}/{method.name}",
            method,
            messages(method.request_type, valid_request(wire.service, method), draw),
        )
        for wire in all_services()
        for method in wire.methods
        if method.name not in UNTOUCHED and f"/{wire.service}/{method.name}" not in left_out
    ]
    codes: dict[str, Counter[grpc.StatusCode]] = {path: Counter() for path, _, _ in kinds}
    remaining = iter(range(count))

    async def work(channel: grpc.aio.Channel) -> None:
        for _ in remaining:
            path, method, payloads = draw.choice(kinds)
            count_ = draw.randrange(1, 4) if method.cardinality in ("in", "both") else 1
            call = send(channel, path, method, [next(payloads) for _ in range(count_)])
            codes[path][await status_of(call, method)] += 1

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(work(channel) for _ in range(AT_ONCE)))
    return codes


def successful_calls(server: Server, path: str) -> float:
    """Successful calls of a method by the server's metrics; requests for a stream of many."""
    wire = next(wire.protocol for wire in all_services() if wire.service == path.partition("/")[0])
    method = path.partition("/")[2].replace("ModelStreamInfer", "ModelStreamInfer/request")
    labels = f'code="OK",method="{method}",wire="{wire}"'
    return server.metric(f"preamble_requests_total{{{labels}}}")


@pytest.mark.parametrize("count", by_suite(25_000, 80_000))
def test_random_messages_do_not_affect_the_server(count: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    write_adapter(adapters / "sum.safetensors", checkpoint, [5, 6, 7])
    with serving(
        checkpoint, tmp_path / "settings.yaml", tmp_path / "log", adapters=str(adapters)
    ) as server:
        fuzz_and_check(server, tmp_path / "log", count)


def fuzz_and_check(server: Server, log: Path, count: int) -> None:
    with server.client() as client:
        options = Options(adapter="sum", max_new_tokens=40)
        expected = client.generate("hello world", options).token_ids
        warm_up_codes = asyncio.run(fuzz(server.address, WARM_UP_COUNT, 0))
        unimplemented = [
            path
            for path, counts in warm_up_codes.items()
            if counts.keys() == {grpc.StatusCode.UNIMPLEMENTED}
        ]
        size = anonymous_bytes(server.process.pid)
        codes = asyncio.run(fuzz(server.address, count, 1, unimplemented))
        eventually(lambda: server.metric("preamble_requests_in_flight") == 0)
        eventually(lambda: server.metric("preamble_scheduler_running_requests") == 0)
        growth = anonymous_bytes(server.process.pid) - size
        assert client.generate("hello world", options).token_ids == expected
    # The methods are drawn at random, so their numbers of calls differ.
    assert min(map(Counter.total, codes.values())) > count / len(codes) / 2
    codes |= {path: warm_up_codes[path] for path in unimplemented}
    for path, counts in codes.items():
        print(path, {code.name: count for code, count in counts.most_common()})
    print(f"the front end grew by {growth / 2**20:.0f} MiB")
    streamed = {
        f"/{wire.service}/{method.name}"
        for wire in all_services()
        for method in wire.methods
        if method.cardinality in ("in", "both")
    }
    # If a call ends while its client still sends, gRPC may invent a code on the client side.
    unary_codes = {path: counts for path, counts in codes.items() if path not in streamed}
    assert not [path for path, counts in unary_codes.items() if BLAMES_US & counts.keys()]
    metric_lines = [
        line for line in server.get("/metrics")[1].splitlines() if "requests_total{" in line
    ]
    assert len(metric_lines) > len(codes)
    well = {path: successful_calls(server, path) for path in VALID_REQUESTS}
    print("answered well:", well)
    assert min(well.values()) >= SUCCESSES_MIN
    assert not [
        line for line in metric_lines for code in BLAMES_US if f'code="{code.name}"' in line
    ]
    assert "Traceback" not in log.read_text()
    assert growth < 64 << 20
