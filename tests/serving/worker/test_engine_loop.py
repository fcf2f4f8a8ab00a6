"""The planner's loop, in a thread with one rank: what is sent ends, and is told in time."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Cancel, Dump, Ready, Rows, Submission, Update
from serving.ranks.in_process import Inside
from serving.scheduler.scheduler import Scheduler
from serving.worker import adapter_cache as tables_module
from serving.worker import engine_loop as planner_module
from tests.support.engine_scenarios import Answer
from tests.support.models import CLASSIC, build

V = CLASSIC.vocab_size
WAIT_S = 20.0
SHORT = Sampling(max_new_tokens=5)
LONG = Sampling(max_new_tokens=60)


class Caller:
    """Sends to an engine, and keeps what it is told, in order."""

    def __init__(self, model: GPT, *, warm: bool = False, **settings: object) -> None:
        limits = {"running_requests_max": 4, "step_tokens_max": 32, "kv_tokens_max": 512}
        config = ServerConfig("model", **{**limits, **settings})  # type: ignore[arg-type]
        self.engine = Inside(model, config, warm=warm)
        self.answers: dict[int, Answer] = {}
        self.facts: list[Ready] = []
        self.losses: list[str] = []
        self.updates: list[Update] = []
        self.came: list[float] = []  # When each of them did.
        self.events: list[str] = []
        self._changed = threading.Condition()
        self._numbers = 0

    def ready(self, facts: Ready) -> None:
        with self._changed:
            self.facts.append(facts)
            self._changed.notify_all()

    def update(self, update: Update) -> None:
        with self._changed:
            self.events.append("update")
            self.came.append(time.monotonic())
            self.updates.append(update)
            for made in update.made:
                self.answers[made.number].add(made)
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        with self._changed:
            self.losses.append(reason)
            self._changed.notify_all()

    def until(self, true: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(true, WAIT_S), "it did not happen in time"

    def ask(self, prompt: list[int], sampling: Sampling = SHORT, **more: object) -> int:
        number = self._numbers
        self._numbers += 1
        self.answers[number] = Answer()
        self.engine.send(Submission(number, prompt, sampling, **more))  # type: ignore[arg-type]
        return number

    def answer(self, number: int) -> Answer:
        self.until(lambda: self.answers[number].end is not None or self.losses)
        return self.answers[number]


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


@pytest.fixture
def caller(model: GPT, tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(model, flight_dir=str(tmp_path), queue_requests_max=8)
    caller.engine.start(caller)
    yield caller
    caller.engine.close()


def alone(model: GPT, prompt: list[int], table: torch.Tensor | None = None) -> list[int]:
    return generate(model, [prompt], SHORT, table=table)[0].token_ids


def saved(folder: Path, name: str, table: torch.Tensor) -> tuple[Adapter, Rows]:
    adapter = build_adapter(Card(name), table)
    path = folder / f"{name}.safetensors"
    save_adapter(adapter, path)
    return adapter, Rows(adapter.digest, len(table), str(path))


def drawn_table(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, CLASSIC.hidden_size, generator=generator)


def test_it_says_what_it_has_and_then_answers(caller: Caller, model: GPT) -> None:
    caller.until(lambda: caller.facts)
    facts = caller.facts[0]
    assert (facts.kv_tokens, facts.dtype) == (512, "float64")
    assert facts.weight_bytes == sum(8 * p.numel() for p in model.parameters())
    answer = caller.answer(caller.ask([1, 2, 3]))
    assert answer.tokens == alone(model, [1, 2, 3])
    assert answer.end == "length"


def test_what_a_step_made_is_told_before_the_next_one_runs(caller: Caller, model: GPT) -> None:
    assert model.embedding is not None
    hook = model.embedding.register_forward_pre_hook(lambda *_: caller.events.append("step"))
    try:
        caller.answer(caller.ask([1, 2], LONG))
    finally:
        hook.remove()
    steps = [place for place, event in enumerate(caller.events) if event == "step"]
    assert len(steps) == 60
    assert all(caller.events[place - 1] == "update" for place in steps)
    made = [update for update in caller.updates if update.made]
    assert [len(one.tokens) for update in made for one in update.made] == [1] * 60
    # And the size of the step that begins goes with it.
    assert [update.step_tokens for update in made] == [1] * 59 + [0]
    assert [update.step_context for update in made] == [*range(2, 61), 0]


def test_an_idle_engine_shows_each_second_that_it_lives(caller: Caller) -> None:
    caller.until(lambda: len(caller.came) >= 3)
    assert all(after - before > 0.9 for before, after in pairwise(caller.came))
    assert not any(update.made for update in caller.updates)


def test_what_is_cancelled_ends_and_its_mates_go_on(caller: Caller, model: GPT) -> None:
    assert model.embedding is not None
    hook = model.embedding.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    try:  # Slow steps: there is time to cancel.
        numbers = [caller.ask([1, 2], LONG) for _ in range(3)]
        other = caller.ask([5, 6, 7])
        caller.until(lambda: caller.answers[numbers[0]].tokens)
        caller.engine.send(Cancel([*numbers, 99]))
        assert [caller.answer(number).end for number in numbers] == ["cancelled"] * 3
    finally:
        hook.remove()
    assert all(len(caller.answers[number].tokens) < 60 for number in numbers)
    assert caller.answer(other).tokens == alone(model, [5, 6, 7])


def test_deadlines_end_what_waits_and_what_runs(caller: Caller) -> None:
    now = time.monotonic()
    late = caller.ask([1, 2], deadline=now - 1)
    soon = [caller.ask([1, 2], LONG, deadline=now + 0.02) for _ in range(8)]
    assert caller.answer(late).end == "deadline"
    ends = [caller.answer(number).end for number in soon]
    assert "deadline" in ends
    assert set(ends) <= {"deadline", "length"}


def test_more_than_may_wait_and_run_is_refused(model: GPT) -> None:
    caller = Caller(model, queue_requests_max=8)
    numbers = [caller.ask([1, 2], LONG) for _ in range(30)]
    caller.engine.start(caller)
    answers = [caller.answer(number) for number in numbers]
    assert [len(answer.tokens) for answer in answers] == [60] * 12 + [0] * 18
    assert [answer.end for answer in answers] == ["length"] * 12 + ["full"] * 18
    assert all("queue_requests_max" in answer.reason for answer in answers[12:])
    caller.engine.close()


def test_a_thousand_cancels_at_once_end_a_thousand_requests(model: GPT) -> None:
    caller = Caller(model, queue_requests_max=1000)
    caller.engine.start(caller)
    first = [caller.ask([1, 2, number % V], LONG) for number in range(4)]
    caller.until(lambda: all(caller.answers[number].tokens for number in first))
    numbers = first + [caller.ask([1, 2, number % V], LONG) for number in range(996)]
    caller.engine.send(Cancel(numbers))
    ends = [caller.answer(number).end for number in numbers]
    assert set(ends) <= {"cancelled", "length"}  # Some may be quicker.
    assert ends.count("cancelled") > 900
    caller.until(lambda: caller.updates[-1].load.blocks_held == 0)
    assert len(caller.answer(caller.ask([1, 2])).tokens) == 5
    caller.engine.close()


def test_adapters_are_read_from_their_files(caller: Caller, model: GPT, tmp_path: Path) -> None:
    (one, rows), (two, others) = (saved(tmp_path, f"a{n}", drawn_table(n)) for n in (2, 3))
    first, second = [V, V + 1, 7], [8, V + 2, V]
    numbers = [caller.ask(first, rows=rows), caller.ask(second, rows=others), caller.ask([7, 8])]
    want = [alone(model, first, one.table), alone(model, second, two.table), alone(model, [7, 8])]
    assert [caller.answer(number).tokens for number in numbers] == want


def test_a_file_that_is_gone_is_its_own_requests_end(
    caller: Caller, model: GPT, tmp_path: Path
) -> None:
    _, rows = saved(tmp_path, "gone", drawn_table(2))
    Path(rows.file).unlink()
    broken = [caller.ask([V, 2], rows=rows) for _ in range(2)]
    good = caller.ask([1, 2, 3])
    for number in broken:
        answer = caller.answer(number)
        assert (answer.end, answer.tokens) == ("adapter", [])
        assert "there is no adapter" in answer.reason
    assert caller.answer(good).tokens == alone(model, [1, 2, 3])


def test_no_step_waits_for_a_disk(
    caller: Caller, model: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, rows = saved(tmp_path, "slow", drawn_table(2))
    _, never = saved(tmp_path, "never", drawn_table(3))
    arrived = threading.Event()

    def slow(path: Path) -> Adapter:
        assert arrived.wait(WAIT_S)
        return open_adapter(path)

    monkeypatch.setattr(tables_module, "open_adapter", slow)
    number = caller.ask([V, V + 1, 3], rows=rows)
    dropped = caller.ask([V, 3], rows=never)
    late = caller.ask([V, 3], rows=never, deadline=time.monotonic() + 0.05)
    try:
        assert caller.answer(caller.ask([1, 2], LONG)).end == "length"
        heard = time.monotonic()  # All were, before.
        assert caller.answers[number].end is None
        assert caller.updates[-1].load.waiting >= 1
        caller.engine.send(Cancel([dropped]))
        assert caller.answer(dropped).end == "cancelled"
        assert caller.answer(late).end == "deadline"
        waited_s = time.monotonic() - heard
    finally:
        arrived.set()
    assert caller.answer(number).tokens == alone(model, [V, V + 1, 3], adapter.table)
    told = [made for update in caller.updates for made in update.made if made.number == number]
    assert told[0].phases is not None and told[0].phases.queue_s >= waited_s > 0


def test_numbers_that_are_not_finite_end_their_own_request_only(tmp_path: Path) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    # All blocks of memory are needed again after the fault.
    caller = Caller(model, kv_tokens_max=64)
    caller.engine.start(caller)
    # A file cannot hold what is not finite, but what overflows.
    _, rows = saved(tmp_path, "broken", torch.full((2, CLASSIC.hidden_size), 3e38))
    for _ in range(3):
        good = [caller.ask([1, 2, 3]) for _ in range(2)]
        broken = caller.ask([V, V + 1, 2], rows=rows)
        middle = caller.ask([*range(20), V, 4, 5], rows=rows)
        assert [caller.answer(number).end for number in (broken, middle)] == ["fault"] * 2
        assert caller.answers[broken].tokens == []
        for number in good:
            assert caller.answer(number).tokens == alone(model, [1, 2, 3])
    long = generate(model, [list(range(40))], Sampling(max_new_tokens=20))[0].token_ids
    assert caller.answer(caller.ask(list(range(40)), Sampling(20))).tokens == long
    caller.engine.close()


def test_a_request_that_no_memory_can_hold_is_refused(model: GPT) -> None:
    caller = Caller(model, kv_tokens_max=32)
    caller.engine.start(caller)
    answer = caller.answer(caller.ask(list(range(30)), Sampling(10)))
    assert (answer.end, answer.tokens) == ("refused", [])
    assert len(caller.answer(caller.ask([1, 2])).tokens) == 5
    caller.engine.close()


def test_when_it_breaks_it_says_so_writes_the_ring_and_stays_lost(
    caller: Caller, model: GPT, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off")

    assert model.embedding is not None
    caller.answer(caller.ask([1, 2]))
    hook = model.embedding.register_forward_pre_hook(fail)
    try:
        caller.ask([7, 8], LONG)
        caller.until(lambda: caller.losses)
    finally:
        hook.remove()
    assert caller.losses == ["RuntimeError: the device fell off"]
    (file,) = tmp_path.glob("preamble-flight-*.jsonl")
    head, *steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert "the device fell off" in head["why"]
    steps = [step for step in steps if step["lengths"]]  # Some seconds may have been idle.
    assert [step["outcome"] is None for step in steps] == [False] * 5 + [True]
    assert (steps[-1]["lengths"], steps[-1]["begins"][0]["prompt_tokens"]) == ([2], 2)
    assert "open it again" in str(caller.engine.refusal)
    caller.ask([1, 2])
    caller.engine.close()
    assert len(caller.losses) == 1
    assert len(caller.facts) == 1


def test_a_crash_that_is_heard_of_twice_is_written_once_and_whole(
    caller: Caller, model: GPT, tmp_path: Path
) -> None:
    """As when a rank dies: the kernel tells one thread, and a collective fails in the other."""
    planner = caller.engine._planner
    assert planner is not None and model.embedding is not None
    others = [
        threading.Thread(target=planner.write_crash, args=("rank 1 has ended",)) for _ in range(4)
    ]

    def fail(*_: object) -> None:
        for other in others:
            other.start()
        raise RuntimeError("connection closed by peer")

    hook = model.embedding.register_forward_pre_hook(fail)
    try:
        caller.ask([7, 8], LONG)
        caller.until(lambda: caller.losses)
    finally:
        hook.remove()
    for other in others:
        other.join(WAIT_S)
    (file,) = tmp_path.iterdir()  # Nor is there a part of another.
    assert json.loads(file.read_text().splitlines()[0])["why"]


def test_when_nothing_can_run_nobody_waits_forever(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_module, "STALLS_S", 0.05)
    caller.answer(caller.ask([1, 2]))
    # What must never be: a scheduler that finds no step for what waits.
    monkeypatch.setattr(Scheduler, "plan", lambda scheduler, now: None)
    caller.ask([7, 8])
    caller.until(lambda: caller.losses)
    assert "none could run" in caller.losses[0]


def test_it_writes_the_ring_when_asked(caller: Caller, tmp_path: Path) -> None:
    caller.answer(caller.ask([1, 2]))
    caller.engine.send(Dump(str(tmp_path / "asked.jsonl")))
    caller.answer(caller.ask([1, 2]))
    lines = (tmp_path / "asked.jsonl").read_text().splitlines()
    assert len([line for line in lines if json.loads(line).get("tokens")]) == 5


def test_closing_ends_what_runs_and_is_told_once(model: GPT) -> None:
    caller = Caller(model)
    caller.engine.start(caller)
    caller.ask([1, 2], LONG)
    caller.until(lambda: caller.updates)
    caller.engine.close()
    assert caller.losses == ["the engine was closed"]
    before = len(caller.updates)
    caller.ask([1, 2])
    time.sleep(0.05)
    assert len(caller.updates) == before


def test_a_warm_engine_answers_like_a_cold_one(model: GPT) -> None:
    caller = Caller(model, warm=True)
    caller.engine.start(caller)
    assert caller.answer(caller.ask([1, 2, 3])).tokens == alone(model, [1, 2, 3])
    caller.engine.close()


def test_a_model_of_several_ranks_is_not_taken(model: GPT) -> None:
    split = build(CLASSIC, Mesh(torch.device("cpu"), tp=2))
    with pytest.raises(ConfigError, match="2 ranks"):
        Inside(split, ServerConfig("model"))
