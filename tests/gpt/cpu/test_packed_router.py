"""The C library's router chooses the experts of `choose_experts` in gpt/model/moe.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_experts import ChoiceRule, PackedRouter
from gpt.cpu.packed_linear import (
    Fp32PackedLinear,
    PackedLinear,
    packed_numel,
    supports_weight,
)
from gpt.model.moe import choose_experts
from tests.support.models import EXPERTS

pytestmark = pytest.mark.skipif(
    not supports_weight(torch.empty(32, 32, dtype=torch.bfloat16)),
    reason="the C library has no bf16 GEMM for this CPU",
)
# Scores may have an error of this size in fp32, so that rounding orders two of them, which happens
# in few rows.
ROUNDING_MAX = 1e-6
EQUAL_ROWS_MIN = 0.9
ROWS = 200
# Numbers of experts, and experts per token.
SIZES = [(1, 1), (5, 1), (5, 2), (8, 8), (60, 4), (64, 8), (64, 1), (128, 128), (257, 10)]
RULES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
}


def make_router(
    config: GPTConfig, expert_bias: Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> PackedRouter:
    weight = torch.zeros(config.num_experts, 2, dtype=dtype)
    linear_type = PackedLinear if dtype == torch.bfloat16 else Fp32PackedLinear
    packed = linear_type(weight, torch.zeros(packed_numel(weight), dtype=dtype))
    rule = ChoiceRule(
        config.moe_router_topk,
        config.moe_router_score_function == "sigmoid",
        config.moe_router_pre_softmax,
        config.moe_router_topk_scaling_factor,
    )
    return PackedRouter(packed, None, expert_bias, rule)


def logits_of(kind: str, experts: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(ROWS, experts, generator=generator)
    scale = {"usual": 1.0, "large": 30.0, "tiny": 1e-3, "extreme": 1e37}.get(kind, 0.0)
    # Ties: four different logits, and in the first row a single one.
    logits = drawn * scale if scale else (drawn * 2).round().clamp(-1, 2)
    if kind == "ties":
        logits[0] = 0.5
    return logits.clamp(-3e38, 3e38).bfloat16()


def selection_scores(logits: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """Return the scores by which experts are chosen, in fp64."""
    scores = logits.double()
    if config.moe_router_score_function == "sigmoid":
        scores = scores.sigmoid()
    elif config.moe_router_pre_softmax:
        scores = scores.softmax(-1)
    return scores if bias is None else scores + bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["usual", "large", "tiny", "extreme", "ties"])
def test_choices_and_weights_equal_torch(kind: str, rule: str, has_bias: bool) -> None:
    for seed, (experts, topk) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(seed)
        config = EXPERTS.with_fields(
            num_experts=experts,
            moe_router_topk=topk,
            moe_router_topk_scaling_factor=2.5 if seed % 2 else 1.0,
            **RULES[rule],
        )
        # Multiples of 1 / 4, so that equal logits are ties if their biases are equal too.
        bias = torch.randint(-1, 2, (experts,), generator=generator) / 4 if has_bias else None
        logits = logits_of(kind, experts, generator)
        want_ids, want = choose_experts(logits, bias, config)
        ids, weights = make_router(config, bias).choose(logits)
        equal = (ids == want_ids).all(-1)
        assert equal.double().mean() >= EQUAL_ROWS_MIN, (experts, topk)
        torch.testing.assert_close(weights[equal], want[equal], rtol=1e-5, atol=1e-30)
        # In the other rows, the fp32 rounding of nearly equal scores decides.
        scores = selection_scores(logits, bias, config)
        errors = scores.gather(-1, ids) - scores.gather(-1, want_ids)
        assert errors[~equal].abs().sum() <= ROUNDING_MAX * errors[~equal].numel()


def test_equal_scores_choose_the_lowest_numbers() -> None:
    config = EXPERTS.with_fields(num_experts=70, moe_router_topk=3)
    logits = torch.zeros(2, 70, dtype=torch.bfloat16)
    logits[1, [9, 30, 69]] = 1.0
    for ids in (
        choose_experts(logits, None, config)[0],
        make_router(config, None).choose(logits)[0],
    ):
        assert ids.tolist() == [[0, 1, 2], [9, 30, 69]]


def test_fp32_logits_are_not_rounded() -> None:
    config = EXPERTS.with_fields(num_experts=3, moe_router_topk=2)
    logits = torch.tensor([[1.0, 1.0001, 1.0002]])
    want_ids, want = choose_experts(logits, None, config)
    ids, weights = make_router(config, None, torch.float32).choose(logits)
    assert ids.tolist() == want_ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, want)


def test_a_choice_with_nan_is_that_of_torch() -> None:
    config = EXPERTS.with_fields(num_experts=6, moe_router_topk=2)
    logits = torch.tensor([[0, 1, torch.nan, 2, torch.nan, 3], [torch.nan] * 6]).bfloat16()
    ids, weights = make_router(config, None).choose(logits)
    assert torch.equal(ids, choose_experts(logits, None, config)[0])
    assert weights.isnan().all()


def test_rows_of_a_large_batch_equal_single_rows() -> None:
    config = EXPERTS.with_fields(num_experts=64, moe_router_topk=8)
    router, threads = make_router(config, None), torch.get_num_threads()
    logits = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        torch.set_num_threads(3)
        ids, weights = router.choose(logits)
    finally:
        torch.set_num_threads(threads)
    for row in range(0, 4000, 7):
        single_ids, single_weights = router.choose(logits[row : row + 1])
        assert torch.equal(single_ids[0], ids[row])
        assert torch.equal(single_weights[0], weights[row])


def test_no_rows_have_no_choices() -> None:
    config = EXPERTS.with_fields(num_experts=5, moe_router_topk=2)
    ids, weights = make_router(config, None).choose(torch.zeros(0, 5, dtype=torch.bfloat16))
    assert ids.shape == weights.shape == (0, 2)
