"""Where a request's time goes: what counts as waiting, as its prompt and as its tokens.

By a scheduler with a clock of the test; then by engines with a real model, whose ranks are lost.
That the phases of every sequence add up holds `tests/support/fake_ranks.py`, in each of its
schedules.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.admission.auth import Access
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import Spent, Stream, completions
from serving.frontend.call import Ended, Front
from serving.frontend.call_origin import LABEL_CHARACTERS_MAX, Came
from serving.messages import Step, Update, encode, from_planner
from serving.request import BeamRule, Request
from serving.service.metrics import Metrics
from tests.support.engine_requests import CONFIG, LONG, TOKENIZER, one, run, started, taken
from tests.support.fake_ranks import Play, adapter, text, virtual
from tests.support.lossy_engine import Fragile, broken_engine
from tests.support.models import CLASSIC, build

LOST_S = 0.2


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


# ---------------------------------------------------------------------------------- the scheduler


def test_who_waits_for_a_place_waits_and_is_computed_afterwards() -> None:
    play = Play(running_requests_max=1)  # Steps take 10 ms.
    first, second = play.submit(text(40), 5), play.submit(text(8, 1), 2)
    play.finish()
    assert play.phases[first].queue_s == 0.0
    assert play.phases[first].prefill_s == pytest.approx(0.02)  # Until the third step ends.
    assert play.phases[second].queue_s == pytest.approx(0.07)
    assert play.phases[second].prefill_s == 0.0  # Its only step ends as it is planned.


def test_who_waits_for_an_equal_prompt_or_for_rows_waits() -> None:
    play = Play(adapter_rows_max=6)
    play.submit(text(64), 2)
    same = play.submit(text(64), 2)
    play.finish()
    assert play.phases[same].queue_s >= 0.03 and play.phases[same].prefill_s < 0.03
    aside = play.submission([*virtual(6), 7], 2, rows=adapter("task", 6))
    play.ranks.know(aside)
    play.scheduler.add(aside, play.now, aside_s=0.5)
    while (made := play.scheduler.commit(play.ranks.run(plan(play)), play.now)) == []:
        pass
    assert made[0].phases is not None
    assert made[0].phases.queue_s == pytest.approx(0.5) and made[0].phases.prefill_s == 0


def plan(play: Play) -> Step:
    step = play.scheduler.plan(play.now)
    assert step is not None
    return step


def test_a_place_lost_before_the_first_token_is_waiting_again_and_later_it_is_decoding() -> None:
    play = Play(running_requests_max=1, blocks=200)
    slow = play.submit(text(60), 4, service="throughput")
    play.step()  # 16 tokens of it.
    quick = play.submit(text(8, 2), 3, service="latency")
    play.finish()
    assert play.scheduler.load.preemptions == 1 and play.first_at[quick] < play.first_at[slow]
    assert play.phases[slow].queue_s >= 0.03  # As long as the other one had its place.
    assert play.phases[slow].prefill_s > 0

    late = play.submit(text(8, 3), 9, service="throughput")
    play.step()
    before = play.phases[late]
    play.submit(text(8, 4), 3, service="latency")
    play.finish()
    assert play.scheduler.load.preemptions == 2 and play.phases[late] is before


def test_what_is_only_scored_tells_its_phases_at_its_end() -> None:
    play = Play()
    scored = play.submit(text(40), 0, prompt_logprobs=0)
    play.finish()
    assert play.made[scored].end == "scored" and play.made[scored].phases is not None


# ------------------------------------------------------------------------------------- the engine


class Listened(Fragile):
    """A link that keeps what passes, as it would be on a socket."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.heard: list[Update] = []

    def update(self, update: Update) -> None:
        sent = from_planner(encode(update))
        assert isinstance(sent, Update)
        self.heard.append(sent)
        super().update(sent)


def test_only_the_first_message_of_a_sequence_has_its_phases(model: GPT) -> None:
    link = Listened(model)
    engine = Engine(link, TOKENIZER, CONFIG)
    engine.start()
    engine.wait()

    async def work() -> None:
        stream = engine.submit(Request(one((1, 2), LONG).answers * 2))
        pieces = await taken(stream)
        assert sum(len(piece.token_ids) for piece in pieces) == 100
        for spent in stream.spent:
            assert spent.finish == "length" and spent.decode_s > 0

    try:
        run(work)
    finally:
        engine.close()
    heard = [made for update in link.heard for made in update.made]
    assert len(heard) == 100
    for number in {made.number for made in heard}:
        told = [made.phases is not None for made in heard if made.number == number]
        assert told == [True] + [False] * 49


