/* What a CPU is to do fast: attention of single new tokens over a paged KV pool, and products with
   bf16 weights. Called through gpt/kernels.py.

   Keys and values are read where they lie, block by block, each once; weights in the order in which
   they lie. All sums are fp32. Vectors are the compiler's own (16 floats), so one source serves
   every machine; it is compiled for a plain one, for AVX2 and for AVX-512 with bf16, and the best is
   chosen when it is loaded. A row's sums are taken in an order that depends on its own keys alone: results do not
   change with the batch or with the number of threads. It knows no tensors, only addresses. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABI 4            /* What gpt/kernels.py expects. */
#define LANES 16
#define SEGMENT 256      /* Keys whose scores are held at once; also how long contexts are split. */
#define AHEAD 8192       /* Bytes that are asked for before they are read: memory is far. */
#define QUERIES 8        /* Queries of a group that read a key together. */
#define WIDTH_MAX 512    /* Channels of a head. */
#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

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

typedef struct {
    void (*scores)(const void *q, int64_t stride, int queries, const void *keys, int tokens,
                   int width, float *to);
    void (*weigh)(float *scores, int tokens, float scale, float *most, float *sum);
    void (*values)(const float *weights, int queries, const void *values, int tokens, int width,
                   float *made);
} Ops;

/* ------------------------------------------------------------------------------------ numbers */

/* 16 numbers of fp32; or of bf16 those in even places of 32 (half 0), or in odd ones (half 1). */
INLINE Floats wide(const void *from, int bf16, int half)
{
    if (!bf16)
        return *(const Floats *)from;
    Words words = *(const Words *)from;
    if (half)
        return (Floats)(words & 0xffff0000u);
    return (Floats)(words << 16);
}

INLINE float number(const void *from, int64_t at, int bf16)
{
    float x;
    if (!bf16)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&x, &bits, 4);
    return x;
}

/* The sum of a vector's lanes. */
INLINE float sum(const Floats *x)
{
    const Four *y = (const Four *)x;
    Four all = (y[0] + y[1]) + (y[2] + y[3]);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

/* The sums of 16 vectors' lanes, in order; well done only by a machine with such vectors. */
INLINE Floats sums(Floats *x)
{
    Floats y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        Floats a = x[2 * i], b = x[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13,
                                       29) +
               __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30,
                                       15, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                       29) +
               __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15,
                                       30, 31);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        Floats a = y[2 * i], b = y[2 * i + 1];
        y[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                       27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                       30, 31);
    }
    return __builtin_shufflevector(y[0], y[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                                   26, 27) +
           __builtin_shufflevector(y[0], y[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                   30, 31);
}

INLINE Floats either(Ints where, Floats a, Floats b)
{
    return (Floats)((where & (Ints)a) | (~where & (Ints)b));
}

/* e to the x, for x that is not above 0; what is not a number stays so. */
INLINE Floats power(Floats x)
{
    const Floats zero = {0};
    Floats low = zero - 87.0f;
    x = either(x < low, low, x);
    Floats turns = x * 1.44269504088896341f - 0.5f;
    Ints whole = __builtin_convertvector(turns, Ints); /* Towards 0: the nearest, as x <= 0. */
    Floats n = __builtin_convertvector(whole, Floats);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Floats scale = (Floats)((whole + 127) << 23);
    return either(x == x, y * scale, x);
}

/* ----------------------------------------------------- three steps, of whatever machine it is */

#if defined(__x86_64__)
#include <immintrin.h>
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

/* Products of pairs of bf16, added up in fp32. */
BF16 INLINE void dots(const uint16_t *q, const uint16_t *keys,
                                                      int last, int width, float *to)
{
    Floats x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = (Floats){0};
    for (int c = 0; c < width; c += 32) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(q + c);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const uint16_t *key = keys + (i < last ? i : last) * (int64_t)width + c;
            x[i] = (Floats)_mm512_dpbf16_ps((__m512)x[i], a, (__m512bh)_mm512_loadu_si512(key));
        }
    }
    *(Floats *)to = sums(x);
}

BF16 INLINE void scores_dots(const uint16_t *q, int64_t stride,
                                                             int queries, const uint16_t *keys,
                                                             int tokens, int width, float *to)
{
    for (int start = 0; start < tokens; start += LANES)
        for (int i = 0; i < queries; i++) {
            const uint16_t *one = q + i * stride, *here = keys + start * (int64_t)width;
            float *sum = to + i * (SEGMENT + LANES) + start;
            if (tokens - start >= LANES)
                dots(one, here, LANES, width, sum);
            else
                dots(one, here, tokens - start - 1, width, sum);
        }
}

