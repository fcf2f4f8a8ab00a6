/* Attention primitives for queries that share a KV head: scores, softmax, weighted sum of values.

   The source is written once with the compiler's vector types, and compiled for a baseline CPU,
   for AVX2 and for AVX-512. Scores of bf16 keys also have a variant with the AVX512-bf16 dot
   product. */

#include "vectors.h"

#if defined(__x86_64__)
/* Dot products of a bf16 query with 16 keys, summed in fp32. `last`: the index of the last key that
   may be read; if there are fewer than 16 keys, this key is read again for the missing ones. */
TARGET_AVX512_BF16 INLINE void dots_bf16(const uint16_t *q, const uint16_t *keys, int last,
                                         int width, float *to)
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
    *(Floats *)to = sum_lanes_16(x);
}

TARGET_AVX512_BF16 INLINE void scores_dots(const uint16_t *q, int64_t stride, int queries,
                                           const uint16_t *keys, int tokens, int width, float *to)
{
    for (int start = 0; start < tokens; start += LANES)
        for (int i = 0; i < queries; i++) {
            const uint16_t *query = q + i * stride, *key = keys + start * (int64_t)width;
            float *sum = to + i * (SEGMENT + LANES) + start;
            if (tokens - start >= LANES)
                dots_bf16(query, key, LANES, width, sum);
            else
                dots_bf16(query, key, tokens - start - 1, width, sum);
        }
}

TARGET_AVX512_BF16 static void scores_bf16_dots(const void *q, int64_t stride, int queries,
                                                const void *keys, int tokens, int width, float *to)
{
    /* With a constant width, the compiler knows the offsets of the 16 keys. */
    if (width == 64)
        scores_dots(q, stride, queries, keys, tokens, 64, to);
    else if (width == 128)
        scores_dots(q, stride, queries, keys, tokens, 128, to);
    else
        scores_dots(q, stride, queries, keys, tokens, width, to);
}
#endif

/* Stores the scores (dot products) of each query with `tokens` keys: one row of `to` per query.
   Rows are SEGMENT + LANES numbers apart. */
INLINE void compute_scores(const void *q, int64_t stride, int queries, const void *keys, int tokens,
                           int width, float *to, int bf16)
{
    const int bytes = bf16 ? 2 : 4, step = bf16 ? 2 * LANES : LANES;
    const int vector_width = width / step * step;
    for (int start = 0; start < tokens; start += 4)
        for (int i = 0; i < queries; i++) {
            const char *query = (const char *)q + i * stride * bytes;
            const int last = tokens - start - 1;
            const char *key[4];
            Floats x[4];
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                int64_t token = start + (t < last ? t : last);
                key[t] = (const char *)keys + token * width * bytes;
                x[t] = (Floats){0};
            }
            for (int c = 0; c < vector_width * bytes; c += 64)
#pragma GCC unroll 2
                for (int half = 0; half <= bf16; half++) {
                    Floats a = load_fp32(query + c, bf16, half);
#pragma GCC unroll 4
                    for (int t = 0; t < 4; t++)
                        x[t] += a * load_fp32(key[t] + c, bf16, half);
                }
            for (int t = 0; t < 4 && t <= last; t++) {
                float score = sum_lanes(x + t);
                for (int c = vector_width; c < width; c++)
                    score += load_scalar(query, c, bf16) * load_scalar(key[t], c, bf16);
                to[i * (SEGMENT + LANES) + start + t] = score;
            }
        }
}

/* Replaces each score with exp(scale * score - max): the softmax weight before the division by the
   sum. Stores the largest scale * score in `max`, and the sum of the weights in `sum`. */
INLINE void compute_softmax(float *scores, int tokens, float scale, float *max, float *sum)
{
    const float lowest = -INFINITY;
    Floats lane_max = (Floats){0} + lowest, lane_sum = {0};
    int padded_tokens = -(-tokens & -LANES);
    for (int i = tokens; i < padded_tokens; i++)
        scores[i] = lowest;
    for (int i = 0; i < padded_tokens; i += LANES) {
        Floats x = *(Floats *)(scores + i) * scale;
        *(Floats *)(scores + i) = x;
        lane_max = select_lanes(x > lane_max, x, lane_max);
    }
    float row_max = lowest, row_sum = 0;
    for (int i = 0; i < LANES; i++)
        row_max = lane_max[i] > row_max ? lane_max[i] : row_max;
    /* A NaN score does not change `row_max`. Its weight is NaN, and so is the sum. */
    for (int i = 0; i < padded_tokens; i += LANES) {
        Floats x = exp_nonpositive(*(Floats *)(scores + i) - row_max);
        for (int t = 0; i + LANES > tokens && t < LANES; t++)
            if (i + t >= tokens)
                x[t] = 0;
        *(Floats *)(scores + i) = x;
        lane_sum += x;
    }
    for (int i = 0; i < LANES; i++)
        row_sum += lane_sum[i];
    *max = row_max, *sum = row_sum;
}

/* Adds the weighted values to `out`, for a slice of the channels: `vectors` * 64 bytes of each
   value, from the address `values` on. */
