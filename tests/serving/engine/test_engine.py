"""Engine: every accepted request ends, and a fault affects only its own request.

The model is real and runs in a thread behind the transport; the reference is the generation loop,
one request at a time.
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
from gpt.sampling_params import SamplingParams
from serving.engine import engine as engine_module
from serving.engine.engine import Engine
from serving.engine.job import Job, StreamEvent, is_deferrable
from serving.engine.stream import Stream
from serving.messages import Guide, SequenceOutput
from serving.request import (
    AnswerSpec,
    DeadlinePassedError,
    EngineFaultError,
    OverloadedError,
    Request,
    UnavailableError,
    answer_seed,
)
from tests.support.engine_requests import (
    CONFIG,
    DRAWN,
    LONG,
    SHORT,
    TOKENIZER,
    VOCABULARY,
    generate_alone,
    is_idle,
    read_pieces,
    read_tokens,
    run_async,
    single_request,
    start_engine,
    write_adapter,
)
from tests.support.models import CLASSIC, build
from tests.support.recording_receiver import gate_updates
from tests.support.servers import eventually

LONG_DRAWN = replace(DRAWN, max_new_tokens=50)


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


@pytest.fixture(scope="module")
def shared_engine(model: GPT) -> Iterator[Engine]:
    engine = start_engine(model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine is idle before and after each test: no test leaks a block."""
    yield shared_engine
    eventually(lambda: is_idle(shared_engine))


def test_adapters_share_a_step_and_each_request_gets_its_own_rows(
    engine: Engine, model: GPT, tmp_path: Path
) -> None:
    two, three = write_adapter(tmp_path, "two", 2), write_adapter(tmp_path, "three", 3)
    requests = [
        single_request((VOCABULARY, VOCABULARY + 1, 7, 8), rows=two),
        single_request((9, VOCABULARY + 2, 7, VOCABULARY), rows=three),
        single_request((7, 8), DRAWN),
        single_request((7, 8, VOCABULARY), DRAWN, rows=two),
    ]

    completions = engine.generate(requests)

    for completion, request in zip(completions, requests, strict=True):
        assert completion.error is None
        assert list(completion.token_ids) == generate_alone(model, request.answers[0])


def test_each_completed_step_is_timed_once(engine: Engine) -> None:
    """A request of a prefill step and four decode steps, twice, with an idle engine between."""
    seconds: list[float] = []
    engine.on_step = seconds.append
    for expected_steps in (5, 10):
        engine.generate([single_request((7, 8), SamplingParams(max_new_tokens=5))])
        eventually(lambda expected_steps=expected_steps: len(seconds) == expected_steps)  # type: ignore[misc]
        eventually(lambda: is_idle(engine))
    engine.on_step = lambda _: None
    assert len(seconds) == 10
    assert all(step_s > 0 for step_s in seconds)


def test_each_answer_of_a_request_equals_a_single_answer_with_its_seed(
    engine: Engine, model: GPT
) -> None:
    seeds = [answer_seed(DRAWN.seed, index) for index in range(4)]
    assert seeds[0] == DRAWN.seed and len(set(seeds)) == 4 and max(seeds) < 2**53
    answers = tuple(AnswerSpec((1, 2, 3, 4, 5, 6), replace(DRAWN, seed=seed)) for seed in seeds)

    completions = engine.generate([Request(answers)])

    assert [completion.index for completion in completions] == [0, 1, 2, 3]
    assert [completion.seed for completion in completions] == seeds
    for completion, answer in zip(completions, answers, strict=True):
        assert list(completion.token_ids) == generate_alone(model, answer)
    assert len({completion.token_ids for completion in completions}) == 4


