/* The likeliest token of some rows by half of what the head weighs, and by half of the work.

   Bytes say of each token where its logit can lie; of those that can be the likeliest the logits
   are made from the head itself, as gemm_bf16.c makes them, to the bit. */

#include <omp.h>

#include "gemm.h"

#if defined(__x86_64__)

#define ROWS_MAX 256 /* As in gpt/cpu/exact_argmax.py. */

typedef struct {
    Weight bytes;          /* As gemm_int8.c reads them. */
    const float *errors;   /* The norm of what a column's bytes lack, or more, */
    const float *norms;    /* and of what they are. */
    const float *mean;     /* What all columns have in common, which the bytes lack. */
    const uint16_t *exact; /* The same columns in panels of bf16. */
    double norm_max;       /* No column has a larger norm, with what is common or without it. */
} Shortlist;

/* By how much a logit that bytes say may be wrong: what a row is times what a column lacks, what
   the row lacks times what the column is, and what is rounded on the way. What a row's logits have
   in common bytes leave out. */
typedef struct {
    float norm, gone, slack, common;
} Doubt;

/* What a row's largest logit must be, and in which panel there is such a one. */
typedef struct {
    float least;
    int32_t panel;
} Known;

struct Bounds {
    const Shortlist *list;
    const Doubt *doubts; /* Of rows. */
    float *upper; /* The most that any logit of a panel's can be, panel by panel, row by row. */
    Known *known; /* Of each row, thread by thread. */
};

typedef struct {
    float logit;
    int64_t column;
} Best;

/* What is in doubt of a row in bytes, with all that floats round on the way, here and in
   gemm_bf16.c. */
INT8 static Doubt doubt_of(const uint16_t *x, const Shortlist *s, const Group *bytes)
{
    const int64_t channels = s->bytes.channels;
    __m512 squares = _mm512_setzero_ps(), lost = squares, common = squares;
    for (int64_t c = 0; c < channels; c += LANES) {
        const __mmask16 there = first_lanes(channels - c);
        const Group *group = bytes + c / GROUP;
        const __m128i codes = _mm_loadu_si128((const __m128i *)(group->codes + c % GROUP));
        const __m512 said = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)) * group->scale;
        const __m512 y = widened(x + c, there);
        squares += y * y;
        lost += (y - said) * (y - said);
        common += y * _mm512_maskz_loadu_ps(there, s->mean + c);
    }
    const float norm = sqrtf(_mm512_reduce_add_ps(squares)) * 1.001f;
    const float gone = sqrtf(_mm512_reduce_add_ps(lost)) * 1.001f + norm * 0x1p-20f;
    /* Each of so many roundings is off by at most 2^-24 of what the norms allow. */
    const float rounded = norm * (2 * channels + 256) * 0x1p-24f;
    const float slack = (float)s->norm_max * rounded * 1.001f + 1e-22f;
    return (Doubt){norm, gone, slack, _mm512_reduce_add_ps(common)};
}

/* What bytes say of one panel's columns and some rows. */
INT8 void bound(const Product *p, const __m512 (*sum)[2], int64_t first, int64_t column, int rows)
{
    const Bounds *b = p->bounds;
    const Shortlist *s = b->list;
    const __m512 none = _mm512_set1_ps(-INFINITY);
    float *upper = b->upper + column / COLUMNS * p->rows + first;
    Known *known = b->known + omp_get_thread_num() * p->rows + first;
    for (int i = 0; i < rows; i++) {
        const Doubt doubt = b->doubts[first + i];
        __m512 most = none, must = none;
        for (int half = 0; half < 2; half++) {
            const int64_t at = column + half * LANES;
            const __mmask16 there = first_lanes(s->bytes.columns - at);
            __m512 by = _mm512_loadu_ps(s->errors + at) * doubt.norm + doubt.slack;
            by = _mm512_loadu_ps(s->norms + at) * doubt.gone + by;
            most = _mm512_mask_max_ps(most, there, most, sum[i][half] + by);
            must = _mm512_mask_max_ps(must, there, must, sum[i][half] - by);
        }
        /* Mostly there is nothing to see: a better logit is known. */
        upper[i] = -INFINITY;
        if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(known[i].least), _CMP_GE_OQ)) {
            const float sure = _mm512_reduce_max_ps(must);
            upper[i] = _mm512_reduce_max_ps(most);
            if (sure > known[i].least)
                known[i] = (Known){sure, column / COLUMNS};
        }
    }
}

static const Best NONE = {-INFINITY, INT64_MAX};

INLINE int better(Best a, Best b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.column < b.column);
}

/* The best column of a panel of the head, of a row's, if it is better than the best so far. */
INT8 static void look(const Shortlist *s, const uint16_t *x, int64_t panel, Best *best)
{
    const int64_t channels = s->bytes.channels;
    __m512 logits[1][2] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
    add(logits, x, channels, s->exact + panel * channels * COLUMNS, channels / 2, 1);
    for (int half = 0; half < 2; half++) {
        const int64_t column = panel * COLUMNS + half * LANES;
        const __mmask16 there = first_lanes(s->bytes.columns - column);
        const float largest = _mm512_mask_reduce_max_ps(there, logits[0][half]);
        const __mmask16 where = _mm512_mask_cmp_ps_mask(there, logits[0][half],
                                                        _mm512_set1_ps(largest), _CMP_EQ_OQ);
        const Best found = {largest, column + __builtin_ctz(where | 1 << LANES)};
        if (where && better(found, *best))
            *best = found;
    }
}

