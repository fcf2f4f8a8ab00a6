"""Sharding of linear adapters over tensor ranks, which follows that of the linears.

The low-rank term of a linear is sharded so that it needs no communication beside the linear's own.
A column-parallel linear has A whole and B with the rows of the base weight. A row-parallel linear
has A with the columns of the base weight and B whole: its term is added to the partial output,
before the sum over tensor ranks. A bottleneck is whole on each rank, because it acts after the sum.
The linears of an expert are split over the ranks that share the expert; the other ranks have none
of their terms.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter, LinearTerm, OutputColumns
from gpt.linear_parts import GATED_PARTS, join_key, split_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears, aligned_bytes
from gpt.parallel.weight_sharding import (
    RankInStage,
    ShardRule,
    ShardSpec,
    expert_number,
    layer_number,
    local_kv_heads,
)


def part_rows(linear: AdaptableLinear, part: str, config: GPTConfig) -> Tensor:
    """Return the rows of a part in the weight of its fused linear, in the part's own order.

    For the part "", the rows of the whole linear.
    """
    rows = torch.arange(linear.out_features)
    if not part:
        return rows
    if linear.rule is ShardRule.GATED:
        return rows.view(2, -1)[GATED_PARTS.index(part)]
    return _head_rows(rows, config.num_query_groups, config.kv_channels, part)


def _head_rows(rows: Tensor, groups: int, channels: int, part: str) -> Tensor:
    """Return the elements of `rows`, in Megatron's order of a QKV linear, that belong to a part."""
    heads = rows.view(groups, -1, channels)
    by_part = {"query": heads[:, :-2], "key": heads[:, -2], "value": heads[:, -1]}
    return by_part[part].flatten()


def shard_adapter(
    adapters: Mapping[str, LinearAdapter],
    config: GPTConfig,
    layers: Iterable[int],
    *,
    rank: int = 0,
    tp: int = 1,
    ep: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, list[LinearTerm]]:
    """Return the terms of rank `rank` of a pipeline stage in the stage's layers, by linear.

    The adapters must fit the model (gpt/adapters/linear_check.py).
    """
    linears, stage_layers = adaptable_linears(config), set(layers)
    in_stage = RankInStage(rank, tp, ep)
    terms: dict[str, list[LinearTerm]] = {}
    for key, adapter in adapters.items():
        name, part = split_key(key)
        split = in_stage.split_of(name, config)
        if layer_number(name) not in stage_layers or split is None:
            continue
        term = shard_linear_adapter(
            adapter, linears[name], part, config, rank=split[0], tp=split[1]
        )
        terms.setdefault(name, []).append(term_to(term, dtype, device))
    return terms


def shard_linear_adapter(
    adapter: LinearAdapter,
    linear: AdaptableLinear,
    part: str,
    config: GPTConfig,
    *,
    rank: int,
    tp: int,
) -> LinearTerm:
    """Return the shard of the adapter of one linear or part on a rank.

    The linear is split over `tp` ranks, of which this is number `rank` (`RankInStage.split_of`).
    The shard may share the adapter's memory.
    """
    if adapter.bottleneck is not None:
        return LinearTerm(bottleneck=adapter.bottleneck)
    columns = output_columns(linear, part, config, tp)
    if tp == 1:
        return LinearTerm(
            columns,
            adapter.lora_a,
            adapter.lora_b,
            adapter.scale,
            adapter.output_factor,
            adapter.output_scale,
            adapter.input_scale,
        )
    shard = linear.shard(config, rank, tp)
    if linear.is_row_parallel:
        channels = _select_ranges(shard)
        return LinearTerm(
            None,
            None if adapter.lora_a is None else adapter.lora_a[:, channels],
            adapter.lora_b,
            adapter.scale,
            adapter.output_factor,
            adapter.output_scale,
            None if adapter.input_scale is None else adapter.input_scale[channels],
        )
    rows = local_part_rows(linear, part, config, rank=rank, tp=tp)
    factor = adapter.output_factor
    return LinearTerm(
        columns,
        adapter.lora_a,
        None if adapter.lora_b is None else adapter.lora_b[rows],
        adapter.scale,
        None if factor is None else factor[rows],
        None if adapter.output_scale is None else adapter.output_scale[rows],
        adapter.input_scale,
    )


