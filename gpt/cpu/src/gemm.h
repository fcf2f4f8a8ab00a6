/* GEMM with packed weights and its epilogue: bias, activation, gating, residual. */

#pragma once

#include <stdatomic.h>

#include "packed_weight.h"

#if defined(__x86_64__)

/* From this number of rows on, a GEMM is faster if `interleave_tile` interleaves the rows first. */
#define INTERLEAVE_ROWS_MIN (2 * TILE)
#define GROUP_CHANNELS 64 /* Channels of a row that share a scale in the int8 GEMM. */

#define HIDDEN __attribute__((visibility("hidden")))
#define TARGET_AVX512_VNNI                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")))

/* Adds to each int32 lane of `sum` the dot product of four unsigned `bytes` and four signed
   `codes`. This is inline assembly, because with the intrinsic the compiler copies the sums at each
   call. */
TARGET_AVX512_VNNI INLINE void dot_int8(__m512i *sum, __m512i bytes, __m512i codes)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(codes));
}

/* A group of a row's channels, quantized to int8. */
typedef struct {
    int8_t codes[GROUP_CHANNELS];
    float scale;
    int32_t offset; /* Initial value of the sums: corrects for the 128 added to weight codes. */
} QuantizedGroup;

INLINE int64_t group_count(int64_t channels)
{
    return (channels + GROUP_CHANNELS - 1) / GROUP_CHANNELS;
}

enum { NO_ACTIVATION, GELU, GELU_TANH, SILU, RELU2, RELU, QUICK_GELU };
#define QUICK_GELU_FACTOR 1.702f

/* The running argmax of a row's outputs, for each lane. Used if the outputs are not stored. */
typedef struct {
    float logit[LANES], nonfinite[LANES]; /* `nonfinite` becomes NaN if an output is not finite. */
    int32_t column[LANES];
} RowArgmax;

typedef struct Bounds Bounds; /* Defined in exact_argmax.c. */

/* The scaling of the outputs of a linear in training: factors * y + late_bias. NULL omits an
   operation. */
typedef struct {
    const float *factors;      /* One for each column. */
    const uint16_t *late_bias; /* Added after the factors. */
    uint16_t *unscaled;        /* Receives y, rounded to bf16; the rounded numbers are scaled. */
    /* The sums over the rows of `multiplied` (rows, columns) * y are added to `sums`. If y is the
       gradient of the scaled input of a linear, they are the gradients of the input scale. */
    const uint16_t *multiplied;
    float *sums;
} ColumnScaling;

/* A GEMM of bf16 rows with a packed weight, and its epilogue. For an fp32 weight, `x`, `bias` and
   `staged` are addresses of fp32 numbers, and there is no residual. */
typedef struct {
    const PackedWeight *weight;
    const uint16_t *x, *bias, *residual;
    void *out;
    int64_t rows, activation;
    const ColumnScaling *scaling; /* Before the activation. NULL: none. */
    QuantizedGroup *groups;   /* The quantized rows, if the weight is int8. */
    int64_t x_stride;         /* 16-bit words from one row of x to the next. */
    /* Memory for rows that are normed, padded or interleaved before the GEMM reads them. The first
       `interleaved_rows` rows are interleaved in tiles of TILE rows: the first pair of channels of
       each row of the tile, then the second pair of each row, and so on. */
    uint16_t *staged;
    int64_t interleaved_rows;
    /* Channels of the staged rows behind those of the weight, without the first of them that are
       skipped. The panel has them behind those of the weight, too (training_linear.c). */
    int64_t further_channels, skipped_channels;
    /* If `argmaxes` or `bounds` is not NULL, the epilogue updates it, and does not write `out`. */
    RowArgmax *argmaxes; /* One for each thread and row. */
    Bounds *bounds;
    const RowAdapters *adapters; /* NULL: no adapter changes the linear. */
    const LowRankTerm *common_term; /* All that the adapters of all rows add; NULL: they differ. */
    uint16_t *u;                 /* For each row, scale * A x of its adapter (low_rank.c). */
    int64_t u_stride;            /* Elements from one row of u to the next. */
    /* Not NULL: a thread stores u while others multiply panels. It is nonzero when u is stored. */
    const _Atomic int32_t *is_projected;
} Gemm;

