"""KV cache capacity: the planner's numbers are those of the server's scheduler and block pool."""

from random import Random
from statistics import mean

import pytest

from gpt.config import GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.kv_groups import UNLIMITED_TOKENS, SequenceBlocks
from planning.inference.kv_capacity import (
    kv_tokens_for_requests,
    request_tokens_max,
    requests_that_fit,
    sequence_blocks,
)
from planning.inference.reference_simulator import make_scheduler, simulate_with_scheduler
from planning.inference.simulator import SchedulerRules, SimulatedRequest, make_simulation
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.model_presets import find_preset
from serving.memory_budget import KV_BLOCK_TOKENS
from tests.support.fake_ranks import text_ids
from tests.support.models import CLASSIC
from tests.support.scheduler_harness import SchedulerHarness

STEPS = StepCostModel(
    rows=PiecewiseLinear(((1.0, 0.01), (512.0, 0.2))),
    draws=PiecewiseLinear(((1.0, 0.001),)),
    context_s=1e-6,
    pair_s=1e-8,
    sequence_s=0.0,
    step_s=0.0,
)


def random_model(draw: Random) -> GPTConfig:
    layers = draw.randint(1, 8)
    window = draw.choice([None, 1, 17, 40, 100])
    window_layers = tuple(draw.random() < 0.6 for _ in range(layers)) if window else ()
    return CLASSIC.with_fields(
        num_layers=layers, moe_layers=(), window_size=window, window_layers=window_layers
    )


def rules_for(model: GPTConfig, kv_tokens: int, step_tokens_max: int = 512) -> SchedulerRules:
    return SchedulerRules(
        running_requests_max=16,
        step_tokens_max=step_tokens_max,
        prefill_stall_s=1.0,
        kv_tokens=kv_tokens,
        windows=sequence_blocks(model).windows,
        attention_span=attention_span(model),
    )


def equal_requests(count: int, prompt_tokens: int, tokens: int) -> list[SimulatedRequest]:
    """Requests that arrive together and have `tokens` tokens in the end."""
    return [
        SimulatedRequest(number, 0.0, prompt_tokens, tokens - prompt_tokens)
        for number in range(count)
    ]


def run_together(rules: SchedulerRules, requests: list[SimulatedRequest]) -> bool:
    """Whether the scheduler runs the requests in the same steps, without preemption.

    The simulator must run them in the same way.
    """
    scheduled = simulate_with_scheduler(STEPS, rules, requests)
    simulated = make_simulation(STEPS, rules).run_open_loop(requests)
    for name in ("steps", "tokens", "preemptions"):
        assert getattr(simulated, name) == getattr(scheduled, name)
    ends = {request.end_s for request in scheduled.requests}
    return len(ends) == 1 and not scheduled.preemptions


@pytest.mark.parametrize("seed", range(12))
def test_exactly_the_planned_number_of_requests_runs_at_once(seed: int) -> None:
    draw = Random(seed)
    model = random_model(draw)
    window = model.window_size or 0
    # At its end, the window of a request has been at all offsets in a block.
    tokens = window + draw.randint(50, 90)
    prompt_tokens = draw.randint(1, KV_BLOCK_TOKENS)
    kv_tokens = draw.randint(2, 8) * tokens
    fitting = requests_that_fit(model, kv_tokens, tokens)
    assert fitting >= 1
    # All prompts are in the first step.
    rules = rules_for(model, kv_tokens, step_tokens_max=512)
    if fitting < rules.running_requests_max:
        assert run_together(rules, equal_requests(fitting, prompt_tokens, tokens))
        assert not run_together(rules, equal_requests(fitting + 1, prompt_tokens, tokens))


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_request_runs_and_a_longer_one_is_refused(seed: int) -> None:
    draw = Random(seed)
    model = random_model(draw)
    kv_tokens = draw.randint(1, 120)
    longest = request_tokens_max(model, kv_tokens)
    rules = rules_for(model, kv_tokens)
    scheduler = make_scheduler(rules)
    if longest >= UNLIMITED_TOKENS:
        assert scheduler.sequence_kv_tokens == UNLIMITED_TOKENS
        longest = 500
    else:
        assert scheduler.sequence_kv_tokens == longest - 1
    prompt_tokens = draw.randint(1, longest - 1)
    assert run_together(rules, equal_requests(1, prompt_tokens, longest))
    if longest < 500:
        with pytest.raises(AssertionError, match="KV cache allows at most"):
            simulate_with_scheduler(STEPS, rules, equal_requests(1, prompt_tokens, longest + 1))


