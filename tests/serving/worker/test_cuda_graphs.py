"""CUDA graphs: replayed steps, padded and with block tables on the device, equal eager steps.

On a CPU the capturer returns the work itself, so a replay runs it again on the same buffers. Real
CUDA graphs are tested in tests/gpu/test_cuda_graphs.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from gpt.errors import ConfigError
from gpt.linear.grouped_experts import group_experts
from gpt.model.moe import MoELayer
from gpt.parallel.mesh import ProcessGroup
from gpt.sampling_params import SamplingParams
from serving.messages import AdapterRowsWrite, BlockTableUpdate, SlotInit, Step
from serving.worker import cuda_graphs
from serving.worker.model_runner import ModelRunner
from tests.support.batch_runs import SIZES, run_and_check
from tests.support.capturable_attention import CapturableAttention
from tests.support.engine_scenarios import (
    AdapterFiles,
    Scenario,
    draw_scenario,
    preemption_scenario,
)
from tests.support.graph_runners import CONFIG, eager_capturer, make_runner, run_step, sampled_token
from tests.support.graph_steps import PROMPT, RULES, V, next_step, prefill_step
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build
from tests.support.stub_collectives import StubGroup, stub_mesh
from tests.support.suites import cases_by_suite


@pytest.fixture(scope="module")
def adapter_files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return AdapterFiles.make(tmp_path_factory.mktemp("adapters"), CLASSIC.hidden_size, SIZES)


def eager_and_graph_runner(name: str) -> tuple[ModelRunner, ModelRunner]:
    return make_runner(name, None), make_runner(name, eager_capturer)


def with_last_sampled_tokens(step: Step) -> Step:
    """The step with -1 as every input: the slot's last sampled token."""
    return msgspec.structs.replace(step, token_ids=[-1] * len(step.token_ids))


@pytest.mark.parametrize("name", ["classic", "modern", "odd"])
@pytest.mark.parametrize(
    "rules", [RULES, RULES[-1:] * 3, RULES[:1] * 2], ids=["all", "ban", "best"]
)
def test_a_replayed_step_equals_an_eager_step(name: str, rules: list[SamplingParams]) -> None:
    eager, graph = eager_and_graph_runner(name)
    step = prefill_step(rules)
    expected = run_step(eager, step)
    replayed = run_step(graph, step)
    for _ in range(6):
        assert replayed.tokens == expected.tokens
        assert replayed.faults == expected.faults
        assert replayed.stuck == expected.stuck
        for score, expected_score in zip(replayed.scores, expected.scores, strict=True):
            assert abs(score.logprob - expected_score.logprob) < 1e-9
            assert score.rank == expected_score.rank
        step = next_step(step, expected, sampled_token)
        expected = run_step(eager, step)
        replayed = run_step(graph, step)
        assert not expected.replayed
        assert replayed.replayed
    for layer in eager.model.layers:
        blocks = graph.pool.layer(layer)
        expected_blocks = eager.pool.layer(layer)
        assert len(blocks) == len(expected_blocks) + 1  # Padding rows write to the last block.
        assert (blocks[:-1] - expected_blocks).abs().max() < 1e-9
        assert not blocks[0].any()


def test_last_sampled_tokens_stay_on_the_device() -> None:
    eager, graph = eager_and_graph_runner("classic")
    asynchronous = make_runner("classic", None, CONFIG.with_fields(step_ahead="on"))
    step = prefill_step(RULES[:3])
    outcome = run_step(eager, step)
    for runner in (graph, asynchronous):
        run_step(runner, step)
    # Prefill is not replayed; with asynchronous scheduling its tokens reach the device, too.
    step = next_step(step, outcome, sampled_token)
    outcome = run_step(eager, step)
    assert run_step(graph, step).tokens == outcome.tokens
    assert run_step(asynchronous, with_last_sampled_tokens(step)).tokens == outcome.tokens
    for _ in range(3):
        step = next_step(step, outcome, sampled_token)
        outcome = run_step(eager, step)
        for runner in (graph, asynchronous):
            assert run_step(runner, with_last_sampled_tokens(step)).tokens == outcome.tokens


def test_a_step_can_be_read_after_the_next_is_launched() -> None:
    asynchronous = make_runner("classic", eager_capturer, CONFIG.with_fields(step_ahead="on"))
    eager = make_runner("classic", None)
    step = prefill_step(RULES[:3])
    outcome = run_step(eager, step)
    run_step(asynchronous, step)
    step = next_step(step, outcome, sampled_token)
    following = with_last_sampled_tokens(next_step(step, outcome, sampled_token))
    first_launch = asynchronous.launch(step)
    second_launch = asynchronous.launch(following)
    assert first_launch is not None
    assert second_launch is not None
    first = first_launch()
    second = second_launch()
    outcome = run_step(eager, step)
    assert first.tokens == outcome.tokens
    step = next_step(step, outcome, sampled_token)
    assert second.tokens == run_step(eager, step).tokens


