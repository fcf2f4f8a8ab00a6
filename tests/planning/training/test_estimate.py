"""Training's times and bytes: what was published, what must hold of any, and what is refused."""

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
from planning.published.fit_training import BASES, PRIORS, evidence, fit, left_out
from planning.published.validate import Checked, Report, Table, Verdicts, validate
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


GPT_22B, GPT_91B = gpt3(48, 6144, 64), gpt3(32, 15360, 120)
GPT_161B, GPT_175B = gpt3(32, 20480, 128), gpt3(96, 12288, 96)


def estimate(
    model: GPTConfig, batch: int, split: TrainingSplit, gpu: str = "a100-80g", **job: Any
) -> TrainingEstimate:
    whole = TrainingJob(model, 2048, batch, **job)
    return estimate_training(whole, split, Cluster(find_device(gpu), split.gpus))


@pytest.fixture(scope="module")
def report() -> Report:
    return validate()


def test_every_published_table_is_within_its_target(report: Report) -> None:
    assert report.good, report.text(rows=True)
    names = {table.name: table for table in report.tables}
    assert names["training, all runs"].mean <= 0.05
    assert names["training, all runs"].worst <= 0.12
    assert names["inference, all rows"].mean <= 0.07
    assert names["activations of the first stage"].worst <= 0.005
    assert names["MFU and HFU of published times"].worst <= 0.3


def test_a_report_is_lines_and_plain_data(report: Report) -> None:
    short, long = report.text().splitlines(), report.text(rows=True).splitlines()
    assert len(short) >= len(report.tables) + len(report.verdicts)
    rows = [row for table in report.tables if not table.total for row in table.rows]
    assert all(any(row.name in line for line in long) for row in rows)
    figures: Any = report.figures()
    assert [table["name"] for table in figures["tables"]] == [t.name for t in report.tables]
    assert figures["good"] is True


def test_what_is_outside_of_its_target_is_not_good() -> None:
    rows = [Checked("a", 1.0, 1.2), Checked("b", 1.0, 1.0)]
    assert Table("t", "s", rows).good
    assert not Table("t", "s", rows, mean_max=0.05).good
    assert not Table("t", "s", rows, worst_max=0.12).good
    assert Table("t", "s", rows, mean_max=0.1001, worst_max=0.2001).good
    assert not Table("t", "s", [Checked("a", 50, 51, "%")], None, 0.3, absolute=True).good
    bad = Report([Table("t", "s", rows)], [Verdicts("v", "s", 3, ["x ran"])])
    assert not bad.good
    assert "2 of 3 right  OUTSIDE" in bad.text()


@pytest.mark.parametrize("device", PRIORS)
def test_constants_are_those_that_fitting_finds(device: str) -> None:
    found, standing = fit(device, evidence(device)).efficiency, BASES[device]
    for name in vars(standing):
        assert getattr(standing, name) == pytest.approx(getattr(found, name), rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "mean", "worst"), [("a100-80g", 0.03, 0.09), ("h100", 0.06, 0.12)]
)
def test_runs_that_were_left_out_are_predicted(device: str, mean: float, worst: float) -> None:
    errors = [abs(error) for error in left_out(device).values()]
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= worst


def test_the_field_best_split_and_micro_batch_come_out() -> None:
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
    both = estimate(GPT_175B, 1536, replace(split, sequence_parallel=True, recompute="selective"))
    full = estimate(GPT_175B, 1536, replace(split, recompute="full"))
    assert 4.5 <= plain.memory.activations / both.memory.activations <= 6
    assert 1.2 <= full.iteration_s / both.iteration_s <= 1.4


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
    found = estimate(GPT_22B, 64, split, gpu)
    assert sum(found.seconds.values()) == pytest.approx(found.iteration_s)
    assert all(part >= 0 for part in found.seconds.values())
    assert 0 < found.mfu <= found.hfu < 0.9
    per_gpu = found.flops_per_iteration / found.iteration_s / split.gpus / 1e12
    assert found.tflops_per_gpu == pytest.approx(per_gpu)
    assert found.tokens_per_s == pytest.approx(64 * 2048 / found.iteration_s)
    assert found.trust_time.source == "spec-sheet"
    assert 0 < found.trust_time.error < 1


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
    apart = estimate(GPT_22B, 64, replace(split, sequence_parallel=False))
    together = estimate(GPT_22B, 64, replace(split, sequence_parallel=True))
    assert together.memory.total <= apart.memory.total