BF16 static void scores_bf16_dots(const void *q, int64_t stride,
                                                                  int queries, const void *keys,
                                                                  int tokens, int width, float *to)
{
    /* Where the width is known, the places of 16 keys are too. */
    if (width == 64)
        scores_dots(q, stride, queries, keys, tokens, 64, to);
    else if (width == 128)
        scores_dots(q, stride, queries, keys, tokens, 128, to);
    else
        scores_dots(q, stride, queries, keys, tokens, width, to);
}
#endif

/* Scores of `tokens` keys for each query. */
INLINE void scores_of(const void *q, int64_t stride, int queries, const void *keys, int tokens,
                      int width, float *to, int bf16)
{
    const int bytes = bf16 ? 2 : 4, step = bf16 ? 2 * LANES : LANES;
    const int even = width / step * step;
    for (int start = 0; start < tokens; start += 4)
        for (int i = 0; i < queries; i++) {
            const char *one = (const char *)q + i * stride * bytes;
            const int last = tokens - start - 1;
            const char *key[4];
            Floats x[4];
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                key[t] = (const char *)keys + (start + (t < last ? t : last)) * (int64_t)width * bytes;
                x[t] = (Floats){0};
            }
            for (int c = 0; c < even * bytes; c += 64)
#pragma GCC unroll 2
                for (int half = 0; half <= bf16; half++) {
                    Floats a = wide(one + c, bf16, half);
#pragma GCC unroll 4
                    for (int t = 0; t < 4; t++)
                        x[t] += a * wide(key[t] + c, bf16, half);
                }
            for (int t = 0; t < 4 && t <= last; t++) {
                float all = sum(x + t);
                for (int c = even; c < width; c++)
                    all += number(one, c, bf16) * number(key[t], c, bf16);
                to[i * (SEGMENT + LANES) + start + t] = all;
            }
        }
}

/* Scores become weights, not yet divided by their sum. */
INLINE void weigh_of(float *scores, int tokens, float scale, float *most, float *sum)
{
    const float none = -INFINITY;
    Floats top = (Floats){0} + none, total = {0};
    int whole = -(-tokens & -LANES);
    for (int i = tokens; i < whole; i++)
        scores[i] = none;
    for (int i = 0; i < whole; i += LANES) {
        Floats x = *(Floats *)(scores + i) * scale;
        *(Floats *)(scores + i) = x;
        top = either(x > top, x, top);
    }
    float best = none, all = 0;
    for (int i = 0; i < LANES; i++)
        best = top[i] > best ? top[i] : best;
    /* Where nothing is larger than minus infinity, something is not a number, or none is there. */
    for (int i = 0; i < whole; i += LANES) {
        Floats x = power(*(Floats *)(scores + i) - best);
        for (int t = 0; i + LANES > tokens && t < LANES; t++)
            if (i + t >= tokens)
                x[t] = 0;
        *(Floats *)(scores + i) = x;
        total += x;
    }
    for (int i = 0; i < LANES; i++)
        all += total[i];
    *most = best, *sum = all;
}

/* Adds the weighted values of `vectors` times 64 bytes of channels. */
INLINE void values_at(const float *weights, int queries, const char *values, int tokens, int width,
                      float *made, int vectors, int bf16)
{
    const int64_t row = width * (int64_t)(bf16 ? 2 : 4);
    const int count = vectors * (1 + bf16);
    Floats sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < queries * count; i++)
        sum[i] = *(Floats *)(made + i / count * WIDTH_MAX + i % count * LANES);
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < count; v++) {
            Floats x = wide(values + t * row + v / (1 + bf16) * 64, bf16, v % (1 + bf16));
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++)
                sum[i * count + v] += x * weights[i * (SEGMENT + LANES) + t];
        }
#pragma GCC unroll 16
    for (int i = 0; i < queries * count; i++)
        *(Floats *)(made + i / count * WIDTH_MAX + i % count * LANES) = sum[i];
}

