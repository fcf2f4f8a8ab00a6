/* The likeliest token of a few rows by half of what the head weighs.

   Bytes say of each token where its logit can lie; of those that can be the likeliest the logits
   are made from the head itself, as products.c makes them, to the bit. */

#include "product.h"

#if defined(__x86_64__)

#define ROWS_MAX 4 /* As in gpt/shortlist.py. */
#define HIGHEST (127 * 128)

typedef struct {
    const uint8_t *panels;  /* As int8.c reads them. */
    const float *scales;    /* Of each column, */
    const float *errors;    /* and the norm of what its bytes lack, or more. */
    const uint16_t *exact;  /* The same columns in panels of bf16. */
    int64_t channels, columns;
    double norm_max; /* No column's bytes have a larger norm. */
} Shortlist;

/* Some of a row in two digits, so that hardly anything is lost of the row. */
typedef struct {
    int8_t high[GROUP], low[GROUP];
    float scale;
    int32_t offset;
} Digits;

/* By how much a logit that bytes say may be wrong: `norm` times the column's error, and `slack`. */
typedef struct {
    float norm, slack;
} Doubt;

typedef struct {
    float logit;
    int64_t column;
} Best;

/* A row in digits. Its doubt has all that floats round on the way, here and in products.c. */
INT8 static Doubt bring_to_digits(const uint16_t *x, const Shortlist *s, Digits *to)
{
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512 squares = _mm512_setzero_ps(), lost = squares;
    for (int64_t c = 0; c < s->channels; c += GROUP, to++) {
        __m512 y[GROUP / LANES];
        __m512i most = _mm512_setzero_si512(), total = most;
        for (int i = 0; i < GROUP / LANES; i++) {
            y[i] = widened(x + c + i * LANES, first_lanes(s->channels - c - i * LANES));
            most = _mm512_max_epi32(most, _mm512_and_si512((__m512i)y[i], size));
        }
        const int32_t bits = _mm512_reduce_max_epi32(most);
        float largest;
        memcpy(&largest, &bits, 4);
        const float by = largest > 1e-30f ? HIGHEST / largest : 0;
        to->scale = largest / HIGHEST;
        for (int i = 0; i < GROUP / LANES; i++) {
            __m512i codes = _mm512_cvtps_epi32(y[i] * by);
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(codes, _mm512_set1_epi32(64)), 7);
            __m512i low = _mm512_sub_epi32(codes, _mm512_slli_epi32(high, 7));
            _mm_storeu_si128((__m128i *)(to->high + i * LANES), _mm512_cvtsepi32_epi8(high));
            _mm_storeu_si128((__m128i *)(to->low + i * LANES), _mm512_cvtsepi32_epi8(low));
            total = _mm512_add_epi32(total, codes);
            __m512 gone = y[i] - _mm512_cvtepi32_ps(codes) * to->scale;
            squares += y[i] * y[i];
            lost += gone * gone;
        }
        to->offset = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(total));
    }
    const float norm = sqrtf(_mm512_reduce_add_ps(squares)) * 1.001f;
    const float gone = sqrtf(_mm512_reduce_add_ps(lost)) * 1.001f + norm * 0x1p-20f;
    /* Each of so many roundings is off by at most 2^-24 of what the norms allow. */
    const float rounded = norm * (2 * s->channels + 256) * 0x1p-24f;
    return (Doubt){norm, (float)s->norm_max * (gone + rounded) * 1.001f + 1e-22f};
}

/* What bytes say of one panel's columns and `rows` rows: the most that each logit can be, to
   `upper`, and in `least` the most that any logit must be. */
INT8 INLINE void bound(const Shortlist *s, const Digits *x, const Doubt *doubts, int64_t panel,
                       float *upper, int64_t width, __m512 *least, int rows)
{
    const int64_t groups = groups_of(s->channels);
    const uint8_t *bytes = s->panels + panel * groups * GROUP * COLUMNS;
    __m512 sum[ROWS_MAX][2];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i high[ROWS_MAX][2], low[ROWS_MAX][2];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            high[i][0] = high[i][1] = _mm512_setzero_si512();
            low[i][0] = low[i][1] = _mm512_set1_epi32(x[i * groups + g].offset);
        }
#pragma GCC unroll 2
        for (int k = 0; k < GROUP; k += 4, bytes += 4 * COLUMNS) {
            __m512i a = _mm512_loadu_si512(bytes), b = _mm512_loadu_si512(bytes + 2 * COLUMNS);
            _mm_prefetch((const char *)bytes + 2048, _MM_HINT_T0);
            _mm_prefetch((const char *)bytes + 2112, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                int32_t four[2];
                memcpy(four, x[i * groups + g].high + k, 4);
                memcpy(four + 1, x[i * groups + g].low + k, 4);
                __m512i up = _mm512_set1_epi32(four[0]), down = _mm512_set1_epi32(four[1]);
                high[i][0] = _mm512_dpbusd_epi32(high[i][0], a, up);
                high[i][1] = _mm512_dpbusd_epi32(high[i][1], b, up);
                low[i][0] = _mm512_dpbusd_epi32(low[i][0], a, down);
                low[i][1] = _mm512_dpbusd_epi32(low[i][1], b, down);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++) {
                __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[i][half], 7), low[i][half]);
                __m512 scale = _mm512_set1_ps(x[i * groups + g].scale);
                sum[i][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sum[i][half]);
            }
    }
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) {
            const int64_t column = panel * COLUMNS + half * LANES;
            const __mmask16 there = first_lanes(s->columns - column);
            __m512 y = sum[i][half] * _mm512_loadu_ps(s->scales + column);
            __m512 doubt = _mm512_loadu_ps(s->errors + column) * doubts[i].norm + doubts[i].slack;
            __m512 most = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), there, y + doubt);
            _mm512_storeu_ps(upper + i * width + column, most);
            least[i] = _mm512_mask_max_ps(least[i], there, least[i], y - doubt);
        }
}

