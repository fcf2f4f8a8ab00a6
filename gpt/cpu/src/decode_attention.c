/* Attention of single new tokens over a paged pool of keys and values, which are read where they
   lie, block by block, each once.

   Sums are fp32, and taken in an order that depends on a row's own keys alone: results do not
   change with the batch or with the number of threads. */

#include "vectors.h"

#define AHEAD 2048 /* Bytes that are asked for before they are read: memory is far. */

/* The rows of one step that have their keys in the pool; the same for every layer. */
typedef struct {
    int64_t rows, groups, queries, width, block_tokens, table_width;
    int64_t window;          /* 0: none. */
    int64_t bf16;            /* Otherwise fp32. */
    int64_t threads;
    double scale;
    const int64_t *row;      /* Where each row's queries stand in q. */
    const int64_t *sequence; /* Its row of the tables. */
    const int64_t *context;  /* It sees the keys before this one. */
    const int64_t *tables;   /* Blocks of each sequence. */
} Rows;

/* What some queries made of some keys: to be merged with what they made of others. */
typedef struct {
    float most[QUERIES], sum[QUERIES];
    float made[QUERIES][WIDTH_MAX];
} Part;

/* A block's keys (0) or values (1) of a group, from its token `place` on. */
static const char *at(const Rows *r, const char *kv, int64_t block, int which, int64_t group,
                      int64_t place)
{
    int64_t row = ((block * 2 + which) * r->groups + group) * r->block_tokens + place;
    return kv + row * r->width * (r->bf16 ? 2 : 4);
}

static void soon(const char *from, int64_t bytes)
{
    /* A block is about a page, behind which the machine itself does not read ahead. */
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + i, 0, 2);
}

/* Some queries of a row, over the keys [low, high), which lie in one segment. */
static void attend(const Rows *r, const Ops *ops, const char *q, int64_t stride, int queries,
                   const char *kv, int64_t item, int64_t low, int64_t high, const char *next_keys,
                   Part *part)
{
    float scores[QUERIES * (SEGMENT + LANES)];
    int64_t group = item % r->groups, size = r->block_tokens;
    const int64_t *table = r->tables + r->sequence[item / r->groups] * r->table_width;
    int64_t row_bytes = r->width * (r->bf16 ? 2 : 4);
    const int64_t ahead = AHEAD / row_bytes;
    int64_t asked = low, asked_which = 0; /* From here on: of the keys, then of the values. */
    for (int which = 0; which < 2; which++) {
        for (int64_t key = low; key < high;) {
            int64_t place = key % size;
            int64_t tokens = size - place < high - key ? size - place : high - key;
            const char *here = at(r, kv, table[key / size], which, group, place);
            int64_t next = key + tokens;
            while (asked_which < 2 && (asked_which - which) * (high - low) + asked - next < ahead) {
                int64_t from = asked % size;
                int64_t count = size - from < high - asked ? size - from : high - asked;
                soon(at(r, kv, table[asked / size], asked_which, group, from), row_bytes * count);
                asked += count;
                if (asked == high)
                    asked = low, asked_which++;
                if (asked_which == 2)
                    soon(next_keys, 2 * AHEAD);
            }
            if (which == 0)
                ops->scores(q, stride, queries, here, tokens, r->width, scores + (key - low));
            else
                ops->values(scores + (key - low), queries, here, tokens, r->width, part->made[0]);
            key = next;
        }
        for (int i = 0; which == 0 && i < queries; i++) {
            ops->weigh(scores + i * (SEGMENT + LANES), high - low, r->scale, part->most + i,
                       part->sum + i);
            memset(part->made[i], 0, r->width * sizeof(float));
        }
    }
}

static void merge(Part *whole, const Part *part, int queries, int64_t width)
{
    for (int i = 0; i < queries; i++) {
        float most = whole->most[i] > part->most[i] ? whole->most[i] : part->most[i];
        float a = expf(whole->most[i] - most), b = expf(part->most[i] - most);
        whole->most[i] = most;
        whole->sum[i] = whole->sum[i] * a + part->sum[i] * b;
        for (int64_t c = 0; c < width; c++)
            whole->made[i][c] = whole->made[i][c] * a + part->made[i][c] * b;
    }
}

static void finish(const Rows *r, const Part *part, int queries, char *out)
{
    for (int i = 0; i < queries; i++) {
        const float *made = part->made[i];
        float share = 1.0f / part->sum[i];
        for (int64_t c = 0; c < r->width; c++) {
            float x = made[c] * share;
            if (r->bf16) {
                int64_t place = c % 32, channel = c - place + place % 16 * 2 + place / 16;
                ((uint16_t *)out)[i * r->width + (c < r->width / 32 * 32 ? channel : c)] =
                    to_bf16(x);
            } else
                ((float *)out)[i * r->width + c] = x;
        }
    }
}

static int64_t low_of(const Rows *r, int64_t context)
{
    return r->window && context > r->window ? context - r->window : 0;
}

