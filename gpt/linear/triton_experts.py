"""Launchers of the Triton kernels that choose and compute the experts of few rows.

The blocks of the matmul depend on the mean number of rows of an expert, but not on the routing. No
launch waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_linear import ACTIVATIONS, GATED_PREFIX
from gpt.linear import triton_expert_kernels as kernels
from gpt.triton_runtime import launcher
from gpt.triton_runtime.block_sizes import next_power_of_two

PAIRS_BLOCK_SIZE = 256  # Pairs that a program of `group_pairs` reads at once.
FEW_PAIRS_PER_EXPERT = 8  # The mean number of pairs up to which most experts fit into 16 rows.
WARPS = 4


@dataclass(frozen=True)
class ExpertBlocks:
    """The sizes of the blocks of a matmul."""

    rows: int
    columns: int
    gated_columns: int  # Of a gated fc1: each output column needs two columns of weights.
    channels: int
    stages: int


# Of those measured on an H100 the fastest. 16 is the smallest number of rows of tensor cores.
BLOCKS_FOR_FEW_PAIRS = ExpertBlocks(16, 32, 32, 256, 3)
BLOCKS_FOR_MORE_PAIRS = ExpertBlocks(32, 64, 32, 128, 4)


def choose_experts(
    router_logits: Tensor, bias: Tensor | None, config: GPTConfig
) -> tuple[Tensor, Tensor]:
    """Compute `choose_experts` of gpt/model/moe.py, with weights in the dtype of the logits."""
    logits = router_logits.contiguous()
    tokens, experts = logits.shape
    topk = config.moe_router_topk
    ids = logits.new_empty(tokens, topk, dtype=torch.int32)
    weights = logits.new_empty(tokens, topk)
    launcher.launch(
        kernels.choose_experts_row,
        (tokens,),
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        experts,
        float(config.moe_router_topk_scaling_factor),
        EXPERTS_PER_TOKEN=topk,
        SIGMOID=config.moe_router_score_function == "sigmoid",
        PRE_SOFTMAX=config.moe_router_pre_softmax,
        HAS_BIAS=bias is not None,
        BLOCK_CHOICES=next_power_of_two(topk),
        BLOCK_SIZE=next_power_of_two(experts),
        num_warps=1,
    )
    return ids, weights


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a token and one of its experts by expert; `ids` are the experts.

    Return the sorted pairs' numbers, and for each expert the end of its sorted pairs. Pairs of
    numbers from `experts` on are left out: what follows the last end is undefined.
    """
    pairs = ids.numel()
    order = ids.new_empty(pairs)
    group_ends = ids.new_empty(experts)
    launcher.launch(
        kernels.group_pairs,
        (experts,),
        ids,
        order,
        group_ends,
        pairs,
        BLOCK_SIZE=PAIRS_BLOCK_SIZE,
        num_warps=1,
    )
    return order, group_ends


def project_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    group_ends: Tensor,
    activation: str,
) -> Tensor:
    """Return activation(fc1) of each sorted pair; `x` has a row for each token.

    `weight` is (experts, columns, channels). `sort_by_expert` returns `order` and `group_ends`.
    """
    is_gated = activation.startswith(GATED_PREFIX)
    out = x.new_empty(len(order), weight.shape[1] // (1 + is_gated))
    _launch(x, weight, bias, out, order, group_ends, activation=activation, first=True)
    return out


def project_sorted_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    group_ends: Tensor,
    *,
    has_all_pairs: bool = True,
) -> Tensor:
    """Return fc2 of each pair; `x` has a row for each sorted pair.

    `has_all_pairs`: whether `order` contains all pairs. The rows of the others are zero.
    """
    out = (x.new_empty if has_all_pairs else x.new_zeros)(len(order), weight.shape[1])
    _launch(x, weight, bias, out, order, group_ends, activation=None, first=False)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    order: Tensor,
    group_ends: Tensor,
    *,
    activation: str | None,
    first: bool,
) -> None:
    x = x.contiguous()
    is_gated = activation is not None and activation.startswith(GATED_PREFIX)
    has_few_pairs = len(order) <= FEW_PAIRS_PER_EXPERT * len(weight)
    blocks = BLOCKS_FOR_FEW_PAIRS if has_few_pairs else BLOCKS_FOR_MORE_PAIRS
    block_columns = blocks.gated_columns if is_gated else blocks.columns
    width = out.shape[1]
    launcher.launch(
        kernels.expert_matmul,
        (-(-width // block_columns), len(weight)),
        x,
        weight,
        x if bias is None else bias,
        out,
        order,
        group_ends,
        width,
        weight.shape[2],
        len(order) // len(x),
        FIRST=first,
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index((activation or "").removeprefix(GATED_PREFIX) or None),
        GATED=is_gated,
        BLOCK_ROWS=blocks.rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_CHANNELS=blocks.channels,
        num_warps=WARPS,
        num_stages=blocks.stages,
    )
