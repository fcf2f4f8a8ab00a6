"""Inference cost model: parameters, weight bytes and KV-cache bytes of each rank.

All sizes are computed from the parameter table in `gpt.parallel.weight_sharding`. The model is
built from the same table, so weight and KV bytes equal what a rank allocates for them. The module
does not import torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.kv_groups import kv_groups, layers_per_block
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import (
    ParameterSpec,
    RankInStage,
    check_split,
    expert_number,
    is_on_stage,
    local_kv_heads,
    parameter_dtype,
    parameter_specs,
)

# Bytes per KV-cache element; the cache may have a smaller dtype than the weights.
KV_BYTES = {**DTYPE_BYTES, "fp8": 1}


@dataclass(frozen=True)
class RankCost:
    """Sizes of one rank; KV bytes per token are summed over the rank's layers and KV heads."""

    tp_rank: int
    pp_rank: int
    layers: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


@lru_cache(maxsize=64)
def parameter_count(config: GPTConfig) -> int:
    """Return the number of parameters of the whole model, without vocabulary padding."""
    return sum(prod(parameter.shape) for parameter in parameter_specs(config).values())


def kv_bytes_per_token(config: GPTConfig, layers: int, tp: int = 1, dtype: str = "") -> int:
    """Return the KV-cache bytes of one token in `layers` layers on one tensor rank.

    `dtype`: the dtype of the KV cache; "": the dtype of `config`.
    """
    width = local_kv_heads(config, tp) * config.kv_channels
    return 2 * layers * width * KV_BYTES[dtype or config.dtype]


def rank_costs(
    config: GPTConfig,
    tp: int = 1,
    pp: int = 1,
    *,
    dtype: str = "",
    kv_dtype: str = "auto",
    stages: list[int] | None = None,
    ep: int = 1,
) -> list[RankCost]:
    """Return the sizes of all ranks of a split, stage by stage.

    - `dtype`: the model's dtype; "": the dtype of `config`.
    - `kv_dtype`: the dtype of the KV cache; "auto": the model's dtype.
    - `stages`: the number of layers of each stage; None: an even division.
    - `ep`: the number of parts of whole experts (`RankInStage`).
    """
    check_split(config, tp, pp, stages, ep=ep)
    groups = kv_groups(config)
    dtype = dtype or config.dtype
    kv_cache_dtype = dtype if kv_dtype == "auto" else kv_dtype
    parameter_table = parameter_specs(config)
    costs = []
    for stage, (layers,) in enumerate(stage_layers(config.num_layers, pp, stages)):
        stage_parameters = _count_alike(
            [p for p in parameter_table.values() if is_on_stage(config, p.name, layers)]
        )
        for rank in range(max(tp, ep)):
            position = RankInStage(rank, tp, ep)
            shards = [
                (parameter.name, count * prod(shard.local_shape(parameter.shape)))
                for parameter, count in stage_parameters
                if (shard := position.shard(parameter, config)) is not None
            ]
            costs.append(
                RankCost(
                    tp_rank=position.tp_rank,
                    pp_rank=stage,
                    layers=len(layers),
                    parameters=sum(elements for _, elements in shards),
                    weight_bytes=sum(
                        elements * _bytes_per_parameter(name, dtype) for name, elements in shards
                    ),
                    # With several KV groups, part of a smaller group's blocks is unused.
                    kv_bytes_per_token=kv_bytes_per_token(
                        config, len(groups) * layers_per_block(groups, layers), tp, kv_cache_dtype
                    ),
                )
            )
    return costs


def _count_alike(parameters: list[ParameterSpec]) -> list[tuple[ParameterSpec, int]]:
    """Return one parameter of each kind, and the number of parameters of its kind.

    Parameters of a kind have equal shards on every rank. A model with many experts has tens of
    thousands of parameters, but few kinds.
    """
    groups: dict[tuple[object, ...], list[ParameterSpec]] = {}
    for parameter in parameters:
        leaf = parameter.name.rpartition(".")[2]
        kind = (parameter.shape, parameter.shard_rule, expert_number(parameter.name), leaf)
        groups.setdefault(kind, []).append(parameter)
    return [(group[0], len(group)) for group in groups.values()]


def _bytes_per_parameter(name: str, dtype: str) -> int:
    return DTYPE_BYTES[parameter_dtype(name, dtype)]
