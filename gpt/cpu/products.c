/* Products of bf16 rows with a weight in panels, and what comes after: bias, activation, residual.

   A weight is read once, in the order in which it lies, for up to twelve rows at a time. */

#include "panels.h"

#if defined(__x86_64__)
#include <omp.h>

enum { NOTHING, GELU, GELU_TANH };

typedef struct {
    const uint16_t *panels;
    int64_t channels, columns;
    int64_t wide; /* The results stay fp32. */
} Weight;

/* What is done to rows before: LayerNorm, or RMSNorm, by fp32 numbers. */
typedef struct {
    const float *scale, *shift; /* No shift: NULL. */
    double epsilon;
    int64_t rms;
} Norm;

/* Rows (bf16) times a weight, and what comes after it. */
typedef struct {
    const Weight *weight;
    const uint16_t *x, *bias, *residual;
    void *out;
    int64_t rows, activation;
    uint16_t *before; /* Where rows go as they are before the activation, or NULL. */
} Product;

/* tanh or erf of what GELU takes it of. */
INLINE Floats bend(Floats x, int tanh_form)
{
    const Ints sign = (Ints)x & (int32_t)0x80000000;
    const Floats one = (Floats){0} + 1.0f;
    Floats y;
    if (tanh_form) {
        Floats z = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
        z = (Floats)((Ints)z & 0x7fffffff);
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
    return (Floats)((Ints)y | sign);
}

INLINE Floats gelu(Floats x, int tanh_form)
{
    return x * 0.5f * (bend(x, tanh_form) + 1.0f);
}

/* How much GELU grows with x. */
INLINE Floats gelu_slope(Floats x, int tanh_form)
{
    Floats y = bend(x, tanh_form), density;
    if (tanh_form)
        density = (y * y * -1.0f + 1.0f) * (x * x * 0.134145f + 1.0f) * 0.39894228040143268f;
    else
        density = power(x * x * -0.5f) * 0.39894228040143268f;
    return (y + 1.0f) * 0.5f + x * density;
}

/* One panel's columns of `rows` rows. Each sum is taken channel by channel, however many rows. */
BF16 INLINE void tile(const Product *p, const uint16_t *panel, int64_t first, int64_t column,
                      int rows)
{
    const Weight *w = p->weight;
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    add(sum, p->x + first * w->channels, w->channels, panel, w->channels / 2, rows);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64_t at = column + half * LANES, left = w->columns - at;
        if (left <= 0)
            break;
        __mmask16 there = first_lanes(left);
        __m512 bias = p->bias ? widened(p->bias + at, there) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int64_t place = (first + i) * w->columns + at;
            __m512 y = sum[i][half] + bias;
            if (p->before) { /* What is kept is what the activation is taken of. */
                __m256bh rounded = _mm512_cvtneps_pbh(y);
                _mm256_mask_storeu_epi16(p->before + place, there, (__m256i)rounded);
                y = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded), 16);
            }
            if (p->activation)
                y = (__m512)gelu((Floats)y, p->activation == GELU_TANH);
            if (p->residual)
                y += widened(p->residual + place, there);
            if (w->wide)
                _mm512_mask_storeu_ps((float *)p->out + place, there, y);
            else
                _mm256_mask_storeu_epi16((uint16_t *)p->out + place, there,
                                         (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
}

#define TILE_OF(n) case n: tile(p, panel, first, column, n); break;

BF16 static void tiles(const Product *p, const uint16_t *panel, int64_t column)
{
    int64_t count = (p->rows + TILE - 1) / TILE;
    int64_t size = (p->rows + count - 1) / count;
    for (int64_t first = 0; first < p->rows; first += size)
        switch (p->rows - first < size ? p->rows - first : size) {
            TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
            TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
        }
}

/* A row of `width` numbers, normed. */
BF16 static void norm_row(const Norm *norm, const uint16_t *x, int64_t width, uint16_t *out)
{
    __m512 sum = _mm512_setzero_ps(), squares = sum;
    for (int64_t c = 0; !norm->rms && c < width; c += LANES)
        sum += widened(x + c, first_lanes(width - c));
    const float mean = _mm512_reduce_add_ps(sum) / width;
    for (int64_t c = 0; c < width; c += LANES) {
        __mmask16 there = first_lanes(width - c);
        __m512 y = _mm512_maskz_mov_ps(there, widened(x + c, there) - mean);
        squares += y * y;
    }
    const float share = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / width + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c += LANES) {
        __mmask16 there = first_lanes(width - c);
        __m512 y = (widened(x + c, there) - mean) * share;
        y *= _mm512_maskz_loadu_ps(there, norm->scale + c);
        if (norm->shift)
            y += _mm512_maskz_loadu_ps(there, norm->shift + c);
        _mm256_mask_storeu_epi16(out + c, there, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

/* With a norm, the rows are normed into `normed` first. */
void preamble_multiply(const Weight *weight, const uint16_t *x, int64_t rows, const uint16_t *bias,
                       int64_t activation, const uint16_t *residual, void *out, int64_t threads,
                       const Norm *norm, uint16_t *normed)
{
    if (rows == 0)
        return;
    const uint16_t *read = norm ? normed : x;
    const Product product = {weight, read, bias, residual, out, rows, activation, NULL};
    const int64_t panels = (weight->columns + COLUMNS - 1) / COLUMNS, width = weight->channels;
    /* A thread that something else has kept from its core does not keep the others waiting long. */
    const int64_t share = panels / (threads * 8) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (norm)
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                norm_row(norm, x + row * width, width, normed + row * width);
#pragma omp for schedule(dynamic, share)
        for (int64_t panel = 0; panel < panels; panel++)
            tiles(&product, weight->panels + panel * width * COLUMNS, panel * COLUMNS);
    }
}

BF16 static void make_panel(const uint16_t *weight, int64_t channels, int64_t columns,
                            int64_t turned, int64_t column, uint16_t *to)
{
    if (!turned)
        panel_of(weight + column * channels, channels, COLUMNS, channels, to);
    for (int64_t c = 0; turned && c < channels; c += 2) {
        const uint16_t *row = weight + c * columns + column;
        pair_up(row, row + columns, COLUMNS, to + c * COLUMNS);
    }
}

/* The same with a weight that lies as it came, in whole 32s both ways: a panel is made of it in
   passing, in the thread's own memory. `turned`: of (channels, columns), else (columns, channels).
   `before`: where rows go as they are before the activation, rounded; it is taken of that. */
void preamble_multiply_by(const uint16_t *weight, int64_t channels, int64_t columns, int64_t turned,
                          const uint16_t *x, int64_t rows, const uint16_t *bias, int64_t activation,
                          const uint16_t *residual, uint16_t *out, uint16_t *before,
                          int64_t threads, uint16_t *memory)
{
    const Weight shape = {NULL, channels, columns, 0};
    const Product product = {&shape, x, bias, residual, out, rows, activation, before};
    const int64_t share = columns / COLUMNS / (threads * 8) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint16_t *panel = memory + omp_get_thread_num() * channels * COLUMNS;
#pragma omp for schedule(dynamic, share)
        for (int64_t column = 0; column < columns; column += COLUMNS) {
            make_panel(weight, channels, columns, turned, column, panel);
            tiles(&product, panel, column);
        }
    }
}

/* What a row before its activation gets of what a row after it gets. */
BF16 void preamble_before_activation(const uint16_t *before, const uint16_t *dy, uint16_t *out,
                                     int64_t count, int64_t activation, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t at = 0; at < count; at += LANES) {
        __mmask16 there = first_lanes(count - at);
        Floats slope = gelu_slope((Floats)widened(before + at, there), activation == GELU_TANH);
        __m512 y = widened(dy + at, there) * (__m512)slope;
        _mm256_mask_storeu_epi16(out + at, there, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

#endif
