/* Products of bf16 rows with what lies in panels: 32 columns side by side, channel pair by pair. */

#pragma once

#include "vectors.h"

#if defined(__x86_64__)

#define COLUMNS 32 /* Of a panel: they lie together, pairs of channels side by side. */
#define TILE 12    /* Rows whose sums fit into registers. */

/* A weight in panels, of bf16 or of bytes; or none, where they are NULL. */
typedef struct {
    const void *panels;
    int64_t channels, columns;
    int64_t wide;  /* The results stay fp32. */
    int64_t gated; /* A panel is 16 gates, then 16 columns that they multiply. */
    const float *scales; /* Of bytes: each column's, as they stand in panels; else NULL. */
} Weight;

/* What is done to rows before: LayerNorm, or RMSNorm, by fp32 numbers; or nothing: no scale. */
typedef struct {
    const float *scale, *shift; /* No shift: NULL. */
    double epsilon;
    int64_t rms;
} Norm;

/* A row of `width` numbers, normed. */
__attribute__((visibility("hidden"))) void norm_row(const Norm *norm, const uint16_t *x,
                                                    int64_t width, uint16_t *out);

/* In gemm_bf16.c, decode_attention.c and prefill_attention.c. */
void preamble_multiply(const Weight *weight, const uint16_t *x, int64_t rows, const uint16_t *bias,
                       int64_t activation, const uint16_t *residual, void *out, int64_t threads,
                       const Norm *norm);
int preamble_attend(const void *rows, const void *q, int64_t row_stride, int64_t head_stride,
                    const void *kv, void *out);
int preamble_attend_runs(const void *runs, const void *q, int64_t row_stride,
                         int64_t head_stride, const void *kv, void *out);

/* What is fetched while a panel is multiplied: from where, and how far with each pair of channels. */
typedef struct {
    const char *from;
    int64_t stride;
} Ahead;

/* Adds to the sums of `rows` rows what `pairs` pairs of channels give with a panel's columns. A row
   is `stride` numbers from the next, a pair `step`. Each sum is taken channel by channel, however
   many rows there are. */
BF16 INLINE void add_ahead(__m512 (*sum)[2], const uint16_t *x, int64_t stride, int64_t step,
                           const uint16_t *panel, int64_t pairs, int rows, Ahead ahead)
{
    for (int64_t k = 0; k < pairs; k++, ahead.from += ahead.stride) {
        const uint16_t *here = panel + k * 2 * COLUMNS;
        __m512bh a = (__m512bh)_mm512_loadu_si512(here);
        __m512bh b = (__m512bh)_mm512_loadu_si512(here + COLUMNS);
        /* Few rows are through a panel before the machine itself has brought it near. */
        if (rows <= 8) {
            _mm_prefetch((const char *)here + 1024, _MM_HINT_T0);
            _mm_prefetch((const char *)here + 1088, _MM_HINT_T0);
            _mm_prefetch(ahead.from, _MM_HINT_T1);
            _mm_prefetch(ahead.from + 64, _MM_HINT_T1);
        } else {
            _mm_prefetch(ahead.from, _MM_HINT_T0);
            _mm_prefetch(ahead.from + 64, _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + i * stride + k * step, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, a);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b);
        }
    }
}

/* The same, while what lies behind is fetched: the rest of the panel, and perhaps the next. */
BF16 INLINE void add(__m512 (*sum)[2], const uint16_t *x, int64_t stride, const uint16_t *panel,
                     int64_t pairs, int rows)
{
    add_ahead(sum, x, stride, 2, panel, pairs, rows, (Ahead){(const char *)panel + 2048, 128});
}

BF16 INLINE __m512 widened(const uint16_t *from, __mmask16 there)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from));
    return (__m512)_mm512_slli_epi32(x, 16);
}

/* e to the x, to 1e-7 of it; what is not a number stays so. */
BF16 INLINE __m512 exponential(__m512 x)
{
    /* Of two the instruction takes the second where one is not a number. */
    const __m512 least = _mm512_set1_ps(-150.0f), turns = x * 1.44269504f;
    const __m512 t = _mm512_max_ps(least, _mm512_min_ps(_mm512_set1_ps(126.0f), turns));
    const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = t - whole;
    __m512 y = f * 0.00132764711f + 0.00967554133f;
    y = y * f + 0.0555071328f;
    y = y * f + 0.240221197f;
    y = y * f + 0.693146967f;
    y = y * f + 1.0f;
    return _mm512_scalef_ps(y, whole);
}

/* The first `count` of 16 lanes. */
INLINE __mmask16 first_lanes(int64_t count)
{
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

/* Rows become columns. */
BF16 INLINE void turn(Ints *x)
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
            x[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                               14, 15, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 4)) {
            Ints a = x[i], b = x[i + 4];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                                           26, 27);
            x[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15,
                                               28, 29, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 8)) {
            Ints a = x[i], b = x[i + 8];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                           22, 23);
            x[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                               28, 29, 30, 31);
        }
}

/* 16 words of each of 16 rows, `stride` words apart, turned; rows that are not there are zero. */
BF16 INLINE void turn_from(const uint32_t *from, int64_t stride, int64_t rows, uint32_t *to,
                           int64_t to_stride)
{
    Ints x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = i < rows ? *(const Ints *)(from + i * stride) : (Ints){0};
    turn(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        *(Ints *)(to + i * to_stride) = x[i];
}

/* Two rows, pair by pair, as a panel that sums over rows has them; no second row: zeros. */
BF16 INLINE void pair_up(const uint16_t *a, const uint16_t *b, int64_t width, uint16_t *to)
{
    for (int64_t c = 0; c < width; c += LANES) {
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(a + c)));
        __m512i high = _mm512_setzero_si512();
        if (b)
            high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(b + c)));
        _mm512_storeu_si512(to + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

/* A panel whose columns are `rows` rows, at most 32, of so many channels (whole 32s). */
BF16 INLINE void panel_of(const uint16_t *x, int64_t stride, int64_t rows, int64_t channels,
                          uint16_t *to)
{
    for (int64_t c = 0; c < channels / 2; c += LANES)
        for (int64_t half = 0; half < COLUMNS; half += LANES)
            turn_from((const uint32_t *)(x + half * stride) + c, stride / 2, rows - half,
                      (uint32_t *)to + c * COLUMNS + half, COLUMNS);
}

#endif
