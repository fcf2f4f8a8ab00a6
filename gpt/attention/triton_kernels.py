"""Triton kernels of paged attention (flash-decoding and prefill), RoPE and writes to the KV pool.

A program computes some queries of one KV head over one segment of the visible keys. It reads each
key and value once, with an online softmax in fp32. Another kernel lists the segments of a step,
once for all layers. gpt/attention/triton_paged.py launches the kernels. Decode is limited by memory
bandwidth: a token reads 2 x context x D elements per KV head (an H200 has 4.8 TB/s). Prefill is
limited by compute: 4 x D operations per query and visible key (an H200 has 989 TFLOP/s in bf16).
The kernels read lengths on the device, without host synchronization.
"""

from math import e, log2

import triton
import triton.language as tl

from gpt.fp8_rows import ABSMAX_MIN, FP8_MAX

# A work item is a decode token, or a run of adjacent new tokens of one sequence. `work_items` has
# two numbers per work item: the index of the sequence in the batch, and the index of the work
# item's first token among the new tokens of the sequence.
#
# A segment is a range of the keys that a work item sees. `segments` has rows of FIELDS numbers. The
# first number of row 0 is the number of segments; each further row is a segment. The fields of a
# segment are the index of the sequence in the batch, the row of the work item's first token, its
# number of tokens, the position of its first token, the begin and the end of the range of keys, the
# index in the list of the work item's first segment, and the work item's number of segments. The
# segments of a work item are adjacent. `first_segments` has the same fields of the first segment of
# each work item.
#
# Compile-time constants of the kernels:
# D: channels per head.
# WIDTH: D, rounded up to a power of two; at least 16 in the attention kernels.
# HEADS: query heads.
# GROUPS: KV heads.
# QUERIES: query heads per KV head.
# BLOCK: tokens per block of the KV pool.
# TILE: keys that a program reads at once.
# TOKENS: maximum number of new tokens of a work item.
# ROWS: QUERIES x TOKENS, rounded up to a power of two; at least 16.
# SEGMENTS_MAX: maximum number of segments of a work item. 1: keys are not split.
# ALIGNMENT: the number of keys of a segment is a multiple of this, except in the last one.
# ITEMS: number of work items that `list_segments` reads at once.
# FIELDS: numbers per segment.
# STAGES: number of software pipeline stages of the loop over the keys.
# SCALED: whether keys and values have scales: `scales[0]` for keys, `scales[1]` for values.
# WINDOW: size of the attention window in tokens; 0: no window.
# SINKS, ALIBI: whether attention has sinks, and ALiBi (gpt/attention/options.py); otherwise `sinks`
# and `slopes` are None.
# DTYPE_MAX: keys and values are clamped to this number, the largest of the pool's dtype. 0: no
# clamp, because the keys and values of the step have the dtype of the pool.
# QUANTIZE: whether the output is also stored in e4m3, in rows of FP8_WIDTH channels.
# ROTARY: number of rotated channels of a head; they are the first ones.
#
FP8_MAX_CONST = tl.constexpr(FP8_MAX)
ABSMAX_MIN_CONST = tl.constexpr(ABSMAX_MIN)
LOG2_E = tl.constexpr(log2(e))  # The kernels compute exp(x) as exp2(x * LOG2_E).

# Triton compiles a kernel again for each combination of pointers that are multiples of 16 bytes.
# The index tensors of a step are views of one packed tensor, so their alignment depends on the
# numbers of sequences and tokens. Therefore the kernels are not specialized on it
# (`do_not_specialize_on_alignment`), and a step launches only kernels that
# `TritonAttention.compile_kernels` has compiled.
STEP_TENSORS = ("block_tables", "scales", "sinks", "slopes")


