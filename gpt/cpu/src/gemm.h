/* A product: what it reads, and what comes after its sums: bias, activation, gates, residual. */

#pragma once

#include "packed_weight.h"

#if defined(__x86_64__)

#define GROUP 64 /* Channels of a row that share a scale, where a weight is in bytes. */

#define HIDDEN __attribute__((visibility("hidden")))
#define INT8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")))

/* Adds the products of unsigned bytes with signed ones, four by four. The compilers' own word for it
   comes with a copy of the sums each time. */
INT8 INLINE void add_bytes(__m512i *sum, __m512i bytes, __m512i codes)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(codes));
}

/* Some of a row in bytes. */
typedef struct {
    int8_t codes[GROUP];
    float scale;
    int32_t offset; /* What sums of 0 would come to, as bytes of weights are 128 too large. */
} Group;

INLINE int64_t groups_of(int64_t channels)
{
    return (channels + GROUP - 1) / GROUP;
}

enum { NOTHING, GELU, GELU_TANH, SILU, RELU2 };

/* The largest of a row's results so far, lane by lane, where nothing else is wanted of them. */
typedef struct {
    float most[LANES], odd[LANES]; /* `odd` is NaN once some result was not finite. */
    int32_t place[LANES];
} Top;

typedef struct Bounds Bounds; /* In exact_argmax.c. */

/* Rows (bf16) times a weight, and what comes after it. */
typedef struct {
    const Weight *weight;
    const uint16_t *x, *bias, *residual;
    void *out;
    int64_t rows, activation;
    uint16_t *before; /* Where rows go as they are before the activation, or NULL. */
    Group *groups; /* The rows in bytes, where the weight is in bytes. */
    int64_t stride; /* Of rows of x, in numbers. */
    /* Where rows are put on their way in, if x is not where they come from; as many as `beside` are
       read there, tile by tile: a pair of channels of each row, then the next pair. */
    uint16_t *brought;
    int64_t beside;
    /* Either is NULL, or all that becomes of the results. */
    Top *tops; /* Each thread's, row by row. */
    Bounds *bounds;
} Product;

/* In gemm_bf16.c: x is brought to where the product reads it, normed if there is a norm, and
   multiplied. In argmax.c and exact_argmax.c: what becomes of sums of which only the largest are
   wanted. */
HIDDEN void multiply(Product product, const uint16_t *x, const Norm *norm, int64_t threads);
HIDDEN void note(const Product *p, const __m512 (*sum)[2], int64_t first, int64_t column, int rows);
HIDDEN void bound(const Product *p, const __m512 (*sum)[2], int64_t first, int64_t column, int rows);

/* tanh or erf of what GELU takes it of. */
INLINE Floats bend(Floats x, int tanh_form)
{
    const Ints sign = (Ints)x & (int32_t)0x80000000;
    const Floats one = (Floats){0} + 1.0f;
    Floats y;
    if (tanh_form) {
        Floats z = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
        z = (Floats)((Ints)z & 0x7fffffff);
        Floats e = power(z * -2.0f);
        y = (one - e) / (one + e);
    } else {
        Floats z = (Floats)((Ints)x & 0x7fffffff) * 0.70710678118654752f;
        Floats t = one / (z * 0.3275911f + 1.0f); /* Abramowitz and Stegun 7.1.26. */
        Floats p = t * 1.061405429f - 1.453152027f;
        p = p * t + 1.421413741f;
        p = p * t - 0.284496736f;
        p = p * t + 0.254829592f;
        y = one - p * t * power(z * z * -1.0f);
    }
    return (Floats)((Ints)y | sign);
}

INLINE Floats gelu(Floats x, int tanh_form)
{
    return x * 0.5f * (bend(x, tanh_form) + 1.0f);
}

/* 1 / (1 + e to the -x). */
INLINE Floats logistic(Floats x)
{
    const Floats one = (Floats){0} + 1.0f;
    Floats e = power((Floats)((Ints)x | (int32_t)0x80000000)); /* Of what is not above 0. */
    return either(x < 0, e, one) / (one + e);
}

INLINE Floats activated(Floats x, int64_t activation)
{
    if (activation == SILU)
        return x * logistic(x);
    if (activation == RELU2) {
        Floats above = either(x < 0, (Floats){0}, x);
        return above * above;
    }
    return activation ? gelu(x, activation == GELU_TANH) : x;
}

