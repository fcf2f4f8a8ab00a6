"""Triton kernel of the sampler: draws the token of each row, with top-k, top-p and min-p.

`serving.worker.triton_sampler` launches the kernel. One program samples one row of logits, without
a sort. The distance of a token is log2 of its weight, negated: (largest logit - logit) *
log2(e) / temperature, in fp32. Its bits, read as an integer, are the token's key: a more likely
token has a smaller key, and equal logits have equal keys. The mass of a token is its weight in
fixed point, as an integer. So sums are exact, and do not depend on the order of their terms.

A row with top-k or top-p is read once for a histogram of its distances. The histogram bounds the
distances of the tokens that can remain. The keys of these candidates are copied to a scratch row,
where a binary search finds the largest key that remains.
"""

import triton
import triton.language as tl

# Columns of the parameters of a row.
TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
UNIFORM = tl.constexpr(4)
COLUMNS = tl.constexpr(5)

MASS_SCALE = tl.constexpr(float(2**44))  # The mass of weight 1. A sum of 2^18 masses is < 2^63.
LOG2_E = tl.constexpr(1.4426950408889634)
SCALE_MAX = tl.constexpr(1e30)  # Of log2(e) / temperature, so that the distance 0 stays 0.
KEY_INFINITY = tl.constexpr(0x7F800000)  # The key of weight 0.
KEY_MAX = tl.constexpr(0x7FFFFFFF)  # Larger than every key.
BINS = tl.constexpr(256)
BINS_PER_OCTAVE = tl.constexpr(8.0)  # The last bin has all distances from 31.875.
# Bounds of rounding errors of fp32 sums over the histogram: relative, and as a part of the total.
TAIL_FACTOR = tl.constexpr(1.00001)
TAIL_MARGIN = tl.constexpr(2e-6)


@triton.jit
def sample_row(
    logits_ptr,
    parameters_ptr,
    scratch_ptr,
    tokens_ptr,
    vocabulary,
    row_stride,
    BLOCK_SIZE: tl.constexpr,
    SCRATCH_BLOCK_SIZE: tl.constexpr,
):
    """Draw the token of one row. If its temperature is 0, leave its token as it is."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    parameters_ptr += row * COLUMNS
    scratch_ptr += row * vocabulary
    temperature = tl.load(parameters_ptr + TEMPERATURE)
    if temperature > 0:
        top_k = tl.load(parameters_ptr + TOP_K).to(tl.int64)
        top_p = tl.load(parameters_ptr + TOP_P)
        min_p = tl.load(parameters_ptr + MIN_P).to(tl.float32)
        scale = tl.minimum(LOG2_E / temperature, SCALE_MAX).to(tl.float32)
        best = row_maximum(logits_ptr, vocabulary, BLOCK_SIZE)
        has_top_k = (top_k > 0) & (top_k < vocabulary)
        is_truncated = has_top_k | (top_p < 1)
        key_limit = KEY_INFINITY
        masses = tl.zeros([BLOCK_SIZE], tl.int64)
        if is_truncated:
            counts = tl.zeros([BINS], tl.int32)
            for start in range(0, vocabulary, BLOCK_SIZE):
                offsets = start + tl.arange(0, BLOCK_SIZE)
                distance = token_distance(logits_ptr, offsets, vocabulary, best, scale)
                masses += token_mass(distance)
                counts += tl.histogram(distance_bin(distance), BINS)
            total = tl.sum(masses, 0)
            bin_max = last_bin(counts, total, top_k, top_p, has_top_k)
            candidates = copy_candidates(
                logits_ptr, scratch_ptr, vocabulary, best, scale, bin_max, BLOCK_SIZE
            )
            if has_top_k:
                key_limit = smallest_key(scratch_ptr, candidates, top_k, False, SCRATCH_BLOCK_SIZE)
                total = mass_within(scratch_ptr, candidates, key_limit, 0.0, SCRATCH_BLOCK_SIZE)
            if top_p < 1:
                mass_min = top_p * total.to(tl.float64)
                # The smallest integer that is not below it; the most likely token always remains.
                mass_limit = mass_min.to(tl.int64)
                mass_limit += (mass_limit.to(tl.float64) < mass_min).to(tl.int64)
                top_p_key = smallest_key(
                    scratch_ptr, candidates, tl.maximum(mass_limit, 1), True, SCRATCH_BLOCK_SIZE
                )
                key_limit = tl.minimum(key_limit, top_p_key)
            total = mass_within(scratch_ptr, candidates, key_limit, min_p, SCRATCH_BLOCK_SIZE)
        else:
            for start in range(0, vocabulary, BLOCK_SIZE):
                offsets = start + tl.arange(0, BLOCK_SIZE)
                distance = token_distance(logits_ptr, offsets, vocabulary, best, scale)
                masses += retained_mass(distance, KEY_INFINITY, min_p)
            total = tl.sum(masses, 0)
        # A token is drawn if it is the first one with a cumulative mass above uniform * total.
        target = (tl.load(parameters_ptr + UNIFORM) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        start = 0
        mass_before = tl.zeros([], tl.int64)
        token = vocabulary - 1  # Of a row without any finite logit.
        while start < vocabulary:
            offsets = start + tl.arange(0, BLOCK_SIZE)
            distance = token_distance(logits_ptr, offsets, vocabulary, best, scale)
            mass = retained_mass(distance, key_limit, min_p)
            block_mass = tl.sum(mass, 0)
            start += BLOCK_SIZE
            if mass_before + block_mass > target:
                cumulative = mass_before + tl.cumsum(mass, 0)
                is_before = (cumulative <= target).to(tl.int32)
                token = tl.minimum(start - BLOCK_SIZE + tl.sum(is_before, 0), vocabulary - 1)
                start = vocabulary
            mass_before += block_mass
        tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def load_logits(logits_ptr, offsets, vocabulary):
    """Return some logits of a row in fp32, or in fp64 if they are stored in fp64."""
    x = tl.load(logits_ptr + offsets, mask=offsets < vocabulary, other=float("-inf"))
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def row_maximum(logits_ptr, vocabulary, BLOCK_SIZE: tl.constexpr):
    """Return the largest logit of a row; NaN is ignored."""
    best = load_logits(logits_ptr, tl.arange(0, BLOCK_SIZE), vocabulary)
    for start in range(BLOCK_SIZE, vocabulary, BLOCK_SIZE):
        best = tl.maximum(
            best, load_logits(logits_ptr, start + tl.arange(0, BLOCK_SIZE), vocabulary)
        )
    return tl.max(best, 0)


@triton.jit
def token_distance(logits_ptr, offsets, vocabulary, best, scale):
    """Return the distances of some tokens of a row; infinity for NaN and past the row's end."""
    x = load_logits(logits_ptr, offsets, vocabulary)
    distance = (best - x).to(tl.float32) * scale
    return tl.where(distance >= 0, distance, float("inf"))


