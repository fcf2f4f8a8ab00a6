"""Beam search in the engine: equal to transformers, one step per token, also under faults.

The model is real and runs in a thread behind the transport.
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
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.admission.admission import Admission
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.ranks.in_process import InProcessTransport
from serving.request import (
    AnswerSpec,
    Ask,
    BeamSearchParams,
    Completion,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
)
from tests.support.beam_cases import (
    Best,
    Case,
    assert_same_beams,
    draw_cases,
    flat_model,
    transformers_beams,
)
from tests.support.engine_requests import (
    CONFIG,
    TOKENIZER,
    VOCABULARY,
    generate_alone,
    is_idle,
    read_pieces,
    read_tokens,
    run_async,
    single_request,
    write_adapter,
)
from tests.support.lossy_engine import LossyTransport
from tests.support.many_tasks import TaskAdapters
from tests.support.models import CLASSIC
from tests.support.recording_receiver import gate_updates
from tests.support.servers import CONFIG as SERVED
from tests.support.servers import eventually


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    engine = Engine(
        InProcessTransport(flat_model(CLASSIC), CONFIG),
        TOKENIZER,
        CONFIG.scheduler_config,
        CONFIG.parallel_config,
        CONFIG.observability_config,
    )
    engine.start()
    engine.wait()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    eventually(lambda: is_idle(shared_engine))


def beams_of(completions: Sequence[Completion]) -> Best:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [(completion.token_ids, completion.beam_score or 0.0) for completion in completions]


def test_engine_beam_search_matches_transformers_with_one_step_per_token(engine: Engine) -> None:
    model = flat_model(CLASSIC)
    # Four sequences run at once, so a round is one step.
    for case in [case for case in draw_cases(model, 8, 7) if case.rule.width <= 4]:
        before = engine.stats
        completions = engine.generate([case.request])
        eventually(lambda: is_idle(engine))
        # Each beam computes only its last token; the rest of its prompt is cached.
        after = engine.stats
        beams = after.made_tokens - before.made_tokens
        computed = after.prompt_tokens - before.prompt_tokens
        computed -= after.cached_tokens - before.cached_tokens
        assert computed <= len(case.prompt) + beams - 1
        # An idle engine runs an empty step each second: the limit allows ten of these.
        assert after.steps - before.steps <= case.new_tokens_max + 10
        assert_same_beams(beams_of(completions), transformers_beams(model, case))
        for completion in completions:
            assert (completion.finish == "stop") == (
                completion.token_ids[-1] in case.stop_token_ids
            )
            assert len(completion.scores) == len(completion.token_ids)
            assert all(len(score.tops) == 3 for score in completion.scores)
            sum_logprobs = sum(score.logprob for score in completion.scores)
            expected_score = sum_logprobs / len(completion.token_ids) ** case.rule.length_penalty
            assert completion.beam_score == pytest.approx(expected_score)


def test_concurrent_beam_searches_do_not_affect_each_other(engine: Engine) -> None:
    model = flat_model(CLASSIC)
    cases = list(draw_cases(model, 8, 8))

    completions = engine.generate([*(case.request for case in cases), single_request((1, 2))])

    assert len(completions.pop().token_ids) == 5
    for case in cases:
        answers, completions = completions[: case.rule.answers], completions[case.rule.answers :]
        assert_same_beams(beams_of(answers), transformers_beams(model, case))


def test_later_beam_rounds_do_not_queue_again(engine: Engine) -> None:
    case = Case((5, 6, 7), BeamSearchParams(4), 30)
    model = flat_model(CLASSIC)
    requests = [
        single_request((number, 2), SamplingParams(20, temperature=2.0, seed=number))
        for number in range(8)
    ]
    expected_answers = [generate_alone(model, request.answers[0]) for request in requests]
    search_ended = False

    async def repeat(request: Request, expected: list[int]) -> None:
        while not search_ended:
            assert await read_tokens(engine.submit(request)) == expected

    async def work() -> None:
        nonlocal search_ended
        # Enough sequences to fill all four slots twice.
        pairs = zip(requests, expected_answers, strict=True)
        repeating = [asyncio.create_task(repeat(*pair)) for pair in pairs]
        while engine.stats.running < 4:
            await asyncio.sleep(0)
        steps = engine.stats.steps
        (piece,) = await read_pieces(engine.submit(case.request))
        # The first round may wait for all the other requests; a later one takes two or three steps.
        assert engine.stats.steps - steps < 100 + 8 * case.new_tokens_max
        search_ended = True
        await asyncio.gather(*repeating)
        assert_same_beams(
            [(piece.token_ids, piece.beam_score or 0.0)], transformers_beams(model, case)
        )

    run_async(work)


def test_beam_searches_of_adapters_and_tenants_are_separate(engine: Engine, tmp_path: Path) -> None:
    model = flat_model(CLASSIC)
    rule = BeamSearchParams(3, 2)
    adapters = [write_adapter(tmp_path, "two", 2), write_adapter(tmp_path, "three", 3)]
    text = (7, 8, 9, 10, 11)
    sampling = SamplingParams(max_new_tokens=6)
    prompts = [(*range(VOCABULARY, VOCABULARY + adapter.row_count), *text) for adapter in adapters]
    first, second = (
        AnswerSpec(prompt, sampling, adapter_ref=adapter)
        for prompt, adapter in zip(prompts, adapters, strict=True)
    )
    request = Request((first, first, second, second), beams=rule, tenant="one")

    completions = engine.generate([request])
    other_tenant = engine.generate([replace(request, tenant="two")])
    repeated = engine.generate([request])

    for index, adapter in enumerate(adapters):
        table = open_adapter(Path(adapter.file)).table
        case = Case(prompts[index], rule, 6)
        for answers in (completions, other_tenant, repeated):
            assert_same_beams(
                beams_of(answers[index * 2 : index * 2 + 2]), transformers_beams(model, case, table)
            )
    assert {answer.cached_tokens for answer in (*completions, *other_tenant)} == {0}
    assert [answer.cached_tokens for answer in repeated] == [6, 6, 7, 7]


def test_beam_pieces_come_at_the_end_and_closing_cancels_the_search(
    engine: Engine,
) -> None:
    request = Case((1, 2), BeamSearchParams(4, 2), 50).request

    async def work() -> None:
        pieces = await read_pieces(engine.submit(request))
        assert [(piece.index, len(piece.token_ids)) for piece in pieces] == [(0, 50), (1, 50)]
        assert all(piece.finish and piece.beam_score is not None for piece in pieces)
        with gate_updates(engine, 3) as gate:
            stream = engine.submit(request)
            await asyncio.to_thread(gate.until_blocked)
            steps = engine.stats.steps
            stream.close()
            assert await read_tokens(stream) == []
        while not is_idle(engine):
            await asyncio.sleep(0.001)
        assert engine.stats.steps < steps + 37

    run_async(work)


def test_a_deadline_ends_a_beam_search(engine: Engine) -> None:
    async def work() -> None:
        request = Case((1, 2), BeamSearchParams(4, 2), 60).request
        running = engine.submit(single_request((1, 2), SamplingParams(50)))
        search = asyncio.create_task(expect_deadline(request))
        await asyncio.to_thread(gate.until_blocked)
        await asyncio.gather(search, expect_deadline(request))
        running.close()

    async def expect_deadline(request: Request) -> None:
        with pytest.raises(DeadlinePassedError):
            await read_tokens(engine.submit(request, time.monotonic() + 0.5))

    with gate_updates(engine, 3) as gate:
        run_async(work)


def test_a_beam_search_reserves_capacity_for_its_full_width(engine: Engine) -> None:
    async def work() -> None:
        answers = Case((1, 2), BeamSearchParams(5), 40).request.answers
        stream = engine.submit(Request(answers * 2, beams=BeamSearchParams(5)))
        assert engine.unfinished_sequences == 10
        with pytest.raises(OverloadedError):
            engine.submit(Request(answers, beams=BeamSearchParams(5)))
        with pytest.raises(RequestError, match="15 answers at once"):
            engine.submit(Request(answers * 3, beams=BeamSearchParams(5)))
        accepted = [engine.submit(single_request((1, 2))) for _ in range(2)]
        with pytest.raises(OverloadedError):
            engine.submit(single_request((1, 2)))
        reads = [asyncio.create_task(read_tokens(single)) for single in accepted]
        while not all(task.done() for task in reads):
            gate.allow(1)  # One step at a time, so that the search does not end first.
            await asyncio.sleep(0.001)
        assert [len(task.result()) for task in reads] == [5, 5]
        assert engine.unfinished_sequences == 10
        gate.allow(None)
        assert len(await read_tokens(stream)) == 80
        assert engine.unfinished_sequences == 0

    with gate_updates(engine, 0) as gate:
        run_async(work)


def test_a_failed_beam_search_fails_only_its_own_answers(engine: Engine, tmp_path: Path) -> None:
    deleted = write_adapter(tmp_path, "deleted", 4)
    Path(deleted.file).unlink()
    case = Case((1, 2), BeamSearchParams(3, 2), 4)
    failing = replace(case.request.answers[0], prompt=(VOCABULARY, 2), adapter_ref=deleted)

    completions = engine.generate(
        [replace(case.request, answers=(failing, failing, *case.request.answers))]
    )

    assert all(isinstance(completion.error, AdapterError) for completion in completions[:2])
    assert_same_beams(beams_of(completions[2:]), transformers_beams(flat_model(CLASSIC), case))


def test_a_beam_search_survives_one_rank_loss_and_fails_at_the_second() -> None:
    case = Case((3, 1, 4, 1, 5), BeamSearchParams(3, 2), 40)
    model = flat_model(CLASSIC)
    transport = LossyTransport(model)
    engine = Engine(
        transport,
        TOKENIZER,
        CONFIG.scheduler_config,
        CONFIG.parallel_config,
        CONFIG.observability_config,
    )

    async def lose_ranks(updates: int | None) -> None:
        """Lose the ranks at the blocked step, then let `updates` of the next ranks pass."""
        await asyncio.to_thread(transport.gate.until_blocked)
        await asyncio.to_thread(transport.lose)
        assert engine.unfinished_sequences == case.rule.width
        transport.gate.allow(updates)
        await asyncio.to_thread(transport.start, engine)

    async def work() -> None:
        transport.gate.allow(5)
        stream = engine.submit(case.request)
        await lose_ranks(None)
        pieces = await read_pieces(stream)
        beams = [(piece.token_ids, piece.beam_score or 0.0) for piece in pieces]
        assert_same_beams(beams, transformers_beams(model, case))
        transport.gate.allow(5)
        suspect = engine.submit(case.request)
        await lose_ranks(5)
        await asyncio.to_thread(transport.gate.until_blocked)
        await asyncio.to_thread(transport.lose)
        with pytest.raises(EngineFaultError, match="lost twice"):
            await read_tokens(suspect)
        assert engine.unfinished_sequences == 0

    engine.start()
    engine.wait()
    try:
        run_async(work)
    finally:
        engine.close()


def test_the_service_serves_beam_search_and_validates_it(tmp_path: Path) -> None:
    task_adapters = TaskAdapters(tmp_path)
    stopped = build_adapter(Card("stopped", stop=("dog",)), torch.ones(2, SERVED.hidden_size))
    save_adapter(stopped, task_adapters.adapters / "stopped.safetensors")
    config = ServerConfig(
        str(task_adapters.checkpoint), adapters=str(task_adapters.adapters), dtype="float64"
    )
    with serving.open_engine(config) as service:
        ask = Ask("the quick brown", beam_width=3, answers=2, max_new_tokens=6)
        completions = service.generate([ask])
        answer = service.admission.admit(ask).answers[0]
        case = Case(
            answer.prompt, BeamSearchParams(3, 2), 6, stop_token_ids=answer.sampling.stop_token_ids
        )
        model = gpt.load(task_adapters.checkpoint, dtype="float64")
        assert_same_beams(beams_of(completions), transformers_beams(model, case))
        for completion in completions:
            text_ids = [token for token in completion.token_ids if token not in case.stop_token_ids]
            assert completion.text == service.tokenizer.decode(text_ids, continues_text=True)
            assert completion.scores == ()
        both = replace(ask, prompt={"document": "one"}, adapters=("task0", "before"))
        separate = [replace(both, adapters=(name,)) for name in both.adapters]
        assert_same_beams(beams_of(service.generate([both])), beams_of(service.generate(separate)))
        with pytest.raises(RequestError, match="stop strings, and beam search ends only at"):
            service.generate([replace(ask, adapters=("stopped",))])
        small_vocabulary = Admission(
            NullTokenizer(30), service.adapters, 30, 64, service.config.limits_config
        )
        with pytest.raises(RequestError, match="vocabulary of 30, it must be at most 14"):
            small_vocabulary.admit(Ask((1,), beam_width=15, stop_token_ids=tuple(range(16))))
