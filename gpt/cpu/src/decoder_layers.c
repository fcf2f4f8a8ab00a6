/* Layers in one call, one kernel after another: for few rows it would cost more to come here for
   each of them than to do what they do. */

#include "packed_weight.h"

#if defined(__x86_64__)

typedef struct {
    Norm norm; /* In front of attention. */
    Weight qkv;
    const uint16_t *qkv_bias;
    Norm of_queries, of_keys; /* Of each head. */
    Weight proj;
    const uint16_t *proj_bias;
    Norm of_mlp;
    Weight fc1; /* No panels: only attention is done here, in the last layer. */
    const uint16_t *fc1_bias;
    Weight fc2;
    const uint16_t *fc2_bias;
    int64_t place; /* In the pool. */
} Layer;

/* What its layers have in common. */
typedef struct {
    int64_t layers, hidden, groups, queries, width, ffn;
    int64_t activation, parallel; /* The MLP reads what attention reads. */
    int64_t turned, interleaved;  /* Channels of a head that are rotated, and how they are paired. */
    const Layer *each;
} Stretch;

typedef struct {
    int64_t rows, threads;
    uint16_t *x;               /* What comes in, and in the end what comes out. */
    uint16_t *memory;          /* As much as `preamble_layers_numbers` says. */
    const float *cos, *sin;    /* (rows, turned / 2) */
    const int64_t *blocks, *places; /* Of the pool: where each row's keys and values go. */
    int64_t block_tokens;
    char *pool;
    int64_t layer_bytes;
    const void *singles, *runs; /* Rows and Runs; NULL: there are none. */
    /* Whose results of the stretch's last layer are read, where not all are, and how many: the other
       rows stay as they come to its second half. NULL: all. */
    const int64_t *asked;
    int64_t count;
} Pass;

/* Where a pass keeps what it makes on the way. */
typedef struct {
    uint16_t *qkv, *q, *y, *after, *inner;
} Rooms;

static int64_t rooms(const Stretch *s, int64_t rows, uint16_t *memory, Rooms *to)
{
    const int64_t heads = s->groups * s->queries * s->width;
    const int64_t q = heads > s->hidden ? heads : s->hidden; /* Later some rows of x lie there. */
    const int64_t sizes[] = {heads + 2 * s->groups * s->width, q, heads, s->hidden, s->ffn};
    uint16_t **each[] = {&to->qkv, &to->q, &to->y, &to->after, &to->inner};
    int64_t all = 0;
    for (int i = 0; i < 5; i++) {
        *each[i] = memory + all;
        all += (rows * sizes[i] + 31) / 32 * 32;
    }
    return all;
}

/* How many numbers of bf16 a pass needs for its work. */
int64_t preamble_layers_numbers(const Stretch *s, int64_t rows)
{
    static uint16_t nowhere[1];
    Rooms some;
    return rooms(s, rows, nowhere, &some);
}

BF16 INLINE __m512i rounded(__m512 x)
{
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}

/* Turns the first channels of a head; `cos` and `sin` are for pairs of them. */
BF16 static void turn_head(uint16_t *x, const float *cos, const float *sin, int64_t pairs,
                           int64_t interleaved)
{
    for (int64_t c = 0; c < pairs; c += LANES) {
        const __mmask16 there = first_lanes(pairs - c);
        const __m512 by = _mm512_maskz_loadu_ps(there, cos + c);
        const __m512 up = _mm512_maskz_loadu_ps(there, sin + c);
        if (interleaved) {
            __m512i both = _mm512_maskz_loadu_epi32(there, x + 2 * c);
            __m512 a = (__m512)_mm512_slli_epi32(both, 16);
            __m512 b = (__m512)_mm512_andnot_si512(_mm512_set1_epi32(0xffff), both);
            both = _mm512_slli_epi32(rounded(b * by + a * up), 16);
            both = _mm512_or_si512(both, rounded(a * by - b * up));
            _mm512_mask_storeu_epi32(x + 2 * c, there, both);
        } else {
            __m512 a = widened(x + c, there), b = widened(x + pairs + c, there);
            _mm256_mask_storeu_epi16(x + c, there, (__m256i)_mm512_cvtneps_pbh(a * by - b * up));
            _mm256_mask_storeu_epi16(x + pairs + c, there,
                                     (__m256i)_mm512_cvtneps_pbh(b * by + a * up));
        }
    }
}

/* The same on a machine with less. */
static void turn_head_plain(uint16_t *x, const float *cos, const float *sin, int64_t pairs,
                            int64_t interleaved)
{
    for (int64_t c = 0; c < pairs; c++) {
        uint16_t *first = x + (interleaved ? 2 * c : c);
        uint16_t *second = x + (interleaved ? 2 * c + 1 : pairs + c);
        const float a = of_bf16(*first), b = of_bf16(*second);
        *first = to_bf16(a * cos[c] - b * sin[c]);
        *second = to_bf16(b * cos[c] + a * sin[c]);
    }
}

