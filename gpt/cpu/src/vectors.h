/* What the files of this library share: vectors of 16 numbers, and what kind of machine it is.

   Vectors are the compiler's own, so one source serves every machine. Where something is worth
   saying in a machine's own words, it stands beside what serves all. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABI 14           /* What gpt/cpu/kernels.py expects. */
#define LANES 16
#define SEGMENT 256      /* Keys whose scores are held at once; also how long contexts are split. */
#define QUERIES 8        /* Queries of a group that read a key together. */
#define WIDTH_MAX 512    /* Channels of a head. */
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* What this machine can, or is to be taken for. */
enum { UNKNOWN = -1, PLAIN, AVX2, AVX512_BF16 };
extern __attribute__((visibility("hidden"))) int machine;

/* The three steps of attention, as this machine does them best. */
typedef struct {
    void (*scores)(const void *q, int64_t stride, int queries, const void *keys, int tokens,
                   int width, float *to);
    void (*weigh)(float *scores, int tokens, float scale, float *most, float *sum);
    void (*values)(const float *weights, int queries, const void *values, int tokens, int width,
                   float *made);
} Ops;

__attribute__((visibility("hidden"))) Ops steps_of(int bf16, int64_t width);

/* 16 numbers of fp32; or of bf16 those in even places of 32 (half 0), or in odd ones (half 1). */
INLINE Floats wide(const void *from, int bf16, int half)
{
    if (!bf16)
        return *(const Floats *)from;
    Words words = *(const Words *)from;
    if (half)
        return (Floats)(words & 0xffff0000u);
    return (Floats)(words << 16);
}

INLINE float of_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE float number(const void *from, int64_t at, int bf16)
{
    return bf16 ? of_bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* To bf16: the nearest, of two the even one; what is not a number stays so. */
INLINE uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
    return bits >> 16;
}

/* The sum of a vector's lanes. */
INLINE float sum(const Floats *x)
{
    const Four *y = (const Four *)x;
    Four all = (y[0] + y[1]) + (y[2] + y[3]);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

/* The sums of 16 vectors' lanes, in order; well done only by a machine with such vectors. */
INLINE Floats sums(Floats *x)
{
    Floats y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        Floats a = x[2 * i], b = x[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13,
                                       29) +
               __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30,
                                       15, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                       29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15,
                                       30, 31);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                       27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                       30, 31);
    }
    return __builtin_shufflevector(y[0], y[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                                   26, 27) +
           __builtin_shufflevector(y[0], y[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                   30, 31);
}

INLINE Floats either(Ints where, Floats a, Floats b)
{
    return (Floats)((where & (Ints)a) | (~where & (Ints)b));
}

/* e to the x, for x that is not above 0; what is not a number stays so. */
INLINE Floats power(Floats x)
{
    const Floats zero = {0};
    Floats low = zero - 87.0f;
    x = either(x < low, low, x);
    Floats turns = x * 1.44269504088896341f - 0.5f;
    Ints whole = __builtin_convertvector(turns, Ints); /* Towards 0: the nearest, as x <= 0. */
    Floats n = __builtin_convertvector(whole, Floats);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Floats scale = (Floats)((whole + 127) << 23);
    return either(x == x, y * scale, x);
}
