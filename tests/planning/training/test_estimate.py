"""Training estimates: published times and memory, general properties, and invalid splits."""

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.hardware import DEVICES, Cluster, find_device
from planning.published.fit_training import (
    BASES,
    PRIORS,
    fit_efficiency,
    holdout_errors,
    rows_of_device,
)
from planning.published.validate import (
    MemoryVerdicts,
    PredictedRow,
    ValidationReport,
    ValidationTable,
    validate_tables,
)
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    check_split,
    estimate_training,
)

A100 = find_device("a100-80g")


def gpt3(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(layers, hidden, heads, 51200, 2048)


GPT_22B = gpt3(48, 6144, 64)
GPT_91B = gpt3(32, 15360, 120)
GPT_161B = gpt3(32, 20480, 128)
GPT_175B = gpt3(96, 12288, 96)


def estimate(
    model: GPTConfig, batch: int, split: TrainingSplit, gpu: str = "a100-80g", **job: Any
) -> TrainingEstimate:
    training_job = TrainingJob(model, 2048, batch, **job)
    return estimate_training(training_job, split, Cluster(find_device(gpu), split.gpus))


@pytest.fixture(scope="module")
def report() -> ValidationReport:
    return validate_tables()


def test_every_published_table_is_within_its_target(report: ValidationReport) -> None:
    assert report.is_within_targets, report.text(rows=True)
    names = {table.name: table for table in report.tables}
    assert names["training, all runs"].mean <= 0.05
    assert names["training, all runs"].worst <= 0.12
    assert names["inference, all rows"].mean <= 0.07
    assert names["activations of the first stage"].worst <= 0.005
    assert names["MFU and HFU of published times"].worst <= 0.3


def test_validation_report_has_text_and_json(report: ValidationReport) -> None:
    summary_lines = report.text().splitlines()
    row_lines = report.text(rows=True).splitlines()
    assert len(summary_lines) >= len(report.tables) + len(report.verdicts)
    rows = [row for table in report.tables if not table.is_total for row in table.rows]
    assert all(any(row.name in line for line in row_lines) for row in rows)
    figures: Any = report.figures()
    assert [table["name"] for table in figures["tables"]] == [t.name for t in report.tables]
    assert figures["good"] is True


def test_report_fails_if_a_table_exceeds_its_target() -> None:
    rows = [PredictedRow("a", 1.0, 1.2), PredictedRow("b", 1.0, 1.0)]
    assert ValidationTable("t", "s", rows).is_within_targets
    assert not ValidationTable("t", "s", rows, mean_max=0.05).is_within_targets
    assert not ValidationTable("t", "s", rows, worst_max=0.12).is_within_targets
    assert ValidationTable("t", "s", rows, mean_max=0.1001, worst_max=0.2001).is_within_targets
    assert not ValidationTable(
        "t", "s", [PredictedRow("a", 50, 51, "%")], None, 0.3, absolute=True
    ).is_within_targets
    failing_report = ValidationReport(
        [ValidationTable("t", "s", rows)], [MemoryVerdicts("v", "s", 3, ["x ran"])]
    )
    assert not failing_report.is_within_targets
    assert "2 of 3 right  OUTSIDE" in failing_report.text()


@pytest.mark.parametrize("device", PRIORS)
def test_training_constants_equal_the_fit(device: str) -> None:
    fitted = fit_efficiency(device, rows_of_device(device)).efficiency
    recorded = BASES[device]
    for name in vars(recorded):
        assert getattr(recorded, name) == pytest.approx(getattr(fitted, name), rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "mean", "worst"), [("a100-80g", 0.03, 0.09), ("h100", 0.06, 0.12)]
)
def test_left_out_runs_are_predicted(device: str, mean: float, worst: float) -> None:
    errors = [abs(error) for error in holdout_errors(device).values()]
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= worst


