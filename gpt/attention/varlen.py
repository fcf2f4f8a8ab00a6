"""Varlen attention of complete sequences without a KV cache, for training and for scoring.

A sequence may have a parent sequence, whose tokens are its past tokens. Three functions compute the
same attention: `padded_sdpa` pads sequences of similar lengths for torch's fused attention;
`memory_efficient` saves only queries, keys and values for the backward pass and recomputes the
probabilities; `unfused_attention` saves the probabilities and can apply dropout to them. Shapes: q
(T, H, D), k and v (T, G, D), for T tokens, H query heads, G KV heads and D channels per head; H is
a multiple of G.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.attention.options import AttentionOptions, softmax_with_sinks
from gpt.batch import Batch
from gpt.device_transfers import to_device

# Maximum queries per tile of `memory_efficient`. A tile skips the keys after its last query, so
# smaller tiles compute fewer masked scores.
TILE_QUERIES = 128
# Each sequence of a padded group has at least PADDED_LENGTH_RATIO_MIN x (length of the longest
# sequence of the group) - PADDED_LENGTH_SLACK_TOKENS new tokens.
PADDED_LENGTH_RATIO_MIN = 0.8
PADDED_LENGTH_SLACK_TOKENS = 16


def visible_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return a boolean mask (..., queries, keys): True where the key is visible to the query.

    `queries` and `keys` are token positions. A query sees its own position and earlier ones; with a
    `window`, it sees only the last `window` of these.
    """
    distance = queries.unsqueeze(-1) - keys
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def key_distances(queries: Tensor, keys: Tensor, like: Tensor) -> Tensor:
    """Return the number of positions from each key to each query, for ALiBi.

    The shapes are those of `visible_mask`. The dtype is that of `like`, but at least fp32.
    """
    distances = queries.unsqueeze(-1) - keys
    return distances.to(torch.promote_types(like.dtype, torch.float32))


def visible_rows(batch: Batch, sequence: int) -> list[slice]:
    """Return the flat rows that a sequence attends to: its earlier tokens', then its own rows."""
    own_start, past = batch.query_starts[sequence], batch.past_lengths[sequence]
    own_rows = slice(own_start, own_start + batch.query_lengths[sequence])
    if not past:
        return [own_rows]
    past_start = batch.past_row(sequence)
    return [slice(past_start, past_start + past), own_rows]


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the attention probabilities (heads, queries, keys) of one sequence."""

    p: float
    # Draws a boolean mask (heads, queries, keys): True for probabilities to keep. Arguments: the
    # index of the sequence, the shape (queries, keys), and a tensor on the target device.
    keep_mask: Callable[[int, tuple[int, int], Tensor], Tensor]

    def __call__(self, probabilities: Tensor, sequence: int) -> Tensor:
        _, queries, keys = probabilities.shape
        # The mask needs no gradient, so for this product autograd saves only the mask (one byte per
        # element), not the probabilities.
        return (
            probabilities * self.keep_mask(sequence, (queries, keys), probabilities) / (1 - self.p)
        )


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that have the same number of past tokens, padded to the longest of them."""

    count: int  # Number of sequences.
    # Flat rows of the queries, (count, longest); shorter sequences repeat their last row as
    # padding. None: all rows of the batch, in order.
    queries: Tensor | None
    # Flat rows of the keys, (count, past + longest). None: all rows of the batch, in order.
    keys: Tensor | None
    mask: Tensor | None  # Visible keys, (longest, past + longest); None: the causal mask.
    # With ALiBi: the number of positions from each key to each query, in the shape of the mask.
    distances: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Return the output (count, longest, H, D).

        Padding comes after the tokens of its sequence, so the causal mask hides the padding from
        these tokens.
        """
        padded_q, *padded_kv = (
            (x if rows is None else _select_rows(x, rows.flatten()))
            .view(self.count, -1, *x.shape[1:])
            .transpose(1, 2)
            for x, rows in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        mask = self.mask
        if not options.has_plain_softmax:
            mask, *padded_kv = self._add_softmax_terms(options, padded_q, *padded_kv)
        is_grouped_query = q.shape[1] != k.shape[1]
        if is_grouped_query and mask is not None:
            # With a mask, the fused kernels need one KV head per query head.
            padded_kv = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in padded_kv]
            is_grouped_query = False
        keys, values = padded_kv
        y = F.scaled_dot_product_attention(
            padded_q,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=is_grouped_query,
        )
        return y.transpose(1, 2)

    def _add_softmax_terms(
        self, options: AttentionOptions, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return an additive mask (1, H, longest, keys) with ALiBi, and the keys and values.

        A sink is a key and a value of zeros after the others; the mask has the sink's logit.
        Shapes: `queries` (count, H, longest, D), `keys` and `values` (count, G, past + longest, D).
        """
        heads, query_count, key_count = queries.shape[1], queries.shape[2], keys.shape[2]
        mask = queries.new_zeros(heads, query_count, key_count)
        if options.alibi_slopes is not None:
            assert self.distances is not None
            slopes = options.alibi_slopes.to(self.distances.dtype)
            mask = (slopes[:, None, None] * -self.distances).to(queries.dtype)
        is_visible = self.mask
        if is_visible is None:
            is_visible = mask.new_ones(query_count, key_count, dtype=torch.bool).tril()
        mask = mask.masked_fill(~is_visible, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.to(mask.dtype)[:, None, None]
            mask = torch.cat([mask, sinks.expand(-1, query_count, -1)], dim=-1)
            keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
        return mask.unsqueeze(0), keys, values


def _select_rows(x: Tensor, rows: Tensor) -> Tensor:
    return cast(Tensor, _SelectRows.apply(x, rows))  # type: ignore[no-untyped-call]


class _SelectRows(torch.autograd.Function):
    """index_select of rows; if a row is selected repeatedly, its gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        sum_dtype = torch.promote_types(grad.dtype, torch.float32)
        summed = grad.new_zeros(ctx.shape, dtype=sum_dtype)
        summed.index_add_(0, ctx.saved_tensors[0], grad.to(sum_dtype))
        return summed.to(grad.dtype), None


def padded_sdpa(q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: AttentionOptions) -> Tensor:
    """Compute attention with torch's fused kernels, one padded group at a time, on any device."""
    has_alibi = options.alibi_slopes is not None
    key = (padded_sdpa, options.window, has_alibi)
    plan = batch.attention_metadata.get(key)
    if plan is None:
        plan = batch.attention_metadata[key] = _padded_groups(
            batch, options.window, q, has_alibi=has_alibi
        )
    groups, order = cast(tuple[list[PaddedGroup], Tensor | None], plan)
    outputs = [group.attend(q, k, v, options).reshape(-1, *q.shape[1:]) for group in groups]
    if order is None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, order)