INLINE void add_values_vectors(const float *weights, int queries, const char *values, int tokens,
                               int width, float *out, int vectors, int bf16)
{
    const int64_t value_bytes = width * (int64_t)(bf16 ? 2 : 4);
    const int count = vectors * (1 + bf16);
    Floats sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < queries * count; i++)
        sum[i] = *(Floats *)(out + i / count * HEAD_DIM_MAX + i % count * LANES);
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < count; v++) {
            const char *from = values + t * value_bytes + v / (1 + bf16) * 64;
            Floats x = load_fp32(from, bf16, v % (1 + bf16));
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++)
                sum[i * count + v] += x * weights[i * (SEGMENT + LANES) + t];
        }
#pragma GCC unroll 16
    for (int i = 0; i < queries * count; i++)
        *(Floats *)(out + i / count * HEAD_DIM_MAX + i % count * LANES) = sum[i];
}

INLINE void add_values_queries(const float *weights, int queries, const void *values, int tokens,
                               int width, float *out, int bf16)
{
    const int step = bf16 ? 2 * LANES : LANES, chunk = 4 * LANES;
    const char *from = (const char *)values;
    int c = 0;
    for (; c + chunk <= width; c += chunk)
        add_values_vectors(weights, queries, from + c / step * 64, tokens, width, out + c,
                           chunk / step, bf16);
    for (; c + step <= width; c += step)
        add_values_vectors(weights, queries, from + c / step * 64, tokens, width, out + c, 1, bf16);
    for (; c < width; c++)
        for (int i = 0; i < queries; i++)
            for (int t = 0; t < tokens; t++)
                out[i * HEAD_DIM_MAX + c] += load_scalar(values, t * (int64_t)width + c, bf16) *
                                             weights[i * (SEGMENT + LANES) + t];
}

/* Adds the weighted values to `out`. For bf16, each complete group of 32 channels is stored in
   `out` as `load_fp32` loads it: the 16 even channels, then the 16 odd channels. */
INLINE void add_values(const float *weights, int queries, const void *values, int tokens, int width,
                       float *out, int bf16)
{
    int i = 0;
    for (; i + 4 <= queries; i += 4)
        add_values_queries(weights + i * (SEGMENT + LANES), 4, values, tokens, width,
                           out + i * HEAD_DIM_MAX, bf16);
    for (; i < queries; i++)
        add_values_queries(weights + i * (SEGMENT + LANES), 1, values, tokens, width,
                           out + i * HEAD_DIM_MAX, bf16);
}

#define DEFINE_SCORES_VALUES(isa, kind, bf16, TARGET)                                              \
    TARGET static void scores_##kind##_##isa(const void *q, int64_t stride, int queries,           \
                                             const void *keys, int tokens, int width, float *to)   \
    {                                                                                              \
        compute_scores(q, stride, queries, keys, tokens, width, to, bf16);                         \
    }                                                                                              \
    TARGET static void values_##kind##_##isa(                                                      \
        const float *weights, int queries, const void *values, int tokens, int width, float *out)  \
    {                                                                                              \
        add_values(weights, queries, values, tokens, width, out, bf16);                            \
    }
#define DEFINE_SOFTMAX(isa, TARGET)                                                                \
    TARGET static void softmax_##isa(float *scores, int tokens, float scale, float *max,           \
                                     float *sum)                                                   \
    {                                                                                              \
        compute_softmax(scores, tokens, scale, max, sum);                                          \
    }

DEFINE_SCORES_VALUES(plain, bf16, 1, )
DEFINE_SCORES_VALUES(plain, fp32, 0, )
DEFINE_SOFTMAX(plain, )
#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
DEFINE_SCORES_VALUES(avx2, bf16, 1, TARGET_AVX2)
DEFINE_SCORES_VALUES(avx2, fp32, 0, TARGET_AVX2)
DEFINE_SOFTMAX(avx2, TARGET_AVX2)
DEFINE_SCORES_VALUES(avx512, bf16, 1, TARGET_AVX512_BF16)
DEFINE_SCORES_VALUES(avx512, fp32, 0, TARGET_AVX512_BF16)
DEFINE_SOFTMAX(avx512, TARGET_AVX512_BF16)
#endif

AttentionOps select_attention_ops(int bf16, int64_t width)
{
    AttentionOps ops = {bf16 ? scores_bf16_plain : scores_fp32_plain, softmax_plain,
                        bf16 ? values_bf16_plain : values_fp32_plain};
#if defined(__x86_64__)
    if (isa_level == AVX2)
        ops = (AttentionOps){bf16 ? scores_bf16_avx2 : scores_fp32_avx2, softmax_avx2,
                             bf16 ? values_bf16_avx2 : values_fp32_avx2};
    if (isa_level == AVX512_BF16) {
        ops = (AttentionOps){bf16 ? scores_bf16_avx512 : scores_fp32_avx512, softmax_avx512,
                             bf16 ? values_bf16_avx512 : values_fp32_avx512};
        if (bf16 && width % 32 == 0)
            ops.scores = scores_bf16_dots;
    }
#else
    (void)width;
#endif
    return ops;
}
