/* Linear adapters: low-rank products, factors and scales of some rows of a GEMM.

   An adapted row of a linear is

       output_scale * (factor * (W (input_scale * x) + B u) + bias),  u = scale * A x,

   where x is the normed row. The staging of the rows computes u, rounded to bf16, and applies the
   input scale. The epilogue continues the sums of W with the products of B. Each number adds its
   terms in an order that does not depend on the other rows. */

#include "low_rank.h"

#if defined(__x86_64__)

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define PROJECTED_ROWS_MAX 6 /* Rows whose sums fit into registers. */
#define CHAINS 4             /* Sums of each number of u, which hide the latency of an addition. */

int64_t adapters_rank_max(const RowAdapters *adapters)
{
    int64_t rank = 0;
    for (int64_t i = 0; i < adapters->count; i++) {
        const AdaptedLinear *linear = adapters->adapters[i] + adapters->linear;
        rank = linear->rank > rank ? linear->rank : rank;
    }
    return rank;
}

int adapters_scale_inputs(const RowAdapters *adapters)
{
    for (int64_t i = 0; i < adapters->count; i++)
        if (adapters->adapters[i][adapters->linear].input_scales)
            return 1;
    return 0;
}

int adapters_change_linear(const RowAdapters *adapters)
{
    for (int64_t i = 0; i < adapters->count; i++) {
        const AdaptedLinear *linear = adapters->adapters[i] + adapters->linear;
        if (linear->rank || linear->factors || linear->output_scales || linear->input_scales)
            return 1;
    }
    return 0;
}

/* The number of adjacent rows from `row` to `end` with the same adapter as `row`. */
static int64_t equal_adapters(const RowAdapters *adapters, int64_t row, int64_t end)
{
    int64_t count = 1;
    while (row + count < end && adapters->rows[row + count] == adapters->rows[row])
        count++;
    return count;
}

const LowRankTerm *common_term(const RowAdapters *adapters, int64_t rows)
{
    const AdaptedLinear *linear = row_adapter(adapters, 0);
    if (!linear || linear->terms != 1 || linear->term_array->positions || linear->factors ||
        linear->output_scales || equal_adapters(adapters, 0, rows) != rows)
        return NULL;
    return linear->term_array;
}

int64_t adapter_groups(const RowAdapters *adapters, int64_t rows)
{
    int64_t groups = 0;
    for (int64_t row = 0; row < rows; row += equal_adapters(adapters, row, rows))
        groups++;
    return groups;
}

/* Computes 16 numbers of u (fewer if the rank ends) for `rows` adjacent rows of x. */
TARGET_AVX512_BF16 INLINE void project_block(const AdaptedLinear *linear, int64_t block,
                                             int64_t channels, const uint16_t *x, int64_t stride,
                                             uint16_t *u, int64_t u_stride, int rows)
{
    const int64_t first = block * LANES, lanes = linear->rank - first < LANES ? linear->rank - first : LANES;
    const __mmask16 mask = lane_mask(lanes);
    const uint16_t *a = linear->a + first * channels;
    __m512 sum[PROJECTED_ROWS_MAX][CHAINS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        for (int chain = 0; chain < CHAINS; chain++)
            sum[i][chain] = _mm512_setzero_ps();
    int64_t pair = 0;
    for (; pair + CHAINS <= channels / 2; pair += CHAINS)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++, a += 2 * lanes) {
            const __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi32(mask, a);
            _mm_prefetch((const char *)a + 2048, _MM_HINT_T0);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                int32_t bits;
                memcpy(&bits, x + i * stride + (pair + chain) * 2, 4);
                sum[i][chain] =
                    _mm512_dpbf16_ps(sum[i][chain], (__m512bh)_mm512_set1_epi32(bits), weights);
            }
        }
    for (; pair < channels / 2; pair++, a += 2 * lanes) {
        const __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi32(mask, a);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            int32_t bits;
            memcpy(&bits, x + i * stride + pair * 2, 4);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], (__m512bh)_mm512_set1_epi32(bits), weights);
        }
    }
    const __m512 scales = _mm512_maskz_loadu_ps(mask, linear->scales + first);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        const __m512 total = (sum[i][0] + sum[i][1]) + (sum[i][2] + sum[i][3]);
        _mm256_mask_storeu_epi16(u + i * u_stride + first, mask,
                                 (__m256i)_mm512_cvtneps_pbh(total * scales));
    }
}

