/* Products on a machine that has AVX2 and no instruction for bf16: what gemm_bf16.c and argmax.c do,
   with the same panels. A bf16 number is the upper half of an fp32 one, so a word of two of them
   gives both by a shift and a mask. */

#include <omp.h>

#include "gemm.h"

#if defined(__x86_64__)

#define FMA __attribute__((target("avx2,fma")))
#define FEW 3 /* Rows whose sums are near enough to registers. */
#define EIGHT 8

/* Adds what `pairs` pairs of channels of `rows` rows give with a panel's columns. */
FMA INLINE void add_few(__m256 (*sum)[4], const uint16_t *x, int64_t stride, const uint16_t *panel,
                        int64_t pairs, int rows)
{
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *here = panel + k * 2 * COLUMNS;
        __m256 even[FEW], odd[FEW];
        _mm_prefetch((const char *)here + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)here + 2112, _MM_HINT_T0);
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + i * stride + k * 2, 4);
            const __m256i both = _mm256_set1_epi32(pair);
            even[i] = (__m256)_mm256_slli_epi32(both, 16);
            odd[i] = (__m256)_mm256_and_si256(both, upper);
        }
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            const __m256i *from = (const __m256i *)(here + part * 2 * EIGHT);
            const __m256i words = _mm256_loadu_si256(from);
            const __m256 first = (__m256)_mm256_slli_epi32(words, 16);
            const __m256 second = (__m256)_mm256_and_si256(words, upper);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++) {
                sum[i][part] = _mm256_fmadd_ps(first, even[i], sum[i][part]);
                sum[i][part] = _mm256_fmadd_ps(second, odd[i], sum[i][part]);
            }
        }
    }
}

static void note_few(const Product *p, float (*made)[COLUMNS], int64_t row, int64_t column, int rows)
{
    Top *top = p->tops + omp_get_thread_num() * p->rows + row;
    for (int i = 0; i < rows; i++)
        for (int64_t c = 0; c < COLUMNS && column + c < p->weight->columns; c++) {
            const float y = made[i][c];
            const int32_t place = column + c;
            float *most = top[i].most + c % LANES;
            int32_t *at = top[i].place + c % LANES;
            if (y > *most || (y == *most && place < *at))
                *most = y, *at = place;
            top[i].odd[c % LANES] += y * 0;
        }
}

/* What becomes of the sums of `rows` rows with one panel's columns. */
FMA static void finish_few(const Product *p, float (*made)[COLUMNS], int64_t row, int64_t column,
                           int rows)
{
    const Weight *w = p->weight;
    if (p->tops) {
        note_few(p, made, row, column, rows);
        return;
    }
    const int64_t width = COLUMNS >> w->gated, at = column >> w->gated;
    const int64_t count = w->columns - at < width ? w->columns - at : width;
    for (int i = 0; i < rows; i++) {
        float *y = made[i];
        const int64_t place = (row + i) * w->columns + at;
        for (int64_t half = 0; p->bias && half <= w->gated; half++)
            for (int64_t c = 0; c < count; c++)
                y[half * LANES + c] += of_bf16(p->bias[half * w->columns + at + c]);
        for (int64_t c = 0; c < width; c += LANES)
            *(Floats *)(y + c) = activated(*(Floats *)(y + c), p->activation);
        for (int64_t c = 0; c < count; c++) {
            const float whole = (w->gated ? y[c] * y[LANES + c] : y[c]) +
                                (p->residual ? of_bf16(p->residual[place + c]) : 0);
            if (w->wide)
                ((float *)p->out)[place + c] = whole;
            else
                ((uint16_t *)p->out)[place + c] = to_bf16(whole);
        }
    }
}

/* One panel's columns of `rows` rows. Each sum is taken channel by channel, however many rows. */
FMA INLINE void tile(const Product *p, const uint16_t *panel, int64_t row, int64_t column, int rows)
{
    __m256 sum[FEW][4];
    float made[FEW][COLUMNS];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
        for (int part = 0; part < 4; part++)
            sum[i][part] = _mm256_setzero_ps();
    add_few(sum, p->x + row * p->stride, p->stride, panel, p->weight->channels / 2, rows);
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++)
        for (int part = 0; part < 4; part++)
            _mm256_storeu_ps(made[i] + part * EIGHT, sum[i][part]);
    finish_few(p, made, row, column, rows);
}

FMA void tiles_avx2(const Product *p, const uint16_t *panel, int64_t column, int64_t first,
                    int64_t end)
{
    for (; first + FEW <= end; first += FEW)
        tile(p, panel, first, column, FEW);
    if (end - first == 2)
        tile(p, panel, first, column, 2);
    else if (end - first == 1)
        tile(p, panel, first, column, 1);
}

/* The sum of a row's numbers less `mean`, or of their squares. */
FMA static float summed(const uint16_t *x, int64_t width, float mean, int squared)
{
    float parts[LANES] = {0}, all = 0;
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t i = 0; i < LANES && c + i < width; i++) {
            const float y = of_bf16(x[c + i]) - mean;
            parts[i] += squared ? y * y : y;
        }
    for (int i = 0; i < LANES; i++)
        all += parts[i];
    return all;
}

FMA void norm_row_avx2(const Norm *norm, const uint16_t *x, int64_t width, uint16_t *out)
{
    const float mean = norm->rms ? 0 : summed(x, width, 0, 0) / width;
    const float share = 1.0f / sqrtf(summed(x, width, mean, 1) / width + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c++) {
        const float y = (of_bf16(x[c]) - mean) * share * norm->scale[c];
        out[c] = to_bf16(norm->shift ? y + norm->shift[c] : y);
    }
}

#endif
