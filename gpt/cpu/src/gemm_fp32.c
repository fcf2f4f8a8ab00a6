/* GEMM in fp32 for the experts of fp32 models. oneDNN computes the other linears of these models. */

#include "gemm.h"

#if defined(__x86_64__)

/* Computes one panel's columns for `rows` rows. Each sum adds its channels in the same order for
   any number of rows. */
TARGET_AVX512_BF16 INLINE void gemm_fp32_tile(const Gemm *p, const float *panel, int64_t first,
                                              int64_t column, int rows)
{
    const float *x = (const float *)(p->x + first * p->x_stride);
    const int64_t stride = p->x_stride / 2;
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->weight->channels; k++, panel += COLUMNS) {
        const __m512 a = _mm512_loadu_ps(panel), b = _mm512_loadu_ps(panel + LANES);
        _mm_prefetch((const char *)panel + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)panel + 2112, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const __m512 number = _mm512_set1_ps(x[i * stride + k]);
            sum[i][0] = _mm512_fmadd_ps(number, a, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(number, b, sum[i][1]);
        }
    }
    epilogue(p, sum, first, column, rows, 0);
}

#define TILE_CASE(n)                                                                               \
    case n: gemm_fp32_tile(p, panel, first, column, n); break;

TARGET_AVX512_BF16 void gemm_fp32_panel(const Gemm *p, const float *panel, int64_t column,
                                        int64_t first, int64_t end)
{
    for (; first < end; first += TILE)
        switch (end - first < TILE ? end - first : TILE) {
            TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
            TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
        }
}

#endif