def local_part_rows(
    linear: AdaptableLinear, part: str, config: GPTConfig, *, rank: int, tp: int
) -> Tensor:
    """Return the rows of a part that tensor rank `rank` computes, in the order of its output.

    The numbers count the part's own rows. `linear` must be column-parallel.
    """
    local_rows = _select_ranges(linear.shard(config, rank, tp))
    if not part:
        return local_rows
    # The part's own number of each row of the fused weight; -1 for rows of other parts.
    numbers = torch.full((linear.out_features,), -1)
    rows = part_rows(linear, part, config)
    numbers[rows] = torch.arange(len(rows))
    local_numbers = numbers[local_rows]
    return local_numbers[local_numbers >= 0]


def output_columns(
    linear: AdaptableLinear, part: str, config: GPTConfig, tp: int
) -> OutputColumns | None:
    """Return the columns of a part in the output of a rank's shard of a column-parallel linear."""
    if not part:
        return None
    if linear.rule is ShardRule.GATED:
        width = linear.out_features // 2 // tp
        return OutputColumns(width * GATED_PARTS.index(part), width, width, 1)
    groups, channels = local_kv_heads(config, tp), config.kv_channels
    queries = config.num_attention_heads // tp // groups
    first_head = {"query": 0, "key": queries, "value": queries + 1}[part]
    width = channels * (queries if part == "query" else 1)
    return OutputColumns(first_head * channels, width, (queries + 2) * channels, groups)


def term_to(term: LinearTerm, dtype: torch.dtype, device: torch.device | str) -> LinearTerm:
    """Return a copy of the term with contiguous tensors of `dtype` on `device`."""
    return term.map_tensors(lambda tensor: tensor.to(device, dtype, copy=True).contiguous())


def largest_rank_bytes(
    adapters: Mapping[str, LinearAdapter],
    config: GPTConfig,
    stages: Iterable[Iterable[int]],
    *,
    tp: int,
    itemsize: int,
    ep: int = 1,
) -> int:
    """Return the bytes of an adapter's terms on the rank that needs the most.

    `stages`: the layers of each pipeline stage; `itemsize`: the bytes of an element in memory. All
    ranks of a stage that hold the same experts need equally many bytes.
    """
    linears, expert_tp = adaptable_linears(config), RankInStage(0, tp, ep).expert_tp
    # By layer, for each of the `ep` parts of the experts.
    layer_bytes: dict[int, list[int]] = {}
    for key, adapter in adapters.items():
        name, part = split_key(key)
        layer = layer_number(name)
        assert layer is not None
        shapes: dict[str, Any] = {
            tensor_name: torch.empty(tensor.shape, device="meta")
            for tensor_name, tensor in adapter.tensors()
        }
        shape_adapter, expert = LinearAdapter(**shapes), expert_number(name)
        term = shard_linear_adapter(
            shape_adapter,
            linears[name],
            part,
            config,
            rank=0,
            tp=tp if expert is None else expert_tp,
        )
        term_bytes = sum(aligned_bytes(tensor.numel() * itemsize) for tensor in term.tensors())
        part_bytes = layer_bytes.setdefault(layer, [0] * ep)
        for experts_part in range(ep) if expert is None else [expert * ep // config.num_experts]:
            part_bytes[experts_part] += term_bytes
    no_bytes = [0] * ep
    return max(
        max(map(sum, zip(*(layer_bytes.get(layer, no_bytes) for layer in layers), strict=True)))
        for layers in map(list, stages)
        if layers
    )


def merge_parts(
    parts: Mapping[str, Tensor], linear: AdaptableLinear, config: GPTConfig, fill: float
) -> Tensor:
    """Return the rows of a fused linear from the rows of its parts; `fill` for missing parts."""
    first = next(iter(parts.values()))
    merged = first.new_full((linear.out_features, *first.shape[1:]), fill)
    for part, rows in parts.items():
        merged[part_rows(linear, part, config)] = rows
    return merged


def linear_keys(linear: AdaptableLinear) -> tuple[str, ...]:
    """Return the keys of a linear's parts; the linear's own key if it is not fused."""
    return tuple(join_key(linear.name, part) for part in linear.parts) or (linear.name,)


def _select_ranges(shard: ShardSpec) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in shard.ranges])