def _padded_groups(
    batch: Batch, window: int | None, like: Tensor, *, has_alibi: bool
) -> tuple[list[PaddedGroup], Tensor | None]:
    """Return the padded groups, and for each token its row in the groups' concatenated outputs.

    The second value is None if the outputs are already in the order of the batch.
    """
    lengths, past_lengths, device = batch.query_lengths, batch.past_lengths, like.device

    def distances(past: int, length: int) -> Tensor | None:
        if not has_alibi:
            return None
        keys = torch.arange(past + length, device=device)
        return key_distances(keys[past:], keys, like)

    if not any(past_lengths) and min(lengths) == max(lengths):
        length = lengths[0]
        mask = _sdpa_mask(0, length, window, device)
        return [PaddedGroup(len(lengths), None, None, mask, distances(0, length))], None
    buckets: list[list[int]] = []
    longest_first = sorted(
        range(len(lengths)), key=lambda sequence: (-past_lengths[sequence], -lengths[sequence])
    )
    for sequence in longest_first:
        bucket_longest = buckets[-1][0] if buckets else sequence
        length_min = PADDED_LENGTH_RATIO_MIN * lengths[bucket_longest] - PADDED_LENGTH_SLACK_TOKENS
        if (
            not buckets
            or past_lengths[sequence] != past_lengths[bucket_longest]
            or lengths[sequence] < length_min
        ):
            buckets.append([])
        buckets[-1].append(sequence)
    order = np.empty(batch.tokens, np.int64)
    groups, start = [], 0
    for bucket in buckets:
        longest = lengths[bucket[0]]
        queries, keys = [], []
        for row, sequence in enumerate(bucket):
            *parent_rows, own_rows = (
                np.arange(rows.start, rows.stop) for rows in visible_rows(batch, sequence)
            )
            order[own_rows] = start + row * longest + np.arange(len(own_rows))
            padded = own_rows[np.minimum(np.arange(longest), len(own_rows) - 1)]
            queries.append(padded)
            keys.append(np.concatenate([*parent_rows, padded]))
        start += len(bucket) * longest
        mask = _sdpa_mask(past_lengths[bucket[0]], longest, window, device)
        query_rows, key_rows = (to_device(np.stack(rows), device) for rows in (queries, keys))
        groups.append(
            PaddedGroup(
                len(bucket), query_rows, key_rows, mask, distances(past_lengths[bucket[0]], longest)
            )
        )
    return groups, to_device(order, device)


