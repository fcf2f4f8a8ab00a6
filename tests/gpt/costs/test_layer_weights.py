"""Weights of a layer on the busiest rank: random tokens, tensor and expert parallel ranks."""

from itertools import product

import pytest
import torch

from gpt.costs.layer_weights import busiest_rank, layer_weights
from tests.support.models import EIGHT_EXPERTS, MODERN

DRAWS = 200


def mean_of_busiest(experts: int, topk: int, ep: int, rows: int) -> tuple[float, float]:
    """Mean numbers of pairs per token and of chosen experts on the busiest rank, by drawing."""
    generator = torch.Generator().manual_seed(0)
    pairs, chosen = 0, 0
    for _ in range(DRAWS):
        ids = torch.rand(rows, experts, generator=generator).topk(topk, -1).indices
        owners = (ids // (experts // ep)).flatten()
        pairs += int(torch.bincount(owners, minlength=ep).max())
        chosen += int(torch.bincount(ids.unique() // (experts // ep), minlength=ep).max())
    return pairs / DRAWS / rows, chosen / DRAWS


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (32, 4), (128, 8)])
def test_the_busiest_rank_has_the_load_of_random_tokens(experts: int, topk: int) -> None:
    for ep, rows in product((1, 2, 4, 8), (1, 4, 64)):
        pairs, chosen = mean_of_busiest(experts, topk, ep, rows)
        load = busiest_rank(experts, topk, ep, rows)
        assert load.pairs_per_token == pytest.approx(pairs, rel=0.12), (ep, rows)
        assert load.experts_read == pytest.approx(chosen, rel=0.12), (ep, rows)


def test_ranks_share_the_weights_of_a_dense_layer() -> None:
    weights = layer_weights(MODERN, 1)
    assert weights.used == weights.read == layer_weights(MODERN, 1000).read
    assert layer_weights(MODERN, 1, tp=2).read == weights.read / 2


def test_a_large_step_reads_all_experts_of_a_rank() -> None:
    config = EIGHT_EXPERTS
    single_rank, tensor_ranks, expert_ranks = (
        layer_weights(config, 1e6, tp=tp, ep=ep).read for tp, ep in ((1, 1), (2, 1), (2, 2))
    )
    assert tensor_ranks == pytest.approx(expert_ranks) == pytest.approx(single_rank / 2)
    with_four_ranks = layer_weights(config, 1e6, ep=4).read
    matrices = 3 * config.hidden_size
    experts = 0.75 * matrices * config.moe_ffn_hidden_size * 8
    assert single_rank - with_four_ranks == pytest.approx(0.75 * experts)
