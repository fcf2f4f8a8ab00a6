"""Triton kernels of paged attention (flash-decoding and prefill), RoPE and writes to the KV pool.

A program computes some queries of one KV head over one segment of the visible keys. It reads each
key and value once, with an online softmax in fp32. gpt/attention/triton_paged.py launches the
kernels. Decode is limited by memory bandwidth: a token reads 2 x context x D elements per KV head
(an H200 has 4.8 TB/s). Prefill is limited by compute: 4 x D operations per query and visible key
(an H200 has 989 TFLOP/s in bf16). The kernels read lengths on the device, without host
synchronization.
"""

import triton
import triton.language as tl

# A work item is a decode token, or a run of adjacent new tokens of one sequence. `work_items` has
# two numbers per work item: the index of the sequence in the batch, and the index of the work
# item's first token among the new tokens of the sequence.
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
# SEGMENTS: number of segments into which the keys of a work item are split.
# STAGES: number of software pipeline stages of the loop over the keys.
# SCALED: whether keys and values have scales: `scales[0]` for keys, `scales[1]` for values.
# WINDOW: size of the attention window in tokens; 0: no window.
# DTYPE_MAX: keys and values are clamped to this number, the largest of the pool's dtype. 0: no
# clamp, because the keys and values of the step have the dtype of the pool.
# ROTARY: number of rotated channels of a head; they are the first ones.
#
# Triton compiles a kernel again for each combination of pointers that are multiples of 16 bytes.
# The index tensors of a step are views of one packed tensor, so their alignment depends on the
# numbers of sequences and tokens. Therefore the kernels are not specialized on it
# (`do_not_specialize_on_alignment`), and a step launches only kernels that
# `TritonAttention.compile_kernels` has compiled.
STEP_TENSORS = ("block_tables", "context_lengths", "query_starts", "work_items", "scales")


@triton.jit
def segment_range(low, high, segment, TILE: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the begin and the end of a segment of the keys [low, high).

    All segments have the same number of tiles, except that the last ones can be shorter or empty.
    The first segment begins at a multiple of TILE, possibly before `low`.
    """
    first = low // TILE * TILE
    segment_keys = tl.cdiv(tl.cdiv(high - first, TILE), SEGMENTS) * TILE
    begin = first + segment * segment_keys
    return begin, tl.minimum(begin + segment_keys, high)


@triton.jit
def finite_max(running_max):
    """Return `running_max`, with 0 in place of -inf.

    The maximum is -inf while no key has been visible. All scores are then -inf too, and -inf - 0 is
    -inf, but -inf - (-inf) would be NaN.
    """
    return tl.where(running_max == float("-inf"), 0.0, running_max)


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


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=STEP_TENSORS)
def attend_single(
    q, kv, block_tables, context_lengths, query_starts, work_items,
    out, partial_out, softmax_stats, scales,
    q_row, q_head, table_width, softmax_scale,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute decode attention with one query head per KV head (MHA), on the CUDA cores.

    Each lane (key position of a tile) has its own online softmax. The lanes are merged once, after
    the loop.
    """
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(work_items + 2 * tl.program_id(0))
    row = tl.load(query_starts + sequence)
    high = tl.load(context_lengths + sequence)
    low = tl.maximum(high - WINDOW, 0) if WINDOW else 0
    begin, end = segment_range(low, high, segment, TILE, SEGMENTS)
    channels, lanes = tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_channel = channels < D
    softmax_scale *= tl.load(scales) if SCALED else 1.0
    query = tl.load(
        q + row.to(tl.int64) * q_row + kv_head * q_head + channels, mask=is_channel, other=0.0
    )
    query = query.to(tl.float32) * softmax_scale
    running_max = tl.full([TILE], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE], tl.float32)
    y = tl.zeros([TILE, WIDTH], tl.float32)
    for index in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = index + lanes
        is_inside = (tokens >= low) & (tokens < end)
        offsets = kv_offsets(
            block_tables + sequence * table_width, tokens, is_inside, kv_head, GROUPS, BLOCK, D
        )
        address = kv + offsets[:, None] + channels[None, :]
        kv_mask = is_inside[:, None] & is_channel[None, :]
        keys = tl.load(address, mask=kv_mask, other=0.0).to(tl.float32)
        values = tl.load(address + GROUPS * BLOCK * D, mask=kv_mask, other=0.0).to(tl.float32)
        scores = tl.where(is_inside, tl.sum(keys * query[None, :], 1), float("-inf"))
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
    running_sum = tl.sum(running_sum * lane_scales, 0)
    y = tl.sum(y * lane_scales[:, None], 0)
    if SEGMENTS > 1:
        index = (tl.program_id(0).to(tl.int64) * GROUPS + kv_head) * SEGMENTS + segment
        tl.store(partial_out + index * WIDTH + channels, y)
        tl.store(softmax_stats + 2 * index, new_max)
        tl.store(softmax_stats + 2 * index + 1, running_sum)
    else:
        y = (
            y
            / tl.where(running_sum == 0.0, 1.0, running_sum)
            * (tl.load(scales + 1) if SCALED else 1.0)
        )
        index = row.to(tl.int64) * GROUPS + kv_head
        tl.store(out + index * D + channels, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=STEP_TENSORS)
