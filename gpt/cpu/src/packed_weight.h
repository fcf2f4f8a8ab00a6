/* Packed weights and the GEMM loop.

   A panel has 32 columns (outputs) of a weight. In a bf16 panel, each 32-bit word holds the weights
   of one column for two adjacent channels (inputs). In an fp32 panel, each row of 32 words holds the
   weights of one channel. */

#pragma once

#include "vectors.h"

#if defined(__x86_64__)

#define COLUMNS 32 /* Columns of a panel. A panel is contiguous in memory. */
#define TILE 12    /* Rows whose fp32 sums fit into registers. */
#define FOR_EACH_TILE_ROWS(CASE)                                                                   \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)                                                \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

/* A weight in panels of bf16, int8 or fp32. `panels` is NULL if the weight is absent. If `gated` is
   nonzero, a panel has 16 gate columns, then the 16 columns that they multiply (up), and `columns`
   is the number of gate columns. */
typedef struct {
    const void *panels;
    int64_t channels, columns;
    int64_t fp32_output; /* Nonzero: outputs are stored as fp32; 0: as bf16. */
    int64_t gated;
    const float *scales; /* For int8, the scale of each column, in panel order; else NULL. */
    /* If nonzero: a gate is at most `limit`, and up is between -limit and limit. `offset` is added
       to up. */
    double limit, offset;
    int64_t fp32; /* Nonzero: the weight, its inputs, outputs and bias are fp32. */
} PackedWeight;

/* A LayerNorm or RMSNorm with fp32 parameters. `scale` is NULL if there is no norm. */
typedef struct {
    const float *scale, *shift; /* `shift` is NULL if the norm has no shift. */
    double epsilon;
    int64_t rms; /* Nonzero: RMSNorm; 0: LayerNorm. */
} NormArgs;

/* A low-rank term: B of some columns, in panels of the weight's columns. A 32-bit word holds the
   numbers of one column for two adjacent ranks. */
typedef struct {
    /* The first of the numbers of u that B multiplies, for the first half of a panel's columns and
       for the second half, and the pairs of numbers for each half. Of a gated weight, the term may
       have B of the gate in the first halves, and another B in the second halves. */
    int64_t first, first_of_second_half, pairs;
    const int32_t *positions; /* By panel of the weight: the panel of B, or -1; NULL: equal. */
    const uint16_t *b;
} LowRankTerm;

/* What an adapter changes in a linear (low_rank.c). All zeros: nothing. A pointer that is NULL
   omits its operation. `factors` and `output_scales` are in the order of the weight's panels. */
typedef struct {
    int64_t rank; /* The number of rows of A, of all terms; even. */
    /* A in blocks of 16 rows; the last block may have fewer. In a block, a 32-bit word holds the
       numbers of one row for two adjacent channels, and the words of a pair of channels are
       adjacent. */
    const uint16_t *a;
    const float *scales; /* The scale of each row of A. */
    int64_t terms;
    const LowRankTerm *term_array;
    const float *factors, *output_scales, *input_scales;
} AdaptedLinear;

/* The adapters of a step's rows. An adapter is an array of linears; `linear` is the index of the
   linear that is computed. */
typedef struct {
    const int64_t *rows; /* Each row's index in `adapters`; -1: no adapter. */
    int64_t count, linear;
    const AdaptedLinear **adapters;
} RowAdapters;

/* Applies the norm to a row of `width` numbers. */
__attribute__((visibility("hidden"))) void norm_row(const NormArgs *norm, const uint16_t *x,
                                                    int64_t width, uint16_t *out);

/* Defined in gemm_bf16.c, decode_attention.c and prefill_attention.c. */
void preamble_gemm(const PackedWeight *weight, const uint16_t *x, int64_t rows,
                   const uint16_t *bias, int64_t activation, const uint16_t *residual, void *out,
                   int64_t threads, const NormArgs *norm, const RowAdapters *adapters);
int preamble_decode_attention(const void *args, const void *q, int64_t row_stride,
                              int64_t head_stride, const float *sinks, const float *slopes,
                              const void *kv, void *out);
int preamble_prefill_attention(const void *args, const void *q, int64_t row_stride,
                               int64_t head_stride, const float *sinks, const float *slopes,
                               const void *kv, void *out);

/* What the GEMM loop prefetches: the first address, and the bytes to advance for each pair of
   channels. */
typedef struct {
    const char *address;
    int64_t stride;
} Prefetch;

/* Adds to `sum` the products of `rows` rows of x with a panel's columns, over `pairs` pairs of
   channels. Adjacent rows of x are `stride` elements apart, and adjacent pairs of channels are
   `step` elements apart. Each sum adds its channels in the same order for any number of rows. */