/* `gemm` (gemm_bf16.c) applies `norm`, if it is not NULL, to the rows of x, stages the rows, and
   multiplies them. `update_argmax` (argmax.c) and `update_bounds` (exact_argmax.c) are epilogues
   that store only the largest outputs, or bounds of the outputs. */
HIDDEN void gemm(Gemm product, const uint16_t *x, const NormArgs *norm, int64_t threads);
HIDDEN void update_argmax(const Gemm *p, const __m512 (*sum)[2], int64_t first, int64_t column,
                          int rows);
HIDDEN void update_bounds(const Gemm *p, const __m512 (*sum)[2], int64_t first, int64_t column,
                          int rows);

/* Defined in low_rank.c. Applies the adapters and the bias to the sums of `rows` rows, from `first`
   on, for one panel's columns. */
HIDDEN void add_terms(const Gemm *p, __m512 (*sum)[2], int64_t first, int64_t column, int rows);
HIDDEN void add_terms_avx2(const Gemm *p, float (*sum)[COLUMNS], int64_t first, int64_t column,
                           int rows);

/* Defined in gemm_bf16.c. `multiply_panel` computes a panel's columns for the rows from `first` to
   `end`; for an int8 weight, always for all rows. */
HIDDEN void multiply_panel(const Gemm *p, int64_t panel, int64_t first, int64_t end);
/* The same for a bf16 panel and staged rows, with AVX-512. */
HIDDEN void gemm_panel(const Gemm *p, const uint16_t *panel, int64_t column, int64_t first,
                       int64_t end);
/* Interleaves a tile's rows: the first pair of channels of each row, then the second pair of each
   row, and so on. */
HIDDEN void interleave_tile(const uint16_t *from, int64_t channels, uint16_t *to);
/* The number of elements from one staged row to the next. If the addresses of rows differ by a
   multiple of 4096 bytes, the rows evict each other from the L1 cache. Padding prevents this. */
HIDDEN int64_t padded_stride(int64_t channels);
/* The number of rows of a block. A block stays in the cache while all panels are read. The number
   is a multiple of TILE, and makes the blocks of a GEMM about equally large. */
HIDDEN int64_t cache_block_rows(int64_t rows, int64_t channels);

/* The tanh or erf term of GELU. */
INLINE Floats tanh_or_erf(Floats x, int tanh_form)
{
    const Ints sign = (Ints)x & (int32_t)0x80000000;
    const Floats ones = (Floats){0} + 1.0f;
    Floats y;
    if (tanh_form) {
        Floats z = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
        z = (Floats)((Ints)z & 0x7fffffff);
        Floats e = exp_nonpositive(z * -2.0f);
        y = (ones - e) / (ones + e);
    } else {
        Floats z = (Floats)((Ints)x & 0x7fffffff) * 0.70710678118654752f;
        Floats t = ones / (z * 0.3275911f + 1.0f); /* Abramowitz and Stegun 7.1.26. */
        Floats p = t * 1.061405429f - 1.453152027f;
        p = p * t + 1.421413741f;
        p = p * t - 0.284496736f;
        p = p * t + 0.254829592f;
        y = ones - p * t * exp_nonpositive(z * z * -1.0f);
    }
    return (Floats)((Ints)y | sign);
}

INLINE Floats gelu(Floats x, int tanh_form)
{
    return x * 0.5f * (tanh_or_erf(x, tanh_form) + 1.0f);
}

/* 1 / (1 + exp(-x)). */
INLINE Floats sigmoid(Floats x)
{
    const Floats ones = (Floats){0} + 1.0f;
    Floats e = exp_nonpositive((Floats)((Ints)x | (int32_t)0x80000000)); /* exp(-|x|). */
    return select_lanes(x < 0, e, ones) / (ones + e);
}

