/* Linears with a frozen weight in training: GEMMs with an unpacked weight, and with a low-rank product.

   The trainer reads a weight in two layouts (forward, and transposed in the backward pass), so no
   packed copy is kept: each thread packs one panel at a time. The low-rank product of an adapter
   has no pass of its own over the rows. While the rows are staged, they are projected to the rank,
   and the projected rows u follow the channels of x; the panels have the rows of the other matrix
   behind those of the weight. The GEMM therefore adds the low-rank product as further channels. A
   scale of the input channels is applied while the rows are staged, too. */

#include "gemm.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Pairs of rows that `sum_products` interleaves at once. They stay in the L1 cache. */
#define INTERLEAVED_PAIRS 128

/* The ranks in which B is not zero for the 32 columns of a panel; multiples of 16. */
typedef struct {
    int64_t first, count;
} PanelRanks;

/* A low-rank product: expansion @ u, where u = scale * projection @ x. The matrices have the shapes
   (rank, channels) and (columns, rank), or if the GEMM is transposed (channels, rank) and (rank,
   columns). The rank is a multiple of 16. `u` receives the projected rows (rows, rank). */
typedef struct {
    const uint16_t *projection, *expansion;
    const PanelRanks *panel_ranks; /* NULL: each panel of the expansion has all ranks. */
    int64_t rank;
    double scale;
    uint16_t *u;
} LowRankProduct;

/* A linear with an unpacked weight, as the context of parallel loops. */
typedef struct {
    Gemm product;
    const uint16_t *x, *weight;
    int64_t channels, transposed; /* `channels`: those of x, without u. */
    const float *input_scale;     /* Of each channel of x, or NULL. */
    LowRankProduct low_rank;      /* The rank is 0 without a low-rank product. */
    uint16_t *projection;         /* Packed in blocks of 16 columns. */
    uint16_t *panels;             /* For one panel of each thread. */
    uint16_t *scaled_tiles;       /* For the scaled rows of one tile of each thread. */
} UnpackedLinear;

/* Packs the panel of 32 rows, `stride` elements apart, of a number of channels that is a multiple of
   16. */
TARGET_AVX512_BF16 static void pack_narrow_panel(const uint16_t *from, int64_t stride,
                                                 int64_t channels, uint16_t *to)
{
    for (int64_t c = 0; c < channels; c += 2 * LANES) {
        const int64_t left = (channels - c) / 2, pairs = left < LANES ? left : LANES;
        for (int64_t half = 0; half < COLUMNS; half += LANES) {
            Ints x[LANES];
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++)
                x[i] = (Ints)_mm512_maskz_loadu_epi32(lane_mask(left),
                                                      from + (half + i) * stride + c);
            transpose_16x16(x);
            for (int64_t k = 0; k < pairs; k++)
                *(Ints *)(to + (c + 2 * k) * COLUMNS + 2 * half) = x[k];
        }
    }
}

/* Packs the rows of a transposed matrix, `stride` elements apart, into a panel of 32 columns. */
TARGET_AVX512_BF16 static void pack_transposed_panel(const uint16_t *from, int64_t stride,
                                                     int64_t channels, uint16_t *to)
{
    for (int64_t c = 0; c < channels; c += 2, from += 2 * stride)
        interleave_rows(from, from + stride, COLUMNS, to + c * COLUMNS);
}

/* Packs the projection in blocks of 16 columns: a 32-bit word has a column's numbers for two
   adjacent channels. */
TARGET_AVX512_BF16 static void pack_projection(const UnpackedLinear *l)
{
    const int64_t channels = l->channels, rank = l->low_rank.rank;
    for (int64_t block = 0; block < rank; block += LANES) {
        uint16_t *to = l->projection + block * channels;
        const uint16_t *rows = l->low_rank.projection + block * channels;
        for (int64_t c = 0; !l->transposed && c < channels; c += 2 * LANES)
            transpose_block((const uint32_t *)(rows + c), channels / 2, LANES,
                            (uint32_t *)(to + c * LANES), LANES);
        for (int64_t c = 0; l->transposed && c < channels; c += 2) {
            const uint16_t *row = l->low_rank.projection + c * rank + block;
            interleave_rows(row, row + rank, LANES, to + c * LANES);
        }
    }
}

