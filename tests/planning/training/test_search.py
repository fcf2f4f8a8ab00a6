"""The search over training splits: its candidates, its choice, and its explanations."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from time import process_time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import LinearAdapterSpec
from gpt.errors import ConfigError
from planning.hardware import Cluster, divisors, find_device
from planning.model_presets import find_preset
from planning.plan import Plan
from planning.training.estimate import TrainingJob, TrainingSplit, estimate_training
from planning.training.explanation import default_batch
from planning.training.plan import plan_training
from planning.training.search import (
    TIE_FRACTION,
    SearchSpace,
    TrainingSearchResult,
    search_training,
    split_from_settings,
    split_name,
    split_settings,
)
from planning.training.tune_settings import TuningSettings
from ptuning.linears.layout import LinearsLayout

A100 = find_device("a100-80g")
SMALL = GPTConfig(12, 1024, 16, 32000, 1024, dtype="bfloat16")


def search(model: str, gpus: int, batch: int, **axes: object) -> TrainingSearchResult:
    job = TrainingJob(find_preset(model), 2048, batch)
    return search_training(job, Cluster(A100, gpus), SearchSpace(**axes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trillion() -> Plan:
    job = TrainingJob(find_preset("1t"), 2048, 3072)
    return plan_training(job, Cluster(A100, 3072), name="gpt3-1t", tokens=450e9)


@pytest.fixture(scope="module")
def gpt3() -> Plan:
    return plan_of_gpt3()


def plan_of_gpt3() -> Plan:
    job = TrainingJob(find_preset("175b"), 2048, 1536)
    return plan_training(job, Cluster(A100, 1024), name="gpt3-175b", tokens=300e9)


@pytest.mark.slow  # A time limit, which a busy machine may exceed.
def test_training_search_takes_under_5_cpu_seconds() -> None:
    start = process_time()
    plan_of_gpt3()
    assert process_time() - start < 5


def test_trillion_parameter_plan_matches_published_split(trillion: Plan) -> None:
    """Tensor ranks fill a node, pipeline stages cross nodes: arXiv 2104.04473, section 5."""
    best = trillion.best
    assert best is not None
    assert best.settings["tp"] == 8
    assert int(best.settings["pp"]) >= 16
    advice = " ".join(trillion.advice)
    assert "TP8 stays inside a node" in advice and "crosses nodes" in advice
    assert best.confidence is not None and 0 < best.confidence.error < 0.2


def test_gpt3_plan_states_training_days_and_activation_savings(gpt3: Plan) -> None:
    """34 days at 140 TFLOP/s with full recomputation (2104.04473); 5x less memory and a third
    faster with sequence parallelism and selective recomputation (2205.05198)."""
    best = gpt3.best
    assert best is not None
    days = best.figures["training_days"]
    assert 18 < days < 30
    assert best.settings["gpus"] == 1024 and best.settings["sequence_parallel"]
    advice = " ".join(gpt3.advice)
    assert f"300B tokens take {days:.3g} days" in advice
    assert "sequence parallelism and selective recomputation store" in advice
    assert "at TP8: 5.4" in advice or "a factor of 5.4" in advice
    assert "--tensor-model-parallel-size" in advice


def test_every_rejected_candidate_has_a_reason(gpt3: Plan) -> None:
    assert [row.feasibility for row in gpt3.rows].count("best") == 1
    assert gpt3.rows[0] is gpt3.best
    for row in gpt3.rows:
        if row.feasibility in ("rejected", "tight"):
            assert row.reason
        assert set(row.settings) == set(gpt3.rows[0].settings)
        assert row.name and row.group
    usable = [row for row in gpt3.rows[1:] if row.feasibility == "fits"]
    assert [row.figures["iteration_s"] for row in usable] == sorted(
        row.figures["iteration_s"] for row in usable
    )
    assert gpt3.binding and gpt3.why_not
    json.dumps([dict(row.settings) for row in gpt3.rows])


def test_best_candidate_is_within_tie_fraction_of_the_fastest(gpt3: Plan) -> None:
    best = gpt3.best
    assert best is not None and best.memory is not None
    assert best.memory.verdict == "fits"
    fitting_times = [row.figures["iteration_s"] for row in gpt3.rows if row.feasibility == "fits"]
    assert best.figures["iteration_s"] <= min(fitting_times) * (1 + TIE_FRACTION)


def test_row_figures_equal_the_estimate_of_their_split(gpt3: Plan) -> None:
    job = TrainingJob(find_preset("175b"), 2048, 1536)
    for row in gpt3.rows[:20]:
        split = split_from_settings(row.settings)
        assert split_settings(split, job) == row.settings and split_name(split) == row.name
        estimate = estimate_training(job, split, Cluster(A100, split.gpus))
        assert estimate.iteration_s == row.figures["iteration_s"]
        assert estimate.memory == row.memory


def test_adapter_plan_needs_fewer_ranks_and_explains_the_difference() -> None:
    job = TrainingJob(find_preset("20b"), 2048, 128, "adapter", 20)
    cluster = Cluster(A100, 16)
    frozen = plan_training(job, cluster)
    full_training = plan_training(replace(job, trainable="all", virtual_tokens=0), cluster)
    assert frozen.best is not None and full_training.best is not None
    splits = [split_from_settings(row.settings) for row in (frozen.best, full_training.best)]
    assert splits[0].tp * splits[0].pp < splits[1].tp * splits[1].pp
    advice = " ".join(frozen.advice)
    assert "2 bytes per parameter instead of 18" in advice
    assert "training all parameters would use" in advice
    assert "weight gradients are neither computed" in advice
    assert "--trainable adapter" in " ".join(full_training.advice)


def test_infeasible_training_plan_names_the_limit_and_what_fits() -> None:
    plan = plan_training(TrainingJob(find_preset("175b"), 2048, 64), Cluster(A100, 8))
    assert plan.best is None and not plan.command and not plan.settings_yaml
    assert "optimizer do not fit" in plan.advice[0]
    assert "GPUs are enough, with TP" in plan.advice[1]
    assert any("--trainable adapter" in line for line in plan.advice)
    stated_number = int(plan.advice[1].split()[0].replace(",", ""))
    job = TrainingJob(find_preset("175b"), 2048, 64)
    assert search_training(job, Cluster(A100, stated_number), SearchSpace()).best is not None


def test_flags_that_exclude_all_candidates_are_named() -> None:
    job = TrainingJob(find_preset("22b"), 2048, 16)
    cluster = Cluster(A100, 16)
    plan = plan_training(job, cluster, SearchSpace(tp=(1,), pp=(1,)))
    assert plan.best is None
    assert "nothing fits with --tp, --pp; without these flags TP" in plan.advice[0]


def test_search_uses_only_requested_values() -> None:
    axes = {"tp": (8,), "pp": (2, 4), "micro_batch": (1,), "recompute": ("full",)}
    search_result = search("22b", 64, 64, **axes)
    splits = [
        estimate.split
        for estimate in (search_result.best, *search_result.alternatives)
        if estimate is not None
    ]
    assert {split.tp for split in splits} == {8}
    assert {split.pp for split in splits} == {2, 4}
    assert {split.recompute for split in splits} == {"full"}


def test_tensor_parallelism_crosses_nodes_only_if_allowed() -> None:
    assert max(alternative.split.tp for alternative in search("530b", 560, 560).alternatives) == 8
    across_nodes = search("530b", 560, 560, internode_tp=True)
    assert max(alternative.split.tp for alternative in across_nodes.alternatives) >= 16


def test_block_recompute_uses_the_fewest_layers_that_fit() -> None:
    search_result = search(
        "22b", 8, 32, tp=(8,), pp=(1,), micro_batch=(16,), sequence_parallel=True
    )
    blocks = [
        estimate
        for estimate in (search_result.best, *search_result.alternatives)
        if estimate is not None and estimate.split.recompute == "block"
    ]
    (block,) = blocks
    fewer = replace(block.split, recompute_layers=block.split.recompute_layers - 1)
    ledger = estimate_training(search_result.job, fewer, search_result.cluster).memory
    assert block.feasibility == "fits" and ledger.verdict != "fits"


# Fewer values than a search tries, so that it is fast.
SMALL_SPACE = SearchSpace(vpp=(1,), micro_batch=(1, 2), recompute=("selective", "full"))


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    gpus=st.integers(1, 40),
    more=st.integers(1, 24),
    batch=st.sampled_from([16, 24, 48, 60, 64]),
    heads=st.sampled_from([8, 12, 16]),
)
def test_more_gpus_never_train_slower(gpus: int, more: int, batch: int, heads: int) -> None:
    model = GPTConfig(12, 96 * heads, heads, 32000, 1024, dtype="bfloat16")
    job = TrainingJob(model, 1024, batch)
    fewer_gpus = search_training(job, Cluster(A100, gpus), SMALL_SPACE)
    more_gpus = search_training(job, Cluster(A100, gpus + more), SMALL_SPACE)
    assert fewer_gpus.best is not None and more_gpus.best is not None
    fastest = [
        min(estimate.iteration_s for estimate in search_result.usable)
        for search_result in (fewer_gpus, more_gpus)
    ]
    assert fastest[1] <= fastest[0] * (1 + 1e-9)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    layers=st.sampled_from([24, 48]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_memory_grows_with_stored_activations(
    layers: int, tp: int, pp: int, batch: int, recompute: str
) -> None:
    model = GPTConfig(layers, 4096, 32, 51200, 2048, dtype="bfloat16")
    cluster = Cluster(A100, tp * pp)

    def total(size: int, sequence: int, parallel: bool = False) -> int:
        split = TrainingSplit(tp, pp, 1, 1, size, recompute, 0, parallel)  # type: ignore[arg-type]
        return estimate_training(TrainingJob(model, sequence, 64), split, cluster).memory.total

    assert total(batch, 1024) < total(2 * batch, 1024) < total(2 * batch, 2048)
    if tp > 1:
        assert total(batch, 1024, True) <= total(batch, 1024)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(pp=st.sampled_from([2, 4, 8]), tp=st.sampled_from([1, 2]))
def test_bubble_shrinks_as_batches_grow(pp: int, tp: int) -> None:
    model = GPTConfig(16, 2048, 16, 51200, 2048, dtype="bfloat16")
    split = TrainingSplit(tp, pp, recompute="full")
    bubbles = []
    speeds = []
    for batch in (pp, 8 * pp, 64 * pp, 512 * pp):
        estimate = estimate_training(TrainingJob(model, 1024, batch), split, Cluster(A100, tp * pp))
        bubbles.append(estimate.bubble_fraction)
        speeds.append(estimate.tokens_per_s)
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[-1] < 0.01
    assert speeds == sorted(speeds)


@pytest.mark.parametrize(("gpus", "batch"), [(3072, 3072), (2520, 2520), (1024, 2048), (12, 2052)])
def test_default_batch_divides_over_the_gpus(gpus: int, batch: int) -> None:
    parameters = 1e12 if gpus > 2000 else 175e9
    assert default_batch(int(parameters), "all", gpus) == batch
    assert batch % gpus == 0 or batch % 3 == 0


def test_divisors_returns_all_divisors() -> None:
    assert list(divisors(96)) == [n for n in range(1, 97) if 96 % n == 0]
    assert divisors(1) == (1,)


# ------------------------------------------------------------------------------ a tuning run's file


@pytest.fixture(scope="module")
def tuning_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.servers import write_checkpoint
    from tests.support.tuning_settings import write_settings

    folder = tmp_path_factory.mktemp("plan")
    return write_settings(folder, write_checkpoint(folder), steps=2, virtual_tokens=4)


@pytest.mark.parametrize(
    ("tp", "pp", "gpus"),
    [
        (1, 1, 1),
        pytest.param(2, 1, 2, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_written_tune_settings_run(
    tuning_file: Path, tmp_path: Path, tp: int, pp: int, gpus: int
) -> None:
    from ptuning.__main__ import main
    from ptuning.config import TuneConfig

    tuning = TuningSettings.read(str(tuning_file))
    job = tuning.training_job(64)
    plan = plan_training(job, Cluster(A100, gpus), SearchSpace(tp=(tp,), pp=(pp,)), tuning=tuning)
    assert plan.best is not None and plan.command.startswith("preamble tune ")
    path = tmp_path / "train_config.yaml"
    path.write_text(plan.settings_yaml)
    written = TuneConfig.from_yaml(str(path))
    split = split_from_settings(plan.best.settings)
    assert written == tuning.with_split(split)
    parallel = written.parallel_config
    assert (parallel.tp, parallel.pp, parallel.dp) == (tp, pp, 1)
    assert main(["tune", str(path), "--restart"]) == 0


def test_only_split_keys_of_a_tuning_file_change(tuning_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    record = yaml.safe_load(tuning_file.read_text())
    other_settings = {"micro_batch_tokens": 100, "stop": ["ä\n"], "tp": 2, "seed": 7, "beta2": 0.9}
    path.write_text(yaml.safe_dump({**record, **other_settings}))
    tuning = TuningSettings.read(str(path))
    text = tuning.to_yaml(TrainingSplit(dp=2, micro_batch=4), ["a note"])
    assert text.startswith("# a note\n")
    written = yaml.safe_load(text)
    changed = {"tp": 1, "dp": 2, "micro_batch_examples": 4}
    del other_settings["micro_batch_tokens"]
    assert written == {**record, **other_settings, **changed}


def test_splits_that_tune_rejects_are_rejected_candidates(
    tuning_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tune.yaml"
    record = yaml.safe_load(tuning_file.read_text())
    del record["dtype"], record["learning_rate"]
    path.write_text(yaml.safe_dump({**record, "method": "tpmlp", "optimizer": "adafactor"}))
    tuning = TuningSettings.read(str(path))
    plan = plan_training(tuning.training_job(64), Cluster(A100, 2), SearchSpace(), tuning=tuning)
    rejected = [row for row in plan.rows if row.settings["tp"] == 2]
    assert rejected and all("adafactor" in row.reason for row in rejected)
    assert plan.best is not None and plan.best.settings["tp"] == 1


def test_methods_that_change_linears_plan_their_adapters(tuning_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    record = yaml.safe_load(tuning_file.read_text())
    for name in ("splits", "learning_rate"):
        record.pop(name, None)
    changes = {"method": "dora", "rank": 4, "targets": ["linear_qkv.query"], "layers": [1]}
    path.write_text(yaml.safe_dump({**record, **changes}))
    tuning = TuningSettings.read(str(path))
    job = tuning.training_job(64)
    assert job.linears == LinearAdapterSpec("dora", 4, ("linear_qkv.query",), (1,))
    assert (job.trainable, job.virtual_tokens, job.adapter_count) == ("adapter", 0, 1)
    layout = LinearsLayout.create([tuning.config.method_config], tuning.model)
    trained = [tensor for tensor in layout.tensors if tensor.is_trained]
    assert job.adapter_parameters == sum(prod(tensor.shape) for tensor in trained)
    plan = plan_training(job, Cluster(A100, 1), SearchSpace(), tuning=tuning)
    assert plan.best is not None and yaml.safe_load(plan.settings_yaml)["rank"] == 4


def test_a_step_of_several_adapters_has_the_examples_of_each(
    tuning_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tune.yaml"
    record = yaml.safe_load(tuning_file.read_text())
    for name in ("name", "virtual_tokens", "splits", "learning_rate", "max_new_tokens", "template"):
        record.pop(name, None)
    tasks: list[dict[str, object]] = [{"name": "one"}, {"name": "another"}]
    record |= {"method": "lora", "rank": 4, "batch_examples": 6, "tasks": tasks}
    path.write_text(yaml.safe_dump(record))
    job = TuningSettings.read(str(path)).training_job(64)
    assert (job.global_batch, job.adapter_count) == (12, 2)
    tasks[1]["rank"] = 2
    path.write_text(yaml.safe_dump(record))
    with pytest.raises(ConfigError, match="the tasks have different method settings, and a plan"):
        TuningSettings.read(str(path)).training_job(64)


def test_method_full_plans_all_parameters(tuning_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(tuning_file.read_text()), "method": "full"}))
    tuning = TuningSettings.read(str(path))
    assert (
        tuning.training_job(None).trainable == "all"
        and tuning.training_job(None).virtual_tokens == 0
    )
