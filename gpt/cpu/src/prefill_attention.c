/* Attention of prompts: long runs of new tokens, whose keys are all in the pool.

   A piece is some queries of one group: of one run, or of several that begin with the same blocks,
   as tasks on one document do. It brings a segment's keys and values into panels, once for all who
   share them, and multiplies tiles of its queries with them; softmax goes on from segment to
   segment. Segments are cut at their places in the sequence, and a tile's queries are of one run,
   so a query's sums depend neither on how its prompt was cut nor on who is beside it. */

#include <omp.h>

#include "packed_weight.h"

#if defined(__x86_64__)

#define PIECE 192        /* Queries of a piece, where a head is no wider than 128. */
#define MADE (PIECE * 128)

typedef struct {
    int64_t run, first, count; /* Queries, numbered token by token, and in a token head by head. */
} Part;

typedef struct {
    int64_t pieces, groups, queries, width, block_tokens, table_width;
    int64_t window;          /* 0: none. */
    int64_t threads;
    double scale;
    const int64_t *row;      /* Where each run's first token stands in q. */
    const int64_t *past;     /* Its tokens that were there before. */
    const int64_t *sequence; /* Its row of the tables. */
    const int64_t *tables;   /* Blocks of each sequence. */
    const Part *parts;
    const int64_t *begins;   /* The first part of each piece, and of one after the last. */
    const int64_t *shared;   /* Keys of each piece, in whole segments, that its runs all have. */
    void *desks;             /* One for each thread: a stack may be too small for them. */
} Runs;

typedef struct {
    uint16_t keys[SEGMENT * WIDTH_MAX]; /* Panels of 32 keys. */
    uint16_t values[SEGMENT * WIDTH_MAX]; /* Panels of 32 channels; keys are side by side. */
    uint16_t queries[PIECE * 128];
    float made[MADE];
    float most[PIECE], sum[PIECE];
    int64_t end[PIECE]; /* A query sees the keys before this; 0: there is none at its place. */
} Desk;

/* Panels of the segment from `start` on: of its keys [low, high), and nothing in other places. */
BF16 static void lay_out(const Runs *r, int64_t run, int64_t group, const char *kv, int64_t start,
                         int64_t low, int64_t high, Desk *desk)
{
    static const uint16_t nothing[WIDTH_MAX];
    const uint16_t *keys[SEGMENT], *values[SEGMENT];
    const int64_t *table = r->tables + r->sequence[run] * r->table_width;
    const int64_t size = r->block_tokens, width = r->width;
    const int end = (high - start + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int i = 0; i < end; i++) {
        int64_t key = start + i;
        int there = key >= low && key < high;
        int64_t line = there ? table[key / size] * 2 * r->groups + group : 0;
        const uint16_t *from = (const uint16_t *)kv + (line * size + key % size) * width;
        keys[i] = there ? from : nothing;
        values[i] = there ? from + r->groups * size * width : nothing;
    }
    for (int i = 0; i < end; i += LANES) {
        uint16_t *to = desk->keys + i / COLUMNS * COLUMNS * width + i % COLUMNS * 2;
        for (int64_t c = 0; c < width / 2; c += LANES) {
            Ints x[LANES];
            __mmask16 lanes = first_lanes(width / 2 - c);
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++)
                x[t] = (Ints)_mm512_maskz_loadu_epi32(lanes, keys[i + t] + 2 * c);
            turn(x);
            if (lanes == 0xffff)
#pragma GCC unroll 16
                for (int t = 0; t < LANES; t++)
                    *(Ints *)(to + (c + t) * 2 * COLUMNS) = x[t];
            else
                for (int t = 0; c + t < width / 2; t++)
                    *(Ints *)(to + (c + t) * 2 * COLUMNS) = x[t];
        }
    }
    uint16_t order[2][32];
    for (int i = 0; i < 64; i++)
        order[i / 32][i % 32] = i / 2 + i % 2 * 32;
    const __m512i left = _mm512_loadu_si512(order[0]), right = _mm512_loadu_si512(order[1]);
    for (int64_t c = 0; c < width; c += COLUMNS) {
        __mmask32 lanes = width - c >= 32 ? 0xffffffff : (1u << (width - c)) - 1;
        uint16_t *to = desk->values + c * SEGMENT;
        for (int i = 0; i < end; i += 2, to += 2 * COLUMNS) {
            __m512i a = _mm512_maskz_loadu_epi16(lanes, values[i] + c);
            __m512i b = _mm512_maskz_loadu_epi16(lanes, values[i + 1] + c);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, left, b));
            _mm512_storeu_si512(to + COLUMNS, _mm512_permutex2var_epi16(a, right, b));
        }
    }
}

