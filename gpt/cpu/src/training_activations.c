/* Activations and factors of adapted linears in training, and their backward passes.

   The linears of a model with a trained adapter add the low-rank product between the GEMM and the
   activation, so these passes are not part of the GEMM. */

#include "gemm.h"
#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Columns of a block of `preamble_scale_backward`, which keeps their sums in registers. */
#define BLOCK_COLUMNS (4 * LANES)

TARGET_AVX512_BF16 INLINE void store_lanes(uint16_t *to, __mmask16 mask, __m512 x)
{
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

typedef struct {
    const uint16_t *x, *dy;
    uint16_t *out;
    int64_t count, activation;
} Activation;

/* The items are vectors of LANES numbers. */
TARGET_AVX512_BF16 static void activation_range(void *context, int64_t first, int64_t end)
{
    const Activation *p = context;
    for (int64_t begin = first * LANES; begin < end * LANES; begin += LANES) {
        __mmask16 mask = lane_mask(p->count - begin);
        Floats y = activate((Floats)load_bf16(p->x + begin, mask), p->activation);
        store_lanes(p->out + begin, mask, (__m512)y);
    }
}

/* Stores the activation of the `count` numbers of `x` in `out`. */
void preamble_activation(const uint16_t *x, uint16_t *out, int64_t count, int64_t activation,
                         int64_t threads)
{
    Activation tensors = {x, NULL, out, count, activation};
    const int64_t vectors = (count + LANES - 1) / LANES;
    parallel_for(vectors, items_per_chunk(vectors, threads), threads, STEALING, activation_range,
                 &tensors);
}

typedef struct {
    const uint16_t *x, *dy;
    uint16_t *out;
    int64_t width;
} GatedSilu;

/* The items are rows: gates, then ups. */
TARGET_AVX512_BF16 static void gated_silu_range(void *context, int64_t first, int64_t end)
{
    const GatedSilu *p = context;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *gate = p->x + 2 * row * p->width, *up = gate + p->width;
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            Floats g = (Floats)load_bf16(gate + c, mask), u = (Floats)load_bf16(up + c, mask);
            store_lanes(p->out + row * p->width + c, mask, (__m512)(g * sigmoid(g) * u));
        }
    }
}

TARGET_AVX512_BF16 static void gated_silu_backward_range(void *context, int64_t first, int64_t end)
{
    const GatedSilu *p = context;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *gate = p->x + 2 * row * p->width, *up = gate + p->width;
        uint16_t *to = p->out + 2 * row * p->width;
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            Floats g = (Floats)load_bf16(gate + c, mask), u = (Floats)load_bf16(up + c, mask);
            Floats dy = (Floats)load_bf16(p->dy + row * p->width + c, mask), s = sigmoid(g);
            store_lanes(to + c, mask, (__m512)(dy * u * s * (g * (s * -1.0f + 1.0f) + 1.0f)));
            store_lanes(to + p->width + c, mask, (__m512)(dy * g * s));
        }
    }
}

/* Stores silu(gate) * up in `out` (rows, width). `x` (rows, 2 * width) has gates, then ups. */
void preamble_gated_silu(const uint16_t *x, uint16_t *out, int64_t rows, int64_t width,
                         int64_t threads)
{
    GatedSilu tensors = {x, NULL, out, width};
    parallel_for(rows, items_per_chunk(rows, threads), threads, STEALING, gated_silu_range,
                 &tensors);
}

/* Backward pass of `preamble_gated_silu`: stores the gradient of `x` in `out`. */
void preamble_gated_silu_backward(const uint16_t *x, const uint16_t *dy, uint16_t *out,
                                  int64_t rows, int64_t width, int64_t threads)
{
    GatedSilu tensors = {x, dy, out, width};
    parallel_for(rows, items_per_chunk(rows, threads), threads, STEALING,
                 gated_silu_backward_range, &tensors);
}

typedef struct {
    const uint16_t *dy, *y, *factor;
    uint16_t *out;
    float *sums;
    int64_t rows, columns;
} ScaleBackward;

/* The items are blocks of columns. */
TARGET_AVX512_BF16 static void scale_backward_range(void *context, int64_t first, int64_t end)
{
    const ScaleBackward *p = context;
    for (int64_t block = first; block < end; block++) {
        const int64_t begin = block * BLOCK_COLUMNS;
        __m512 sums[4], factor[4];
        __mmask16 mask[4];
        for (int i = 0; i < 4; i++) {
            int64_t left = p->columns - begin - i * LANES;
            mask[i] = left > 0 ? lane_mask(left) : 0;
            sums[i] = _mm512_setzero_ps();
            factor[i] = load_bf16(p->factor + begin + i * LANES, mask[i]);
        }
        for (int64_t row = 0; row < p->rows; row++) {
            const int64_t at = row * p->columns + begin;
            for (int i = 0; i < 4; i++) {
                __m512 dy = load_bf16(p->dy + at + i * LANES, mask[i]);
                sums[i] += dy * load_bf16(p->y + at + i * LANES, mask[i]);
                store_lanes(p->out + at + i * LANES, mask[i], dy * factor[i]);
            }
        }
        for (int i = 0; i < 4; i++)
            _mm512_mask_storeu_ps(p->sums + begin + i * LANES, mask[i], sums[i]);
    }
}

/* Backward pass of factor * y for a factor of each column: stores factor * dy in `out`, and the
   gradient of the factor, the sums of dy * y over the rows, in `sums`. */
void preamble_scale_backward(const uint16_t *dy, const uint16_t *y, const uint16_t *factor,
                             uint16_t *out, float *sums, int64_t rows, int64_t columns,
                             int64_t threads)
{
    ScaleBackward tensors = {dy, y, factor, out, sums, rows, columns};
    const int64_t blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    parallel_for(blocks, 1, threads, STEALING, scale_backward_range, &tensors);
}

#endif