/* Some rows' largest logits, while they are sought. */
typedef struct {
    Product product; /* Of the bytes. */
    const uint16_t *x;
    uint16_t *normed;
    Best best[ROWS_MAX];
    Known known[ROWS_MAX];
} Search;

/* A row in bytes; normed first, if there is a norm. */
INT8 static Doubt begin(const Search *search, const Norm *norm, const uint16_t *from, int64_t row)
{
    const Product *p = &search->product;
    const int64_t channels = p->weight->channels;
    Group *bytes = p->groups + row * groups_of(channels);
    const uint16_t *x = search->x + row * channels;
    if (norm)
        norm_row(norm, from + row * channels, channels, search->normed + row * channels);
    bring_to_bytes(x, channels, bytes);
    return doubt_of(x, p->bounds->list, bytes);
}

/* Looks where a row's largest logit likely is: then few others can be larger. */
INT8 static void look_first(Search *search, int64_t row, int64_t threads)
{
    const Bounds *bounds = search->product.bounds;
    const Doubt *doubt = bounds->doubts + row;
    Known *known = search->known + row;
    *known = bounds->known[row];
    for (int64_t i = 1; i < threads; i++)
        if (bounds->known[i * search->product.rows + row].least > known->least)
            *known = bounds->known[i * search->product.rows + row];
    if (known->panel < 0)
        return;
    Best *best = search->best + row;
    look(bounds->list, search->x + row * bounds->list->bytes.channels, known->panel, best);
    known->least = fmaxf(known->least, best->logit - doubt->common - 2 * doubt->slack);
}

/* Looks at a panel for each row of which it can have the largest logit; for how many. */
INT8 static int64_t look_on(const Search *search, int64_t panel, Best *best)
{
    const Shortlist *s = search->product.bounds->list;
    const int64_t rows = search->product.rows;
    const float *upper = search->product.bounds->upper + panel * rows;
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++)
        if (upper[row] >= search->known[row].least && search->known[row].panel != panel)
            look(s, search->x + row * s->bytes.channels, panel, best + row), count++;
    return count;
}

/* The place of each row's largest logit, the first of equals, for at most ROWS_MAX rows, which go
   through a norm first, if there is one. Answers how many panels of the head it took; -1: of such
   rows nothing can be said here. */
INT8 int64_t preamble_shortlist(const Shortlist *s, const Norm *norm, const uint16_t *x,
                                int64_t rows, int64_t *best, int64_t threads)
{
    const int64_t channels = s->bytes.channels;
    const int64_t panels = (s->bytes.columns + COLUMNS - 1) / COLUMNS;
    const int64_t share = panels / (threads * 8) + 1;
    const int64_t known = threads * rows * sizeof(Known), upper = panels * rows * sizeof(float);
    const int64_t bytes = rows * groups_of(channels) * sizeof(Group);
    char *room = room_for(known + upper + bytes + (norm ? rows * channels * sizeof *x : 0));
    Doubt doubts[ROWS_MAX];
    Bounds bounds = {s, doubts, (float *)(room + known), (Known *)room};
    Search search = {.product = {.weight = &s->bytes, .rows = rows, .bounds = &bounds}};
    search.product.groups = (Group *)(room + known + upper);
    search.normed = (uint16_t *)(room + known + upper + bytes);
    search.x = norm ? search.normed : x;
    int64_t looked = rows, odd = 0;
    for (int64_t row = 0; row < rows; row++)
        search.best[row] = NONE;
    for (int64_t i = 0; i < threads * rows; i++)
        bounds.known[i] = (Known){-INFINITY, -1};
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : looked, odd)
    {
        Best mine[ROWS_MAX]; /* Of this thread. */
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            doubts[row] = begin(&search, norm, x, row);
            /* Beyond these squares are lost, or infinite; so is what is not finite. */
            odd += !(doubts[row].norm > 1e-10f && doubts[row].norm < 1e10f);
        }
#pragma omp for schedule(dynamic, share)
        for (int64_t panel = 0; panel < panels; panel++)
            multiply_bytes(&search.product, panel);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++)
            look_first(&search, row, threads);
        for (int64_t row = 0; row < rows; row++)
            mine[row] = NONE;
#pragma omp for schedule(dynamic, share) nowait
        for (int64_t panel = 0; panel < panels; panel++)
            looked += look_on(&search, panel, mine);
#pragma omp critical
        for (int64_t row = 0; row < rows; row++)
            if (better(mine[row], search.best[row]))
                search.best[row] = mine[row];
    }
    for (int64_t row = 0; row < rows; row++)
        best[row] = odd ? 0 : search.best[row].column;
    return odd ? -1 : looked;
}

#endif
