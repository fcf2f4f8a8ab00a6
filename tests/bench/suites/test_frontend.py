"""Front-end benchmark on the null engine and a tiny model; batching of streamed tokens."""

import asyncio
import time
from pathlib import Path

import pytest

from bench.harness.targets import Row
from bench.suites import frontend
from bench.suites.null_engine import null_service
from clients.load.generator import (
    CallRecord,
    LengthSampler,
    LoadRun,
    LoadSpec,
    ServerEndpoint,
    run_load,
)
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from serving.request import Ask, OverloadedError, Piece
from serving.service.service import Service

pytestmark = pytest.mark.slow  # Starts servers, which takes too long for the fast suite.

TINY = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=320,
    max_position_embeddings=160,
    dtype="bfloat16",
)
SMALL = frontend.FrontendSizes(
    streams=4,
    new_tokens=8,
    null_new_tokens=20,
    null_step_s=0.002,
    prompt_tokens=8,
    calls=20,
    load_s=1.0,
    load_new_tokens=8,
    overload_factor=4.0,
)


def test_parts_of_the_null_engine_yield_rows() -> None:
    tokens, first = frontend.run_suite(("tokens", "first"), SMALL)
    assert isinstance(tokens, Row) and isinstance(first, Row)
    assert "4 streams, null engine" in tokens.summary and tokens.value > 0
    assert "ms added" in first.summary


def test_parts_of_the_server_yield_rows() -> None:
    outputs = list(frontend.run_suite(("share", "profiles", "overload"), SMALL, TINY))
    rows = {output.target.name: output for output in outputs if isinstance(output, Row)}
    assert list(rows) == [
        "front/share",
        "front/profiles-itl",
        "front/profiles-tokens",
        "front/refused",
        "front/lost",
        "front/growth",
    ]
    assert "4 of 4 succeeded" in rows["front/share"].summary


def test_every_part_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    assert all(f"| `{part}` |" in page for part in frontend.PARTS)


def test_overload_rows_judge_refusals_lost_calls_and_memory_growth() -> None:
    def call(code: str, took_s: float) -> CallRecord:
        # Sent one second late by the generator; the delay must not count.
        return CallRecord(0.0, 1.0, ended_s=1.0 + took_s, code=code)

    def rows(calls: list[CallRecord], growth: float) -> list[Row]:
        outputs = frontend.overload_rows(LoadRun(calls, 6.0, 0.0, True), growth)
        return [output for output in outputs if isinstance(output, Row)]

    calls = [call("RESOURCE_EXHAUSTED", 0.01) for _ in range(200)] + [call("OK", 5.0)]
    quick, lost, memory = rows(calls, 0.5)
    assert "200 refused, p99 10.0 ms" in quick.summary and quick.verdict == "met"
    assert (lost.value, lost.verdict) == (0, "met")
    assert memory.verdict == "MISSED"
    slow = [call("RESOURCE_EXHAUSTED", 0.2), call("RESOURCE_EXHAUSTED", 0.2)]
    quick, lost, _ = rows([*slow, call("UNAVAILABLE", 1)], 0.0)
    assert quick.verdict == "MISSED" and lost.value == 1


def pieces_of_streams(
    streams: int,
    new_tokens: int,
    *,
    final_only: bool = False,
    step_s: float = 0.002,
    gather_ms: float = 0.0,
) -> list[list[Piece]]:
    """The pieces of each of several equal requests that run concurrently."""

    async def read_pieces(service: Service) -> list[Piece]:
        request = service.admission.admit(Ask((5, 6), max_new_tokens=new_tokens))
        stream = service.engine.submit(request, final_only=final_only)
        return [piece async for piece in stream]

    async def run_streams() -> list[list[Piece]]:
        service, _ = null_service(step_s, streams, gather_ms)
        try:
            return await asyncio.gather(*(read_pieces(service) for _ in range(streams)))
        finally:
            service.close()

    return asyncio.run(run_streams())


def test_messages_of_many_streams_hold_several_tokens() -> None:
    """64 streams gather tokens for 16 ms, so 2 ms steps give several tokens per message."""
    began = time.monotonic()
    streams = pieces_of_streams(64, 60)
    took_s = time.monotonic() - began  # A slow run on a busy machine has more messages.
    for pieces in streams:
        assert sum(len(piece.token_ids) for piece in pieces) == 60
        assert pieces[-1].finish == "length"
        assert len(pieces) <= took_s / 0.016 + 3


def test_a_non_streaming_answer_has_two_pieces() -> None:
    for pieces in pieces_of_streams(2, 40, final_only=True, step_s=0.02):
        assert sum(len(piece.token_ids) for piece in pieces) == 40
        assert len(pieces) == 2 and len(pieces[0].token_ids) >= 1


def test_an_overloaded_server_refuses_requests_before_admission() -> None:
    async def overload() -> tuple[list[object], PreambleError]:
        service, _ = null_service(0.05, 2)  # Two requests run, two wait.
        try:
            asks = [service.start(Ask((5, 6), max_new_tokens=1000)) for _ in range(50)]
            answers = await asyncio.gather(*asks, return_exceptions=True)
            with pytest.raises(PreambleError) as raised:
                await service.start(Ask(()))  # Also invalid, but overload is checked first.
            return list(answers), raised.value
        finally:
            service.close()

    answers, error = asyncio.run(overload())
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert len(refused) == 46 and isinstance(error, OverloadedError)


def test_a_single_stream_gets_each_token_in_its_own_message() -> None:
    # A busy machine can merge a few messages.
    assert any(len(pieces_of_streams(1, 20, step_s=0.01)[0]) >= 10 for _ in range(5))


def test_gather_ms_batches_tokens() -> None:
    (pieces,) = pieces_of_streams(1, 40, step_s=0.05, gather_ms=1000)
    assert sum(len(piece.token_ids) for piece in pieces) == 40
    assert len(pieces[0].token_ids) <= 2 and len(pieces) <= 8


def test_the_null_server_generates_the_requested_tokens() -> None:
    with frontend.null_server(0.0, 4) as (address, pipe):
        length = LengthSampler.parse("3")
        load_run = run_load(
            ServerEndpoint(address),
            LoadSpec(concurrency=2, requests_max=6, prompt_length=length, output_length=length),
        )
        pipe.send(True)
        process_s, null_s = pipe.recv()
    assert [call.tokens for call in load_run.calls] == [3] * 6
    assert process_s > null_s >= 0
