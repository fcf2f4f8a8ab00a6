"""Triton kernels of experts without a GPU: interpreted, and compiled for GPUs."""

from importlib.util import find_spec

import pytest
import torch

from gpt.linear.grouped_experts import TRITON_PAIRS_PER_EXPERT, GroupedExperts
from tests.support.experts_cases import CONFIGS, make_backend, moe_layer
from tests.support.interpreted_cases import check_interpreted_cases
from tests.support.models import EXPERTS, SIGMOID_EXPERTS, build
from tests.support.triton_compiled import SHARED_BYTES, recorded_launches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make tools"),
]


def test_interpreted_kernels_equal_torch() -> None:
    check_interpreted_cases("tests/support/expert_kernel_cases.py")


@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_compiles_a_kernel_after_the_start(name: str) -> None:
    config = CONFIGS[name]
    backend = make_backend(GroupedExperts, moe_layer(build(config, dtype=torch.bfloat16)))
    assert isinstance(backend, GroupedExperts)
    with recorded_launches() as launches:
        backend.compile_kernels()
        compiled = set(launches)
        tokens_max = TRITON_PAIRS_PER_EXPERT * config.num_experts // config.moe_router_topk
        for tokens in range(1, tokens_max + 1):
            x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16)
            backend._compute_in_triton(x, x[:, : config.num_experts])
    assert set(launches) == compiled and len(compiled) == 6


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gated_silu"])
@pytest.mark.parametrize("tokens", [3, 1000])
def test_kernels_compile_for_gpus_without_spills(
    tokens: int, activation: str, capability: int
) -> None:
    from gpt.linear import triton_experts

    hidden, ffn, experts = 2048, 768, 128
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    # Only shapes and alignment count, so all experts have the memory of one number.
    number = torch.zeros(1, dtype=torch.bfloat16)
    columns = ffn * (1 + activation.startswith("gated"))
    fc1, fc2 = number.expand(experts, columns, hidden), number.expand(experts, hidden, ffn)
    config = SIGMOID_EXPERTS if activation == "gelu_tanh" else EXPERTS
    with recorded_launches(capability) as launches:
        ids, _ = triton_experts.choose_experts(
            x[:, :experts].contiguous(), number.expand(experts), config
        )
        order, group_ends = triton_experts.sort_by_expert(ids, experts)
        for bias in (None, number):
            rows = triton_experts.project_tokens(x, fc1, bias, order, group_ends, activation)
            triton_experts.project_sorted_rows(rows, fc2, bias, order, group_ends)
    names = [launch.name for launch in launches.values()]
    assert names.count("expert_matmul") == 4 and len(names) == 6
    for launch in launches.values():
        resources = launch.compile()
        assert resources.shared_bytes <= SHARED_BYTES[capability]
        assert resources.spilled_bytes == 0