/* A row's scores of the columns [low, high) become weights; those beside them, from `begin` to
   `end`, nothing. What was made of keys before is to be multiplied by the answer. */
BF16 INLINE float weigh_row(const float *scores, uint16_t *weights, int begin, int end, int low,
                            int high, float scale, float *most, float *sum)
{
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int c = begin; c < end; c += LANES) {
        __mmask16 lanes = first_lanes(high - c) & ~first_lanes(low - c);
        top = _mm512_mask_max_ps(top, lanes, top, _mm512_loadu_ps(scores + c));
    }
    float best = _mm512_reduce_max_ps(top) * scale;
    best = best > *most ? best : *most;
    for (int c = begin; c < end; c += LANES) {
        __mmask16 lanes = first_lanes(high - c) & ~first_lanes(low - c);
        __m512 x = exponential(_mm512_loadu_ps(scores + c) * scale - best);
        x = _mm512_maskz_mov_ps(lanes, x);
        total += x;
        _mm256_storeu_si256((__m256i *)(weights + c), (__m256i)_mm512_cvtneps_pbh(x));
    }
    float before = *most == best ? 1.0f : expf(*most - best);
    *sum = *sum * before + _mm512_reduce_add_ps(total);
    *most = best;
    return before;
}

/* What the tile of queries from `first` on makes of the segment on the desk. */
BF16 static void attend_tile(const Runs *r, int64_t start, int64_t low, int64_t high,
                             int64_t first, Desk *desk)
{
    float scores[TILE][SEGMENT];
    uint16_t weights[TILE][SEGMENT];
    const int64_t width = r->width, wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    int seen[TILE][2]; /* Columns that a row sees: from, to. */
    int begin = SEGMENT, end = 0;
    for (int i = 0; i < TILE; i++) {
        int64_t last = desk->end[first + i];
        int64_t from = r->window && last - r->window > low ? last - r->window : low;
        int64_t to = last < high ? last : high;
        seen[i][0] = from - start;
        seen[i][1] = to - start;
        if (from < to) {
            begin = from - start < begin ? from - start : begin;
            end = to - start > end ? to - start : end;
        }
    }
    begin = begin / COLUMNS * COLUMNS;
    end = (end + COLUMNS - 1) / COLUMNS * COLUMNS;
    if (begin >= end)
        return;
    __m512 sum[TILE][2];
    for (int c = begin; c < end; c += COLUMNS) {
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++)
            sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        add(sum, desk->queries + first * width, width, desk->keys + c * width, width / 2, TILE);
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            _mm512_storeu_ps(scores[i] + c, sum[i][0]);
            _mm512_storeu_ps(scores[i] + c + LANES, sum[i][1]);
        }
    }
    float before[TILE];
    for (int i = 0; i < TILE; i++) {
        before[i] = 1;
        if (seen[i][0] < seen[i][1])
            before[i] = weigh_row(scores[i], weights[i], begin, end, seen[i][0], seen[i][1],
                                  r->scale, desk->most + first + i, desk->sum + first + i);
        else
            memset(weights[i] + begin, 0, (end - begin) * 2);
    }
    for (int64_t c = 0; c < width; c += COLUMNS) {
        float *made = desk->made + first * wide + c;
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            sum[i][0] = _mm512_loadu_ps(made + i * wide) * before[i];
            sum[i][1] = _mm512_loadu_ps(made + i * wide + LANES) * before[i];
        }
        add(sum, weights[0] + begin, SEGMENT, desk->values + c * SEGMENT + begin * COLUMNS,
            (end - begin) / 2, TILE);
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            _mm512_storeu_ps(made + i * wide, sum[i][0]);
            _mm512_storeu_ps(made + i * wide + LANES, sum[i][1]);
        }
    }
}

/* The segments of a run's keys from `low` to `high`, for the tiles from `first` to `last`. */
BF16 static void attend_keys(const Runs *r, int64_t run, int64_t group, const char *kv,
                             int64_t low, int64_t high, int64_t first, int64_t last, Desk *desk)
{
    for (int64_t start = low / SEGMENT * SEGMENT; start < high; start += SEGMENT) {
        int64_t from = start < low ? low : start;
        int64_t to = start + SEGMENT < high ? start + SEGMENT : high;
        lay_out(r, run, group, kv, start, from, to, desk);
        for (int64_t tile = first; tile < last; tile += TILE)
            attend_tile(r, start, from, to, tile, desk);
    }
}