INLINE Floats activate(Floats x, int64_t activation)
{
    if (activation == SILU)
        return x * sigmoid(x);
    if (activation == QUICK_GELU)
        return x * sigmoid(x * QUICK_GELU_FACTOR);
    if (activation == RELU || activation == RELU2) {
        Floats positive = select_lanes(x < 0, (Floats){0}, x);
        if (activation == RELU)
            return positive;
        return positive * positive;
    }
    return activation ? gelu(x, activation == GELU_TANH) : x;
}

/* 1 / x with one Newton step, for finite x other than 0. */
TARGET_AVX512_BF16 INLINE __m512 reciprocal(__m512 x)
{
    const __m512 estimate = _mm512_rcp14_ps(x);
    return estimate * (2.0f - x * estimate);
}

/* GELU with erf: Abramowitz and Stegun 7.1.26. */
TARGET_AVX512_BF16 INLINE __m512 gelu_avx512(__m512 x)
{
    const __m512 scaled_abs = _mm512_abs_ps(x) * 0.70710678118654752f;
    const __m512 z =
        _mm512_min_ps(_mm512_set1_ps(9.0f), scaled_abs); /* From 9 on, erf is 1. NaN stays NaN. */
    const __m512 t = reciprocal(z * 0.3275911f + 1.0f);
    __m512 p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const __m512 half_erfc = p * t * exp_avx512(-z * z) * 0.5f;
    return x * _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), 1.0f - half_erfc, half_erfc);
}

/* Like `activate`, with AVX-512 intrinsics where they are faster. */
TARGET_AVX512_BF16 INLINE __m512 activate_avx512(__m512 x, int64_t activation)
{
    if (activation == GELU)
        return gelu_avx512(x);
    if (activation != SILU && activation != GELU_TANH && activation != QUICK_GELU)
        return (__m512)activate((Floats)x, activation);
    /* The activations are x / (1 + exp(-y)). */
    __m512 y = x;
    if (activation == QUICK_GELU)
        y = x * QUICK_GELU_FACTOR;
    if (activation == GELU_TANH)
        y = (x + x * x * x * 0.044715f) * 1.59576912160573072f;
    return x * reciprocal(exp_avx512(-y) + 1.0f);
}

