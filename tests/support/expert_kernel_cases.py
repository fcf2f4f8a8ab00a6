"""Cases of the Triton kernel of experts against torch, for Triton's interpreter.

The interpreter must be turned on before Triton is imported, so these tests run in a process of
their own: TRITON_INTERPRET=1 python -m pytest tests/support/expert_kernel_cases.py
"""

import pytest
import torch

from gpt.linear import triton_experts
from gpt.linear.grouped_experts import GroupedExperts
from gpt.model.moe import choose_experts
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