/* One head of queries or keys, normed and turned, to where it belongs. */
static void bring(const Stretch *s, const Pass *p, const Norm *norm, int64_t row,
                  const uint16_t *from, uint16_t *to)
{
    if (norm->scale)
        norm_row(norm, from, s->width, to);
    else
        memcpy(to, from, s->width * sizeof *to);
    if (s->turned)
        (machine < AVX512_BF16 ? turn_head_plain : turn_head)(
            to, p->cos + row * s->turned / 2, p->sin + row * s->turned / 2, s->turned / 2,
            s->interleaved);
}

/* A row's queries, side by side; its keys and values, into the pool. */
static void spread(const Stretch *s, const Pass *p, const Layer *layer, int64_t row,
                   const uint16_t *qkv, uint16_t *q)
{
    uint16_t *pool = (uint16_t *)(p->pool + layer->place * p->layer_bytes);
    const int64_t width = s->width, lines = s->groups * p->block_tokens;
    const uint16_t *from = qkv + row * s->groups * (s->queries + 2) * width;
    uint16_t *queries = q + row * s->groups * s->queries * width;
    for (int64_t group = 0; group < s->groups; group++) {
        for (int64_t i = 0; i < s->queries; i++, from += width, queries += width)
            bring(s, p, &layer->of_queries, row, from, queries);
        int64_t line = p->blocks[row] * 2 * lines + group * p->block_tokens + p->places[row];
        bring(s, p, &layer->of_keys, row, from, pool + line * width);
        memcpy(pool + (line + lines) * width, from + width, width * sizeof *pool);
        from += 2 * width;
    }
}

/* What follows attention, for rows of x and what attention made of them; x becomes the result. */
static void second_half(const Stretch *s, const Layer *l, const Rooms *at, uint16_t *x,
                        const uint16_t *y, int64_t rows, int64_t threads)
{
    uint16_t *after = l->fc1.panels ? at->after : x;
    preamble_multiply(&l->proj, y, rows, l->proj_bias, 0, x, after, threads, NULL);
    if (!l->fc1.panels)
        return;
    preamble_multiply(&l->fc1, s->parallel ? x : after, rows, l->fc1_bias, s->activation, NULL,
                      at->inner, threads, &l->of_mlp);
    preamble_multiply(&l->fc2, at->inner, rows, l->fc2_bias, 0, after, x, threads, NULL);
}

/* The same for those rows alone that are asked for. */
static void second_half_of_some(const Stretch *s, const Pass *p, const Layer *l, const Rooms *at)
{
    const int64_t wide = s->groups * s->queries * s->width, hidden = s->hidden;
    uint16_t *x = at->q, *y = at->qkv; /* Both have been read. */
    for (int64_t i = 0; i < p->count; i++) {
        memcpy(x + i * hidden, p->x + p->asked[i] * hidden, hidden * sizeof *x);
        memcpy(y + i * wide, at->y + p->asked[i] * wide, wide * sizeof *y);
    }
    second_half(s, l, at, x, y, p->count, p->threads);
    for (int64_t i = 0; i < p->count; i++)
        memcpy(p->x + p->asked[i] * hidden, x + i * hidden, hidden * sizeof *x);
}

/* Rows go through all layers of a stretch. Not 0: heads that the library does not serve. */
int preamble_layers(const Stretch *s, const Pass *p)
{
    Rooms at;
    rooms(s, p->rows, p->memory, &at);
    const int64_t head = s->width, row = s->groups * s->queries * head, threads = p->threads;
    for (const Layer *l = s->each; l < s->each + s->layers; l++) {
        char *pool = p->pool + l->place * p->layer_bytes;
        preamble_multiply(&l->qkv, p->x, p->rows, l->qkv_bias, 0, NULL, at.qkv, threads, &l->norm);
#pragma omp parallel for num_threads(threads) if (threads > 1 && p->rows >= LANES)
        for (int64_t i = 0; i < p->rows; i++)
            spread(s, p, l, i, at.qkv, at.q);
        if (p->singles && preamble_attend(p->singles, at.q, row, head, pool, at.y))
            return 1;
        if (p->runs && preamble_attend_runs(p->runs, at.q, row, head, pool, at.y))
            return 1;
        if (p->asked && l == s->each + s->layers - 1)
            second_half_of_some(s, p, l, &at);
        else
            second_half(s, l, &at, p->x, at.y, p->rows, threads);
    }
    return 0;
}

#endif
