"""Predictions of our engine under a load, held against the scheduler itself on a virtual clock.

The oracle plays the same requests through `serving.scheduler.scheduler`, each step as long as the
same prices say; what it counts (steps, tokens of a step, times) the prediction must count nearly
alike.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from planning.hardware import DEVICES, Cluster
from planning.inference.calibration_file import Measured, Shape, StepCosts
from planning.inference.estimate import (
    Lengths,
    ServingEstimate,
    ServingSplit,
    Workload,
    estimate_serving,
    serving_memory,
)
from planning.inference.simulator import Call, Played, Rules, simulation
from planning.inference.step_cost import Curve, Steps
from serving.config import ServerConfig
from serving.messages import Outcome, Step, Submission
from serving.scheduler.scheduler import Scheduler
from serving.worker.model_runner import Runner, blocks_that_fit

MODEL = GPTConfig(
    num_layers=24,
    hidden_size=2048,
    num_attention_heads=16,
    vocab_size=51200,
    max_position_embeddings=4096,
)
A100 = Cluster(DEVICES["a100-80g"], 8)
# As on a slow machine: prompts hold up those that decode.
SLOW = Steps(
    rows=Curve(((1.0, 0.020), (8.0, 0.024), (64.0, 0.050), (512.0, 0.300))),
    draws=Curve(((1.0, 0.004), (64.0, 0.010))),
    context_s=2e-6,
    pair_s=1e-8,
    sequence_s=1e-4,
    step_s=5e-4,
)
FAST = replace(
    SLOW,
    rows=SLOW.rows.scaled(0.02),
    draws=SLOW.draws.scaled(0.02),
    context_s=4e-8,
    pair_s=2e-10,
)
PLAIN = Rules(running_max=16, step_tokens_max=256, stall_s=0.015, kv_tokens=1 << 16)


@dataclass
class Oracle:
    """The scheduler, with ranks that draw a token at random and take as long as they should."""

    steps: Steps
    rules: Rules
    turn_s: float | None = None  # None: an open loop.
    concurrency: int = 0
    calls: list[Call] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    rows: int = 0
    count: int = 0
    preemptions: int = 0

    def play(self, calls: list[Call]) -> "Oracle":
        draw, scheduler = Random(0), _scheduler(self.rules)
        left, coming, now = deque(calls), deque[Call](), 0.0
        if self.turn_s is None:
            coming, left = left, deque()
        for _ in range(min(self.concurrency, len(left))):
            coming.append(replace(left.popleft(), arrival_s=self.turn_s or 0.0))
        live: dict[int, Call] = {}
        flying: deque[tuple[Outcome, float]] = deque()
        free = [0.0] * self.rules.stages  # When each stage has done what it was given.
        while coming or live:
            if not live and coming:
                now = max(now, coming[0].arrival_s)
            if len(flying) >= self.rules.stages:
                now = self._land(scheduler, flying, live, now, left, coming)
            while coming and coming[0].arrival_s <= now:
                call = coming.popleft()
                live[call.number] = call
                prompt = draw.choices(range(1000), k=call.prompt)
                sampling = Sampling(call.output, min_new_tokens=call.output)
                assert scheduler.add(Submission(call.number, prompt, sampling), now) is None
            step = scheduler.plan(now)
            if step is None:
                if flying:
                    now = self._land(scheduler, flying, live, now, left, coming)
                continue
            seconds, ends, last = self._seconds(step), now, free[-1]
            for stage, since in enumerate(free):
                ends = free[stage] = max(ends, since) + seconds
            tokens = [draw.randrange(1000) for one in step.draws if one]
            took_s = ends - max(now, last)
            flying.append((Outcome(step.number, tokens, seconds=took_s), ends))
        self.preemptions = scheduler.load.preemptions
        return self

    def _land(
        self,
        scheduler: Scheduler,
        flying: deque[tuple[Outcome, float]],
        live: dict[int, Call],
        now: float,
        *queues: deque[Call],
    ) -> float:
        left, coming = queues
        outcome, ends = flying.popleft()
        now = max(now, ends)
        for made in scheduler.commit(outcome, now):
            call = live[made.number]
            if call.first_s < 0:
                call.first_s = now
            else:
                self.gaps.append((now - call.last_s, 1))
            call.last_s = now
            if made.end is not None:
                call.end_s = now
                self.calls.append(live.pop(made.number))
                if left:
                    assert self.turn_s is not None
                    coming.append(replace(left.popleft(), arrival_s=now + self.turn_s))
        scheduler.check()
        return now

    def _seconds(self, step: Step) -> float:
        pairs = context = 0
        for past, length in zip(step.past, step.lengths, strict=True):
            if length == 1 and past:
                context += past + 1
            else:
                pairs += length * (2 * past + length + 1) // 2
        self.rows += sum(step.lengths)
        self.count += 1
        draws = sum(step.draws)
        return self.steps.seconds(sum(step.lengths), draws, context, pairs, len(step.slots))


def _scheduler(rules: Rules) -> Scheduler:
    config = ServerConfig(
        model="",
        running_requests_max=rules.running_max,
        step_tokens_max=rules.step_tokens_max,
        prefill_stall_ms_max=1000 * rules.stall_s,
        kv_block_tokens=rules.block_tokens,
        prefix_cache=False,
    )
    return Scheduler(
        vocab_size=1000,
        blocks=rules.kv_tokens // rules.block_tokens + 1,
        config=config,
        context_tokens_max=1 << 20,
        stages=rules.stages,
    )


def weighted(gaps: list[tuple[float, int]]) -> float:
    return sum(gap * count for gap, count in gaps) / sum(count for _, count in gaps)


def drawn_calls(prompt: Lengths, output: Lengths, count: int, rate: float = 0.0) -> list[Call]:
    draw, now, calls = Random(5), 0.0, []
    lengths = zip(prompt.draw(count, 1), output.draw(count, 2), strict=True)
    for number, (asked, made) in enumerate(lengths):
        now += draw.expovariate(rate) if rate else 0.0
        calls.append(Call(number, now, asked, made))
    return calls


ROOMY = replace(PLAIN, stall_s=1.0, running_max=64, step_tokens_max=1024)
CASES = {
    "a few, one after another": (SLOW, PLAIN, Lengths(64, 64), Lengths(24, 24), 12, 0.0, 1),
    "fixed lengths at once": (SLOW, PLAIN, Lengths(128, 128), Lengths(32, 32), 40, 0.0, 8),
    "many lengths at once": (SLOW, PLAIN, Lengths(200, 500), Lengths(40, 100), 64, 0.0, 16),
    "more at once than run": (FAST, PLAIN, Lengths(100, 200), Lengths(30, 60), 96, 0.0, 40),
    "whole prompts in a step": (SLOW, ROOMY, Lengths(200, 500), Lengths(20, 40), 96, 0.0, 48),
    "now and then one": (SLOW, PLAIN, Lengths(100, 250), Lengths(20, 40), 40, 0.4, 0),
    "a steady load": (FAST, PLAIN, Lengths(300, 600), Lengths(40, 80), 120, 25.0, 0),
    "a heavy load": (SLOW, PLAIN, Lengths(100, 250), Lengths(30, 60), 60, 3.0, 0),
}
Case = tuple[Steps, Rules, Lengths, Lengths, int, float, int]


def both(case: Case) -> tuple[Played, Oracle]:
    """The same calls, played by the prediction and by the scheduler."""
    steps, rules, prompt, output, count, rate, concurrency = case
    turn_s = 0.003
    calls = drawn_calls(prompt, output, count, rate)
    oracle = Oracle(steps, rules, None if rate else turn_s, concurrency).play(calls)
    calls = drawn_calls(prompt, output, count, rate)
    simulated = simulation(steps, rules)
    played = simulated.open(calls) if rate else simulated.closed(calls, concurrency, turn_s)
    assert len(played.calls) == len(oracle.calls) == count
    return played, oracle


def assert_alike(played: Played, oracle: Oracle, rel: float) -> None:
    gaps = [(gap, count) for gap, count, _ in played.gaps]
    assert weighted(gaps) == pytest.approx(weighted(oracle.gaps), rel=rel)
    for moment in ("first_s", "end_s"):
        ours, theirs = (
            mean(getattr(one, moment) - one.arrival_s for one in some)
            for some in (played.calls, oracle.calls)
        )
        assert ours == pytest.approx(theirs, rel=rel)
    ends = [max(one.end_s for one in some) for some in (played.calls, oracle.calls)]
    assert ends[0] == pytest.approx(ends[1], rel=rel)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_scheduler(name: str) -> None:
    played, oracle = both(CASES[name])
    assert played.rows == oracle.rows
    assert played.steps == oracle.count
    assert_alike(played, oracle, 0.01)


def test_who_loses_its_place_when_room_runs_short_costs_about_as_much() -> None:
    short = replace(PLAIN, kv_tokens=2048)
    case = (FAST, short, Lengths(100, 250), Lengths(60, 120), 80, 0.0, 24)
    played, oracle = both(case)
    assert played.preemptions > 0 and oracle.preemptions > 0
    assert_alike(played, oracle, 0.08)


@pytest.mark.parametrize(("rate", "concurrency"), [(0.0, 1), (0.0, 12), (2.0, 0)])
def test_stages_work_side_by_side_as_the_scheduler_fills_them(
    rate: float, concurrency: int
) -> None:
    rules = replace(PLAIN, stages=2)
    played, oracle = both((SLOW, rules, Lengths(100, 250), Lengths(30, 60), 48, rate, concurrency))
    assert played.rows == oracle.rows
    assert_alike(played, oracle, 0.01)


# --------------------------------------------------------------------------------- what is told

PROMPT, ANSWER, USUAL = Lengths(128, 128), Lengths(32, 32), ServingSplit()
COSTS = StepCosts(
    date="",
    device="",
    kind="cpu",
    memory_bytes=16 << 30,
    flops=1e11,
    bandwidth_bytes=1e10,
    request_s=0.004,
    models=(Measured(Shape.of(MODEL), "float32", SLOW),),
)


def told(
    rate: float | None = None,
    concurrency: int | None = None,
    split: ServingSplit = USUAL,
    prompt: Lengths = PROMPT,
    answer: Lengths = ANSWER,
) -> ServingEstimate:
    load = Workload(prompt, answer, rate, concurrency)
    return estimate_serving(MODEL, "bfloat16", load, split, A100, None)


def test_one_request_alone_takes_its_own_steps() -> None:
    load = Workload(PROMPT, ANSWER, None, 1)
    found = estimate_serving(MODEL, "float32", load, ServingSplit(), COSTS.cluster(), COSTS)
    first_s = SLOW.seconds(128, 1, 0, 128 * 129 // 2, 1)
    next_s = [SLOW.seconds(1, 1, 128 + made, 0, 1) for made in range(1, 32)]
    assert found.ttft_ms.p50 == pytest.approx(1e3 * (first_s + COSTS.request_s))
    assert found.itl_ms.mean == pytest.approx(1e3 * mean(next_s))
    whole_ms = 1e3 * (first_s + sum(next_s) + COSTS.request_s)
    assert found.request_ms.mean == pytest.approx(whole_ms)
    assert found.trust.source == "calibrated"


@pytest.mark.parametrize("concurrency", [1, 7, 40, 100])
def test_so_many_are_in_the_system_as_were_asked_for(concurrency: int) -> None:
    found = told(concurrency=concurrency, answer=Lengths(32, 64))
    assert found.concurrency == pytest.approx(concurrency, rel=0.03)
    by_little = found.requests_per_s * found.request_ms.mean / 1e3
    assert by_little == pytest.approx(concurrency, rel=0.1)


@settings(deadline=None, derandomize=True, max_examples=12)
@given(rate=st.floats(0.5, 60), prompt=st.integers(16, 600), answer=st.integers(2, 80))
def test_littles_law_holds_at_any_load(rate: float, prompt: int, answer: int) -> None:
    prompts, answers = Lengths(prompt, 2 * prompt), Lengths(answer, 2 * answer)
    found = told(rate=rate, prompt=prompts, answer=answers)
    if found.utilization < 0.95:
        by_little = found.requests_per_s * found.request_ms.mean / 1e3
        assert found.concurrency == pytest.approx(by_little, rel=0.2)
        assert found.requests_per_s == pytest.approx(rate, rel=0.15)
        assert found.tokens_per_s == pytest.approx(rate * answer, rel=0.25)


def test_waits_grow_with_the_load_until_they_have_no_end() -> None:
    found = [told(rate=rate) for rate in (1, 10, 30, 60)]
    waits = [one.ttft_ms.mean for one in found]
    assert waits == sorted(waits)
    drowned = told(rate=10_000)
    assert drowned.utilization > 1 and drowned.ttft_ms.p50 == float("inf")
    assert drowned.tokens_per_s == pytest.approx(told(concurrency=200).tokens_per_s, rel=0.15)


def test_twice_the_replicas_do_twice_as_much() -> None:
    alone, both = (told(concurrency=n * 16, split=ServingSplit(replicas=n)) for n in (1, 2))
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s)
    assert both.itl_ms == alone.itl_ms


def test_tensor_ranks_shorten_steps_until_their_sums_take_as_long() -> None:
    wide = MODEL.with_fields(hidden_size=8192, num_attention_heads=64, ffn_hidden_size=4 * 8192)
    load = Workload(PROMPT, ANSWER, None, 8)
    itl = [
        estimate_serving(wide, "bfloat16", load, ServingSplit(tp=tp), A100, None).itl_ms.mean
        for tp in (1, 2, 4)
    ]
    assert itl == sorted(itl, reverse=True)
    small = [told(concurrency=8, split=ServingSplit(tp=tp)).itl_ms.mean for tp in (4, 8)]
    assert small[1] > small[0]


def test_a_longer_stall_is_better_for_first_tokens_and_worse_for_next_ones() -> None:
    load = Workload(Lengths(300, 600), Lengths(40, 80), None, 16)
    short, long = (
        estimate_serving(
            MODEL,
            "float32",
            load,
            ServingSplit(prefill_stall_ms_max=stall),
            COSTS.cluster(),
            COSTS,
        )
        for stall in (5.0, 1000.0)
    )
    assert short.ttft_ms.mean > long.ttft_ms.mean
    assert short.itl_ms.p50 < long.itl_ms.p95


def test_memory_is_what_the_engine_takes() -> None:
    """The runner's own pool and weights, to the byte."""
    tiny = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=640,
    )
    config = ServerConfig(model="", kv_tokens_max=640)
    model = load_model(fresh(tiny, 0), Mesh.single(torch.device("cpu")), dtype="bfloat16")
    runner = Runner(model, config, blocks=blocks_that_fit(model, config), slots=4)
    split = ServingSplit(kv_tokens=640)
    ledger, tokens = serving_memory(tiny, "bfloat16", split, A100)
    assert tokens == (runner.blocks - 1) * config.kv_block_tokens
    assert ledger.kv == sum(runner.pool.layer(layer).nbytes for layer in model.layers)
    assert ledger.weights == sum(one.nbytes for one in model.parameters())