@triton.jit
def token_mass(distance):
    """Return the masses of tokens."""
    return (tl.exp2(-distance) * MASS_SCALE).to(tl.int64)


@triton.jit
def retained_mass(distance, key_limit, min_p):
    """Return the masses of tokens; 0 for tokens that a filter removes."""
    is_retained = (distance.to(tl.int32, bitcast=True) <= key_limit) & (tl.exp2(-distance) >= min_p)
    return tl.where(is_retained, token_mass(distance), 0)


@triton.jit
def distance_bin(distance):
    """Return the bins of the histogram to which these distances belong."""
    return tl.minimum(distance * BINS_PER_OCTAVE, BINS - 1.0).to(tl.int32)


@triton.jit
def last_bin(counts, total, top_k, top_p, has_top_k):
    """Return the last bin with tokens that top-k, or else top-p, can retain.

    A bin's lower edge bounds the weights of its tokens, so it bounds the mass of all later bins.
    """
    weight_max = tl.exp2(-tl.arange(0, BINS).to(tl.float32) / BINS_PER_OCTAVE)
    masses = counts.to(tl.float32) * weight_max
    tail = tl.sum(masses, 0) - tl.cumsum(masses, 0)
    part = total.to(tl.float64) / MASS_SCALE
    tail_max = ((1 - top_p - TAIL_MARGIN) * part).to(tl.float32)
    bin_of_top_p = tl.sum((tail * TAIL_FACTOR > tail_max).to(tl.int32), 0)
    bin_of_top_k = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    return tl.where(has_top_k, bin_of_top_k, bin_of_top_p)


@triton.jit
def copy_candidates(
    logits_ptr,
    scratch_ptr,
    vocabulary,
    best,
    scale,
    bin_max,
    BLOCK_SIZE: tl.constexpr,
):
    """Copy the keys of the tokens up to a bin to the scratch row, and return their number."""
    candidates = 0
    for start in range(0, vocabulary, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        distance = token_distance(logits_ptr, offsets, vocabulary, best, scale)
        is_candidate = (distance_bin(distance) <= bin_max) & (offsets < vocabulary)
        block_candidates = tl.sum(is_candidate.to(tl.int32), 0)
        if block_candidates > 0:
            position = candidates + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            tl.store(scratch_ptr + position, distance.to(tl.int32, bitcast=True), mask=is_candidate)
        candidates += block_candidates
    tl.debug_barrier()  # Other threads read the keys.
    return candidates


@triton.jit
def smallest_key(scratch_ptr, candidates, target, BY_MASS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the smallest key up to which the candidates reach a target.

    The target is a number of tokens, or with BY_MASS a mass.
    """
    low = -1  # The target is not reached here.
    high = KEY_INFINITY
    while high - low > 1:
        middle = low + (high - low) // 2
        amounts = tl.zeros([BLOCK_SIZE], tl.int64)
        keys_within = tl.full([BLOCK_SIZE], -1, tl.int32)
        keys_beyond = tl.full([BLOCK_SIZE], KEY_MAX, tl.int32)
        for start in range(0, candidates, BLOCK_SIZE):
            offsets = start + tl.arange(0, BLOCK_SIZE)
            key = tl.load(scratch_ptr + offsets, mask=offsets < candidates, other=KEY_MAX)
            is_within = key <= middle
            if BY_MASS:
                distance = tl.where(is_within, key, KEY_INFINITY).to(tl.float32, bitcast=True)
                amounts += token_mass(distance)
            else:
                amounts += is_within.to(tl.int64)
            keys_within = tl.maximum(keys_within, tl.where(is_within, key, -1))
            keys_beyond = tl.minimum(keys_beyond, tl.where(is_within, KEY_MAX, key))
        # Continue from a key that a candidate has: few candidates need few steps.
        if tl.sum(amounts, 0) >= target:
            high = tl.max(keys_within, 0)
        else:
            low = tl.min(keys_beyond, 0) - 1
    return high


@triton.jit
def mass_within(scratch_ptr, candidates, key_limit, min_p, BLOCK_SIZE: tl.constexpr):
    """Return the mass of the candidates that the filters retain."""
    masses = tl.zeros([BLOCK_SIZE], tl.int64)
    for start in range(0, candidates, BLOCK_SIZE):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        key = tl.load(scratch_ptr + offsets, mask=offsets < candidates, other=KEY_INFINITY)
        masses += retained_mass(key.to(tl.float32, bitcast=True), key_limit, min_p)
    return tl.sum(masses, 0)
