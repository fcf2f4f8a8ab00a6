"""Layer weights: the numbers of weights of a layer that a token uses and that a step reads.

They differ in a MoE layer: a token uses some experts, and the tokens of a step together read more
of them. With expert parallelism, the ranks have different numbers of chosen experts, and the layer
takes as long as on the busiest rank. The module does not import torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from statistics import NormalDist

from gpt.config import GPTConfig
from gpt.parallel.weight_sharding import RankInStage, local_kv_heads


@dataclass(frozen=True)
class LayerWeights:
    """Numbers of weights of the mean layer, on the busiest rank."""

    used: float  # By one token, as the mean over the tokens of a step.
    read: float  # By a step.


def layer_weights(config: GPTConfig, rows: float, *, tp: int = 1, ep: int = 1) -> LayerWeights:
    """Return the weights of the mean layer for a step of `rows` tokens.

    Each token uses `moe_router_topk` random experts. Without expert parallelism, `rows` tokens
    together read this mean number of experts:
      num_experts * (1 - (1 - moe_router_topk / num_experts) ** rows)
    """
    h, d = config.hidden_size, config.kv_channels
    queries = config.num_attention_heads * d / tp
    attention = h * (2 * queries + 2 * local_kv_heads(config, tp) * d)
    matrices = (3 if config.gated else 2) * h
    moe_share = sum(config.moe_layers) / config.num_layers
    always_used = attention + (1 - moe_share) * matrices / tp * config.ffn_hidden_size
    if not moe_share:
        return LayerWeights(always_used, always_used)
    always_used += moe_share * matrices / tp * config.moe_shared_expert_intermediate_size
    expert_tp = RankInStage(0, tp, ep).expert_tp
    expert = moe_share * matrices / expert_tp * config.moe_ffn_hidden_size
    load = busiest_rank(config.num_experts, config.moe_router_topk, ep, max(1.0, rows))
    return LayerWeights(
        always_used + load.pairs_per_token * expert, always_used + load.experts_read * expert
    )


@dataclass(frozen=True)
class ExpertLoad:
    pairs_per_token: float  # Pairs of a token and one of its experts on the rank, per token.
    experts_read: float


@lru_cache(maxsize=4096)
def busiest_rank(experts: int, topk: int, ep: int, rows: float) -> ExpertLoad:
    """Return the mean load of the busiest of `ep` ranks, with random experts of `rows` tokens.

    The mean of the maximum of `ep` ranks is approximated by a quantile of a normal distribution
    (Blom), with the mean and the variance of one rank.
    """
    local = experts / ep
    probability = 1 - (1 - topk / experts) ** rows  # Of an expert to be chosen by any token.
    mean_pairs, mean_read = rows * topk / ep, local * probability
    if ep == 1:
        return ExpertLoad(topk, mean_read)
    quantile = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    # The experts of a token are drawn without replacement: a hypergeometric distribution.
    pairs_variance = rows * topk / ep * (1 - 1 / ep) * (experts - topk) / (experts - 1)
    read_variance = min(pairs_variance, mean_read * (1 - probability))
    pairs_max = rows * min(topk, local)
    pairs = max(ceil(mean_pairs), mean_pairs + quantile * sqrt(pairs_variance))
    read = max(min(1.0, local), mean_read + quantile * sqrt(read_variance))
    return ExpertLoad(min(pairs, pairs_max) / rows, min(read, local, pairs_max))
