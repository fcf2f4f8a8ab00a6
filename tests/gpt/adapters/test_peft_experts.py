"""Stacked experts in PEFT's form that are inconsistent or not supported are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import open_adapter
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from tests.support.linear_adapters import GATED
from tests.support.models import lively
from tests.support.peft_adapters import write_peft_adapter

CONFIG = GATED.with_fields(
    num_layers=2, num_experts=4, moe_layers=(True, True), moe_router_topk=2, moe_ffn_hidden_size=24
)
RANK = 3
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 6,
    "target_modules": [],
    "target_parameters": [GATE_UP, DOWN],
}
PREFIX = "base_model.model.model.layers"
Tensors = dict[str, Tensor]


def stacked_tensors() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for wrapper, outputs, inputs in ((".base_layer", 48, 32), ("", 32, 24)):
            prefix = f"{PREFIX}.{layer}.mlp.experts{wrapper}"
            shapes = {"A": (4 * RANK, inputs), "B": (outputs, RANK * 4)}
            for letter, shape in shapes.items():
                tensors[f"{prefix}.lora_{letter}.weight"] = torch.randn(shape, generator=draw)
    return tensors


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return lively(CONFIG)


def test_each_expert_has_its_own_part(base: Checkpoint, tmp_path: Path) -> None:
    tensors = stacked_tensors()
    adapter = open_adapter(write_peft_adapter(tmp_path / "a", LORA, tensors), base=base)
    assert len(adapter.linears) == 2 * 4 * 2
    prefix = f"{PREFIX}.1.mlp.experts.base_layer.lora_"
    a = tensors[f"{prefix}A.weight"].view(4, RANK, 32)
    b = tensors[f"{prefix}B.weight"].view(48, RANK, 4)
    for expert in range(4):
        name = f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1"
        change = adapter.linears[name]
        assert change.lora_a is not None and change.lora_b is not None and change.scale == 2
        assert torch.equal(change.lora_a, a[expert])
        assert torch.equal(change.lora_b, b[:, :, expert])


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(ends)}


def replaced(end: str, value: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: value.clone() if k.endswith(end) else v for k, v in tensors.items()}


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "one parameter too few": (
        {"target_parameters": [DOWN]},
        unchanged,
        r"differ in target_parameters: .*experts\.base_layer",
    ),
    "another parameter": (
        {"target_parameters": ["layers.0.mlp.experts.gate_up_proj", DOWN]},
        unchanged,
        r"differ in target_parameters: model\.layers\.1\.mlp\.experts\.base_layer",
    ),
    "a missing tensor": ({}, without("0.mlp.experts.lora_B.weight"), "is in one of them only"),
    "no stacked tensors": ({}, without(".weight"), "has no tensors of such parameters"),
    "an unknown parameter": (
        {"target_parameters": ["mlp.gate.weight"]},
        without(".weight"),
        "has no tensors of such parameters",
    ),
    "no target_parameters": (
        {"target_parameters": None, "target_modules": ["q_proj"]},
        unchanged,
        "without target_parameters",
    ),
    "a module of experts": (
        {},
        lambda tensors: tensors | {f"{PREFIX}.0.mlp.experts.x.lora_A.weight": torch.ones(1)},
        "has only lora_A.weight of model.layers.0.mlp.experts.x",
    ),
    "modules without tensors": ({"target_modules": ["q_proj"]}, unchanged, "has no tensors"),
    "another rank": ({"r": 4}, unchanged, r"has the shape \(12, 32\); .* need \(16, 32\)"),
    "other experts": (
        {},
        replaced("experts.lora_B.weight", torch.ones(32, 15)),
        r"lora_B.weight of model.layers.0.mlp.experts.down_proj has the shape \(32, 15\)",
    ),
    "not finite": (
        {},
        replaced("experts.lora_B.weight", torch.full((32, 12), torch.nan)),
        "not finite",
    ),
    "DoRA": ({"use_dora": True}, unchanged, "PEFT does not apply to parameters"),
    "activated": ({"alora_invocation_tokens": [1]}, unchanged, "PEFT does not apply to parameters"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_stacked_experts_with_faults_are_refused(
    name: str, base: Checkpoint, tmp_path: Path
) -> None:
    fields, change, message = FAULTS[name]
    folder = write_peft_adapter(tmp_path / "a", LORA | fields, change(stacked_tensors()))
    with pytest.raises(AdapterError, match=message):
        open_adapter(folder, base=base)
