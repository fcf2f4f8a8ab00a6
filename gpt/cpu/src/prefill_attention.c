/* Prefill attention over the paged KV cache: runs of new tokens, with shared-prefix batching.

   A run is the new tokens of one sequence. A task is some queries of one KV head, from one run or
   from several runs whose sequences begin with the same blocks, for example prompts about one
   document. A segment is the keys between two multiples of SEGMENT positions. A task packs a
   segment's keys and values into panels, once for all runs that share the segment, and multiplies
   tiles of its queries with them. The softmax is updated from segment to segment.

   Segments begin at multiples of SEGMENT in the sequence, independently of where a run begins, and
   a tile's queries belong to one run. Therefore a query's sums depend neither on the chunks of its
   prompt nor on other runs. */

#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

#define TASK_QUERIES 192 /* Maximum queries of a task, for heads of at most 128 channels. */
#define OUT_ELEMENTS (TASK_QUERIES * 128)

/* `count` queries of a run, from query `first` on. Let n be the number of query heads per KV head.
   Query i of a run belongs to the run's token i / n, and is the KV head's query head i % n. */
typedef struct {
    int64_t run, first, count;
} RunPart;

/* The prefill runs of a step. All layers use the same arguments. `groups`: KV heads; `queries`:
   query heads per KV head; `width`: channels per head; `table_width`: blocks per row of the block
   tables. */
typedef struct {
    int64_t tasks, groups, queries, width, block_tokens, table_width;
    int64_t window; /* Sliding window in tokens; 0: no window. */
    int64_t threads;
    double scale;
    const int64_t *row;          /* The row of each run's first token in q. */
    const int64_t *past;         /* The number of cached tokens before each run. */
    const int64_t *sequence;     /* Each run's row in the block tables. */
    const int64_t *block_tables; /* Block numbers of each sequence: (sequences, table_width). */
    const RunPart *parts;
    const int64_t *part_starts; /* The index of each task's first part, then the number of parts. */
    const int64_t *shared_keys; /* Number of keys that all runs of a task share; 0 for one run. */
    void *scratch;              /* One WorkerScratch per thread; it may be too large for a stack. */
} PrefillArgs;

typedef struct {
    uint16_t keys[SEGMENT * HEAD_DIM_MAX]; /* Panels of 32 keys. */
    /* Panels of 32 channels; each 32-bit word holds one channel of two adjacent keys. */
    uint16_t values[SEGMENT * HEAD_DIM_MAX];
    uint16_t queries[TASK_QUERIES * 128];
    float out[OUT_ELEMENTS];
    float max[TASK_QUERIES], sum[TASK_QUERIES];
    float slope[TASK_QUERIES]; /* ALiBi slopes, divided by the scale; 0 without ALiBi. */
    /* Each query sees the keys before this position; 0: the query is padding. */
    int64_t end[TASK_QUERIES];
} WorkerScratch;

/* Packs the segment that begins at `start`: the keys and values of the positions [low, high), and
   zeros for the other positions. */
