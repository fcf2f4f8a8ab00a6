"""Warm-up steps fit into the KV pool, leave it cleared, and capture every CUDA graph in time."""

import pytest

from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from serving.config import ServerConfig
from serving.engine_core import engine_loop
from serving.engine_core.engine_loop import build_engine_loop
from serving.engine_core.warmup import warmup_steps
from serving.messages import Outcome, Step, StepSize
from serving.worker.model_runner import ModelRunner, PendingOutcome
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


@pytest.mark.parametrize(("budget_s", "captures"), [(60.0, 4), (0.0, 0)])
def test_the_warm_up_captures_graphs_only_within_its_budget_and_without_sequences(
    budget_s: float, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "CAPTURE_BUDGET_S", budget_s)
    model = build(CLASSIC, attention_backend=CapturableAttention())
    runner = build_runner(model, CONFIG, captured=True)
    steps: list[Step] = []
    launch = runner.launch

    def record_and_launch(step: Step) -> PendingOutcome | None:
        steps.append(step)
        return launch(step)

    monkeypatch.setattr(runner, "launch", record_and_launch)
    loop = build_engine_loop(runner, CONFIG, lambda _: None)
    loop.warm_up()
    assert [step.slots for step in steps if step.may_capture_graph] == [[]] * captures
    assert runner.has_missing_graphs == (captures == 0)
    loop._launch(prefill_step([GREEDY]), StepSize())
    assert not steps[-1].may_capture_graph
