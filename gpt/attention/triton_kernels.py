"""Attention over the paged pool on a GPU, in Triton: what gpt/attention/triton_paged.py launches.

A program takes some queries of a KV head and a segment of their keys; it reads each key and value
once, and keeps an online softmax in fp32. Two numbers bound it: a new token reads 2 x context x D
numbers of each KV head (an H200 reads 4.8 TB/s), a prompt multiplies 4 x D for each pair of a query
and a key that it sees (989 TFLOP/s in bf16). Lengths are read on the device: no host is asked.
"""

import triton
import triton.language as tl

# Where names are short: D channels, WIDTH the next power of two; BLOCK tokens of the pool's block,
# TILE keys that are read at once; QUERIES heads of a KV head, TOKENS new tokens of a tile, ROWS the
# two of them multiplied, up to a power of two. WINDOW 0: none.


@triton.jit
def segment_of(low, high, segment, TILE: tl.constexpr, SEGMENTS: tl.constexpr):
    """The keys of one segment: whole tiles, equally many for all segments but the last."""
    first = low // TILE * TILE
    each = tl.cdiv(tl.cdiv(high - first, TILE), SEGMENTS) * TILE
    begin = first + segment * each
    return begin, tl.minimum(begin + each, high)


@triton.jit
def fixed(most):
    """A score to count from; where no key was seen, any number does."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def places_of(
    tables, tokens, inside, group,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Where the keys of tokens begin in the pool; it may have more numbers than 32 bits count."""
    blocks = tl.load(tables + tokens // BLOCK, mask=inside, other=0).to(tl.int64)
    return ((blocks * (2 * GROUPS) + group) * BLOCK + tokens % BLOCK) * D


@triton.jit(do_not_specialize=["table_width"])
def attend_single(
    q, kv, tables, contexts, starts, pieces,
    out, partial, sums, scales,
    q_row, q_head, table_width, factor,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query of one head that has keys of its own (MHA), on the CUDA cores.

    There is a softmax for each place of a tile, so that threads meet once, at the end.
    """
    group, segment = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(pieces + 2 * tl.program_id(0))
    row = tl.load(starts + sequence)
    high = tl.load(contexts + sequence)
    low = tl.maximum(high - WINDOW, 0) if WINDOW else 0
    begin, end = segment_of(low, high, segment, TILE, SEGMENTS)
    channels, lanes = tl.arange(0, WIDTH), tl.arange(0, TILE)
    real = channels < D
    factor *= tl.load(scales) if SCALED else 1.0
    query = tl.load(q + row.to(tl.int64) * q_row + group * q_head + channels, mask=real, other=0.0)
    query = query.to(tl.float32) * factor
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    y = tl.zeros([TILE, WIDTH], tl.float32)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens = at + lanes
        inside = (tokens >= low) & (tokens < end)
        places = places_of(tables + sequence * table_width, tokens, inside, group, GROUPS, BLOCK, D)
        address = kv + places[:, None] + channels[None, :]
        held = inside[:, None] & real[None, :]
        keys = tl.load(address, mask=held, other=0.0).to(tl.float32)
        values = tl.load(address + GROUPS * BLOCK * D, mask=held, other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(keys * query[None, :], 1), float("-inf"))
        peak = tl.maximum(most, scores)
        kept, weights = tl.exp2(most - fixed(peak)), tl.exp2(scores - fixed(peak))
        total = total * kept + weights
        y = y * kept[:, None] + weights[:, None] * values
        most = peak
    peak = tl.max(most, 0)
    shares = tl.exp2(most - fixed(peak))
    total = tl.sum(total * shares, 0)
    y = tl.sum(y * shares[:, None], 0)
    if SEGMENTS > 1:
        at = (tl.program_id(0).to(tl.int64) * GROUPS + group) * SEGMENTS + segment
        tl.store(partial + at * WIDTH + channels, y)
        tl.store(sums + 2 * at, peak)
        tl.store(sums + 2 * at + 1, total)
    else:
        y = y / tl.where(total == 0.0, 1.0, total) * (tl.load(scales + 1) if SCALED else 1.0)
        at = row.to(tl.int64) * GROUPS + group
        tl.store(out + at * D + channels, y.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["table_width"])
def attend_tile(
    q, kv, tables, contexts, starts, pieces,
    out, partial, sums, scales,
    q_row, q_head, table_width, factor,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some new tokens of a sequence, all queries of a KV head, as matrices (ROWS, WIDTH)."""
    group, segment = tl.program_id(1), tl.program_id(2)
    sequence = tl.load(pieces + 2 * tl.program_id(0))
    first = tl.load(pieces + 2 * tl.program_id(0) + 1)
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    past = tl.load(contexts + sequence) - length
    rows, channels, lanes = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    news = first + rows // QUERIES
    asked = ((rows < TOKENS * QUERIES) & (news < length))[:, None] & (channels < D)[None, :]
    heads, news_at = group * QUERIES + rows % QUERIES, (start + news).to(tl.int64)
    asking = q + (news_at * q_row + heads * q_head)[:, None] + channels[None, :]
    query = tl.load(asking, mask=asked, other=0.0)
    factor *= tl.load(scales) if SCALED else 1.0
    high = past + tl.minimum(first + TOKENS, length)
    low = tl.maximum(past + first + 1 - WINDOW, 0) if WINDOW else 0
    begin, end = segment_of(low, high, segment, TILE, SEGMENTS)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(begin, end, TILE):
        tokens = at + lanes
        inside = (tokens >= low) & (tokens < end)
        places = places_of(tables + sequence * table_width, tokens, inside, group, GROUPS, BLOCK, D)
        address = kv + places[:, None] + channels[None, :]
        held = inside[:, None] & (channels < D)[None, :]
        keys = tl.load(address, mask=held, other=0.0).to(query.dtype)
        values = tl.load(address + GROUPS * BLOCK * D, mask=held, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
        before = (past + news)[:, None] - tokens[None, :]
        seen = inside[None, :] & (before >= 0)
        if WINDOW:
            seen &= before < WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(most, tl.max(scores, 1))
        kept, weights = tl.exp2(most - fixed(peak)), tl.exp2(scores - fixed(peak)[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(query.dtype)
        y = tl.dot(weights, values, y * kept[:, None], input_precision="ieee")
        most = peak
    if SEGMENTS > 1:
        at = tl.program_id(0).to(tl.int64) * TOKENS + rows // QUERIES
        at = (at * (GROUPS * QUERIES) + heads) * SEGMENTS + segment
        told = (rows < TOKENS * QUERIES) & (news < length)
        tl.store(partial + at[:, None] * WIDTH + channels[None, :], y, mask=told[:, None])
        tl.store(sums + 2 * at, most, mask=told)
        tl.store(sums + 2 * at + 1, total, mask=told)
    else:
        y = y / tl.where(total == 0.0, 1.0, total)[:, None]
        y = y * (tl.load(scales + 1) if SCALED else 1.0)
        at = news_at * (GROUPS * QUERIES) + heads
        answer = out + at[:, None] * D + channels[None, :]
        tl.store(answer, y.to(out.dtype.element_ty), mask=asked)


@triton.jit
def merge(
    starts, pieces, out, partial, sums, scales,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One head of one new token: what its segments came to, put together."""
    piece, head = tl.program_id(0) // TOKENS, tl.program_id(1)
    sequence, first = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    row = tl.load(starts + sequence) + first + tl.program_id(0) % TOKENS
    there = row < tl.load(starts + sequence + 1)
    channels, segments = tl.arange(0, WIDTH), tl.arange(0, SEGMENTS)
    parts = (tl.program_id(0).to(tl.int64) * HEADS + head) * SEGMENTS + segments
    held = segments < tl.where(there, SEGMENTS, 0)
    most = tl.load(sums + 2 * parts, mask=held, other=0.0)
    total = tl.load(sums + 2 * parts + 1, mask=held, other=0.0)
    address = partial + parts[:, None] * WIDTH + channels[None, :]
    y = tl.load(address, mask=held[:, None], other=0.0)
    shares = tl.exp2(most - fixed(tl.max(most, 0)))
    total = tl.sum(total * shares, 0)
    y = tl.sum(y * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    y = y * (tl.load(scales + 1) if SCALED else 1.0)
    at = row.to(tl.int64) * HEADS + head
    tl.store(
        out + at * D + channels, y.to(out.dtype.element_ty), mask=channels < tl.where(there, D, 0)
    )


@triton.jit
def within(x, MOST: tl.constexpr):
    return tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))


@triton.jit
def append(
    k, v, kv, blocks, places, scales,
    k_row, k_group, v_row, v_group,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, MOST: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A new token's key and value of one KV head into their slot; nowhere if its block is below 0.

    MOST is the largest number that the pool holds, where that is less than the model's; 0: any.
    """
    row, group, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    block, place = tl.load(blocks + row).to(tl.int64), tl.load(places + row)
    kept = channels < tl.where(block >= 0, D, 0)
    key = tl.load(k + row * k_row + group * k_group + channels, mask=kept, other=0.0)
    value = tl.load(v + row * v_row + group * v_group + channels, mask=kept, other=0.0)
    if SCALED:
        key = key.to(tl.float32) / tl.load(scales)
        value = value.to(tl.float32) / tl.load(scales + 1)
    if MOST:
        # A cast alone may make NaN of what is too large. What is NaN stays so, and is seen.
        key, value = within(key.to(tl.float32), MOST), within(value.to(tl.float32), MOST)
    address = kv + ((block * (2 * GROUPS) + group) * BLOCK + place) * D + channels
    tl.store(address, key.to(kv.dtype.element_ty), mask=kept)
    tl.store(address + GROUPS * BLOCK * D, value.to(kv.dtype.element_ty), mask=kept)