INLINE void values_some(const float *weights, int queries, const void *values, int tokens,
                        int width, float *made, int bf16)
{
    const int step = bf16 ? 2 * LANES : LANES, four = 4 * LANES;
    const char *from = (const char *)values;
    int c = 0;
    for (; c + four <= width; c += four)
        values_at(weights, queries, from + c / step * 64, tokens, width, made + c, four / step,
                  bf16);
    for (; c + step <= width; c += step)
        values_at(weights, queries, from + c / step * 64, tokens, width, made + c, 1, bf16);
    for (; c < width; c++)
        for (int i = 0; i < queries; i++)
            for (int t = 0; t < tokens; t++)
                made[i * WIDTH_MAX + c] += number(values, t * (int64_t)width + c, bf16) *
                                           weights[i * (SEGMENT + LANES) + t];
}

/* Adds the weighted values. Of bf16, 32 channels come as the even ones and then the odd ones. */
INLINE void values_of(const float *weights, int queries, const void *values, int tokens, int width,
                      float *made, int bf16)
{
    int i = 0;
    for (; i + 4 <= queries; i += 4)
        values_some(weights + i * (SEGMENT + LANES), 4, values, tokens, width, made + i * WIDTH_MAX,
                    bf16);
    for (; i < queries; i++)
        values_some(weights + i * (SEGMENT + LANES), 1, values, tokens, width, made + i * WIDTH_MAX,
                    bf16);
}

#define STEPS(machine, kind, bf16, TARGET)                                                         \
    TARGET static void scores_##kind##_##machine(const void *q, int64_t stride, int queries,       \
                                                 const void *keys, int tokens, int width,          \
                                                 float *to)                                        \
    {                                                                                              \
        scores_of(q, stride, queries, keys, tokens, width, to, bf16);                              \
    }                                                                                              \
    TARGET static void values_##kind##_##machine(const float *weights, int queries,                \
                                                 const void *values, int tokens, int width,        \
                                                 float *made)                                      \
    {                                                                                              \
        values_of(weights, queries, values, tokens, width, made, bf16);                            \
    }
#define WEIGH(machine, TARGET)                                                                     \
    TARGET static void weigh_##machine(float *scores, int tokens, float scale, float *most,        \
                                       float *sum)                                                 \
    {                                                                                              \
        weigh_of(scores, tokens, scale, most, sum);                                                \
    }

STEPS(plain, bf16, 1, )
STEPS(plain, fp32, 0, )
WEIGH(plain, )
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
STEPS(avx2, bf16, 1, AVX2)
STEPS(avx2, fp32, 0, AVX2)
WEIGH(avx2, AVX2)
STEPS(wide, bf16, 1, BF16)
STEPS(wide, fp32, 0, BF16)
WEIGH(wide, BF16)
#endif

/* What this machine can: 0 plain, 1 AVX2, 2 AVX-512 with bf16. Tests ask for less. */
static int machine_max(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bf16"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

static int machine = -1;

/* Give back the threads that help the calling one. With more of OpenMP's threads than cores none
   of them waits awake, and waking one costs more than a small product; so a thread that has
   loaded a model lets go of its helpers before another runs it. */
void preamble_rest(void) { omp_pause_resource_all(omp_pause_soft); }

int preamble_abi(void) { return ABI; }

/* Choose a machine, at most the best there is; which one it is now. */
int preamble_machine(int wanted)
{
    int most = machine_max();
    machine = wanted < 0 || wanted > most ? most : wanted;
    return machine;
}

static Ops ops_of(int bf16, int width)
{
    Ops ops = {bf16 ? scores_bf16_plain : scores_fp32_plain, weigh_plain,
               bf16 ? values_bf16_plain : values_fp32_plain};
#if defined(__x86_64__)
    if (machine == 1)
        ops = (Ops){bf16 ? scores_bf16_avx2 : scores_fp32_avx2, weigh_avx2,
                    bf16 ? values_bf16_avx2 : values_fp32_avx2};
    if (machine == 2) {
        ops = (Ops){bf16 ? scores_bf16_wide : scores_fp32_wide, weigh_wide,
                    bf16 ? values_bf16_wide : values_fp32_wide};
        if (bf16 && width % 32 == 0)
            ops.scores = scores_bf16_dots;
    }
#else
    (void)width;
#endif
    return ops;
}

/* -------------------------------------------------------------------------------- attention */

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
                    soon(next_keys, AHEAD / 4);
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
                uint32_t bits;
                memcpy(&bits, &x, 4);
                bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
                ((uint16_t *)out)[i * r->width + (c < r->width / 32 * 32 ? channel : c)] =
                    bits >> 16;
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

/* Rows of q (strides in numbers: of a row, of a head) to the same rows of `out`, which has no gaps. */
int preamble_attend(const Rows *r, const void *q, int64_t row_stride, int64_t head_stride,
                    const void *kv, void *out)
{
    const int64_t bytes = r->bf16 ? 2 : 4, items = r->rows * r->groups;
    const int64_t chunks = (r->queries + QUERIES - 1) / QUERIES;
    if (r->width > WIDTH_MAX)
        return 1;
    const Ops ops = ops_of(r->bf16, r->width);
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
                attend(r, &ops, from, head_stride, queries, kv, item, low, high, next_keys, parts + task);
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
        int64_t row = (r->row[item / r->groups] * r->groups + item % r->groups) * r->queries + first;
        finish(r, parts + job * split, queries, (char *)out + row * r->width * bytes);
    }
    free(parts);
    return 0;
}

