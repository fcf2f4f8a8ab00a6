"""A server with adapters, its gRPC stub, and an oracle, for tests of preamble.v1.

The oracle serves the same checkpoint in this process; in fp64 its tokens are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

import serving as program
from gpt.adapters.prompt_template import PromptTemplate
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.config import ServerConfig
from serving.service.service import Service
from tests.support.servers import Server, serving, write_adapter, write_checkpoint

TEXT = "twelve and thirty? answer:"
INSTRUCTION = "what is the sum of"
NUMBERS = {"numbers": "one and two"}  # The fields of the adapters with templates.
INPUTS = pb.Inputs(fields=NUMBERS)
NEW = 12
WAIT_S = 60.0
RUNNING = 8
QUEUED = 8
Sets = dict[str, Any]


class GenerationServer:
    """A server with adapters, its stub, and the same model in this process."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder)
        self.adapters = folder / "adapters"
        self.adapters.mkdir()
        self.server: Server
        self.stub: Any
        self.oracle: Service

    def write(self, name: str, token_ids: list[int], template: str = "") -> None:
        shape = PromptTemplate(template, (len(token_ids),)) if template else None
        path = self.adapters / f"{name}.safetensors"
        write_adapter(path, self.checkpoint, token_ids, template=shape)

    def message(self, **fields: Any) -> pb.GenerateRequest:
        """The request of the base case, with these fields added or replaced."""
        message = pb.GenerateRequest(text=TEXT, max_new_tokens=NEW)
        message.sampling.temperature = 1.0
        message.sampling.seed = 7
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
def generation_server(folder: Path) -> Iterator[GenerationServer]:
    """A server in its own folder; everything ends with the block."""
    deployment = GenerationServer(folder)
    opened = program.open_engine(
        ServerConfig(
            str(deployment.checkpoint),
            adapters=str(deployment.adapters),
            dtype="float64",
            kv_tokens_max=1 << 14,
        )
    )
    with opened as deployment.oracle:
        ids = deployment.oracle.tokenizer.encode
        deployment.write("sum", ids(INSTRUCTION))
        deployment.write(
            "fox@2", ids("the quick brown")[:3], "<|VIRTUAL_PROMPT_0|>{numbers}? answer:"
        )
        deployment.write("late", ids("the lazy dog")[:3], "{numbers}? answer:<|VIRTUAL_PROMPT_0|>")
        deployment.write("doomed", ids("dog"))
        deployment.write("sentiment", ids("the lazy dog")[:2], "{text}<|VIRTUAL_PROMPT_0|>")
        for name in ("first", "second"):
            deployment.write(name, ids(name))
        deployment.oracle.adapters.scan()
        limits: Sets = {"running_requests_max": RUNNING, "queue_requests_max": QUEUED}
        limits |= {"adapters": str(deployment.adapters), "adapters_poll_s": 1e6}
        with (
            serving(deployment.checkpoint, folder / "s.yaml", **limits) as deployment.server,
            grpc.insecure_channel(deployment.server.address) as channel,
        ):
            deployment.stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield deployment
