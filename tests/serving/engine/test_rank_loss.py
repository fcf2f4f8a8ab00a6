"""Rank loss: every accepted request still ends exactly once, with the right result.

A test can break and restore the transport; behind it is a real engine loop with a real model.
"""

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpt.errors import PreambleError
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.engine.stream import collect_completions
from serving.request import (
    AnswerSpec,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
)
from tests.support.engine_requests import (
    DRAWN,
    LONG,
    VOCABULARY,
    generate_alone,
    is_idle,
    read_tokens,
    run_async,
    single_request,
    write_adapter,
)
from tests.support.lossy_engine import engine_with_lossy_transport
from tests.support.models import CLASSIC, build
from tests.support.servers import eventually

LOSSES_S = 3.0  # Ranks are lost for this long at least.
LOSSES_S_MAX = 30.0


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


def test_requests_without_output_survive_a_rank_loss_and_others_are_unavailable(
    model: GPT,
) -> None:
    transport, engine = engine_with_lossy_transport(model)
    changes: list[bool] = []
    engine.on_change = lambda: changes.append(engine.up)

    async def work() -> None:
        transport.gate.allow(0)
        streaming = engine.submit(single_request((1, 1), LONG))
        resumable = engine.submit(
            single_request((1, 2), replace(LONG, logprobs=0)), final_only=True
        )
        transport.gate.allow(4)
        first = [await anext(streaming), await anext(resumable)]
        queued = [engine.submit(single_request((2, number), DRAWN)) for number in range(9)]
        cancelled = queued.pop()
        transport.gate.allow(4)
        await asyncio.to_thread(transport.gate.until_blocked)
        await asyncio.to_thread(transport.lose)
        assert (engine.up, engine.restarts, engine.down_reason) == (
            False,
            1,
            "rank 0 was ended by SIGKILL",
        )
        with pytest.raises(UnavailableError, match=r"being loaded .*SIGKILL"):
            engine.submit(single_request((1, 2)))
        cancelled.close()
        with pytest.raises(UnavailableError, match="try again in a moment"):
            await read_tokens(streaming)
        transport.start(engine)
        rest = await collect_completions(resumable)
        ids = (*first[1].token_ids, *rest[0].token_ids)
        assert list(ids) == generate_alone(model, resumable.request.answers[0])
        assert len(first[1].scores) + len(rest[0].scores) == 50
        for stream in queued:
            answer = stream.request.answers[0]
            # Answers with output are unavailable; the others are complete and equal the reference.
            try:
                assert await read_tokens(stream) == generate_alone(model, answer)
            except UnavailableError:
                assert stream in queued[:2]

    try:
        run_async(work)
        # The engine loop's thread may report the first start after `wait` has returned.
        assert changes[-2:] == [False, True] and len(changes) <= 3
        eventually(lambda: is_idle(engine))
    finally:
        engine.close()


def test_the_adapter_files_of_unfinished_requests_are_known_during_a_rank_loss(
    model: GPT, tmp_path: Path
) -> None:
    transport, engine = engine_with_lossy_transport(model)
    adapter_ref = write_adapter(tmp_path, "tax", 2)

    async def work() -> None:
        transport.gate.allow(0)
        stream = engine.submit(single_request((VOCABULARY, 2), rows=adapter_ref), final_only=True)
        engine.submit(single_request((1, 2))).close()
        assert engine.adapter_files() == {adapter_ref.file}
        await asyncio.to_thread(transport.lose)
        assert engine.adapter_files() == {adapter_ref.file}
        transport.start(engine)
        await collect_completions(stream)
        assert engine.adapter_files() == set()

    try:
        run_async(work)
    finally:
        engine.close()


def test_submit_after_a_permanent_failure_names_it_and_suggests_another_server(model: GPT) -> None:
    transport, engine = engine_with_lossy_transport(model)
    message = r"the engine has failed \(rank 0 was ended by SIGKILL\); try another server"

    async def work() -> None:
        transport.gate.allow(0)
        waiting = engine.submit(single_request((1, 2)))
        transport.refusal = PreambleError("the ranks could not be started")
        with pytest.raises(UnavailableError, match=r"could not be started.*try another server"):
            engine.submit(single_request((1, 2)))
        await asyncio.to_thread(transport.lose)
        assert engine.has_failed
        with pytest.raises(UnavailableError, match=message) as refused:
            engine.submit(single_request((1, 2)))
        assert refused.value.reason == "STOPPED"
        with pytest.raises(UnavailableError, match=message):
            engine.check_capacity()
        with pytest.raises(UnavailableError, match=message):
            await read_tokens(waiting)

    try:
        run_async(work)
    finally:
        engine.close()


