/* The steps of attention for queries that share a group: scores of keys, weights of scores, and the
   weighted sum of values. Written once in the compiler's vectors, and compiled for a plain machine,
   for AVX2 and for AVX-512; bf16 has its own instruction for scores. */

#include "vectors.h"

#if defined(__x86_64__)
/* Products of pairs of bf16, added up in fp32. */
BF16 INLINE void dots(const uint16_t *q, const uint16_t *keys, int last, int width, float *to)
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

BF16 INLINE void scores_dots(const uint16_t *q, int64_t stride, int queries, const uint16_t *keys,
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

BF16 static void scores_bf16_dots(const void *q, int64_t stride, int queries, const void *keys,
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
                int64_t at = start + (t < last ? t : last);
                key[t] = (const char *)keys + at * width * bytes;
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
#define FMA __attribute__((target("avx2,fma")))
STEPS(avx2, bf16, 1, FMA)
STEPS(avx2, fp32, 0, FMA)
WEIGH(avx2, FMA)
STEPS(wide, bf16, 1, BF16)
STEPS(wide, fp32, 0, BF16)
WEIGH(wide, BF16)
#endif

Ops steps_of(int bf16, int64_t width)
{
    Ops ops = {bf16 ? scores_bf16_plain : scores_fp32_plain, weigh_plain,
               bf16 ? values_bf16_plain : values_fp32_plain};
#if defined(__x86_64__)
    if (machine == AVX2)
        ops = (Ops){bf16 ? scores_bf16_avx2 : scores_fp32_avx2, weigh_avx2,
                    bf16 ? values_bf16_avx2 : values_fp32_avx2};
    if (machine == AVX512_BF16) {
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