/* Segments are cut at their places in the sequence, whatever the window. */
static void bounds(const Rows *r, int64_t item, int64_t segment, int64_t *low, int64_t *high)
{
    int64_t context = r->context[item / r->groups], first = low_of(r, context);
    int64_t start = (first / SEGMENT + segment) * SEGMENT;
    *low = start < first ? first : start;
    *high = start + SEGMENT < context ? start + SEGMENT : context;
}

static int64_t segments_of(const Rows *r, int64_t item)
{
    int64_t context = r->context[item / r->groups];
    return (context - 1) / SEGMENT - low_of(r, context) / SEGMENT + 1;
}

/* Where the first block that an item reads has its keys. */
static const char *first_keys(const Rows *r, const char *kv, int64_t item)
{
    int64_t row = item / r->groups, low = low_of(r, r->context[row]);
    int64_t block = r->tables[r->sequence[row] * r->table_width + low / r->block_tokens];
    return at(r, kv, block, 0, item % r->groups, low % r->block_tokens);
}

/* Rows of q (strides in numbers: of a row, of a head) to the same rows of `out`, which has no
   gaps. */
int preamble_attend(const void *rows, const void *q, int64_t row_stride, int64_t head_stride,
                    const void *kv, void *out)
{
    const Rows *r = rows;
    const int64_t bytes = r->bf16 ? 2 : 4, items = r->rows * r->groups;
    const int64_t chunks = (r->queries + QUERIES - 1) / QUERIES;
    if (r->width > WIDTH_MAX)
        return 1;
    const Ops ops = steps_of(r->bf16, r->width);
    int64_t longest = 1;
    for (int64_t i = 0; i < items; i += r->groups)
        longest = segments_of(r, i) > longest ? segments_of(r, i) : longest;
    /* With few rows, a long context is shared out; the sums are the same. */
    int64_t split = items * chunks < r->threads ? longest : 1;
    Part *parts = NULL;
    if (split > 1 && (parts = malloc(items * chunks * split * sizeof(Part))) == NULL)
        split = 1;
    const int64_t tasks = items * chunks * split;
    /* Neighbours go to one thread, which asks for the next one's keys while it has this one's. */
    const int64_t share = tasks / (r->threads * 8) + 1;
#pragma omp parallel for schedule(dynamic, share) num_threads(r->threads) if (r->threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t job = task / split, item = job / chunks, first = job % chunks * QUERIES;
        int queries = r->queries - first < QUERIES ? r->queries - first : QUERIES;
        int64_t head = item % r->groups * r->queries + first, low, high;
        const char *from = (const char *)q +
                           (r->row[item / r->groups] * row_stride + head * head_stride) * bytes;
        int64_t after = item + 1 < items ? item + 1 : item;
        const char *next_keys = first_keys(r, kv, after);
        if (split > 1) {
            if (task % split < segments_of(r, item)) {
                bounds(r, item, task % split, &low, &high);
                attend(r, &ops, from, head_stride, queries, kv, item, low, high, next_keys,
                       parts + task);
            }
            continue;
        }
        Part whole, part;
        int64_t segments = segments_of(r, item);
        for (int64_t segment = 0; segment < segments; segment++) {
            bounds(r, item, segment, &low, &high);
            attend(r, &ops, from, head_stride, queries, kv, item, low, high, next_keys,
                   segment ? &part : &whole);
            if (segment)
                merge(&whole, &part, queries, r->width);
        }
        int64_t row = r->row[item / r->groups] * r->groups * r->queries + head;
        finish(r, &whole, queries, (char *)out + row * r->width * bytes);
    }
    for (int64_t job = 0; split > 1 && job < items * chunks; job++) {
        int64_t item = job / chunks, first = job % chunks * QUERIES;
        int queries = r->queries - first < QUERIES ? r->queries - first : QUERIES;
        for (int64_t segment = 1; segment < segments_of(r, item); segment++)
            merge(parts + job * split, parts + job * split + segment, queries, r->width);
        int64_t row = r->row[item / r->groups] * r->groups + item % r->groups;
        row = row * r->queries + first;
        finish(r, parts + job * split, queries, (char *)out + row * r->width * bytes);
    }
    free(parts);
    return 0;
}

/* Keys and values of new tokens to their slots of the pool. Both have the same strides (bytes from
   a token to the next, and from a group); `bytes` are those of a head. */
void preamble_store(char *kv, const char *k, const char *v, int64_t token_stride,
                    int64_t group_stride, const int64_t *blocks, const int64_t *places,
                    int64_t tokens, int64_t groups, int64_t block_tokens, int64_t bytes)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t line = (blocks[t] * 2 * groups + g) * block_tokens + places[t];
            int64_t from = t * token_stride + g * group_stride;
            memcpy(kv + line * bytes, k + from, bytes);
            memcpy(kv + (line + groups * block_tokens) * bytes, v + from, bytes);
        }
}
