/* Varlen attention of complete sequences for training, with its backward pass.

   A sequence may see the tokens of another sequence, its parent, before its own tokens. A flat row
   is a row of q, k or v, which contain the tokens of all sequences one after the other.

   32 queries of a head are computed at once, as the columns of a panel. Their scores have the shape
   (keys, 32). The next GEMM reads scores in this layout, so they are not transposed. The output is
   computed as (channels, 32), and is then transposed. */

#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Rows of a tile in `gemm_transposed`. */
#define TRANSPOSED_TILE_ROWS 8

typedef struct {
    int64_t sequences, tokens, heads, groups, width, threads;
    double scale;
    const int64_t *start, *length, *parent, *past; /* As in SequenceView, for each sequence. */
} VarlenArgs;

/* `dy`: the gradient of the output; NULL in the forward pass. `out`: the attention output, or in
   the backward pass the gradient of q. */
typedef struct {
    const uint16_t *q, *k, *v, *dy;
    uint16_t *out, *dk, *dv;
} VarlenTensors;

/* The scratch memory of a thread. */
typedef struct {
    float *scores, *dp, *transposed, *dk, *dv;
    uint16_t *q_panel, *dy_panel, *dy_pairs, *q_pairs, *p, *ds, *key_pairs, *p_panel;
} WorkerScratch;

/* A sequence and the keys that it sees. */
typedef struct {
    int64_t start, length; /* The flat row of the first own token, and the number of own tokens. */
    int64_t parent;        /* The flat row of the parent's first token. */
    int64_t past;          /* The number of the parent's tokens that are seen; 0: no parent. */
    int64_t keys;          /* past + length. */
    int64_t stride;        /* Elements between adjacent keys of a head. */
} SequenceView;

/* The flat row of a key that a sequence sees. */
INLINE int64_t flat_row(const SequenceView *s, int64_t key)
{
    return key < s->past ? s->parent + key : s->start + key - s->past;
}

/* Stores scale * from @ panel in `out` (rows, 32). `from`: `rows` contiguous keys or values. */
TARGET_AVX512_BF16 INLINE void gemm_rows_tile(const uint16_t *from, int64_t stride,
                                              const uint16_t *panel, int64_t width, float scale,
                                              float *out, int rows)
{
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    accumulate(sum, from, stride, panel, width / 2, rows);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(out + i * COLUMNS, sum[i][0] * scale);
        _mm512_storeu_ps(out + i * COLUMNS + LANES, sum[i][1] * scale);
    }
}

/* Multiplies x (rows, 32), one row per key, with a panel of 32 channels, and adds the products to
   the keys' fp32 sums in `out`. */
TARGET_AVX512_BF16 INLINE void gemm_accumulate_tile(float *out, int64_t stride, const uint16_t *x,
                                                    const uint16_t *panel, int rows)
{
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sum[i][0] = _mm512_loadu_ps(out + i * stride);
        sum[i][1] = _mm512_loadu_ps(out + i * stride + LANES);
    }
    accumulate(sum, x, COLUMNS, panel, LANES, rows);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(out + i * stride, sum[i][0]);
        _mm512_storeu_ps(out + i * stride + LANES, sum[i][1]);
    }
}

/* The number of keys, from `key` on, that are contiguous in memory; at most TILE. */
INLINE int64_t contiguous_keys(const SequenceView *s, int64_t key, int64_t keys)
{
    int64_t left = (key < s->past && s->past < keys ? s->past : keys) - key;
    return left < TILE ? left : TILE;
}

#define GEMM_ROWS_CASE(n)                                                                          \
    case n: gemm_rows_tile(from, s->stride, panel, width, scale, to, n); break;
#define GEMM_ACCUMULATE_CASE(n)                                                                    \
    case n: gemm_accumulate_tile(to, width, from, panels + c * COLUMNS, n); break;

/* Stores scale * x @ panel in `out` (keys, 32), for the first `keys` keys that a sequence sees. `x`
   has the keys or the values of all sequences. */
TARGET_AVX512_BF16 static void gemm_rows(const SequenceView *s, const uint16_t *x, int64_t keys,
                                         const uint16_t *panel, int64_t width, float scale,
                                         float *out)
{
    for (int64_t key = 0, rows; key < keys; key += rows) {
        const uint16_t *from = x + flat_row(s, key) * s->stride;
        float *to = out + key * COLUMNS;
        rows = contiguous_keys(s, key, keys);
        switch (rows) {
            FOR_EACH_TILE_ROWS(GEMM_ROWS_CASE)
        }
    }
}

/* Multiplies x (keys, 32) with the panels, one panel for each 32 channels, and adds the products to
   the keys' fp32 sums in `out`. */
