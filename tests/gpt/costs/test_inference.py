"""Inference costs: counted bytes equal the allocated bytes."""

import subprocess
import sys

import pytest
import torch

from gpt.attention.kv_cache import KVPool
from gpt.config import GPTConfig
from gpt.costs.inference import kv_bytes_per_token, parameter_count, rank_costs
from gpt.kv_groups import kv_groups
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from tests.support.models import CONFIGS, EIGHT_EXPERTS, SIGMOID_EXPERTS


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_bytes_of_each_rank_equal_those_of_its_model(
    name: str, tp: int, pp: int, dtype: str
) -> None:
    config = CONFIGS[name]
    stages = stage_layers(config.num_layers, pp)
    for rank, cost in enumerate(rank_costs(config, tp, pp, dtype=dtype)):
        mesh = Mesh(torch.device("meta"), tp=tp, pp=pp, rank=rank)
        layers = stages[mesh.pp_rank][0]
        model = GPT(config, mesh, layers=layers, dtype=getattr(torch, dtype))
        parameters = list(model.parameters())
        assert cost.parameters == sum(p.numel() for p in parameters)
        assert cost.weight_bytes == sum(p.numel() * p.element_size() for p in parameters)
        groups = kv_groups(config)
        pool = KVPool(config, layers, 2, tp=tp, dtype=model.dtype, device="meta", groups=groups)
        # A token has a block in each group.
        assert cost.kv_bytes_per_token * pool.block_tokens == len(groups) * pool.block_bytes


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 2, 4), (2, 1, 2), (4, 1, 2), (2, 2, 4)])
def test_bytes_of_each_expert_parallel_rank_equal_those_of_its_model(
    tp: int, pp: int, ep: int
) -> None:
    config = EIGHT_EXPERTS
    costs = rank_costs(config, tp, pp, ep=ep)
    assert len(costs) == max(tp, ep) * pp
    for rank, cost in enumerate(costs):
        mesh = Mesh(torch.device("meta"), tp=tp, dp=max(1, ep // tp), pp=pp, ep=ep, rank=rank)
        layers = stage_layers(config.num_layers, pp)[mesh.pp_rank][0]
        model = GPT(config, mesh, layers=layers)
        assert cost.parameters == sum(p.numel() for p in model.parameters())
        assert cost.weight_bytes == sum(p.nbytes for p in model.parameters())


def test_fp8_kv_cache_takes_half_of_bf16() -> None:
    config = CONFIGS["classic"]
    bf16_costs, fp8_costs = (
        rank_costs(config, 2, 2, dtype="bfloat16", kv_dtype=kind) for kind in ("auto", "fp8")
    )
    for bf16_rank, fp8_rank in zip(bf16_costs, fp8_costs, strict=True):
        assert bf16_rank.kv_bytes_per_token == 2 * fp8_rank.kv_bytes_per_token
        assert bf16_rank.weight_bytes == fp8_rank.weight_bytes


def test_gpt3_175b_has_its_published_parameter_count() -> None:
    config = GPTConfig(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        vocab_size=51200,
        max_position_embeddings=2048,
    )
    # 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h), and the last norm.
    assert parameter_count(config) == 96 * (12 * 12288**2 + 13 * 12288) + 53248 * 12288 + 2 * 12288
    assert kv_bytes_per_token(config, 96, dtype="bfloat16") == 2 * 96 * 12288 * 2


def test_router_bias_stays_in_fp32() -> None:
    model = GPT(SIGMOID_EXPERTS, device="meta", dtype=torch.bfloat16)
    fp32_names = [name for name, p in model.named_parameters() if p.dtype != torch.bfloat16]
    assert fp32_names == [f"decoder.layers.{n}.mlp.router.expert_bias" for n in (0, 2, 3)]


def test_costs_need_no_torch() -> None:
    code = "import gpt.costs.inference, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