TARGET_AVX512_BF16 static void pack_segment(const PrefillArgs *r, int64_t run, int64_t group,
                                            const char *kv, int64_t start, int64_t low,
                                            int64_t high, WorkerScratch *scratch)
{
    static const uint16_t zeros[HEAD_DIM_MAX];
    const uint16_t *keys[SEGMENT], *values[SEGMENT];
    const int64_t *table = r->block_tables + r->sequence[run] * r->table_width;
    const int64_t size = r->block_tokens, width = r->width;
    const int end = (high - start + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int i = 0; i < end; i++) {
        int64_t key = start + i;
        int in_range = key >= low && key < high;
        int64_t block_row = in_range ? table[key / size] * 2 * r->groups + group : 0;
        const uint16_t *from = (const uint16_t *)kv + (block_row * size + key % size) * width;
        keys[i] = in_range ? from : zeros;
        values[i] = in_range ? from + r->groups * size * width : zeros;
    }
    for (int i = 0; i < end; i += LANES) {
        uint16_t *to = scratch->keys + i / COLUMNS * COLUMNS * width + i % COLUMNS * 2;
        for (int64_t c = 0; c < width / 2; c += LANES) {
            Ints x[LANES];
            __mmask16 mask = lane_mask(width / 2 - c);
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++)
                x[t] = (Ints)_mm512_maskz_loadu_epi32(mask, keys[i + t] + 2 * c);
            transpose_16x16(x);
            if (mask == 0xffff)
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
    const __m512i low_order = _mm512_loadu_si512(order[0]),
                  high_order = _mm512_loadu_si512(order[1]);
    for (int64_t c = 0; c < width; c += COLUMNS) {
        __mmask32 mask = width - c >= 32 ? 0xffffffff : (1u << (width - c)) - 1;
        uint16_t *to = scratch->values + c * SEGMENT;
        for (int i = 0; i < end; i += 2, to += 2 * COLUMNS) {
            __m512i a = _mm512_maskz_loadu_epi16(mask, values[i] + c);
            __m512i b = _mm512_maskz_loadu_epi16(mask, values[i + 1] + c);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low_order, b));
            _mm512_storeu_si512(to + COLUMNS, _mm512_permutex2var_epi16(a, high_order, b));
        }
    }
}

/* Stores in `weights` the softmax weights of a query for the segment's keys [low, high), and zeros
   for the other keys of [begin, end). Updates the query's `max` and `sum`. Returns the factor by
   which the output of earlier segments must be multiplied. */
TARGET_AVX512_BF16 INLINE float softmax_row(const float *scores, uint16_t *weights, int begin,
                                            int end, int low, int high, float scale, float *max,
                                            float *sum)
{
    __m512 lane_max = _mm512_set1_ps(-INFINITY), lane_sum = _mm512_setzero_ps();
    for (int c = begin; c < end; c += LANES) {
        __mmask16 mask = lane_mask(high - c) & ~lane_mask(low - c);
        lane_max = _mm512_mask_max_ps(lane_max, mask, lane_max, _mm512_loadu_ps(scores + c));
    }
    float new_max = _mm512_reduce_max_ps(lane_max) * scale;
    new_max = new_max > *max ? new_max : *max;
    for (int c = begin; c < end; c += LANES) {
        __mmask16 mask = lane_mask(high - c) & ~lane_mask(low - c);
        __m512 x = exp_avx512(_mm512_loadu_ps(scores + c) * scale - new_max);
        x = _mm512_maskz_mov_ps(mask, x);
        lane_sum += x;
        _mm256_storeu_si256((__m256i *)(weights + c), (__m256i)_mm512_cvtneps_pbh(x));
    }
    float rescale = *max == new_max ? 1.0f : expf(*max - new_max);
    *sum = *sum * rescale + _mm512_reduce_add_ps(lane_sum);
    *max = new_max;
    return rescale;
}

/* Computes attention over the packed segment, for the tile of queries that begins at `first`. */
TARGET_AVX512_BF16 static void attend_tile(const PrefillArgs *r, int64_t start, int64_t low,
                                           int64_t high, int64_t first, WorkerScratch *scratch)
{
    float scores[TILE][SEGMENT];
    uint16_t weights[TILE][SEGMENT];
    const int64_t width = r->width, padded_width = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    int visible[TILE][2]; /* The keys of the segment that each query sees: begin, end. */
    int begin = SEGMENT, end = 0;
    for (int i = 0; i < TILE; i++) {
        int64_t last = scratch->end[first + i];
        int64_t from = r->window && last - r->window > low ? last - r->window : low;
        int64_t to = last < high ? last : high;
        visible[i][0] = from - start;
        visible[i][1] = to - start;
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
        accumulate(sum, scratch->queries + first * width, width, scratch->keys + c * width,
                   width / 2, TILE);
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            _mm512_storeu_ps(scores[i] + c, sum[i][0]);
            _mm512_storeu_ps(scores[i] + c + LANES, sum[i][1]);
        }
    }
    float rescale[TILE];
    for (int i = 0; i < TILE; i++) {
        rescale[i] = 1;
        if (scratch->slope[first + i] != 0)
            add_alibi(scores[i] + begin, end - begin, scratch->slope[first + i],
                      scratch->end[first + i] - 1 - start - begin);
        if (visible[i][0] < visible[i][1])
            rescale[i] =
                softmax_row(scores[i], weights[i], begin, end, visible[i][0], visible[i][1],
                            r->scale, scratch->max + first + i, scratch->sum + first + i);
        else
            memset(weights[i] + begin, 0, (end - begin) * 2);
    }
    for (int64_t c = 0; c < width; c += COLUMNS) {
        float *out = scratch->out + first * padded_width + c;
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            sum[i][0] = _mm512_loadu_ps(out + i * padded_width) * rescale[i];
            sum[i][1] = _mm512_loadu_ps(out + i * padded_width + LANES) * rescale[i];
        }
        accumulate(sum, weights[0] + begin, SEGMENT,
                   scratch->values + c * SEGMENT + begin * COLUMNS, (end - begin) / 2, TILE);