#define ROWS_CASE(n)                                                                               \
    case n: project_block(linear, block, channels, x, stride, u, u_stride, n); break;

TARGET_AVX512_BF16 static void project_avx512(const AdaptedLinear *linear, int64_t channels,
                                              const uint16_t *x, int64_t stride, uint16_t *u,
                                              int64_t u_stride, int64_t rows)
{
    for (int64_t block = 0; block * LANES < linear->rank; block++)
        switch (rows) {
            ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        }
}

/* Like `project_avx512`, for CPUs without AVX512-bf16. */
TARGET_AVX2 static void project_avx2(const AdaptedLinear *linear, int64_t channels,
                                     const uint16_t *x, int64_t stride, uint16_t *u,
                                     int64_t u_stride, int64_t rows)
{
    for (int64_t first = 0; first < linear->rank; first += LANES) {
        const int64_t left = linear->rank - first, lanes = left < LANES ? left : LANES;
        for (int64_t i = 0; i < rows; i++) {
            const uint16_t *a = linear->a + first * channels;
            float sums[LANES] = {0};
            for (int64_t c = 0; c < channels; c += 2, a += 2 * lanes) {
                const float even = bf16_to_fp32(x[i * stride + c]);
                const float odd = bf16_to_fp32(x[i * stride + c + 1]);
                for (int64_t lane = 0; lane < lanes; lane++)
                    sums[lane] +=
                        bf16_to_fp32(a[2 * lane]) * even + bf16_to_fp32(a[2 * lane + 1]) * odd;
            }
            for (int64_t lane = 0; lane < lanes; lane++)
                u[i * u_stride + first + lane] =
                    fp32_to_bf16(sums[lane] * linear->scales[first + lane]);
        }
    }
}

void project_rows(const Gemm *p, const uint16_t *x, int64_t stride, int64_t first, int64_t rows)
{
    for (int64_t i = 0, count; i < rows; i += count) {
        const AdaptedLinear *linear = row_adapter(p->adapters, first + i);
        count = equal_adapters(p->adapters, first + i, first + rows);
        count = count < PROJECTED_ROWS_MAX ? count : PROJECTED_ROWS_MAX;
        if (linear)
            (isa_level < AVX512_BF16 ? project_avx2 : project_avx512)(
                linear, p->weight->channels, x + i * stride, stride,
                p->u + (first + i) * p->u_stride, p->u_stride, count);
    }
}

