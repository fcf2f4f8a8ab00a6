/* The likeliest token of each row: of logits, or of rows that a head makes logits of, which then are
   not written down. */

#include <omp.h>

#include "gemm.h"

#if defined(__x86_64__)

/* The place of each row's largest number, the first of equals; 0 where nothing is a number. */
BF16 void preamble_best(const float *x, int64_t stride, int64_t rows, int64_t width,
                        int64_t *best, int64_t threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *here = x + row * stride;
        __m512 top[4];
        int64_t c = 0;
        for (int i = 0; i < 4; i++)
            top[i] = _mm512_set1_ps(-INFINITY);
        for (; c + 4 * LANES <= width; c += 4 * LANES)
            for (int i = 0; i < 4; i++)
                top[i] = _mm512_max_ps(_mm512_loadu_ps(here + c + i * LANES), top[i]);
        top[0] = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
        float most = _mm512_reduce_max_ps(top[0]);
        for (; c < width; c++)
            most = here[c] > most ? here[c] : most;
        best[row] = 0;
        for (c = 0; c < width; c++)
            if (here[c] == most) {
                best[row] = c;
                break;
            }
    }
}

BF16 void note(const Product *p, const __m512 (*sum)[2], int64_t first, int64_t column, int rows)
{
    Top *top = p->tops + omp_get_thread_num() * p->rows + first;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int half = 0; half < 2; half++) {
        const int64_t at = column + half * LANES;
        const __mmask16 there = first_lanes(p->weight->columns - at);
        const __m512i here = _mm512_add_epi32(_mm512_set1_epi32(at), lanes);
        for (int i = 0; i < rows; i++) {
            const __m512 y = sum[i][half], most = _mm512_loadu_ps(top[i].most);
            const __m512i place = _mm512_loadu_si512(top[i].place);
            /* Of equals the first, and panels come in any order. */
            __mmask16 equal = _mm512_mask_cmp_ps_mask(there, y, most, _CMP_EQ_OQ);
            __mmask16 better = _mm512_mask_cmp_ps_mask(there, y, most, _CMP_GT_OQ) |
                               _mm512_mask_cmplt_epi32_mask(equal, here, place);
            _mm512_mask_storeu_ps(top[i].most, better, y);
            _mm512_mask_storeu_epi32(top[i].place, better, here);
            __m512 odd = _mm512_loadu_ps(top[i].odd);
            odd = _mm512_mask3_fmadd_ps(y, _mm512_setzero_ps(), odd, there);
            _mm512_storeu_ps(top[i].odd, odd);
        }
    }
}

/* The place of each row's largest logit, the first of equals. Not 0: some logit is not finite, and
   nothing is said. */
int preamble_best_of(const Weight *weight, const uint16_t *x, int64_t rows, const Norm *norm,
                          int64_t *best, int64_t threads)
{
    const int64_t all = threads * rows;
    Top *tops = malloc(all * sizeof *tops);
    if (!tops)
        return 1;
    for (int64_t i = 0; i < all; i++)
        for (int lane = 0; lane < LANES; lane++) {
            tops[i].most[lane] = -INFINITY, tops[i].odd[lane] = 0;
            tops[i].place[lane] = INT32_MAX;
        }
    if (rows)
        multiply((Product){.weight = weight, .rows = rows, .tops = tops}, x, norm, threads);
    int odd = 0;
    for (int64_t row = 0; row < rows; row++) {
        float most = -INFINITY;
        best[row] = INT32_MAX;
        for (int64_t i = row; i < all; i += rows)
            for (int lane = 0; lane < LANES; lane++) {
                const float y = tops[i].most[lane];
                odd |= tops[i].odd[lane] != tops[i].odd[lane];
                if (y > most || (y == most && tops[i].place[lane] < best[row]))
                    most = y, best[row] = tops[i].place[lane];
            }
    }
    free(tops);
    return odd;
}

#endif
