"""Warm-up steps fit into the KV pool, leave it cleared, and capture every CUDA graph."""

import pytest

from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from serving.config import ServerConfig
from serving.engine_core.warmup import graph_capture_steps, warmup_steps
from serving.messages import Outcome, Step
from serving.worker.model_runner import ModelRunner
from tests.support.capturable_attention import CapturableAttention
from tests.support.engine_scenarios import build_runner
from tests.support.graph_steps import PROMPT, RULES, next_step, prefill_step
from tests.support.models import CLASSIC, build

BLOCK_TOKENS = 4
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK_TOKENS,
    kv_tokens_max=200,
    running_requests_max=6,
    step_tokens_max=60,
    adapter_rows_max=8,
)
GREEDY = RULES[0]


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


def run_step(runner: ModelRunner, step: Step) -> Outcome:
    outcome = runner.run_step(step)
    assert outcome is not None
    assert outcome.faults == []
    assert outcome.seconds > 0
    for layer in runner.model.layers:
        assert not runner.pool.layer(layer)[0].any(), "block 0 belongs to no sequence"
    return outcome


@pytest.mark.parametrize("kv_tokens", [16, 100, 400])
@pytest.mark.parametrize("step_tokens", [6, 40, 500])
def test_warmup_steps_fit_and_clear_their_blocks(
    model: GPT, step_tokens: int, kv_tokens: int
) -> None:
    config = CONFIG.with_fields(step_tokens_max=step_tokens, kv_tokens_max=kv_tokens)
    runner = build_runner(model, config)
    steps = warmup_steps(config.scheduler_config, config.cache_config.kv_block_tokens, runner)
    assert sum(steps[0].lengths) == min(step_tokens, kv_tokens, 6 * CLASSIC.max_position_embeddings)
    assert len(steps[2].slots) == min(6, kv_tokens // BLOCK_TOKENS)
    for step in steps:
        run_step(runner, step)
    for layer in model.layers:
        assert not runner.pool.layer(layer).any()
    # A sequence that reuses the slots and blocks of the warm-up gets the reference's tokens.
    prefill = prefill_step([GREEDY], blocks=3)
    first = run_step(runner, prefill)
    second = run_step(runner, next_step(prefill, first, lambda slot, token: token))
    alone = generate(model, [PROMPT], GREEDY)[0].token_ids
    assert [*first.tokens, *second.tokens] == alone[:2]


def test_capture_steps_run_largest_size_first() -> None:
    runner = build_runner(
        build(CLASSIC, attention_backend=CapturableAttention()), CONFIG, recorded=True
    )
    steps = graph_capture_steps(CONFIG.cache_config.kv_block_tokens, runner)
    assert [len(step.slots) for step in steps] == [6, 4, 2, 1]
    assert all(run_step(runner, step).replayed for step in steps)