def test_virtual_tokens_replay_and_nan_rows_fail_alone() -> None:
    ones = torch.ones(1, CLASSIC.hidden_size)
    nans = torch.full((1, CLASSIC.hidden_size), torch.nan)
    adapter_rows = torch.cat([ones, nans]).numpy().tobytes()
    input_ids = [V + 2, V + 3, 5, V + 3]
    outcomes = []
    for capturer in (None, eager_capturer):
        runner = make_runner("classic", capturer)
        step = prefill_step(RULES[:4])
        prefill_outcome = run_step(runner, step)
        run_step(runner, Step(2, adapter_writes=[AdapterRowsWrite(2, "rows", adapter_rows)]))
        step = next_step(step, prefill_outcome, lambda slot, token: input_ids[slot])
        step.draws[3] = False  # A row that does not sample is checked, too.
        outcomes.append(run_step(runner, step))
    eager, replayed = outcomes
    assert eager.faults == replayed.faults == [1, 3]
    assert len(eager.tokens) == len(replayed.tokens) == 3
    assert eager.tokens[0] == replayed.tokens[0]
    assert eager.tokens[2] == replayed.tokens[2]


def test_nan_logits_fail_only_sequences_that_sample() -> None:
    outcomes = []
    for capturer in (None, eager_capturer):
        runner = make_runner("modern", capturer)
        step = prefill_step(RULES[:4])
        prefill_outcome = run_step(runner, step)
        runner.model.head_weight.mul_(1e308)
        step = next_step(step, prefill_outcome, sampled_token)
        step.draws[2] = False
        outcomes.append(run_step(runner, step))
    assert outcomes[0].faults == outcomes[1].faults == [0, 1, 3]


def test_more_table_changes_than_packed_columns_are_copied() -> None:
    eager, graph = eager_and_graph_runner("modern")
    step = prefill_step([SamplingParams()] * 5)
    new_blocks = [list(range(31 + 3 * slot, 34 + 3 * slot)) for slot in range(5)]
    updates = [BlockTableUpdate(slot, 0, blocks) for slot, blocks in enumerate(new_blocks)]
    step = msgspec.structs.replace(step, block_table_updates=updates)
    outcome = run_step(eager, step)
    run_step(graph, step)
    decode = next_step(step, outcome, sampled_token)
    # Only slot 2 continues; the table changes of the others are copied later.
    single_decode = Step(3, [2], decode.past[2:3], [1], decode.token_ids[2:3], [True], [0])
    assert run_step(graph, single_decode).tokens == run_step(eager, single_decode).tokens
    assert run_step(graph, decode).tokens == run_step(eager, decode).tokens


FAST_CONFIGS = ("classic", "experts")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST_CONFIGS else pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_replayed_steps_give_the_tokens_of_single_requests(
    name: str, adapter_files: AdapterFiles, tmp_path: Path
) -> None:
    scenarios = [
        with_graphs(draw_scenario(name, 0, adapter_files)),
        with_graphs(preemption_scenario(name, adapter_files)),
    ]
    coverage = run_and_check(scenarios, (1, 1), tmp_path, adapter_files)
    assert coverage.replayed > 0 and coverage.early > 0
    assert coverage.preemptions > 0
    assert coverage.cached > 0
    assert coverage.cancelled > 0


def with_graphs(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        settings=scenario.settings | {"step_ahead": "on", "cuda_graph_rows_max": 3},
        captured=True,
    )


def test_pipeline_stages_replay_their_layers(adapter_files: AdapterFiles, tmp_path: Path) -> None:
    scenario = replace(preemption_scenario("modern", adapter_files), captured=True)
    assert run_and_check([scenario], (1, 2), tmp_path, adapter_files).replayed > 0


# The other networks have no operation that tensor ranks compute otherwise than these.
SPLIT_CONFIGS = ("modern", "odd", "experts", "post norms", "sinks", "ALiBi")


@pytest.mark.parametrize(
    "name", cases_by_suite(SPLIT_CONFIGS[1:4], SPLIT_CONFIGS[:1] + SPLIT_CONFIGS[4:])
)
def test_tensor_ranks_replay_steps_with_the_tokens_of_single_requests(
    name: str, adapter_files: AdapterFiles, tmp_path: Path
) -> None:
    """Steps are planned early: the input tokens of a step are only on the first rank."""
    scenarios = [
        with_graphs(draw_scenario(name, 0, adapter_files)),
        with_graphs(preemption_scenario(name, adapter_files)),
    ]
    coverage = run_and_check(scenarios, (2, 1), tmp_path, adapter_files)
    assert coverage.replayed > 0 and coverage.early > 0
    assert coverage.preemptions > 0


