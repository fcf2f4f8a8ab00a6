/* Decode attention over the paged KV cache: one new token per row; keys are read block by block.

   Keys and values are read in place. Sums are fp32, in an order that depends only on the number of
   keys of a row, so results do not change with the batch or with the number of threads.

   The work is divided into:
   - item: one KV head (group) of one row. Its index is row * groups + group.
   - segment: the keys of an item between two multiples of SEGMENT positions.
   - job: up to QUERIES query heads of an item.
   - task: a job, or one segment of a job. */

#include "thread_pool.h"
#include "vectors.h"

#define PREFETCH_BYTES 2048 /* Prefetch distance in bytes, to hide memory latency. */

/* The decode rows of a step. All layers use the same arguments. `groups`: KV heads; `queries`:
   query heads per KV head; `width`: channels per head; `table_width`: blocks per row of the block
   tables. */
typedef struct {
    int64_t rows, groups, queries, width, block_tokens, table_width;
    int64_t window; /* Sliding window in tokens; 0: no window. */
    int64_t bf16;   /* Nonzero: bf16; 0: fp32. */
    int64_t threads;
    double scale;
    const int64_t *row;          /* Index of each decode row in q and in out. */
    const int64_t *sequence;     /* Index of each decode row's sequence in block_tables. */
    const int64_t *context;      /* Each decode row sees the keys before this position. */
    const int64_t *block_tables; /* Block numbers of each sequence: (sequences, table_width). */
} DecodeArgs;

/* Partial attention output of some queries for one segment of keys, to be merged with the outputs
   for the other segments. */
typedef struct {
    float max[QUERIES], sum[QUERIES];
    float out[QUERIES][HEAD_DIM_MAX];
} PartialOutput;

/* The address of a token's key (`kind` 0) or value (`kind` 1) for a group. `token` is the index of
   the token in the block. */
static const char *kv_address(const DecodeArgs *r, const char *kv, int64_t block, int kind,
                              int64_t group, int64_t token)
{
    int64_t row = ((block * 2 + kind) * r->groups + group) * r->block_tokens + token;
    return kv + row * r->width * (r->bf16 ? 2 : 4);
}

static void prefetch(const char *from, int64_t bytes)
{
    /* The hardware prefetcher stops at the end of an OS page. A head's keys in one block fill about
       one OS page, so the hardware does not prefetch the keys in the next block. */
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + i, 0, 2);
}

/* Attention of some queries of an item over the keys [low, high), which are in one segment.
   `slopes`: the ALiBi slope of each query, or NULL. `next_keys` is the address of the next item's
   first keys, which are prefetched last. */
static void attend_segment(const DecodeArgs *r, const AttentionOps *ops, const char *q,
                           int64_t stride, int queries, const float *slopes, const char *kv,
                           int64_t item, int64_t low, int64_t high, const char *next_keys,
                           PartialOutput *part)
{
    float scores[QUERIES * (SEGMENT + LANES)];
    int64_t group = item % r->groups, size = r->block_tokens;
    const int64_t *table = r->block_tables + r->sequence[item / r->groups] * r->table_width;
    int64_t row_bytes = r->width * (r->bf16 ? 2 : 4);
    const int64_t ahead = PREFETCH_BYTES / row_bytes;
    /* The next position to prefetch, first of keys (kind 0), then of values (kind 1). Prefetching
       leads reading by `ahead` positions. */
    int64_t prefetched = low, prefetched_kind = 0;
    for (int kind = 0; kind < 2; kind++) {
        for (int64_t key = low; key < high;) {
            int64_t offset = key % size;
            int64_t tokens = size - offset < high - key ? size - offset : high - key;
            const char *address = kv_address(r, kv, table[key / size], kind, group, offset);
            int64_t next = key + tokens;
            while (prefetched_kind < 2 &&
                   (prefetched_kind - kind) * (high - low) + prefetched - next < ahead) {
                int64_t from = prefetched % size;
                int64_t count = size - from < high - prefetched ? size - from : high - prefetched;
                prefetch(kv_address(r, kv, table[prefetched / size], prefetched_kind, group, from),
                         row_bytes * count);
                prefetched += count;
                if (prefetched == high)
                    prefetched = low, prefetched_kind++;
                if (prefetched_kind == 2)
                    prefetch(next_keys, 2 * PREFETCH_BYTES);
            }
            if (kind == 0)
                ops->scores(q, stride, queries, address, tokens, r->width, scores + (key - low));
            else
                ops->values(scores + (key - low), queries, address, tokens, r->width, part->out[0]);
            key = next;
        }
        for (int i = 0; kind == 0 && i < queries; i++) {
            if (slopes)
                add_alibi(scores + i * (SEGMENT + LANES), high - low, slopes[i] / r->scale,
                          r->context[item / r->groups] - 1 - low);
            ops->softmax(scores + i * (SEGMENT + LANES), high - low, r->scale, part->max + i,
                         part->sum + i);
            memset(part->out[i], 0, r->width * sizeof(float));
        }
    }
}