def test_nan_ends_only_the_affected_answer(tmp_path: Path) -> None:
    float32_model = build(CLASSIC, dtype=torch.float32)
    overflowing = write_adapter(tmp_path, "overflowing", 2, fill=3e38)
    engine = start_engine(float32_model)
    try:
        finite = single_request((1, 2)).answers[0]
        failing = AnswerSpec((VOCABULARY, VOCABULARY + 1, 2), SHORT, adapter_ref=overflowing)
        expected = engine.generate([Request((finite,))])[0].token_ids

        completions = engine.generate(
            [Request((finite,)), Request((failing,)), Request((finite, failing, finite))]
        )

        for index in (0, 2, 4):
            assert completions[index].token_ids == expected
        for index in (1, 3):
            assert isinstance(completions[index].error, EngineFaultError)
            assert "not finite" in str(completions[index].error)
        # The freed blocks are reused; the sequences that reuse them read no NaN.
        repeated = engine.generate([Request((finite,))] * 8)
        assert {completion.token_ids for completion in repeated} == {expected}
        eventually(lambda: is_idle(engine))
    finally:
        engine.close()


def test_a_fault_is_raised_for_a_single_answer_and_is_a_piece_among_several(
    engine: Engine, tmp_path: Path
) -> None:
    wide = write_adapter(tmp_path, "wide", 2, width=48)
    failing = AnswerSpec((VOCABULARY, 2), SHORT, adapter_ref=wide)

    async def work() -> None:
        with pytest.raises(AdapterError, match="use an adapter of this model"):
            await read_tokens(engine.submit(Request((failing,))))
        pieces = await read_pieces(
            engine.submit(Request((failing, single_request((1, 2)).answers[0])))
        )
        (error,) = [piece for piece in pieces if piece.error]
        assert (error.index, error.finish) == (0, None)
        assert sum(len(piece.token_ids) for piece in pieces if piece.index == 1) == 5

    run_async(work)


def test_an_invalid_prompt_is_not_reported_as_an_adapter_error(
    engine: Engine, tmp_path: Path
) -> None:
    deleted = write_adapter(tmp_path, "deleted", 8)
    present = write_adapter(tmp_path, "present", 9)
    Path(deleted.file).unlink()
    short = single_request((VOCABULARY, 2), rows=deleted)
    long = single_request((VOCABULARY, *[2] * 600), rows=present)

    completions = engine.generate([short, long, single_request((1, 2))])

    assert [type(completion.error) for completion in completions] == [
        AdapterError,
        RequestError,
        NoneType,
    ]
    assert "shorten the prompt" in str(completions[1].error)


def test_a_full_engine_loop_is_reported_as_overload() -> None:
    async def work() -> None:
        stream = Stream(single_request((1, 2)), TOKENIZER, lambda _: None)
        stream.push_output(0, SequenceOutput(7, end="full", reason="many wait"))
        with pytest.raises(OverloadedError, match="many wait"):
            await read_tokens(stream)

    run_async(work)


def test_an_unsatisfiable_guide_is_a_request_error_of_its_own_request(
    engine: Engine, model: GPT, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, "guided", 2)
    # The engine of these tests has no tokenizer for guides, so it refuses every guide.
    adapter_answer = AnswerSpec((VOCABULARY, 2), SHORT, adapter_ref=adapter)
    guided = Request(
        (adapter_answer, single_request((1, 2)).answers[0]), guide=Guide("choice", '["a"]')
    )

    completions = engine.generate([guided, single_request((1, 2))])

    for completion in completions[:2]:
        assert isinstance(completion.error, RequestError)
        assert "the guide allows none" in str(completion.error)
    assert list(completions[2].token_ids) == generate_alone(
        model, single_request((1, 2)).answers[0]
    )


def test_a_missing_or_changed_adapter_file_fails_only_its_request(
    engine: Engine, tmp_path: Path
) -> None:
    deleted = write_adapter(tmp_path, "deleted", 5)
    changed = write_adapter(tmp_path, "changed", 6)
    Path(deleted.file).unlink()
    write_adapter(tmp_path, "changed", 7)
    requests = [single_request((VOCABULARY, 2), rows=rows) for rows in (deleted, changed)]

    completions = engine.generate([*requests, single_request((1, 2))])

    assert "does not exist" in str(completions[0].error)
    assert "versions are immutable" in str(completions[1].error)
    assert len(completions[2].token_ids) == 5


