"""Attention in plain torch that reads only tensors, as a captured CUDA graph must.

Each sequence's whole block table is gathered, and positions past its end are masked. A step of the
kind that a graph captures can so run on a CPU, where a replay computes it again.
"""

import torch
from torch import Tensor

from gpt.attention.backend import TorchAttention
from gpt.attention.options import AttentionOptions, softmax_with_sinks
from gpt.attention.paged import KV, ragged_attention
from gpt.batch import Batch


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, options: AttentionOptions
) -> Tensor:
    """Compute ragged attention from the context lengths on the device, or call the original."""
    if batch.device_context_lengths is None or kv is None:
        return ragged_attention(q, k, v, batch, kv, options)
    assert batch.block_tables is not None
    size = kv.shape[3]
    rows, heads, width = q.shape
    groups = kv.shape[2]
    ends = batch.device_context_lengths.long().unsqueeze(1)
    tables = batch.block_tables.long()
    starts = torch.arange(tables.shape[1]) * size
    gathered = kv[tables.masked_fill(starts >= ends, 0)]  # (rows, blocks, 2, groups, size, width)
    keys, values = gathered.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    places = torch.arange(keys.shape[2])
    unseen = places >= ends
    if options.window is not None:
        unseen |= places < ends - options.window
    scores = torch.einsum("rgqd,rgkd->rgqk", q.view(rows, groups, -1, width), keys) * width**-0.5
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(q.dtype).view(groups, -1, 1)
        scores = scores - slopes * (ends - 1 - places)[:, None, None]
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    sinks = None if options.sinks is None else options.sinks.view(groups, -1)
    weights = softmax_with_sinks(scores, sinks)
    return torch.einsum("rgqk,rgkd->rgqd", weights, values).reshape(rows, heads, width)


class CapturableAttention(TorchAttention):
    """Attention of models whose steps can be captured."""

    is_capturable = True

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        return attend(q, k, v, batch, kv, options)