/* Projects `rows` rows to 16 ranks, and stores scale * the products in `u`. Adjacent rows of x are
   `stride` elements apart, and adjacent pairs of channels `step` elements. */
TARGET_AVX512_BF16 INLINE void project_block(const UnpackedLinear *l, const uint16_t *x,
                                             int64_t stride, int64_t step, int64_t block,
                                             uint16_t *u, int rows)
{
    const uint16_t *matrix = l->projection + block * l->channels;
    __m512 sum[TILE];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < l->channels / 2; k++) {
        const __m512bh columns = (__m512bh)_mm512_loadu_si512(matrix + k * 2 * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t bits;
            memcpy(&bits, x + i * stride + k * step, 4);
            sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(bits), columns);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        const __m256bh rounded = _mm512_cvtneps_pbh(sum[i] * (float)l->low_rank.scale);
        _mm256_storeu_si256((__m256i_u *)(u + i * l->low_rank.rank + block), (__m256i)rounded);
    }
}

#define PROJECT_CASE(n)                                                                            \
    case n: project_block(l, x, stride, step, block, u, n); break;

/* Returns the scaled rows of a tile, in this thread's memory. */
TARGET_AVX512_BF16 static const uint16_t *scale_tile(const UnpackedLinear *l, const uint16_t *rows,
                                                     int64_t count)
{
    uint16_t *tile = l->scaled_tiles + worker_index() * TILE * l->channels;
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < l->channels; c += LANES) {
            const int64_t at = i * l->channels + c;
            const __m512 x = load_bf16(rows + at, lane_mask(LANES));
            const __m512 scaled = x * _mm512_loadu_ps(l->input_scale + c);
            _mm256_storeu_si256((__m256i_u *)(tile + at), (__m256i)_mm512_cvtneps_pbh(scaled));
        }
    return tile;
}

/* Stages up to TILE rows from `row` on, and projects them. A full tile is interleaved. */
TARGET_AVX512_BF16 static void stage_tile(const UnpackedLinear *l, int64_t row)
{
    const Gemm *p = &l->product;
    const int64_t channels = l->channels, rank = l->low_rank.rank, left = p->rows - row;
    const int64_t rows = left < TILE ? left : TILE, interleaved = rows == TILE;
    const int64_t stride = interleaved ? 2 : p->x_stride, step = interleaved ? 2 * TILE : 2;
    uint16_t *x = p->staged + row * p->x_stride, *u = l->low_rank.u + row * rank;
    const uint16_t *from = l->x + row * channels;
    if (l->input_scale)
        from = scale_tile(l, from, rows);
    if (interleaved)
        interleave_tile(from, channels, x);
    for (int64_t i = 0; !interleaved && i < rows; i++)
        memcpy(x + i * stride, from + i * channels, channels * sizeof *x);
    for (int64_t block = 0; block < rank; block += LANES)
        switch (rows) {
            FOR_EACH_TILE_ROWS(PROJECT_CASE)
        }
    if (interleaved && rank)
        interleave_tile(u, rank, x + TILE * channels);
    for (int64_t i = 0; !interleaved && i < rows; i++)
        memcpy(x + i * stride + channels, u + i * rank, rank * sizeof *x);
}

static void stage_range(void *context, int64_t first, int64_t end)
{
    for (int64_t tile = first; tile < end; tile++)
        stage_tile(context, tile * TILE);
}

/* The ranks of the panel of the columns from `column` on. */
INLINE PanelRanks ranks_of_panel(const PanelRanks *panel_ranks, int64_t rank, int64_t column)
{
    return panel_ranks ? panel_ranks[column / COLUMNS] : (PanelRanks){0, rank};
}

/* Packs a panel of the weight, and behind it the panel of the expansion. */
TARGET_AVX512_BF16 static void pack_panels(const UnpackedLinear *l, int64_t column,
                                           PanelRanks ranks, uint16_t *panel)
{
    const int64_t columns = l->product.weight->columns, channels = l->channels;
    uint16_t *expansion_panel = panel + channels * COLUMNS;
    if (l->transposed) {
        pack_transposed_panel(l->weight + column, columns, channels, panel);
        if (ranks.count)
            pack_transposed_panel(l->low_rank.expansion + ranks.first * columns + column, columns,
                                  ranks.count, expansion_panel);
        return;
    }
    pack_panel(l->weight + column * channels, channels, COLUMNS, channels, panel);
    if (ranks.count)
        pack_narrow_panel(l->low_rank.expansion + column * l->low_rank.rank + ranks.first,
                          l->low_rank.rank, ranks.count, expansion_panel);
}

