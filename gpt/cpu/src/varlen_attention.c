/* Attention of whole sequences, and its gradients, for learning.

   A sequence may see another's tokens, its parent's, before its own. 32 queries of a head are
   worked on at once, as the columns of a panel: their scores lie key by key, so that a key's are a
   row of a product again, and nothing is turned but what comes out. */

#include "packed_weight.h"

#if defined(__x86_64__)
#include <omp.h>

#define SOME 8 /* Rows of a product whose panel is made anew for every 32 queries. */

typedef struct {
    int64_t sequences, tokens, heads, groups, width, threads;
    double scale;
    const int64_t *start, *length, *parent, *past; /* Of each sequence, in flat rows. */
} Families;

typedef struct {
    const uint16_t *q, *k, *v, *dy;
    uint16_t *out, *dk, *dv; /* `out`: what is attended; with dy, the gradient of q. */
} Tensors;

/* A thread's own memory. */
typedef struct {
    float *scores, *slopes, *turned, *dk, *dv;
    uint16_t *asked, *given, *few, *many, *p, *ds, *words, *panel;
} Desk;

/* A sequence, as one head of it sees keys. */
typedef struct {
    int64_t start, length, parent, past, keys, stride;
} Seen;

INLINE int64_t row_of(const Seen *s, int64_t key)
{
    return key < s->past ? s->parent + key : s->start + key - s->past;
}

/* `rows` keys (or values) times a panel. */
BF16 INLINE void against_rows(const uint16_t *from, int64_t stride, const uint16_t *panel,
                              int64_t width, float scale, float *out, int rows)
{
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    add(sum, from, stride, panel, width / 2, rows);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(out + i * COLUMNS, sum[i][0] * scale);
        _mm512_storeu_ps(out + i * COLUMNS + LANES, sum[i][1] * scale);
    }
}

/* Adds to `rows` keys' fp32 rows what rows of 32 numbers give with a panel. */
BF16 INLINE void onto_rows(float *out, int64_t stride, const uint16_t *x, const uint16_t *panel,
                           int rows)
{
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sum[i][0] = _mm512_loadu_ps(out + i * stride);
        sum[i][1] = _mm512_loadu_ps(out + i * stride + LANES);
    }
    add(sum, x, COLUMNS, panel, LANES, rows);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(out + i * stride, sum[i][0]);
        _mm512_storeu_ps(out + i * stride + LANES, sum[i][1]);
    }
}

#define EACH(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

/* How many keys from this one on lie together, at most as many as are worked on at once. */
INLINE int64_t together(const Seen *s, int64_t key, int64_t keys)
{
    int64_t left = (key < s->past && s->past < keys ? s->past : keys) - key;
    return left < TILE ? left : TILE;
}

#define AGAINST(n) case n: against_rows(from, s->stride, panel, width, scale, to, n); break;
#define ONTO(n) case n: onto_rows(to, width, from, panels + c * COLUMNS, n); break;

/* Keys (or values) times a panel: `keys` rows of 32 numbers. */
BF16 static void against(const Seen *s, const uint16_t *x, int64_t keys, const uint16_t *panel,
                         int64_t width, float scale, float *out)
{
    for (int64_t key = 0, rows; key < keys; key += rows) {
        const uint16_t *from = x + row_of(s, key) * s->stride;
        float *to = out + key * COLUMNS;
        rows = together(s, key, keys);
        switch (rows) { EACH(AGAINST) }
    }
}

/* Adds to keys' fp32 rows what rows of 32 numbers give with a panel for each 32 channels. */
BF16 static void onto(const Seen *s, float *out, const uint16_t *x, int64_t keys,
                      const uint16_t *panels, int64_t width)
{
    for (int64_t key = 0, rows; key < keys; key += rows) {
        const uint16_t *from = x + key * COLUMNS;
        rows = together(s, key, keys);
        for (int64_t c = 0; c < width; c += COLUMNS) {
            float *to = out + row_of(s, key) * width + c;
            switch (rows) { EACH(ONTO) }
        }
    }
}

BF16 INLINE void round_to(uint16_t *to, const float *from)
{
    __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from));
    _mm256_storeu_si256((__m256i_u *)to, (__m256i)rounded);
}