#define BOUND_OF(n) case n: bound(s, x, doubts, panel, upper, width, least, n); break;

INT8 static void bounds(const Shortlist *s, const Digits *x, const Doubt *doubts, int64_t rows,
                        int64_t panel, float *upper, int64_t width, __m512 *least)
{
    switch (rows) {
        BOUND_OF(1) BOUND_OF(2) BOUND_OF(3) BOUND_OF(4)
    }
}

/* The best column of a panel of the head, of a row's. */
INT8 static void look(const Shortlist *s, const uint16_t *x, int64_t panel, Best *best)
{
    __m512 logits[1][2] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
    const uint16_t *from = s->exact + panel * s->channels * COLUMNS;
    add(logits, x, s->channels, from, s->channels / 2, 1);
    for (int half = 0; half < 2; half++) {
        const int64_t column = panel * COLUMNS + half * LANES;
        const __mmask16 there = first_lanes(s->columns - column);
        float largest = _mm512_mask_reduce_max_ps(there, logits[0][half]);
        if (there && largest > best->logit) {
            __mmask16 where = _mm512_mask_cmp_ps_mask(there, logits[0][half],
                                                      _mm512_set1_ps(largest), _CMP_EQ_OQ);
            *best = (Best){largest, column + __builtin_ctz(where)};
        }
    }
}

/* Whether a panel has a column whose logit can reach `least`. */
INT8 static int reaches(const float *upper, float least)
{
    const __m512 most = _mm512_max_ps(_mm512_loadu_ps(upper), _mm512_loadu_ps(upper + LANES));
    return _mm512_cmp_ps_mask(most, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
}

/* The place of each row's largest logit, the first of equals, for at most ROWS_MAX rows, which go
   through a norm first, if there is one. Answers how many panels of the head it took; -1: of such
   rows nothing can be said here. */
INT8 int64_t preamble_shortlist(const Shortlist *s, const Norm *norm, const uint16_t *rows_of,
                                int64_t rows, int64_t *best, int64_t threads)
{
    const int64_t groups = groups_of(s->channels), panels = (s->columns + COLUMNS - 1) / COLUMNS;
    const int64_t width = panels * COLUMNS, share = panels / (threads * 8) + 1;
    float *upper = room_for(rows * (width * sizeof *upper + groups * sizeof(Digits) +
                                    s->channels * sizeof(uint16_t)));
    Digits *x = (Digits *)(upper + rows * width);
    uint16_t *normed = (uint16_t *)(x + rows * groups);
    Doubt doubts[ROWS_MAX];
    Best found[ROWS_MAX];
    float most[ROWS_MAX];
    int64_t made = 0;
    for (int64_t row = 0; norm && row < rows; row++)
        norm_row(norm, rows_of + row * s->channels, s->channels, normed + row * s->channels);
    rows_of = norm ? normed : rows_of;
    for (int64_t row = 0; row < rows; row++) {
        doubts[row] = bring_to_digits(rows_of + row * s->channels, s, x + row * groups);
        /* Beyond these squares are lost, or infinite; so is what is not finite. */
        if (!(doubts[row].norm > 1e-10f && doubts[row].norm < 1e10f))
            return -1;
        found[row] = (Best){-INFINITY, 0};
        most[row] = -INFINITY;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        __m512 least[ROWS_MAX];
        Best mine[ROWS_MAX];
        int64_t count = 0;
        for (int i = 0; i < ROWS_MAX; i++)
            least[i] = _mm512_set1_ps(-INFINITY);
#pragma omp for schedule(dynamic, share) nowait
        for (int64_t panel = 0; panel < panels; panel++)
            bounds(s, x, doubts, rows, panel, upper, width, least);
#pragma omp critical
        for (int64_t row = 0; row < rows; row++)
            most[row] = fmaxf(most[row], _mm512_reduce_max_ps(least[row]));
#pragma omp barrier
        for (int64_t row = 0; row < rows; row++)
            mine[row] = found[row];
#pragma omp for schedule(dynamic, share) nowait
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t row = 0; row < rows; row++)
                if (reaches(upper + row * width + panel * COLUMNS, most[row])) {
                    look(s, rows_of + row * s->channels, panel, &mine[row]);
                    count++;
                }
#pragma omp critical
        {
            for (int64_t row = 0; row < rows; row++)
                if (mine[row].logit > found[row].logit ||
                    (mine[row].logit == found[row].logit && mine[row].column < found[row].column))
                    found[row] = mine[row];
            made += count;
        }
    }
    for (int64_t row = 0; row < rows; row++)
        best[row] = found[row].column;
    return made;
}

#endif