/* Keys and values (tokens, groups, width) to their slots of the pool. Strides in bytes. */
void preamble_store(void *kv, const void *k, const void *v, const int64_t *strides,
                    const int64_t *blocks, const int64_t *places, const int64_t *shape)
{
    const int64_t tokens = shape[0], groups = shape[1], size = shape[2], bytes = shape[3];
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t g = 0; g < groups; g++) {
            char *to = (char *)kv + ((blocks[t] * 2 * groups + g) * size + places[t]) * bytes;
            memcpy(to, (const char *)k + t * strides[0] + g * strides[1], bytes);
            memcpy(to + groups * size * bytes, (const char *)v + t * strides[2] + g * strides[3],
                   bytes);
        }
}

/* ----------------------------------------------------------------------------------- panels */

#if defined(__x86_64__)

#define COLUMNS 32 /* Of a panel: they lie together, pairs of channels side by side. */
#define TILE 12    /* Rows whose sums fit into registers. */

/* Adds to the sums of `rows` rows (`stride` numbers apart) what `pairs` pairs of channels give with
   a panel's columns. Each sum is taken channel by channel, however many rows there are. */
BF16 INLINE void add(__m512 (*sum)[2], const uint16_t *x, int64_t stride, const uint16_t *panel,
                     int64_t pairs, int rows)
{
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(panel + k * 64);
        __m512bh b = (__m512bh)_mm512_loadu_si512(panel + k * 64 + 32);
        /* What is read once comes from afar; past the end it is the next panel. */
        _mm_prefetch((const char *)(panel + k * 64) + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)(panel + k * 64) + 2112, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, x + i * stride + k * 2, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, a);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b);
        }
    }
}

BF16 INLINE __m512 widened(const uint16_t *from, __mmask16 there)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from));
    return (__m512)_mm512_slli_epi32(x, 16);
}

