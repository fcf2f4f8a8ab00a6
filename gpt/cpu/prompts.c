/* Attention of prompts: long runs of new tokens, whose keys are all in the pool.

   A piece is some of a run's queries of one group. It brings a segment's keys and values into
   panels, and multiplies tiles of its queries with them; softmax goes on from segment to segment.
   Segments are cut at their places in the sequence, so a query's sums do not depend on where its
   prompt was cut into chunks. */

#include <omp.h>

#include "panels.h"

#if defined(__x86_64__)

#define PIECE 192        /* Queries of a piece, where a head is no wider than 128. */
#define MADE (PIECE * 128)

typedef struct {
    int64_t runs, groups, queries, width, block_tokens, table_width;
    int64_t window;          /* 0: none. */
    int64_t threads;
    double scale;
    const int64_t *row;      /* Where each run's first token stands in q. */
    const int64_t *length;
    const int64_t *past;     /* Its tokens that were there before. */
    const int64_t *sequence; /* Its row of the tables. */
    const int64_t *tables;   /* Blocks of each sequence. */
    void *desks;             /* One for each thread: a stack may be too small for them. */
} Runs;

typedef struct {
    uint16_t keys[SEGMENT * WIDTH_MAX]; /* Panels of 32 keys. */
    uint16_t values[SEGMENT * WIDTH_MAX]; /* Panels of 32 channels; keys are side by side. */
    uint16_t queries[PIECE * 128];
    float made[MADE];
    float most[PIECE], sum[PIECE];
} Desk;

/* Where a piece stands. Its queries are numbered token by token, and in a token head by head. */
typedef struct {
    int64_t run, group, first, count;
} Piece;

/* Rows become columns. */
BF16 INLINE void turn(Ints *x)
{
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 1)) {
            Ints a = x[i], b = x[i + 1];
            x[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28,
                                           14, 30);
            x[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13,
                                               29, 15, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 2)) {
            Ints a = x[i], b = x[i + 2];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                                           28, 29);
            x[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27,
                                               14, 15, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 4)) {
            Ints a = x[i], b = x[i + 4];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                                           26, 27);
            x[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15,
                                               28, 29, 30, 31);
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 8)) {
            Ints a = x[i], b = x[i + 8];
            x[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                           22, 23);
            x[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                               28, 29, 30, 31);
        }
}

/* Panels of the segment from `start` on: of its keys [low, high), and nothing in other places. */
BF16 static void lay_out(const Runs *r, const Piece *piece, const char *kv, int64_t start,
                         int64_t low, int64_t high, Desk *desk)
{
    static const uint16_t nothing[WIDTH_MAX];
    const uint16_t *keys[SEGMENT], *values[SEGMENT];
    const int64_t *table = r->tables + r->sequence[piece->run] * r->table_width;
    const int64_t size = r->block_tokens, width = r->width;
    const int end = (high - start + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int i = 0; i < end; i++) {
        int64_t key = start + i;
        int there = key >= low && key < high;
        int64_t line = there ? table[key / size] * 2 * r->groups + piece->group : 0;
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
        __m512 x = (__m512)power(*(const Floats *)(scores + c) * scale - best);
        x = _mm512_maskz_mov_ps(lanes, x);
        total += x;
        _mm256_storeu_si256((__m256i *)(weights + c), (__m256i)_mm512_cvtneps_pbh(x));
    }
    float before = *most == best ? 1.0f : expf(*most - best);
    *sum = *sum * before + _mm512_reduce_add_ps(total);
    *most = best;
    return before;
}