def test_a_deadline_ends_new_waiting_and_running_requests(engine: Engine) -> None:
    async def work() -> None:
        with pytest.raises(DeadlinePassedError):
            engine.submit(single_request((1, 2)), time.monotonic())
        running = [engine.submit(single_request((1, token), LONG)) for token in range(3)]
        started = asyncio.create_task(expect_deadline())
        await asyncio.to_thread(gate.until_blocked)
        running.append(engine.submit(single_request((1, 3), LONG)))
        await asyncio.gather(started, expect_deadline())
        for stream in running:
            stream.close()

    async def expect_deadline() -> None:
        with pytest.raises(DeadlinePassedError):
            await read_tokens(engine.submit(single_request((1, 2), LONG), time.monotonic() + 0.5))

    with gate_updates(engine, 2) as gate:
        run_async(work)


def test_a_full_queue_refuses_at_once_and_accepted_requests_finish(engine: Engine) -> None:
    async def work() -> None:
        streams = [engine.submit(single_request((1, token), LONG)) for token in range(12)]
        with pytest.raises(OverloadedError, match="queue_requests_max"):
            engine.submit(single_request((1, 2)))
        with pytest.raises(RequestError, match="13 answers at once"):
            engine.submit(Request(single_request((1, 2)).answers * 13))
        gate.allow(None)
        assert {len(tokens) for tokens in await asyncio.gather(*map(read_tokens, streams))} == {50}

    with gate_updates(engine, 0) as gate:
        run_async(work)


def test_a_thousand_cancels_at_once_leave_an_idle_engine(model: GPT) -> None:
    engine = start_engine(model, CONFIG.with_fields(queue_requests_max=1000))

    async def work() -> None:
        streams = [engine.submit(single_request((1, number % 90), LONG)) for number in range(1000)]
        await anext(streams[0])
        for stream in streams:
            stream.close()
        assert await read_tokens(streams[0]) == []

    try:
        run_async(work)
        eventually(lambda: is_idle(engine))
        assert len(engine.generate([single_request((1, 2))])[0].token_ids) == 5
    finally:
        engine.close()


def test_a_stop_string_cuts_the_text_and_cancels_the_sequence(engine: Engine, model: GPT) -> None:
    ids = generate_alone(model, single_request((1, 2), LONG_DRAWN).answers[0])
    stop = f"{ids[3]} {ids[4]}"  # Spans two tokens.
    stop_start = f" {' '.join(map(str, ids))}".index(stop)

    async def work() -> None:
        stream = engine.submit(single_request((1, 2), LONG_DRAWN, stops=("no such thing", stop)))
        # The sequence ends although the stream is not read.
        while engine.unfinished_sequences:
            await asyncio.sleep(0.01)
        (piece,) = await read_pieces(stream)
        assert piece.finish == "stop"
        assert list(piece.token_ids) == ids[:5]
        assert piece.text == f" {' '.join(map(str, ids))}"[:stop_start]

    run_async(work)


def test_stop_strings_do_not_end_an_answer_before_min_new_tokens(
    engine: Engine, model: GPT
) -> None:
    ids = generate_alone(model, single_request((1, 2), LONG_DRAWN).answers[0])
    stop = str(ids[1])
    sampling = replace(LONG_DRAWN, min_new_tokens=4)
    last = next((index for index, token in enumerate(ids) if index >= 4 and stop in str(token)), 49)

    (completion,) = engine.generate([single_request((1, 2), sampling, stops=(stop,))])

    assert list(completion.token_ids) == ids[: last + 1]
    assert stop in completion.text


