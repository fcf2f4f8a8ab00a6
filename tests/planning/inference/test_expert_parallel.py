"""Plans of models with experts: the splits to try, their memory, and the times of their steps."""

import json
from dataclasses import replace

import pytest

import preamble
from gpt.config import GPTConfig
from gpt.costs.inference import rank_costs
from planning.hardware import Cluster, find_device
from planning.inference.calibration_file import Calibration, MeasuredModel, ModelShape
from planning.inference.estimate import (
    LengthDistribution,
    ServingSplit,
    Workload,
    serving_memory,
)
from planning.inference.model_split import ModelSplit, model_splits
from planning.inference.plan import plan_serving
from planning.inference.requirements import Requirements
from planning.inference.service_levels import ServiceLimits
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from planning.inference.step_pricing import price_steps, steps_from_spec_sheet

# As Qwen3-30B-A3B.
MODEL = GPTConfig(
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=151936,
    max_position_embeddings=4096,
    position_embedding_type="rope",
    normalization="RMSNorm",
    gated=True,
    activation="silu",
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    ffn_hidden_size=6144,
)
ODD_HEADS = MODEL.with_fields(num_attention_heads=7, num_query_groups=7)
ODD_EXPERTS = MODEL.with_fields(moe_ffn_hidden_size=770)
H100 = Cluster(find_device("h100"), 4, 4)
COSTS = Calibration(
    date="",
    device="",
    kind="cpu",
    memory_bytes=256 << 30,
    flops=1e11,
    bandwidth_bytes=1e10,
    models=(
        MeasuredModel(
            ModelShape.from_config(MODEL),
            "float32",
            StepCostModel(
                rows=PiecewiseLinear(((1.0, 0.1), (64.0, 0.5))),
                draws=PiecewiseLinear(((1.0, 0.01),)),
                context_s=1e-6,
                pair_s=2e-8,
                sequence_s=1e-4,
                step_s=0.0,
            ),
        ),
    ),
)
CHAT = Workload(LengthDistribution(60, 100), LengthDistribution(12, 20), None, 8)


@pytest.mark.parametrize(
    ("model", "want"),
    [
        # Each expert is split over the tensor ranks if that is possible.
        (MODEL, {(1, 1), (2, 1), (4, 1)}),
        # 770 columns do not divide by 4.
        (ODD_EXPERTS, {(1, 1), (2, 1), (4, 1, 2)}),
        # The heads do not divide, so the ranks share only the experts.
        (ODD_HEADS, {(1, 1), (1, 1, 2), (1, 1, 4)}),
        (ODD_HEADS.with_fields(moe_layers=(False,) * 48), {(1, 1)}),
    ],
)
def test_splits_to_try(model: GPTConfig, want: set[tuple[int, ...]]) -> None:
    splits = {split for split in model_splits(model, 4, 4) if split.pp == 1}
    assert splits == {ModelSplit(*sizes) for sizes in want}


def test_a_plan_has_the_expert_parallel_size() -> None:
    # The weights take 61 GB, and need two GPUs of 48 GB.
    cluster = Cluster(find_device("l40s"), 4, 4)
    requirements = Requirements(
        ODD_HEADS, "bfloat16", CHAT, ServiceLimits(), cluster, None, "gpus", False
    )
    best = plan_serving(requirements, "MODEL").best
    assert best is not None
    assert (best.settings["tp"], best.settings["ep"]) == (1, 2)
    assert "TP1 PP1 EP2" in best.name


def test_memory_is_that_of_the_fullest_expert_parallel_rank() -> None:
    split = ServingSplit(1, 1, 1, 8, kv_tokens=1024, ep=4)
    ledger, _ = serving_memory(MODEL, "bfloat16", split, H100)
    ranks = rank_costs(MODEL, dtype="bfloat16", ep=4)
    assert ledger.weights == max(rank.weight_bytes for rank in ranks)
    assert split.gpus == 4


def test_a_step_of_more_tokens_reads_more_experts() -> None:
    steps = steps_from_spec_sheet(MODEL, "bfloat16", ModelSplit(1, 1), H100)
    short_s, long_s = (steps.rows.interpolate(rows) for rows in (1, 256))
    all_weights = sum(rank.weight_bytes for rank in rank_costs(MODEL, dtype="bfloat16"))
    assert long_s > 2 * short_s
    assert long_s > all_weights * 0.95 / H100.device.memory_bytes_per_s


def test_the_busiest_of_the_ranks_with_whole_experts_is_slower() -> None:
    tensor_ranks, expert_ranks = (
        steps_from_spec_sheet(MODEL, "bfloat16", ModelSplit(4, 1, ep), H100).rows for ep in (1, 4)
    )
    assert expert_ranks.interpolate(4096) > tensor_ranks.interpolate(4096)
    assert expert_ranks.interpolate(8192) == pytest.approx(tensor_ranks.interpolate(8192), rel=0.01)


def test_ranks_of_a_cpu_repeat_the_attention_of_expert_parallel_ranks() -> None:
    single, expert_ranks = (
        price_steps(MODEL, "float32", ModelSplit(1, 1, ep), COSTS.as_cluster(), COSTS).steps
        for ep in (1, 2)
    )
    assert expert_ranks.context_s == pytest.approx(2 * single.context_s)
    assert expert_ranks.rows.interpolate(64) > single.rows.interpolate(64)


def test_the_estimate_of_a_server_takes_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpu h100 --continuous --input-tokens 60 --output-tokens 20 --concurrency 8 --json"
    weights = {}
    for ep in ("1", "4"):
        arguments = ["plan", "estimate", "mixtral-8x7b", *flags.split(), "--gpus", ep, "--ep", ep]
        assert preamble.main(arguments) == 0
        weights[ep] = json.loads(capsys.readouterr().out)
    assert weights["4"] != weights["1"]
    assert preamble.main(["plan", "estimate", "gpt3-5b", "--gpu", "h100", "--ep", "2"]) == 1
    assert "add --continuous" in capsys.readouterr().err
    assert replace(ServingSplit(), ep=2).gpus == 2
