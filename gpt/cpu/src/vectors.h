/* Vectors of 16 lanes, bf16 conversion and the ISA level: shared by all kernels.

   The vector types are the compiler's vector extensions, so one source compiles for every CPU. The
   x86 kernels use intrinsics where these are faster. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABI 27 /* Must equal ABI in gpt/cpu/kernels.py. */
#define LANES 16
#define SEGMENT 256      /* Keys per segment. The scores of a segment are computed at once. */
#define QUERIES 8        /* Maximum query heads of a KV head that decode computes at once. */
#define HEAD_DIM_MAX 512 /* The largest supported head dimension. */
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET_AVX512_BF16                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t UInts __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Floats4 __attribute__((vector_size(16), aligned(4), may_alias));

/* The ISA level in use: the highest of this CPU, or a lower level that a test sets. */
enum { UNKNOWN = -1, PLAIN, AVX2, AVX512_BF16 };
extern __attribute__((visibility("hidden"))) int isa_level;

/* The three steps of attention, for the ISA level in use. */
typedef struct {
    void (*scores)(const void *q, int64_t stride, int queries, const void *keys, int tokens,
                   int width, float *to);
    void (*softmax)(float *scores, int tokens, float scale, float *max, float *sum);
    void (*values)(const float *weights, int queries, const void *values, int tokens, int width,
                   float *out);
} AttentionOps;

__attribute__((visibility("hidden"))) AttentionOps select_attention_ops(int bf16, int64_t width);

/* Loads 16 fp32 numbers. If `bf16` is nonzero, loads 32 bf16 numbers, and converts the 16 with an
   even index (`half` 0) or the 16 with an odd index (`half` 1). */
INLINE Floats load_fp32(const void *from, int bf16, int half)
{
    if (!bf16)
        return *(const Floats *)from;
    UInts words = *(const UInts *)from;
    if (half)
        return (Floats)(words & 0xffff0000u);
    return (Floats)(words << 16);
}

INLINE float bf16_to_fp32(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE float load_scalar(const void *from, int64_t at, int bf16)
{
    return bf16 ? bf16_to_fp32(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* Rounds to the nearest bf16 number, ties to even. NaN stays NaN. */
INLINE uint16_t fp32_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
    return bits >> 16;
}

/* The sum of a vector's lanes. */
INLINE float sum_lanes(const Floats *x)
{
    const Floats4 *y = (const Floats4 *)x;
    Floats4 sums = (y[0] + y[1]) + (y[2] + y[3]);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Returns the lane sums of 16 vectors: lane i is the sum of the lanes of x[i]. Fast only on a CPU
   with 64-byte vectors. */
INLINE Floats sum_lanes_16(Floats *x)
{
    Floats y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        Floats a = x[2 * i], b = x[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13,
                                       29) +
               __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                       31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                       29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                       31);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                       27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                       31);
    }
    return __builtin_shufflevector(y[0], y[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                   27) +
           __builtin_shufflevector(y[0], y[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                   30, 31);
}

INLINE Floats select_lanes(Ints mask, Floats a, Floats b)
{
    return (Floats)((mask & (Ints)a) | (~mask & (Ints)b));
}

/* Adds ALiBi to the scores of adjacent keys, before the scores are scaled. `slope`: the head's slope
   divided by the scale. `distance`: the number of positions from the first key to the query. */
INLINE void add_alibi(float *scores, int64_t keys, float slope, int64_t distance)
{
    for (int i = 0; i < keys; i++)
        scores[i] -= slope * (float)((int)distance - i);
}

/* exp(x) for x <= 0; exp(-87) for x < -87. NaN stays NaN. */
INLINE Floats exp_nonpositive(Floats x)
{
    const Floats zero = {0};
    Floats min_x = zero - 87.0f;
    x = select_lanes(x < min_x, min_x, x);
    Floats shifted_log2 = x * 1.44269504088896341f - 0.5f;
    /* Since x <= 0, truncation of log2(exp(x)) - 0.5 rounds log2(exp(x)) to the nearest integer. */
    Ints exponent = __builtin_convertvector(shifted_log2, Ints);
    Floats n = __builtin_convertvector(exponent, Floats);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Floats scale = (Floats)((exponent + 127) << 23);
    return select_lanes(x == x, y * scale, x);
}
