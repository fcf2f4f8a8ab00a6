"""Attention by its formula in fp64, one query at a time: the oracle of backends."""

import math

import torch
from torch import Tensor

from gpt.attention.options import AttentionOptions
from gpt.batch import Batch


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Return the attention output (T, H, D) in fp64, on the CPU; torch can differentiate it.

    `kv`: the pool (blocks, 2, G, block tokens, D). None: a sequence sees the rows of its parent, if
    any, and its own rows.
    """
    outputs = []
    for sequence, length in enumerate(batch.query_lengths):
        keys, values = (
            x.double().cpu().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            for x in _keys_and_values(k, v, batch, kv, sequence)
        )
        for token in range(length):
            query = q[batch.query_starts[sequence] + token].double().cpu()
            position = batch.past_lengths[sequence] + token
            first = 0 if options.window is None else max(0, position + 1 - options.window)
            visible = slice(first, position + 1)
            outputs.append(_attend_query(query, keys[visible], values[visible], options))
    return torch.stack(outputs)


def _keys_and_values(
    k: Tensor, v: Tensor, batch: Batch, kv: Tensor | None, sequence: int
) -> tuple[Tensor, Tensor]:
    """Return all keys and values of a sequence, each (context, G, D)."""
    context = batch.past_lengths[sequence] + batch.query_lengths[sequence]
    if kv is not None:
        assert batch.block_tables is not None
        blocks = [
            kv[int(block)] for block in batch.block_tables[sequence][: -(-context // kv.shape[3])]
        ]
        pool = torch.cat(blocks, dim=2)  # (2, G, block tokens of all blocks, D)
        return pool[0, :, :context].transpose(0, 1), pool[1, :, :context].transpose(0, 1)
    sequences = [sequence]
    if batch.parents and batch.parents[sequence] is not None:
        sequences.insert(0, batch.parents[sequence] or 0)
    ranges = [
        range(batch.query_starts[index], batch.query_starts[index] + batch.query_lengths[index])
        for index in sequences
    ]
    rows = torch.tensor([row for rows in ranges for row in rows], device=k.device)
    return k[rows], v[rows]


def _attend_query(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of the heads of one query (H, D), whose own key is the last one of (keys, H, D)."""
    scores = torch.einsum("hd,khd->hk", query, keys) / math.sqrt(query.shape[1])
    if options.alibi_slopes is not None:
        distances = torch.arange(len(keys) - 1, -1, -1, dtype=torch.float64)
        scores = scores - options.alibi_slopes.double().cpu().unsqueeze(1) * distances
    largest = scores.detach().amax(1, keepdim=True)
    weights = (scores - largest).exp()
    totals = weights.sum(1, keepdim=True)
    if options.sinks is not None:
        totals = totals + (options.sinks.detach().double().cpu().unsqueeze(1) - largest).exp()
    return torch.einsum("hk,khd->hd", weights / totals, values)
