/* The likeliest token of each row of logits. */

#include "library.h"

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

#endif