TARGET_AVX512_BF16 static void gemm_accumulate(const SequenceView *s, float *out, const uint16_t *x,
                                               int64_t keys, const uint16_t *panels, int64_t width)
{
    for (int64_t key = 0, rows; key < keys; key += rows) {
        const uint16_t *from = x + key * COLUMNS;
        rows = contiguous_keys(s, key, keys);
        for (int64_t c = 0; c < width; c += COLUMNS) {
            float *to = out + flat_row(s, key) * width + c;
            switch (rows) {
                FOR_EACH_TILE_ROWS(GEMM_ACCUMULATE_CASE)
            }
        }
    }
}

TARGET_AVX512_BF16 INLINE void store_bf16(uint16_t *to, const float *from)
{
    __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from));
    _mm256_storeu_si256((__m256i_u *)to, (__m256i)rounded);
}

/* Multiplies interleaved keys (or values) with a panel, and stores the transposed product in `out`:
   `rows` rows, one per query, of `width` channels. */
TARGET_AVX512_BF16 static void gemm_transposed(const uint16_t *words, int64_t pairs,
                                               const uint16_t *panel, int64_t width,
                                               float *transposed, uint16_t *out, int64_t stride,
                                               int64_t rows)
{
    const uint32_t *from = (const uint32_t *)words;
    for (int64_t c = 0; c < width; c += TRANSPOSED_TILE_ROWS) {
        __m512 sum[TRANSPOSED_TILE_ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < TRANSPOSED_TILE_ROWS; i++)
            sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < pairs; k++) {
            __m512bh a = (__m512bh)_mm512_loadu_si512(panel + k * 64);
            __m512bh b = (__m512bh)_mm512_loadu_si512(panel + k * 64 + 32);
#pragma GCC unroll 8
            for (int i = 0; i < TRANSPOSED_TILE_ROWS; i++) {
                __m512bh key_pair = (__m512bh)_mm512_set1_epi32(from[k * width + c + i]);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], key_pair, a);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], key_pair, b);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < TRANSPOSED_TILE_ROWS; i++) {
            _mm512_storeu_ps(transposed + (c + i) * COLUMNS, sum[i][0]);
            _mm512_storeu_ps(transposed + (c + i) * COLUMNS + LANES, sum[i][1]);
        }
    }
    float square[LANES * LANES];
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t at = 0; at < rows; at += LANES) {
            transpose_block((const uint32_t *)transposed + c * COLUMNS + at, COLUMNS, LANES,
                            (uint32_t *)square, LANES);
            for (int64_t i = at; i < rows && i < at + LANES; i++)
                store_bf16(out + i * stride + c, square + (i - at) * LANES);
        }
}

/* Interleaves pairs of keys (or values): a 32-bit word holds one channel of both keys of a pair. */
TARGET_AVX512_BF16 static void interleave_keys(const SequenceView *s, const uint16_t *x,
                                               int64_t width, uint16_t *to)
{
    for (int64_t key = 0; key < s->keys; key += 2)
        interleave_rows(x + flat_row(s, key) * s->stride,
                        key + 1 < s->keys ? x + flat_row(s, key + 1) * s->stride : NULL, width,
                        to + key * width);
}

/* Packs `rows` rows, at most 32, into one panel for each 32 channels. The GEMM sums over the
   rows. */
TARGET_AVX512_BF16 static void pack_row_pairs(const uint16_t *x, int64_t stride, int64_t rows,
                                              int64_t width, uint16_t *to)
{
    memset(to, 0, COLUMNS * width * sizeof *to);
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t c = 0; c < width; c += COLUMNS)
            interleave_rows(x + row * stride + c,
                            row + 1 < rows ? x + (row + 1) * stride + c : NULL, COLUMNS,
                            to + (c + row) * COLUMNS);
}

/* The mask of the queries that do not see a key, for the first (`half` 0) or the last (`half` 1) 16
   of a tile's 32 queries. `distance`: position of the key - position of the tile's first query. */
INLINE Ints masked_lanes(int64_t distance, int half)
{
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lanes + half * LANES < (int32_t)distance;
}

/* Replaces scores (keys, 32) with probabilities. `own` is the index of the key of the first query's
   token. Query i sees the keys up to and including own + i. */
TARGET_AVX512_BF16 static void softmax_tile(float *scores, int64_t keys, int64_t own)
{
    for (int half = 0; half < 2; half++) {
        float *x = scores + half * LANES;
        const Floats zero = {0}, lowest = zero - INFINITY;
        Floats row_max = lowest, sum = zero;
        for (int64_t key = 0; key < keys; key++) {
            Floats y = *(Floats *)(x + key * COLUMNS);
            if (key > own)
                y = select_lanes(masked_lanes(key - own, half), lowest, y);
            row_max = (Floats)_mm512_max_ps((__m512)row_max, (__m512)y);
        }
        for (int64_t key = 0; key < keys; key++) {
            Floats y = (Floats)exp_avx512((__m512)(*(Floats *)(x + key * COLUMNS) - row_max));
            if (key > own)
                y = select_lanes(masked_lanes(key - own, half), zero, y);
            *(Floats *)(x + key * COLUMNS) = y;
            sum += y;
        }
        for (int64_t key = 0; key < keys; key++)
            *(Floats *)(x + key * COLUMNS) *= 1.0f / sum;
    }
}

