"""Screened argmax returns the same token as the argmax of all logits, also for ties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.cpu import exact_argmax, packed_linear
from gpt.cpu.exact_argmax import ROWS_MAX, ScreenedArgmax
from gpt.cpu.int8_linear import has_int8_gemm
from gpt.cpu.packed_linear import PackedLinear
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.model_runner import ModelRunner
from tests.support.models import CLASSIC, CONFIGS, build
from tests.support.packed_models import disable_screening, screened_argmax

if not has_int8_gemm():
    pytest.skip("this machine has no int8 GEMM", allow_module_level=True)


def packed_and_screened(weight: Tensor) -> tuple[PackedLinear, ScreenedArgmax | None]:
    """A packed head, and its screened argmax unless the weight has no valid bounds."""
    memory = torch.empty(packed_linear.packed_numel(weight), dtype=torch.bfloat16)
    head = PackedLinear(weight, memory, fp32_output=True)
    return head, ScreenedArgmax.build(weight, head)


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([(2, 1), (64, 33), (70, 100), (130, 700), (514, 320)]),
    st.one_of(st.integers(1, 14), st.integers(1, ROWS_MAX)),
    st.sampled_from(["similar", "repeated", "one bit", "far apart", "integers", "outliers"]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_screened_argmax_is_the_first_of_the_largest_logits(
    seed: int, shape: tuple[int, int], rows: int, kind: str, threads: int
) -> None:
    channels, columns = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(columns, channels, generator=generator)
    x = torch.randn(rows, channels, generator=generator)
    if kind == "similar":
        weight = weight[:1] + weight * 1e-3
    elif kind == "repeated":
        weight = weight[torch.randint(max(1, columns // 3), (columns,), generator=generator)]
    elif kind == "far apart":
        order = torch.randperm(columns, generator=generator)
        weight = weight * torch.logspace(6, -12, columns)[order][:, None]
        x = x * torch.logspace(-6, 6, rows)[:, None]
    elif kind == "integers":
        weight, x = weight.round(), x.round()
        x[:, 0] = weight[:, 0] = 1
    elif kind == "outliers":
        x[:, :: channels // 2] *= 1000
        weight[:, :: channels // 2] *= 50
    weight, x = weight.bfloat16(), x.bfloat16()
    if kind == "one bit":
        weight = weight[:1].repeat(columns, 1)
        changed = torch.randint(channels, (columns,), generator=generator)
        weight.view(torch.int16)[torch.arange(columns), changed] += 1
    head, screened = packed_and_screened(weight)
    assert screened is not None
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = screened.argmax(x)
    finally:
        torch.set_num_threads(threads_before)
    assert got is not None
    assert torch.equal(got, head(x, None, None, None).argmax(-1))


@pytest.mark.parametrize("rows", [2, 40])
def test_screening_computes_few_panels(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(20_000, 768, generator=generator).bfloat16()
    head, screened = packed_and_screened(weight)
    assert screened is not None
    for _ in range(5):
        x = torch.randn(rows, 768, generator=generator).bfloat16()
        got = screened.argmax(x)
        assert got is not None
        assert torch.equal(got, head(x, None, None, None).argmax(-1))
    assert (
        screened.panels_scored / screened.steps / rows < 0.02 * 20_000 / packed_linear.PANEL_COLUMNS
    )


@pytest.mark.parametrize("element", [float("nan"), float("inf"), 0.0, 1e-30, 1e20])
def test_rows_without_valid_bounds_return_none(element: float) -> None:
    generator = torch.Generator().manual_seed(1)
    _, screened = packed_and_screened(torch.randn(9000, 64, generator=generator).bfloat16())
    assert screened is not None
    x = torch.randn(3, 64, generator=generator).bfloat16()
    assert screened.argmax(x) is not None
    x[1] = element
    assert screened.argmax(x) is None
    assert screened.argmax(x[:1]) is not None


@pytest.mark.parametrize("element", [float("nan"), float("-inf"), 1e30])
def test_a_head_without_valid_bounds_is_not_screened(element: float) -> None:
    weight = torch.ones(5000, 8).bfloat16()
    weight[4500, 3] = element
    assert packed_and_screened(weight)[1] is None
    assert packed_and_screened(torch.zeros(100, 8).bfloat16())[1] is None


def test_screening_pauses_longer_each_time_it_is_not_faster() -> None:
    head, screened = packed_and_screened(torch.ones(640, 64).bfloat16())
    assert screened is not None
    x = torch.ones(1, 64).bfloat16()
    step_count = 3 * exact_argmax.PAUSE_STEPS_MIN + 3
    screened_steps = [step for step in range(step_count) if screened.argmax(x) is not None]
    assert screened_steps == [
        0,
        exact_argmax.PAUSE_STEPS_MIN + 1,
        3 * exact_argmax.PAUSE_STEPS_MIN + 2,
    ]
    assert head is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_the_same_with_and_without_screening(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    pack_weights(model)
    screened = screened_argmax(model)
    assert screened is not None
    tokens_by_screening = {}
    for is_screened in (True, False):
        if not is_screened:
            disable_screening(model)
        config = ServerConfig("model", kv_tokens_max=64, running_requests_max=2)
        runner = ModelRunner(
            model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=config.uses_async_scheduling("cpu"),
            blocks=5,
            slots=2,
        )
        ids, past, tokens = [5, 6, 7, 8], [0, 0], []
        for number in range(12):
            slot_inits = (
                [SlotInit(slot, SamplingParams(), [5, 6], []) for slot in (0, 1)]
                if not number
                else []
            )
            tables = [BlockTableUpdate(slot, 0, [1 + 2 * slot, 2 + 2 * slot]) for slot in (0, 1)]
            length = len(ids) // 2
            outcome = runner.run_step(
                Step(
                    number,
                    slots=[0, 1],
                    past=past,
                    lengths=[length] * 2,
                    token_ids=ids,
                    draws=[True] * 2,
                    prompt_score_counts=[0, 0],
                    slot_inits=slot_inits,
                    block_table_updates=tables,
                )
            )
            assert outcome is not None and not outcome.faults
            past = [count + length for count in past]
            ids = outcome.tokens
            tokens += ids
        tokens_by_screening[is_screened] = tokens
    assert tokens_by_screening[True] == tokens_by_screening[False]
    assert screened.steps > 0


def test_sampling_and_logprobs_use_all_logits() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    pack_weights(model)
    screened = screened_argmax(model)
    assert screened is not None
    config = ServerConfig("model", kv_tokens_max=64, running_requests_max=2)
    runner = ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=False,
        blocks=5,
        slots=2,
    )
    for number, params in enumerate([SamplingParams(temperature=1.0), SamplingParams(logprobs=2)]):
        outcome = runner.run_step(
            Step(
                number,
                slots=[0],
                past=[0],
                lengths=[2],
                token_ids=[5, 6],
                draws=[True],
                prompt_score_counts=[0],
                slot_inits=[SlotInit(0, params, [5, 6], [])],
                block_table_updates=[BlockTableUpdate(0, 0, [1])],
            )
        )
        assert outcome is not None and len(outcome.tokens) == 1
    assert screened.steps == 0


def test_a_non_finite_row_is_reported_as_a_fault() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    pack_weights(model)
    assert model.embedding is not None
    with torch.no_grad():
        model.embedding.weight_shard[9] = float("nan")
    config = ServerConfig("model", kv_tokens_max=64, running_requests_max=2)
    runner = ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=False,
        blocks=5,
        slots=2,
    )
    outcome = runner.run_step(
        Step(
            1,
            slots=[0, 1],
            past=[0, 0],
            lengths=[1, 1],
            token_ids=[5, 9],
            draws=[True, True],
            prompt_score_counts=[0, 0],
            slot_inits=[SlotInit(slot, SamplingParams(), [5], []) for slot in (0, 1)],
            block_table_updates=[BlockTableUpdate(slot, 0, [1 + slot]) for slot in (0, 1)],
        )
    )
    assert outcome is not None
    assert outcome.faults == [1]
