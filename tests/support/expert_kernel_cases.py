"""Cases of the Triton kernel of experts against torch, for Triton's interpreter.

The interpreter must be turned on before Triton is imported, so these tests run in a process of
their own: TRITON_INTERPRET=1 python -m pytest tests/support/expert_kernel_cases.py
"""

import pytest
import torch

from gpt.linear import triton_experts
from gpt.linear.grouped_experts import GroupedExperts
from gpt.model.moe import choose_experts
from gpt.parallel.mesh import Mesh
from tests.support.attention_cases import patch_interpreter
from tests.support.experts_cases import CONFIGS, make_backend, moe_layer, routings
from tests.support.models import build

patch_interpreter()

# One row, and more rows of an expert than a block of the kernel has.
ROW_COUNTS = (1, 21)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_equals_torch(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "PAIRS_BLOCK_SIZE", 32)  # Several blocks of pairs.
    config = CONFIGS[name]
    layer = moe_layer(build(config, dtype=torch.float32))
    backend = make_backend(GroupedExperts, layer)
    assert isinstance(backend, GroupedExperts)
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for logits in routings(rows, config.num_experts).values():
        want = backend._compute_in_torch(x, logits)
        got = backend._compute_in_triton(x, logits)
        # The outputs are in the order of the choices.
        assert all(
            torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_computes_only_its_experts(rank: int) -> None:
    config = CONFIGS["many experts"]
    # Without process groups: the compared functions do not communicate.
    mesh = Mesh(torch.device("cpu"), tp=1, dp=3, ep=3, rank=rank)
    local_experts, all_experts = (
        make_backend(GroupedExperts, moe_layer(build(config, m, dtype=torch.float32)))
        for m in (mesh, Mesh.single())
    )
    assert isinstance(local_experts, GroupedExperts)
    assert isinstance(all_experts, GroupedExperts)
    x = torch.randn(21, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for logits in routings(21, config.num_experts).values():
        ids, _ = choose_experts(logits, None, config)
        is_local = (ids // (config.num_experts // 3) == rank).flatten().unsqueeze(1)
        want = all_experts._compute_in_torch(x, logits)[1] * is_local
        for compute in (local_experts._compute_in_torch, local_experts._compute_in_triton):
            assert torch.allclose(compute(x, logits)[1], want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("logit", [float("nan"), float("inf"), float("-inf")])
def test_a_token_without_finite_scores_reads_no_memory_of_others(logit: float) -> None:
    config = CONFIGS["many experts"]
    logits = routings(3, config.num_experts)["all experts"]
    logits[1] = logit
    ids, weights = triton_experts.choose_experts(logits, None, config)
    want_ids, want_weights = choose_experts(logits, None, config)
    assert ids.min() >= 0 and ids.max() < config.num_experts
    assert torch.equal(ids[::2].long(), want_ids[::2])
    assert torch.allclose(weights[::2], want_weights[::2])
    assert weights[1].isnan().all()
