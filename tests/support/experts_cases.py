"""Checks of an experts backend against torch: routings, shapes of experts, and their error.

The checks are the same on a CPU and on a GPU.
"""

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear.grouped_experts import GroupedExperts
from gpt.model.gpt_model import GPT
from gpt.model.moe import ExpertsBackend, MoELayer, TorchExperts
from gpt.parallel.mesh import Mesh
from tests.support.models import EXPERTS, SIGMOID_EXPERTS, build

SMALL = EXPERTS.with_fields(num_layers=1, moe_layers=(True,), hidden_size=64)
CONFIGS = {
    "gated, biases, shared expert": SMALL,
    "no gate": SMALL.with_fields(gated=False, activation="gelu_tanh"),
    "no biases": SIGMOID_EXPERTS.with_fields(num_layers=1, moe_layers=(True,), hidden_size=64),
    "many experts": SMALL.with_fields(num_experts=18, moe_router_topk=4, mlp_bias=False),
}
ROW_COUNTS = (1, 2, 7, 64, 300)
# The largest permitted value of `excess_errors`. The grouped matmul rounds before the bias is added
# and again after it, and a linear rounds once.
EXCESS_MAX = 1.6


def routings(rows: int, experts: int) -> dict[str, Tensor]:
    """Return router logits of `rows` rows: all experts, few experts, and one first choice.

    The logits of a row are different numbers of bf16, so that no backend has to choose between
    equal scores.
    """
    generator = torch.Generator().manual_seed(rows)
    logits = torch.rand(rows, experts, generator=generator).argsort(-1) / 8
    few = logits.clone()
    few[:, ::2] -= 16.0  # Every other expert has no rows, unless too few others remain.
    same_first = logits.clone()
    same_first[:, experts // 2] += 16.0
    return {"all experts": logits, "few experts": few, "one first choice": same_first}


def moe_layer(model: GPT) -> MoELayer:
    """Return the MLP of the first layer, which must have experts."""
    layer = model.decoder_layers[0].mlp
    assert isinstance(layer, MoELayer)
    return layer


def make_backend(
    kind: type[TorchExperts] | type[GroupedExperts], layer: MoELayer
) -> ExpertsBackend:
    """Return a backend of this class for the experts of a layer."""
    return kind(layer.local_experts, layer.router, layer.config, layer.mesh)


def excess_errors(config: GPTConfig, rows: int, device: str) -> dict[str, float]:
    """Return by routing: the error of grouped experts in bf16, relative to that of `TorchExperts`.

    The errors are standard deviations from the outputs in fp64 of the same weights and rows.
    """
    model = build(config, Mesh.single(device), dtype=torch.bfloat16)
    exact = build(config)
    for values, weight in zip(exact.parameters(), model.parameters(), strict=True):
        values.data.copy_(weight)  # Rounded to bf16.
    looped, exact_experts = (make_backend(TorchExperts, moe_layer(m)) for m in (model, exact))
    grouped = make_backend(GroupedExperts, moe_layer(model))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, config.hidden_size, generator=generator).bfloat16()
    ratios = {}
    for name, float_logits in routings(rows, config.num_experts).items():
        logits = float_logits.bfloat16()
        want = exact_experts.forward(x.double(), logits.double(), rows)
        plain, got = (
            backend.forward(x.to(device), logits.to(device), rows).cpu().double()
            for backend in (looped, grouped)
        )
        ratios[name] = float((got - want).square().mean() / (plain - want).square().mean()) ** 0.5
    return ratios
