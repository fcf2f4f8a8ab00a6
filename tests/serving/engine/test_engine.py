"""The engine by itself: what it accepts ends, and one request's fault is no other's.

The model is real, in a thread behind the link; the oracle is the plain loop, one request at a time.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest
import torch

from gpt.errors import AdapterError, RequestError
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.engine import engine as engine_module
from serving.engine.engine import Engine
from serving.engine.job import Job, News, waits
from serving.engine.stream import Stream
from serving.messages import Guide, Made
from serving.request import (
    Answer,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
    seed_of,
)
from tests.support.engine_requests import (
    CONFIG,
    DRAWN,
    LONG,
    SHORT,
    TOKENIZER,
    VOCABULARY,
    alone,
    idle,
    one,
    run,
    started,
    taken,
    tokens,
    written,
)
from tests.support.models import CLASSIC, build
from tests.support.servers import eventually

VARIED = replace(DRAWN, max_new_tokens=50)


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


@pytest.fixture(scope="module")
def shared(model: GPT) -> Iterator[Engine]:
    engine = started(model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Idle before each test, and again after it: no test leaves a block behind."""
    yield shared
    eventually(lambda: idle(shared))


def test_adapters_share_a_step_and_each_request_gets_its_own_rows(
    engine: Engine, model: GPT, tmp_path: Path
) -> None:
    two, three = written(tmp_path, "two", 2), written(tmp_path, "three", 3)
    requests = [
        one((VOCABULARY, VOCABULARY + 1, 7, 8), rows=two),
        one((9, VOCABULARY + 2, 7, VOCABULARY), rows=three),
        one((7, 8), DRAWN),
        one((7, 8, VOCABULARY), DRAWN, rows=two),
    ]

    made = engine.generate(requests)

    for completion, request in zip(made, requests, strict=True):
        assert completion.error is None
        assert list(completion.token_ids) == alone(model, request.answers[0])


def test_answers_of_one_request_are_those_of_their_seeds_alone(engine: Engine, model: GPT) -> None:
    seeds = [seed_of(DRAWN.seed, place) for place in range(4)]
    assert seeds[0] == DRAWN.seed and len(set(seeds)) == 4 and max(seeds) < 2**53
    answers = tuple(Answer((1, 2, 3, 4, 5, 6), replace(DRAWN, seed=seed)) for seed in seeds)

    made = engine.generate([Request(answers)])

    assert [completion.index for completion in made] == [0, 1, 2, 3]
    assert [completion.seed for completion in made] == seeds
    for completion, answer in zip(made, answers, strict=True):
        assert list(completion.token_ids) == alone(model, answer)
    assert len({completion.token_ids for completion in made}) == 4


def test_numbers_that_are_not_finite_end_their_own_answer_only(tmp_path: Path) -> None:
    narrow = build(CLASSIC, dtype=torch.float32)
    broken = written(tmp_path, "broken", 2, fill=3e38)
    engine = started(narrow)
    try:
        good = one((1, 2)).answers[0]
        bad = Answer((VOCABULARY, VOCABULARY + 1, 2), SHORT, rows=broken)
        expected = engine.generate([Request((good,))])[0].token_ids

        made = engine.generate([Request((good,)), Request((bad,)), Request((good, bad, good))])

        for place in (0, 2, 4):
            assert made[place].token_ids == expected
        for place in (1, 3):
            assert isinstance(made[place].error, EngineFaultError)
            assert "not finite" in str(made[place].error)
        # Whoever gets the broken one's memory next finds nothing of it there.
        again = engine.generate([Request((good,))] * 8)
        assert {completion.token_ids for completion in again} == {expected}
        eventually(lambda: idle(engine))
    finally:
        engine.close()


def test_the_fault_of_an_only_answer_is_raised_and_that_of_one_of_many_is_a_piece(
    engine: Engine, tmp_path: Path
) -> None:
    wrong = written(tmp_path, "wide", 2, width=48)
    bad = Answer((VOCABULARY, 2), SHORT, rows=wrong)

    async def work() -> None:
        with pytest.raises(AdapterError, match="use an adapter of this model"):
            await tokens(engine.submit(Request((bad,))))
        pieces = await taken(engine.submit(Request((bad, one((1, 2)).answers[0]))))
        (error,) = [piece for piece in pieces if piece.error]
        assert (error.index, error.finish) == (0, None)
        assert sum(len(piece.token_ids) for piece in pieces if piece.index == 1) == 5

    run(work)