def _sdpa_mask(past: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of visible keys (length, past + length); None if it is the causal mask."""
    if not past and (window is None or window >= length):
        return None
    keys = torch.arange(past + length, device=device)
    return visible_mask(keys[past:], keys, window)


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kv: Tensor | None,
    options: AttentionOptions,
    *,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Compute attention with separate matmuls and softmax.

    Autograd saves the dropout mask. It also saves the probabilities before and after dropout, in
    the model's dtype.
    """
    assert kv is None, "training with a KV pool is not supported"
    outputs = []
    for sequence, tile in _cached_tiles(batch, options, q, (k.shape[1], max(batch.query_lengths))):
        keys, values = (_concat_rows(x, tile.keys) for x in (k, v))
        queries = _by_kv_head(q[tile.rows], k.shape[1])
        probabilities = tile.attention_probabilities(queries, keys, options)
        if dropout is not None:
            heads = probabilities.view(q.shape[1], -1, probabilities.shape[-1])
            probabilities = dropout(heads, sequence).view_as(probabilities)
        y = torch.bmm(probabilities, values.transpose(0, 1))
        outputs.append(_by_token(y, q.shape[1]))
    return torch.cat(outputs)


def memory_efficient(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: AttentionOptions
) -> Tensor:
    """Compute attention tile by tile, with gradients of queries, keys and values.

    It is for a CPU, where torch's fused backward pass is slower, and for sinks and ALiBi, whose
    parameters get no gradients.
    """
    y = _MemoryEfficient.apply(q, k, v, batch, options)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of a sequence, and the keys that they see."""

    rows: slice  # Flat rows of the queries.
    keys: list[slice]  # Flat rows of the keys: in the parent, if any, then in the sequence.
    # Additive mask, (query heads per KV head x queries, keys): 0 for visible keys, -inf for others.
    mask: Tensor
    # With ALiBi: the number of positions from each key to each query, (queries, keys).
    distances: Tensor | None

    def attention_probabilities(
        self, queries: Tensor, keys: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the probabilities (G, query heads per KV head x queries, keys).

        Shapes: `queries` (G, query heads per KV head x queries, D), `keys` (keys, G, D).
        """
        groups, rows, _ = queries.shape
        mask = self.mask.unsqueeze(0).expand(groups, -1, -1)
        if options.alibi_slopes is not None:
            assert self.distances is not None
            slopes = options.alibi_slopes.to(self.distances.dtype).view(groups, -1, 1, 1)
            mask = mask - (slopes * self.distances).flatten(1, 2)
        sinks = None
        if options.sinks is not None:
            by_group = options.sinks.view(groups, -1)
            sinks = by_group.repeat_interleave(rows // by_group.shape[1], dim=1)
        scale = queries.shape[-1] ** -0.5
        scores = torch.baddbmm(mask.to(queries.dtype), queries, keys.permute(1, 2, 0), alpha=scale)
        return softmax_with_sinks(scores, sinks)


class _MemoryEfficient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: AttentionOptions
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.batch = batch
        ctx.options = options
        y = torch.empty_like(q)
        for _, tile in _cached_tiles(batch, options, q, (k.shape[1], TILE_QUERIES)):
            keys, values = (_concat_rows(x, tile.keys) for x in (k, v))
            probabilities = tile.attention_probabilities(
                _by_kv_head(q[tile.rows], k.shape[1]), keys, options
            )
            attended = torch.bmm(probabilities, values.transpose(0, 1))
            y[tile.rows] = _by_token(attended, q.shape[1])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        groups, scale = k.shape[1], q.shape[-1] ** -0.5
        # A key is visible to several tiles; its gradients are summed in at least fp32.
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k, dtype=sum_dtype)
        dv = torch.zeros_like(v, dtype=sum_dtype)
        for _, tile in _cached_tiles(ctx.batch, ctx.options, q, (groups, TILE_QUERIES)):
            keys, values = (_concat_rows(x, tile.keys) for x in (k, v))
            queries, dy = (_by_kv_head(x[tile.rows], groups) for x in (q, grads[0]))
            # A sink has no value, so it adds nothing to the sum over the keys in `ds`.
            p = tile.attention_probabilities(queries, keys, ctx.options)
            dp = torch.bmm(dy, values.permute(1, 2, 0))
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype).mul_(scale)
            dq[tile.rows] = _by_token(torch.bmm(ds, keys.transpose(0, 1)), q.shape[1])
            # The keys and values of a frozen context get no gradients.
            trained_keys = [rows for rows in tile.keys if rows.start < ctx.batch.tokens]
            sizes = [rows.stop - rows.start for rows in trained_keys]
            first = keys.shape[0] - sum(sizes)
            for total_grad, weights, rows_grad in ((dk, ds, queries), (dv, p, dy)):
                tile_grad = torch.bmm(weights[:, :, first:].transpose(1, 2), rows_grad)
                for rows, row_grad in zip(
                    trained_keys, tile_grad.transpose(0, 1).split(sizes), strict=True
                ):
                    total_grad[rows] += row_grad
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _cached_tiles(
    batch: Batch, options: AttentionOptions, q: Tensor, sizes: tuple[int, int]
) -> Iterator[tuple[int, Tile]]:
    """Return pairs of (index of a sequence, tile) for all tiles of a batch.

    The first call makes the tiles and caches them in the batch.

    `sizes`: (number of KV heads, maximum number of queries of a tile).
    """
    has_alibi = options.alibi_slopes is not None
    key = (_cached_tiles, options.window, has_alibi, q.dtype, *sizes)
    tiles = batch.attention_metadata.get(key)
    if tiles is None:
        tiles = batch.attention_metadata[key] = _make_tiles(
            batch, options.window, q, sizes, has_alibi=has_alibi
        )
    return iter(cast(Sequence[tuple[int, Tile]], tiles))