@ANY
@given(split=SPLITS)
def test_what_is_computed_again_trades_time_for_memory(split: TrainingSplit) -> None:
    none, some, full = (
        estimate(GPT_22B, 64, replace(split, recompute=kind))
        for kind in ("none", "selective", "full")
    )
    assert none.memory.activations > some.memory.activations > full.memory.activations
    assert none.iteration_s < some.iteration_s < full.iteration_s


def test_block_recomputation_lies_between_none_and_full() -> None:
    split = TrainingSplit(8, 2, sequence_parallel=True)
    found = [estimate(GPT_22B, 64, replace(split, recompute="none"))]
    found += [
        estimate(GPT_22B, 64, replace(split, recompute="block", recompute_layers=k))
        for k in (6, 12, 18)
    ]
    found += [estimate(GPT_22B, 64, replace(split, recompute="full"))]
    held = [one.memory.activations for one in found]
    times = [one.iteration_s for one in found]
    assert held == sorted(held, reverse=True)
    assert times == sorted(times)
    flops = [one.flops_per_iteration for one in found]
    assert flops == sorted(flops)


@ANY
@given(pp=st.sampled_from([2, 4, 8]), vpp=st.sampled_from([1, 2, 3]), rounds=st.integers(1, 64))
def test_the_bubble_is_the_papers_and_vanishes(pp: int, vpp: int, rounds: int) -> None:
    split = TrainingSplit(8, pp, vpp=vpp)
    one = estimate(GPT_22B, rounds * pp, split)
    assert one.bubble_fraction == pytest.approx((pp - 1) / (vpp * rounds * pp))
    many = estimate(GPT_22B, 100_000 * pp, split)
    assert many.seconds["bubble"] / many.iteration_s < 1e-4


@ANY
@given(split=SPLITS, factor=st.sampled_from([2, 4]))
def test_more_copies_are_faster(split: TrainingSplit, factor: int) -> None:
    batch = 8 * 8 * 8 * split.dp * factor
    more = replace(split, dp=split.dp * factor)
    assume(more.gpus <= 512)
    slow, fast = (estimate(GPT_22B, batch, one) for one in (split, more))
    assert fast.iteration_s < slow.iteration_s


def test_what_a_gpu_sends_is_told() -> None:
    found = estimate(GPT_22B, 64, TrainingSplit(8, 2, 4, recompute="full")).sent_bytes
    tokens, micro_batches = 2048, 16
    assert found["tensor_parallel"] == 2 * micro_batches * 24 * 12 * tokens * 6144 * 7 / 8
    assert found["pipeline"] == 2 * micro_batches * tokens * 6144 / 8
    assert found["data_parallel"] > 2 * 2 * 3 / 4 * 24 * 12 * 6144**2 / 8
    alone = estimate(GPT_22B, 64, TrainingSplit()).sent_bytes
    assert not any(alone.values())


def test_an_error_bar_is_wider_where_nobody_has_published() -> None:
    split = TrainingSplit(8, 2)
    usual = estimate(GPT_22B, 64, split, "h100").trust_time
    for wider in (
        estimate(GPT_22B, 64, split, "h200"),
        estimate(GPT_22B, 64, replace(split, vpp=2), "h100"),
        estimate(GPT_22B, 64, split, "h100", dtype="fp8"),
        estimate(gpt3(24, 1024, 16), 64, split, "h100"),
    ):
        assert wider.trust_time.error > usual.error
    assert "chunks" in estimate(GPT_22B, 64, replace(split, vpp=2), "h100").trust_time.note
    assert estimate(GPT_22B, 64, replace(split, vpp=2)).trust_time.error <= 0.06


