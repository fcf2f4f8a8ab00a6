"""Adapters of packed linears on two tensor ranks: the logits of the reference in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.cpu import kernels
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from gpt.parallel.mesh import Mesh
from tests.support.linear_adapters import random_linears
from tests.support.models import SERVED_CONFIGS, build
from tests.support.ranks import ranks

IDS = torch.arange(3, 27)
METHODS = ("dora", "ia3", "bottleneck")


def adapted_logits(model: GPT, method: str) -> Tensor:
    mesh, linears = model.mesh, random_linears(model.config, method, by_parts=True)
    adapter = shard_adapter(
        linears,
        model.config,
        model.layers,
        rank=mesh.in_stage.rank,
        tp=mesh.tp,
        ep=mesh.ep,
        dtype=model.dtype,
    )
    adapted_rows = (AdaptedRows(model.prepare_adapter(adapter), torch.arange(12)),)
    logits: Tensor = model(IDS, replace(Batch.unpaged((12, 12)), adapted_rows=adapted_rows))
    return logits


def rank_logits(_: int, name: str, tp: int, ep: int) -> list[Tensor]:
    torch.set_num_threads(1)
    model = build(SERVED_CONFIGS[name], Mesh.create(tp, 1, ep=ep), dtype=torch.bfloat16)
    pack_weights(model)
    with torch.inference_mode():
        return [adapted_logits(model, method) for method in METHODS]


@pytest.mark.skipif(kernels.isa_level() not in kernels.ISA_LEVELS[1:], reason="no packed weights")
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("classic", 2, 1),
        ("modern", 2, 1),
        pytest.param("eight experts", 2, 1, marks=pytest.mark.slow),
        pytest.param("eight experts", 2, 2, marks=pytest.mark.slow),
        pytest.param("eight experts", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_the_logits_of_the_reference(name: str, tp: int, ep: int) -> None:
    model = build(SERVED_CONFIGS[name], dtype=torch.float64)
    with torch.inference_mode():
        expected = [adapted_logits(model, method) for method in METHODS]
    # If two experts have nearly equal scores, rounding may select another expert.
    share = 0.1 if model.config.num_experts else 0.03
    for outputs in ranks(2, rank_logits, name, tp, ep):
        for logits, exact in zip(outputs, expected, strict=True):
            assert (logits - exact).std() < share * exact.std()