/* Adds the residual to a row's outputs for up to 16 columns, and stores them at `offset`. */
TARGET_AVX512_BF16 INLINE void store_output(const Gemm *p, int64_t offset, __mmask16 mask, __m512 y)
{
    if (p->residual)
        y += load_bf16(p->residual + offset, mask);
    if (p->weight->fp32_output)
        _mm512_mask_storeu_ps((float *)p->out + offset, mask, y);
    else
        _mm256_mask_storeu_epi16((uint16_t *)p->out + offset, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

/* Loads up to 16 numbers of the bias. If `is_added`, returns -0, which changes no number. */
TARGET_AVX512_BF16 INLINE __m512 load_bias(const Gemm *p, int64_t at, __mmask16 mask, int is_added)
{
    if (!p->bias || is_added)
        return _mm512_set1_ps(is_added ? -0.0f : 0.0f);
    if (p->weight->fp32)
        return _mm512_maskz_loadu_ps(mask, (const float *)p->bias + at);
    return load_bf16(p->bias + at, mask);
}

/* Adds up to 16 numbers to those of an array. */
TARGET_AVX512_BF16 INLINE void add_to_array(float *array, __mmask16 mask, __m512 x)
{
    _mm512_mask_storeu_ps(array, mask, _mm512_maskz_loadu_ps(mask, array) + x);
}

/* Scales the outputs y of one row, from column `begin` on; they are numbers `offset` and following of
   the output. Adds their products to `sums`, if the scaling has sums. */
TARGET_AVX512_BF16 INLINE __m512 scale_output(const ColumnScaling *s, __m512 y, int64_t offset,
                                              int64_t begin, __mmask16 mask, __m512 *sums)
{
    if (s->unscaled) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(y);
        _mm256_mask_storeu_epi16(s->unscaled + offset, mask, rounded);
        y = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    }
    if (s->multiplied)
        *sums += load_bf16(s->multiplied + offset, mask) * y;
    if (s->factors)
        y *= _mm512_maskz_loadu_ps(mask, s->factors + begin);
    if (s->late_bias)
        y += load_bf16(s->late_bias + begin, mask);
    return y;
}

/* Applies the epilogue to the sums of `rows` rows, from `first` on, for one panel's columns. If
   `adapts` is nonzero, `add_terms` applies the adapters. */
TARGET_AVX512_BF16 INLINE void epilogue(const Gemm *p, __m512 (*sum)[2], int64_t first,
                                        int64_t column, int rows, int adapts)
{
    const PackedWeight *w = p->weight;
    if (p->argmaxes || p->bounds) {
        /* With `sum` as the argument, the compiler would keep `sum` in memory, not in registers. */
        __m512 outputs[TILE][2];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            outputs[i][0] = sum[i][0], outputs[i][1] = sum[i][1];
        (p->argmaxes ? update_argmax : update_bounds)(p, outputs, first, column, rows);
        return;
    }
    if (adapts) {
        __m512 adapted[TILE][2];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            adapted[i][0] = sum[i][0], adapted[i][1] = sum[i][1];
        add_terms(p, adapted, first, column, rows);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            sum[i][0] = adapted[i][0], sum[i][1] = adapted[i][1];
    }
    if (w->gated) { /* The panel has 16 gates, then the 16 columns that they multiply. */
        int64_t begin = column / 2;
        __mmask16 mask = lane_mask(w->columns - begin);
        __m512 bias[2];
        for (int half = 0; half < 2; half++)
            bias[half] = load_bias(p, half * w->columns + begin, mask, adapts);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512 gate = sum[i][0] + bias[0], up = sum[i][1] + bias[1];
            if (w->limit || w->offset) {
                /* If an operand is NaN, max and min return the second operand. */
                const __m512 limit = _mm512_set1_ps(w->limit ? (float)w->limit : INFINITY);
                gate = _mm512_min_ps(limit, gate);
                up = _mm512_max_ps(-limit, _mm512_min_ps(limit, up)) + (float)w->offset;
            }
            gate = activate_avx512(gate, p->activation);
            store_output(p, (first + i) * w->columns + begin, mask, gate * up);
        }
        return;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64_t begin = column + half * LANES, left = w->columns - begin;
        if (left <= 0)
            break;
        __mmask16 mask = lane_mask(left);
        const __m512 bias = load_bias(p, begin, mask, adapts);
        __m512 sums = _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int64_t offset = (first + i) * w->columns + begin;
            __m512 y = sum[i][half] + bias;
            if (p->scaling)
                y = scale_output(p->scaling, y, offset, begin, mask, &sums);
            store_output(p, offset, mask, activate_avx512(y, p->activation));
        }
        if (p->scaling && p->scaling->multiplied)
            add_to_array(p->scaling->sums + begin, mask, sums);
    }
}

/* Defined in gemm_avx2.c. `gemm_panel_avx2` computes a panel's columns for the rows from `first` to
   `end`. `norm_row_avx2` applies a norm to a row. */
HIDDEN void gemm_panel_avx2(const Gemm *p, const uint16_t *panel, int64_t column, int64_t first,
                            int64_t end);
/* Defined in gemm_fp32.c. Computes a panel's columns for the rows from `first` to `end`. */
HIDDEN void gemm_fp32_panel(const Gemm *p, const float *panel, int64_t column, int64_t first,
                            int64_t end);
HIDDEN void norm_row_avx2(const NormArgs *norm, const uint16_t *x, int64_t width, uint16_t *out);

/* Defined in gemm_int8.c. `thread_scratch` returns memory of this thread, valid until this thread's
   next call. `quantize_row` quantizes a row to int8. `gemm_int8_panel` computes a panel's columns
   for all rows. */
HIDDEN void *thread_scratch(int64_t bytes);
HIDDEN void quantize_row(const uint16_t *x, int64_t width, QuantizedGroup *to);
HIDDEN void gemm_int8_panel(const Gemm *p, int64_t panel);

#endif
