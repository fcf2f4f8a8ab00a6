/* AVX2 GEMM with packed bf16 weights, for CPUs without bf16 instructions.

   These kernels replace the AVX-512 GEMM and norm of gemm_bf16.c and the fused argmax of argmax.c.
   They read the panels of the AVX-512 GEMM. A bf16 number is the upper half of an fp32 number, so a
   shift and a mask convert the two bf16 numbers of a 32-bit word to fp32. */

#include "gemm.h"
#include "thread_pool.h"

#if defined(__x86_64__)

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define AVX2_TILE_ROWS 3 /* Rows of a tile. Their sums almost fit into registers. */
#define AVX2_LANES 8

/* Adds to `sum` the products of `rows` rows of x with a panel's columns, over `pairs` pairs of
   channels. */
TARGET_AVX2 INLINE void accumulate_avx2(__m256 (*sum)[4], const uint16_t *x, int64_t stride,
                                        const uint16_t *panel, int64_t pairs, int rows)
{
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *weights = panel + k * 2 * COLUMNS;
        __m256 even[AVX2_TILE_ROWS], odd[AVX2_TILE_ROWS];
        _mm_prefetch((const char *)weights + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)weights + 2112, _MM_HINT_T0);
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++) {
            int32_t bits;
            memcpy(&bits, x + i * stride + k * 2, 4);
            const __m256i x_pair = _mm256_set1_epi32(bits);
            even[i] = (__m256)_mm256_slli_epi32(x_pair, 16);
            odd[i] = (__m256)_mm256_and_si256(x_pair, upper);
        }
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++) {
            const __m256i *from = (const __m256i *)(weights + quarter * 2 * AVX2_LANES);
            const __m256i words = _mm256_loadu_si256(from);
            const __m256 first = (__m256)_mm256_slli_epi32(words, 16);
            const __m256 second = (__m256)_mm256_and_si256(words, upper);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++) {
                sum[i][quarter] = _mm256_fmadd_ps(first, even[i], sum[i][quarter]);
                sum[i][quarter] = _mm256_fmadd_ps(second, odd[i], sum[i][quarter]);
            }
        }
    }
}

/* Like `accumulate_avx2` for an fp32 weight. */
TARGET_AVX2 INLINE void accumulate_fp32_avx2(__m256 (*sum)[4], const float *x, int64_t stride,
                                             const float *panel, int64_t channels, int rows)
{
    for (int64_t k = 0; k < channels; k++, panel += COLUMNS) {
        _mm_prefetch((const char *)panel + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)panel + 2112, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++) {
            const __m256 weights = _mm256_loadu_ps(panel + quarter * AVX2_LANES);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++)
                sum[i][quarter] =
                    _mm256_fmadd_ps(_mm256_set1_ps(x[i * stride + k]), weights, sum[i][quarter]);
        }
    }
}

static void update_argmax_avx2(const Gemm *p, float (*outputs)[COLUMNS], int64_t row,
                               int64_t column, int rows)
{
    RowArgmax *argmax = p->argmaxes + worker_index() * p->rows + row;
    for (int i = 0; i < rows; i++)
        for (int64_t c = 0; c < COLUMNS && column + c < p->weight->columns; c++) {
            const float y = outputs[i][c];
            const int32_t column_index = column + c;
            float *best_logit = argmax[i].logit + c % LANES;
            int32_t *best_column = argmax[i].column + c % LANES;
            if (y > *best_logit || (y == *best_logit && column_index < *best_column))
                *best_logit = y, *best_column = column_index;
            argmax[i].nonfinite[c % LANES] += y * 0;
        }
}

/* Limits the gates, and limits and shifts the numbers that they multiply. */
TARGET_AVX2 static void limit_gated(const PackedWeight *w, float *gates)
{
    const float limit = w->limit ? (float)w->limit : INFINITY;
    float *up = gates + LANES;
    for (int64_t c = 0; c < LANES; c++) { /* NaN stays NaN. */
        gates[c] = gates[c] > limit ? limit : gates[c];
        up[c] = (up[c] > limit ? limit : up[c] < -limit ? -limit : up[c]) + (float)w->offset;
    }
}