/* Rounds x (keys, 32) to bf16, and appends TILE rows of zeros. */
TARGET_AVX512_BF16 static void round_rows(const float *x, int64_t keys, uint16_t *to)
{
    for (int64_t at = 0; at < keys * COLUMNS; at += LANES)
        store_bf16(to + at, x + at);
    memset(to + keys * COLUMNS, 0, TILE * COLUMNS * sizeof *to);
}

/* Packs bf16 rows of 32 numbers, one row per key, into a panel for a GEMM that sums over keys. */
TARGET_AVX512_BF16 static void pack_key_pairs(const uint16_t *rows, int64_t keys, uint16_t *panel)
{
    for (int64_t key = 0; key < keys; key += 2)
        interleave_rows(rows + key * COLUMNS, rows + (key + 1) * COLUMNS, COLUMNS,
                        panel + key * COLUMNS);
}

/* Softmax backward: replaces dP with dS = scale * P * (dP - sum(P * dP)). */
TARGET_AVX512_BF16 static void softmax_backward(const float *p, float *dp, int64_t keys,
                                                float scale)
{
    for (int half = 0; half < 2; half++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = half * LANES; at < keys * COLUMNS; at += COLUMNS)
            sum += _mm512_loadu_ps(p + at) * _mm512_loadu_ps(dp + at);
        for (int64_t at = half * LANES; at < keys * COLUMNS; at += COLUMNS) {
            __m512 y = (_mm512_loadu_ps(dp + at) - sum) * _mm512_loadu_ps(p + at);
            _mm512_storeu_ps(dp + at, y * scale);
        }
    }
}

/* Attention, or its backward pass, for up to 32 queries of a head from `first` on. */
TARGET_AVX512_BF16 static void attend_tile(const VarlenArgs *f, const VarlenTensors *t,
                                           const WorkerScratch *scratch, const SequenceView *s,
                                           int64_t group, int64_t head, int64_t first)
{
    const int64_t width = f->width, stride = f->heads * width;
    const int64_t offset = (s->start + first) * stride + head * width;
    const int64_t left = s->length - first, rows = left < COLUMNS ? left : COLUMNS;
    const int64_t own = s->past + first, keys = own + rows;
    const uint16_t *q = t->q + offset;
    pack_panel(q, stride, rows, width, scratch->q_panel);
    gemm_rows(s, t->k + group * width, keys, scratch->q_panel, width, f->scale, scratch->scores);
    softmax_tile(scratch->scores, keys, own);
    round_rows(scratch->scores, keys, scratch->p);
    if (t->dy) {
        const uint16_t *dy = t->dy + offset;
        pack_panel(dy, stride, rows, width, scratch->dy_panel);
        gemm_rows(s, t->v + group * width, keys, scratch->dy_panel, width, 1.0f, scratch->dp);
        softmax_backward(scratch->scores, scratch->dp, keys, f->scale);
        round_rows(scratch->dp, keys, scratch->ds);
        pack_row_pairs(dy, stride, rows, width, scratch->dy_pairs);
        gemm_accumulate(s, scratch->dv, scratch->p, keys, scratch->dy_pairs, width);
        pack_row_pairs(q, stride, rows, width, scratch->q_pairs);
        gemm_accumulate(s, scratch->dk, scratch->ds, keys, scratch->q_pairs, width);
    }
    pack_key_pairs(t->dy ? scratch->ds : scratch->p, keys, scratch->p_panel);
    gemm_transposed(scratch->key_pairs, (keys + 1) / 2, scratch->p_panel, width,
                    scratch->transposed, t->out + offset, stride, rows);
}

/* Attention, or its backward pass, of the sequences [s, end), for the heads of a group. */
TARGET_AVX512_BF16 static void attend_group(const VarlenArgs *f, const VarlenTensors *t,
                                            const WorkerScratch *scratch, int64_t group, int64_t s,
                                            int64_t end)
{
    const int64_t width = f->width, heads = f->heads / f->groups;
    for (; s < end; s++) {
        const SequenceView seen = {
            f->start[s],      f->length[s], f->parent[s], f->past[s], f->past[s] + f->length[s],
            f->groups * width};
        interleave_keys(&seen, (t->dy ? t->k : t->v) + group * width, width, scratch->key_pairs);
        for (int64_t head = group * heads; head < (group + 1) * heads; head++)
            for (int64_t first = 0; first < seen.length; first += COLUMNS)
                attend_tile(f, t, scratch, &seen, group, head, first);
    }
}

