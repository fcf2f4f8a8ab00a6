"""The engine by itself: what it accepts ends, and one request's fault is no other's."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator

import pytest
import torch

from gpt.generate import generate
from gpt.model import GPT
from gpt.sampling import Sampling
from gpt.tokenizer import NullTokenizer
from serving.engine import Engine, Stream
from serving.request import (
    DeadlinePassedError,
    EngineFaultError,
    Request,
    UnavailableError,
    UnknownAdapterError,
)
from tests.models import CLASSIC, build

VOCABULARY = CLASSIC.vocab_size
LONG = Sampling(max_new_tokens=60)
SHORT = Sampling(max_new_tokens=5)
WAIT_S = 20.0

# Two adapters, by digest, whose rows are of unequal number.
TABLES = {
    digest: torch.randn(rows, CLASSIC.hidden_size, generator=torch.Generator().manual_seed(rows))
    for digest, rows in (("two", 2), ("three", 3))
}
TABLES["broken"] = torch.full((2, CLASSIC.hidden_size), float("nan"))


def table(digest: str) -> torch.Tensor:
    if digest not in TABLES:
        raise UnknownAdapterError("gone")
    return TABLES[digest]


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


@pytest.fixture
def engine(model: GPT) -> Iterator[Engine]:
    tokenizer = NullTokenizer(VOCABULARY)
    engine = Engine(model, tokenizer, table, running_requests_max=4, queue_requests_max=8)
    yield engine
    engine.close()


async def tokens(stream: Stream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


def run(work: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_adapters_share_a_step_and_each_request_gets_its_own_rows(
    engine: Engine, model: GPT
) -> None:
    first = [VOCABULARY, VOCABULARY + 1, 7, 8]
    second = [9, VOCABULARY + 2, 7, VOCABULARY]

    async def work() -> None:
        requests = [
            Request(tuple(first), SHORT, digest="two"),
            Request(tuple(second), SHORT, digest="three"),
            Request((7, 8), SHORT),
        ]
        made = await asyncio.gather(*(tokens(engine.submit(request)) for request in requests))
        for ids, prompt, digest in (
            *((made[0], first, "two"), (made[1], second, "three")),
            (made[2], [7, 8], ""),
        ):
            alone = generate(model, [prompt], SHORT, table=TABLES.get(digest))[0]
            assert ids == alone.token_ids

    run(work)


def test_a_request_that_fails_does_not_take_its_mates_along(engine: Engine) -> None:
    async def work() -> None:
        # No admission stands before this engine, so what cannot be run gets into it.
        streams = [engine.submit(Request((1, 2), SHORT)) for _ in range(2)]
        broken = engine.submit(Request((1, VOCABULARY + 7), SHORT))
        made = await asyncio.gather(*map(tokens, streams))
        assert made[0] == made[1]
        assert len(made[0]) == 5
        with pytest.raises(EngineFaultError):
            await tokens(broken)

    run(work)


def test_a_deadline_that_has_passed_ends_a_request_before_it_runs(engine: Engine) -> None:
    async def work() -> None:
        with pytest.raises(DeadlinePassedError):
            await tokens(engine.submit(Request((1, 2), SHORT), time.monotonic()))

    run(work)


def test_a_stream_that_is_closed_frees_its_place(engine: Engine) -> None:
    async def work() -> None:
        streams = [engine.submit(Request((1, 2), LONG)) for _ in range(8)]
        for stream in streams:
            stream.close()
        assert engine.waiting == 0
        assert len(await tokens(engine.submit(Request((1, 2), SHORT)))) == 5
        assert await tokens(streams[0]) == []

    run(work)


def test_a_row_whose_request_was_cancelled_is_not_computed_any_more(
    engine: Engine, model: GPT
) -> None:
    tokens_of_step: list[int] = []
    assert model.embedding is not None
    hook = model.embedding.register_forward_pre_hook(
        lambda _, given: tokens_of_step.append(len(given[0]))
    )

    async def work() -> None:
        streams = [engine.submit(Request((1, 2), LONG)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        for stream in streams[1:]:
            stream.close()
        assert len(await tokens(streams[0])) > 20

    try:
        run(work)
    finally:
        hook.remove()
    assert max(tokens_of_step) > 1
    assert tokens_of_step[-20:] == [1] * 20


def test_numbers_that_are_not_finite_end_their_own_request_only(engine: Engine) -> None:
    async def work() -> None:
        good = [engine.submit(Request((1, 2), SHORT)) for _ in range(2)]
        prompt = (VOCABULARY, VOCABULARY + 1, 2)
        broken = engine.submit(Request(prompt, SHORT, digest="broken"))
        made = await asyncio.gather(*map(tokens, good))
        assert made[0] == made[1]
        assert len(made[0]) == 5
        with pytest.raises(EngineFaultError, match="infinite or not a number"):
            await tokens(broken)

    run(work)


def test_what_runs_when_the_engine_ends_is_told_so(engine: Engine) -> None:
    async def work() -> None:
        stream = engine.submit(Request((1, 2), LONG))
        await anext(stream)
        engine.close()
        with pytest.raises(UnavailableError):
            await tokens(stream)
        with pytest.raises(UnavailableError):
            engine.submit(Request((1, 2), SHORT))

    run(work)


def test_an_adapter_that_is_gone_is_refused_at_once(engine: Engine) -> None:
    async def work() -> None:
        with pytest.raises(UnknownAdapterError):
            engine.submit(Request((VOCABULARY, 2), SHORT, digest="four"))

    run(work)
