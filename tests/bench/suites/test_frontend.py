"""The benches of the front end run, on engines of a moment; streams gather tokens under load."""

import asyncio
import time
from pathlib import Path

import pytest

from bench.harness.targets import Row
from bench.suites import frontend
from bench.suites.null_engine import null_service
from clients.load.generator import Length, Run, Sent, Where, Work, run
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from serving.request import Ask, OverloadedError, Piece
from serving.service.service import Service

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


TINY = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=320,
    max_position_embeddings=160,
    dtype="bfloat16",
)
SMALL = frontend.Sizes(
    streams=4,
    new=8,
    null_new=20,
    null_step_s=0.002,
    prompt=8,
    calls=20,
    load_s=1.0,
    load_new=8,
    over=4.0,
)


def test_what_needs_no_model_is_measured_and_judged() -> None:
    tokens, first = frontend.lines(("tokens", "first"), SMALL)
    assert isinstance(tokens, Row) and isinstance(first, Row)
    assert "4 streams, null engine" in tokens.told and tokens.value > 0
    assert "ms added" in first.told


def test_what_needs_a_model_is_measured_and_judged() -> None:
    told = list(frontend.lines(("share", "profiles", "overload"), SMALL, TINY))
    rows = {item.promise.name: item for item in told if isinstance(item, Row)}
    assert list(rows) == [
        "front/share",
        "front/profiles-itl",
        "front/profiles-tokens",
        "front/refused",
        "front/lost",
        "front/growth",
    ]
    assert "4 of 4 well" in rows["front/share"].told


def test_every_part_is_on_the_page_about_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    assert all(f"| `{part}` |" in page for part in frontend.PARTS)


def test_overload_is_judged_by_what_was_refused_and_what_was_lost() -> None:
    def call(code: str, took_s: float) -> Sent:
        return Sent(0.0, 1.0, end=1.0 + took_s, code=code)  # Sent late, which is not held against.

    def rows(calls: list[Sent], growth: float) -> list[Row]:
        told = frontend.told_of_overload(Run(calls, 6.0, 0.0, True), growth)
        return [item for item in told if isinstance(item, Row)]

    calls = [call("RESOURCE_EXHAUSTED", 0.01) for _ in range(200)] + [call("OK", 5.0)]
    quick, lost, memory = rows(calls, 0.5)
    assert "200 refused within 10.0 ms" in quick.told and quick.verdict == "met"
    assert (lost.value, lost.verdict) == (0, "met")
    assert memory.verdict == "MISSED"
    slow = [call("RESOURCE_EXHAUSTED", 0.2), call("RESOURCE_EXHAUSTED", 0.2)]
    quick, lost, _ = rows([*slow, call("UNAVAILABLE", 1)], 0.0)
    assert quick.verdict == "MISSED" and lost.value == 1


def pieces(
    streams: int, new: int, *, whole: bool = False, step_s: float = 0.002, gather_ms: float = 0.0
) -> list[list[Piece]]:
    """What each of many equal requests gets."""

    async def one(service: Service) -> list[Piece]:
        request = service.admission.admit(Ask((5, 6), max_new_tokens=new))
        stream = service.engine.submit(request, whole=whole)
        return [piece async for piece in stream]

    async def main() -> list[list[Piece]]:
        service, _ = null_service(step_s, streams, gather_ms)
        try:
            return await asyncio.gather(*(one(service) for _ in range(streams)))
        finally:
            service.close()

    return asyncio.run(main())


def test_many_streams_gather_tokens_but_the_first_and_the_end_never_wait() -> None:
    """64 streams pause for 16 ms, so 2 ms steps give several tokens at a time."""
    began = time.monotonic()
    each = pieces(64, 60)
    took_s = time.monotonic() - began  # Where steps take long on a busy machine, there are more.
    for taken in each:
        assert sum(len(piece.token_ids) for piece in taken) == 60
        assert taken[-1].finish == "length"
        assert len(taken) <= took_s / 0.016 + 3


def test_a_whole_answer_is_told_of_at_its_first_token_and_at_its_end() -> None:
    for taken in pieces(2, 40, whole=True, step_s=0.02):
        assert sum(len(piece.token_ids) for piece in taken) == 40
        assert len(taken) == 2 and len(taken[0].token_ids) >= 1


def test_a_full_server_refuses_before_it_reads_what_is_asked() -> None:
    async def main() -> tuple[list[object], PreambleError]:
        service, _ = null_service(0.05, 2)  # Two run, two wait.
        try:
            asks = [service.start(Ask((5, 6), max_new_tokens=1000)) for _ in range(50)]
            ended = await asyncio.gather(*asks, return_exceptions=True)
            with pytest.raises(PreambleError) as bad:
                await service.start(Ask(()))  # Bad, too, had anybody looked.
            return list(ended), bad.value
        finally:
            service.close()

    ended, bad = asyncio.run(main())
    refused = [one for one in ended if isinstance(one, OverloadedError)]
    assert len(refused) == 46 and isinstance(bad, OverloadedError)


def test_a_stream_alone_gets_its_tokens_as_they_come() -> None:
    # A busy machine may merge a few.
    assert any(len(pieces(1, 20, step_s=0.01)[0]) >= 10 for _ in range(5))


def test_tokens_gather_as_long_as_the_operator_says() -> None:
    (taken,) = pieces(1, 40, step_s=0.05, gather_ms=1000)
    assert sum(len(piece.token_ids) for piece in taken) == 40
    assert len(taken[0].token_ids) <= 2 and len(taken) <= 8


def test_a_null_server_counts_the_same_tokens_as_its_client() -> None:
    with frontend.null_server(0.0, 4) as (address, pipe):
        short = Length.of("3")
        done = run(Where(address), Work(concurrency=2, requests_max=6, prompt=short, new=short))
        pipe.send(True)
        whole_s, null_s = pipe.recv()
    assert [one.tokens for one in done.sent] == [3] * 6
    assert whole_s > null_s >= 0
