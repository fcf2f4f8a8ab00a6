"""Triton kernels of an MoE layer for few rows: the choice of experts, their groups, and a matmul.

gpt/linear/triton_experts.py launches the kernels. The time of the grouped matmul is that of reading
the weights of the experts that have rows. Sums are in fp32, and an output is rounded once. A pair
is a token and one of its experts; pair `i` belongs to token `i // experts_per_token`.
"""

import triton
import triton.language as tl

from gpt.linear.triton_row_kernels import activate


@triton.jit
def choose_experts_row(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    experts,
    scaling_factor,
    EXPERTS_PER_TOKEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Compute `choose_experts` of gpt/model/moe.py for one token; a NaN is the largest score."""
    token = tl.program_id(0).to(tl.int64)
    lanes, choices = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_CHOICES)
    mask = lanes < experts
    logits = tl.load(logits_ptr + token * experts + lanes, mask=mask, other=float("-inf"))
    scores = logits.to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(scores)
    elif PRE_SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    selection = scores
    if HAS_BIAS:
        selection += tl.load(bias_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
    selection = tl.where(selection != selection, float("inf"), selection)
    selection = tl.where(mask, selection, float("-inf"))
    ids = tl.zeros([BLOCK_CHOICES], tl.int32)
    weights = tl.full([BLOCK_CHOICES], float("-inf"), tl.float32)
    for choice in tl.static_range(EXPERTS_PER_TOKEN):
        best = tl.argmax(selection, 0)
        score = tl.sum(tl.where(lanes == best, scores, 0.0), 0)
        ids = tl.where(choices == choice, best, ids)
        weights = tl.where(choices == choice, score, weights)
        selection = tl.where(lanes == best, float("-inf"), selection)
    choice_mask = choices < EXPERTS_PER_TOKEN
    if SIGMOID:
        if EXPERTS_PER_TOKEN > 1:
            weights = weights / (tl.sum(tl.where(choice_mask, weights, 0.0), 0) + 1e-20)
    elif not PRE_SOFTMAX:
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    pairs = token * EXPERTS_PER_TOKEN + choices
    tl.store(ids_ptr + pairs, ids, choice_mask)
    weights = weights * scaling_factor
    tl.store(weights_ptr + pairs, weights.to(weights_ptr.dtype.element_ty), choice_mask)


@triton.jit(do_not_specialize=["pairs"])
def group_pairs(ids_ptr, order_ptr, group_ends_ptr, pairs, BLOCK_SIZE: tl.constexpr):
    """Write the indices of one expert's pairs to the list sorted by expert, and the group's end.

    `ids_ptr` has the expert of each pair. The pairs of an expert keep their order.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SIZE)
    end = 0
    for block in range(0, pairs, BLOCK_SIZE):
        ids = tl.load(ids_ptr + block + lanes, mask=block + lanes < pairs, other=2**30)
        end += tl.sum((ids < expert).to(tl.int32), 0)
    for block in range(0, pairs, BLOCK_SIZE):
        ids = tl.load(ids_ptr + block + lanes, mask=block + lanes < pairs, other=2**30)
        is_own = ids == expert
        counts = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + end + counts - 1, block + lanes, is_own)
        end += tl.sum(is_own.to(tl.int32), 0)
    tl.store(group_ends_ptr + expert, end)


@triton.jit
def expert_matmul(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    group_ends_ptr,
    width,
    channels,
    experts_per_token,
    FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Compute one block of columns of activation(x @ weight.T + bias) for the rows of one expert.

    `order_ptr` has the pairs, sorted by expert. FIRST: `x` has a row for each token, and the output
    a row for each sorted pair. Otherwise `x` has a row for each sorted pair, and the output a row
    for each pair.
    """
    expert = tl.program_id(1)
    start = tl.load(group_ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(group_ends_ptr + expert)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < width
    weight_columns = width * 2 if GATED else width
    weight_ptr += expert.to(tl.int64) * weight_columns * channels
    bias_ptr += expert.to(tl.int64) * weight_columns
    weight_offsets = columns.to(tl.int64)[:, None] * channels
    up_offsets = (columns + width).to(tl.int64)[:, None] * channels
    for row_start in range(start, end, BLOCK_ROWS):
        rows = row_start + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < end
        pairs = tl.load(order_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        x_rows = pairs // experts_per_token if FIRST else rows.to(tl.int64)
        out_rows = rows.to(tl.int64) if FIRST else pairs
        y = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for channel_start in range(0, channels, BLOCK_CHANNELS):
            offsets = channel_start + tl.arange(0, BLOCK_CHANNELS)
            channel_mask = (offsets < channels)[None, :]
            x_block = tl.load(
                x_ptr + x_rows[:, None] * channels + offsets[None, :],
                mask=row_mask[:, None] & channel_mask,
                other=0.0,
            )
            block_mask = column_mask[:, None] & channel_mask
            block_ptr = weight_ptr + weight_offsets + offsets[None, :]
            y = tl.dot(x_block, tl.trans(tl.load(block_ptr, mask=block_mask, other=0.0)), y)
            if GATED:
                up_ptr = weight_ptr + up_offsets + offsets[None, :]
                up = tl.dot(x_block, tl.trans(tl.load(up_ptr, mask=block_mask, other=0.0)), up)
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACTIVATION)
        if GATED:
            if HAS_BIAS:
                up_bias = tl.load(bias_ptr + width + columns, mask=column_mask, other=0.0)
                up += up_bias.to(tl.float32)[None, :]
            y *= up
        tl.store(
            out_ptr + out_rows[:, None] * width + columns[None, :],
            y.to(out_ptr.dtype.element_ty),
            row_mask[:, None] & column_mask[None, :],
        )
