"""Many clients in a separate process, so that all of them can disconnect at once.

`python -m tests.support.client_crowd KIND ADDRESS COUNT PROMPT NEW` opens COUNT connections or
streams, prints `open`, and keeps them open until it is killed. It does not check the responses.
"""

import asyncio
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.servers import ROOT

# Each channel gets its own connection; by default the library shares one.
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
CONNECTION_CALLS = 250
OPEN_S = 60.0


@contextmanager
def open_clients(
    kind: str, address: str, count: int, *, prompt: str = "", new: int = 1
) -> Iterator["subprocess.Popen[str]"]:
    """The process, with all clients open; it is killed at the end of the block."""
    arguments = [kind, address, str(count), prompt, str(new)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.client_crowd", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(OPEN_S), f"not open within {OPEN_S} s"
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def run_clients(kind: str, address: str, count: int, prompt: str, new: int) -> None:
    match kind:
        case "connections":
            clients: list[Any] = [await open_socket(address) for _ in range(count)]
        case "events":
            clients = [await open_socket(address) for _ in range(count)]
            for number, connection in enumerate(clients):
                connection.sendall(completion(f"{prompt} {number}".split(), new))
        case "streams":  # Each on its own connection; the first token of each has arrived.
            streams = (start_stream(address, f"{prompt} {number}", new) for number in range(count))
            clients = await asyncio.gather(*streams)
        case "waiting":
            clients = await open_streams(address, count, prompt, new)
        case "idle":
            clients = await open_idle_calls(address, count)
        case _:
            raise ValueError(kind)
    sys.stdout.write("open\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
    del clients


async def open_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=OPEN_S)


def completion(prompt: list[str], new: int, **fields: object) -> bytes:
    """An OpenAI completion request for a stream, for a model whose tokens are numbers."""
    record = {
        "prompt": [int(token) for token in prompt],
        "max_tokens": new,
        "stream": True,
        **fields,
    }
    body = json.dumps(record).encode()
    head = (
        f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body


async def start_stream(address: str, prompt: str, new: int) -> Any:
    channel = grpc.aio.insecure_channel(address, [OWN_CONNECTION])
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    stream = stub.GenerateStream(pb.GenerateStreamRequest(text=prompt, max_new_tokens=new))
    await stream.read()
    return channel, stream


async def open_streams(address: str, count: int, prompt: str, new: int) -> list[Any]:
    channels = [grpc.aio.insecure_channel(address, [OWN_CONNECTION]) for _ in split_count(count)]
    message = pb.GenerateStreamRequest(text=prompt, max_new_tokens=new)
    return [
        (channel, generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message))
        for channel, share in zip(channels, split_count(count), strict=True)
        for _ in range(share)
    ]


async def open_idle_calls(address: str, count: int) -> list[Any]:
    """Open calls that have no message yet, and return them."""
    kserve = load_package("kserve")
    calls: list[Any] = []
    for share in split_count(count):
        channel = grpc.aio.insecure_channel(address, [OWN_CONNECTION])
        method: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=kserve.ModelStreamInferResponse.FromString,
        )
        calls += [(channel, method()) for _ in range(share)]
    return calls


def split_count(count: int) -> list[int]:
    full, rest = divmod(count, CONNECTION_CALLS)
    return [CONNECTION_CALLS] * full + [rest] * bool(rest)


if __name__ == "__main__":
    kind, address, count, prompt, new = sys.argv[1:]
    asyncio.run(run_clients(kind, address, int(count), prompt, int(new)))
