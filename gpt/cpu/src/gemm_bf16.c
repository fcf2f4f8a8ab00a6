/* GEMM in AVX512-bf16 with packed weights: cache-blocked rows, work stealing between threads.

   A weight is read in memory order, one panel at a time. Each block of rows fits into a core's
   private cache and is multiplied by panel after panel, up to twelve rows at a time. */

#include "low_rank.h"
#include "thread_pool.h"

#if defined(__x86_64__)
/* Maximum bytes of a block of rows. A core's private cache must also have space for two panels. */
#define CACHE_BLOCK_BYTES (384 << 10)
/* For fewer elements, starting a parallel loop takes longer than staging the rows. */
#define PARALLEL_STAGING_ELEMENTS_MIN (8 << 10)

/* Prefetches the numbers of other tensors that the epilogue of a tile reads. Each row has its own
   cache line. */
INLINE void prefetch_for_epilogue(const Gemm *p, int64_t first, int64_t column, int rows)
{
    const uint16_t *multiplied = p->scaling ? p->scaling->multiplied : NULL;
    for (int i = 0; i < rows; i++) {
        const int64_t offset = (first + i) * p->weight->columns + column;
        if (p->residual)
            __builtin_prefetch(p->residual + offset);
        if (multiplied)
            __builtin_prefetch(multiplied + offset);
    }
}

/* Computes one panel's columns for `rows` rows. Each sum adds its channels in the same order for
   any number of rows. */
TARGET_AVX512_BF16 INLINE void gemm_tile(const Gemm *p, const uint16_t *panel, Prefetch prefetch,
                                         int64_t first, int64_t column, int rows, int interleaved)
{
    const uint16_t *x = (interleaved ? p->staged : p->x) + first * p->x_stride;
    const int64_t stride = interleaved ? 2 : p->x_stride, step = interleaved ? 2 * rows : 2;
    const int64_t channels = p->weight->channels;
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    prefetch_for_epilogue(p, first, column, rows);
    TileTerms terms;
    terms.is_general = 0;
    if (p->adapters)
        plan_tile_terms(p, column, first, rows, &terms);
    accumulate_prefetching(sum, x, stride, step, panel, channels / 2, rows, prefetch);
    if (p->further_channels)
        accumulate_prefetching(sum, x + (channels + p->skipped_channels) / 2 * step, stride, step,
                               panel + channels * COLUMNS, p->further_channels / 2, rows,
                               prefetch);
    if (p->adapters) {
        await_projection(p);
        add_tile_terms(&terms, sum, rows);
    }
    epilogue(p, sum, first, column, rows, terms.is_general);
}

#define TILE_CASE(n)                                                                               \
    case n: gemm_tile(p, panel, prefetch, first, column, n, 0); break;

TARGET_AVX512_BF16 void gemm_panel(const Gemm *p, const uint16_t *panel, int64_t column,
                                          int64_t first, int64_t end)
{
    const int64_t tiles = (end - first + TILE - 1) / TILE;
    const int64_t tile_rows = p->interleaved_rows ? TILE : (end - first + tiles - 1) / tiles;
    const int64_t bytes = p->weight->channels * COLUMNS * sizeof *panel;
    /* With several tiles, each tile prefetches a part of the next panel, so that memory transfers
       do not pause. */
    Prefetch prefetch = {(const char *)panel + (tiles > 1 ? bytes : 2048), 128 / tiles};
    for (; first < p->interleaved_rows && first < end;
         first += TILE, prefetch.address += bytes / tiles)
        gemm_tile(p, panel, prefetch, first, column, TILE, 1);
    for (; first < end; first += tile_rows, prefetch.address += bytes / tiles)
        switch (end - first < tile_rows ? end - first : tile_rows) {
            FOR_EACH_TILE_ROWS(TILE_CASE)
        }
}

int64_t cache_block_rows(int64_t rows, int64_t channels)
{
    const int64_t fitting_rows = CACHE_BLOCK_BYTES / (channels * 2) / TILE * TILE,
                  block_rows = fitting_rows > TILE ? fitting_rows : TILE;
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    return (rows + blocks * TILE - 1) / (blocks * TILE) * TILE;
}

