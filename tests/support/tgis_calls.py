"""A server with an adapter, and calls of TGIS's API by our copy of its protos.

The server's own API, preamble.v1, is the oracle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from gpt.tokenizers.tokenizer import open_tokenizer
from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import generation_pb2 as own_pb
from protos.preamble.v1 import generation_pb2_grpc
from tests.support.servers import WAIT_S, Server, serving, write_adapter, write_checkpoint

pb = load_package("tgis")
TEXT = "twelve and thirty? answer:"
# A parameter, an invalid value, and the error message.
REFUSED: list[tuple[str, Any, str]] = [
    ("sampling.temperature", 0.04, "it must be 0, or from 0.05"),
    ("sampling.temperature", -1.0, "it must be 0, or from 0.05"),
    ("sampling.temperature", "NaN", "is nan"),
    ("sampling.top_p", 1.01, "it must be in (0, 1]"),
    ("sampling.top_p", "NaN", "is nan"),
    ("sampling.typical_p", 1.5, "it must be in (0, 1]"),
    ("sampling.typical_p", "NaN", "is nan"),
    ("decoding.repetition_penalty", 2.5, "from 0.01 to 2"),
    ("decoding.repetition_penalty", -1.0, "from 0.01 to 2"),
    ("decoding.repetition_penalty", "Infinity", "is inf"),
    ("decoding.length_penalty.decay_factor", 0.5, "from 1 to 10"),
    ("decoding.length_penalty.decay_factor", "NaN", "is nan"),
    ("stopping.max_new_tokens", 4096, "at most 4095"),
    ("stopping.min_new_tokens", 4096, "at most max_new_tokens, 4095"),
    ("stopping.min_new_tokens", 200, "at most max_new_tokens, 128"),
    ("stopping.stop_sequences", ["a"] * 7, "at most 6"),
    ("stopping.stop_sequences", ["a", ""], "[1, 0] bytes"),
    ("stopping.stop_sequences", ["é" * 121], "each of 1 to 240 bytes"),
    ("response.top_n_tokens", 11, "at most 10"),
    ("method", 7, "0 (GREEDY) or 1 (SAMPLE)"),
    ("decoding.format", 5, "choose 0"),
    ("decoding.regex", "(", "regex"),
    ("decoding.regex", "a\\", "regex is invalid or unsupported (a pattern ends with a backslash"),
    ("decoding.choice", {}, "choice"),
    ("sampling.temperature", "Infinity", "is inf"),
    ("sampling.temperature", 101.0, "it must be 0, or from 0.05 to 100"),
    ("sampling.top_p", -0.1, "in (0, 1]"),
    ("sampling.top_p", "Infinity", "is inf"),
    ("sampling.typical_p", -1.0, "in (0, 1]"),
    ("decoding.repetition_penalty", "NaN", "is nan"),
    ("decoding.repetition_penalty", 0.001, "from 0.01 to 2"),
    ("decoding.length_penalty.decay_factor", 1e6, "from 1 to 10"),
    ("decoding.length_penalty.decay_factor", "Infinity", "is inf"),
    ("stopping.max_new_tokens", 2**32 - 1, "at most 4095"),
    ("stopping.min_new_tokens", 2**32 - 1, "at most max_new_tokens"),
    ("stopping.stop_sequences", ["a"] * 10_000, "has 10000"),
    ("stopping.stop_sequences", ["a" * (1 << 20)], "1048576] bytes"),
    ("response.top_n_tokens", 2**32 - 1, "at most 10"),
    ("method", -1, "0 (GREEDY) or 1 (SAMPLE)"),
    ("decoding.json_schema", "{", "json_schema is invalid or unsupported"),
    ("decoding.json_schema", "5", "json_schema is invalid or unsupported"),
    ("decoding.json_schema", '{"not":' * 5000 + "{}" + "}" * 5000, "is invalid or unsupported"),
    ("decoding.grammar", "start: nope", "grammar is invalid or unsupported"),
    ("decoding.regex", "a" * (1 << 20), "regex is 1048576 bytes"),
    ("decoding.choice", {"choices": ["a", ""]}, "an empty text"),
]
STOPS = pb.file.enum_types_by_name["StopReason"].values_by_number


class TgisServer:
    """Calls of TGIS's API and of preamble.v1 on a server. Fields of requests are plain data."""

    def __init__(self, server: Server, checkpoint: Path, channel: grpc.Channel) -> None:
        self.server = server
        self.channel = channel
        self.tokenizer = open_tokenizer(checkpoint / "tokenizer")
        self.own = generation_pb2_grpc.GenerationServiceStub(channel)

    def call(self, method: str, request: str, response: str, /, **fields: Any) -> Any:
        kind: Any = self.channel.unary_unary
        if method == "GenerateStream":
            kind = self.channel.unary_stream
        message = ParseDict(fields, getattr(pb, request)())
        send = kind(
            f"/fmaas.GenerationService/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=getattr(pb, response).FromString,
        )
        return partial(send, message, timeout=WAIT_S)

    def generate(self, *texts: str, **params: Any) -> list[Any]:
        return list(self.ask(*texts, **params)().responses)

    def ask(self, *texts: str, adapter: Any = None, **params: Any) -> Any:
        requests = [{"text": text} for text in texts]
        return self.call(
            "Generate",
            "BatchedGenerationRequest",
            "BatchedGenerationResponse",
            requests=requests,
            params=params,
            **(adapter or {}),
        )

    def stream(self, text: str = TEXT, **params: Any) -> Any:
        return self.call(
            "GenerateStream",
            "SingleGenerationRequest",
            "GenerationResponse",
            request={"text": text},
            params=params,
        )

    def tokenize(self, *texts: str, **fields: Any) -> Any:
        requests = [{"text": text} for text in texts]
        name = "BatchedTokenize"
        return self.call(
            "Tokenize", f"{name}Request", f"{name}Response", requests=requests, **fields
        )

    def generate_own(self, text: str = TEXT, **fields: Any) -> own_pb.GenerateResponse:
        prompt = {"text": text} if text else {}
        message = ParseDict({**prompt, **fields}, own_pb.GenerateRequest())
        answer: own_pb.GenerateResponse = self.own.Generate(message, timeout=WAIT_S)
        return answer


@contextmanager
def tgis_server(folder: Path, **settings: Any) -> Iterator[TgisServer]:
    """A separate server with the adapter `sum`."""
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    rows = open_tokenizer(checkpoint / "tokenizer").encode("what is the sum of")
    write_adapter(adapters / "sum.safetensors", checkpoint, rows)
    with (
        serving(checkpoint, adapters=str(adapters), **settings) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield TgisServer(server, checkpoint, channel)


def stop_reason_name(response: Any) -> str:
    return str(STOPS[response.stop_reason].name)


def call_error(send: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(answer) if hasattr(answer := send(), "__next__") else answer
    return caught.value


def violated_fields(error: Any) -> list[str]:
    """The fields of the request that the error details name."""
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    bad_request = BadRequest()
    for detail in Status.FromString(details).details:
        detail.Unpack(bad_request)
    return [violation.field for violation in bad_request.field_violations]