#pragma GCC unroll 12
        for (int i = 0; i < TILE; i++) {
            _mm512_storeu_ps(out + i * padded_width, sum[i][0]);
            _mm512_storeu_ps(out + i * padded_width + LANES, sum[i][1]);
        }
    }
}

/* Attention of the task's queries [first, last) over a run's keys [low, high), segment by segment
   and tile by tile. */
TARGET_AVX512_BF16 static void attend_keys(const PrefillArgs *r, int64_t run, int64_t group,
                                           const char *kv, int64_t low, int64_t high, int64_t first,
                                           int64_t last, WorkerScratch *scratch)
{
    for (int64_t start = low / SEGMENT * SEGMENT; start < high; start += SEGMENT) {
        int64_t from = start < low ? low : start;
        int64_t to = start + SEGMENT < high ? start + SEGMENT : high;
        pack_segment(r, run, group, kv, start, from, to, scratch);
        for (int64_t tile = first; tile < last; tile += TILE)
            attend_tile(r, start, from, to, tile, scratch);
    }
}

/* Query i of a part belongs to one token. Returns the row of this token in q. */
INLINE int64_t token_row(const PrefillArgs *r, const RunPart *part, int64_t i)
{
    return r->row[part->run] + (part->first + i) / r->queries;
}

/* Returns the query head of query i of a part. */
INLINE int64_t query_head(const PrefillArgs *r, const RunPart *part, int64_t group, int64_t i)
{
    return group * r->queries + (part->first + i) % r->queries;
}

INLINE int64_t padded_queries(const RunPart *part)
{
    return (part->count + TILE - 1) / TILE * TILE;
}

/* The first key that a part's first query sees. No query of the part sees an earlier key. */
INLINE int64_t first_visible_key(const PrefillArgs *r, const RunPart *part)
{
    int64_t end = r->past[part->run] + part->first / r->queries + 1;
    return r->window && end > r->window ? end - r->window : 0;
}

