"""Static batch estimates: published latencies and memory, left-out models, properties, errors.

The published rows are the oracle. The fit is repeated, so the constants cannot be edited by hand.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.hardware import DEVICES, Cluster, find_device
from planning.published.faster_transformer import FITTED, KERNEL_SPEEDS
from planning.published.inference_runs import latency_cases, memory_cases, out_of_memory_cases
from planning.published.static_batch import (
    StaticEstimate,
    StaticJob,
    estimate_static,
    fit_advice_lines,
)

NODE = Cluster(find_device("a100-80g"), 8)
NODES = Cluster(find_device("a100-80g"), 64)
GPT_20B = GPTConfig(44, 6144, 48, 51200, 2048)
GPT_175B = GPTConfig(96, 12288, 96, 51200, 2048)
LLAMA_70B = GPTConfig(
    num_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    ffn_hidden_size=28672,
    vocab_size=32000,
    max_position_embeddings=4096,
    gated=True,
    position_embedding_type="rope",
)


# One is slow compared with its source's other table, the others are of later versions and machines.
LEFT_OUT_ROWS = {
    "89B, 128 in and 8 out",
    "530B, tensor parallel across nodes, later",
    "20B, later",
    "13B on a smaller card, by phase",
}


def job(**changes: Any) -> StaticJob:
    return replace(StaticJob(GPT_20B, 60, 20, 8, tp=4), **changes)


def test_published_latencies_are_within_seven_percent_on_average() -> None:
    sizes = sorted(abs(case.error()) for case in latency_cases())
    assert len(sizes) == 261
    assert mean(sizes) < 0.04, "the target is 0.07; the fit had 0.031"
    assert sizes[int(0.9 * len(sizes))] < 0.07
    for table in {case.table for case in latency_cases()}:
        errors = [abs(case.error()) for case in latency_cases() if case.table == table]
        assert mean(errors) < (0.2 if table in LEFT_OUT_ROWS else 0.1), table


def test_inference_constants_equal_the_fit() -> None:
    from planning.published.fit_inference import fit_constants

    for name, value in asdict(fit_constants(latency_cases())).items():
        assert getattr(FITTED, name) == pytest.approx(value, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "error_max"),
    [
        *(("1.3b", 0.06), ("13b", 0.15), ("20b", 0.05), ("89b", 0.12), ("310b", 0.04)),
        *(("530b", 0.06), ("pipelines", 0.04), ("one GPU", 0.05)),
    ],
)
def test_left_out_rows_are_predicted(group: str, error_max: float) -> None:
    from planning.published.fit_inference import HOLDOUT_GROUPS, holdout_errors

    assert mean(abs(error) for error in holdout_errors(HOLDOUT_GROUPS[group])) < error_max


def test_published_memory_is_within_a_percent() -> None:
    assert len(memory_cases()) == 13
    for case in memory_cases():
        assert abs(case.error()) < 0.015, case.name
    assert mean(abs(case.error()) for case in memory_cases()) < 0.01


def test_memory_verdicts_match_published_runs() -> None:
    assert len(out_of_memory_cases()) == 9
    for case in out_of_memory_cases():
        assert estimate_static(case.job, case.cluster).memory.verdict == "over", case.name
    for case in latency_cases():
        assert estimate_static(case.job, case.cluster).memory.verdict != "over", case.name


def test_request_time_is_prefill_plus_decode() -> None:
    estimate = estimate_static(job(), NODE)
    assert estimate.request_ms == pytest.approx(
        estimate.prefill_ms + 19 * estimate.decode_ms_per_token
    )
    assert estimate.request_ms == pytest.approx(sum(estimate.parts_ms.values()))
    single_token = estimate_static(job(output_tokens=1), NODE)
    assert single_token.request_ms == pytest.approx(single_token.prefill_ms)


def test_static_batch_satisfies_littles_law() -> None:
    estimate = estimate_static(job(batch=32), NODE)
    assert estimate.requests_per_s * estimate.request_ms / 1e3 == pytest.approx(32)
    assert estimate.tokens_per_s == pytest.approx(20 * estimate.requests_per_s)


JOBS = st.builds(
    StaticJob,
    model=st.sampled_from([GPT_20B, GPT_175B, LLAMA_70B, GPTConfig(24, 1024, 16, 51200, 2048)]),
    input_tokens=st.integers(1, 1024),
    output_tokens=st.integers(1, 512),
    batch=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "int8", "float32"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
)
LARGER_JOBS: dict[str, Callable[[StaticJob], StaticJob]] = {
    "batch": lambda job_: replace(job_, batch=2 * job_.batch),
    "input": lambda job_: replace(job_, input_tokens=job_.input_tokens + 64),
    "output": lambda job_: replace(job_, output_tokens=job_.output_tokens + 16),
    "layers": lambda job_: replace(
        job_, model=job_.model.with_fields(num_layers=job_.model.num_layers + 4, moe_layers=())
    ),
}


@given(JOBS, st.sampled_from(sorted(LARGER_JOBS)))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_time_and_memory_grow_with_each_job_size(static_job: StaticJob, size: str) -> None:
    small = estimate_static(static_job, NODES)
    large = estimate_static(LARGER_JOBS[size](static_job), NODES)
    # Micro-batches are whole: one more request can add a micro-batch and reduce waiting.
    assert large.request_ms > small.request_ms * (0.97 if static_job.pp > 1 else 1)
    assert large.memory.total > small.memory.total


@given(JOBS)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_more_ranks_and_narrower_dtypes_need_less_memory_and_time(static_job: StaticJob) -> None:
    estimate = estimate_static(static_job, NODES)
    assert (
        estimate_static(replace(static_job, tp=2 * static_job.tp), NODES).memory.total
        < estimate.memory.total
    )
    assert (
        estimate_static(replace(static_job, pp=2 * static_job.pp), NODES).memory.total
        < estimate.memory.total
    )
    if static_job.dtype == "float16":
        assert (
            estimate_static(replace(static_job, dtype="int8"), NODES).request_ms
            <= estimate.request_ms
        )


def latency(**changes: Any) -> float:
    return estimate_static(job(**changes), NODES).request_ms


def test_tensor_parallelism_helps_until_all_reduces_dominate() -> None:
    large = [latency(model=GPT_175B, tp=tp, batch=1) for tp in (1, 2, 4, 8)]
    assert large == sorted(large, reverse=True)
    small = GPTConfig(24, 1024, 16, 51200, 2048)
    assert latency(model=small, tp=8, batch=1) > latency(model=small, tp=1, batch=1)
    slow = Cluster(find_device("l40s"), 8)
    two_ranks, eight_ranks = (estimate_static(job(tp=tp, batch=64), slow) for tp in (2, 8))
    assert eight_ranks.prefill_ms > two_ranks.prefill_ms, (
        "over PCIe eight ranks only wait for each other"
    )


def test_pipeline_improves_throughput_not_latency() -> None:
    assert latency(pp=4, batch=1) == pytest.approx(latency(pp=1, batch=1), rel=0.03)
    assert latency(pp=4, batch=256) < 0.75 * latency(pp=1, batch=256)


def test_fewer_kv_groups_need_less_memory_and_bandwidth() -> None:
    full_heads = LLAMA_70B.with_fields(num_query_groups=64)
    few_groups, all_groups = (
        estimate_static(job(model=model, tp=8, batch=64, input_tokens=1024), NODE)
        for model in (LLAMA_70B, full_heads)
    )
    assert all_groups.memory.kv == 8 * few_groups.memory.kv
    assert few_groups.decode_ms_per_token < all_groups.decode_ms_per_token


def test_a_larger_batch_reads_more_experts() -> None:
    experts = LLAMA_70B.with_fields(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=14336,
        kv_channels=128,
        moe_layers=(),
        num_experts=8,
        moe_ffn_hidden_size=14336,
    )
    dense = experts.with_fields(num_experts=0, moe_layers=(), ffn_hidden_size=2 * 14336)

    def decode(model: GPTConfig, batch: int) -> float:
        return estimate_static(job(model=model, tp=2, batch=batch), NODE).decode_ms_per_token

    assert decode(experts, 1) == pytest.approx(decode(dense, 1), rel=0.01)
    assert decode(experts, 16) > 1.5 * decode(dense, 16)


def test_estimates_have_an_error_bar() -> None:
    def estimate_with(cluster: Cluster = NODES, **changes: Any) -> StaticEstimate:
        return estimate_static(job(**changes), cluster)

    confidence = estimate_with().confidence
    assert confidence.source == "spec-sheet" and not confidence.note
    for other_estimate in (
        estimate_with(batch=512),
        estimate_with(input_tokens=2000),
        estimate_with(dtype="int8"),
        estimate_with(Cluster(find_device("h100"), 8)),
    ):
        assert other_estimate.confidence.error > confidence.error and other_estimate.confidence.note


def test_every_known_device_has_measured_kernels_and_newer_ones_are_faster() -> None:
    assert KERNEL_SPEEDS.keys() == DEVICES.keys()
    latencies = [
        estimate_static(job(tp=1), Cluster(find_device(name), 8)).request_ms
        for name in ("a100-40g", "a100-80g", "h100", "h200", "b200")
    ]
    assert latencies == sorted(latencies, reverse=True)
    unknown = replace(find_device("h100"), name="some-other")
    h100_ms = estimate_static(job(), Cluster(find_device("h100"), 8)).request_ms
    close = estimate_static(job(), Cluster(unknown, 8)).request_ms
    assert close == pytest.approx(h100_ms, rel=0.2)


def test_advice_for_a_batch_that_does_not_fit() -> None:
    assert fit_advice_lines(job(), NODE) == []
    kv = job(tp=1, input_tokens=200, output_tokens=200, batch=256)
    too_much, batch, split = fit_advice_lines(kv, NODE)
    assert too_much.startswith("weights (40.5 GB), KV cache (111 GB) and workspace (")
    assert too_much.endswith("need more than 97 % of 85.9 GB")
    assert (batch, split) == ("a batch of 68 fits TP1 PP1", "TP4 PP1, 4 GPUs, fits this batch")
    for batch_size, verdict in ((68, "fits"), (69, "tight")):
        assert estimate_static(replace(kv, batch=batch_size), NODE).memory.verdict == verdict
    weights = fit_advice_lines(job(model=GPT_175B, tp=1), NODE)
    assert weights[0].startswith("weights (349 GB) and CUDA context (")
    assert weights[0].endswith("alone need more than 97 % of 85.9 GB")
    assert weights[1:] == ["TP8 PP1, 8 GPUs, fits this batch"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"input_tokens": -5}, "input_tokens is -5"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"tp": 7}, "--tp can be 1, 2, 3, 4, 6, 8"),
        ({"pp": 45}, "--pp can be at most 44"),
        ({"tp": 16}, "needs 16 GPUs, and there are 8; set --gpus 16"),
        ({"dtype": "flaot16"}, "float16"),
        ({"dtype": "fp8"}, "a100-80g does not support fp8"),
    ],
)
def test_invalid_jobs_raise_config_error(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        estimate_static(job(**changes), NODE)
    assert message in str(error.value) and "\n" not in str(error.value)
