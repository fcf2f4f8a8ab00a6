"""What the tests of our own wire share: a server with adapters, its stub, and an oracle.

The oracle is the same checkpoint, asked in this process from Python; in fp64 its tokens are the
same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

import serving as program
from gpt.adapters.prompt_template import Template
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.config import ServerConfig
from serving.service.service import Service
from tests.support.servers import Server, serving, write_adapter, write_checkpoint

TEXT = "twelve and thirty? answer:"
INSTRUCTION = "what is the sum of"
NUMBERS = {"numbers": "one and two"}  # What the adapters with templates take.
INPUTS = pb.Inputs(fields=NUMBERS)
NEW = 12
WAIT_S = 20.0
RUNNING, QUEUED = 8, 8
Sets = dict[str, Any]


class World:
    """A server with adapters, its stub, and the same model in this process."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.server: Server
        self.stub: Any
        self.oracle: Service

    def write(self, name: str, token_ids: list[int], template: str = "") -> None:
        shape = Template(template, (len(token_ids),)) if template else None
        path = self.adapters / f"{name}.safetensors"
        write_adapter(path, self.checkpoint, token_ids, template=shape)

    def message(self, **fields: Any) -> pb.GenerateRequest:
        """The base case's, with these fields besides, or instead."""
        message = pb.GenerateRequest(text=TEXT, max_new_tokens=NEW)
        message.sampling.temperature, message.sampling.seed = 1.0, 7
        message.MergeFrom(pb.GenerateRequest(**fields))
        return message

    def ask(self, message: pb.GenerateRequest) -> pb.GenerateResponse:
        answer = self.stub.Generate(message, timeout=WAIT_S)
        assert isinstance(answer, pb.GenerateResponse)
        return answer

    def pieces(self, message: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
        streamed = pb.GenerateStreamRequest.FromString(message.SerializeToString())
        return list(self.stub.GenerateStream(streamed, timeout=WAIT_S))


@contextmanager
def wired(folder: Path) -> Iterator[World]:
    """A world in a folder of its own; nothing of it outlives the block."""
    world = World(folder)
    found = program.open_engine(
        ServerConfig(
            str(world.checkpoint),
            adapters=str(world.adapters),
            dtype="float64",
            kv_tokens_max=1 << 14,
        )
    )
    with found as world.oracle:
        ids = world.oracle.tokenizer.encode
        world.write("sum", ids(INSTRUCTION))
        world.write("fox@2", ids("the quick brown")[:3], "<|VIRTUAL_PROMPT_0|>{numbers}? answer:")
        world.write("late", ids("the lazy dog")[:3], "{numbers}? answer:<|VIRTUAL_PROMPT_0|>")
        world.write("doomed", ids("dog"))
        world.write("sentiment", ids("the lazy dog")[:2], "{text}<|VIRTUAL_PROMPT_0|>")
        for name in ("first", "second"):
            world.write(name, ids(name))
        world.oracle.adapters.scan()
        limits: Sets = {"running_requests_max": RUNNING, "queue_requests_max": QUEUED}
        limits |= {"adapters": str(world.adapters), "adapters_poll_s": 1e6}
        with (
            serving(world.checkpoint, folder / "s.yaml", **limits) as world.server,
            grpc.insecure_channel(world.server.address) as channel,
        ):
            world.stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield world
