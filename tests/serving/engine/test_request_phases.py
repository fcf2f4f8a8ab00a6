"""Request phases: which time counts as queue, prefill and decode.

First with a scheduler on a fake clock, then with engines whose ranks are lost and a real model.
`tests/support/fake_ranks.py` asserts in each schedule that the phases of a sequence add up.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.admission.auth import Authenticator
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import AnswerTiming, Stream, collect_completions
from serving.frontend.call import CallFailure, Frontend
from serving.frontend.call_origin import REQUEST_ID_CHARACTERS_MAX, CallOrigin
from serving.messages import Step, Update, decode_from_engine_loop, encode
from serving.request import BeamSearchParams, Request
from serving.service.metrics import Metrics
from tests.support.engine_requests import (
    CONFIG,
    LONG,
    TOKENIZER,
    read_pieces,
    run_async,
    single_request,
    start_engine,
)
from tests.support.fake_ranks import make_adapter_ref, text_ids, virtual_ids
from tests.support.lossy_engine import LossyTransport, engine_with_lossy_transport
from tests.support.models import CLASSIC, build
from tests.support.scheduler_harness import SchedulerHarness

LOST_S = 0.2


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


# ----------------------------------------------------------------------------------- the scheduler


def test_waiting_for_a_slot_counts_as_queue_time() -> None:
    harness = SchedulerHarness(running_requests_max=1)  # Steps take 10 ms.
    first, second = harness.submit(text_ids(40), 5), harness.submit(text_ids(8, 1), 2)
    harness.finish()
    assert harness.phases[first].queue_s == 0.0
    # The third step is committed at 20 ms.
    assert harness.phases[first].prefill_s == pytest.approx(0.02)
    assert harness.phases[second].queue_s == pytest.approx(0.07)
    assert harness.phases[second].prefill_s == 0.0  # Its only step has no duration on this clock.


def test_waiting_for_an_equal_prompt_or_adapter_rows_counts_as_queue_time() -> None:
    harness = SchedulerHarness(adapter_rows_max=6)
    harness.submit(text_ids(64), 2)
    repeated = harness.submit(text_ids(64), 2)
    harness.finish()
    assert harness.phases[repeated].queue_s >= 0.03 and harness.phases[repeated].prefill_s < 0.03
    deferred = harness.next_submission(
        [*virtual_ids(6), 7], 2, adapter_ref=make_adapter_ref("task", 6)
    )
    harness.ranks.register(deferred)
    harness.scheduler.add_sequence(deferred, harness.now, adapter_wait_s=0.5)
    while (
        outputs := harness.scheduler.commit(harness.ranks.run(plan(harness)), harness.now)
    ) == []:
        pass
    assert outputs[0].phases is not None
    assert outputs[0].phases.queue_s == pytest.approx(0.5) and outputs[0].phases.prefill_s == 0


def plan(harness: SchedulerHarness) -> Step:
    step = harness.scheduler.plan(harness.now)
    assert step is not None
    return step


def test_preemption_before_the_first_token_counts_as_queue_time_and_later_as_decode() -> None:
    harness = SchedulerHarness(running_requests_max=1, blocks=200)
    slow = harness.submit(text_ids(60), 4, service="throughput")
    harness.step()  # A chunk of 16 tokens.
    quick = harness.submit(text_ids(8, 2), 3, service="latency")
    harness.finish()
    assert (
        harness.scheduler.stats.preemptions == 1
        and harness.first_token_steps[quick] < harness.first_token_steps[slow]
    )
    assert harness.phases[slow].queue_s >= 0.03  # Waited while the other sequence had the slot.
    assert harness.phases[slow].prefill_s > 0

    late = harness.submit(text_ids(8, 3), 9, service="throughput")
    harness.step()
    phases = harness.phases[late]
    harness.submit(text_ids(8, 4), 3, service="latency")
    harness.finish()
    assert harness.scheduler.stats.preemptions == 2 and harness.phases[late] is phases


def test_a_scored_prompt_reports_its_phases_at_its_end() -> None:
    harness = SchedulerHarness()
    scored = harness.submit(text_ids(40), 0, prompt_logprobs=0)
    harness.finish()
    assert (
        harness.last_outputs[scored].end == "scored"
        and harness.last_outputs[scored].phases is not None
    )


# -------------------------------------------------------------------------------------- the engine


class RecordingTransport(LossyTransport):
    """A transport that records the encoded messages."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.updates: list[Update] = []

    def update(self, update: Update) -> None:
        sent = decode_from_engine_loop(encode(update))
        assert isinstance(sent, Update)
        self.updates.append(sent)
        super().update(sent)


def test_only_the_first_output_of_a_sequence_has_phases(model: GPT) -> None:
    transport = RecordingTransport(model)
    engine = Engine(
        transport,
        TOKENIZER,
        CONFIG.scheduler_config,
        CONFIG.parallel_config,
        CONFIG.observability_config,
    )
    engine.start()
    engine.wait()

    async def work() -> None:
        stream = engine.submit(Request(single_request((1, 2), LONG).answers * 2))
        pieces = await read_pieces(stream)
        assert sum(len(piece.token_ids) for piece in pieces) == 100
        for timing in stream.timings:
            assert timing.finish == "length" and timing.decode_s > 0

    try:
        run_async(work)
    finally:
        engine.close()
    outputs = [output for update in transport.updates for output in update.outputs]
    assert len(outputs) == 100
    for sequence_id in {output.sequence_id for output in outputs}:
        has_phases = [
            output.phases is not None for output in outputs if output.sequence_id == sequence_id
        ]
        assert has_phases == [True] + [False] * 49