/* What a tile of a piece's queries, `first` of them and on, makes of the segment on the desk. */
BF16 static void attend_tile(const Runs *r, const Piece *piece, int64_t start, int64_t low,
                             int64_t high, int64_t first, Desk *desk)
{
    float scores[TILE][SEGMENT];
    uint16_t weights[TILE][SEGMENT];
    const int64_t width = r->width, wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int rows = piece->count - first < TILE ? piece->count - first : TILE;
    int seen[TILE][2]; /* Columns that a row sees: from, to. */
    int begin = SEGMENT, end = 0;
    for (int i = 0; i < rows; i++) {
        int64_t place = r->past[piece->run] + (piece->first + first + i) / r->queries + 1;
        int64_t from = r->window && place - r->window > low ? place - r->window : low;
        int64_t to = place < high ? place : high;
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
        if (i < rows && seen[i][0] < seen[i][1])
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

BF16 static void attend_piece(const Runs *r, const Piece *piece, const uint16_t *q,
                              int64_t row_stride, int64_t head_stride, const char *kv,
                              uint16_t *out)
{
    Desk *desk = (Desk *)r->desks + omp_get_thread_num();
    const int64_t width = r->width, wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t whole = (piece->count + TILE - 1) / TILE * TILE;
    memset(desk->queries + piece->count * width, 0, (whole - piece->count) * width * 2);
    memset(desk->made, 0, whole * wide * sizeof(float));
    for (int64_t i = 0; i < piece->count; i++) {
        int64_t token = r->row[piece->run] + (piece->first + i) / r->queries;
        int64_t head = piece->group * r->queries + (piece->first + i) % r->queries;
        memcpy(desk->queries + i * width, q + token * row_stride + head * head_stride, width * 2);
        desk->most[i] = -INFINITY, desk->sum[i] = 0;
    }
    int64_t begin = r->past[piece->run] + piece->first / r->queries + 1;
    int64_t high = r->past[piece->run] + (piece->first + piece->count - 1) / r->queries + 1;
    int64_t low = r->window && begin > r->window ? begin - r->window : 0;
    for (int64_t start = low / SEGMENT * SEGMENT; start < high; start += SEGMENT) {
        int64_t from = start < low ? low : start;
        int64_t to = start + SEGMENT < high ? start + SEGMENT : high;
        lay_out(r, piece, kv, start, from, to, desk);
        for (int64_t first = 0; first < piece->count; first += TILE)
            attend_tile(r, piece, start, from, to, first, desk);
    }
    for (int64_t i = 0; i < piece->count; i++) {
        int64_t token = r->row[piece->run] + (piece->first + i) / r->queries;
        int64_t head = piece->group * r->queries + (piece->first + i) % r->queries;
        uint16_t *to = out + (token * r->groups * r->queries + head) * width;
        float share = 1.0f / desk->sum[i];
        for (int64_t c = 0; c < width; c += LANES) {
            __m512 x = _mm512_loadu_ps(desk->made + i * wide + c) * share;
            _mm256_mask_storeu_epi16(to + c, first_lanes(width - c),
                                     (__m256i)_mm512_cvtneps_pbh(x));
        }
    }
}

/* What a thread needs to work at. */
int64_t preamble_desk_bytes(void) { return sizeof(Desk); }

/* Runs of bf16 rows of q (strides in numbers: of a row, of a head) to the same rows of `out`. */
int preamble_attend_runs(const Runs *r, const uint16_t *q, int64_t row_stride,
                         int64_t head_stride, const char *kv, uint16_t *out)
{
    if (r->width > WIDTH_MAX || r->width % 2 || machine < AVX512_BF16)
        return 1;
    const int64_t wide = (r->width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t most = MADE / wide < PIECE ? MADE / wide / TILE * TILE : PIECE;
    int64_t pieces = 0;
    for (int64_t run = 0; run < r->runs; run++)
        pieces += (r->length[run] * r->queries + most - 1) / most * r->groups;
    /* The last piece of a run sees the most keys, so it goes first. */
#pragma omp parallel for schedule(dynamic, 1) num_threads(r->threads) if (r->threads > 1)
    for (int64_t task = 0; task < pieces; task++) {
        Piece piece = {0};
        int64_t left = pieces - 1 - task, cuts, each;
        for (;; piece.run++, left -= cuts * r->groups) {
            cuts = (r->length[piece.run] * r->queries + most - 1) / most;
            if (left < cuts * r->groups)
                break;
        }
        /* Pieces of a run are about equal, and of whole tiles. */
        each = (r->length[piece.run] * r->queries + cuts - 1) / cuts;
        each = (each + TILE - 1) / TILE * TILE;
        piece.group = left % r->groups;
        piece.first = left / r->groups * each;
        piece.count = r->length[piece.run] * r->queries - piece.first;
        piece.count = piece.count < each ? piece.count : each;
        if (piece.count > 0)
            attend_piece(r, &piece, q, row_stride, head_stride, kv, out);
    }
    return 0;
}

#endif