/* Applies the epilogue to the sums of `rows` rows, from `row` on, for one panel's columns. */
TARGET_AVX2 static void epilogue_avx2(const Gemm *p, float (*outputs)[COLUMNS], int64_t row,
                                      int64_t column, int rows)
{
    const PackedWeight *w = p->weight;
    if (p->argmaxes) {
        update_argmax_avx2(p, outputs, row, column, rows);
        return;
    }
    const int64_t width = COLUMNS >> w->gated, begin = column >> w->gated;
    const int64_t count = w->columns - begin < width ? w->columns - begin : width;
    if (p->adapters)
        add_terms_avx2(p, outputs, row, column, rows); /* Adds the bias too. */
    for (int i = 0; i < rows; i++) {
        float *y = outputs[i];
        const int64_t offset = (row + i) * w->columns + begin;
        for (int64_t half = 0; p->bias && !p->adapters && half <= w->gated; half++)
            for (int64_t c = 0; c < count; c++)
                y[half * LANES + c] += load_scalar(p->bias, half * w->columns + begin + c, !w->fp32);
        if (w->limit || w->offset)
            limit_gated(w, y);
        for (int64_t c = 0; c < width; c += LANES)
            *(Floats *)(y + c) = activate(*(Floats *)(y + c), p->activation);
        for (int64_t c = 0; c < count; c++) {
            const float output = (w->gated ? y[c] * y[LANES + c] : y[c]) +
                                 (p->residual ? bf16_to_fp32(p->residual[offset + c]) : 0);
            if (w->fp32_output)
                ((float *)p->out)[offset + c] = output;
            else
                ((uint16_t *)p->out)[offset + c] = fp32_to_bf16(output);
        }
    }
}

/* Computes one panel's columns for `rows` rows. Each sum adds its channels in the same order for
   any number of rows. */
TARGET_AVX2 INLINE void gemm_tile_avx2(const Gemm *p, const uint16_t *panel, int64_t row,
                                       int64_t column, int rows, int fp32)
{
    const uint16_t *x = p->x + row * p->x_stride;
    __m256 sum[AVX2_TILE_ROWS][4];
    float outputs[AVX2_TILE_ROWS][COLUMNS];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
        for (int quarter = 0; quarter < 4; quarter++)
            sum[i][quarter] = _mm256_setzero_ps();
    if (fp32)
        accumulate_fp32_avx2(sum, (const float *)x, p->x_stride / 2, (const float *)panel,
                             p->weight->channels, rows);
    else
        accumulate_avx2(sum, x, p->x_stride, panel, p->weight->channels / 2, rows);
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
        for (int quarter = 0; quarter < 4; quarter++)
            _mm256_storeu_ps(outputs[i] + quarter * AVX2_LANES, sum[i][quarter]);
    epilogue_avx2(p, outputs, row, column, rows);
}

TARGET_AVX2 INLINE void gemm_rows_avx2(const Gemm *p, const uint16_t *panel, int64_t column,
                                       int64_t first, int64_t end, int fp32)
{
    for (; first + AVX2_TILE_ROWS <= end; first += AVX2_TILE_ROWS)
        gemm_tile_avx2(p, panel, first, column, AVX2_TILE_ROWS, fp32);
    if (end - first == 2)
        gemm_tile_avx2(p, panel, first, column, 2, fp32);
    else if (end - first == 1)
        gemm_tile_avx2(p, panel, first, column, 1, fp32);
}

TARGET_AVX2 void gemm_panel_avx2(const Gemm *p, const uint16_t *panel, int64_t column,
                                 int64_t first, int64_t end)
{
    if (p->weight->fp32)
        gemm_rows_avx2(p, panel, column, first, end, 1);
    else
        gemm_rows_avx2(p, panel, column, first, end, 0);
}

/* The sum of x - mean over a row, or if `squared` the sum of (x - mean)^2. */
TARGET_AVX2 static float sum_row(const uint16_t *x, int64_t width, float mean, int squared)
{
    float lane_sums[LANES] = {0}, total = 0;
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t i = 0; i < LANES && c + i < width; i++) {
            const float y = bf16_to_fp32(x[c + i]) - mean;
            lane_sums[i] += squared ? y * y : y;
        }
    for (int i = 0; i < LANES; i++)
        total += lane_sums[i];
    return total;
}

TARGET_AVX2 void norm_row_avx2(const NormArgs *norm, const uint16_t *x, int64_t width,
                               uint16_t *out)
{
    const float mean = norm->rms ? 0 : sum_row(x, width, 0, 0) / width;
    const float inverse_std =
        1.0f / sqrtf(sum_row(x, width, mean, 1) / width + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c++) {
        const float y = (bf16_to_fp32(x[c]) - mean) * inverse_std * norm->scale[c];
        out[c] = fp32_to_bf16(norm->shift ? y + norm->shift[c] : y);
    }
}

#endif
