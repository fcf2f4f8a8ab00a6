"""Beams through the engine: what transformers finds, a step a token, whatever happens meanwhile.

The model is real, in a thread behind the link, and its beams' last tokens are all that it computes.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpt
import serving
from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.errors import AdapterError, RequestError
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.admission.admission import Admission
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.ranks.in_process import Inside
from serving.request import (
    Answer,
    Ask,
    BeamRule,
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
)
from tests.support.beam_cases import Best, Case, cases, expected, flat, same
from tests.support.engine_requests import (
    CONFIG,
    TOKENIZER,
    VOCABULARY,
    alone,
    idle,
    run,
    taken,
    tokens,
    written,
)
from tests.support.engine_requests import one as plain
from tests.support.lossy_engine import Fragile
from tests.support.many_tasks import World
from tests.support.models import CLASSIC
from tests.support.servers import CONFIG as SERVED
from tests.support.servers import eventually


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    engine = Engine(Inside(flat(CLASSIC), CONFIG), TOKENIZER, CONFIG)
    engine.start()
    engine.wait()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    eventually(lambda: idle(shared))


def told(completions: Sequence[Completion]) -> Best:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [(one.token_ids, one.beam_score or 0.0) for one in completions]


def test_the_engine_finds_what_transformers_finds_a_step_a_token(engine: Engine) -> None:
    model = flat(CLASSIC)
    # Four run at once, so that a round is one step.
    for case in [case for case in cases(model, 8, 7) if case.rule.width <= 4]:
        before = engine.load
        made = engine.generate([case.request])
        eventually(lambda: idle(engine))
        # Of what stands before it a beam computes its last token only, wherever blocks end.
        load = engine.load
        beams = load.made_tokens - before.made_tokens
        computed = load.prompt_tokens - before.prompt_tokens
        computed -= load.cached_tokens - before.cached_tokens
        assert computed <= len(case.prompt) + beams - 1
        assert load.steps - before.steps <= case.most + 10  # It may have idled some seconds.
        same(told(made), expected(model, case))
        for one in made:
            assert (one.finish == "stop") == (one.token_ids[-1] in case.ends)
            assert len(one.scores) == len(one.token_ids)
            assert all(len(score.tops) == 3 for score in one.scores)
            total = sum(score.logprob for score in one.scores)
            worth = total / len(one.token_ids) ** case.rule.length_penalty
            assert one.beam_score == pytest.approx(worth)


def test_many_searches_at_once_are_each_what_it_is_alone(engine: Engine) -> None:
    model = flat(CLASSIC)
    several = list(cases(model, 8, 8))

    made = engine.generate([*(case.request for case in several), plain((1, 2))])

    assert len(made.pop().token_ids) == 5
    for case in several:
        best, made = made[: case.rule.answers], made[case.rule.answers :]
        same(told(best), expected(model, case))


def test_a_search_that_has_begun_does_not_wait_for_its_turn_at_each_token(engine: Engine) -> None:
    case, model = Case((5, 6, 7), BeamRule(4), 30), flat(CLASSIC)
    crowd = [plain((place, 2), Sampling(20, temperature=2.0, seed=place)) for place in range(8)]
    answers = [alone(model, request.answers[0]) for request in crowd]
    stop = False

    async def neighbour(request: Request, answer: list[int]) -> None:
        while not stop:
            assert await tokens(engine.submit(request)) == answer

    async def work() -> None:
        nonlocal stop
        # As many as fill all four slots twice.
        pairs = zip(crowd, answers, strict=True)
        neighbours = [asyncio.create_task(neighbour(*pair)) for pair in pairs]
        while engine.load.running < 4:
            await asyncio.sleep(0)
        steps = engine.load.steps
        (piece,) = await taken(engine.submit(case.request))
        # The first one may wait for them all, and the others take two or three each.
        assert engine.load.steps - steps < 100 + 8 * case.most
        stop = True
        await asyncio.gather(*neighbours)
        same([(piece.token_ids, piece.beam_score or 0.0)], expected(model, case))

    run(work)


def test_adapters_and_tenants_are_kept_apart(engine: Engine, tmp_path: Path) -> None:
    model, rule = flat(CLASSIC), BeamRule(3, 2)
    two, three = written(tmp_path, "two", 2), written(tmp_path, "three", 3)
    text, sampling = (7, 8, 9, 10, 11), Sampling(max_new_tokens=6)
    prompts = [(*range(VOCABULARY, VOCABULARY + rows.count), *text) for rows in (two, three)]
    first, second = (
        Answer(prompt, sampling, rows=rows)
        for prompt, rows in zip(prompts, (two, three), strict=True)
    )
    request = Request((first, first, second, second), beams=rule, tenant="one")

    made = engine.generate([request])
    other = engine.generate([replace(request, tenant="two")])
    again = engine.generate([request])

    for place, rows in enumerate((two, three)):
        table = open_adapter(Path(rows.file)).table
        case = Case(prompts[place], rule, 6)
        for answers in (made, other, again):
            same(told(answers[place * 2 : place * 2 + 2]), expected(model, case, table))
    assert {answer.cached_tokens for answer in (*made, *other)} == {0}
    assert [answer.cached_tokens for answer in again] == [6, 6, 7, 7]


def test_all_pieces_come_at_the_end_and_closing_the_stream_cancels_the_search(
    engine: Engine,
) -> None:
    request = Case((1, 2), BeamRule(4, 2), 50).request

    async def work() -> None:
        pieces = await taken(engine.submit(request))
        assert [(piece.index, len(piece.token_ids)) for piece in pieces] == [(0, 50), (1, 50)]
        assert all(piece.finish and piece.beam_score is not None for piece in pieces)
        stream = engine.submit(request)
        steps = engine.load.steps
        while engine.load.steps < steps + 3:
            await asyncio.sleep(0)
        stream.close()
        assert await tokens(stream) == []
        while not idle(engine):
            await asyncio.sleep(0.001)
        assert engine.load.steps < steps + 40

    run(work)


def test_a_deadline_ends_a_search(engine: Engine) -> None:
    async def work() -> None:
        request = Case((1, 2), BeamRule(4, 2), 60).request
        streams = [engine.submit(request, time.monotonic() + 0.02) for _ in range(3)]
        for stream in streams:
            with pytest.raises(DeadlinePassedError):
                await tokens(stream)

    run(work)


def test_a_search_takes_the_room_of_all_its_beams_at_once(engine: Engine) -> None:
    async def work() -> None:
        answers = Case((1, 2), BeamRule(5), 40).request.answers
        stream = engine.submit(Request(answers * 2, beams=BeamRule(5)))
        assert engine.accepted == 10
        with pytest.raises(OverloadedError):
            engine.submit(Request(answers, beams=BeamRule(5)))
        with pytest.raises(RequestError, match="15 answers at once"):
            engine.submit(Request(answers * 3, beams=BeamRule(5)))
        small = [engine.submit(plain((1, 2))) for _ in range(2)]
        with pytest.raises(OverloadedError):
            engine.submit(plain((1, 2)))
        for other in small:
            assert len(await tokens(other)) == 5
        assert engine.accepted == 10
        assert len(await tokens(stream)) == 80
        assert engine.accepted == 0

    run(work)


def test_a_search_that_cannot_run_fails_in_all_its_answers_and_in_no_other(
    engine: Engine, tmp_path: Path
) -> None:
    gone = written(tmp_path, "gone", 4)
    Path(gone.file).unlink()
    good = Case((1, 2), BeamRule(3, 2), 4)
    bad = replace(good.request.answers[0], prompt=(VOCABULARY, 2), rows=gone)

    made = engine.generate([replace(good.request, answers=(bad, bad, *good.request.answers))])

    assert all(isinstance(completion.error, AdapterError) for completion in made[:2])
    same(told(made[2:]), expected(flat(CLASSIC), good))


def test_a_search_outlives_a_loss_of_the_ranks_and_is_blamed_for_a_second() -> None:
    case, model = Case((3, 1, 4, 1, 5), BeamRule(3, 2), 40), flat(CLASSIC)
    link = Fragile(model)
    engine = Engine(link, TOKENIZER, CONFIG)

    async def lose(at: int) -> None:
        link.pace_s = 0.02
        while engine.load.steps < at:
            await asyncio.sleep(0)
        await asyncio.to_thread(link.lose)
        assert engine.accepted == case.rule.width
        link.pace_s = 0.0
        await asyncio.to_thread(link.start, engine)

    async def work() -> None:
        stream = engine.submit(case.request)
        await lose(5)
        pieces = await taken(stream)
        found = [(piece.token_ids, piece.beam_score or 0.0) for piece in pieces]
        same(found, expected(model, case))
        unlucky = engine.submit(case.request)
        await lose(engine.load.steps + 5)
        link.pace_s = 0.02
        while engine.load.steps < 5:
            await asyncio.sleep(0)
        await asyncio.to_thread(link.lose)
        with pytest.raises(EngineFaultError, match="lost twice"):
            await tokens(unlucky)
        assert engine.accepted == 0

    engine.start()
    engine.wait()
    try:
        run(work)
    finally:
        engine.close()


def test_beams_are_asked_for_like_any_answers(tmp_path: Path) -> None:
    world = World(tmp_path)
    stopped = build_adapter(Card("stopped", stop=("dog",)), torch.ones(2, SERVED.hidden_size))
    save_adapter(stopped, world.adapters / "stopped.safetensors")
    config = ServerConfig(str(world.checkpoint), adapters=str(world.adapters), dtype="float64")
    with serving.open_engine(config) as service:
        ask = Ask("the quick brown", beam_width=3, answers=2, max_new_tokens=6)
        best = service.generate([ask])
        ids = service.admission.admit(ask).answers[0]
        case = Case(ids.prompt, BeamRule(3, 2), 6, ends=ids.sampling.stop_token_ids)
        model = gpt.load(world.checkpoint, dtype="float64")
        same(told(best), expected(model, case))
        for answer in best:
            said = [one for one in answer.token_ids if one not in case.ends]
            assert answer.text == service.tokenizer.decode(said, started=True)
            assert answer.scores == ()
        tasks = replace(ask, prompt={"document": "one"}, adapters=("task0", "before"))
        singly = [replace(tasks, adapters=(name,)) for name in tasks.adapters]
        same(told(service.generate([tasks])), told(service.generate(singly)))
        with pytest.raises(RequestError, match="stop strings, and beams end at tokens only"):
            service.generate([replace(ask, adapters=("stopped",))])
        crowded = Admission(NullTokenizer(30), service.adapters, 30, 64, service.config)
        with pytest.raises(RequestError, match="vocabulary of 30, it must be at most 14"):
            crowded.admit(Ask((1,), beam_width=15, stop_token_ids=tuple(range(16))))