@pytest.mark.parametrize("seed", range(6))
def test_requests_run_in_the_kv_cache_that_is_planned_for_them(seed: int) -> None:
    """A larger KV cache makes them at most 2 % faster.

    Their prompts arrive together, and are computed in several steps.
    """
    draw = Random(seed)
    model = random_model(draw)
    prompt_tokens, tokens, count = draw.randint(30, 200), draw.randint(201, 300), draw.randint(1, 6)
    step_tokens_max = draw.choice([16, 64, 256])
    kv_tokens = kv_tokens_for_requests(model, count, tokens, step_tokens_max)
    runs = [
        simulate_with_scheduler(
            STEPS,
            rules_for(model, size, step_tokens_max),
            equal_requests(count, prompt_tokens, tokens),
        )
        for size in (kv_tokens, 100 * kv_tokens)
    ]
    assert runs[0].preemptions == 0
    # Prompts in one step may wait for each other's blocks for a few steps.
    mean_ends = [mean(request.end_s for request in run.requests) for run in runs]
    assert mean_ends[0] <= 1.02 * mean_ends[1]


@pytest.mark.parametrize("seed", range(4))
def test_sequences_hold_the_counted_blocks_at_each_step(seed: int) -> None:
    draw = Random(seed)
    blocks = sequence_blocks(random_model(draw))
    harness = SchedulerHarness(
        windows=blocks.windows,
        blocks=draw.choice([400, 4000]),
        kv_block_tokens=KV_BLOCK_TOKENS,
        step_tokens_max=64,
        prefix_cache=False,
    )
    for number in range(5):
        harness.submit(text_ids(draw.randint(1, 150), number), new=draw.randint(1, 80))
    compared_steps = 0
    while step := harness.plan():
        stats = harness.scheduler.stats
        if len(step.slots) == stats.running:
            spans = zip(step.past, step.lengths, strict=True)
            held = sum(blocks.held(past + length, past) for past, length in spans)
            assert stats.blocks_held == held == sum(stats.group_blocks_held)
            for window, blocks_held in zip(blocks.windows, stats.group_blocks_held, strict=True):
                group = SequenceBlocks((window,), KV_BLOCK_TOKENS)
                spans = zip(step.past, step.lengths, strict=True)
                assert blocks_held == sum(group.held(past + n, past) for past, n in spans)
            compared_steps += 1
        harness.commit()
    assert compared_steps > 10


@pytest.mark.parametrize(
    ("name", "blocks_of_100k"),
    [
        # 12 layers with a window of 128 tokens, which span at most 9 blocks, and 12 without.
        ("gpt-oss-20b", 6250 + 9),
        # 10 layers without a window in one group, and 52 layers with a window of 1024 tokens, which
        # span at most 65 blocks, in 6 groups.
        ("gemma3-27b", 6250 + 6 * 65),
        ("llama3-8b", 6250),
    ],
)
def test_requests_of_published_models(name: str, blocks_of_100k: int) -> None:
    model = find_preset(name)
    groups = len(sequence_blocks(model).windows)
    kv_tokens = 1_000_000
    requests = requests_that_fit(model, kv_tokens, 100_001)
    assert requests == groups * kv_tokens // KV_BLOCK_TOKENS // blocks_of_100k
    assert requests >= groups * 0.93 * 10 - 1
