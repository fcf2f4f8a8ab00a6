/* Products of bf16 rows with what lies in panels: 32 columns side by side, channel pair by pair. */

#pragma once

#include "library.h"

#if defined(__x86_64__)

#define COLUMNS 32 /* Of a panel: they lie together, pairs of channels side by side. */
#define TILE 12    /* Rows whose sums fit into registers. */

/* Adds to the sums of `rows` rows (`stride` numbers apart) what `pairs` pairs of channels give with
   a panel's columns. Each sum is taken channel by channel, however many rows there are. */
BF16 INLINE void add(__m512 (*sum)[2], const uint16_t *x, int64_t stride, const uint16_t *panel,
                     int64_t pairs, int rows)
{
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(panel + k * 64);
        __m512bh b = (__m512bh)_mm512_loadu_si512(panel + k * 64 + 32);
        /* What is read once comes from afar; past the end it is the next panel. */
        _mm_prefetch((const char *)(panel + k * 64) + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)(panel + k * 64) + 2112, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + i * stride + k * 2, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, a);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b);
        }
    }
}

BF16 INLINE __m512 widened(const uint16_t *from, __mmask16 there)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from));
    return (__m512)_mm512_slli_epi32(x, 16);
}

/* The first `count` of 16 lanes. */
INLINE __mmask16 first_lanes(int64_t count)
{
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

#endif