static void merge_partials(PartialOutput *merged, const PartialOutput *part, int queries,
                           int64_t width)
{
    for (int i = 0; i < queries; i++) {
        float max = merged->max[i] > part->max[i] ? merged->max[i] : part->max[i];
        float merged_scale = expf(merged->max[i] - max), part_scale = expf(part->max[i] - max);
        merged->max[i] = max;
        merged->sum[i] = merged->sum[i] * merged_scale + part->sum[i] * part_scale;
        for (int64_t c = 0; c < width; c++)
            merged->out[i][c] = merged->out[i][c] * merged_scale + part->out[i][c] * part_scale;
    }
}

/* `sinks`: the logit of each query's sink, or NULL. */
static void store_normalized(const DecodeArgs *r, const PartialOutput *part, int queries,
                             const float *sinks, char *out)
{
    for (int i = 0; i < queries; i++) {
        const float *sums = part->out[i];
        float sum = sinks ? part->sum[i] + expf(sinks[i] - part->max[i]) : part->sum[i];
        float inverse_sum = 1.0f / sum;
        for (int64_t c = 0; c < r->width; c++) {
            float x = sums[c] * inverse_sum;
            if (r->bf16) {
                int64_t lane_offset = c % 32,
                        channel = c - lane_offset + lane_offset % 16 * 2 + lane_offset / 16;
                ((uint16_t *)out)[i * r->width + (c < r->width / 32 * 32 ? channel : c)] =
                    fp32_to_bf16(x);
            } else
                ((float *)out)[i * r->width + c] = x;
        }
    }
}

static int64_t first_visible_key(const DecodeArgs *r, int64_t context)
{
    return r->window && context > r->window ? context - r->window : 0;
}

/* Stores the bounds of a segment's visible keys: [low, high). Segments begin at multiples of
   SEGMENT in the sequence, with or without a window. Segment 0 is the first one with a visible
   key. */
static void segment_bounds(const DecodeArgs *r, int64_t item, int64_t segment, int64_t *low,
                           int64_t *high)
{
    int64_t context = r->context[item / r->groups], first = first_visible_key(r, context);
    int64_t start = (first / SEGMENT + segment) * SEGMENT;
    *low = start < first ? first : start;
    *high = start + SEGMENT < context ? start + SEGMENT : context;
}

static int64_t segment_count(const DecodeArgs *r, int64_t item)
{
    int64_t context = r->context[item / r->groups];
    return (context - 1) / SEGMENT - first_visible_key(r, context) / SEGMENT + 1;
}

/* The address of the first key that an item reads. */
static const char *first_key_address(const DecodeArgs *r, const char *kv, int64_t item)
{
    int64_t row = item / r->groups, low = first_visible_key(r, r->context[row]);
    int64_t block = r->block_tables[r->sequence[row] * r->table_width + low / r->block_tokens];
    return kv_address(r, kv, block, 0, item % r->groups, low % r->block_tokens);
}

/* The context of the parallel loop over tasks. Each job is `split` tasks: one task, or one for each
   segment of the longest item. */
typedef struct {
    const DecodeArgs *args;
    const AttentionOps *ops;
    const float *sinks, *slopes; /* Of each query head, or NULL. */
    const char *q, *kv;
    char *out;
    int64_t row_stride, head_stride, jobs_per_item, split;
    PartialOutput *parts; /* For each task its output, if `split` is more than 1. */
} DecodeLoop;

/* The query heads of a job. */
typedef struct {
    int64_t item, head, out_row; /* `out_row`: index of the first head in `out`. */
    int queries;
} DecodeJob;

static DecodeJob decode_job(const DecodeLoop *loop, int64_t job)
{
    const DecodeArgs *r = loop->args;
    const int64_t item = job / loop->jobs_per_item, first = job % loop->jobs_per_item * QUERIES;
    const int64_t head = item % r->groups * r->queries + first;
    return (DecodeJob){item, head, r->row[item / r->groups] * r->groups * r->queries + head,
                       r->queries - first < QUERIES ? r->queries - first : QUERIES};
}

static void store_job_output(const DecodeLoop *loop, const DecodeJob *job,
                             const PartialOutput *output)
{
    const int64_t bytes = loop->args->bf16 ? 2 : 4;
    store_normalized(loop->args, output, job->queries,
                     loop->sinks ? loop->sinks + job->head : NULL,
                     loop->out + job->out_row * loop->args->width * bytes);
}