@dataclass
class RankLossTimes:
    """Times of a request with a rank loss: submitted, ranks lost, ranks restarted."""

    submitted_at: float = 0.0
    lost_at: float = 0.0
    restarted_at: float = 0.0
    timings: list[AnswerTiming] = field(default_factory=list)


def run_with_rank_loss(
    model: GPT, work: Callable[[Engine], Coroutine[None, None, Stream]]
) -> RankLossTimes:
    """Lose the ranks for a while after `work` has submitted its request."""
    transport, engine = engine_with_lossy_transport(model)
    times = RankLossTimes()

    async def submit_and_lose() -> None:
        transport.gate.allow(2)
        times.submitted_at = time.monotonic()
        stream = await work(engine)
        times.lost_at = time.monotonic()
        await asyncio.to_thread(transport.lose)
        await asyncio.sleep(LOST_S)
        times.restarted_at = time.monotonic()
        transport.start(engine)
        (completion,) = await collect_completions(stream)
        assert completion.finish == "length"
        times.timings = stream.timings

    try:
        run_async(submit_and_lose)
    finally:
        engine.close()
    return times


def test_time_on_lost_ranks_before_the_first_token_counts_as_queue_time(model: GPT) -> None:
    async def work(engine: Engine) -> Stream:
        for number in range(CONFIG.scheduler_config.running_requests_max):
            engine.submit(single_request((2, number), LONG), final_only=True)
        return engine.submit(single_request((1, 2)))

    times = run_with_rank_loss(model, work)
    (timing,) = times.timings
    assert timing.phases.queue_s >= LOST_S and timing.first_token_at > times.restarted_at
    assert (
        timing.phases.queue_s + timing.phases.prefill_s
        <= timing.first_token_at - times.submitted_at
    )


def test_a_rank_loss_after_the_first_token_counts_as_decode_time(model: GPT) -> None:
    async def work(engine: Engine) -> Stream:
        stream = engine.submit(single_request((1, 2), LONG), final_only=True)
        await anext(stream)
        return stream

    times = run_with_rank_loss(model, work)
    (timing,) = times.timings
    assert timing.decode_s >= LOST_S and timing.first_token_at <= times.lost_at
    assert (
        timing.phases.queue_s + timing.phases.prefill_s
        <= timing.first_token_at - times.submitted_at
    )


def test_beam_phases_are_the_first_round_and_later_rounds_are_decode(model: GPT) -> None:
    engine = start_engine(model)
    beams = BeamSearchParams(3, 2)
    answers = single_request((1, 2, 3), SamplingParams(max_new_tokens=12)).answers * 2

    async def work() -> None:
        stream = engine.submit(Request(answers, beams=beams))
        await read_pieces(stream)
        first, second = stream.timings
        assert first.phases == second.phases
        assert first.phases.decode_s > 0
        assert first.decode_s >= first.phases.decode_s

    try:
        run_async(work)
    finally:
        engine.close()


# ------------------------------------------------------------------------------------ the frontend


def test_a_request_id_is_bounded_and_printable() -> None:
    assert CallOrigin(headers={"x-request-id": "b", "x-correlation-id": "a-1"}).request_id == "a-1"
    assert CallOrigin(headers={"x-request-id": "a\n\x1b[31mb\u202e é\x7f"}).request_id == "a[31mb"
    assert (
        len(CallOrigin(headers={"x-request-id": "x" * 9999}).request_id)
        == REQUEST_ID_CHARACTERS_MAX
    )
    assert CallOrigin().request_id == CallOrigin().trace_id == ""
    parent = f"00-{'a1' * 16}-{'b2' * 8}-01"
    assert CallOrigin(headers={"traceparent": parent}).trace_id == "a1" * 16
    for wrong in (parent[1:], parent.upper(), f"{parent}x", "00--", f"{parent}\n"):
        assert CallOrigin(headers={"traceparent": wrong}).trace_id == ""


def test_a_failed_call_is_logged_with_its_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = f"00-{'a1' * 16}-{'b2' * 8}-01"
    origin = CallOrigin("x", {"x-request-id": "it's 7", "traceparent": parent})

    async def work() -> None:
        frontend = Frontend(Metrics(), Authenticator())
        with pytest.raises(CallFailure):
            async with (
                frontend.call("test", "Ask", origin=origin) as call,
                call.subcall("Ask/part"),
            ):
                raise ZeroDivisionError("a bug")

    asyncio.run(work())
    lines = [line for line in caplog.messages if "event=call_" in line]
    assert len(lines) >= 2
    for line in lines:
        assert re.search(r'label="it\'s 7" trace=\'(a1){16}\'', line), line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"traces": "collector:4317"}, "it must be http://HOST:PORT"),
        ({"traces": "http://user:secret@collector:4317"}, "it must be http://HOST:PORT"),
        ({"traces": "http://collector"}, "it must be http://HOST:PORT"),
        ({"traces_share": 1.5}, "it must be from 0 to 1"),
    ],
)
def test_an_invalid_trace_receiver_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ServerConfig("model", **settings)
    for address in ("http://collector:4317", "https://[::1]:4317/", "http://10.0.0.1:1"):
        assert (
            ServerConfig("model", traces=address, traces_share=0.0).observability_config.traces
            == address
        )