static void multiply_range(void *context, int64_t first, int64_t end)
{
    const UnpackedLinear *l = context;
    uint16_t *panel = l->panels + worker_index() * (l->channels + l->low_rank.rank) * COLUMNS;
    for (int64_t column = first * COLUMNS; column < end * COLUMNS; column += COLUMNS) {
        const PanelRanks ranks =
            ranks_of_panel(l->low_rank.panel_ranks, l->low_rank.rank, column);
        Gemm product = l->product;
        product.further_channels = ranks.count;
        product.skipped_channels = ranks.first;
        pack_panels(l, column, ranks, panel);
        gemm_panel(&product, panel, column, 0, product.rows);
    }
}

/* The epilogue of a linear: out = activation(scaling(product + bias)) + residual. NULL omits an
   operation. */
typedef struct {
    int64_t activation;
    const uint16_t *bias, *residual;
    const ColumnScaling *scaling;
} LinearEpilogue;

/* Multiplies the rows of x with an unpacked weight, whose dimensions are multiples of 32. The shape
   of the weight is (channels, columns) if `transposed` is nonzero, else (columns, channels).
   `input_scale` multiplies the channels of x, which are then rounded to bf16; NULL: none. `low_rank`
   is added to the product; NULL: none. If `columns` is 0, only its u is computed. */
void preamble_gemm_unpacked(const uint16_t *weight, int64_t channels, int64_t columns,
                            int64_t transposed, const uint16_t *x, const float *input_scale,
                            int64_t rows, const LinearEpilogue *epilogue, uint16_t *out,
                            int64_t threads, const LowRankProduct *low_rank)
{
    const int64_t rank = low_rank ? low_rank->rank : 0;
    const PackedWeight shape = {.channels = channels, .columns = columns};
    UnpackedLinear l = {{.weight = &shape,
                         .bias = epilogue->bias,
                         .residual = epilogue->residual,
                         .out = out,
                         .rows = rows,
                         .activation = epilogue->activation,
                         .scaling = epilogue->scaling,
                         .x_stride = padded_stride(channels + rank),
                         .interleaved_rows = rows / TILE * TILE},
                        x,
                        weight,
                        channels,
                        transposed,
                        input_scale,
                        {0},
                        NULL,
                        NULL,
                        NULL};
    const int64_t staged_numel = rows * l.product.x_stride, tiles = (rows + TILE - 1) / TILE;
    const int64_t panels_numel = threads * (channels + rank) * COLUMNS;
    const int64_t tiles_numel = input_scale ? threads * TILE * channels : 0;
    const int64_t numel = staged_numel + rank * channels + panels_numel + tiles_numel;
    const int64_t panels_per_chunk = columns / COLUMNS / (threads * 8) + 1;
    if (!rows)
        return;
    l.product.staged = thread_scratch(numel * sizeof *x);
    l.product.x = l.product.staged;
    l.projection = l.product.staged + staged_numel;
    l.panels = l.projection + rank * channels;
    l.scaled_tiles = l.panels + panels_numel;
    if (rank) {
        l.low_rank = *low_rank;
        pack_projection(&l);
    }
    parallel_for(tiles, items_per_chunk(tiles, threads), threads, STEALING, stage_range, &l);
    parallel_for(columns / COLUMNS, panels_per_chunk, threads, STEALING, multiply_range, &l);
}

/* The sums over the rows of u (rows, rank) times y (rows, columns). */
typedef struct {
    const uint16_t *pairs, *y; /* `pairs`: u with adjacent rows interleaved. */
    const PanelRanks *panel_ranks;
    float *out;
    int64_t rows, rank, columns, transposed;
} ProductSums;