def test_graph_sizes_are_few_and_reach_the_largest_batch() -> None:
    def sizes(running_requests: int, graph_rows_max: int = 256) -> tuple[int, ...]:
        config = CONFIG.with_fields(
            running_requests_max=running_requests,
            step_tokens_max=4096,
            cuda_graph_rows_max=graph_rows_max,
        )
        return cuda_graphs.graph_sizes(config.scheduler_config)

    assert sizes(1) == (1,)
    assert sizes(6) == (1, 2, 4, 6)
    assert sizes(20) == (1, 2, 4, 8, 16, 20)
    assert sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert sizes(1000)[-2:] == (240, 256)
    assert sizes(1000, 3) == (1, 2, 3)


def test_only_decode_steps_are_replayed() -> None:
    runner = make_runner("classic", eager_capturer, CONFIG.with_fields(cuda_graph_rows_max=3))
    assert not run_step(runner, prefill_step(RULES[:2])).replayed
    decode = Step(2, [0], [9], [1], [5], [True], [0])
    assert run_step(runner, decode).replayed
    slot_init = SlotInit(1, SamplingParams(prompt_logprobs=0), PROMPT, [])
    prompt_scores = Step(3, [1], [7], [1], [5], [False], [1], slot_inits=[slot_init])
    assert not run_step(runner, prompt_scores).replayed
    with_draft = Step(4, [0], [10], [2], [5, 6], [True], [0], draft_counts=[1])
    assert not run_step(runner, with_draft).replayed
    run_step(runner, prefill_step(RULES[:4]))
    four_rows = Step(5, [0, 1, 2, 3], [9, 8, 7, 6], [1] * 4, [5] * 4, [True] * 4, [0] * 4)
    assert not run_step(runner, four_rows).replayed


def test_the_reason_without_graphs_is_reported() -> None:
    model = build(MODERN)
    reason = cuda_graphs.unsupported_reason(model, CONFIG.scheduler_config)
    assert reason == "the device is not a CUDA device"
    off = CONFIG.with_fields(cuda_graphs="off").scheduler_config
    assert cuda_graphs.unsupported_reason(model, off) == "cuda_graphs is off"
    assert cuda_graphs.graph_bytes_max(model, CONFIG.scheduler_config) == 0


def test_ranks_that_communicate_through_the_host_have_no_graphs() -> None:
    class Gloo(StubGroup):
        def name(self) -> str:
            return "gloo"

    model = build(MODERN, attention_backend=CapturableAttention())
    mesh = stub_mesh(torch.device("cuda"), 2)
    for group, reason in (
        (Gloo(), "the ranks share a device, and communicate through host memory"),
        (StubGroup(), None),
    ):
        model.mesh = replace(mesh, tp_group=cast(ProcessGroup, group))
        assert cuda_graphs.unsupported_reason(model, CONFIG.scheduler_config) == reason


def test_experts_are_captured_only_if_no_layer_reads_values_on_the_host() -> None:
    model = build(EXPERTS, dtype=torch.bfloat16)
    model.mesh = replace(model.mesh, device=torch.device("cuda"))
    model.attention_backend = CapturableAttention()
    layers = [layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, MoELayer)]
    for layer in layers:
        reason = cuda_graphs.unsupported_reason(model, CONFIG.scheduler_config)
        assert reason == "MoE routing reads the number of rows of each expert on the host"
        group_experts(layer)
    assert cuda_graphs.unsupported_reason(model, CONFIG.scheduler_config) is None


@pytest.mark.parametrize(("name", "word"), [("cuda_graphs", "on"), ("step_ahead", "yes")])
def test_an_unknown_word_in_a_setting_is_refused(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{word}'; choose one of: auto"):
        CONFIG.with_fields(**{name: word})


def test_async_scheduling_needs_one_stage() -> None:
    with pytest.raises(ConfigError, match=r"2 pipeline stages.*set step_ahead: auto"):
        CONFIG.with_fields(step_ahead="on", pp=2)
    assert CONFIG.with_fields(step_ahead="on", tp=2).uses_async_scheduling("cpu")
    assert CONFIG.with_fields(step_ahead="auto").uses_async_scheduling("cuda")
    assert not CONFIG.with_fields(step_ahead="auto").uses_async_scheduling("cpu")
    assert not CONFIG.with_fields(step_ahead="auto", pp=2).uses_async_scheduling("cuda")
    assert not CONFIG.with_fields(speculate_tokens_max=3).uses_async_scheduling("cuda")
