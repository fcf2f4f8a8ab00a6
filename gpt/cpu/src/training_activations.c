/* Activations, factors and RMSNorms in training, and their backward passes.

   The linears of a model with a trained adapter add the low-rank product between the GEMM and the
   activation, so these passes are not part of the GEMM. */

#include "gemm.h"
#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Shares of the rows whose sums of gradients are computed apart. Their number does not depend on that
   of the threads, so the sums are the same with any number of threads. */
#define SHARES 32

TARGET_AVX512_BF16 INLINE void store_lanes(uint16_t *to, __mmask16 mask, __m512 x)
{
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

typedef struct {
    const uint16_t *x, *dy;
    uint16_t *out;
    int64_t count, activation;
} Activation;

/* 1 / (1 + exp(-x)). */
TARGET_AVX512_BF16 INLINE __m512 sigmoid_avx512(__m512 x)
{
    return reciprocal(exp_avx512(-x) + 1.0f);
}

/* The derivative of GELU: its factor of x, plus x times the derivative of this factor. */
TARGET_AVX512_BF16 INLINE __m512 gelu_grad(__m512 x, int tanh_form)
{
    if (tanh_form) { /* The factor is the sigmoid of a polynomial. From 20 on it is 0 or 1. */
        /* If an operand is NaN, max and min return the second operand, so a NaN in x stays NaN. */
        x = _mm512_max_ps(_mm512_set1_ps(-20.0f), _mm512_min_ps(_mm512_set1_ps(20.0f), x));
        const __m512 squares = x * x;
        const __m512 y = sigmoid_avx512((squares * 0.044715f + 1.0f) * x * 1.59576912160573072f);
        const __m512 slope = squares * (3.0f * 0.044715f * 1.59576912160573072f) + 1.59576912160573072f;
        return y + x * slope * y * (1.0f - y);
    }
    const __m512 density = exp_avx512(x * x * -0.5f); /* Of the normal distribution, * sqrt(2 pi). */
    const __m512 t = reciprocal(_mm512_abs_ps(x) * (0.3275911f * 0.70710678118654752f) + 1.0f);
    __m512 p = t * 1.061405429f - 1.453152027f; /* Abramowitz and Stegun 7.1.26. */
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const __m512 half_erfc = p * t * density * 0.5f;
    const __mmask16 is_negative = _mm512_movepi32_mask((__m512i)x);
    return _mm512_mask_blend_ps(is_negative, 1.0f - half_erfc, half_erfc) +
           x * density * 0.39894228040143268f;
}

/* The items are vectors of LANES numbers. */
TARGET_AVX512_BF16 static void activation_range(void *context, int64_t first, int64_t end)
{
    const Activation *p = context;
    for (int64_t begin = first * LANES; begin < end * LANES; begin += LANES) {
        __mmask16 mask = lane_mask(p->count - begin);
        __m512 y = activate_avx512(load_bf16(p->x + begin, mask), p->activation);
        store_lanes(p->out + begin, mask, y);
    }
}

TARGET_AVX512_BF16 static void activation_backward_range(void *context, int64_t first, int64_t end)
{
    const Activation *p = context;
    for (int64_t begin = first * LANES; begin < end * LANES; begin += LANES) {
        __mmask16 mask = lane_mask(p->count - begin);
        __m512 slope = gelu_grad(load_bf16(p->x + begin, mask), p->activation == GELU_TANH);
        store_lanes(p->out + begin, mask, load_bf16(p->dy + begin, mask) * slope);
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

/* Backward pass of GELU or tanh GELU: stores the gradient of its input `x` in `out`. `dy` is the
   gradient of the output. */
void preamble_activation_backward(const uint16_t *x, const uint16_t *dy, uint16_t *out,
                                  int64_t count, int64_t activation, int64_t threads)
{
    Activation tensors = {x, dy, out, count, activation};
    const int64_t vectors = (count + LANES - 1) / LANES;
    parallel_for(vectors, items_per_chunk(vectors, threads), threads, STEALING,
                 activation_backward_range, &tensors);
}

/* Stores in `sums` the sums over the shares (SHARES, columns). */
static void sum_shares(const float *shares, int64_t columns, float *sums)
{
    for (int64_t c = 0; c < columns; c++) {
        sums[c] = 0;
        for (int64_t share = 0; share < SHARES; share++)
            sums[c] += shares[share * columns + c];
    }
}

/* silu(gate) * up of the scaled rows of x. A row has `width` gates, then the ups. */
typedef struct {
    const uint16_t *x, *dy;
    const float *factors;      /* Of each column of x; NULL: the rows are not scaled. */
    const uint16_t *late_bias; /* Added after the factors, or NULL. */
    uint16_t *out;
    float *sums; /* (SHARES, 2 * width) */
    int64_t rows, width;
} GatedSilu;

/* Loads up to 16 numbers of a row of x, from `column` on, and scales them. */
TARGET_AVX512_BF16 INLINE __m512 load_scaled(const GatedSilu *p, const uint16_t *row,
                                             int64_t column, __mmask16 mask)
{
    __m512 x = load_bf16(row + column, mask);
    if (p->factors)
        x *= _mm512_maskz_loadu_ps(mask, p->factors + column);
    if (p->late_bias)
        x += load_bf16(p->late_bias + column, mask);
    return x;
}

/* The items are rows. */
TARGET_AVX512_BF16 static void gated_silu_range(void *context, int64_t first, int64_t end)
{
    const GatedSilu *p = context;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *x = p->x + 2 * row * p->width;
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            __m512 g = load_scaled(p, x, c, mask), u = load_scaled(p, x, p->width + c, mask);
            store_lanes(p->out + row * p->width + c, mask, g * sigmoid_avx512(g) * u);
        }
    }
}

/* Stores the gradient of up to 16 numbers of a row of x, from `column` on, and adds the products
   with these numbers to the sums. `dx` is the gradient of the scaled numbers. */
TARGET_AVX512_BF16 INLINE void store_gradient(const GatedSilu *p, float *sums, int64_t row,
                                              int64_t column, __mmask16 mask, __m512 dx)
{
    const int64_t at = 2 * row * p->width + column;
    if (p->factors) {
        add_to_array(sums + column, mask, dx * load_bf16(p->x + at, mask));
        dx *= _mm512_maskz_loadu_ps(mask, p->factors + column);
    }
    store_lanes(p->out + at, mask, dx);
}

/* The items are shares of the rows. */
TARGET_AVX512_BF16 static void gated_silu_backward_range(void *context, int64_t first, int64_t end)
{
    const GatedSilu *p = context;
    for (int64_t share = first; share < end; share++) {
        float *sums = p->sums + share * 2 * p->width;
        if (p->factors)
            memset(sums, 0, 2 * p->width * sizeof *sums);
        const int64_t end_row = (share + 1) * p->rows / SHARES;
        for (int64_t row = share * p->rows / SHARES; row < end_row; row++) {
            const uint16_t *x = p->x + 2 * row * p->width;
            for (int64_t c = 0; c < p->width; c += LANES) {
                __mmask16 mask = lane_mask(p->width - c);
                __m512 g = load_scaled(p, x, c, mask), u = load_scaled(p, x, p->width + c, mask);
                __m512 dy = load_bf16(p->dy + row * p->width + c, mask), s = sigmoid_avx512(g);
                store_gradient(p, sums, row, c, mask, dy * u * s * (g * (1.0f - s) + 1.0f));
                store_gradient(p, sums, row, p->width + c, mask, dy * g * s);
            }
        }
    }
}

/* Stores silu(gate) * up in `out` (rows, width), where the gates and the ups are the columns of
   factors * x + late_bias. NULL omits an operation. */
void preamble_gated_silu(const uint16_t *x, const float *factors, const uint16_t *late_bias,
                         uint16_t *out, int64_t rows, int64_t width, int64_t threads)
{
    GatedSilu tensors = {x, NULL, factors, late_bias, out, NULL, rows, width};
    parallel_for(rows, items_per_chunk(rows, threads), threads, STEALING, gated_silu_range,
                 &tensors);
}

/* Backward pass of `preamble_gated_silu`: stores the gradient of `x` in `out`, and if there are
   factors, their gradient in `factor_grads` (2 * width). */
void preamble_gated_silu_backward(const uint16_t *x, const float *factors,
                                  const uint16_t *late_bias, const uint16_t *dy, uint16_t *out,
                                  float *factor_grads, int64_t rows, int64_t width,
                                  int64_t threads)
{
    float *shares = thread_scratch(factors ? SHARES * 2 * width * sizeof *shares : 0);
    GatedSilu tensors = {x, dy, factors, late_bias, out, shares, rows, width};
    parallel_for(SHARES, items_per_chunk(SHARES, threads), threads, STEALING,
                 gated_silu_backward_range, &tensors);
    if (factors)
        sum_shares(shares, 2 * width, factor_grads);
}

typedef struct {
    const uint16_t *x, *weight, *dy;
    uint16_t *out;
    int64_t width;
    float epsilon;
} RmsNorm;

/* 1 / sqrt(mean of the squares + epsilon) of a row. */
TARGET_AVX512_BF16 INLINE float inverse_rms(const RmsNorm *p, const uint16_t *x)
{
    __m512 squares = _mm512_setzero_ps();
    for (int64_t c = 0; c < p->width; c += LANES) {
        __m512 y = load_bf16(x + c, lane_mask(p->width - c));
        squares += y * y;
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)p->width + p->epsilon);
}