def _make_tiles(
    batch: Batch, window: int | None, q: Tensor, sizes: tuple[int, int], *, has_alibi: bool
) -> list[tuple[int, Tile]]:
    groups, queries_max = sizes
    masks: dict[tuple[int, int, int], Tensor] = {}
    distances: dict[tuple[int, int, int], Tensor] = {}
    tiles = []
    for sequence, (length, past) in enumerate(
        zip(batch.query_lengths, batch.past_lengths, strict=True)
    ):
        *parent_rows, own_rows = visible_rows(batch, sequence)
        for query_start in range(0, length, queries_max):
            query_end = min(query_start + queries_max, length)
            key_start = (
                0
                if window is None or queries_max >= length
                else max(0, past + query_start + 1 - window)
            )
            shape = (
                past + query_start - key_start,
                query_end - query_start,
                past + query_end - key_start,
            )
            if shape not in masks:
                masks[shape] = _additive_mask(shape, window, q, q.shape[1] // groups)
                if has_alibi:
                    first, _, key_count = shape
                    positions = torch.arange(key_count, device=q.device)
                    distances[shape] = key_distances(positions[first:], positions, q)
            keys = [
                slice(rows.start + key_start, rows.stop) for rows in parent_rows if key_start < past
            ]
            keys.append(
                slice(own_rows.start + max(0, key_start - past), own_rows.start + query_end)
            )
            rows = slice(own_rows.start + query_start, own_rows.start + query_end)
            tiles.append((sequence, Tile(rows, keys, masks[shape], distances.get(shape))))
    return tiles


def _additive_mask(
    shape: tuple[int, int, int], window: int | None, like: Tensor, queries_per_kv_head: int
) -> Tensor:
    """Return the additive mask of a tile.

    `shape`: (number of keys before the first query, number of queries, number of keys).
    """
    first, length, keys = shape
    positions = torch.arange(keys, device=like.device)
    is_visible = visible_mask(positions[first : first + length], positions, window)
    return (
        like.new_zeros(is_visible.shape)
        .masked_fill_(~is_visible, float("-inf"))
        .repeat(queries_per_kv_head, 1)
    )


def _concat_rows(x: Tensor, row_ranges: Sequence[slice]) -> Tensor:
    return x[row_ranges[0]] if len(row_ranges) == 1 else torch.cat([x[rows] for rows in row_ranges])


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Rearrange (tokens, heads, D) as (G, heads per KV head x tokens, D)."""
    head_dim = x.shape[-1]
    x = x.reshape(len(x), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    return x.reshape(kv_heads, -1, head_dim)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """Rearrange (G, heads per KV head x tokens, D) as (tokens, heads, D)."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)
