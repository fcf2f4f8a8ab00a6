"""Client: a running server, called from a program.

Synchronous and typed: plain values in, plain values out, every call under a deadline. What the
server refuses comes back as a `CallError` with its code and its own sentence. It knows the protos,
and nothing of the server's insides.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import grpc

from protos.preamble.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2_grpc,
)
from protos.preamble.v1 import generation_pb2 as pb

Prompt = str | Sequence[int] | Mapping[str, str]  # A text, token ids, or a template's fields.
FinishReason = Literal["stop", "length"]
M = TypeVar("M", pb.GenerateRequest, pb.GenerateStreamRequest)

FINISH: Mapping[int, FinishReason | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
PAGE = 1000


class CallError(Exception):
    """A call that did not end well; `code` is gRPC's name for why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Options:
    """How to complete a prompt. None: the server's choice."""

    adapter: str = ""  # `name` or `name@version`.
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    virtual_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    adapter: str  # As `name@version`; empty: none.


@dataclass(frozen=True)
class Piece:
    """A part of a completion; the last has a finish reason and the usage."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: Usage | None


class Client:
    """Calls the server at `address`, HOST:PORT; close it, or use it in a `with`.

    `timeout_s` is for each call, a stream as a whole.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.channel = grpc.insecure_channel(address)

    def generate(self, prompt: Prompt, options: Options = Options()) -> Completion:
        message = _request(pb.GenerateRequest(), prompt, options)
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        response = self._call(stub.Generate, message)
        finish = FINISH[response.finish_reason]
        assert finish is not None
        return Completion(
            response.text,
            list(response.token_ids),
            finish,
            _usage(response.usage),
            response.seed,
            response.adapter,
        )

    def stream(self, prompt: Prompt, options: Options = Options()) -> Generator[Piece, None, None]:
        """Pieces as they come. To leave early, close the iterator: that cancels the call."""
        message = _request(pb.GenerateStreamRequest(), prompt, options)
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        call = stub.GenerateStream(message, timeout=self.timeout_s)
        try:
            for response in call:
                yield Piece(
                    response.text,
                    list(response.token_ids),
                    FINISH[response.finish_reason],
                    _usage(response.usage) if response.HasField("usage") else None,
                )
        except grpc.RpcError as error:
            raise _call_error(error) from None
        finally:
            call.cancel()

    def tokenize(self, text: str) -> list[int]:
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        return list(self._call(stub.Tokenize, pb.TokenizeRequest(text=text)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        response = self._call(stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids))
        return str(response.text)

    def adapters(self) -> list[adapters_pb2.Adapter]:
        """All of them, as many pages as there are."""
        stub = adapters_pb2_grpc.AdapterServiceStub(self.channel)
        adapters: list[adapters_pb2.Adapter] = []
        token = ""
        while True:
            message = adapters_pb2.ListAdaptersRequest(page_size=PAGE, page_token=token)
            page = self._call(stub.ListAdapters, message)
            adapters += page.adapters
            token = page.next_page_token
            if not token:
                return adapters

    def info(self) -> admin_pb2.GetServerInfoResponse:
        stub = admin_pb2_grpc.AdminServiceStub(self.channel)
        response = self._call(stub.GetServerInfo, admin_pb2.GetServerInfoRequest())
        assert isinstance(response, admin_pb2.GetServerInfoResponse)
        return response

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: Any, message: object) -> Any:
        try:
            return method(message, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise _call_error(error) from None


def _call_error(error: grpc.RpcError) -> CallError:
    assert isinstance(error, grpc.Call)
    if error.code() is grpc.StatusCode.CANCELLED:
        # Whoever cancels here does not listen any more. So the server's gRPC did it, which ends
        # calls so that reach it in the instant in which it stops.
        return CallError("UNAVAILABLE", "the server has stopped; try again, or try another")
    return CallError(error.code().name, error.details() or "the server gave no reason")


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.virtual_tokens, usage.completion_tokens)


def _request(message: M, prompt: Prompt, options: Options) -> M:
    try:
        if isinstance(prompt, str):
            message.text = prompt
        elif isinstance(prompt, Mapping):
            message.inputs.fields.update(prompt)
        else:
            message.token_ids.ids.extend(prompt)
        message.adapter = options.adapter
        if options.max_new_tokens is not None:
            message.max_new_tokens = options.max_new_tokens
        sampling = message.sampling
        sampling.top_k = options.top_k
        for name in ("temperature", "top_p", "seed"):
            if getattr(options, name) is not None:
                setattr(sampling, name, getattr(options, name))
        message.stops.strings.extend(options.stop)
        message.stops.token_ids.extend(options.stop_token_ids)
    except (ValueError, TypeError) as error:
        # What no message can hold, such as a negative count, never gets to the server.
        raise CallError("INVALID_ARGUMENT", str(error)) from None
    return message