/* Channels' pairs of keys times a panel, turned: `rows` rows of `width` numbers. */
BF16 static void across(const uint16_t *words, int64_t pairs, const uint16_t *panel, int64_t width,
                        float *turned, uint16_t *out, int64_t stride, int64_t rows)
{
    const uint32_t *from = (const uint32_t *)words;
    for (int64_t c = 0; c < width; c += SOME) {
        __m512 sum[SOME][2];
#pragma GCC unroll 8
        for (int i = 0; i < SOME; i++)
            sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < pairs; k++) {
            __m512bh a = (__m512bh)_mm512_loadu_si512(panel + k * 64);
            __m512bh b = (__m512bh)_mm512_loadu_si512(panel + k * 64 + 32);
#pragma GCC unroll 8
            for (int i = 0; i < SOME; i++) {
                __m512bh both = (__m512bh)_mm512_set1_epi32(from[k * width + c + i]);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, a);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < SOME; i++) {
            _mm512_storeu_ps(turned + (c + i) * COLUMNS, sum[i][0]);
            _mm512_storeu_ps(turned + (c + i) * COLUMNS + LANES, sum[i][1]);
        }
    }
    float square[LANES * LANES];
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t at = 0; at < rows; at += LANES) {
            turn_from((const uint32_t *)turned + c * COLUMNS + at, COLUMNS, LANES,
                      (uint32_t *)square, LANES);
            for (int64_t i = at; i < rows && i < at + LANES; i++)
                round_to(out + i * stride + c, square + (i - at) * LANES);
        }
}

/* Keys (or values), two by two: a channel of both is a word. */
BF16 static void words_of(const Seen *s, const uint16_t *x, int64_t width, uint16_t *to)
{
    for (int64_t key = 0; key < s->keys; key += 2)
        pair_up(x + row_of(s, key) * s->stride,
                key + 1 < s->keys ? x + row_of(s, key + 1) * s->stride : NULL, width,
                to + key * width);
}

/* A panel for each 32 channels of `rows` rows, at most 32, as what is summed over. */
BF16 static void panels_over(const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                             uint16_t *to)
{
    memset(to, 0, COLUMNS * width * sizeof *to);
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t c = 0; c < width; c += COLUMNS)
            pair_up(x + row * stride + c, row + 1 < rows ? x + (row + 1) * stride + c : NULL,
                    COLUMNS, to + (c + row) * COLUMNS);
}

/* Which of 16 queries do not see a key that stands so many places behind the first of 32. */
INLINE Ints hidden(int64_t behind, int half)
{
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lanes + half * LANES < (int32_t)behind;
}

/* Scores (keys, 32) become probabilities; the keys behind `own` are not seen by all. */
BF16 static void soften(float *scores, int64_t keys, int64_t own)
{
    for (int half = 0; half < 2; half++) {
        float *x = scores + half * LANES;
        const Floats zero = {0}, least = zero - INFINITY;
        Floats most = least, sum = zero;
        for (int64_t key = 0; key < keys; key++) {
            Floats y = *(Floats *)(x + key * COLUMNS);
            if (key > own)
                y = either(hidden(key - own, half), least, y);
            most = (Floats)_mm512_max_ps((__m512)most, (__m512)y);
        }
        for (int64_t key = 0; key < keys; key++) {
            Floats y = power(*(Floats *)(x + key * COLUMNS) - most);
            if (key > own)
                y = either(hidden(key - own, half), zero, y);
            *(Floats *)(x + key * COLUMNS) = y;
            sum += y;
        }
        for (int64_t key = 0; key < keys; key++)
            *(Floats *)(x + key * COLUMNS) *= 1.0f / sum;
    }
}

/* fp32 rows of 32 numbers as bf16 ones, and zeros behind them. */
BF16 static void narrow(const float *x, int64_t keys, uint16_t *to)
{
    for (int64_t at = 0; at < keys * COLUMNS; at += LANES)
        round_to(to + at, x + at);
    memset(to + keys * COLUMNS, 0, TILE * COLUMNS * sizeof *to);
}

/* Such rows as a panel that sums over keys. */
BF16 static void paired(const uint16_t *rows, int64_t keys, uint16_t *panel)
{
    for (int64_t key = 0; key < keys; key += 2)
        pair_up(rows + key * COLUMNS, rows + (key + 1) * COLUMNS, COLUMNS, panel + key * COLUMNS);
}

/* What scores get of what probabilities get. */
BF16 static void through(const float *p, float *slopes, int64_t keys, float scale)
{
    for (int half = 0; half < 2; half++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = half * LANES; at < keys * COLUMNS; at += COLUMNS)
            sum += _mm512_loadu_ps(p + at) * _mm512_loadu_ps(slopes + at);
        for (int64_t at = half * LANES; at < keys * COLUMNS; at += COLUMNS) {
            __m512 y = (_mm512_loadu_ps(slopes + at) - sum) * _mm512_loadu_ps(p + at);
            _mm512_storeu_ps(slopes + at, y * scale);
        }
    }
}

