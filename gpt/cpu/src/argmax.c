/* Greedy argmax of each row: over logits, or fused with the LM head's GEMM.

   The fused kernel does not write the logits to memory. */

#include "gemm.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Logits, and the memory for the column of each row's largest logit. */
typedef struct {
    const float *x;
    int64_t stride, width;
    int64_t *best;
} LogitRows;

TARGET_AVX512_BF16 static int64_t argmax_row(const float *x, int64_t width)
{
    __m512 lane_max[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++)
        lane_max[i] = _mm512_set1_ps(-INFINITY);
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        for (int i = 0; i < 4; i++)
            lane_max[i] = _mm512_max_ps(_mm512_loadu_ps(x + c + i * LANES), lane_max[i]);
    lane_max[0] = _mm512_max_ps(_mm512_max_ps(lane_max[0], lane_max[1]),
                                _mm512_max_ps(lane_max[2], lane_max[3]));
    float row_max = _mm512_reduce_max_ps(lane_max[0]);
    for (; c < width; c++)
        row_max = x[c] > row_max ? x[c] : row_max;
    for (c = 0; c < width; c++)
        if (x[c] == row_max)
            return c;
    return 0;
}

static void argmax_rows(void *context, int64_t first, int64_t end)
{
    const LogitRows *p = context;
    for (int64_t row = first; row < end; row++)
        p->best[row] = argmax_row(p->x + row * p->stride, p->width);
}

/* Stores the column of each row's largest number in `best`; on a tie, the first such column.
   Ignores NaN; for a row of only NaN, stores 0. */
void preamble_argmax(const float *x, int64_t stride, int64_t rows, int64_t width, int64_t *best,
                     int64_t threads)
{
    LogitRows logits = {x, stride, width, best};
    parallel_for(rows, 1, threads, STEALING, argmax_rows, &logits);
}

TARGET_AVX512_BF16 void update_argmax(const Gemm *p, const __m512 (*sum)[2], int64_t first,
                                      int64_t column, int rows)
{
    RowArgmax *argmax = p->argmaxes + worker_index() * p->rows + first;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int half = 0; half < 2; half++) {
        const int64_t begin = column + half * LANES;
        const __mmask16 mask = lane_mask(p->weight->columns - begin);
        const __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(begin), lanes);
        for (int i = 0; i < rows; i++) {
            const __m512 y = sum[i][half], best_logits = _mm512_loadu_ps(argmax[i].logit);
            const __m512i best_columns = _mm512_loadu_si512(argmax[i].column);
            /* On a tie the smaller column wins. Columns are compared, because a thread may process
               the panels in any order. */
            __mmask16 equal = _mm512_mask_cmp_ps_mask(mask, y, best_logits, _CMP_EQ_OQ);
            __mmask16 better = _mm512_mask_cmp_ps_mask(mask, y, best_logits, _CMP_GT_OQ) |
                               _mm512_mask_cmplt_epi32_mask(equal, columns, best_columns);
            _mm512_mask_storeu_ps(argmax[i].logit, better, y);
            _mm512_mask_storeu_epi32(argmax[i].column, better, columns);
            __m512 nonfinite = _mm512_loadu_ps(argmax[i].nonfinite);
            nonfinite = _mm512_mask3_fmadd_ps(y, _mm512_setzero_ps(), nonfinite, mask);
            _mm512_storeu_ps(argmax[i].nonfinite, nonfinite);
        }
    }
}

/* Stores the column of each row's largest logit in `best`; on a tie, the first such column. Returns
   nonzero, with `best` undefined, if a logit is not finite or if memory allocation fails. */
int preamble_gemm_argmax(const PackedWeight *weight, const uint16_t *x, int64_t rows,
                         const NormArgs *norm, int64_t *best, int64_t threads)
{
    const int64_t count = threads * rows;
    RowArgmax *argmaxes = malloc(count * sizeof *argmaxes);
    if (!argmaxes)
        return 1;
    for (int64_t i = 0; i < count; i++)
        for (int lane = 0; lane < LANES; lane++) {
            argmaxes[i].logit[lane] = -INFINITY, argmaxes[i].nonfinite[lane] = 0;
            argmaxes[i].column[lane] = INT32_MAX;
        }
    if (rows)
        gemm((Gemm){.weight = weight, .rows = rows, .argmaxes = argmaxes}, x, norm, threads);
    int nonfinite = 0;
    for (int64_t row = 0; row < rows; row++) {
        float best_logit = -INFINITY;
        best[row] = INT32_MAX;
        for (int64_t i = row; i < count; i += rows)
            for (int lane = 0; lane < LANES; lane++) {
                const float y = argmaxes[i].logit[lane];
                nonfinite |= argmaxes[i].nonfinite[lane] != argmaxes[i].nonfinite[lane];
                if (y > best_logit || (y == best_logit && argmaxes[i].column[lane] < best[row]))
                    best_logit = y, best[row] = argmaxes[i].column[lane];
            }
    }
    free(argmaxes);
    return nonfinite;
}

#endif