TARGET_AVX512_BF16 INLINE void accumulate_prefetching(__m512 (*sum)[2], const uint16_t *x,
                                                      int64_t stride, int64_t step,
                                                      const uint16_t *panel, int64_t pairs,
                                                      int rows, Prefetch prefetch)
{
    for (int64_t k = 0; k < pairs; k++, prefetch.address += prefetch.stride) {
        const uint16_t *weights = panel + k * 2 * COLUMNS;
        __m512bh a = (__m512bh)_mm512_loadu_si512(weights);
        __m512bh b = (__m512bh)_mm512_loadu_si512(weights + COLUMNS);
        /* With few rows the loop finishes a panel before the hardware prefetcher has loaded it. */
        if (rows <= 8) {
            _mm_prefetch((const char *)weights + 1024, _MM_HINT_T0);
            _mm_prefetch((const char *)weights + 1088, _MM_HINT_T0);
            _mm_prefetch(prefetch.address, _MM_HINT_T1);
            _mm_prefetch(prefetch.address + 64, _MM_HINT_T1);
        } else {
            _mm_prefetch(prefetch.address, _MM_HINT_T0);
            _mm_prefetch(prefetch.address + 64, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t bits;
            memcpy(&bits, x + i * stride + k * step, 4);
            __m512bh x_pair = (__m512bh)_mm512_set1_epi32(bits);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x_pair, a);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x_pair, b);
        }
    }
}

/* Like `accumulate_prefetching`. Prefetches the memory 2048 bytes ahead: the rest of the panel,
   then the start of the next panel. */
TARGET_AVX512_BF16 INLINE void accumulate(__m512 (*sum)[2], const uint16_t *x, int64_t stride,
                                          const uint16_t *panel, int64_t pairs, int rows)
{
    accumulate_prefetching(sum, x, stride, 2, panel, pairs, rows,
                           (Prefetch){(const char *)panel + 2048, 128});
}

TARGET_AVX512_BF16 INLINE __m512 load_bf16(const uint16_t *from, __mmask16 mask)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return (__m512)_mm512_slli_epi32(x, 16);
}

/* exp(x) with a relative error of 1e-7. NaN stays NaN. */
TARGET_AVX512_BF16 INLINE __m512 exp_avx512(__m512 x)
{
    /* If an operand is NaN, max and min return the second operand, so a NaN in x stays NaN. */
    const __m512 min_log2 = _mm512_set1_ps(-150.0f), log2_y = x * 1.44269504f;
    const __m512 t = _mm512_max_ps(min_log2, _mm512_min_ps(_mm512_set1_ps(126.0f), log2_y));
    const __m512 exponent = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = t - exponent;
    __m512 y = f * 0.00132764711f + 0.00967554133f;
    y = y * f + 0.0555071328f;
    y = y * f + 0.240221197f;
    y = y * f + 0.693146967f;
    y = y * f + 1.0f;
    return _mm512_scalef_ps(y, exponent);
}

/* The mask of the first `count` of 16 lanes. */
INLINE __mmask16 lane_mask(int64_t count)
{
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

/* Transposes a 16x16 matrix. */
TARGET_AVX512_BF16 INLINE void transpose_16x16(Ints *x)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 1)) {
            Ints a = x[i], b = x[i + 1];
            x[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28,
                                           14, 30);
            x[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13,
                                               29, 15, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 2)) {
            Ints a = x[i], b = x[i + 2];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                           28, 29);
            x[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14,
                                               15, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 4)) {
            Ints a = x[i], b = x[i + 4];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                                           26, 27);
            x[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28,
                                               29, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 8)) {
            Ints a = x[i], b = x[i + 8];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22,
                                           23);
            x[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                               28, 29, 30, 31);
        }
}

/* Transposes a block of 16 rows of 16 words; rows are `stride` words apart. Rows after the first
   `rows` rows are read as zeros. */
TARGET_AVX512_BF16 INLINE void transpose_block(const uint32_t *from, int64_t stride, int64_t rows,
                                               uint32_t *to, int64_t to_stride)
{
    Ints x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = i < rows ? *(const Ints *)(from + i * stride) : (Ints){0};
    transpose_16x16(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        *(Ints *)(to + i * to_stride) = x[i];
}

/* Interleaves two rows: each 32-bit word holds the numbers of both rows in one column, like a pair
   of channels in a panel. A GEMM that sums over the rows reads this layout. If `b` is NULL, the
   second row is zeros. */
TARGET_AVX512_BF16 INLINE void interleave_rows(const uint16_t *a, const uint16_t *b, int64_t width,
                                               uint16_t *to)
{
    for (int64_t c = 0; c < width; c += LANES) {
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(a + c)));
        __m512i high = _mm512_setzero_si512();
        if (b)
            high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(b + c)));
        _mm512_storeu_si512(to + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

/* Packs a panel: its first columns are the rows of x, the other columns are zeros. `rows` is at
   most 32; `channels` is a multiple of 32. */
TARGET_AVX512_BF16 INLINE void pack_panel(const uint16_t *x, int64_t stride, int64_t rows,
                                          int64_t channels, uint16_t *to)
{
    for (int64_t c = 0; c < channels / 2; c += LANES)
        for (int64_t half = 0; half < COLUMNS; half += LANES)
            transpose_block((const uint32_t *)(x + half * stride) + c, stride / 2, rows - half,
                            (uint32_t *)to + c * COLUMNS + half, COLUMNS);
}

#endif