/* 32 queries of a head, or as many as there are from `first` on. */
BF16 static void some(const Families *f, const Tensors *t, const Desk *desk, const Seen *s,
                      int64_t group, int64_t head, int64_t first)
{
    const int64_t width = f->width, stride = f->heads * width;
    const int64_t place = (s->start + first) * stride + head * width;
    const int64_t left = s->length - first, rows = left < COLUMNS ? left : COLUMNS;
    const int64_t own = s->past + first, keys = own + rows;
    const uint16_t *q = t->q + place;
    panel_of(q, stride, rows, width, desk->asked);
    against(s, t->k + group * width, keys, desk->asked, width, f->scale, desk->scores);
    soften(desk->scores, keys, own);
    narrow(desk->scores, keys, desk->p);
    if (t->dy) {
        const uint16_t *dy = t->dy + place;
        panel_of(dy, stride, rows, width, desk->given);
        against(s, t->v + group * width, keys, desk->given, width, 1.0f, desk->slopes);
        through(desk->scores, desk->slopes, keys, f->scale);
        narrow(desk->slopes, keys, desk->ds);
        panels_over(dy, stride, rows, width, desk->few);
        onto(s, desk->dv, desk->p, keys, desk->few, width);
        panels_over(q, stride, rows, width, desk->many);
        onto(s, desk->dk, desk->ds, keys, desk->many, width);
    }
    paired(t->dy ? desk->ds : desk->p, keys, desk->panel);
    across(desk->words, (keys + 1) / 2, desk->panel, width, desk->turned, t->out + place, stride,
           rows);
}

/* Sequences from `s` on to the end, and the heads of a group. */
BF16 static void of_group(const Families *f, const Tensors *t, const Desk *desk, int64_t group,
                          int64_t s, int64_t end)
{
    const int64_t width = f->width, heads = f->heads / f->groups;
    for (; s < end; s++) {
        const Seen seen = {f->start[s], f->length[s], f->parent[s], f->past[s],
                           f->past[s] + f->length[s], f->groups * width};
        words_of(&seen, (t->dy ? t->k : t->v) + group * width, width, desk->words);
        for (int64_t head = group * heads; head < (group + 1) * heads; head++)
            for (int64_t first = 0; first < seen.length; first += COLUMNS)
                some(f, t, desk, &seen, group, head, first);
    }
}

/* A group's sums, rounded to where they go. */
BF16 static void put(const Families *f, const float *from, uint16_t *to, int64_t group)
{
    for (int64_t token = 0; token < f->tokens; token++)
        for (int64_t c = 0; c < f->width; c += LANES)
            round_to(to + (token * f->groups + group) * f->width + c, from + token * f->width + c);
}

static void *taken(char **memory, int64_t bytes)
{
    void *found = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return found;
}

/* Lays a thread's memory out; without memory, how much it is. */
static int64_t lay(const Families *f, int64_t backward, char *memory, Desk *desk)
{
    int64_t keys = 0, width = f->width, sums = backward ? f->tokens * width * 4 : 0;
    for (int64_t s = 0; s < f->sequences; s++)
        if (f->past[s] + f->length[s] > keys)
            keys = f->past[s] + f->length[s];
    keys += TILE + 1;
    char *at = memory;
    desk->scores = taken(&at, keys * COLUMNS * 4);
    desk->slopes = taken(&at, keys * COLUMNS * 4);
    desk->turned = taken(&at, width * COLUMNS * 4);
    desk->dk = taken(&at, sums);
    desk->dv = taken(&at, sums);
    desk->asked = taken(&at, width * COLUMNS * 2);
    desk->given = taken(&at, width * COLUMNS * 2);
    desk->few = taken(&at, width * COLUMNS * 2);
    desk->many = taken(&at, width * COLUMNS * 2);
    desk->p = taken(&at, keys * COLUMNS * 2);
    desk->ds = taken(&at, keys * COLUMNS * 2);
    desk->panel = taken(&at, keys * COLUMNS * 2);
    desk->words = taken(&at, keys * width * 2);
    return at - memory;
}

/* With dy the gradients of q, k and v; else what is attended. 1: there is no memory for it. */
int preamble_attend_families(const Families *f, const Tensors *t)
{
    Desk desk;
    const int64_t size = lay(f, t->dy != NULL, NULL, &desk);
    char *memory = aligned_alloc(64, size * f->threads);
    if (!memory)
        return 1;
#pragma omp parallel num_threads(f->threads) private(desk)
    {
        lay(f, t->dy != NULL, memory + omp_get_thread_num() * size, &desk);
        if (t->dy) {
            /* What several sequences see is summed by one thread, in their order. */
#pragma omp for schedule(dynamic, 1)
            for (int64_t group = 0; group < f->groups; group++) {
                memset(desk.dk, 0, f->tokens * f->width * 4);
                memset(desk.dv, 0, f->tokens * f->width * 4);
                of_group(f, t, &desk, group, 0, f->sequences);
                put(f, desk.dk, t->dk, group);
                put(f, desk.dv, t->dv, group);
            }
        } else {
#pragma omp for schedule(dynamic, 1) collapse(2)
            for (int64_t s = 0; s < f->sequences; s++)
                for (int64_t group = 0; group < f->groups; group++)
                    of_group(f, t, &desk, group, s, s + 1);
        }
    }
    free(memory);
    return 0;
}

#endif