/* 1 / x, but for 0 and what is not finite. */
BF16 INLINE __m512 inverse(__m512 x)
{
    const __m512 guess = _mm512_rcp14_ps(x);
    return guess * (2.0f - x * guess);
}

/* GELU by erf: Abramowitz and Stegun 7.1.26. */
BF16 INLINE __m512 gelu_wide(__m512 x)
{
    const __m512 size = _mm512_abs_ps(x) * 0.70710678118654752f;
    const __m512 z = _mm512_min_ps(_mm512_set1_ps(9.0f), size); /* There it is 1, or not a number. */
    const __m512 t = inverse(z * 0.3275911f + 1.0f);
    __m512 p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const __m512 half = p * t * exponential(-z * z) * 0.5f;
    return x * _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), 1.0f - half, half);
}

/* What `activated` gives, in this machine's own words, where there are any. */
BF16 INLINE __m512 bent(__m512 x, int64_t activation)
{
    if (activation == GELU)
        return gelu_wide(x);
    if (activation != SILU && activation != GELU_TANH)
        return (__m512)activated((Floats)x, activation);
    /* Both are x / (1 + e to the -y). */
    __m512 y = x;
    if (activation == GELU_TANH)
        y = (x + x * x * x * 0.044715f) * 1.59576912160573072f;
    return x * inverse(exponential(-y) + 1.0f);
}

/* What was made for some columns of a row, from `place` on. */
BF16 INLINE void write(const Product *p, int64_t place, __mmask16 there, __m512 y)
{
    if (p->residual)
        y += widened(p->residual + place, there);
    if (p->weight->wide)
        _mm512_mask_storeu_ps((float *)p->out + place, there, y);
    else
        _mm256_mask_storeu_epi16((uint16_t *)p->out + place, there, (__m256i)_mm512_cvtneps_pbh(y));
}

/* What becomes of the sums of `rows` rows with one panel's columns. */
BF16 INLINE void finish(const Product *p, __m512 (*sum)[2], int64_t first, int64_t column,
                        int rows)
{
    const Weight *w = p->weight;
    if (p->tops || p->bounds) {
        __m512 made[TILE][2]; /* `sum` itself would leave its registers, for good. */
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            made[i][0] = sum[i][0], made[i][1] = sum[i][1];
        (p->tops ? note : bound)(p, made, first, column, rows);
        return;
    }
    if (w->gated) { /* One half of the panel are gates, the other what they let through. */
        int64_t at = column / 2;
        __mmask16 there = first_lanes(w->columns - at);
        __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int half = 0; p->bias && half < 2; half++)
            bias[half] = widened(p->bias + half * w->columns + at, there);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512 gate = bent(sum[i][0] + bias[0], p->activation);
            write(p, (first + i) * w->columns + at, there, gate * (sum[i][1] + bias[1]));
        }
        return;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64_t at = column + half * LANES, left = w->columns - at;
        if (left <= 0)
            break;
        __mmask16 there = first_lanes(left);
        __m512 bias = p->bias ? widened(p->bias + at, there) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int64_t place = (first + i) * w->columns + at;
            __m512 y = sum[i][half] + bias;
            if (p->before) { /* What is kept is what the activation is taken of. */
                __m256bh rounded = _mm512_cvtneps_pbh(y);
                _mm256_mask_storeu_epi16(p->before + place, there, (__m256i)rounded);
                y = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16);
            }
            write(p, place, there, bent(y, p->activation));
        }
    }
}

/* In gemm_avx2.c: a panel's columns of the rows from `first` to `end`; a row, normed. */
HIDDEN void tiles_avx2(const Product *p, const uint16_t *panel, int64_t column, int64_t first,
                       int64_t end);
HIDDEN void norm_row_avx2(const Norm *norm, const uint16_t *x, int64_t width, uint16_t *out);

/* In gemm_int8.c: memory of this thread's, good until it asks again; a row in bytes; one panel's columns
   of all rows. */
HIDDEN void *room_for(int64_t bytes);
HIDDEN void bring_to_bytes(const uint16_t *x, int64_t width, Group *to);
HIDDEN void multiply_bytes(const Product *p, int64_t panel);

#endif
