"""An engine whose ranks are lost: what was accepted still ends, once, and rightly.

The link is one that a test can break and mend; behind it is a real planner with a real model.
"""

import asyncio
import random
import time
from dataclasses import replace

import pytest

from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.engine.stream import completions
from serving.request import (
    Answer,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
)
from tests.support.engine_requests import (
    DRAWN,
    LONG,
    alone,
    idle,
    one,
    run,
    tokens,
)
from tests.support.lossy_engine import broken_engine
from tests.support.models import CLASSIC, build
from tests.support.servers import eventually

STORM_S = 3.0


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


def test_what_had_told_no_token_outlives_a_loss_and_the_rest_is_told_to_try_again(
    model: GPT,
) -> None:
    link, engine = broken_engine(model)
    changes: list[bool] = []
    engine.on_change = lambda: changes.append(engine.up)

    async def work() -> None:
        link.pace_s = 0.02
        begun = engine.submit(one((1, 1), LONG))
        whole = engine.submit(one((1, 2), replace(LONG, logprobs=0)), whole=True)
        first = [await anext(begun), await anext(whole)]
        waits = [engine.submit(one((2, place), DRAWN)) for place in range(9)]
        left = waits.pop()
        await asyncio.to_thread(link.lose)
        assert (engine.up, engine.restarts, engine.reason) == (
            False,
            1,
            "rank 0 was ended by SIGKILL",
        )
        with pytest.raises(UnavailableError, match=r"loaded again .*SIGKILL"):
            engine.submit(one((1, 2)))
        left.close()
        with pytest.raises(UnavailableError, match="try again in a moment"):
            await tokens(begun)
        link.pace_s = 0.0
        link.start(engine)
        rest = await completions(whole)
        ids = (*first[1].token_ids, *rest[0].token_ids)
        assert list(ids) == alone(model, whole.request.answers[0])
        assert len(first[1].scores) + len(rest[0].scores) == 50
        for stream in waits:
            told = stream.request.answers[0]
            # Those that had begun were told to try again, those that had not are right.
            try:
                assert await tokens(stream) == alone(model, told)
            except UnavailableError:
                assert stream in waits[:2]

    try:
        run(work)
        assert changes == [False, True]
        eventually(lambda: idle(engine))
    finally:
        engine.close()


def test_a_request_that_was_there_at_two_losses_is_taken_for_the_cause(model: GPT) -> None:
    link, engine = broken_engine(model)

    async def work() -> None:
        link.pace_s = 0.02
        held = [engine.submit(one((1, place), LONG)) for place in range(4)]
        for stream in held:
            await anext(stream)
        suspect = engine.submit(one((1, 2), LONG))
        for _ in range(2):
            await asyncio.to_thread(link.lose)
            link.start(engine)
        link.pace_s = 0.0
        with pytest.raises(EngineFaultError, match="lost twice"):
            await tokens(suspect)
        for stream in held:
            stream.close()

    try:
        run(work)
        assert engine.restarts == 2
    finally:
        engine.close()


def test_in_a_storm_of_losses_cancels_and_deadlines_every_answer_ends_once_and_is_right(
    model: GPT,
) -> None:
    link, engine = broken_engine(model)
    luck = random.Random(4)
    wanted = [
        Answer((1, 2, 3, place), Sampling(length, temperature=place % 2 * 3.0, seed=place))
        for place, length in enumerate((1, 4, 9, 20, 40, 60))
    ]
    expected = {answer: alone(model, answer) for answer in wanted}
    ends: dict[str, int] = {}

    async def ask() -> None:
        answers = tuple(luck.choices(wanted, k=luck.choice((1, 1, 1, 2, 4))))
        deadline = time.monotonic() + luck.choice((1000.0, 1000.0, 0.02, 0.2))
        pieces_max = luck.choice((1, 3, 10**6, 10**6))
        try:
            stream = engine.submit(Request(answers), deadline, whole=luck.random() < 0.5)
        except (OverloadedError, UnavailableError, DeadlinePassedError) as error:
            ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
            return await asyncio.sleep(0.02)
        made: list[list[int]] = [[] for _ in answers]
        ended = [0] * len(answers)
        how = "cancelled"
        try:
            async for piece in stream:
                assert not ended[piece.index]
                made[piece.index] += piece.token_ids
                ended[piece.index] += piece.finish is not None
                pieces_max -= 1
                if not pieces_max:
                    break
            else:
                how = "done"
        except (DeadlinePassedError, UnavailableError, EngineFaultError) as error:
            how = type(error).__name__
        finally:
            stream.close()
        ends[how] = ends.get(how, 0) + 1
        assert how != "done" or ended == [1] * len(answers)
        for answer, ids, end in zip(answers, made, ended, strict=True):
            assert ids == expected[answer][: None if end else len(ids)]

    over = asyncio.Event()

    async def callers() -> None:
        while not over.is_set():
            await ask()

    def enough() -> bool:
        wanted = {"cancelled", "UnavailableError", "DeadlinePassedError"}
        return wanted <= ends.keys() and ends.get("done", 0) > 10 and engine.restarts >= 3

    async def storm() -> None:
        began = time.monotonic()
        tasks = [asyncio.create_task(callers()) for _ in range(8)]
        while (took_s := time.monotonic() - began) < STORM_S or (took_s < 30 and not enough()):
            await asyncio.sleep(luck.uniform(0.1, 0.4))
            await asyncio.to_thread(link.lose)
            await asyncio.sleep(luck.uniform(0.0, 0.05))
            await asyncio.to_thread(link.start, engine)
        over.set()
        await asyncio.gather(*tasks)

    try:
        run(storm)
        eventually(lambda: idle(engine))
        assert enough(), ends
    finally:
        engine.close()