TARGET_AVX512_BF16 static void attend_task(const PrefillArgs *r, int64_t task, int64_t group,
                                           const uint16_t *q, int64_t row_stride,
                                           int64_t head_stride, const float *sinks,
                                           const float *slopes, const char *kv, uint16_t *out)
{
    WorkerScratch *scratch = (WorkerScratch *)r->scratch + worker_index();
    const int64_t width = r->width, padded_width = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const RunPart *parts = r->parts + r->part_starts[task],
                  *last = r->parts + r->part_starts[task + 1];
    const int64_t shared_keys = r->shared_keys[task];
    int64_t at = 0, low = INT64_MAX; /* `at`: index of the part's first query in `scratch`. */
    for (const RunPart *part = parts; part < last; at += padded_queries(part), part++) {
        for (int64_t i = 0; i < padded_queries(part); i++) {
            uint16_t *to = scratch->queries + (at + i) * width;
            scratch->max[at + i] = -INFINITY, scratch->sum[at + i] = scratch->end[at + i] = 0;
            scratch->slope[at + i] = 0;
            if (i >= part->count) {
                memset(to, 0, width * 2);
                continue;
            }
            scratch->end[at + i] = r->past[part->run] + (part->first + i) / r->queries + 1;
            if (slopes)
                scratch->slope[at + i] = slopes[query_head(r, part, group, i)] / r->scale;
            memcpy(to,
                   q + token_row(r, part, i) * row_stride +
                       query_head(r, part, group, i) * head_stride,
                   width * 2);
        }
        low = first_visible_key(r, part) < low ? first_visible_key(r, part) : low;
    }
    memset(scratch->out, 0, at * padded_width * sizeof(float));
    attend_keys(r, parts->run, group, kv, low, shared_keys, 0, at, scratch);
    at = 0;
    for (const RunPart *part = parts; part < last; at += padded_queries(part), part++) {
        int64_t from =
            first_visible_key(r, part) > shared_keys ? first_visible_key(r, part) : shared_keys;
        int64_t to = r->past[part->run] + (part->first + part->count - 1) / r->queries + 1;
        attend_keys(r, part->run, group, kv, from, to, at, at + padded_queries(part), scratch);
        for (int64_t i = 0; i < part->count; i++) {
            int64_t head = query_head(r, part, group, i);
            uint16_t *row_out =
                out + (token_row(r, part, i) * r->groups * r->queries + head) * width;
            float sum = scratch->sum[at + i];
            if (sinks)
                sum += expf(sinks[head] - scratch->max[at + i]);
            float inverse_sum = 1.0f / sum;
            for (int64_t c = 0; c < width; c += LANES) {
                __m512 x =
                    _mm512_loadu_ps(scratch->out + (at + i) * padded_width + c) * inverse_sum;
                _mm256_mask_storeu_epi16(row_out + c, lane_mask(width - c),
                                         (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
    }
}

/* Bytes of scratch memory for each thread. */
int64_t preamble_prefill_scratch_bytes(void) { return sizeof(WorkerScratch); }

/* The largest number of queries in a task, including the padding of each part's last tile. */
int64_t preamble_prefill_task_queries(int64_t width)
{
    const int64_t padded_width = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    return OUT_ELEMENTS / padded_width < TASK_QUERIES ? OUT_ELEMENTS / padded_width / TILE * TILE
                                                      : TASK_QUERIES;
}

/* The context of the parallel loop over (task, KV head) pairs. */
typedef struct {
    const PrefillArgs *args;
    const uint16_t *q;
    int64_t row_stride, head_stride;
    const float *sinks, *slopes; /* Of each query head, or NULL. */
    const char *kv;
    uint16_t *out;
} PrefillLoop;

/* The last task of a run sees the most keys. Tasks start in reverse order, so that no long task
   starts last. */
static void prefill_range(void *context, int64_t first, int64_t end)
{
    const PrefillLoop *loop = context;
    const PrefillArgs *r = loop->args;
    for (int64_t i = first; i < end; i++) {
        const int64_t index = r->tasks * r->groups - 1 - i;
        attend_task(r, index / r->groups, index % r->groups, loop->q, loop->row_stride,
                    loop->head_stride, loop->sinks, loop->slopes, loop->kv, loop->out);
    }
}

/* Attention for the runs that `args` (PrefillArgs) lists; q is bf16. `row_stride` and `head_stride`
   are the strides of q in elements. `sinks` and `slopes` are the logits of the sinks and the ALiBi
   slopes of the query heads, or NULL. Writes the output of row i of q to row i of `out`, which is
   contiguous. Returns nonzero if the kernel does not support the head dimension or the CPU. */
int preamble_prefill_attention(const void *args, const void *q, int64_t row_stride,
                               int64_t head_stride, const float *sinks, const float *slopes,
                               const void *kv, void *out)
{
    const PrefillArgs *r = args;
    if (r->width > HEAD_DIM_MAX || r->width % 2 || isa_level < AVX512_BF16)
        return 1;
    PrefillLoop loop = {r, q, row_stride, head_stride, sinks, slopes, kv, out};
    parallel_for(r->tasks * r->groups, 1, r->threads, IN_ORDER, prefill_range, &loop);
    return 0;
}

#endif
