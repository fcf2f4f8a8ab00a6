/* Products of bf16 rows with a weight in panels.

   A weight is read in the order in which it lies, a panel at a time: by each block of rows that stay
   in a core's own cache meanwhile, up to twelve of them at once. */

#include "product.h"
#include "shares.h"

#if defined(__x86_64__)
#define KEPT (384 << 10) /* Bytes of rows: some of a core's own cache, beside two panels. */

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
BF16 INLINE void tile(const Product *p, const uint16_t *panel, Ahead ahead, int64_t first,
                      int64_t column, int rows)
{
    const Weight *w = p->weight;
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    add_ahead(sum, p->x + first * p->stride, p->stride, panel, w->channels / 2, rows, ahead);
    finish(p, sum, first, column, rows);
}

#define TILE_OF(n) case n: tile(p, panel, ahead, first, column, n); break;

/* One panel's columns of the rows from `first` to `end`. */
BF16 static void tiles(const Product *p, const uint16_t *panel, int64_t column, int64_t first,
                       int64_t end)
{
    const int64_t count = (end - first + TILE - 1) / TILE, each = (end - first + count - 1) / count;
    const int64_t bytes = p->weight->channels * COLUMNS * sizeof *panel;
    /* With several tiles each fetches its share of the next panel, so that memory never waits. */
    Ahead ahead = {(const char *)panel + (count > 1 ? bytes : 2048), 128 / count};
    for (; first < end; first += each, ahead.from += bytes / count)
        switch (end - first < each ? end - first : each) {
            TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
            TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
        }
}

/* So many rows stay near while panels go by: whole tiles, and all blocks of about one size. */
static int64_t rows_together(int64_t rows, int64_t channels)
{
    const int64_t kept = KEPT / (channels * 2) / TILE * TILE, most = kept > TILE ? kept : TILE;
    const int64_t blocks = (rows + most - 1) / most;
    return (rows + blocks * TILE - 1) / (blocks * TILE) * TILE;
}

BF16 static void norm_row_wide(const Norm *norm, const uint16_t *x, int64_t width,
                               uint16_t *out)
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

/* A row of `width` numbers, normed. */
void norm_row(const Norm *norm, const uint16_t *x, int64_t width, uint16_t *out)
{
    (machine < AVX512_BF16 ? norm_row_avx2 : norm_row_wide)(norm, x, width, out);
}

/* Rows whose beginnings are whole pages apart would drive each other from the nearest cache. */
static int64_t stride_of(int64_t channels) { return channels + (channels % 2048 ? 0 : COLUMNS); }

void multiply(Product product, const uint16_t *x, const Norm *norm, int64_t threads)
{
    const Weight *weight = product.weight;
    const int64_t rows = product.rows, width = weight->channels, stride = stride_of(width);
    const int64_t groups = weight->scales ? groups_of(width) : 0;
    const int moved = norm || stride != width;
    Group *bytes = room_for(rows * (groups * sizeof *bytes + moved * stride * sizeof *x));
    uint16_t *brought = (uint16_t *)(bytes + rows * groups);
    product.x = moved ? brought : x;
    product.stride = moved ? stride : width;
    product.groups = groups ? bytes : NULL;
    const int64_t made = weight->columns << weight->gated;
    const int64_t panels = (made + COLUMNS - 1) / COLUMNS;
    /* Rows that a core keeps near go by panel after panel; then come the next ones. */
    const int64_t together = groups ? rows : rows_together(rows, width);
    const int64_t blocks = (rows + together - 1) / together;
    const int64_t lot = at_once(panels, threads), lots = (panels + lot - 1) / lot;
    Shares shares = {0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (moved || groups)
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                if (norm)
                    norm_row(norm, x + row * width, width, brought + row * stride);
                else if (moved)
                    memcpy(brought + row * stride, x + row * width, width * sizeof *x);
                if (groups)
                    bring_to_bytes(product.x + row * product.stride, width, bytes + row * groups);
            }
        for (int64_t task; (task = next_task(&shares, blocks * lots)) >= 0;) {
            const int64_t first = task / lots * together, from = task % lots * lot;
            const int64_t end = first + together < rows ? first + together : rows;
            for (int64_t panel = from; panel < panels && panel < from + lot; panel++)
                if (groups)
                    multiply_bytes(&product, panel);
                else
                    (machine < AVX512_BF16 ? tiles_avx2 : tiles)(
                        &product, (const uint16_t *)weight->panels + panel * width * COLUMNS,
                        panel * COLUMNS, first, end);
        }
    }
}

/* With a norm, rows are normed first. */
void preamble_multiply(const Weight *weight, const uint16_t *x, int64_t rows, const uint16_t *bias,
                       int64_t activation, const uint16_t *residual, void *out, int64_t threads,
                       const Norm *norm)
{
    const Product product = {.weight = weight, .bias = bias, .residual = residual, .out = out,
                             .rows = rows, .activation = activation};
    if (rows)
        multiply(product, x, norm, threads);
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
    const Weight shape = {NULL, channels, columns, 0, 0, NULL};
    const Product product = {.weight = &shape, .x = x, .bias = bias, .residual = residual,
                             .out = out, .rows = rows, .activation = activation,
                             .before = before, .stride = channels};
    const int64_t share = columns / COLUMNS / (threads * 8) + 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint16_t *panel = memory + omp_get_thread_num() * channels * COLUMNS;
#pragma omp for schedule(dynamic, share)
        for (int64_t column = 0; column < columns; column += COLUMNS) {
            make_panel(weight, channels, columns, turned, column, panel);
            tiles(&product, panel, column, 0, rows);
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