def test_published_best_split_and_micro_batch_are_reproduced() -> None:
    """Tensor parallel fills a node and no more; a micro-batch of two is best where m is large."""
    times = {
        tp: estimate(GPT_161B, 32, TrainingSplit(tp, 64 // tp, recompute="full")).iteration_s
        for tp in (2, 4, 8, 16, 32)
    }
    assert min(times, key=lambda tp: times[tp]) == 8
    assert min(times[2], times[32]) > 1.1 * times[8]
    micro = {
        b: estimate(GPT_91B, 512, TrainingSplit(8, 8, micro_batch=b, recompute="full")).iteration_s
        for b in (1, 2, 4, 8)
    }
    assert min(micro, key=lambda b: micro[b]) == 2


def test_sequence_parallelism_and_selective_recomputation_save_fivefold() -> None:
    split = TrainingSplit(8, 8, 16, vpp=3)
    plain = estimate(GPT_175B, 1536, split)
    with_both = estimate(
        GPT_175B, 1536, replace(split, sequence_parallel=True, recompute="selective")
    )
    full = estimate(GPT_175B, 1536, replace(split, recompute="full"))
    assert 4.5 <= plain.memory.activations / with_both.memory.activations <= 6
    assert 1.2 <= full.iteration_s / with_both.iteration_s <= 1.4


def test_frozen_weights_cost_two_thirds_and_little_memory() -> None:
    split = TrainingSplit(4, 1, 2, micro_batch=2, sequence_parallel=True)
    model = GPTConfig(32, 4096, 32, 32000, 4096)
    learning = estimate(model, 64, split, "h100")
    frozen = estimate(model, 64, split, "h100", trainable="adapter", virtual_tokens=20)
    assert 1.2 <= learning.iteration_s / frozen.iteration_s <= 1.5
    assert frozen.memory.optimizer < learning.memory.optimizer / 50
    assert frozen.memory.activations < 0.75 * learning.memory.activations
    assert frozen.seconds["data_parallel"] == 0


SPLITS = st.builds(
    TrainingSplit,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 8]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
)
ANY = settings(deadline=None, max_examples=60, derandomize=True)


@ANY
@given(split=SPLITS, gpu=st.sampled_from(sorted(DEVICES)))
def test_parts_add_up_and_shares_are_shares(split: TrainingSplit, gpu: str) -> None:
    training_estimate = estimate(GPT_22B, 64, split, gpu)
    assert sum(training_estimate.seconds.values()) == pytest.approx(training_estimate.iteration_s)
    assert all(part >= 0 for part in training_estimate.seconds.values())
    assert 0 < training_estimate.mfu <= training_estimate.hfu < 0.9
    per_gpu = (
        training_estimate.flops_per_iteration / training_estimate.iteration_s / split.gpus / 1e12
    )
    assert training_estimate.tflops_per_gpu == pytest.approx(per_gpu)
    assert training_estimate.tokens_per_s == pytest.approx(
        64 * 2048 / training_estimate.iteration_s
    )
    assert training_estimate.time_confidence.source == "spec-sheet"
    assert 0 < training_estimate.time_confidence.error < 1


@ANY
@given(split=SPLITS)
def test_memory_grows_with_micro_batch_and_sequence(split: TrainingSplit) -> None:
    bigger = replace(split, micro_batch=2 * split.micro_batch)
    batch = 8 * 8 * 8 * split.dp
    job = TrainingJob(GPT_22B, 1024, batch)
    cluster = Cluster(A100, split.gpus)
    small = estimate_training(job, split, cluster).memory.total
    assert estimate_training(job, bigger, cluster).memory.total > small
    longer = replace(job, sequence=2048)
    assert estimate_training(longer, split, cluster).memory.total > small


@ANY
@given(split=SPLITS)
def test_sequence_parallelism_never_costs_memory(split: TrainingSplit) -> None:
    without_sp = estimate(GPT_22B, 64, replace(split, sequence_parallel=False))
    with_sp = estimate(GPT_22B, 64, replace(split, sequence_parallel=True))
    assert with_sp.memory.total <= without_sp.memory.total


@ANY
@given(split=SPLITS)
def test_recomputation_trades_time_for_memory(split: TrainingSplit) -> None:
    no_recompute, selective, full = (
        estimate(GPT_22B, 64, replace(split, recompute=kind))
        for kind in ("none", "selective", "full")
    )
    assert no_recompute.memory.activations > selective.memory.activations > full.memory.activations
    assert no_recompute.iteration_s < selective.iteration_s < full.iteration_s


def test_block_recomputation_lies_between_none_and_full() -> None:
    split = TrainingSplit(8, 2, sequence_parallel=True)
    estimates = [estimate(GPT_22B, 64, replace(split, recompute="none"))]
    estimates += [
        estimate(GPT_22B, 64, replace(split, recompute="block", recompute_layers=k))
        for k in (6, 12, 18)
    ]
    estimates += [estimate(GPT_22B, 64, replace(split, recompute="full"))]
    activation_bytes = [training_estimate.memory.activations for training_estimate in estimates]
    times = [training_estimate.iteration_s for training_estimate in estimates]
    assert activation_bytes == sorted(activation_bytes, reverse=True)
    assert times == sorted(times)
    flops = [training_estimate.flops_per_iteration for training_estimate in estimates]
    assert flops == sorted(flops)


@ANY
@given(pp=st.sampled_from([2, 4, 8]), vpp=st.sampled_from([1, 2, 3]), rounds=st.integers(1, 64))
def test_bubble_matches_the_paper_and_vanishes_with_more_micro_batches(
    pp: int, vpp: int, rounds: int
) -> None:
    split = TrainingSplit(8, pp, vpp=vpp)
    few_micro_batches = estimate(GPT_22B, rounds * pp, split)
    assert few_micro_batches.bubble_fraction == pytest.approx((pp - 1) / (vpp * rounds * pp))
    many_micro_batches = estimate(GPT_22B, 100_000 * pp, split)
    assert many_micro_batches.seconds["bubble"] / many_micro_batches.iteration_s < 1e-4


@ANY
@given(split=SPLITS, factor=st.sampled_from([2, 4]))
def test_more_data_parallel_replicas_are_faster(split: TrainingSplit, factor: int) -> None:
    batch = 8 * 8 * 8 * split.dp * factor
    larger_split = replace(split, dp=split.dp * factor)
    assume(larger_split.gpus <= 512)
    small_estimate, large_estimate = (
        estimate(GPT_22B, batch, each_split) for each_split in (split, larger_split)
    )
    assert large_estimate.iteration_s < small_estimate.iteration_s


def test_estimate_contains_sent_bytes() -> None:
    sent_bytes = estimate(GPT_22B, 64, TrainingSplit(8, 2, 4, recompute="full")).sent_bytes
    tokens = 2048
    micro_batches = 16
    assert sent_bytes["tensor_parallel"] == 2 * micro_batches * 24 * 12 * tokens * 6144 * 7 / 8
    assert sent_bytes["pipeline"] == 2 * micro_batches * tokens * 6144 / 8
    assert sent_bytes["data_parallel"] > 2 * 2 * 3 / 4 * 24 * 12 * 6144**2 / 8
    single_rank_bytes = estimate(GPT_22B, 64, TrainingSplit()).sent_bytes
    assert not any(single_rank_bytes.values())


def test_fused_attention_skips_the_scores_behind_a_window() -> None:
    # Four of six layers have a window of a quarter of the sequence.
    windows = (True, True, False) * 16
    window_model = GPT_22B.with_fields(window_size=512, window_layers=windows)
    split = TrainingSplit(tp=8, micro_batch=4)
    for flash, share in ((True, 1 / 3 + 2 / 3 * (1 / 4 + 3 / 16)), (False, 1.0)):
        full, windowed = (
            estimate(model, 4, split, flash=flash) for model in (GPT_22B, window_model)
        )
        assert windowed.seconds["attention"] == pytest.approx(share * full.seconds["attention"])
        assert windowed.seconds["products"] == full.seconds["products"]
        assert windowed.memory == full.memory
    # The convention of FLOPs counts windows in both cases, as rectangles.
    attention = 3 * 4 * 48 * 4 * 2048**2 * 6144
    assert full.model_flops - windowed.model_flops == pytest.approx(2 / 3 * 3 / 4 * attention)
    assert "windows" in windowed.time_confidence.note


def test_error_bar_is_wider_outside_of_published_runs() -> None:
    split = TrainingSplit(8, 2)
    usual = estimate(GPT_22B, 64, split, "h100").time_confidence
    for wider in (
        estimate(GPT_22B, 64, split, "h200"),
        estimate(GPT_22B, 64, replace(split, vpp=2), "h100"),
        estimate(GPT_22B, 64, split, "h100", dtype="fp8"),
        estimate(gpt3(24, 1024, 16), 64, split, "h100"),
    ):
        assert wider.time_confidence.error > usual.error
    assert "vpp" in estimate(GPT_22B, 64, replace(split, vpp=2), "h100").time_confidence.note
    assert estimate(GPT_22B, 64, replace(split, vpp=2)).time_confidence.error <= 0.06


def test_faster_gpus_train_faster() -> None:
    split = TrainingSplit(8, 1, 1, sequence_parallel=True)
    times = [estimate(GPT_22B, 64, split, gpu).iteration_s for gpu in ("a100-80g", "h100", "b200")]
    assert times == sorted(times, reverse=True)
    half = TrainingJob(GPT_22B, 2048, 64, dtype="fp8")
    eight = estimate_training(half, split, Cluster(find_device("h100"), 8))
    assert eight.iteration_s < times[1]


def test_optimizer_is_distributed_if_its_full_state_does_not_fit() -> None:
    model = gpt3(24, 4096, 32)
    split = TrainingSplit(1, 1, 8, micro_batch=4, recompute="selective")
    training_estimate = estimate(model, 2048, split)
    assert training_estimate.memory.verdict == "fits"
    plain = estimate(model, 2048, split, distributed_optimizer=False)
    assert plain.memory.verdict == "over"
    small = estimate(gpt3(24, 2304, 24), 512, TrainingSplit(1, 1, 32))
    assert small.memory.optimizer > 11 * small.parameters


INVALID_SPLITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"tp": 3}, "--tp can be 1, 2, 4, 8, 16, 32, 64"),
    ({}, {"pp": 49}, "--pp can be at most 48"),
    ({}, {"gpus": 10}, "with this tp and pp, use 8 GPUs and dp 1"),
    ({"global_batch": 7}, {"dp": 2}, "global batch 7 is not a multiple of"),
    ({"global_batch": 0}, {}, "global_batch is 0"),
    ({"sequence": -5}, {}, "sequence is -5"),
    ({"sequence": 4096}, {}, "the model has 2048 learned positions"),
    ({"sequence": 2047}, {"sequence_parallel": True}, "the nearest multiple is 2048"),
    ({}, {"micro_batch": 0}, "micro_batch is 0"),
    ({}, {"vpp": 2}, "vpp 2 needs a pipeline"),
    ({}, {"pp": 4, "vpp": 5}, "vpp can be 1, 2, 3, 4, 6, 12"),
    ({"global_batch": 6}, {"pp": 4, "vpp": 2}, "set vpp to 1, or the global batch to"),
    ({}, {"pp": 5, "vpp": 2}, "48 layers are not a multiple of pp 5 x vpp 2"),
    ({}, {"recompute": "block"}, "needs a number from 1 to 48"),
    ({"virtual_tokens": 2048}, {}, "from 0 to 2047"),
    ({"dtype": "int8"}, {}, "the speed of training in 'int8' is unknown"),
    ({"dtype": "fp8"}, {}, "a100-80g does not support fp8"),
]


@pytest.mark.parametrize(("job", "split", "message"), INVALID_SPLITS)
def test_invalid_splits_raise_config_error(
    job: dict[str, Any], split: dict[str, Any], message: str
) -> None:
    gpus = split.pop("gpus", None) if "gpus" in split else None
    full_split = TrainingSplit(**{"tp": 8, **split})
    cluster = Cluster(A100, gpus or full_split.gpus)
    with pytest.raises(ConfigError) as caught:
        check_split(
            TrainingJob(GPT_22B, **{"sequence": 2048, "global_batch": 64, **job}),
            full_split,
            cluster,
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_training_estimate_is_fast_and_does_not_import_torch() -> None:
    code = (
        "import sys, planning.training.estimate, planning.published.validate; "
        "import planning.published.fit_training; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    split = TrainingSplit(8, 8, 16, vpp=3, sequence_parallel=True)
    start = time.process_time()
    for batch in range(128, 128 * 101, 128):
        estimate(GPT_175B, batch, split)
    assert time.process_time() - start < 1