def test_a_faster_gpu_is_faster() -> None:
    split = TrainingSplit(8, 1, 1, sequence_parallel=True)
    times = [estimate(GPT_22B, 64, split, gpu).iteration_s for gpu in ("a100-80g", "h100", "b200")]
    assert times == sorted(times, reverse=True)
    half = TrainingJob(GPT_22B, 2048, 64, dtype="fp8")
    eight = estimate_training(half, split, Cluster(find_device("h100"), 8))
    assert eight.iteration_s < times[1]


def test_an_optimizer_is_distributed_where_nothing_else_fits() -> None:
    model = gpt3(24, 4096, 32)
    split = TrainingSplit(1, 1, 8, micro_batch=4, recompute="selective")
    found = estimate(model, 2048, split)
    assert found.memory.verdict == "fits"
    plain = estimate(model, 2048, split, distributed_optimizer=False)
    assert plain.memory.verdict == "over"
    small = estimate(gpt3(24, 2304, 24), 512, TrainingSplit(1, 1, 32))
    assert small.memory.optimizer > 11 * small.parameters


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"tp": 3}, "--tp can be 1, 2, 4, 8, 16, 32, 64"),
    ({}, {"pp": 49}, "--pp can be at most 48"),
    ({}, {"gpus": 10}, "8 GPUs can be split so"),
    ({"global_batch": 7}, {"dp": 2}, "a global batch of 7 does not divide"),
    ({"global_batch": 0}, {}, "global_batch is 0"),
    ({"sequence": -5}, {}, "sequence is -5"),
    ({"sequence": 4096}, {}, "the model has 2048 positions"),
    ({"sequence": 2047}, {"sequence_parallel": True}, "2048 is"),
    ({}, {"micro_batch": 0}, "micro_batch is 0"),
    ({}, {"vpp": 2}, "vpp 2 needs a pipeline"),
    ({}, {"pp": 4, "vpp": 5}, "vpp can be 1, 2, 3, 4, 6, 12"),
    ({"global_batch": 6}, {"pp": 4, "vpp": 2}, "take vpp 1, or a global batch of"),
    ({}, {"pp": 5, "vpp": 2}, "48 layers do not divide into 5 stages"),
    ({}, {"recompute": "block"}, "it must be from 1 to 48"),
    ({"virtual_tokens": 2048}, {}, "from 0 to 2047"),
    ({"dtype": "int8"}, {}, "no speed of training in 'int8' is known"),
    ({"dtype": "fp8"}, {}, "a100-80g has no fp8"),
]


@pytest.mark.parametrize(("job", "split", "words"), REFUSED)
def test_what_cannot_run_is_refused_in_a_sentence(
    job: dict[str, Any], split: dict[str, Any], words: str
) -> None:
    gpus = split.pop("gpus", None) if "gpus" in split else None
    whole = TrainingSplit(**{"tp": 8, **split})
    cluster = Cluster(A100, gpus or whole.gpus)
    with pytest.raises(ConfigError) as caught:
        check_split(
            TrainingJob(GPT_22B, **{"sequence": 2048, "global_batch": 64, **job}), whole, cluster
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_estimate_takes_no_torch_and_little_time() -> None:
    code = (
        "import sys, planning.training.estimate, planning.published.validate; "
        "import planning.published.fit_training; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    split = TrainingSplit(8, 8, 16, vpp=3, sequence_parallel=True)
    start = time.process_time()
    for batch in range(128, 128 * 101, 128):
        estimate(GPT_175B, batch, split)
    assert time.process_time() - start < 1
