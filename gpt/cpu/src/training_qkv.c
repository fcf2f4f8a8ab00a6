/* The split of the output of the QKV linear in training, with rotary embedding, and its backward pass.

   The output has for each token and KV head the queries of the KV head, its key and its value.
   Training needs queries, keys and values in separate memory, so that each can be freed alone. */

#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* `qkv` has the shape (tokens, groups, queries + 2, width), `q` (tokens, groups, queries, width),
   `k` and `v` (tokens, groups, width). */
typedef struct {
    int64_t tokens, groups, queries, width, threads;
    int64_t rotary_pairs;      /* Pairs of channels of queries and keys that are rotated; 0: none. */
    const uint16_t *cos, *sin; /* (tokens, rotary_pairs) */
    uint16_t *qkv, *q, *k, *v;
} QkvTensors;

/* Copies heads of a token, whose first channels are rotated. `sign`: 1 for forward, -1 for the
   gradients, which are rotated back. */
TARGET_AVX512_BF16 INLINE void copy_rotated(const QkvTensors *t, int64_t token,
                                            const uint16_t *from, uint16_t *to, int64_t heads,
                                            float sign)
{
    const int64_t pairs = t->rotary_pairs;
    const uint16_t *cos = t->cos + token * pairs, *sin = t->sin + token * pairs;
    for (int64_t head = 0; head < heads; head++, from += t->width, to += t->width) {
        for (int64_t i = 0; i < pairs; i += LANES) {
            const __mmask16 mask = lane_mask(pairs - i);
            const __m512 c = load_bf16(cos + i, mask), s = load_bf16(sin + i, mask) * sign;
            const __m512 x = load_bf16(from + i, mask), y = load_bf16(from + pairs + i, mask);
            const __m256bh first = _mm512_cvtneps_pbh(x * c - y * s);
            const __m256bh second = _mm512_cvtneps_pbh(y * c + x * s);
            _mm256_mask_storeu_epi16(to + i, mask, (__m256i)first);
            _mm256_mask_storeu_epi16(to + pairs + i, mask, (__m256i)second);
        }
        memcpy(to + 2 * pairs, from + 2 * pairs, (t->width - 2 * pairs) * sizeof *to);
    }
}

/* The items are tokens. */
TARGET_AVX512_BF16 static void split_range(void *context, int64_t first, int64_t end)
{
    const QkvTensors *t = context;
    const int64_t queries = t->queries, width = t->width;
    for (int64_t i = first * t->groups; i < end * t->groups; i++) {
        const uint16_t *from = t->qkv + i * (queries + 2) * width;
        copy_rotated(t, i / t->groups, from, t->q + i * queries * width, queries, 1.0f);
        copy_rotated(t, i / t->groups, from + queries * width, t->k + i * width, 1, 1.0f);
        memcpy(t->v + i * width, from + (queries + 1) * width, width * sizeof *from);
    }
}

TARGET_AVX512_BF16 static void split_backward_range(void *context, int64_t first, int64_t end)
{
    const QkvTensors *t = context;
    const int64_t queries = t->queries, width = t->width;
    for (int64_t i = first * t->groups; i < end * t->groups; i++) {
        uint16_t *to = t->qkv + i * (queries + 2) * width;
        copy_rotated(t, i / t->groups, t->q + i * queries * width, to, queries, -1.0f);
        copy_rotated(t, i / t->groups, t->k + i * width, to + queries * width, 1, -1.0f);
        memcpy(to + (queries + 1) * width, t->v + i * width, width * sizeof *to);
    }
}

/* Stores the queries, keys and values of `qkv` in `q`, `k` and `v`. */
void preamble_split_qkv(const QkvTensors *t)
{
    parallel_for(t->tokens, items_per_chunk(t->tokens, t->threads), t->threads, STEALING,
                 split_range, (void *)t);
}

/* Backward pass of `preamble_split_qkv`: stores the gradient of `qkv`, from those in `q`, `k` and
   `v`. */
void preamble_split_qkv_backward(const QkvTensors *t)
{
    parallel_for(t->tokens, items_per_chunk(t->tokens, t->threads), t->threads, STEALING,
                 split_backward_range, (void *)t);
}

#endif