def test_what_is_wrong_with_a_prompt_is_not_blamed_on_its_adapter(
    engine: Engine, tmp_path: Path
) -> None:
    gone, there = written(tmp_path, "gone", 8), written(tmp_path, "there", 9)
    Path(gone.file).unlink()
    short, long = one((VOCABULARY, 2), rows=gone), one((VOCABULARY, *[2] * 600), rows=there)

    made = engine.generate([short, long, one((1, 2))])

    assert [type(completion.error) for completion in made] == [AdapterError, RequestError, NoneType]
    assert "cut " in str(made[1].error)


def test_a_planner_that_is_full_is_worth_another_try() -> None:
    async def work() -> None:
        stream = Stream(one((1, 2)), TOKENIZER, lambda _: None)
        stream.take(0, Made(7, end="full", reason="many wait"))
        with pytest.raises(OverloadedError, match="many wait"):
            await tokens(stream)

    run(work)


def test_a_guide_that_cannot_be_followed_is_its_callers_error_and_harms_nobody(
    engine: Engine, model: GPT, tmp_path: Path
) -> None:
    rows = written(tmp_path, "guided", 2)
    # The engine of these tests has no tokenizer for guides, so that it can follow none.
    bad = Answer((VOCABULARY, 2), SHORT, rows=rows)
    guided = Request((bad, one((1, 2)).answers[0]), guide=Guide("choice", '["a"]'))

    made = engine.generate([guided, one((1, 2))])

    for completion in made[:2]:
        assert isinstance(completion.error, RequestError)
        assert "what the guide wants" in str(completion.error)
    assert list(made[2].token_ids) == alone(model, one((1, 2)).answers[0])


def test_an_adapter_whose_file_is_gone_or_changed_is_refused_and_harms_nobody(
    engine: Engine, tmp_path: Path
) -> None:
    gone, changed = written(tmp_path, "gone", 5), written(tmp_path, "changed", 6)
    Path(gone.file).unlink()
    written(tmp_path, "changed", 7)
    requests = [one((VOCABULARY, 2), rows=rows) for rows in (gone, changed)]

    made = engine.generate([*requests, one((1, 2))])

    assert "there is no adapter" in str(made[0].error)
    assert "a version must not change" in str(made[1].error)
    assert len(made[2].token_ids) == 5


def test_a_deadline_ends_what_has_not_begun_what_waits_and_what_runs(engine: Engine) -> None:
    async def work() -> None:
        with pytest.raises(DeadlinePassedError):
            engine.submit(one((1, 2)), time.monotonic())
        long = Sampling(max_new_tokens=60)
        held = [engine.submit(one((1, place), long)) for place in range(4)]
        late = [
            engine.submit(one((1, 2), long), time.monotonic() + 0.05 * place) for place in (1, 2)
        ]
        began = time.monotonic()
        for stream in late:
            with pytest.raises(DeadlinePassedError):
                await tokens(stream)
        assert time.monotonic() - began < 10
        for stream in held:
            stream.close()

    run(work)


def test_a_full_queue_refuses_at_once_and_what_was_accepted_is_answered(engine: Engine) -> None:
    async def work() -> None:
        streams = [engine.submit(one((1, place), LONG)) for place in range(12)]
        began = time.thread_time()
        with pytest.raises(OverloadedError, match="queue_requests_max"):
            engine.submit(one((1, 2)))
        assert time.thread_time() - began < 0.05
        with pytest.raises(RequestError, match="13 answers at once"):
            engine.submit(Request(one((1, 2)).answers * 13))
        assert {len(made) for made in await asyncio.gather(*map(tokens, streams))} == {50}

    run(work)


def test_a_thousand_cancels_at_once_leave_an_idle_engine(model: GPT) -> None:
    engine = started(model, replace(CONFIG, queue_requests_max=1000))

    async def work() -> None:
        streams = [engine.submit(one((1, place % 90), LONG)) for place in range(1000)]
        await anext(streams[0])
        for stream in streams:
            stream.close()
        assert await tokens(streams[0]) == []

    try:
        run(work)
        eventually(lambda: idle(engine))
        assert len(engine.generate([one((1, 2))])[0].token_ids) == 5
    finally:
        engine.close()


def test_a_stop_string_ends_the_text_before_it_and_the_sequence_behind_it(
    engine: Engine, model: GPT
) -> None:
    ids = alone(model, one((1, 2), VARIED).answers[0])
    stop = f"{ids[3]} {ids[4]}"  # Across two tokens, and a space of the second is before it.
    found = f" {' '.join(map(str, ids))}".index(stop)

    async def work() -> None:
        stream = engine.submit(one((1, 2), VARIED, stops=("no such thing", stop)))
        # Nobody reads, and yet it ends.
        while engine.accepted:
            await asyncio.sleep(0.01)
        (piece,) = await taken(stream)
        assert piece.finish == "stop"
        assert list(piece.token_ids) == ids[:5]
        assert piece.text == f" {' '.join(map(str, ids))}"[:found]

    run(work)


