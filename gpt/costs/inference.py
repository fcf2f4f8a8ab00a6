"""What a model costs: parameters, and bytes of weights and KV on each rank.

All of it is counted from the table in `gpt.parallel.sharding`, the one that the model itself is
built by, so a ledger cannot drift from what is allocated. Plain arithmetic: no torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.parallel.sharding import (
    check_split,
    kept_dtype,
    local_groups,
    on_stage,
    parameters,
    part,
    stage_layers,
)

# A number of a key or a value; these may be kept in fewer bits than all else.
KV_BYTES = {**DTYPE_BYTES, "fp8": 1}


@dataclass(frozen=True)
class RankCost:
    """Bytes of one rank. KV is per token of context, over the rank's own layers and groups."""

    tp_rank: int
    pp_rank: int
    layers: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


@lru_cache(maxsize=64)
def parameter_count(config: GPTConfig) -> int:
    """Parameters of the whole model, padding and copies not counted."""
    return sum(prod(parameter.shape) for parameter in parameters(config).values())


def kv_bytes_per_token(config: GPTConfig, layers: int, tp: int = 1, dtype: str = "") -> int:
    """Keys and values of one token in `layers` layers of one tensor rank."""
    width = local_groups(config, tp) * config.kv_channels
    return 2 * layers * width * KV_BYTES[dtype or config.dtype]


def rank_costs(
    config: GPTConfig,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype: str = "",
    kv_dtype: str = "auto",
    stages: list[int] | None = None,
) -> list[RankCost]:
    """Every rank of a split, stage by stage: what it will hold. "auto": keys as the model."""
    check_split(config, tp, pp, stages)
    dtype = dtype or config.dtype
    kept_in = dtype if kv_dtype == "auto" else kv_dtype
    table = parameters(config)
    costs = []
    for stage, (layers,) in enumerate(stage_layers(config.num_layers, pp, stages)):
        held = [p for p in table.values() if on_stage(config, p.name, layers)]
        for rank in range(tp):
            counts = {p.name: prod(part(p, config, rank, tp).shape(p.shape)) for p in held}
            costs.append(
                RankCost(
                    tp_rank=rank,
                    pp_rank=stage,
                    layers=len(layers),
                    parameters=sum(counts.values()),
                    weight_bytes=sum(n * _bytes(name, dtype) for name, n in counts.items()),
                    kv_bytes_per_token=kv_bytes_per_token(config, len(layers), tp, kept_in),
                )
            )
    return costs


def _bytes(name: str, dtype: str) -> int:
    return DTYPE_BYTES[kept_dtype(name, dtype)]