def test_keys_and_values_fill_what_is_left_and_no_more() -> None:
    ledger, tokens = serving_memory(MODEL, "bfloat16", ServingSplit(), A100)
    more, _ = serving_memory(MODEL, "bfloat16", ServingSplit(kv_tokens=tokens + 16), A100)
    assert ledger.verdict == "fits" and more.verdict == "tight"
    split = ServingSplit(tp=2)
    assert serving_memory(MODEL, "bfloat16", split, A100)[1] > 2 * tokens


def test_a_server_without_room_serves_nothing() -> None:
    found = told(concurrency=4, split=ServingSplit(kv_tokens=64))
    assert found.tokens_per_s == 0 and found.utilization == float("inf")
    huge = MODEL.with_fields(num_layers=500, hidden_size=8192, moe_layers=(), kv_channels=0)
    load = Workload(PROMPT, ANSWER, None, 4)
    over = estimate_serving(huge, "float32", load, ServingSplit(), A100, None)
    assert over.memory.verdict == "over" and over.tokens_per_s == 0


@pytest.mark.parametrize("p95", [200, 150, 100])
def test_lengths_have_the_mean_and_the_spread_that_were_said(p95: float) -> None:
    drawn = sorted(Lengths(100, p95).draw(2000, 0))
    assert mean(drawn) == pytest.approx(100, rel=0.01)
    assert drawn[1900] == pytest.approx(p95, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Lengths(0, 1),
        lambda: Lengths(100, 50),
        lambda: Lengths(100, 1000),
        lambda: Workload(PROMPT, ANSWER, None, None),
        lambda: Workload(PROMPT, ANSWER, 1.0, 1),
        lambda: Workload(PROMPT, ANSWER, -1.0, None),
        lambda: Workload(PROMPT, ANSWER, None, 0),
        lambda: Workload(PROMPT, ANSWER, None, 1, adapters=-1),
        lambda: ServingSplit(tp=0),
        lambda: ServingSplit(prefill_stall_ms_max=0),
        lambda: ServingSplit(running_requests_max=600),
        lambda: told(concurrency=1, split=ServingSplit(tp=3)),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert "\n" not in str(caught.value)
