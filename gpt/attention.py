"""Attention over a ragged batch: one signature, a plain twin, and a fast form.

Each query sees its own sequence's tokens up to itself (within the window, if there is one), whether
their keys came in this step or lie in the pool. `reference` says it in a loop that can be read;
`sdpa` hands padded rectangles to torch. Shapes: q (T, H, D), k and v (T, G, D), H = G x queries.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.batch import Batch

KV = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Batch, KV | None, int | None], Tensor]


def store(k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
    """Write this step's keys and values into their slots of the pool."""
    assert batch.slots is not None
    for new, pool in ((k, kv[0]), (v, kv[1])):
        pool.view(-1, *pool.shape[2:])[batch.slots] = new


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kv: KV | None,
    window: int | None,
    *,
    drop: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """One sequence at a time, in whole matrices. `drop` thins a sequence's probabilities."""
    outputs = []
    start = 0
    for sequence, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        rows = slice(start, start + length)
        start += length
        if kv is None:
            keys, values = k[rows], v[rows]
        else:
            assert batch.tables is not None
            keys, values = (pool[batch.tables[sequence]].flatten(0, 1)[:context] for pool in kv)
        queries = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(queries, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        seen = visible(batch.positions[rows], torch.arange(context, device=q.device), window)
        scores = scores.masked_fill(~seen, float("-inf"))
        wide = torch.promote_types(q.dtype, torch.float32)
        probabilities = scores.softmax(-1, dtype=wide).to(q.dtype)
        if drop is not None:
            probabilities = drop(probabilities, sequence)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, values))
    return torch.cat(outputs)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions each query position sees: (..., queries, keys)."""
    distance = queries.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
) -> Tensor:
    """Torch's fused attention on rectangles; whole equal sequences need no padding and no mask."""
    count, longest = len(batch.lengths), max(batch.lengths)
    fresh = not any(batch.past)
    if fresh and min(batch.lengths) == longest and (window is None or window >= longest):
        q4, k4, v4 = (x.view(count, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    sequence, place = batch.places
    queries = q.new_zeros(count, longest, *q.shape[1:])
    queries = queries.index_put((sequence, place), q)
    where = batch.positions.new_zeros(count, longest)
    where = where.index_put((sequence, place), batch.positions)
    if kv is None or fresh:
        keys, values = (
            x.new_zeros(count, longest, *x.shape[1:]).index_put((sequence, place), x)
            for x in (k, v)
        )
    else:
        assert batch.tables is not None
        blocks = -(-max(batch.contexts) // kv[0].shape[1])
        keys, values = (pool[batch.tables[:, :blocks]].flatten(1, 2) for pool in kv)
    # Keys past a sequence's end have positions that no query of it reaches: causality hides them.
    seen = visible(where, torch.arange(keys.shape[1], device=q.device), window).unsqueeze(1)
    q4, k4, v4 = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)[sequence, place]