/* Rounds a group's fp32 gradients to bf16, and stores them. */
TARGET_AVX512_BF16 static void store_grads(const VarlenArgs *f, const float *from, uint16_t *to,
                                           int64_t group)
{
    for (int64_t token = 0; token < f->tokens; token++)
        for (int64_t c = 0; c < f->width; c += LANES)
            store_bf16(to + (token * f->groups + group) * f->width + c,
                       from + token * f->width + c);
}

static void *take_scratch(char **memory, int64_t bytes)
{
    void *buffer = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return buffer;
}

/* Lays out a thread's scratch memory, and returns its size. `memory` may be NULL if only the size
   is needed. */
static int64_t layout_scratch(const VarlenArgs *f, int64_t backward, char *memory,
                              WorkerScratch *scratch)
{
    int64_t keys = 0, width = f->width, sums = backward ? f->tokens * width * 4 : 0;
    for (int64_t s = 0; s < f->sequences; s++)
        if (f->past[s] + f->length[s] > keys)
            keys = f->past[s] + f->length[s];
    keys += TILE + 1;
    char *at = memory;
    scratch->scores = take_scratch(&at, keys * COLUMNS * 4);
    scratch->dp = take_scratch(&at, keys * COLUMNS * 4);
    scratch->transposed = take_scratch(&at, width * COLUMNS * 4);
    scratch->dk = take_scratch(&at, sums);
    scratch->dv = take_scratch(&at, sums);
    scratch->q_panel = take_scratch(&at, width * COLUMNS * 2);
    scratch->dy_panel = take_scratch(&at, width * COLUMNS * 2);
    scratch->dy_pairs = take_scratch(&at, width * COLUMNS * 2);
    scratch->q_pairs = take_scratch(&at, width * COLUMNS * 2);
    scratch->p = take_scratch(&at, keys * COLUMNS * 2);
    scratch->ds = take_scratch(&at, keys * COLUMNS * 2);
    scratch->p_panel = take_scratch(&at, keys * COLUMNS * 2);
    scratch->key_pairs = take_scratch(&at, keys * width * 2);
    return at - memory;
}

/* The context of the parallel loop over KV heads (backward pass) or over pairs of a sequence and a
   KV head (forward pass). */
typedef struct {
    const VarlenArgs *args;
    const VarlenTensors *tensors;
    char *memory; /* `scratch_bytes` for each thread. */
    int64_t scratch_bytes;
} VarlenLoop;

/* Several sequences may see the same key, so one thread sums all gradients of a KV head (group), in
   the order of the sequences. */
static void backward_range(void *context, int64_t first, int64_t end)
{
    const VarlenLoop *loop = context;
    const VarlenArgs *f = loop->args;
    WorkerScratch scratch;
    layout_scratch(f, 1, loop->memory + worker_index() * loop->scratch_bytes, &scratch);
    for (int64_t group = first; group < end; group++) {
        memset(scratch.dk, 0, f->tokens * f->width * 4);
        memset(scratch.dv, 0, f->tokens * f->width * 4);
        attend_group(f, loop->tensors, &scratch, group, 0, f->sequences);
        store_grads(f, scratch.dk, loop->tensors->dk, group);
        store_grads(f, scratch.dv, loop->tensors->dv, group);
    }
}

static void forward_range(void *context, int64_t first, int64_t end)
{
    const VarlenLoop *loop = context;
    const VarlenArgs *f = loop->args;
    WorkerScratch scratch;
    layout_scratch(f, 0, loop->memory + worker_index() * loop->scratch_bytes, &scratch);
    for (int64_t i = first; i < end; i++)
        attend_group(f, loop->tensors, &scratch, i % f->groups, i / f->groups, i / f->groups + 1);
}

/* Computes the gradients of q, k and v if dy is not NULL, else the attention output. Returns 1 if
   memory allocation fails. */
int preamble_varlen_attention(const VarlenArgs *f, const VarlenTensors *t)
{
    WorkerScratch unused_scratch;
    VarlenLoop loop = {f, t, NULL, layout_scratch(f, t->dy != NULL, NULL, &unused_scratch)};
    loop.memory = aligned_alloc(64, loop.scratch_bytes * f->threads);
    if (!loop.memory)
        return 1;
    if (t->dy)
        parallel_for(f->groups, 1, f->threads, IN_ORDER, backward_range, &loop);
    else
        parallel_for(f->sequences * f->groups, 1, f->threads, IN_ORDER, forward_range, &loop);
    free(loop.memory);
    return 0;
}

#endif