static void run_decode_task(const DecodeLoop *loop, int64_t task)
{
    const DecodeArgs *r = loop->args;
    const DecodeJob job = decode_job(loop, task / loop->split);
    const int64_t bytes = r->bf16 ? 2 : 4, item = job.item, segments = segment_count(r, item);
    const char *from = loop->q + (r->row[item / r->groups] * loop->row_stride +
                                  job.head * loop->head_stride) *
                                     bytes;
    const int64_t next_item = item + 1 < r->rows * r->groups ? item + 1 : item;
    const char *next_keys = first_key_address(r, loop->kv, next_item);
    const float *slopes = loop->slopes ? loop->slopes + job.head : NULL;
    int64_t low, high;
    if (loop->split > 1) {
        if (task % loop->split < segments) {
            segment_bounds(r, item, task % loop->split, &low, &high);
            attend_segment(r, loop->ops, from, loop->head_stride, job.queries, slopes, loop->kv,
                           item, low, high, next_keys, loop->parts + task);
        }
        return;
    }
    PartialOutput merged, part;
    for (int64_t segment = 0; segment < segments; segment++) {
        segment_bounds(r, item, segment, &low, &high);
        attend_segment(r, loop->ops, from, loop->head_stride, job.queries, slopes, loop->kv, item,
                       low, high, next_keys, segment ? &part : &merged);
        if (segment)
            merge_partials(&merged, &part, job.queries, r->width);
    }
    store_job_output(loop, &job, &merged);
}

static void decode_range(void *context, int64_t first, int64_t end)
{
    for (int64_t task = first; task < end; task++)
        run_decode_task(context, task);
}

/* Attention for the rows of q that `args` (DecodeArgs) lists. `row_stride` and `head_stride` are
   the strides of q in elements. `sinks` and `slopes` are the logits of the sinks and the ALiBi
   slopes of the query heads, or NULL. Writes the output of row i of q to row i of `out`, which is
   contiguous. Returns nonzero if heads have more than HEAD_DIM_MAX channels. */
int preamble_decode_attention(const void *args, const void *q, int64_t row_stride,
                              int64_t head_stride, const float *sinks, const float *slopes,
                              const void *kv, void *out)
{
    const DecodeArgs *r = args;
    const int64_t items = r->rows * r->groups;
    const int64_t jobs_per_item = (r->queries + QUERIES - 1) / QUERIES;
    const int64_t jobs = items * jobs_per_item;
    if (r->width > HEAD_DIM_MAX)
        return 1;
    const AttentionOps ops = select_attention_ops(r->bf16, r->width);
    int64_t longest = 1;
    for (int64_t i = 0; i < items; i += r->groups)
        longest = segment_count(r, i) > longest ? segment_count(r, i) : longest;
    /* If there are fewer jobs than threads, each segment of a job is a task. This does not change
       the sums, because the segments of a job are always merged in the same order. */
    int64_t split = jobs < r->threads ? longest : 1;
    PartialOutput *parts = NULL;
    if (split > 1 && (parts = malloc(jobs * split * sizeof(PartialOutput))) == NULL)
        split = 1;
    const int64_t tasks = jobs * split;
    DecodeLoop loop = {r,   &ops,       sinks,       slopes,        q,     kv,
                       out, row_stride, head_stride, jobs_per_item, split, parts};
    /* A task prefetches keys of the next item. A thread gets chunks of adjacent tasks, so that
       usually the same thread computes the next item. */
    parallel_for(tasks, tasks / (r->threads * 8) + 1, r->threads, STEALING, decode_range, &loop);
    for (int64_t index = 0; split > 1 && index < jobs; index++) {
        const DecodeJob job = decode_job(&loop, index);
        for (int64_t segment = 1; segment < segment_count(r, job.item); segment++)
            merge_partials(parts + index * split, parts + index * split + segment, job.queries,
                           r->width);
        store_job_output(&loop, &job, parts + index * split);
    }
    free(parts);
    return 0;
}

/* Stores the keys and values of new tokens in their slots of the pool. `token_stride` and
   `group_stride` are the strides of k and of v in bytes. `bytes` is the size of one head's key. */
void preamble_store_kv(char *kv, const char *k, const char *v, int64_t token_stride,
                       int64_t group_stride, const int64_t *blocks, const int64_t *offsets,
                       int64_t tokens, int64_t groups, int64_t block_tokens, int64_t bytes)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t pool_row = (blocks[t] * 2 * groups + g) * block_tokens + offsets[t];
            int64_t from = t * token_stride + g * group_stride;
            memcpy(kv + pool_row * bytes, k + from, bytes);
            memcpy(kv + (pool_row + groups * block_tokens) * bytes, v + from, bytes);
        }
}