def attend_tile(
    q, kv, block_tables, context_lengths, query_starts, work_items,
    out, partial_out, softmax_stats, scales,
    q_row, q_head, table_width, softmax_scale,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a work item's new tokens, for all query heads of one KV head.

    A row of the output tile (ROWS, WIDTH) is one query head of one new token.
    """
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(work_items + 2 * tl.program_id(0))
    first_token = tl.load(work_items + 2 * tl.program_id(0) + 1)
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    past_length = tl.load(context_lengths + sequence) - length
    rows, channels, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    token_indices = first_token + rows // QUERIES
    query_mask = ((rows < TOKENS * QUERIES) & (token_indices < length))[:, None] & (channels < D)[
        None, :
    ]
    heads, token_rows = kv_head * QUERIES + rows % QUERIES, (start + token_indices).to(tl.int64)
    query_address = q + (token_rows * q_row + heads * q_head)[:, None] + channels[None, :]
    query = tl.load(query_address, mask=query_mask, other=0.0)
    softmax_scale *= tl.load(scales) if SCALED else 1.0
    high = past_length + tl.minimum(first_token + TOKENS, length)
    low = tl.maximum(past_length + first_token + 1 - WINDOW, 0) if WINDOW else 0
    begin, end = segment_range(low, high, segment, TILE, SEGMENTS)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in range(begin, end, TILE):
        tokens = index + lanes
        is_inside = (tokens >= low) & (tokens < end)
        offsets = kv_offsets(
            block_tables + sequence * table_width, tokens, is_inside, kv_head, GROUPS, BLOCK, D
        )
        address = kv + offsets[:, None] + channels[None, :]
        kv_mask = is_inside[:, None] & (channels < D)[None, :]
        keys = tl.load(address, mask=kv_mask, other=0.0).to(query.dtype)
        values = tl.load(address + GROUPS * BLOCK * D, mask=kv_mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * softmax_scale
        distance = (past_length + token_indices)[:, None] - tokens[None, :]
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
    if SEGMENTS > 1:
        index = tl.program_id(0).to(tl.int64) * TOKENS + rows // QUERIES
        index = (index * (GROUPS * QUERIES) + heads) * SEGMENTS + segment
        row_mask = (rows < TOKENS * QUERIES) & (token_indices < length)
        tl.store(
            partial_out + index[:, None] * WIDTH + channels[None, :], y, mask=row_mask[:, None]
        )
        tl.store(softmax_stats + 2 * index, running_max, mask=row_mask)
        tl.store(softmax_stats + 2 * index + 1, running_sum, mask=row_mask)
    else:
        y = y / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        y = y * (tl.load(scales + 1) if SCALED else 1.0)
        index = token_rows * (GROUPS * QUERIES) + heads
        out_address = out + index[:, None] * D + channels[None, :]
        tl.store(out_address, y.to(out.dtype.element_ty), mask=query_mask)


@triton.jit(do_not_specialize_on_alignment=["query_starts", "work_items", "scales"])
def merge_segments(
    query_starts, work_items, out, partial_out, softmax_stats, scales,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Merge the partial outputs of all segments, for one query head of one new token."""
    work_item, head = tl.program_id(0) // TOKENS, tl.program_id(1)
    sequence, first_token = (
        tl.load(work_items + 2 * work_item),
        tl.load(work_items + 2 * work_item + 1),
    )
    row = tl.load(query_starts + sequence) + first_token + tl.program_id(0) % TOKENS
    is_token = row < tl.load(query_starts + sequence + 1)
    channels, segments = tl.arange(0, WIDTH), tl.arange(0, SEGMENTS)
    segment_indices = (tl.program_id(0).to(tl.int64) * HEADS + head) * SEGMENTS + segments
    segment_mask = segments < tl.where(is_token, SEGMENTS, 0)
    segment_max = tl.load(softmax_stats + 2 * segment_indices, mask=segment_mask, other=0.0)
    total = tl.load(softmax_stats + 2 * segment_indices + 1, mask=segment_mask, other=0.0)
    address = partial_out + segment_indices[:, None] * WIDTH + channels[None, :]
    y = tl.load(address, mask=segment_mask[:, None], other=0.0)
    segment_scales = tl.exp2(segment_max - finite_max(tl.max(segment_max, 0)))
    total = tl.sum(total * segment_scales, 0)
    y = tl.sum(y * segment_scales[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    y = y * (tl.load(scales + 1) if SCALED else 1.0)
    index = row.to(tl.int64) * HEADS + head
    tl.store(
        out + index * D + channels,
        y.to(out.dtype.element_ty),
        mask=channels < tl.where(is_token, D, 0),
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