def test_no_stop_string_ends_an_answer_before_its_least_length(engine: Engine, model: GPT) -> None:
    ids = alone(model, one((1, 2), VARIED).answers[0])
    stop = str(ids[1])
    patient = replace(VARIED, min_new_tokens=4)
    later = next(
        (place for place, token in enumerate(ids) if place >= 4 and stop in str(token)), 49
    )

    (made,) = engine.generate([one((1, 2), patient, stops=(stop,))])

    assert list(made.token_ids) == ids[: later + 1]
    assert stop in made.text


def test_scores_are_the_models_and_a_prompt_can_be_scored_alone(engine: Engine, model: GPT) -> None:
    prompt = (1, 2, 3, 50, 60, 70, 80)
    asked = Sampling(max_new_tokens=3, logprobs=2, prompt_logprobs=2)

    made, scored = engine.generate(
        [one(prompt, asked), one(prompt, replace(asked, max_new_tokens=0))]
    )

    with torch.inference_mode():
        whole = torch.tensor([[*prompt, *made.token_ids]])
        logprobs = model.logits(whole)[0].double().log_softmax(-1)
    assert (scored.finish, scored.token_ids) == ("scored", ())
    for scores in (made.prompt_scores, scored.prompt_scores):
        assert len(scores) == len(prompt) and scores[0] is None
    for place in range(1, len(prompt) + 3):
        token = int(whole[0, place])
        row = logprobs[place - 1]
        score = (*made.prompt_scores, *made.scores)[place]
        assert score is not None
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert score.rank == int((row > row[token]).sum()) + 1
        assert [token for token, _ in score.tops] == row.topk(2).indices.tolist()


def test_a_list_may_be_longer_than_the_queue_and_the_caller_may_have_a_loop(
    engine: Engine, model: GPT
) -> None:
    requests = [one((1, place), SHORT) for place in range(40)]

    async def work() -> None:
        made = engine.generate(requests)
        assert [len(completion.token_ids) for completion in made] == [5] * 40

    run(work)
    late = engine.generate(requests[:3], deadline=time.monotonic() - 1)
    assert all(isinstance(completion.error, DeadlinePassedError) for completion in late)


def test_tokens_of_whole_answers_wait_for_each_other_and_are_all_given(
    engine: Engine, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    put = engine_module._put

    def counted(news: Sequence[News], gather_s: float) -> None:
        woken.append(len(news))
        put(news, gather_s)

    monkeypatch.setattr(engine_module, "_put", counted)
    requests = [one((1, place), VARIED) for place in range(3)]
    started_s = time.monotonic()
    made = engine.generate(requests)
    portions = (time.monotonic() - started_s) / engine_module.WHOLE_S
    assert [list(completion.token_ids) for completion in made] == [
        alone(model, request.answers[0]) for request in requests
    ]
    # First tokens and ends are told at once, each step's together.
    assert len(woken) <= 2 * len(requests) + portions + 1


def test_an_answer_whose_time_may_be_over_is_told_of_each_token() -> None:
    """What came before the end is given, to the last token."""
    timed = Request((Answer((1, 2), VARIED),), time_limit_s=60.0)
    for request, deadline in ((one((1, 2), VARIED), time.monotonic() + 60), (timed, None)):
        job = Job(request, deadline, True, asyncio.new_event_loop())
        assert not waits((job, 0, Made(1, tokens=[5])))
        job.loop.close()
    plain = Job(one((1, 2), VARIED), None, True, asyncio.new_event_loop())
    assert waits((plain, 0, Made(1, tokens=[5])))
    assert not waits((plain, 0, Made(1, tokens=[5], end="length")))
    plain.loop.close()


def test_what_runs_when_the_engine_ends_is_told_so(model: GPT) -> None:
    engine = started(model)

    async def work() -> None:
        streams = [engine.submit(one((1, 2), LONG)) for _ in range(8)]
        await anext(streams[0])
        await asyncio.to_thread(engine.close)
        for stream in streams:
            with pytest.raises(UnavailableError):
                await tokens(stream)
        with pytest.raises(UnavailableError):
            engine.submit(one((1, 2)))

    run(work)
    assert not engine.up