def test_scores_match_the_model_and_a_prompt_can_be_scored_alone(
    engine: Engine, model: GPT
) -> None:
    prompt = (1, 2, 3, 50, 60, 70, 80)
    sampling = SamplingParams(max_new_tokens=3, logprobs=2, prompt_logprobs=2)

    completion, scored = engine.generate(
        [
            single_request(prompt, sampling),
            single_request(prompt, replace(sampling, max_new_tokens=0)),
        ]
    )

    with torch.inference_mode():
        sequence = torch.tensor([[*prompt, *completion.token_ids]])
        logprobs = model.logits(sequence)[0].double().log_softmax(-1)
    assert (scored.finish, scored.token_ids) == ("scored", ())
    for scores in (completion.prompt_scores, scored.prompt_scores):
        assert len(scores) == len(prompt) and scores[0] is None
    for position in range(1, len(prompt) + 3):
        token = int(sequence[0, position])
        log_probabilities = logprobs[position - 1]
        score = (*completion.prompt_scores, *completion.scores)[position]
        assert score is not None
        assert score.logprob == pytest.approx(float(log_probabilities[token]), abs=1e-5)
        assert score.rank == int((log_probabilities > log_probabilities[token]).sum()) + 1
        assert [token for token, _ in score.tops] == log_probabilities.topk(2).indices.tolist()


def test_generate_accepts_more_requests_than_the_queue_and_works_inside_an_event_loop(
    engine: Engine, model: GPT
) -> None:
    requests = [single_request((1, token), SHORT) for token in range(40)]

    async def work() -> None:
        completions = engine.generate(requests)
        assert [len(completion.token_ids) for completion in completions] == [5] * 40

    run_async(work)
    expired = engine.generate(requests[:3], deadline=time.monotonic() - 1)
    assert all(isinstance(completion.error, DeadlinePassedError) for completion in expired)


def test_final_only_tokens_are_gathered_and_all_delivered(
    engine: Engine, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliveries: list[int] = []
    push_events = engine_module._push_events

    def count_events(events: Sequence[StreamEvent], gather_s: float) -> None:
        deliveries.append(len(events))
        push_events(events, gather_s)

    monkeypatch.setattr(engine_module, "_push_events", count_events)
    requests = [single_request((1, token), LONG_DRAWN) for token in range(3)]
    started_s = time.monotonic()
    completions = engine.generate(requests)
    flush_intervals = (time.monotonic() - started_s) / engine_module.FINAL_ONLY_FLUSH_S
    assert [list(completion.token_ids) for completion in completions] == [
        generate_alone(model, request.answers[0]) for request in requests
    ]
    # First tokens and ends are delivered at once, one delivery per step.
    assert len(deliveries) <= 2 * len(requests) + flush_intervals + 1


def test_answers_with_a_deadline_or_time_limit_are_not_deferred() -> None:
    """Their tokens are not deferred until the end: those before the deadline are delivered."""
    timed = Request((AnswerSpec((1, 2), LONG_DRAWN),), time_limit_s=60.0)
    for request, deadline in (
        (single_request((1, 2), LONG_DRAWN), time.monotonic() + 60),
        (timed, None),
    ):
        job = Job(request, deadline, True, asyncio.new_event_loop())
        assert not is_deferrable((job, 0, SequenceOutput(1, tokens=[5])))
        job.loop.close()
    untimed_job = Job(single_request((1, 2), LONG_DRAWN), None, True, asyncio.new_event_loop())
    assert is_deferrable((untimed_job, 0, SequenceOutput(1, tokens=[5])))
    assert not is_deferrable((untimed_job, 0, SequenceOutput(1, tokens=[5], end="length")))
    untimed_job.loop.close()


def test_closing_the_engine_ends_running_requests_with_an_error(model: GPT) -> None:
    engine = start_engine(model)

    async def work() -> None:
        streams = [engine.submit(single_request((1, 2), LONG)) for _ in range(8)]
        await anext(streams[0])
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while engine.up:
            await asyncio.sleep(0.001)
        gate.allow(None)  # The engine loop ends after its step.
        await closing
        for stream in streams:
            with pytest.raises(UnavailableError):
                await read_tokens(stream)
        with pytest.raises(UnavailableError):
            engine.submit(single_request((1, 2)))

    with gate_updates(engine, 2) as gate:
        run_async(work)
    assert not engine.up