@triton.jit
def item_keys(
    work_items, context_lengths, query_starts, items, is_item, tokens_max, window,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return six fields of each work item, in the order of a segment's fields.

    They are the sequence, the first row, the number of tokens, the first position, and the begin
    and the end of the range of visible keys. The begin is rounded down to a multiple of ALIGNMENT.
    A `window` of 0 means no window.
    """
    sequences = tl.load(work_items + 2 * items, mask=is_item, other=0)
    first_tokens = tl.load(work_items + 2 * items + 1, mask=is_item, other=0)
    starts = tl.load(query_starts + sequences, mask=is_item, other=0)
    lengths = tl.load(query_starts + sequences + 1, mask=is_item, other=0) - starts
    contexts = tl.load(context_lengths + sequences, mask=is_item, other=0)
    tokens = tl.minimum(lengths - first_tokens, tokens_max)
    positions = contexts - lengths + first_tokens
    begins = tl.where(window > 0, tl.maximum(positions + 1 - window, 0) // ALIGNMENT * ALIGNMENT, 0)
    return sequences, starts + first_tokens, tokens, positions, begins, positions + tokens


@triton.jit
def split_keys(key_counts, segment_keys, SEGMENTS_MAX: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the keys per segment and the number of segments of each work item.

    Each segment has at most `segment_keys` keys, unless there would be too many segments. A work
    item without keys has one segment.
    """
    counts = tl.minimum(tl.maximum(tl.cdiv(key_counts, segment_keys), 1), SEGMENTS_MAX)
    lengths = tl.cdiv(tl.cdiv(key_counts, counts), ALIGNMENT) * ALIGNMENT
    return lengths, tl.maximum(tl.cdiv(key_counts, tl.maximum(lengths, 1)), 1)


@triton.jit
def store_segments(
    addresses, mask, sequences, rows, tokens, positions, begins, ends, firsts, counts,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Store the fields of segments. The begin is stored as a multiple of ALIGNMENT."""
    tl.store(addresses, sequences, mask=mask)
    tl.store(addresses + 1, rows, mask=mask)
    tl.store(addresses + 2, tokens, mask=mask)
    tl.store(addresses + 3, positions, mask=mask)
    tl.store(addresses + 4, begins // ALIGNMENT, mask=mask)
    tl.store(addresses + 5, ends, mask=mask)
    tl.store(addresses + 6, firsts, mask=mask)
    tl.store(addresses + 7, counts, mask=mask)


@triton.jit(
    do_not_specialize=["item_count", "tokens_max", "window", "extra", "segment_keys_min"],
    do_not_specialize_on_alignment=["work_items", "context_lengths", "query_starts"],
)
def list_segments(
    work_items, context_lengths, query_starts, segments, first_segments,
    item_count, tokens_max, window, extra, segment_keys_min,
    SEGMENTS_MAX: tl.constexpr, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Split the visible keys of all work items into segments, and write the list of segments.

    The list has at most `item_count + extra` segments. Work items with more than one segment are
    first, because their segments usually have the most keys, and should start first. One program
    writes the whole list.
    """
    total = 0
    for first_item in range(0, item_count, ITEMS):
        items = first_item + tl.arange(0, ITEMS)
        is_item = items < item_count
        _, _, _, _, begins, ends = item_keys(
            work_items, context_lengths, query_starts, items, is_item, tokens_max, window, ALIGNMENT
        )
        total += tl.sum(tl.where(is_item, ends - begins, 0), 0)
    # With segments of this size, each work item has one segment that is not full, and all work
    # items have at most `extra` full segments.
    segment_keys = tl.maximum(tl.cdiv(total, extra), segment_keys_min)
    split_total = 0
    for first_item in range(0, item_count, ITEMS):
        items = first_item + tl.arange(0, ITEMS)
        is_item = items < item_count
        _, _, _, _, begins, ends = item_keys(
            work_items, context_lengths, query_starts, items, is_item, tokens_max, window, ALIGNMENT
        )
        _, counts = split_keys(ends - begins, segment_keys, SEGMENTS_MAX, ALIGNMENT)
        split_total += tl.sum(tl.where(is_item & (counts > 1), counts, 0), 0)
    next_split, next_single = 0, split_total
    for first_item in range(0, item_count, ITEMS):
        items = first_item + tl.arange(0, ITEMS)
        is_item = items < item_count
        sequences, rows, tokens, positions, begins, ends = item_keys(
            work_items, context_lengths, query_starts, items, is_item, tokens_max, window, ALIGNMENT
        )
        lengths, counts = split_keys(ends - begins, segment_keys, SEGMENTS_MAX, ALIGNMENT)
        split_counts = tl.where(is_item & (counts > 1), counts, 0)
        singles = tl.where(is_item & (counts == 1), 1, 0)
        firsts = tl.where(
            counts > 1,
            next_split + tl.cumsum(split_counts, 0) - split_counts,
            next_single + tl.cumsum(singles, 0) - singles,
        )
        for part in range(0, tl.max(tl.where(is_item, counts, 0), 0)):
            begin = begins + part * lengths
            store_segments(
                segments + (1 + firsts + part) * FIELDS, is_item & (part < counts),
                sequences, rows, tokens, positions, begin, tl.minimum(begin + lengths, ends),
                firsts, counts, ALIGNMENT,
            )  # fmt: skip
        store_segments(
            first_segments + items * FIELDS, is_item,
            sequences, rows, tokens, positions, begins, tl.minimum(begins + lengths, ends),
            firsts, counts, ALIGNMENT,
        )  # fmt: skip
        next_split += tl.sum(split_counts, 0)
        next_single += tl.sum(singles, 0)
    tl.store(segments, next_single)


@triton.jit
def load_segment(address, ALIGNMENT: tl.constexpr):
    """Return the fields of a segment. The compiler knows that the begin is a multiple."""
    return (
        tl.load(address),
        tl.load(address + 1),
        tl.load(address + 2),
        tl.load(address + 3),
        tl.load(address + 4) * ALIGNMENT,
        tl.load(address + 5),
        tl.load(address + 6),
        tl.load(address + 7),
    )


@triton.jit
def finite_max(running_max):
    """Return `running_max`, with 0 in place of -inf.

    The maximum is -inf while no key has been visible. All scores are then -inf too, and -inf - 0 is
    -inf, but -inf - (-inf) would be NaN.
    """
    return tl.where(running_max == float("-inf"), 0.0, running_max)


@triton.jit
def sink_terms(sinks, heads, running_max):
    """Return the terms of the heads' sinks in the denominators of the softmax.

    Like the sums over keys, they are relative to the maximum of the scores.
    """
    return tl.exp2(tl.load(sinks + heads).to(tl.float32) * LOG2_E - finite_max(running_max))


@triton.jit
def kv_offsets(
    block_table, tokens, is_inside, kv_head,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return the offset in `kv` of each token's key for one KV head, in elements.

    `tokens`: positions in the sequence. The offsets are int64, because `kv` can have more than 2^31
    elements.
    """
    blocks = tl.load(block_table + tokens // BLOCK, mask=is_inside, other=0).to(tl.int64)
    return ((blocks * (2 * GROUPS) + kv_head) * BLOCK + tokens % BLOCK) * D


@triton.jit
def is_last_segment(arrivals, index, count):
    """Count a finished segment; return whether all `count` segments of the work item are finished.

    (`merge_tiles` counts the heads of a row.)

    The program for which it is true then reads what the other programs have stored. The barrier and
    the atomic addition order all stores of a program before the loads. The counter is 0 again for
    the next layer.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals + index, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(arrivals + index, 0)
    return is_last


@triton.jit
def merge_segments(
    partial_out, softmax_stats, sinks, head, first_row, count, stride,
    WIDTH: tl.constexpr, SEGMENTS_MAX: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial outputs of a work item's `count` segments, for one row of the output.

    The row is of query head `head`. The sum over all keys gets the term of the sink.

    `first_row`: the row of the first segment in `partial_out`. The next segment's row is `stride`
    rows later. The loads bypass the L1 cache, which does not see the stores of other programs.
    """
    segments, channels = tl.arange(0, SEGMENTS_MAX), tl.arange(0, WIDTH)
    rows, mask = first_row + segments.to(tl.int64) * stride, segments < count
    segment_max = tl.load(
        softmax_stats + 2 * rows, mask=mask, other=float("-inf"), cache_modifier=".cg"
    )
    total = tl.load(softmax_stats + 2 * rows + 1, mask=mask, other=0.0, cache_modifier=".cg")
    address = partial_out + rows[:, None] * WIDTH + channels[None, :]
    y = tl.load(address, mask=mask[:, None], other=0.0, cache_modifier=".cg")
    running_max = tl.max(segment_max, 0)
    segment_scales = tl.exp2(segment_max - finite_max(running_max))
    total = tl.sum(total * segment_scales, 0)
    if SINKS:
        total += sink_terms(sinks, head, running_max)
    return tl.sum(y * segment_scales[:, None], 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=STEP_TENSORS)
def attend_single(
    q, kv, block_tables, segments, arrivals, out, partial_out, softmax_stats, scales, sinks, slopes,
    q_row, q_head, table_width, softmax_scale,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS_MAX: tl.constexpr, FIELDS: tl.constexpr,
    ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute decode attention with one query head per KV head (MHA), on the CUDA cores.

    Each lane (key position of a tile) has its own online softmax. The lanes are merged once, after
    the loop.
    """
    kv_head, segment = tl.program_id(0), tl.program_id(1)
    sequence, row, _, position, begin, end, first, count = load_segment(
        segments + (1 + segment) * FIELDS, ALIGNMENT
    )
    if segment >= tl.load(segments):
        return
    channels, lanes = tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_channel = channels < D
    softmax_scale *= tl.load(scales) if SCALED else 1.0
    query = tl.load(
        q + row.to(tl.int64) * q_row + kv_head * q_head + channels, mask=is_channel, other=0.0
    )
    query = query.to(tl.float32) * softmax_scale
    slope = tl.load(slopes + kv_head) * LOG2_E if ALIBI else 0.0
    running_max = tl.full([TILE], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE], tl.float32)
    y = tl.zeros([TILE, WIDTH], tl.float32)
    for index in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = index + lanes
        is_inside = tokens < end
        if WINDOW:
            is_inside &= tokens > position - WINDOW
        offsets = kv_offsets(
            block_tables + sequence * table_width, tokens, is_inside, kv_head, GROUPS, BLOCK, D
        )
        address = kv + offsets[:, None] + channels[None, :]
        kv_mask = is_inside[:, None] & is_channel[None, :]
        keys = tl.load(address, mask=kv_mask, other=0.0).to(tl.float32)
        values = tl.load(address + GROUPS * BLOCK * D, mask=kv_mask, other=0.0).to(tl.float32)
        scores = tl.sum(keys * query[None, :], 1)
        if ALIBI:
            scores -= slope * (position - tokens).to(tl.float32)
        scores = tl.where(is_inside, scores, float("-inf"))
        new_max = tl.maximum(running_max, scores)
        rescale, weights = (
            tl.exp2(running_max - finite_max(new_max)),
            tl.exp2(scores - finite_max(new_max)),
        )
        running_sum = running_sum * rescale + weights
        y = y * rescale[:, None] + weights[:, None] * values
        running_max = new_max
    new_max = tl.max(running_max, 0)
    lane_scales = tl.exp2(running_max - finite_max(new_max))
    total = tl.sum(running_sum * lane_scales, 0)
    merged = tl.sum(y * lane_scales[:, None], 0)
    value_scale = tl.load(scales + 1) if SCALED else 1.0
    out_address = out + (row.to(tl.int64) * GROUPS + kv_head) * D + channels
    if count == 1:
        if SINKS:
            total += sink_terms(sinks, kv_head, new_max)
        merged = merged / tl.where(total == 0.0, 1.0, total) * value_scale
        tl.store(out_address, merged.to(out.dtype.element_ty), mask=is_channel)
    else:
        partial_row = segment.to(tl.int64) * GROUPS + kv_head
        tl.store(partial_out + partial_row * WIDTH + channels, merged)
        tl.store(softmax_stats + 2 * partial_row, new_max)
        tl.store(softmax_stats + 2 * partial_row + 1, total)
        first_row = first * GROUPS + kv_head
        if is_last_segment(arrivals, first_row, count):
            merged = value_scale * merge_segments(
                partial_out, softmax_stats, sinks, kv_head, first_row, count, GROUPS,
                WIDTH, SEGMENTS_MAX, SINKS,
            )  # fmt: skip
            tl.store(out_address, merged.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=STEP_TENSORS)
def attend_tile(
    q, kv, block_tables, segments, out, partial_out, softmax_stats, scales, sinks, slopes,
    q_row, q_head, table_width, softmax_scale,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS_MAX: tl.constexpr, FIELDS: tl.constexpr,
    ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a work item's new tokens, for all query heads of one KV head.

    A row of the output tile (ROWS, WIDTH) is one query head of one new token. Another kernel merges
    the partial outputs: with the merge or both kinds of output in this kernel, the loop over the
    keys has too few registers, and is slower.
    """
    HEADS: tl.constexpr = GROUPS * QUERIES
    if SEGMENTS_MAX > 1:
        kv_head, segment = tl.program_id(0), tl.program_id(1)
    else:
        # The work items of a sequence read the same keys, at best at the same time.
        segment, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, first_row, length, position, begin, end, _, _ = load_segment(
        segments + (1 + segment) * FIELDS, ALIGNMENT
    )
    if segment >= tl.load(segments):
        return
    rows, channels, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_row = rows < length * QUERIES
    query_mask = is_row[:, None] & (channels < D)[None, :]
    heads, token_rows = (
        kv_head * QUERIES + rows % QUERIES,
        (first_row + rows // QUERIES).to(tl.int64),
    )
    query_address = q + (token_rows * q_row + heads * q_head)[:, None] + channels[None, :]
    query = tl.load(query_address, mask=query_mask, other=0.0)
    softmax_scale *= tl.load(scales) if SCALED else 1.0
    if ALIBI:
        head_slopes = tl.load(slopes + heads) * LOG2_E
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in range(begin, end, TILE):
        tokens = index + lanes
        is_inside = tokens < end
        offsets = kv_offsets(
            block_tables + sequence * table_width, tokens, is_inside, kv_head, GROUPS, BLOCK, D
        )
        address = kv + offsets[:, None] + channels[None, :]
        kv_mask = is_inside[:, None] & (channels < D)[None, :]
        keys = tl.load(address, mask=kv_mask, other=0.0).to(query.dtype)
        values = tl.load(address + GROUPS * BLOCK * D, mask=kv_mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * softmax_scale
        distance = (position + rows // QUERIES)[:, None] - tokens[None, :]
        if ALIBI:
            scores -= head_slopes[:, None] * distance.to(tl.float32)
        is_visible = is_inside[None, :] & (distance >= 0)
        if WINDOW:
            is_visible &= distance < WINDOW
        scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        rescale, weights = (
            tl.exp2(running_max - finite_max(new_max)),
            tl.exp2(scores - finite_max(new_max)[:, None]),
        )
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        weights = weights.to(query.dtype)
        y = tl.dot(weights, values, y * rescale[:, None], input_precision="ieee")
        running_max = new_max
    if SEGMENTS_MAX > 1:
        partial_rows = (segment * TOKENS + rows // QUERIES).to(tl.int64) * HEADS + heads
        partial_address = partial_out + partial_rows[:, None] * WIDTH + channels[None, :]
        tl.store(partial_address, y, mask=is_row[:, None])
        tl.store(softmax_stats + 2 * partial_rows, running_max, mask=is_row)
        tl.store(softmax_stats + 2 * partial_rows + 1, running_sum, mask=is_row)
    else:
        if SINKS:
            running_sum += sink_terms(sinks, heads, running_max)
        y = y / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        y = y * (tl.load(scales + 1) if SCALED else 1.0)
        out_rows = token_rows * HEADS + heads
        out_address = out + out_rows[:, None] * D + channels[None, :]
        tl.store(out_address, y.to(out.dtype.element_ty), mask=query_mask)


@triton.jit
def quantize_finished_row(
    out, arrivals, row, fp8_values, fp8_scales,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, FP8_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Count a finished head of a row of `out`; quantize the row if all heads are finished.

    The numbers are those of `activate_row` in gpt/linear/triton_row_kernels.py. The loads bypass
    the L1 cache, which does not see the stores of other programs.
    """
    if is_last_segment(arrivals, row, HEADS):
        block_absmax = tl.zeros([BLOCK_SIZE], tl.float32)
        for start in range(0, CHANNELS, BLOCK_SIZE):
            channels = start + tl.arange(0, BLOCK_SIZE)
            address = out + row * CHANNELS + channels
            x = tl.load(address, mask=channels < CHANNELS, other=0.0, cache_modifier=".cg")
            block_absmax = tl.maximum(block_absmax, tl.abs(x.to(tl.float32)))
        absmax = tl.maximum(tl.max(block_absmax, 0), ABSMAX_MIN_CONST)
        tl.store(fp8_scales + row, tl.div_rn(absmax, FP8_MAX_CONST))
        inverse_scale = tl.div_rn(FP8_MAX_CONST, absmax)
        for start in range(0, FP8_WIDTH, BLOCK_SIZE):
            channels = start + tl.arange(0, BLOCK_SIZE)
            address = out + row * CHANNELS + channels
            x = tl.load(address, mask=channels < CHANNELS, other=0.0, cache_modifier=".cg")
            x = x.to(tl.float32) * inverse_scale
            values = fp8_values + row * FP8_WIDTH + channels
            tl.store(values, x.to(fp8_values.dtype.element_ty), mask=channels < FP8_WIDTH)


@triton.jit(do_not_specialize_on_alignment=["arrivals", "scales", "sinks"])
def merge_tiles(
    first_segments, arrivals, out, partial_out, softmax_stats, scales, sinks,
    fp8_values, fp8_scales,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    SEGMENTS_MAX: tl.constexpr, FIELDS: tl.constexpr, ALIGNMENT: tl.constexpr,
    SCALED: tl.constexpr, SINKS: tl.constexpr, QUANTIZE: tl.constexpr, FP8_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge the partial outputs of `attend_tile`, for one query head of one new token.

    With QUANTIZE, the program that finishes the last head of a token also quantizes the token's
    row of FP8_WIDTH channels.
    """
    work_item, token, head = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS, tl.program_id(1)
    _, first_row, length, _, _, _, first, count = load_segment(
        first_segments + work_item * FIELDS, ALIGNMENT
    )
    if token >= length:
        return
    y = merge_segments(
        partial_out, softmax_stats, sinks, head,
        (first * TOKENS + token).to(tl.int64) * HEADS + head, count, TOKENS * HEADS,
        WIDTH, SEGMENTS_MAX, SINKS,
    )  # fmt: skip
    y = y * (tl.load(scales + 1) if SCALED else 1.0)
    channels = tl.arange(0, WIDTH)
    row = (first_row + token).to(tl.int64)
    out_row = row * HEADS + head
    tl.store(out + out_row * D + channels, y.to(out.dtype.element_ty), mask=channels < D)
    if QUANTIZE:
        quantize_finished_row(
            out, arrivals, row, fp8_values, fp8_scales, HEADS, HEADS * D, FP8_WIDTH, BLOCK_SIZE
        )


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def scale_and_clamp(x, scale, SCALED: tl.constexpr, DTYPE_MAX: tl.constexpr):
    """Return the number that is cast to the pool's dtype and stored for a key or a value."""
    if SCALED:
        x = x.to(tl.float32) / scale
    if DTYPE_MAX:
        # Without the clamp, a cast to fp8 may turn a large number into NaN. The clamp does not
        # change a NaN, so that the check of the logits detects it.
        x = clamp(x.to(tl.float32), DTYPE_MAX)
    return x


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets", "scales"])
def append_kv(
    k, v, kv, blocks, offsets, scales,
    k_row, k_group, v_row, v_group,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, DTYPE_MAX: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store a new token's key and value for one KV head, unless the token's block is negative."""
    row, kv_head, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    block, offset = tl.load(blocks + row).to(tl.int64), tl.load(offsets + row)
    channel_mask = channels < tl.where(block >= 0, D, 0)
    key = tl.load(k + row * k_row + kv_head * k_group + channels, mask=channel_mask, other=0.0)
    value = tl.load(v + row * v_row + kv_head * v_group + channels, mask=channel_mask, other=0.0)
    key = scale_and_clamp(key, tl.load(scales) if SCALED else 1.0, SCALED, DTYPE_MAX)
    value = scale_and_clamp(value, tl.load(scales + 1) if SCALED else 1.0, SCALED, DTYPE_MAX)
    address = kv + ((block * (2 * GROUPS) + kv_head) * BLOCK + offset) * D + channels
    tl.store(address, key.to(kv.dtype.element_ty), mask=channel_mask)
    tl.store(address + GROUPS * BLOCK * D, value.to(kv.dtype.element_ty), mask=channel_mask)


@triton.jit
def scale_channels(
    x, channels, channel_mask, is_key, q_weight, k_weight, q_bias, k_bias,
    GAMMA_OFFSET: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Apply the weight and the bias of the norm to centered, rescaled query and key heads.

    `x`: (heads, channels); `is_key` says which heads are keys.
    """
    q_scale = tl.load(q_weight + channels, mask=channel_mask, other=0.0).to(tl.float32)
    k_scale = tl.load(k_weight + channels, mask=channel_mask, other=0.0).to(tl.float32)
    x *= GAMMA_OFFSET + tl.where(is_key[:, None], k_scale[None, :], q_scale[None, :])
    if BIASED:
        q_shift = tl.load(q_bias + channels, mask=channel_mask, other=0.0).to(tl.float32)
        k_shift = tl.load(k_bias + channels, mask=channel_mask, other=0.0).to(tl.float32)
        x += tl.where(is_key[:, None], k_shift[None, :], q_shift[None, :])
    return x


# The norm weights are not specialized on alignment, because a checkpoint's tensors can be views.
@triton.jit(
    do_not_specialize_on_alignment=[
        "q_weight", "k_weight", "q_bias", "k_bias", "positions", "blocks", "offsets", "scales",
    ]
)  # fmt: skip
def transform_and_append(
    qkv, rotary_table, q_weight, k_weight, q_bias, k_bias, out, kv,
    positions, blocks, offsets, scales, epsilon,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, GAMMA_OFFSET: tl.constexpr,
    BIASED: tl.constexpr, DTYPE_MAX: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a new token's queries and key of one KV head; store its key and value.

    A KV head of `qkv` has QUERIES + 2 rows: its queries, its key and its value. A program computes
    ROWS of them. `out` has all query heads and then all keys. The pool gets the key as it is in
    `out`, and nothing if the token's block is negative.

    NORMED: whether queries and keys have a norm: LayerNorm if CENTERED, else RMSNorm. GAMMA_OFFSET:
    the number to add to the norm's weight. BIASED: whether the norm has a bias.
    """
    HALF: tl.constexpr = ROTARY // 2
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    members, channels = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_key, is_value = members == QUERIES, members > QUERIES
    is_channel, is_rotary = channels < D, channels < ROTARY
    mask = (members < QUERIES + 2)[:, None] & is_channel[None, :]
    # Each rotated channel is computed from itself and from the other channel of its pair.
    if INTERLEAVED:
        partners, pairs, is_first = channels ^ 1, channels // 2, channels % 2 == 0
    else:
        partners = tl.where(channels < HALF, channels + HALF, channels - HALF)
        pairs, is_first = channels % HALF, channels < HALF
    head = qkv + (((token * GROUPS + kv_head) * (QUERIES + 2) + members) * D)[:, None]
    original = tl.load(head + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    partner_mask = mask & is_rotary[None, :]
    x = original
    y = tl.load(head + partners[None, :], mask=partner_mask, other=0.0).to(tl.float32)
    if NORMED:
        if CENTERED:
            mean = (tl.sum(x, 1) / D)[:, None]
            x, y = tl.where(mask, x - mean, 0.0), y - mean
        rescale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        x = scale_channels(
            x * rescale, channels, is_channel, is_key, q_weight, k_weight, q_bias, k_bias,
            GAMMA_OFFSET, BIASED,
        )  # fmt: skip
        y = scale_channels(
            y * rescale, partners, is_rotary, is_key, q_weight, k_weight, q_bias, k_bias,
            GAMMA_OFFSET, BIASED,
        )  # fmt: skip
    angle = rotary_table + tl.load(positions + token).to(tl.int64) * ROTARY + pairs
    cos = tl.load(angle, mask=is_rotary, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=is_rotary, other=0.0)[None, :]
    # Other channels and values are selected and not multiplied by 1 and 0, which would make NaN of
    # an infinite number.
    x = tl.where(is_rotary[None, :], x * cos + tl.where(is_first[None, :], -y, y) * sin, x)
    x = tl.where(is_value[:, None], original, x).to(out.dtype.element_ty)
    out_heads = tl.where(is_key, GROUPS * QUERIES + kv_head, kv_head * QUERIES + members)
    out_rows = token * (GROUPS * (QUERIES + 1)) + out_heads
    tl.store(out + (out_rows * D)[:, None] + channels[None, :], x, mask=mask & ~is_value[:, None])
    block, offset = tl.load(blocks + token).to(tl.int64), tl.load(offsets + token)
    scale = 1.0
    if SCALED:
        scale = tl.where(is_key, tl.load(scales), tl.load(scales + 1))[:, None]
    stored = scale_and_clamp(x, scale, SCALED, DTYPE_MAX).to(kv.dtype.element_ty)
    pool_heads = block * (2 * GROUPS) + tl.where(is_value, GROUPS, 0) + kv_head
    address = kv + ((pool_heads * BLOCK + offset) * D)[:, None] + channels[None, :]
    is_stored = (members >= QUERIES) & (block >= 0)
    tl.store(address, stored, mask=mask & is_stored[:, None])
