"""A crowd of clients in a process of its own, so that all of them can vanish at once.

`python -m tests.support.client_crowd KIND ADDRESS COUNT PROMPT NEW`: it opens so many, says `open`,
and holds them until it is killed. What a server makes of them is not known here.
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

from protos.foreign import package
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.servers import ROOT

# Each channel has a connection of its own, else the library would share one.
APART = ("grpc.use_local_subchannel_pool", 1)
CONNECTION_CALLS = 250
OPEN_S = 60.0


@contextmanager
def crowd(
    kind: str, address: str, count: int, *, prompt: str = "", new: int = 1
) -> Iterator["subprocess.Popen[str]"]:
    """One, open; it is killed at the end at the latest."""
    words = [kind, address, str(count), prompt, str(new)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.client_crowd", *words],
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


async def hold(kind: str, address: str, count: int, prompt: str, new: int) -> None:
    match kind:
        case "connections":
            held: list[Any] = [await connected(address) for _ in range(count)]
        case "events":
            held = [await connected(address) for _ in range(count)]
            for place, one in enumerate(held):
                one.sendall(completion(f"{prompt} {place}".split(), new))
        case "streams":  # Each of a client of its own; the first token of each has come.
            clients = (begun(address, f"{prompt} {place}", new) for place in range(count))
            held = await asyncio.gather(*clients)
        case "waiting":
            held = await waiting(address, count, prompt, new)
        case "idle":
            held = await idle(address, count)
        case _:
            raise ValueError(kind)
    sys.stdout.write("open\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
    del held


async def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=OPEN_S)


def completion(prompt: list[str], new: int, **more: object) -> bytes:
    """A request of OpenAI's for a stream, of a model that knows numbers only."""
    record = {"prompt": [int(one) for one in prompt], "max_tokens": new, "stream": True, **more}
    body = json.dumps(record).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body


async def begun(address: str, prompt: str, new: int) -> Any:
    channel = grpc.aio.insecure_channel(address, [APART])
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    stream = stub.GenerateStream(pb.GenerateStreamRequest(text=prompt, max_new_tokens=new))
    await stream.read()
    return channel, stream


async def waiting(address: str, count: int, prompt: str, new: int) -> list[Any]:
    channels = [grpc.aio.insecure_channel(address, [APART]) for _ in shares(count)]
    message = pb.GenerateStreamRequest(text=prompt, max_new_tokens=new)
    return [
        (channel, generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message))
        for channel, share in zip(channels, shares(count), strict=True)
        for _ in range(share)
    ]


async def idle(address: str, count: int) -> list[Any]:
    """Streams that could carry many requests, and carry none."""
    kserve = package("kserve")
    held: list[Any] = []
    for share in shares(count):
        channel = grpc.aio.insecure_channel(address, [APART])
        method: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=kserve.ModelStreamInferResponse.FromString,
        )
        held += [(channel, method()) for _ in range(share)]
    return held


def shares(count: int) -> list[int]:
    full, rest = divmod(count, CONNECTION_CALLS)
    return [CONNECTION_CALLS] * full + [rest] * bool(rest)


if __name__ == "__main__":
    kind, address, count, prompt, new = sys.argv[1:]
    asyncio.run(hold(kind, address, int(count), prompt, int(new)))