/* The items are rows. */
TARGET_AVX512_BF16 static void rms_norm_range(void *context, int64_t first, int64_t end)
{
    const RmsNorm *p = context;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *x = p->x + row * p->width;
        const float factor = inverse_rms(p, x);
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            __m512 y = load_bf16(x + c, mask) * factor * load_bf16(p->weight + c, mask);
            store_lanes(p->out + row * p->width + c, mask, y);
        }
    }
}

/* dx = r * g - x * r^3 * mean(x * g), where g = weight * dy and r = 1 / RMS. */
TARGET_AVX512_BF16 static void rms_norm_backward_range(void *context, int64_t first, int64_t end)
{
    const RmsNorm *p = context;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *x = p->x + row * p->width, *dy = p->dy + row * p->width;
        const float factor = inverse_rms(p, x);
        __m512 products = _mm512_setzero_ps();
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            products += load_bf16(x + c, mask) * load_bf16(dy + c, mask) *
                        load_bf16(p->weight + c, mask);
        }
        const float mean = _mm512_reduce_add_ps(products) / (float)p->width;
        const float x_factor = mean * factor * factor * factor;
        for (int64_t c = 0; c < p->width; c += LANES) {
            __mmask16 mask = lane_mask(p->width - c);
            __m512 g = load_bf16(dy + c, mask) * load_bf16(p->weight + c, mask);
            store_lanes(p->out + row * p->width + c, mask,
                        g * factor - load_bf16(x + c, mask) * x_factor);
        }
    }
}

