/* Products of bf16 rows with a weight in panels.

   A weight is read in the order in which it lies, a panel at a time: by each block of rows that stay
   in a core's own cache meanwhile, up to twelve of them at once. */

#include "gemm.h"
#include "work_stealing.h"

#if defined(__x86_64__)
#define MANY (2 * TILE)  /* From so many rows on it pays to put them side by side. */
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
                      int64_t column, int rows, int beside)
{
    const uint16_t *x = (beside ? p->brought : p->x) + first * p->stride;
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    add_ahead(sum, x, beside ? 2 : p->stride, beside ? 2 * rows : 2, panel,
              p->weight->channels / 2, rows, ahead);
    finish(p, sum, first, column, rows);
}

#define TILE_OF(n) case n: tile(p, panel, ahead, first, column, n, 0); break;

/* One panel's columns of the rows from `first` to `end`. */
BF16 static void tiles(const Product *p, const uint16_t *panel, int64_t column, int64_t first,
                       int64_t end)
{
    const int64_t count = (end - first + TILE - 1) / TILE;
    const int64_t each = p->beside ? TILE : (end - first + count - 1) / count;
    const int64_t bytes = p->weight->channels * COLUMNS * sizeof *panel;
    /* With several tiles each fetches its share of the next panel, so that memory never waits. */
    Ahead ahead = {(const char *)panel + (count > 1 ? bytes : 2048), 128 / count};
    for (; first < p->beside && first < end; first += TILE, ahead.from += bytes / count)
        tile(p, panel, ahead, first, column, TILE, 1);
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

/* A tile's rows, side by side. */
BF16 static void put_beside(const uint16_t *from, int64_t channels, uint16_t *to)
{
    for (int64_t c = 0; c < channels; c += 2 * LANES) {
        const int64_t left = (channels - c) / 2, pairs = left < LANES ? left : LANES;
        Ints x[LANES] = {0};
#pragma GCC unroll 12
        for (int64_t i = 0; i < TILE; i++)
            x[i] = (Ints)_mm512_maskz_loadu_epi32(first_lanes(left), from + i * channels + c);
        turn(x);
        for (int64_t k = 0; k < pairs; k++, to += 2 * TILE)
            _mm512_mask_storeu_epi32(to, first_lanes(TILE), (__m512i)x[k]);
    }
}

/* Says of a product where its rows go on their way in, which come from x and through a norm, if
   there is one. */
static void make_way(Product *p, const uint16_t *x, const Norm *norm, int64_t threads)
{
    const int64_t width = p->weight->channels, bytes = p->weight->scales ? p->rows : 0;
    const int many = !bytes && p->rows >= MANY && machine == AVX512_BF16;
    p->stride = stride_of(width);
    p->beside = many ? p->rows / TILE * TILE : 0;
    const int moved = norm || p->stride != width;
    const int64_t desks = norm && many ? threads * TILE * width : 0;
    const int64_t numbers = (moved || many ? p->rows * p->stride : 0) + desks;
    p->groups = room_for(bytes * groups_of(width) * sizeof(Group) + numbers * sizeof *x);
    p->brought = (uint16_t *)(p->groups + bytes * groups_of(width));
    p->x = moved ? p->brought : x;
}

/* Brings rows to where a product reads them. All threads of it come here together. */
static void bring(const Product *p, const uint16_t *x, const Norm *norm)
{
    const int64_t width = p->weight->channels;
    if (!p->beside && p->x == x && !p->weight->scales)
        return; /* They are read where they are. */
    uint16_t *desk = p->brought + p->rows * p->stride + omp_get_thread_num() * TILE * width;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < p->beside; row += TILE) {
        for (int64_t i = 0; norm && i < TILE; i++)
            norm_row(norm, x + (row + i) * width, width, desk + i * width);
        put_beside(norm ? desk : x + row * width, width, p->brought + row * p->stride);
    }
#pragma omp for schedule(static)
    for (int64_t row = p->beside; row < p->rows; row++) {
        const uint16_t *from = x + row * width, *here = p->x + row * p->stride;
        if (norm)
            norm_row(norm, from, width, p->brought + row * p->stride);
        else if (here != from)
            memcpy(p->brought + row * p->stride, from, width * sizeof *x);
        if (p->weight->scales)
            bring_to_bytes(here, width, p->groups + row * groups_of(width));
    }
}

void multiply(Product product, const uint16_t *x, const Norm *norm, int64_t threads)
{
    const Weight *weight = product.weight;
    const int64_t rows = product.rows, size = weight->channels * COLUMNS;
    const int64_t panels = ((weight->columns << weight->gated) + COLUMNS - 1) / COLUMNS;
    /* Rows that a core keeps near go by panel after panel; then come the next ones. */
    const int64_t together = weight->scales ? rows : rows_together(rows, weight->channels);
    const int64_t blocks = (rows + together - 1) / together;
    const int64_t lot = at_once(panels, threads), lots = (panels + lot - 1) / lot;
    Shares shares = {0};
    make_way(&product, x, norm, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        bring(&product, x, norm);
        for (int64_t task; (task = next_task(&shares, blocks * lots)) >= 0;) {
            const int64_t first = task / lots * together, from = task % lots * lot;
            const int64_t end = first + together < rows ? first + together : rows;
            for (int64_t panel = from; panel < panels && panel < from + lot; panel++)
                if (weight->scales)
                    multiply_bytes(&product, panel);
                else
                    (machine < AVX512_BF16 ? tiles_avx2 : tiles)(
                        &product, (const uint16_t *)weight->panels + panel * size,
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
    const int64_t share = columns / COLUMNS / (threads * 8) + 1;
    Product product = {.weight = &shape, .bias = bias, .residual = residual, .out = out,
                       .rows = rows, .activation = activation, .before = before};
    if (!rows)
        return;
    make_way(&product, x, NULL, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint16_t *panel = memory + omp_get_thread_num() * channels * COLUMNS;
        bring(&product, x, NULL);
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