TARGET_AVX512_BF16 static void scale_row_avx512(uint16_t *x, const float *scales, int64_t width)
{
    for (int64_t c = 0; c < width; c += LANES) {
        const __mmask16 mask = lane_mask(width - c);
        const __m512 y = load_bf16(x + c, mask) * _mm512_maskz_loadu_ps(mask, scales + c);
        _mm256_mask_storeu_epi16(x + c, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

static void scale_row_plain(uint16_t *x, const float *scales, int64_t width)
{
    for (int64_t c = 0; c < width; c++)
        x[c] = fp32_to_bf16(bf16_to_fp32(x[c]) * scales[c]);
}

void scale_input_row(const Gemm *p, int64_t row, uint16_t *x)
{
    const AdaptedLinear *linear = row_adapter(p->adapters, row);
    if (linear && linear->input_scales)
        (isa_level < AVX512_BF16 ? scale_row_plain : scale_row_avx512)(x, linear->input_scales,
                                                                       p->weight->channels);
}

/* The panel of B of a term for a panel of the weight; NULL if the term has none. */
INLINE const uint16_t *term_panel(const LowRankTerm *term, int64_t panel)
{
    const int64_t position = term->positions ? term->positions[panel] : panel;
    return position < 0 ? NULL : term->b + position * term->pairs * 2 * COLUMNS;
}

/* Returns the only term of `linear` with a panel of B for this panel; NULL if there is none. Stores
   the panel of B in `b`, and clears `is_simple` if there are several such terms. */
TARGET_AVX512_BF16 INLINE const LowRankTerm *only_term(const AdaptedLinear *linear, int64_t panel,
                                                       int prefetches, const uint16_t **b,
                                                       int *is_simple)
{
    const LowRankTerm *only = NULL;
    for (const LowRankTerm *term = linear->term_array; term < linear->term_array + linear->terms;
         term++) {
        const uint16_t *term_b = term_panel(term, panel);
        if (!term_b)
            continue;
        for (int64_t k = 0; prefetches && k < term->pairs * 2; k++)
            _mm_prefetch((const char *)(term_b + k * COLUMNS), _MM_HINT_T0);
        *is_simple &= !only;
        only = term;
        *b = term_b;
    }
    return only;
}

/* Whether the `rows` rows from `first` on have the same adapter. */
TARGET_AVX512_BF16 INLINE int is_uniform(const RowAdapters *adapters, int64_t first, int rows)
{
    const __m512i adapter = _mm512_set1_epi64(adapters->rows[first]);
    const __mmask16 tile = lane_mask(rows);
    const __m512i low = _mm512_maskz_loadu_epi64(tile & 0xff, adapters->rows + first);
    const __m512i high = _mm512_maskz_loadu_epi64(tile >> 8, adapters->rows + first + 8);
    return !(_mm512_mask_cmpneq_epi64_mask(tile & 0xff, low, adapter) |
             _mm512_mask_cmpneq_epi64_mask(tile >> 8, high, adapter));
}

TARGET_AVX512_BF16 void plan_different_terms(const Gemm *p, int64_t column, int64_t first, int rows,
                                             TileTerms *to)
{
    const RowAdapters *adapters = p->adapters;
    int is_simple = 1;
    to->u_stride = p->u_stride;
    to->is_uniform = is_uniform(adapters, first, rows);
    for (int i = 0; i < (to->is_uniform ? 1 : rows); i++) {
        const int64_t row = first + i;
        const AdaptedLinear *linear = row_adapter(adapters, row);
        const LowRankTerm *term = NULL;
        to->b[i] = NULL;
        if (linear) {
            /* The rows before have read the same panel of B. */
            const int prefetches = !row || adapters->rows[row] != adapters->rows[row - 1];
            is_simple &= !linear->factors && !linear->output_scales;
            term = only_term(linear, column / COLUMNS, prefetches, &to->b[i], &is_simple);
        }
        to->pairs[i] = term ? term->pairs : 0;
        to->u[i] = p->u + row * p->u_stride + (term ? term->first : 0);
        to->second_half[i] = term ? term->first_of_second_half - term->first : 0;
    }
    to->is_general = !is_simple;
}

/* Adds the products of a panel of B with the rows of u to the sums of `rows` rows. `second_half`:
   as in TileTerms. */
TARGET_AVX512_BF16 INLINE void add_products(__m512 (*sum)[2], const uint16_t *u, int64_t second_half,
                                            int64_t u_stride, const uint16_t *b, int64_t pairs,
                                            int rows)
{
    __m512 y[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        y[i][0] = sum[i][0], y[i][1] = sum[i][1];
    for (int64_t k = 0; k < pairs; k++, b += 2 * COLUMNS) {
        const __m512bh first_b = (__m512bh)_mm512_loadu_si512(b);
        const __m512bh second_b = (__m512bh)_mm512_loadu_si512(b + COLUMNS);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const uint16_t *pair = u + i * u_stride + 2 * k;
            y[i][0] = _mm512_dpbf16_ps(y[i][0], load_pair(pair), first_b);
            y[i][1] = _mm512_dpbf16_ps(y[i][1], load_pair(pair + second_half), second_b);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = y[i][0], sum[i][1] = y[i][1];
}

/* Adds the low-rank products of an adapter to the sums of `rows` rows, and applies its factors. */
TARGET_AVX512_BF16 static void adapt_rows(const Gemm *p, const AdaptedLinear *linear,
                                          __m512 (*sum)[2], int64_t row, int64_t panel, int rows)
{
    for (int64_t t = 0; t < linear->terms; t++) {
        const LowRankTerm *term = linear->term_array + t;
        const uint16_t *b = term_panel(term, panel), *u = p->u + row * p->u_stride + term->first;
        const int64_t second_half = term->first_of_second_half - term->first;
        const int64_t stride = p->u_stride;
        int i = 0;
        if (!b)
            continue;
        for (; i + TILE <= rows; i += TILE)
            add_products(sum + i, u + i * stride, second_half, stride, b, term->pairs, TILE);
        for (; i + 4 <= rows; i += 4)
            add_products(sum + i, u + i * stride, second_half, stride, b, term->pairs, 4);
        for (; i < rows; i++)
            add_products(sum + i, u + i * stride, second_half, stride, b, term->pairs, 1);
    }
    for (int half = 0; linear->factors && half < 2; half++) {
        const __m512 factors = _mm512_loadu_ps(linear->factors + panel * COLUMNS + half * LANES);
        for (int i = 0; i < rows; i++)
            sum[i][half] *= factors;
    }
}

/* The bias of the columns of half a panel. */
TARGET_AVX512_BF16 static __m512 panel_bias(const Gemm *p, int64_t panel, int half)
{
    const int64_t width = COLUMNS >> p->weight->gated, columns = p->weight->columns;
    const int64_t begin = panel * width + (p->weight->gated ? 0 : half * LANES);
    if (!p->bias)
        return _mm512_setzero_ps();
    return load_bf16(p->bias + begin + (p->weight->gated ? half * columns : 0),
                     lane_mask(columns - begin));
}

TARGET_AVX512_BF16 void add_terms(const Gemm *p, __m512 (*sum)[2], int64_t first, int64_t column,
                                  int rows)
{
    const int64_t panel = column / COLUMNS;
    const __m512 bias[2] = {panel_bias(p, panel, 0), panel_bias(p, panel, 1)};
    for (int64_t i = 0, count; i < rows; i += count) {
        const AdaptedLinear *linear = row_adapter(p->adapters, first + i);
        count = equal_adapters(p->adapters, first + i, first + rows);
        if (linear)
            adapt_rows(p, linear, sum + i, first + i, panel, count);
        for (int64_t row = i; row < i + count; row++)
            for (int half = 0; half < 2; half++) {
                sum[row][half] += bias[half];
                if (linear && linear->output_scales)
                    sum[row][half] *= _mm512_loadu_ps(linear->output_scales + panel * COLUMNS +
                                                      half * LANES);
            }
    }
}

TARGET_AVX2 void add_terms_avx2(const Gemm *p, float (*sum)[COLUMNS], int64_t first,
                                int64_t column, int rows)
{
    await_projection(p);
    const int64_t panel = column / COLUMNS, columns = p->weight->columns;
    const int64_t width = COLUMNS >> p->weight->gated, begin = panel * width;
    const int64_t count = columns - begin < width ? columns - begin : width;
    for (int i = 0; i < rows; i++) {
        const AdaptedLinear *linear = row_adapter(p->adapters, first + i);
        for (int64_t t = 0; linear && t < linear->terms; t++) {
            const LowRankTerm *term = linear->term_array + t;
            const uint16_t *b = term_panel(term, panel);
            const uint16_t *u = p->u + (first + i) * p->u_stride;
            for (int64_t k = 0; b && k < term->pairs; k++, b += 2 * COLUMNS)
                for (int64_t c = 0; c < COLUMNS; c++) {
                    const uint16_t *pair = u + (c < LANES ? term->first : term->first_of_second_half) + 2 * k;
                    sum[i][c] += bf16_to_fp32(b[2 * c]) * bf16_to_fp32(pair[0]) +
                                 bf16_to_fp32(b[2 * c + 1]) * bf16_to_fp32(pair[1]);
                }
        }
        for (int64_t c = 0; linear && linear->factors && c < COLUMNS; c++)
            sum[i][c] *= linear->factors[panel * COLUMNS + c];
        for (int64_t half = 0; p->bias && half <= p->weight->gated; half++)
            for (int64_t c = 0; c < count; c++)
                sum[i][half * LANES + c] += bf16_to_fp32(p->bias[half * columns + begin + c]);
        for (int64_t c = 0; linear && linear->output_scales && c < COLUMNS; c++)
            sum[i][c] *= linear->output_scales[panel * COLUMNS + c];
    }
}

#endif