/* Stores the RMSNorm of the rows of `x` in `out`. `epsilon` is the address of one number. */
void preamble_rms_norm(const uint16_t *x, const uint16_t *weight, const float *epsilon,
                       uint16_t *out, int64_t rows, int64_t width, int64_t threads)
{
    RmsNorm tensors = {x, weight, NULL, out, width, *epsilon};
    parallel_for(rows, items_per_chunk(rows, threads), threads, STEALING, rms_norm_range,
                 &tensors);
}

/* Backward pass of `preamble_rms_norm`: stores the gradient of `x` in `out`. */
void preamble_rms_norm_backward(const uint16_t *x, const uint16_t *weight, const float *epsilon,
                                const uint16_t *dy, uint16_t *out, int64_t rows, int64_t width,
                                int64_t threads)
{
    RmsNorm tensors = {x, weight, dy, out, width, *epsilon};
    parallel_for(rows, items_per_chunk(rows, threads), threads, STEALING,
                 rms_norm_backward_range, &tensors);
}

typedef struct {
    const uint16_t *dy, *y, *late_bias;
    const float *factors;
    uint16_t *out;
    float *sums; /* (SHARES, columns) */
    int64_t rows, columns, activation;
} ScaleBackward;

/* The items are shares of the rows. */
TARGET_AVX512_BF16 static void scale_backward_range(void *context, int64_t first, int64_t end)
{
    const ScaleBackward *p = context;
    for (int64_t share = first; share < end; share++) {
        float *sums = p->sums + share * p->columns;
        memset(sums, 0, p->columns * sizeof *sums);
        const int64_t end_row = (share + 1) * p->rows / SHARES;
        for (int64_t row = share * p->rows / SHARES; row < end_row; row++)
            for (int64_t c = 0; c < p->columns; c += LANES) {
                const __mmask16 mask = lane_mask(p->columns - c);
                const int64_t at = row * p->columns + c;
                const __m512 factors = _mm512_maskz_loadu_ps(mask, p->factors + c);
                const __m512 y = load_bf16(p->y + at, mask);
                __m512 dy = load_bf16(p->dy + at, mask);
                if (p->activation) {
                    __m512 x = y * factors;
                    if (p->late_bias)
                        x += load_bf16(p->late_bias + c, mask);
                    dy *= gelu_grad(x, p->activation == GELU_TANH);
                }
                add_to_array(sums + c, mask, dy * y);
                store_lanes(p->out + at, mask, dy * factors);
            }
    }
}

/* Backward pass of activation(factors * y + late_bias), with a factor for each column: stores the
   gradient of y in `out`, and that of the factors, a sum over the rows, in `sums` (columns). There
   may be no activation and no late bias. */
void preamble_scale_backward(const uint16_t *dy, const uint16_t *y, const float *factors,
                             const uint16_t *late_bias, int64_t activation, uint16_t *out,
                             float *sums, int64_t rows, int64_t columns, int64_t threads)
{
    float *shares = thread_scratch(SHARES * columns * sizeof *shares);
    ScaleBackward tensors = {dy, y, late_bias, factors, out, shares, rows, columns, activation};
    parallel_for(SHARES, items_per_chunk(SHARES, threads), threads, STEALING, scale_backward_range,
                 &tensors);
    sum_shares(shares, columns, sums);
}

#endif