TARGET_AVX512_BF16 static void norm_row_avx512(const NormArgs *norm, const uint16_t *x,
                                               int64_t width, uint16_t *out)
{
    __m512 sum = _mm512_setzero_ps(), squares = sum;
    for (int64_t c = 0; !norm->rms && c < width; c += LANES)
        sum += load_bf16(x + c, lane_mask(width - c));
    const float mean = _mm512_reduce_add_ps(sum) / width;
    for (int64_t c = 0; c < width; c += LANES) {
        __mmask16 mask = lane_mask(width - c);
        __m512 y = _mm512_maskz_mov_ps(mask, load_bf16(x + c, mask) - mean);
        squares += y * y;
    }
    const float inverse_std =
        1.0f / sqrtf(_mm512_reduce_add_ps(squares) / width + (float)norm->epsilon);
    for (int64_t c = 0; c < width; c += LANES) {
        __mmask16 mask = lane_mask(width - c);
        __m512 y = (load_bf16(x + c, mask) - mean) * inverse_std;
        y *= _mm512_maskz_loadu_ps(mask, norm->scale + c);
        if (norm->shift)
            y += _mm512_maskz_loadu_ps(mask, norm->shift + c);
        _mm256_mask_storeu_epi16(out + c, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

void norm_row(const NormArgs *norm, const uint16_t *x, int64_t width, uint16_t *out)
{
    (isa_level < AVX512_BF16 ? norm_row_avx2 : norm_row_avx512)(norm, x, width, out);
}

int64_t padded_stride(int64_t channels)
{
    return channels + (channels % 2048 ? 0 : COLUMNS);
}

TARGET_AVX512_BF16 void interleave_tile(const uint16_t *from, int64_t channels, uint16_t *to)
{
    for (int64_t c = 0; c < channels; c += 2 * LANES) {
        const int64_t left = (channels - c) / 2, pairs = left < LANES ? left : LANES;
        Ints x[LANES] = {0};
#pragma GCC unroll 12
        for (int64_t i = 0; i < TILE; i++)
            x[i] = (Ints)_mm512_maskz_loadu_epi32(lane_mask(left), from + i * channels + c);
        transpose_16x16(x);
        for (int64_t k = 0; k < pairs; k++, to += 2 * TILE)
            _mm512_mask_storeu_epi32(to, lane_mask(TILE), (__m512i)x[k]);
    }
}

/* Decides where to stage the rows of x for a GEMM, and allocates the memory. `norm` is NULL if
   there is no norm. */
static void plan_staging(Gemm *p, const uint16_t *x, const NormArgs *norm, int64_t threads)
{
    const int64_t width = p->weight->channels, int8_rows = p->weight->scales ? p->rows : 0;
    const int interleave = !int8_rows && p->rows >= INTERLEAVE_ROWS_MIN && isa_level == AVX512_BF16;
    p->x_stride = padded_stride(width);
    p->interleaved_rows = interleave ? p->rows / TILE * TILE : 0;
    const int scaled = p->adapters && adapters_scale_inputs(p->adapters);
    const int copied = norm || scaled || p->x_stride != width;
    const int64_t tile_scratch = (norm || scaled) && interleave ? threads * TILE * width : 0;
    const int64_t staged_numel = (copied || interleave ? p->rows * p->x_stride : 0) + tile_scratch;
    p->u_stride = p->adapters ? adapters_rank_max(p->adapters) : 0;
    p->common_term = p->adapters ? common_term(p->adapters, p->rows) : NULL;
    p->groups = thread_scratch(int8_rows * group_count(width) * sizeof(QuantizedGroup) +
                               (staged_numel + p->rows * p->u_stride) * sizeof *x);
    p->staged = (uint16_t *)(p->groups + int8_rows * group_count(width));
    p->u = p->staged + staged_numel;
    p->x = copied ? p->staged : x;
}

/* The rows to stage for a GEMM, as the context of a parallel loop. Its items are the tiles of
   interleaved rows, then groups of `group_rows` of the other rows. */
typedef struct {
    const Gemm *product;
    const uint16_t *x;
    const NormArgs *norm;
    int projects;      /* Whether u is stored, too. */
    int scales_inputs; /* Whether an adapter scales its rows. */
    int64_t group_rows;
} Staging;

static void stage_tile(const Staging *s, int64_t row)
{
    const Gemm *p = s->product;
    const int64_t width = p->weight->channels;
    const uint16_t *from = s->x + row * width;
    uint16_t *tile = p->staged + p->rows * p->x_stride + worker_index() * TILE * width;
    if (s->norm)
        for (int64_t i = 0; i < TILE; i++)
            norm_row(s->norm, from + i * width, width, tile + i * width);
    else if (s->scales_inputs)
        memcpy(tile, from, TILE * width * sizeof *tile);
    if (s->norm || s->scales_inputs)
        from = tile;
    if (s->projects)
        project_rows(p, from, width, row, TILE);
    for (int64_t i = 0; s->scales_inputs && i < TILE; i++)
        scale_input_row(p, row + i, tile + i * width);
    interleave_tile(from, width, p->staged + row * p->x_stride);
}

/* Stages the rows from `first` to `end`, without interleaving them. */
static void stage_group(const Staging *s, int64_t first, int64_t end)
{
    const Gemm *p = s->product;
    const int64_t width = p->weight->channels;
    for (int64_t row = first; row < end; row++) {
        const uint16_t *from = s->x + row * width;
        if (s->norm)
            norm_row(s->norm, from, width, p->staged + row * p->x_stride);
        else if (p->x + row * p->x_stride != from)
            memcpy(p->staged + row * p->x_stride, from, width * sizeof *from);
    }
    if (s->projects)
        project_rows(p, p->x + first * p->x_stride, p->x_stride, first, end - first);
    for (int64_t row = first; row < end; row++) {
        if (s->scales_inputs)
            scale_input_row(p, row, p->staged + row * p->x_stride);
        if (p->weight->scales)
            quantize_row(p->x + row * p->x_stride, width, p->groups + row * group_count(width));
    }
}

static void stage_range(void *context, int64_t first, int64_t end)
{
    const Staging *s = context;
    const int64_t tiles = s->product->interleaved_rows / TILE;
    for (int64_t i = first; i < end; i++) {
        const int64_t row = s->product->interleaved_rows + (i - tiles) * s->group_rows;
        const int64_t rows = s->product->rows;
        if (i < tiles)
            stage_tile(s, i * TILE);
        else
            stage_group(s, row, row + s->group_rows < rows ? row + s->group_rows : rows);
    }
}

/* Whether one thread stages all rows. */
static int stages_serially(const Gemm *p)
{
    const int64_t groups = p->adapters ? adapter_groups(p->adapters, p->rows) : 1;
    const int64_t elements = p->rows * p->weight->channels * groups;
    return p->rows == 1 || elements < PARALLEL_STAGING_ELEMENTS_MIN;
}

/* `projects`: whether u is stored, too, if there are adapters. */
static void stage_rows(const Gemm *p, const uint16_t *x, const NormArgs *norm, int64_t threads,
                       int projects)
{
    projects = projects && p->adapters;
    if (!p->interleaved_rows && p->x == x && !p->weight->scales && !projects)
        return; /* The GEMM reads x in place. */
    if (stages_serially(p))
        threads = 1;
    /* With adapters, adjacent rows read A together. */
    const int64_t rest = p->rows - p->interleaved_rows, share = (rest + threads - 1) / threads;
    const int64_t group_rows = !p->adapters || share < 1 ? 1 : share < TILE ? share : TILE;
    const int64_t count = p->interleaved_rows / TILE + (rest + group_rows - 1) / group_rows;
    const int scales_inputs = p->adapters && adapters_scale_inputs(p->adapters);
    Staging staging = {p, x, norm, projects, scales_inputs, group_rows};
    parallel_for(count, items_per_chunk(count, threads), threads, STEALING, stage_range, &staging);
}

/* The items of a GEMM's parallel loop: (block of rows, panel) pairs, ordered by block, so that a
   block stays in a core's cache for many panels. */
typedef struct {
    const Gemm *product;
    int64_t block_rows, panels;
    /* 1: a first item stores u, for which the other items wait; then `is_projected` is set. */
    int64_t projections;
    _Atomic int32_t is_projected;
} PanelLoop;

void multiply_panel(const Gemm *p, int64_t panel, int64_t first, int64_t end)
{
    const PackedWeight *weight = p->weight;
    const int64_t size = weight->channels * COLUMNS << (weight->fp32 != 0);
    const uint16_t *words = (const uint16_t *)weight->panels + panel * size;
    if (weight->scales)
        gemm_int8_panel(p, panel);
    else if (isa_level < AVX512_BF16)
        gemm_panel_avx2(p, words, panel * COLUMNS, first, end);
    else if (weight->fp32)
        gemm_fp32_panel(p, (const float *)words, panel * COLUMNS, first, end);
    else
        gemm_panel(p, words, panel * COLUMNS, first, end);
}

static void gemm_range(void *context, int64_t first, int64_t end)
{
    PanelLoop *loop = context;
    const Gemm *p = loop->product;
    if (first < loop->projections) {
        project_rows(p, p->x, p->x_stride, 0, p->rows);
        atomic_store_explicit(&loop->is_projected, 1, memory_order_release);
        first++;
    }
    for (int64_t item = first; item < end; item++) {
        const int64_t i = item - loop->projections;
        const int64_t panel = i % loop->panels, row = i / loop->panels * loop->block_rows;
        const int64_t end_row =
            row + loop->block_rows < p->rows ? row + loop->block_rows : p->rows;
        multiply_panel(p, panel, row, end_row);
    }
}

void gemm(Gemm product, const uint16_t *x, const NormArgs *norm, int64_t threads)
{
    const PackedWeight *weight = product.weight;
    const int64_t rows = product.rows;
    const int64_t panels = ((weight->columns << weight->gated) + COLUMNS - 1) / COLUMNS;
    const int64_t block_rows = weight->scales ? rows : cache_block_rows(rows, weight->channels);
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    PanelLoop loop = {&product, block_rows, panels, 0, 0};
    if (weight->fp32) {
        product.x = x, product.x_stride = 2 * weight->channels;
    } else {
        plan_staging(&product, x, norm, threads);
        /* If one thread stages the rows, the others begin with the panels while it reads A. */
        loop.projections = product.adapters && threads > 1 && stages_serially(&product) &&
                           !product.interleaved_rows && !adapters_scale_inputs(product.adapters);
        stage_rows(&product, x, norm, threads, !loop.projections);
        if (loop.projections)
            product.is_projected = &loop.is_projected;
    }
    parallel_for(loop.projections + blocks * panels, items_per_chunk(panels, threads), threads,
                 STEALING, gemm_range, &loop);
}

/* Stores activation(norm(x) @ weight.T + bias) + residual in `out`, for a weight (columns,
   channels). NULL for `norm`, `bias` or `residual` omits the operation. If the weight is fp32, x and
   `bias` are fp32, and there is neither norm nor residual. `adapters` change their rows; NULL: there
   are none. */
void preamble_gemm(const PackedWeight *weight, const uint16_t *x, int64_t rows,
                   const uint16_t *bias, int64_t activation, const uint16_t *residual, void *out,
                   int64_t threads, const NormArgs *norm, const RowAdapters *adapters)
{
    const Gemm product = {.weight = weight,
                          .bias = bias,
                          .residual = residual,
                          .out = out,
                          .rows = rows,
                          .activation = activation,
                          .adapters =
                              adapters && adapters_change_linear(adapters) ? adapters : NULL};
    if (rows)
        gemm(product, x, norm, threads);
}

#endif
