"""Plans of servers with linear adapters: memory, different adapters in a step, step times."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import LinearAdapterSpec, linear_adapter_cost, served_bytes
from gpt.errors import ConfigError
from planning.hardware import Cluster, find_device
from planning.inference.adapter_memory import ServedAdapters
from planning.inference.calibration_file import Calibration, MeasuredModel, ModelShape
from planning.inference.estimate import (
    LengthDistribution,
    ServingEstimate,
    ServingSplit,
    Workload,
    estimate_serving,
    serving_memory,
)
from planning.inference.model_split import ModelSplit
from planning.inference.plan import plan_serving
from planning.inference.requirements import Requirements
from planning.inference.service_levels import ServiceLimits
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.inference.step_pricing import StepPrices, price_adapters, price_steps
from planning.model_presets import find_preset
from serving.config import CacheConfig, ServerConfig
from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import AdapterRef
from serving.scheduler.adapter_memory_pool import pages_for

LLAMA_8B = find_preset("llama3-8b")
H100 = Cluster(find_device("h100"), 1)
UNSPLIT = ModelSplit(1, 1)
RANK_16 = LinearAdapterSpec("lora", 16)
CHAT = Workload(LengthDistribution(60, 60), LengthDistribution(20, 20), None, 8)


def gpt2_costs() -> tuple[GPTConfig, Calibration]:
    """GPT-2 small on a CPU whose steps only read the weights, at 10 GB/s."""
    model = GPTConfig(12, 768, 12, 50257, 1024, dtype="bfloat16")
    steps = StepCostModel(
        rows=PiecewiseLinear(((1.0, 0.017),)),
        draws=PiecewiseLinear(((1.0, 0.0077),)),
        context_s=0.0,
        pair_s=0.0,
        sequence_s=0.0,
        step_s=0.0,
    )
    measured_model = MeasuredModel(ModelShape.from_config(model), "bfloat16", steps)
    return model, Calibration("", "", "cpu", 16 << 30, 4e11, 1e10, models=(measured_model,))


@pytest.mark.parametrize(
    ("count", "distinct_max", "requests", "distinct"),
    [
        (1, None, 32, 1),
        (4, None, 1, 1),
        (4, None, 2, 1.75),
        (10**6, None, 32, 32),
        (10**6, 8, 32, 8),
        (10**6, 8, 4, 4),
    ],
)
def test_requests_choose_adapters_at_random(
    count: int, distinct_max: int | None, requests: int, distinct: float
) -> None:
    adapters = ServedAdapters(RANK_16, count, distinct_max)
    assert adapters.distinct(requests) == pytest.approx(distinct, rel=1e-4)


def test_the_memory_in_mb_holds_as_many_adapters_as_the_servers_pool() -> None:
    adapters = ServedAdapters(RANK_16, 100)
    for split in (UNSPLIT, ModelSplit(4, 2)):
        nbytes = served_bytes(LLAMA_8B, RANK_16, split.tp, split.pp, 2)
        pages = pages_for(AdapterRef("a", 0, "a", rank_bytes=nbytes, linear_count=1))
        for count in (1, 7, 64):
            memory_mb = adapters.memory_mb(LLAMA_8B, "bfloat16", split, count)
            config = CacheConfig(adapter_memory_mb=memory_mb)
            assert count * pages <= config.adapter_pages
            assert config.adapter_pages - count * pages <= 1_000_000 // ADAPTER_PAGE_BYTES + 1
            assert adapters.capacity(LLAMA_8B, "bfloat16", split, memory_mb) == count


def adapted_prices(
    model: GPTConfig, adapters: ServedAdapters, calibration: Calibration | None = None
) -> tuple[StepPrices, StepPrices]:
    cluster = H100 if calibration is None else calibration.as_cluster()
    base = price_steps(model, "bfloat16", UNSPLIT, cluster, calibration)
    adapted = price_adapters(
        base, model, "bfloat16", adapters, UNSPLIT, cluster=cluster, calibration=calibration
    )
    return base, adapted


def test_decoding_reads_the_matrices_of_each_different_adapter_once() -> None:
    """GPT-2 small reads 247 MB of weights per step, and 4.73 MB of an adapter of rank 16."""
    model, calibration = gpt2_costs()
    for requests, count, percent in ((1, 1, 1.91), (8, 8, 15.3), (32, 32, 61.2)):
        adapters = ServedAdapters(RANK_16, 10**6, distinct_max=count)
        base_s, adapted_s = (
            prices.steps.step_seconds(requests, requests, 0, 0, requests)
            for prices in adapted_prices(model, adapters, calibration)
        )
        assert 100 * (adapted_s / base_s - 1) == pytest.approx(percent, rel=0.01)


def test_prefill_pays_for_the_flops_of_the_low_rank_products() -> None:
    base, adapted = adapted_prices(LLAMA_8B, ServedAdapters(RANK_16, 1))
    base_s, adapted_s = (prices.steps.step_seconds(2048, 1, 0, 0, 1) for prices in (base, adapted))
    flops = 2048 * linear_adapter_cost(LLAMA_8B, RANK_16).flops_per_token
    assert adapted_s - base_s == pytest.approx(flops / (0.7 * 989e12), rel=0.01)
    assert adapted.steps.step_seconds(0, 0, 0, 0, 0) == 0


def estimate(adapters: ServedAdapters | None) -> ServingEstimate:
    load = replace(CHAT, served_adapters=adapters)
    return estimate_serving(LLAMA_8B, "bfloat16", load, ServingSplit(), H100, None)


def test_more_different_adapters_and_larger_ranks_make_a_server_slower() -> None:
    speeds = [
        estimate(adapters).tokens_per_s
        for adapters in (
            None,
            ServedAdapters(LinearAdapterSpec("ia3"), 1000),
            ServedAdapters(RANK_16, 1),
            ServedAdapters(RANK_16, 1000),
            ServedAdapters(LinearAdapterSpec("lora", 64), 1000),
        )
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[1] > 0.995 * speeds[0]


def test_adapter_memory_takes_space_from_the_kv_cache() -> None:
    default, default_tokens = serving_memory(LLAMA_8B, "bfloat16", ServingSplit(), H100)
    larger, tokens = serving_memory(
        LLAMA_8B, "bfloat16", ServingSplit(adapter_memory_mb=2000), H100
    )
    assert default.adapters == 256_000_000 // 4096 * 4096
    kv_bytes_per_token = default.kv / (default_tokens + 16)
    lost_tokens = (larger.adapters - default.adapters) / kv_bytes_per_token
    assert default_tokens - tokens == pytest.approx(lost_tokens, abs=16)
    # A server on a CPU uses only the pages that adapters need.
    split = ServingSplit(kv_tokens=1024)
    assert serving_memory(LLAMA_8B, "bfloat16", split, H100, on_cpu=True)[0].adapters == 0


def requirements_for(adapters: ServedAdapters) -> Requirements:
    load = replace(CHAT, concurrency=32, served_adapters=adapters)
    return Requirements(LLAMA_8B, "bfloat16", load, ServiceLimits(), H100)


def test_the_plan_sets_the_memory_that_running_requests_need(tmp_path: Path) -> None:
    requirements = requirements_for(ServedAdapters(RANK_16, 100))
    plan = plan_serving(requirements)
    assert plan.best is not None and plan.best.memory is not None
    settings = yaml.safe_load(plan.settings_yaml)
    batch = settings["running_requests_max"]
    nbytes = served_bytes(LLAMA_8B, RANK_16, 1, 1, 2)
    assert settings["adapter_memory_mb"] == pytest.approx(batch * nbytes / 1e6, rel=0.01)
    file = tmp_path / "serve.yaml"
    file.write_text(plan.settings_yaml)
    written = ServerConfig.read(str(file), {}).cache_config
    assert written.adapter_memory_mb == settings["adapter_memory_mb"]
    assert f"holds {batch}, and running requests use up to {batch}; all 100 adapters need" in (
        " ".join(plan.advice)
    )
    assert "100 adapters: LoRA of rank 16 on all linears" in plan.request[1]


def test_the_servers_default_memory_is_enough_for_few_adapters() -> None:
    plan = plan_serving(requirements_for(ServedAdapters(RANK_16, 3)))
    assert "adapter_memory_mb" not in yaml.safe_load(plan.settings_yaml)
    assert any("adapter_memory_mb 256 holds 3" in line for line in plan.advice)


def test_linears_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear_fc3"):
        requirements_for(ServedAdapters(LinearAdapterSpec("lora", 16, ("linear_fc3",))))