@dataclass
class Lost:
    """A request whose ranks were lost: when it was asked, when they went and came back."""

    asked_at: float = 0.0
    gone_at: float = 0.0
    back_at: float = 0.0
    spent: list[Spent] = field(default_factory=list)


def lost_in(model: GPT, work: Callable[[Engine], Coroutine[None, None, Stream]]) -> Lost:
    """The ranks are lost for a while when `work` has asked."""
    (link, engine), lost = broken_engine(model), Lost()

    async def whole() -> None:
        link.pace_s = 0.02
        lost.asked_at = time.monotonic()
        stream = await work(engine)
        lost.gone_at = time.monotonic()
        await asyncio.to_thread(link.lose)
        link.pace_s = 0.0
        await asyncio.sleep(LOST_S)
        lost.back_at = time.monotonic()
        link.start(engine)
        (done,) = await completions(stream)
        assert done.finish == "length"
        lost.spent = stream.spent

    try:
        run(whole)
    finally:
        engine.close()
    return lost


def test_what_lost_ranks_did_before_the_first_token_was_waiting(model: GPT) -> None:
    async def work(engine: Engine) -> Stream:
        for place in range(CONFIG.running_requests_max):
            engine.submit(one((2, place), LONG), whole=True)
        return engine.submit(one((1, 2)))

    lost = lost_in(model, work)
    (spent,) = lost.spent
    assert spent.phases.queue_s >= LOST_S and spent.first_at > lost.back_at
    assert spent.phases.queue_s + spent.phases.prefill_s <= spent.first_at - lost.asked_at


def test_a_loss_after_the_first_token_is_time_of_decoding(model: GPT) -> None:
    async def work(engine: Engine) -> Stream:
        stream = engine.submit(one((1, 2), LONG), whole=True)
        await anext(stream)
        return stream

    lost = lost_in(model, work)
    (spent,) = lost.spent
    assert spent.decode_s >= LOST_S and spent.first_at <= lost.gone_at
    assert spent.phases.queue_s + spent.phases.prefill_s <= spent.first_at - lost.asked_at


def test_beams_have_the_phases_of_their_first_round_and_decode_in_the_others(model: GPT) -> None:
    engine = started(model)
    rule = BeamRule(3, 2)
    answers = one((1, 2, 3), Sampling(max_new_tokens=12)).answers * 2

    async def work() -> None:
        stream = engine.submit(Request(answers, beams=rule))
        await taken(stream)
        first, second = stream.spent
        assert first.phases == second.phases
        assert first.phases.decode_s > 0
        assert first.decode_s >= first.phases.decode_s

    try:
        run(work)
    finally:
        engine.close()


# -------------------------------------------------------------------------------------- the front


def test_a_callers_name_for_a_request_is_bounded_and_can_be_shown() -> None:
    assert Came(headers={"x-request-id": "b", "x-correlation-id": "a-1"}).label == "a-1"
    assert Came(headers={"x-request-id": "a\n\x1b[31mb\u202e é\x7f"}).label == "a[31mb"
    assert len(Came(headers={"x-request-id": "x" * 9999}).label) == LABEL_CHARACTERS_MAX
    assert Came().label == Came().trace_id == ""
    parent = f"00-{'a1' * 16}-{'b2' * 8}-01"
    assert Came(headers={"traceparent": parent}).trace_id == "a1" * 16
    for wrong in (parent[1:], parent.upper(), f"{parent}x", "00--", f"{parent}\n"):
        assert Came(headers={"traceparent": wrong}).trace_id == ""


def test_a_bad_end_is_logged_with_what_its_caller_calls_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = f"00-{'a1' * 16}-{'b2' * 8}-01"
    came = Came("x", {"x-request-id": "it's 7", "traceparent": parent})

    async def work() -> None:
        front = Front(Metrics(), Access())
        with pytest.raises(Ended):
            async with front.call("test", "Ask", came=came) as call, call.part("Ask/part"):
                raise ZeroDivisionError("a bug")

    asyncio.run(work())
    lines = [line for line in caplog.messages if "event=call_" in line]
    assert len(lines) >= 2
    for line in lines:
        assert re.search(r'label="it\'s 7" trace=\'(a1){16}\'', line), line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"traces": "collector:4317"}, "it must be http://HOST:PORT"),
        ({"traces": "http://user:secret@collector:4317"}, "it must be http://HOST:PORT"),
        ({"traces": "http://collector"}, "it must be http://HOST:PORT"),
        ({"traces_share": 1.5}, "it must be from 0 to 1"),
    ],
)
def test_a_receiver_that_cannot_be_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ServerConfig("model", **settings)  # type: ignore[arg-type]
    for address in ("http://collector:4317", "https://[::1]:4317/", "http://10.0.0.1:1"):
        assert ServerConfig("model", traces=address, traces_share=0.0).traces == address
