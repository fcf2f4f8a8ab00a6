"""Streams that end in the middle: a real gRPC server sends the responses that each case needs."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from clients.async_client import AsyncClient
from clients.client import CallError, Client, Options, Piece
from clients.transport import Retries
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc

FIRST = pb.GenerateStreamResponse(text="a", token_ids=[5], seed=7, base_fingerprint="f")
NEXT = pb.GenerateStreamResponse(text="b", token_ids=[6])
LAST = pb.GenerateStreamResponse(
    text="c", token_ids=[8], finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage()
)


class LostServer(generation_pb2_grpc.GenerationServiceServicer):
    """Sends one list of responses for each call; the connection is lost behind all but the last."""

    def __init__(self, answers: Sequence[Sequence[pb.GenerateStreamResponse]]) -> None:
        self.answers = list(answers)
        self.requests: list[pb.GenerateStreamRequest] = []

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> Iterator[pb.GenerateStreamResponse]:
        self.requests.append(request)
        yield from self.answers.pop(0)
        if self.answers:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was reset")


@contextmanager
def lost_server(*answers: Sequence[pb.GenerateStreamResponse]) -> Iterator[tuple[LostServer, str]]:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = LostServer(answers)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def stream(address: str, **options: Any) -> list[Piece]:
    with Client(address, 10.0) as client:
        return list(client.stream("text", Options(**options)))


def resumed(response: pb.GenerateStreamResponse, fingerprint: str) -> pb.GenerateStreamResponse:
    """The first response of a server that resumes a stream."""
    copy = pb.GenerateStreamResponse()
    copy.CopyFrom(response)
    copy.seed, copy.base_fingerprint = 7, fingerprint
    return copy


def test_a_lost_stream_is_resumed_with_its_tokens() -> None:
    with lost_server([FIRST], [resumed(NEXT, "f")], [resumed(LAST, "f")]) as (server, address):
        pieces = stream(address, time_limit_ms=5000)
    assert [piece.text for piece in pieces] == ["a", "b", "c"]
    assert [piece.resumed_at for piece in pieces] == ["", address, address]
    assert [piece.seed for piece in pieces] == [7, 0, 0]
    resumes = [request.resume for request in server.requests[1:]]
    assert [list(resume.token_ids) for resume in resumes] == [[5], [5, 6]]
    assert {resume.base_fingerprint for resume in resumes} == {"f"}
    assert server.requests[2].time_limit_ms < 5000


def test_refused_attempts_are_no_resumptions() -> None:
    """A server that is still loading, or that is full, refuses a stream before it continues it."""
    second, last = resumed(NEXT, "f"), resumed(LAST, "f")
    answers = [[FIRST], [], [], [], [second], [], [], [last]]
    with lost_server(*answers) as (server, address):
        assert [piece.text for piece in stream(address)] == ["a", "b", "c"]
        assert len(server.requests) == len(answers)


def test_refused_attempts_are_limited() -> None:
    answers = [[FIRST], [], [], [], [], [resumed(LAST, "f")]]
    with lost_server(*answers) as (server, address), pytest.raises(CallError, match="reset"):
        stream(address)
    assert len(server.requests) == 1 + Retries().attempts_max


def test_a_loss_behind_the_last_piece_is_no_error() -> None:
    with lost_server([FIRST, LAST], []) as (server, address):
        assert [piece.text for piece in stream(address)] == ["a", "c"]
        assert len(server.requests) == 1


def test_an_async_stream_ignores_a_loss_behind_the_last_piece() -> None:
    async def read(address: str) -> list[str]:
        async with AsyncClient(address, 10.0) as client:
            return [piece.text async for piece in client.stream("text")]

    with lost_server([FIRST, LAST], []) as (_, address):
        assert asyncio.run(read(address)) == ["a", "c"]


def test_a_server_that_begins_again_is_recognized() -> None:
    """A server of an older release ignores `resume`."""
    with (
        lost_server([FIRST], [resumed(FIRST, "")]) as (_, address),
        pytest.raises(CallError, match="cannot continue it"),
    ):
        stream(address)


@pytest.mark.parametrize(
    "options", [{"prompt_logprobs": 0}, {"answers": 2}, {"adapters": ["", "x"]}]
)
def test_a_stream_that_cannot_be_resumed_raises_its_error(options: dict[str, Any]) -> None:
    with (
        lost_server([FIRST], [LAST]) as (server, address),
        pytest.raises(CallError, match="reset"),
    ):
        stream(address, **options)
    assert len(server.requests) == 1