/* The first `count` of 16 lanes. */
INLINE __mmask16 first_lanes(int64_t count)
{
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

/* -------------------------------------------------------------------- attention of prompts */

/* Long runs of new tokens, whose keys are all in the pool. A piece is some of a run's queries of
   one group. It brings a segment's keys and values into panels, and then multiplies tiles of its
   queries with them; softmax goes on from segment to segment. Segments are cut at their places in
   the sequence, so a query's sums do not depend on where its prompt was cut into chunks. */

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
    Desk desk;
    const int64_t width = r->width, wide = (width + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int64_t whole = (piece->count + TILE - 1) / TILE * TILE;
    memset(desk.queries + piece->count * width, 0, (whole - piece->count) * width * 2);
    memset(desk.made, 0, whole * wide * sizeof(float));
    for (int64_t i = 0; i < piece->count; i++) {
        int64_t token = r->row[piece->run] + (piece->first + i) / r->queries;
        int64_t head = piece->group * r->queries + (piece->first + i) % r->queries;
        memcpy(desk.queries + i * width, q + token * row_stride + head * head_stride, width * 2);
        desk.most[i] = -INFINITY, desk.sum[i] = 0;
    }
    int64_t begin = r->past[piece->run] + piece->first / r->queries + 1;
    int64_t high = r->past[piece->run] + (piece->first + piece->count - 1) / r->queries + 1;
    int64_t low = r->window && begin > r->window ? begin - r->window : 0;
    for (int64_t start = low / SEGMENT * SEGMENT; start < high; start += SEGMENT) {
        int64_t from = start < low ? low : start;
        int64_t to = start + SEGMENT < high ? start + SEGMENT : high;
        lay_out(r, piece, kv, start, from, to, &desk);
        for (int64_t first = 0; first < piece->count; first += TILE)
            attend_tile(r, piece, start, from, to, first, &desk);
    }
    for (int64_t i = 0; i < piece->count; i++) {
        int64_t token = r->row[piece->run] + (piece->first + i) / r->queries;
        int64_t head = piece->group * r->queries + (piece->first + i) % r->queries;
        uint16_t *to = out + (token * r->groups * r->queries + head) * width;
        float share = 1.0f / desk.sum[i];
        for (int64_t c = 0; c < width; c += LANES) {
            __m512 x = _mm512_loadu_ps(desk.made + i * wide + c) * share;
            _mm256_mask_storeu_epi16(to + c, first_lanes(width - c),
                                     (__m256i)_mm512_cvtneps_pbh(x));
        }
    }
}

/* Runs of bf16 rows of q (strides in numbers: of a row, of a head) to the same rows of `out`. */
int preamble_attend_runs(const Runs *r, const uint16_t *q, int64_t row_stride,
                         int64_t head_stride, const char *kv, uint16_t *out)
{
    if (r->width > WIDTH_MAX || r->width % 2 || machine < 2)
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

/* --------------------------------------------------------------------------------- products */

enum { NOTHING, GELU, GELU_TANH };

/* Rows (bf16) times a weight in panels, and what comes after it. */
typedef struct {
    const uint16_t *x, *weight, *bias, *residual;
    void *out;
    int64_t rows, channels, columns, activation;
    int64_t wide; /* The results stay fp32. */
    int64_t threads;
} Product;

INLINE Floats gelu(Floats x, int tanh_form)
{
    const Ints sign = (Ints)x & (int32_t)0x80000000;
    const Floats one = (Floats){0} + 1.0f;
    Floats y;
    if (tanh_form) {
        Floats z = (Floats)((Ints)((x + x * x * x * 0.044715f) * 0.79788456080286536f) & 0x7fffffff);
        Floats e = power(z * -2.0f);
        y = (one - e) / (one + e);
    } else {
        Floats z = (Floats)((Ints)x & 0x7fffffff) * 0.70710678118654752f;
        Floats t = one / (z * 0.3275911f + 1.0f); /* Abramowitz and Stegun 7.1.26. */
        Floats p = t * 1.061405429f - 1.453152027f;
        p = p * t + 1.421413741f;
        p = p * t - 0.284496736f;
        p = p * t + 0.254829592f;
        y = one - p * t * power(z * z * -1.0f);
    }
    y = (Floats)((Ints)y | sign);
    return x * 0.5f * (y + 1.0f);
}

/* One panel's columns of `rows` rows. Each sum is taken channel by channel, however many rows. */
BF16 INLINE void tile(const Product *p, const uint16_t *panel,
                                                      int64_t first, int64_t column, int rows)
{
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    add(sum, p->x + first * p->channels, p->channels, panel, p->channels / 2, rows);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64_t at = column + half * LANES, left = p->columns - at;
        if (left <= 0)
            break;
        __mmask16 there = first_lanes(left);
        __m512 bias = p->bias ? widened(p->bias + at, there) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int64_t place = (first + i) * p->columns + at;
            __m512 y = sum[i][half] + bias;
            if (p->activation)
                y = (__m512)gelu((Floats)y, p->activation == GELU_TANH);
            if (p->residual)
                y += widened(p->residual + place, there);
            if (p->wide)
                _mm512_mask_storeu_ps((float *)p->out + place, there, y);
            else
                _mm256_mask_storeu_epi16((uint16_t *)p->out + place, there,
                                         (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
}

#define TILE_OF(n) case n: tile(p, panel, first, column, n); break;

BF16 static void tiles(const Product *p, int64_t panel_number)
{
    const uint16_t *panel = p->weight + panel_number * p->channels * COLUMNS;
    int64_t column = panel_number * COLUMNS, count = (p->rows + TILE - 1) / TILE;
    int64_t size = (p->rows + count - 1) / count;
    for (int64_t first = 0; first < p->rows; first += size)
        switch (p->rows - first < size ? p->rows - first : size) {
            TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
            TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
        }
}

void preamble_multiply(const Product *p)
{
    const int64_t panels = (p->columns + COLUMNS - 1) / COLUMNS;
    /* A thread that something else has kept from its core does not keep the others waiting long. */
    const int64_t share = panels / (p->threads * 8) + 1;
#pragma omp parallel for schedule(dynamic, share) num_threads(p->threads) if (p->threads > 1)
    for (int64_t panel = 0; panel < panels; panel++)
        tiles(p, panel);
}
#endif