/* Interleaves pairs of rows of y, from `row` on, for 32 columns; returns the number of pairs. */
TARGET_AVX512_BF16 INLINE int64_t interleave_columns(const ProductSums *p, int64_t row,
                                                     int64_t column, uint16_t *to)
{
    const int64_t left = (p->rows - row + 1) / 2;
    const int64_t pairs = left < INTERLEAVED_PAIRS ? left : INTERLEAVED_PAIRS;
    const uint16_t *from = p->y + row * p->columns + column;
    for (int64_t k = 0; k < pairs; k++, from += 2 * p->columns)
        interleave_rows(from, row + 2 * k + 1 < p->rows ? from + p->columns : NULL, COLUMNS,
                        to + k * 2 * COLUMNS);
    return pairs;
}

/* Stores the sums (16 ranks, 16 columns) of a block. */
TARGET_AVX512_BF16 INLINE void store_sums(const ProductSums *p, const __m512 *sum, int64_t block,
                                          int64_t column)
{
    if (!p->transposed) {
        for (int64_t i = 0; i < LANES; i++)
            _mm512_storeu_ps(p->out + (block + i) * p->columns + column, sum[i]);
        return;
    }
    Ints x[LANES];
    memcpy(x, sum, sizeof x);
    transpose_16x16(x);
    for (int64_t i = 0; i < LANES; i++)
        *(Ints *)(p->out + (column + i) * p->rank + block) = x[i];
}

/* Stores the sums of 32 columns and of the 16 ranks from `block` on. */
TARGET_AVX512_BF16 static void sum_products(const ProductSums *p, int64_t column, int64_t block)
{
    uint16_t y[INTERLEAVED_PAIRS * 2 * COLUMNS];
    __m512 sums[2][LANES];
    memset(sums, 0, sizeof sums);
    for (int64_t row = 0; row < p->rows; row += 2 * INTERLEAVED_PAIRS) {
        const int64_t pairs = interleave_columns(p, row, column, y);
        const uint16_t *u = p->pairs + row * p->rank + 2 * block;
        for (int half = 0; half < 2; half++) {
            const uint16_t *from = y + half * 2 * LANES;
            __m512 sum[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                sum[i] = sums[half][i];
            for (int64_t k = 0; k < pairs; k++) {
                const __m512bh columns = (__m512bh)_mm512_loadu_si512(from + k * 2 * COLUMNS);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    int32_t bits;
                    memcpy(&bits, u + k * 2 * p->rank + 2 * i, 4);
                    sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(bits), columns);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                sums[half][i] = sum[i];
        }
    }
    store_sums(p, sums[0], block, column);
    store_sums(p, sums[1], block, column + LANES);
}

/* The items are blocks of 32 columns. */
static void product_sums_range(void *context, int64_t first, int64_t end)
{
    const ProductSums *p = context;
    for (int64_t column = first * COLUMNS; column < end * COLUMNS; column += COLUMNS) {
        const PanelRanks ranks = ranks_of_panel(p->panel_ranks, p->rank, column);
        for (int64_t block = ranks.first; block < ranks.first + ranks.count; block += LANES)
            sum_products(p, column, block);
    }
}

/* Stores u^T @ y (rank, columns) in `out` in fp32, or its transpose (columns, rank): the gradient of
   a low-rank matrix. The number of columns is a multiple of 32, and the rank of 16. With
   `panel_ranks`, only the ranks of each panel are stored. */
TARGET_AVX512_BF16 void preamble_low_rank_gradient(const uint16_t *u, const uint16_t *y,
                                                   float *out, int64_t rows, int64_t rank,
                                                   int64_t columns, int64_t transposed,
                                                   const PanelRanks *panel_ranks,
                                                   int64_t threads)
{
    uint16_t *pairs = thread_scratch((rows + 1) * rank * sizeof *u);
    for (int64_t row = 0; row < rows; row += 2)
        interleave_rows(u + row * rank, row + 1 < rows ? u + (row + 1) * rank : NULL, rank,
                        pairs + row * rank);
    ProductSums sums = {pairs, y, panel_ranks, out, rows, rank, columns, transposed};
    parallel_for(columns / COLUMNS, items_per_chunk(columns / COLUMNS, threads), threads, STEALING,
                 product_sums_range, &sums);
}

#endif
