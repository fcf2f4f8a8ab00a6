"""Engine loop in a thread with one rank: requests end, and outputs are published in time."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.engine_core import adapter_cache as adapter_cache_module
from serving.engine_core import engine_loop as engine_loop_module
from serving.messages import (
    HEARTBEAT_INTERVAL_S,
    AdapterRef,
    Cancel,
    DumpFlightRecorder,
    Ready,
    StepSize,
    Submission,
    Update,
)
from serving.ranks.in_process import InProcessTransport
from serving.scheduler.scheduler import Scheduler
from tests.support.engine_scenarios import Answer
from tests.support.models import CLASSIC, build
from tests.support.recording_receiver import Gate
from tests.support.servers import WAIT_S

V = CLASSIC.vocab_size
SHORT = SamplingParams(max_new_tokens=5)
LONG = SamplingParams(max_new_tokens=60)


class Caller:
    """Sends to an engine loop, and records its updates in order."""

    def __init__(self, model: GPT, *, warm: bool = False, **settings: object) -> None:
        limits = {"running_requests_max": 4, "step_tokens_max": 32, "kv_tokens_max": 512}
        config = ServerConfig("model", **{**limits, **settings})
        self.engine = InProcessTransport(model, config, warm_up=warm)
        self.answers: dict[int, Answer] = {}
        self.facts: list[Ready] = []
        self.losses: list[str] = []
        self.updates: list[Update] = []
        self.update_times: list[float] = []  # Arrival of each update.
        self.created_at = time.monotonic()
        self.gate = Gate()
        self.events: list[str] = []
        self._changed = threading.Condition()
        self._numbers = 0

    def ready(self, facts: Ready) -> None:
        with self._changed:
            self.facts.append(facts)
            self._changed.notify_all()

    def update(self, update: Update) -> None:
        self.gate.passes(update)
        with self._changed:
            self.events.append("update")
            self.update_times.append(time.monotonic())
            self.updates.append(update)
            for output in update.outputs:
                self.answers[output.sequence_id].add(output)
            self._changed.notify_all()

    def ranks_lost(self, reason: str) -> None:
        with self._changed:
            self.losses.append(reason)
            self._changed.notify_all()

    def until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (
                "the condition did not become true in time"
            )

    def ask(self, prompt: list[int], sampling: SamplingParams = SHORT, **fields: object) -> int:
        sequence_id = self._numbers
        self._numbers += 1
        self.answers[sequence_id] = Answer()
        self.engine.send(Submission(sequence_id, prompt, sampling, **fields))  # type: ignore[arg-type]
        return sequence_id

    def answer(self, sequence_id: int) -> Answer:
        self.until(lambda: self.answers[sequence_id].end is not None or self.losses)
        return self.answers[sequence_id]


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


@pytest.fixture
def caller(model: GPT, tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(model, flight_dir=str(tmp_path), queue_requests_max=8)
    caller.engine.start(caller)
    yield caller
    caller.engine.close()


def generate_alone(model: GPT, prompt: list[int], table: torch.Tensor | None = None) -> list[int]:
    return generate(model, [prompt], SHORT, adapter_table=table)[0].token_ids


def save_rows(folder: Path, name: str, table: torch.Tensor) -> tuple[Adapter, AdapterRef]:
    adapter = build_adapter(Card(name), table)
    path = folder / f"{name}.safetensors"
    save_adapter(adapter, path)
    return adapter, AdapterRef(adapter.digest, len(table), str(path))


def draw_table(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, CLASSIC.hidden_size, generator=generator)


def test_ready_is_sent_before_outputs(caller: Caller, model: GPT) -> None:
    caller.until(lambda: caller.facts)
    facts = caller.facts[0]
    assert (facts.kv_tokens, facts.dtype) == (512, "float64")
    assert facts.weight_bytes == sum(8 * p.numel() for p in model.parameters())
    answer = caller.answer(caller.ask([1, 2, 3]))
    assert answer.tokens == generate_alone(model, [1, 2, 3])
    assert answer.end == "length"


def test_outputs_are_published_before_the_next_step_runs(caller: Caller, model: GPT) -> None:
    assert model.embedding is not None
    hook = model.embedding.register_forward_pre_hook(lambda *_: caller.events.append("step"))
    try:
        caller.answer(caller.ask([1, 2], LONG))
    finally:
        hook.remove()
    steps = [index for index, event in enumerate(caller.events) if event == "step"]
    assert len(steps) == 60
    assert all(caller.events[index - 1] == "update" for index in steps)
    updates = [update for update in caller.updates if update.outputs]
    assert [len(output.tokens) for update in updates for output in update.outputs] == [1] * 60
    # The update also has the size of the step that starts.
    sizes = [update.steps_in_flight for update in updates]
    assert sizes == [[StepSize(1, context_tokens)] for context_tokens in range(2, 61)] + [[]]
    # And those of the step that ended.
    completed = [step_time for update in updates for step_time in update.completed_steps]
    assert [step_time.tokens for step_time in completed] == [2] + [1] * 59
    assert [step_time.context_tokens for step_time in completed] == [0, *range(2, 61)]
    assert all(len(update.completed_steps) == 1 for update in updates)
    assert all(step_time.seconds > 0 for step_time in completed)


def test_an_idle_engine_sends_a_heartbeat_each_second(caller: Caller) -> None:
    caller.until(lambda: len(caller.update_times) >= 3)
    # A loaded machine may delay one heartbeat, so the time of three is measured.
    assert caller.update_times[2] - caller.created_at >= 2 * HEARTBEAT_INTERVAL_S
    assert not any(update.outputs for update in caller.updates)


def test_a_cancel_ends_only_its_own_sequence(caller: Caller, model: GPT) -> None:
    caller.gate.allow(2)
    cancelled = [caller.ask([1, 2], LONG) for _ in range(3)]
    other = caller.ask([5, 6, 7])
    caller.until(lambda: caller.answers[cancelled[0]].tokens)
    caller.engine.send(Cancel([*cancelled, 99]))
    caller.gate.allow(None)
    assert [caller.answer(number).end for number in cancelled] == ["cancelled"] * 3
    assert all(len(caller.answers[number].tokens) < 60 for number in cancelled)
    assert caller.answer(other).tokens == generate_alone(model, [5, 6, 7])


def test_deadlines_end_waiting_and_running_sequences(caller: Caller) -> None:
    now = time.monotonic()
    expired = caller.ask([1, 2], deadline=now - 1)
    expiring = [caller.ask([1, 2], LONG, deadline=now + 0.02) for _ in range(8)]
    assert caller.answer(expired).end == "deadline"
    ends = [caller.answer(number).end for number in expiring]
    assert "deadline" in ends
    assert set(ends) <= {"deadline", "length"}


def test_requests_over_the_limit_are_refused(model: GPT) -> None:
    caller = Caller(model, queue_requests_max=8)
    numbers = [caller.ask([1, 2], LONG) for _ in range(30)]
    caller.engine.start(caller)
    answers = [caller.answer(number) for number in numbers]
    assert [len(answer.tokens) for answer in answers] == [60] * 12 + [0] * 18
    assert [answer.end for answer in answers] == ["length"] * 12 + ["full"] * 18
    assert all("queue_requests_max" in answer.reason for answer in answers[12:])
    caller.engine.close()


def test_one_message_can_cancel_a_thousand_requests(model: GPT) -> None:
    caller = Caller(model, queue_requests_max=1000)
    caller.engine.start(caller)
    caller.gate.allow(0)
    running = [caller.ask([1, 2, sequence_id % V], LONG) for sequence_id in range(4)]
    caller.gate.allow(8)
    caller.until(lambda: all(caller.answers[sequence_id].tokens for sequence_id in running))
    sequence_ids = running + [
        caller.ask([1, 2, sequence_id % V], LONG) for sequence_id in range(996)
    ]
    caller.engine.send(Cancel(sequence_ids))
    caller.gate.allow(None)
    assert {caller.answer(sequence_id).end for sequence_id in sequence_ids} == {"cancelled"}
    caller.until(lambda: caller.updates[-1].stats.blocks_held == 0)
    assert len(caller.answer(caller.ask([1, 2])).tokens) == 5
    caller.engine.close()


def test_adapters_are_read_from_files(caller: Caller, model: GPT, tmp_path: Path) -> None:
    two, two_ref = save_rows(tmp_path, "a2", draw_table(2))
    three, three_ref = save_rows(tmp_path, "a3", draw_table(3))
    first = [V, V + 1, 7]
    second = [8, V + 2, V]
    sequence_ids = [
        caller.ask(first, adapter_ref=two_ref),
        caller.ask(second, adapter_ref=three_ref),
        caller.ask([7, 8]),
    ]
    expected = [
        generate_alone(model, first, two.table),
        generate_alone(model, second, three.table),
        generate_alone(model, [7, 8]),
    ]
    assert [caller.answer(sequence_id).tokens for sequence_id in sequence_ids] == expected


def test_a_missing_adapter_file_ends_only_its_requests(
    caller: Caller, model: GPT, tmp_path: Path
) -> None:
    _, deleted = save_rows(tmp_path, "deleted", draw_table(2))
    Path(deleted.file).unlink()
    failing = [caller.ask([V, 2], adapter_ref=deleted) for _ in range(2)]
    plain = caller.ask([1, 2, 3])
    for number in failing:
        answer = caller.answer(number)
        assert (answer.end, answer.tokens) == ("adapter", [])
        assert "does not exist" in answer.reason
    assert caller.answer(plain).tokens == generate_alone(model, [1, 2, 3])


def test_steps_continue_while_an_adapter_is_read(
    caller: Caller, model: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, pending_ref = save_rows(tmp_path, "pending", draw_table(2))
    _, unused_ref = save_rows(tmp_path, "unused", draw_table(3))
    released = threading.Event()

    def open_when_released(path: Path) -> Adapter:
        assert released.wait(WAIT_S)
        return open_adapter(path)

    monkeypatch.setattr(adapter_cache_module, "open_adapter", open_when_released)
    pending = caller.ask([V, V + 1, 3], adapter_ref=pending_ref)
    cancelled = caller.ask([V, 3], adapter_ref=unused_ref)
    expiring = caller.ask([V, 3], adapter_ref=unused_ref, deadline=time.monotonic() + 0.05)
    try:
        assert caller.answer(caller.ask([1, 2], LONG)).end == "length"
        answered_at = time.monotonic()  # The updates until here had arrived before.
        assert caller.answers[pending].end is None
        assert caller.updates[-1].stats.waiting >= 1
        caller.engine.send(Cancel([cancelled]))
        assert caller.answer(cancelled).end == "cancelled"
        assert caller.answer(expiring).end == "deadline"
        waited_s = time.monotonic() - answered_at
    finally:
        released.set()
    assert caller.answer(pending).tokens == generate_alone(model, [V, V + 1, 3], adapter.table)
    outputs = [
        output
        for update in caller.updates
        for output in update.outputs
        if output.sequence_id == pending
    ]
    assert outputs[0].phases is not None and outputs[0].phases.queue_s >= waited_s > 0


def test_an_adapter_is_read_during_the_step_in_which_its_request_arrives(
    caller: Caller, model: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, adapter_ref = save_rows(tmp_path, "read", draw_table(2))
    step_began, file_was_read = threading.Event(), threading.Event()

    def open_and_report(path: Path) -> Adapter:
        adapter = open_adapter(path)
        file_was_read.set()
        return adapter

    def hold_step(*_: object) -> None:
        step_began.set()
        assert file_was_read.wait(WAIT_S), "the read waited for the end of the step"

    monkeypatch.setattr(adapter_cache_module, "open_adapter", open_and_report)
    assert model.embedding is not None
    hook = model.embedding.register_forward_pre_hook(hold_step)
    try:
        running = caller.ask([1, 2])
        assert step_began.wait(WAIT_S)
        sequence_id = caller.ask([V, V + 1, 3], adapter_ref=adapter_ref)
        assert caller.answer(running).end == "length"
    finally:
        file_was_read.set()
        hook.remove()
    tokens = generate_alone(model, [V, V + 1, 3], adapter.table)
    assert caller.answer(sequence_id).tokens == tokens


def test_nonfinite_values_end_only_their_own_request(tmp_path: Path) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    # After the fault, all KV blocks are needed again.
    caller = Caller(model, kv_tokens_max=64)
    caller.engine.start(caller)
    # An adapter file cannot contain NaN or infinity, but values that overflow.
    _, overflowing = save_rows(tmp_path, "overflowing", torch.full((2, CLASSIC.hidden_size), 3e38))
    for _ in range(3):
        finite = [caller.ask([1, 2, 3]) for _ in range(2)]
        leading = caller.ask([V, V + 1, 2], adapter_ref=overflowing)
        inner = caller.ask([*range(20), V, 4, 5], adapter_ref=overflowing)
        assert [caller.answer(number).end for number in (leading, inner)] == ["fault"] * 2
        assert caller.answers[leading].tokens == []
        for number in finite:
            assert caller.answer(number).tokens == generate_alone(model, [1, 2, 3])
    expected = generate(model, [list(range(40))], SamplingParams(max_new_tokens=20))[0].token_ids
    assert caller.answer(caller.ask(list(range(40)), SamplingParams(20))).tokens == expected
    caller.engine.close()


def test_a_request_larger_than_the_kv_pool_is_refused(model: GPT) -> None:
    caller = Caller(model, kv_tokens_max=32)
    caller.engine.start(caller)
    answer = caller.answer(caller.ask(list(range(30)), SamplingParams(10)))
    assert (answer.end, answer.tokens) == ("refused", [])
    assert len(caller.answer(caller.ask([1, 2])).tokens) == 5
    caller.engine.close()


def test_a_failed_loop_reports_the_loss_and_dumps_the_flight_recorder(
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
    steps = [step for step in steps if step["lengths"]]  # Without the empty steps of idle seconds.
    assert [step["outcome"] is None for step in steps] == [False] * 5 + [True]
    assert (steps[-1]["lengths"], steps[-1]["begins"][0]["prompt_tokens"]) == ([2], 2)
    assert "create a new engine" in str(caller.engine.refusal)
    caller.ask([1, 2])
    caller.engine.close()
    assert len(caller.losses) == 1
    assert len(caller.facts) == 1


def test_a_crash_that_several_threads_report_is_dumped_once(
    caller: Caller, model: GPT, tmp_path: Path
) -> None:
    """When a rank dies, one thread sees a closed channel and a collective fails in another."""
    engine_loop = caller.engine._engine_loop
    assert engine_loop is not None and model.embedding is not None
    threads = [
        threading.Thread(target=engine_loop.write_crash_dump, args=("rank 1 has ended",))
        for _ in range(4)
    ]

    def fail(*_: object) -> None:
        for thread in threads:
            thread.start()
        raise RuntimeError("connection closed by peer")

    hook = model.embedding.register_forward_pre_hook(fail)
    try:
        caller.ask([7, 8], LONG)
        caller.until(lambda: caller.losses)
    finally:
        hook.remove()
    for thread in threads:
        thread.join(WAIT_S)
    (file,) = tmp_path.iterdir()  # No partial file is left.
    assert json.loads(file.read_text().splitlines()[0])["why"]


def test_a_stalled_loop_fails_after_the_limit(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop_module, "STALL_LIMIT_S", 0.05)
    caller.answer(caller.ask([1, 2]))
    # A scheduler error that must not happen: it plans no step while sequences wait.
    monkeypatch.setattr(Scheduler, "plan", lambda scheduler, now: None)
    caller.ask([7, 8])
    caller.until(lambda: caller.losses)
    assert "none could run" in caller.losses[0]


def test_the_flight_recorder_is_dumped_on_request(caller: Caller, tmp_path: Path) -> None:
    caller.answer(caller.ask([1, 2]))
    caller.engine.send(DumpFlightRecorder(str(tmp_path / "dump.jsonl")))
    caller.answer(caller.ask([1, 2]))
    lines = (tmp_path / "dump.jsonl").read_text().splitlines()
    assert len([line for line in lines if json.loads(line).get("tokens")]) == 5


def test_close_ends_running_requests_and_reports_once(model: GPT) -> None:
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


def test_warm_up_does_not_change_tokens(model: GPT) -> None:
    caller = Caller(model, warm=True)
    caller.engine.start(caller)
    assert caller.answer(caller.ask([1, 2, 3])).tokens == generate_alone(model, [1, 2, 3])
    caller.engine.close()


def test_compilations_after_the_warm_up_are_counted(model: GPT) -> None:
    caller = Caller(model)
    record = caller.engine._engine_loop.record_compilation
    record("attend_tile", 0.5)  # In the warm-up.
    caller.engine.start(caller)
    caller.answer(caller.ask([1, 2, 3]))
    assert caller.updates[-1].stats.compiled_kernels == 0
    for kernel in ("attend_tile", "append_kv"):
        record(kernel, None)
        record(kernel, 0.5)
    caller.answer(caller.ask([1, 2, 3]))
    assert caller.updates[-1].stats.compiled_kernels == 2
    caller.engine.close()


def test_the_in_process_transport_refuses_several_ranks(model: GPT) -> None:
    sharded = build(CLASSIC, Mesh(torch.device("cpu"), tp=2))
    with pytest.raises(ConfigError, match="2 ranks"):
        InProcessTransport(sharded, ServerConfig("model"))
