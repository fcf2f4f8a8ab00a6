"""Grouped experts equal torch's loop over the experts; torch computes the matmuls on a CPU."""

import pytest
import torch

from gpt.linear import grouped_experts
from gpt.linear.fused_linear import fuse_layers
from gpt.linear.grouped_experts import GroupedExperts, group_experts
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.model.moe import MoELayer, TorchExperts
from gpt.parallel.mesh import Mesh
from tests.support.experts_cases import (
    CONFIGS,
    EXCESS_MAX,
    ROW_COUNTS,
    SMALL,
    excess_errors,
    moe_layer,
)
from tests.support.linear_adapters import mixed_expert_rows
from tests.support.models import CONFIGS as MODELS
from tests.support.models import EIGHT_EXPERTS, EXPERTS, build
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)
FP32_ERROR_MAX = 1e-4  # Of logits with a standard deviation of five and more.


def group_all(model: GPT) -> None:
    for layer in model.decoder_layers:
        if isinstance(layer.mlp, MoELayer):
            group_experts(layer.mlp)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_experts_in_bf16_are_as_accurate_as_the_loop(name: str, rows: int) -> None:
    assert max(excess_errors(CONFIGS[name], rows, "cpu").values()) < EXCESS_MAX


@pytest.mark.parametrize("name", ["experts", "sigmoid experts"])
def test_a_model_with_grouped_experts_equals_one_without(name: str) -> None:
    model = build(MODELS[name], dtype=torch.float32)
    logits = model.logits(IDS)
    group_all(model)
    assert (model.logits(IDS) - logits).abs().max() < FP32_ERROR_MAX


@pytest.mark.parametrize("name", ["experts", "sigmoid experts"])
def test_rows_with_adapters_of_experts_equal_the_loop(name: str) -> None:
    model = build(MODELS[name], dtype=torch.float32)
    layer = moe_layer(model)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    adapted_rows = mixed_expert_rows(model, 24)
    looped = layer(x, 24, None, adapted_rows)
    group_all(model)
    grouped, base = layer(x, 24, None, adapted_rows), layer(x, 24)
    assert (grouped - looped).abs().max() < FP32_ERROR_MAX
    assert (grouped[:18] - base[:18]).abs().mean() > 0.1 * base.abs().mean()
    assert (grouped[18:] - base[18:]).abs().max() < FP32_ERROR_MAX
    everything = [AdaptedRows(adapted_rows[0].adapter, rows) for rows in (None, torch.arange(24))]
    outputs = [layer(x, 24, None, (adapted,)) for adapted in everything]
    assert (outputs[0] - outputs[1]).abs().max() < FP32_ERROR_MAX


def check_tensor_parallel_model(_rank: int) -> None:
    # Each of two ranks has 12 of the 24 columns of an expert.
    model = build(EXPERTS, Mesh.create(2, 1), dtype=torch.float32)
    logits = model.logits(IDS)
    group_all(model)
    assert (model.logits(IDS) - logits).abs().max() < FP32_ERROR_MAX


def test_a_split_model_adds_the_biases_once() -> None:
    ranks(2, check_tensor_parallel_model)


def check_expert_parallel_model(_rank: int) -> None:
    logits = build(EIGHT_EXPERTS, dtype=torch.float32).logits(IDS)
    for tp in (1, 2):
        model = build(EIGHT_EXPERTS, Mesh.create(tp, 1, ep=2), dtype=torch.float32)
        group_all(model)
        assert (model.logits(IDS) - logits).abs().max() < FP32_ERROR_MAX


def test_ranks_compute_whole_experts() -> None:
    ranks(2, check_expert_parallel_model)


def test_parameters_are_views_of_the_stacked_weights() -> None:
    layer = moe_layer(build(SMALL, dtype=torch.bfloat16))
    values = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    group_experts(layer)
    assert {name for name, _ in layer.named_parameters()} == values.keys()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, values[name])
    for leaf in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"):
        storages = {
            expert.get_parameter(leaf).untyped_storage().data_ptr()
            for expert in layer.local_experts.values()
        }
        assert len(storages) == 1


def test_experts_with_fp8_weights_are_not_grouped() -> None:
    model = build(EXPERTS, dtype=torch.bfloat16)
    fuse_layers(model, (2,), groups_experts=True)
    kinds = [
        type(layer.mlp.experts_backend)
        for layer in model.decoder_layers
        if isinstance(layer.mlp, MoELayer)
    ]
    assert kinds == [GroupedExperts, TorchExperts, GroupedExperts]


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.bfloat16, "the device is cpu"),
        ({}, torch.float16, "the model's dtype is torch.float16"),
        ({"moe_ffn_hidden_size": 20}, torch.bfloat16, "a 64 x 20 weight"),
        ({"num_experts": 1024}, torch.bfloat16, "the model has 1024 experts"),
    ],
)
def test_the_reason_why_experts_are_not_grouped(
    changes: dict[str, int], dtype: torch.dtype, reason: str
) -> None:
    model = GPT(SMALL.with_fields(**changes), Mesh.single(), dtype=dtype, device="meta")
    text = grouped_experts.unsupported_reason(model)
    assert text is not None and reason in text
