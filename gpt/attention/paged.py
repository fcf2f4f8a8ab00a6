"""Paged attention of a ragged batch of prefill and decode tokens, with a reference implementation.

Attention is causal, with the options of gpt/attention/options.py. Keys and values of past tokens
are in the KV pool. Keys and values of this step's tokens are in `k` and `v`, and after `store_kv`
also in the pool. Without a pool, all keys and values are in `k` and `v`. `reference_attention` is a
readable loop over sequences. With a pool, `ragged_attention` calls the C kernels. Where these are
unsupported, torch computes groups of sequences, chosen so that little padding is needed. A group
has decode sequences with similar context lengths, or prefill sequences that agree in the number of
new tokens and in the number of past tokens. Shapes: q (T, H, D), k and v (T, G, D), for T tokens, H
query heads, G KV heads and D channels per head; H is a multiple of G.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention.options import AttentionOptions, softmax_with_sinks
from gpt.attention.varlen import (
    AttentionDropout,
    key_distances,
    memory_efficient,
    padded_sdpa,
    visible_mask,
    visible_rows,
)
from gpt.batch import Batch
from gpt.cpu import kernels, training_kernels

# The KV blocks of a layer: (blocks, 2, G, block tokens, D). In dimension 1, index 0 is keys and
# index 1 is values.
KV = Tensor

# Maximum bytes of a group's gathered keys and values, and of the scores of a prefill tile. Tensors
# of these sizes stay in the CPU cache until they are used. A group of one sequence may need more.
GATHER_BYTES_MAX = 4 << 20
SCORES_BYTES_MAX = 4 << 20
TILE_QUERIES = 128  # Maximum new tokens per sequence in a tile of a prefill group.
# If a sequence has at most this number of new tokens, the C kernels compute it as decode tokens.
DECODE_TOKENS_MAX = 4


def store_kv(k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
    """Write this step's keys and values into their slots of the pool."""
    assert batch.slot_mapping is not None
    if kernels.supports_tensors(k, kv):
        kernels.store_kv(k, v, batch.slot_mapping, kv)
        return
    block, offset = batch.slot_mapping
    kv[block, 0, :, offset] = k
    kv[block, 1, :, offset] = v


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kv: KV | None,
    options: AttentionOptions,
    *,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Compute attention one sequence at a time, with a full matrix of scores.

    `dropout`: applied to the probabilities.
    """
    outputs = []
    start = 0
    for sequence, (query_length, context_length) in enumerate(
        zip(batch.query_lengths, batch.context_lengths, strict=True)
    ):
        rows = slice(start, start + query_length)
        start += query_length
        if kv is None:
            row_ranges = visible_rows(batch, sequence)
            keys, values = (torch.cat([x[row_range] for row_range in row_ranges]) for x in (k, v))
        else:
            assert batch.block_tables is not None
            blocks = kv[batch.block_tables[sequence]].permute(1, 0, 3, 2, 4)
            keys, values = blocks.flatten(1, 2)[:, :context_length]
        queries_per_kv_head = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(queries_per_kv_head, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        key_positions = torch.arange(context_length, device=q.device)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        if options.alibi_slopes is not None:
            distances = batch.positions[rows].unsqueeze(1) - key_positions
            scores = scores - options.alibi_slopes.to(scores.dtype)[:, None, None] * distances
        is_visible = visible_mask(batch.positions[rows], key_positions, options.window)
        scores = scores.masked_fill(~is_visible, float("-inf"))
        sinks = None if options.sinks is None else options.sinks.unsqueeze(1)
        probabilities = softmax_with_sinks(scores, sinks).to(q.dtype)
        if dropout is not None:
            probabilities = dropout(probabilities, sequence)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, values))
    return torch.cat(outputs)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, options: AttentionOptions
) -> Tensor:
    """Compute attention with the C kernels where they support the batch, otherwise in torch.

    With a KV pool, the calls and the groups are planned once for all layers of a step
    (`AttentionPlan`). Without a pool, gpt/attention/varlen.py has the torch functions.
    """
    if kv is None:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        if options.has_plain_softmax and training_kernels.supports_attention(
            q, k, batch, options.window
        ):
            return training_kernels.varlen_attention(q, k, v, batch)
        # For sinks and ALiBi, torch's fused attention needs a mask with a number for each head,
        # query and key. Its backward pass would save this mask.
        if needs_grad and not (q.is_cuda and options.has_plain_softmax):
            return memory_efficient(q, k, v, batch, options)
        return padded_sdpa(q, k, v, batch, options)
    shape = AttentionShape(
        q.shape[1], k.shape[1], kv.shape[3], options.window, options.alibi_slopes is not None
    )
    plan = cached_plan(batch, shape, q, kv)
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    for native in plan.native:
        native.attend(q, kv, y, options.sinks, options.alibi_slopes)
    for group in plan.groups:
        group.attend(q, k, v, kv, options, gather_buffer=plan.gather_buffer, out=y)
    return y


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of the attention layers; a batch caches its plan under this key."""

    heads: int  # Query heads.
    kv_heads: int
    block_tokens: int
    window: int | None
    has_alibi: bool = False  # Whether tiles need the distances from keys to queries.

    @property
    def queries_per_kv_head(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class GroupTile:
    """A tile of a group: some queries of each sequence, and the keys that they see."""

    # Slices of dimension 1 of the tensors in `EqualLengthGroup.attend`. For queries, this dimension
    # is new tokens x query heads per KV head; for keys and values, it is tokens.
    queries: slice
    keys: slice
    # Additive mask: 0 for visible keys, -inf for the others. Its shape is (sequences x G, 1, keys)
    # in decode, and (1, new tokens x query heads per KV head, keys) in prefill.
    mask: Tensor
    # With ALiBi: the number of positions from each key to each query, in the shape of the mask, in
    # at least fp32.
    distances: Tensor | None


@dataclass(frozen=True)
class EqualLengthGroup:
    """Sequences that have the same number of new tokens, computed together by the same matmuls.

    Their keys form one tensor, with padding up to the longest context of the group.
    """

    rows: slice | Tensor  # Flat rows of the sequences' new tokens in the batch.
    sequences: int  # Number of sequences.
    shape: AttentionShape
    # (2, sequences x G x blocks): indices of the pool rows to gather, for keys and for values. A
    # pool row is the keys, or the values, of one KV head in one block. None: the sequences have no
    # past tokens, so all their keys and values are in `k` and `v`.
    pool_rows: Tensor | None
    tiles: list[GroupTile]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KV,
        options: AttentionOptions,
        *,
        gather_buffer: Tensor,
        out: Tensor,
    ) -> None:
        """Write the attention output of this group to its rows of `out`.

        The queries are rearranged to (sequences x G, new tokens x query heads per KV head, D), so
        that one matmul serves all query heads of a KV head.
        """
        head_dim = q.shape[-1]
        sequences = self.sequences
        kv_heads = self.shape.kv_heads
        q = _by_kv_head(_select_rows(q, self.rows), sequences, kv_heads)
        if self.pool_rows is None:
            keys, values = (
                _by_kv_head(_select_rows(x, self.rows), sequences, kv_heads) for x in (k, v)
            )
        else:
            # Keys and values are gathered separately, in the order of sequences and heads. The CPU
            # core that gathers a head's keys then probably also multiplies them, from its cache.
            pool = kv.view(-1, gather_buffer.shape[-1])
            keys, values = (
                torch.index_select(pool, 0, rows, out=buffer[: len(rows)]).view(
                    sequences * kv_heads, -1, head_dim
                )
                for rows, buffer in zip(self.pool_rows, gather_buffer, strict=True)
            )
        outputs = []
        for tile in self.tiles:
            tile_keys, tile_values = keys[:, tile.keys].transpose(1, 2), values[:, tile.keys]
            tile_queries = q[:, tile.queries]
            mask = tile.mask
            if options.alibi_slopes is not None:
                assert tile.distances is not None
                slopes = self._by_query(options.alibi_slopes, tile_queries).unsqueeze(2)
                mask = (mask - slopes * tile.distances).to(q.dtype)
            mask = mask.expand(len(tile_queries), tile_queries.shape[1], -1)
            scores = torch.baddbmm(mask, tile_queries, tile_keys, alpha=head_dim**-0.5)
            sinks = None if options.sinks is None else self._by_query(options.sinks, tile_queries)
            outputs.append(torch.bmm(softmax_with_sinks(scores, sinks), tile_values))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        y = y.view(sequences, kv_heads, -1, self.shape.queries_per_kv_head, head_dim).transpose(
            1, 2
        )
        out[self.rows] = y.reshape(-1, self.shape.heads, head_dim)

    def _by_query(self, x: Tensor, queries: Tensor) -> Tensor:
        """Return the number of each query's head.

        Shapes: `x` (H,), `queries` (sequences x G, new tokens x query heads per KV head, D).
        """
        by_group = x.view(self.shape.kv_heads, -1)
        return by_group.repeat(self.sequences, queries.shape[1] // by_group.shape[1])


@dataclass(frozen=True)
class AttentionPlan:
    """The work of a step: calls of the C kernels, and groups that torch computes."""

    native: Sequence[kernels.DecodeAttention | kernels.PrefillAttention]
    groups: Sequence[EqualLengthGroup]
    gather_buffer: Tensor  # Memory for a group's gathered keys and values; all groups reuse it.


def _select_rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _by_kv_head(x: Tensor, sequences: int, kv_heads: int) -> Tensor:
    """Rearrange (sequences x new tokens, heads, D) by KV head.

    Return (sequences x G, new tokens x heads per KV head, D).
    """
    head_dim = x.shape[-1]
    x = x.reshape(sequences, -1, kv_heads, x.shape[1] // kv_heads, head_dim).transpose(1, 2)
    return x.reshape(sequences * kv_heads, -1, head_dim)


def cached_plan(batch: Batch, shape: AttentionShape, like: Tensor, kv: KV) -> AttentionPlan:
    """Return the batch's plan for `shape`; the first call makes and caches the plan.

    `like` has the dtype, the device and the number of channels of the queries.
    """
    plan = batch.attention_metadata.get(shape)
    if plan is None:
        plan = batch.attention_metadata[shape] = _make_plan(batch, shape, like, kv)
    assert isinstance(plan, AttentionPlan)
    return plan


def _make_plan(batch: Batch, shape: AttentionShape, like: Tensor, kv: KV) -> AttentionPlan:
    """Plan C kernel calls for the sequences that the kernels support; group the others for torch.

    A group has decode sequences with similar context lengths, or prefill sequences that agree in
    the number of new tokens and in the number of past tokens.
    """
    context_lengths = batch.context_lengths
    native: list[kernels.DecodeAttention | kernels.PrefillAttention] = []
    is_native = kernels.supports_tensors(like, kv)
    decode_tokens_max = DECODE_TOKENS_MAX if is_native else 1
    decode_sequences = [
        sequence
        for sequence, length in enumerate(batch.query_lengths)
        if length <= decode_tokens_max
    ]
    prefill_sequences = [
        sequence
        for sequence, length in enumerate(batch.query_lengths)
        if length > decode_tokens_max
    ]
    token_bytes = 2 * shape.kv_heads * like.shape[-1] * like.element_size()
    gathered_tokens_max = GATHER_BYTES_MAX // token_bytes
    groups: list[EqualLengthGroup] = []
    if is_native and decode_sequences:
        native.append(_native_decode(batch, decode_sequences, shape))
    elif decode_sequences:
        groups = [
            _decode_group(batch, bucket, shape, like)
            for bucket in _bucket_by_context(
                decode_sequences, context_lengths, shape, gathered_tokens_max
            )
        ]
    if is_native and prefill_sequences and kernels.supports_prefill(like):
        native.append(_native_prefill(batch, prefill_sequences, shape))
        prefill_sequences = []
    by_length: dict[tuple[int, int], list[int]] = {}
    for sequence in prefill_sequences:
        lengths = batch.query_lengths[sequence], batch.past_lengths[sequence]
        by_length.setdefault(lengths, []).append(sequence)
    for (length, past_length), sequences in by_length.items():
        context_length = length + past_length
        score_bytes = (  # The scores of one sequence in one tile.
            shape.heads * min(length, TILE_QUERIES) * context_length * like.element_size()
        )
        sequences_max = max(
            1, min(SCORES_BYTES_MAX // score_bytes, gathered_tokens_max // context_length)
        )
        for start in range(0, len(sequences), sequences_max):
            groups.append(
                _prefill_group(batch, sequences[start : start + sequences_max], shape, like)
            )
    gather_rows_max = max(
        (group.pool_rows.shape[1] for group in groups if group.pool_rows is not None), default=0
    )
    gather_buffer = like.new_empty(2, gather_rows_max, shape.block_tokens * like.shape[-1])
    return AttentionPlan(native, groups, gather_buffer)


def _native_decode(
    batch: Batch, sequences: Sequence[int], shape: AttentionShape
) -> kernels.DecodeAttention:
    assert batch.block_tables is not None
    rows = []
    row_sequences = []
    context_lengths = []
    for sequence in sequences:
        for index in range(batch.query_lengths[sequence]):
            rows.append(batch.query_starts[sequence] + index)
            row_sequences.append(sequence)
            context_lengths.append(batch.past_lengths[sequence] + index + 1)
    return kernels.DecodeAttention(
        rows, row_sequences, context_lengths, batch.block_tables, window=shape.window
    )


def _native_prefill(
    batch: Batch, sequences: Sequence[int], shape: AttentionShape
) -> kernels.PrefillAttention:
    assert batch.block_tables is not None
    starts, lengths, past_lengths = (
        [values_by_sequence[sequence] for sequence in sequences]
        for values_by_sequence in (batch.query_starts, batch.query_lengths, batch.past_lengths)
    )
    return kernels.PrefillAttention(
        starts, sequences, lengths, past_lengths, batch.block_tables, window=shape.window
    )


def _bucket_by_context(
    sequences: Sequence[int], context_lengths: Sequence[int], shape: AttentionShape, tokens_max: int
) -> list[list[int]]:
    """Split sequences into buckets of similar context lengths.

    A bucket of several sequences has at most about `tokens_max` keys, padding included. A bucket of
    one sequence can have more.
    """
    buckets: list[list[int]] = []
    for sequence in sorted(sequences, key=lambda sequence: -context_lengths[sequence]):
        longest = context_lengths[buckets[-1][0]] if buckets else 0
        if shape.window is not None:
            longest = min(longest, shape.window)
        is_full = buckets and (len(buckets[-1]) + 1) * longest > tokens_max
        is_mostly_padding = 2 * (context_lengths[sequence] + shape.block_tokens) < longest
        if not buckets or is_full or is_mostly_padding:
            buckets.append([])
        buckets[-1].append(sequence)
    return [sorted(bucket) for bucket in buckets]


def _decode_group(
    batch: Batch, sequences: Sequence[int], shape: AttentionShape, like: Tensor
) -> EqualLengthGroup:
    """Return the group of these decode sequences; blocks before the window are not gathered."""
    block_tokens = shape.block_tokens
    window = shape.window
    device = like.device
    context_ends = [batch.context_lengths[sequence] for sequence in sequences]
    first_blocks = [
        0 if window is None else max(0, end - window) // block_tokens for end in context_ends
    ]
    blocks_max = max(
        -(-end // block_tokens) - start
        for end, start in zip(context_ends, first_blocks, strict=True)
    )
    first_block = torch.tensor(first_blocks, device=device)
    context_end = torch.tensor(context_ends, device=device)
    blocks = first_block.unsqueeze(1) + torch.arange(blocks_max, device=device)
    keys = first_block.unsqueeze(1) * block_tokens + torch.arange(
        blocks_max * block_tokens, device=device
    )
    is_visible = visible_mask(context_end - 1, keys, window)
    mask = like.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    mask = mask.repeat_interleave(shape.kv_heads, 0).unsqueeze(1)
    distances = None
    if shape.has_alibi:
        distances = key_distances(context_end.unsqueeze(1) - 1, keys.unsqueeze(1), like)
        distances = distances.repeat_interleave(shape.kv_heads, 0)
    full_slice = slice(None)
    return EqualLengthGroup(
        rows=_flat_rows(batch, sequences, device),
        sequences=len(sequences),
        shape=shape,
        pool_rows=_pool_rows(batch, sequences, blocks, shape),
        tiles=[GroupTile(full_slice, full_slice, mask, distances)],
    )


def _prefill_group(
    batch: Batch, sequences: Sequence[int], shape: AttentionShape, like: Tensor
) -> EqualLengthGroup:
    """Return the group of these prefill sequences.

    The sequences agree in the number of new tokens and in the number of past tokens.
    """
    block_tokens = shape.block_tokens
    window = shape.window
    device = like.device
    length, past_length = batch.query_lengths[sequences[0]], batch.past_lengths[sequences[0]]
    first_key = 0  # The position of the first gathered key.
    pool_rows = None
    if past_length:
        first_block = 0 if window is None else max(0, past_length + 1 - window) // block_tokens
        blocks = torch.arange(
            first_block, -(-(past_length + length) // block_tokens), device=device
        )
        pool_rows = _pool_rows(batch, sequences, blocks.expand(len(sequences), -1), shape)
        first_key = first_block * block_tokens
    tiles = []
    for query_start in range(0, length, TILE_QUERIES):
        query_end = min(query_start + TILE_QUERIES, length)
        key_start = (
            first_key if window is None else max(first_key, past_length + query_start + 1 - window)
        )
        key_end = past_length + query_end
        if pool_rows is not None and query_end == length:
            # The last tile uses all gathered keys, because bmm would first copy a partial slice of
            # them. The mask hides the keys after the last query.
            key_end = -(-key_end // block_tokens) * block_tokens
        queries = torch.arange(past_length + query_start, past_length + query_end, device=device)
        keys = torch.arange(key_start, key_end, device=device)
        is_visible = visible_mask(queries, keys, window)
        mask = like.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
        mask = mask.repeat_interleave(shape.queries_per_kv_head, 0).unsqueeze(0)
        distances = None
        if shape.has_alibi:
            distances = key_distances(queries, keys, like)
            distances = distances.repeat_interleave(shape.queries_per_kv_head, 0).unsqueeze(0)
        query_slice = slice(
            query_start * shape.queries_per_kv_head, query_end * shape.queries_per_kv_head
        )
        tiles.append(
            GroupTile(
                query_slice, slice(key_start - first_key, key_end - first_key), mask, distances
            )
        )
    return EqualLengthGroup(
        _flat_rows(batch, sequences, device), len(sequences), shape, pool_rows, tiles
    )


def _pool_rows(
    batch: Batch, sequences: Sequence[int], table_columns: Tensor, shape: AttentionShape
) -> Tensor:
    """Return `EqualLengthGroup.pool_rows` for these sequences.

    Row i of `table_columns`: the columns of sequence i's block table whose blocks are gathered.
    """
    assert batch.block_tables is not None
    block_tables = batch.block_tables
    if len(sequences) < len(block_tables):
        block_tables = block_tables[torch.tensor(sequences, device=block_tables.device)]
    blocks = block_tables.gather(1, table_columns.clamp_max(block_tables.shape[1] - 1))
    head_indices = torch.arange(2 * shape.kv_heads, device=block_tables.device).view(
        2, 1, shape.kv_heads, 1
    )
    return (blocks.unsqueeze(1) * (2 * shape.kv_heads) + head_indices).flatten(1)


def _flat_rows(batch: Batch, sequences: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return the flat rows of sequences that have the same number of new tokens.

    The result is a slice if the rows are adjacent, otherwise a tensor of row indices.
    """
    length, starts = batch.query_lengths[sequences[0]], batch.query_starts
    begin = starts[sequences[0]]
    if starts[sequences[-1]] - begin == (len(sequences) - 1) * length:
        return slice(begin, begin + len(sequences) * length)
    first_rows = torch.tensor([starts[sequence] for sequence in sequences], device=device)
    return (first_rows.unsqueeze(1) + torch.arange(length, device=device)).flatten()