def test_a_request_with_two_rank_losses_fails_as_the_likely_cause(model: GPT) -> None:
    transport, engine = engine_with_lossy_transport(model)

    async def work() -> None:
        transport.gate.allow(0)
        streams = [engine.submit(single_request((1, number), LONG)) for number in range(4)]
        transport.gate.allow(8)
        for stream in streams:
            await anext(stream)
        suspect = engine.submit(single_request((1, 2), LONG))
        for _ in range(2):
            await asyncio.to_thread(transport.lose)
            transport.gate.allow(0)
            transport.start(engine)
        transport.gate.allow(None)
        with pytest.raises(EngineFaultError, match="lost twice"):
            await read_tokens(suspect)
        for stream in streams:
            stream.close()

    try:
        run_async(work)
        assert engine.restarts == 2
    finally:
        engine.close()


def test_each_answer_ends_once_under_random_losses_cancels_and_deadlines(
    model: GPT,
) -> None:
    transport, engine = engine_with_lossy_transport(model)
    draw = random.Random(4)
    specs = [
        AnswerSpec(
            (1, 2, 3, number), SamplingParams(length, temperature=number % 2 * 3.0, seed=number)
        )
        for number, length in enumerate((1, 4, 9, 20, 40, 60))
    ]
    expected = {answer: generate_alone(model, answer) for answer in specs}
    ends: dict[str, int] = {}

    async def ask() -> None:
        answers = tuple(draw.choices(specs, k=draw.choice((1, 1, 1, 2, 4))))
        deadline = time.monotonic() + draw.choice((1000.0, 1000.0, 0.02, 0.2))
        pieces_max = draw.choice((1, 3, 10**6, 10**6))
        try:
            stream = engine.submit(Request(answers), deadline, final_only=draw.random() < 0.5)
        except (OverloadedError, UnavailableError, DeadlinePassedError) as error:
            ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
            return await asyncio.sleep(0.02)
        tokens: list[list[int]] = [[] for _ in answers]
        finish_counts = [0] * len(answers)
        ending = "cancelled"
        try:
            async for piece in stream:
                assert not finish_counts[piece.index]
                tokens[piece.index] += piece.token_ids
                finish_counts[piece.index] += piece.finish is not None
                pieces_max -= 1
                if not pieces_max:
                    break
            else:
                ending = "done"
        except (DeadlinePassedError, UnavailableError, EngineFaultError) as error:
            ending = type(error).__name__
        finally:
            stream.close()
        ends[ending] = ends.get(ending, 0) + 1
        assert ending != "done" or finish_counts == [1] * len(answers)
        for answer, answer_tokens, end in zip(answers, tokens, finish_counts, strict=True):
            assert answer_tokens == expected[answer][: None if end else len(answer_tokens)]

    ended = asyncio.Event()

    async def ask_repeatedly() -> None:
        while not ended.is_set():
            await ask()

    def every_ending_occurred() -> bool:
        endings = {"cancelled", "UnavailableError", "DeadlinePassedError"}
        return endings <= ends.keys() and ends.get("done", 0) > 10 and engine.restarts >= 3

    async def lose_ranks_repeatedly() -> None:
        started_s = time.monotonic()
        tasks = [asyncio.create_task(ask_repeatedly()) for _ in range(8)]
        elapsed_s = 0.0
        while elapsed_s < LOSSES_S or (elapsed_s < LOSSES_S_MAX and not every_ending_occurred()):
            await asyncio.sleep(draw.uniform(0.1, 0.4))
            await asyncio.to_thread(transport.lose)
            await asyncio.sleep(draw.uniform(0.0, 0.05))
            await asyncio.to_thread(transport.start, engine)
            elapsed_s = time.monotonic() - started_s
        ended.set()
        await asyncio.gather(*tasks)

    try:
        run_async(lose_ranks_repeatedly)
        eventually(lambda: is_idle(engine))
        assert every_ending_occurred(), ends
    finally:
        engine.close()
