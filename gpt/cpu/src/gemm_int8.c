/* GEMM in int8 (AVX512-VNNI): one scale per weight column, and one per 64 channels of an input row.

   Input rows are quantized before the GEMM. With one scale per group of 64 channels, a large number
   reduces the precision of its own group only. VNNI multiplies unsigned bytes by signed bytes, so
   128 is added to the codes of weights, and an offset for each group of a row corrects the sums.
   The int32 sums of a group are exact. They are scaled and added up in fp32, in the same order of
   groups for any number of rows. */

#include "low_rank.h"

#if defined(__x86_64__)

#define INT8_TILE_ROWS 6         /* Rows whose int32 sums and fp32 sums fit into registers. */
#define STEP_BYTES (4 * COLUMNS) /* Bytes of a panel for four channels. */
#define SCALE_MIN 1e-30f

int preamble_has_int8_gemm(void)
{
    __builtin_cpu_init();
    return isa_level == AVX512_BF16 && __builtin_cpu_supports("avx512vnni");
}

void *thread_scratch(int64_t bytes)
{
    static _Thread_local void *memory;
    static _Thread_local int64_t capacity;
    if (bytes > capacity) {
        free(memory);
        memory = malloc(bytes);
        if (!memory)
            abort();
        capacity = bytes;
    }
    return memory;
}

/* Quantizes a row to int8. If a number is not finite, its group's scale is not finite, and so no
   output of the row is finite. */
TARGET_AVX512_VNNI void quantize_row(const uint16_t *x, int64_t width, QuantizedGroup *to)
{
    const __m512i abs_mask = _mm512_set1_epi32(0x7fffffff);
    for (int64_t c = 0; c < width; c += GROUP_CHANNELS, to++) {
        __m512 y[GROUP_CHANNELS / LANES];
        __m512i absmax = _mm512_setzero_si512(), code_sums = absmax;
        for (int i = 0; i < GROUP_CHANNELS / LANES; i++) {
            y[i] = load_bf16(x + c + i * LANES, lane_mask(width - c - i * LANES));
            /* The bits of nonnegative fp32 numbers, compared as integers, have the order of the
               numbers. NaN is above infinity. */
            absmax = _mm512_max_epi32(absmax, _mm512_and_si512((__m512i)y[i], abs_mask));
        }
        const int32_t bits = _mm512_reduce_max_epi32(absmax);
        float largest;
        memcpy(&largest, &bits, 4);
        const float inverse_scale = largest > SCALE_MIN ? 127 / largest : 0;
        for (int i = 0; i < GROUP_CHANNELS / LANES; i++) {
            __m512i codes = _mm512_cvtps_epi32(y[i] * inverse_scale);
            code_sums = _mm512_add_epi32(code_sums, codes);
            _mm_storeu_si128((__m128i *)(to->codes + i * LANES), _mm512_cvtsepi32_epi8(codes));
        }
        to->scale = largest / 127;
        to->offset = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(code_sums));
    }
}

/* A panel, and the memory to prefetch during its GEMM. */
typedef struct {
    const uint8_t *bytes, *prefetch;
    const float *scales;
    int64_t column;
    int64_t prefetch_stride; /* Bytes to advance `prefetch` per four channels. */
} Panel;

/* Computes one panel's columns for `rows` rows. */
TARGET_AVX512_VNNI INLINE void gemm_int8_tile(const Gemm *p, const Panel *at, int64_t first,
                                              int rows)
{
    const int64_t groups = group_count(p->weight->channels);
    const QuantizedGroup *x = p->groups + first * groups;
    const uint8_t *bytes = at->bytes, *prefetch = at->prefetch;
    TileTerms terms;
    terms.is_general = 0;
    if (p->adapters)
        plan_tile_terms(p, at->column, first, rows, &terms);
    __m512 sum[INT8_TILE_ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i group_sum[INT8_TILE_ROWS][2];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            group_sum[i][0] = group_sum[i][1] = _mm512_set1_epi32(x[i * groups + g].offset);
#pragma GCC unroll 2
        for (int k = 0; k < GROUP_CHANNELS;
             k += 4, bytes += STEP_BYTES, prefetch += at->prefetch_stride) {
            __m512i a = _mm512_loadu_si512(bytes), b = _mm512_loadu_si512(bytes + STEP_BYTES / 2);
            _mm_prefetch((const char *)prefetch, _MM_HINT_T0);
            _mm_prefetch((const char *)prefetch + 64, _MM_HINT_T0);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                int32_t bits;
                memcpy(&bits, x[i * groups + g].codes + k, 4);
                __m512i x_codes = _mm512_set1_epi32(bits);
                dot_int8(&group_sum[i][0], a, x_codes);
                dot_int8(&group_sum[i][1], b, x_codes);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512 scale = _mm512_set1_ps(x[i * groups + g].scale);
            for (int half = 0; half < 2; half++)
                sum[i][half] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(group_sum[i][half]), scale, sum[i][half]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = _mm512_mul_ps(sum[i][half], _mm512_loadu_ps(at->scales + half * LANES));
    if (p->adapters) {
        await_projection(p);
        add_tile_terms(&terms, sum, rows);
    }
    epilogue(p, sum, first, at->column, rows, terms.is_general);
}

#define TILE_CASE(n)                                                                               \
    case n: gemm_int8_tile(p, &at, first, n); break;

/* Computes one panel's columns for all rows. */
TARGET_AVX512_VNNI void gemm_int8_panel(const Gemm *p, int64_t panel)
{
    const PackedWeight *w = p->weight;
    const int64_t size = group_count(w->channels) * GROUP_CHANNELS * COLUMNS;
    const int64_t tiles = (p->rows + INT8_TILE_ROWS - 1) / INT8_TILE_ROWS;
    const int64_t tile_rows = (p->rows + tiles - 1) / tiles;
    Panel at = {(const uint8_t *)w->panels + panel * size, NULL, w->scales + panel * COLUMNS,
                panel * COLUMNS, STEP_BYTES / tiles};
    /* With several tiles, each tile prefetches a part of the next panel, so that memory transfers
       do not pause. */
    at.prefetch = at.bytes + (tiles > 1 ? size : 2048);
    for (int64_t first = 0; first < p->rows; first += tile_rows, at.prefetch += size / tiles)
        switch (p->rows - first < tile_rows ? p->rows - first : tile_rows) {
            TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
        }
}

#endif
