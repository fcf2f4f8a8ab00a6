"""Attention by its formula in fp64, one query and one head at a time: the oracle of backends."""

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
        keys, values = (x.double().cpu() for x in _keys_and_values(k, v, batch, kv, sequence))
        for token in range(length):
            row = batch.query_starts[sequence] + token
            position = batch.past_lengths[sequence] + token
            first = 0 if options.window is None else max(0, position + 1 - options.window)
            heads = [
                _attend_query(
                    q[row, head].double().cpu(),
                    *(
                        x[first : position + 1, head // (q.shape[1] // k.shape[1])]
                        for x in (keys, values)
                    ),
                    sink=None if options.sinks is None else float(options.sinks[head]),
                    slope=0.0
                    if options.alibi_slopes is None
                    else float(options.alibi_slopes[head]),
                )
                for head in range(q.shape[1])
            ]
            outputs.append(torch.stack(heads))
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


def _attend_query(
    query: Tensor, keys: Tensor, values: Tensor, *, sink: float | None, slope: float
) -> Tensor:
    """Attention of one query, whose own key is the last one."""
    distances = torch.arange(len(keys) - 1, -1, -1, dtype=torch.float64)
    scores = keys @ query / math.sqrt(len(query)) - slope * distances
    largest = (
        float(scores.detach().max()) if sink is None else max(sink, float(scores.detach().max()))
    )
    weights = (scores - largest).exp()
    total = weights.sum() + (0.0 if sink is None else math.exp(sink - largest))
    return weights @ values / total