/* Where in a batch a part's query stands: its token's row, and its head. */
INLINE int64_t token_of(const Runs *r, const Part *part, int64_t i)
{
    return r->row[part->run] + (part->first + i) / r->queries;
}

INLINE int64_t head_of(const Runs *r, const Part *part, int64_t group, int64_t i)
{
    return group * r->queries + (part->first + i) % r->queries;
}

INLINE int64_t tiles(const Part *part) { return (part->count + TILE - 1) / TILE * TILE; }

/* The first key that any of a part's queries sees. */
INLINE int64_t first_key(const Runs *r, const Part *part)
{
    int64_t end = r->past[part->run] + part->first / r->queries + 1;
    return r->window && end > r->window ? end - r->window : 0;
}

BF16 static void attend_piece(const Runs *r, int64_t piece, int64_t group, const uint16_t *q,
                              int64_t row_stride, int64_t head_stride, const char *kv,
                              uint16_t *out)
{
    Desk *desk = (Desk *)r->desks + omp_get_thread_num();
    const int64_t width = r->width, wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const Part *parts = r->parts + r->begins[piece], *last = r->parts + r->begins[piece + 1];
    const int64_t shared = r->shared[piece];
    int64_t at = 0, low = INT64_MAX;
    for (const Part *part = parts; part < last; at += tiles(part), part++) {
        for (int64_t i = 0; i < tiles(part); i++) {
            uint16_t *to = desk->queries + (at + i) * width;
            desk->most[at + i] = -INFINITY, desk->sum[at + i] = desk->end[at + i] = 0;
            if (i >= part->count) {
                memset(to, 0, width * 2);
                continue;
            }
            desk->end[at + i] = r->past[part->run] + (part->first + i) / r->queries + 1;
            memcpy(to, q + token_of(r, part, i) * row_stride +
                           head_of(r, part, group, i) * head_stride, width * 2);
        }
        low = first_key(r, part) < low ? first_key(r, part) : low;
    }
    memset(desk->made, 0, at * wide * sizeof(float));
    attend_keys(r, parts->run, group, kv, low, shared, 0, at, desk);
    at = 0;
    for (const Part *part = parts; part < last; at += tiles(part), part++) {
        int64_t from = first_key(r, part) > shared ? first_key(r, part) : shared;
        int64_t to = r->past[part->run] + (part->first + part->count - 1) / r->queries + 1;
        attend_keys(r, part->run, group, kv, from, to, at, at + tiles(part), desk);
        for (int64_t i = 0; i < part->count; i++) {
            int64_t head = head_of(r, part, group, i);
            uint16_t *made = out + (token_of(r, part, i) * r->groups * r->queries + head) * width;
            float share = 1.0f / desk->sum[at + i];
            for (int64_t c = 0; c < width; c += LANES) {
                __m512 x = _mm512_loadu_ps(desk->made + (at + i) * wide + c) * share;
                _mm256_mask_storeu_epi16(made + c, first_lanes(width - c),
                                         (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
    }
}

/* What a thread needs to work at. */
int64_t preamble_desk_bytes(void) { return sizeof(Desk); }

/* How many queries a piece has at most, those that fill a part's last tile counted. */
int64_t preamble_piece_queries(int64_t width)
{
    const int64_t wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    return MADE / wide < PIECE ? MADE / wide / TILE * TILE : PIECE;
}

/* Runs of bf16 rows of q (strides in numbers: of a row, of a head) to the same rows of `out`. */
int preamble_attend_runs(const void *runs, const void *q, int64_t row_stride,
                         int64_t head_stride, const void *kv, void *out)
{
    const Runs *r = runs;
    if (r->width > WIDTH_MAX || r->width % 2 || machine < AVX512_BF16)
        return 1;
    /* The last piece of a run sees the most keys, so it goes first. */
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads) if (r->threads > 1)
    for (int64_t task = r->pieces * r->groups - 1; task >= 0; task--)
        attend_piece(r, task / r->groups, task % r->groups, q, row_stride, head_stride, kv, out);
    return 0;
}

#endif
