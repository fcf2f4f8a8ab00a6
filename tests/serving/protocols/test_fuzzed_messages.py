"""A hundred thousand messages that nobody would send, to every method of every wire.

Each is answered with a code that blames the caller, or is right; and after them all the server says
what it said before, holds nothing, and is not larger.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from clients.client import Options
from serving.frontend.grpc_transport import Method
from serving.protocols.grpc_services import wires
from tests.support.broken.protobuf_messages import messages
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import Server, eventually, serving, write_adapter, write_checkpoint

COUNT = 100_000
AT_ONCE = 24
DEADLINE_S = 0.4
# The server's own fault, or none that is known.
BLAMES_US = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
}
UNTOUCHED = {"Drain"}  # It would do what it says.


def tensor(name: str, kind: str, value: object) -> dict[str, object]:
    """An input of KServe's, as JSON has it."""
    field = {"BYTES": "bytes_contents", "INT32": "int_contents", "BOOL": "bool_contents"}[kind]
    return {"name": name, "datatype": kind, "shape": [1], "contents": {field: [value]}}


# What is asked for where nothing is wrong: fields of a request, as JSON has them, where bytes are
# in base 64.
OWN = {"text": "hello world", "max_new_tokens": 3}
TENSORS = [tensor("text_input", "BYTES", "aGVsbG8gd29ybGQ="), tensor("max_tokens", "INT32", 3)]
FEW = {"stopping": {"max_new_tokens": 3}}
GOOD: dict[str, dict[str, object]] = {
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
WELL_MIN = 200  # Of each of these.


def good(service: str, method: Method) -> Message:
    return ParseDict(GOOD.get(f"{service}/{method.name}", {}), method.request())


def send(channel: grpc.aio.Channel, path: str, method: Method, data: list[bytes]) -> Any:
    """A call with these bytes, whatever they are."""
    make: dict[str, Any] = {
        "unary": channel.unary_unary,
        "out": channel.unary_stream,
        "in": channel.stream_unary,
        "both": channel.stream_stream,
    }
    sent = iter(data) if method.kind in ("in", "both") else data[0]
    return make[method.kind](path)(sent, timeout=DEADLINE_S)


async def code_of(call: Any, method: Method) -> grpc.StatusCode:
    try:
        if method.kind in ("out", "both"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def fuzz(address: str, count: int, seed: int) -> dict[str, Counter[grpc.StatusCode]]:
    """So many calls, and how each method's ended."""
    draw = random.Random(seed)
    kinds = [
        (
            f"/{wire.service}/{method.name}",
            method,
            messages(method.request, good(wire.service, method), draw),
        )
        for wire in wires()
        for method in wire.methods
        if method.name not in UNTOUCHED
    ]
    codes: dict[str, Counter[grpc.StatusCode]] = {path: Counter() for path, _, _ in kinds}
    left = iter(range(count))

    async def work(channel: grpc.aio.Channel) -> None:
        for _ in left:
            path, method, made = draw.choice(kinds)
            many = draw.randrange(1, 4) if method.kind in ("in", "both") else 1
            call = send(channel, path, method, [next(made) for _ in range(many)])
            codes[path][await code_of(call, method)] += 1

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(work(channel) for _ in range(AT_ONCE)))
    return codes


def answered_well(server: Server, path: str) -> float:
    """Calls of a method that ended so by the server's own count; of a stream of many, requests."""
    wire = next(wire.name for wire in wires() if wire.service == path.partition("/")[0])
    method = path.partition("/")[2].replace("ModelStreamInfer", "ModelStreamInfer/request")
    labels = f'code="OK",method="{method}",wire="{wire}"'
    return server.metric(f"preamble_requests_total{{{labels}}}")


@pytest.mark.slow
def test_no_message_harms_the_server(tmp_path: Path) -> None:
    checkpoint, adapters = write_checkpoint(tmp_path), tmp_path / "adapters"
    adapters.mkdir()
    write_adapter(adapters / "sum.safetensors", checkpoint, [5, 6, 7])
    with serving(
        checkpoint, tmp_path / "settings.yaml", tmp_path / "log", adapters=str(adapters)
    ) as server:
        harmed(server, tmp_path / "log")


def harmed(server: Server, log: Path) -> None:
    with server.client() as client:
        options = Options(adapter="sum", max_new_tokens=40)
        before = client.generate("hello world", options).token_ids
        asyncio.run(fuzz(server.address, COUNT // 20, 0))  # What it needs to be warm.
        size = anonymous_bytes(server.process.pid)
        codes = asyncio.run(fuzz(server.address, COUNT, 1))
        eventually(lambda: server.metric("preamble_requests_in_flight") == 0)
        eventually(lambda: server.metric("preamble_scheduler_running_requests") == 0)
        grown = anonymous_bytes(server.process.pid) - size
        assert client.generate("hello world", options).token_ids == before
    for path, counts in codes.items():
        print(path, {code.name: count for code, count in counts.most_common()})
    print(f"the front end grew by {grown / 2**20:.0f} MiB")
    assert sum(map(Counter.total, codes.values())) == COUNT
    streamed = {
        f"/{wire.service}/{method.name}"
        for wire in wires()
        for method in wire.methods
        if method.kind in ("in", "both")
    }
    # Where a call ends while its client still sends, the client's library may make up a code.
    told = {path: counts for path, counts in codes.items() if path not in streamed}
    assert not [path for path, counts in told.items() if BLAMES_US & counts.keys()]
    counted = [line for line in server.get("/metrics")[1].splitlines() if "requests_total{" in line]
    assert len(counted) > len(codes)
    well = {path: answered_well(server, path) for path in GOOD}
    print("answered well:", well)
    assert min(well.values()) >= WELL_MIN
    assert not [line for line in counted for code in BLAMES_US if f'code="{code.name}"' in line]
    assert "Traceback" not in log.read_text()
    assert grown < 64 << 20
