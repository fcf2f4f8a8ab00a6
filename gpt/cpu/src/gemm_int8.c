/* Products with weights of a byte each. Rows are brought to bytes on their way in.

   A column has one scale, a row one for each 64 channels, so that a large number costs only its
   neighbours digits. The machine multiplies unsigned bytes by signed ones, so a weight's are kept
   128 too large, and a row knows what that adds. All sums of bytes are exact, and are put together
   group by group, however many rows there are. */

#include "gemm.h"

#if defined(__x86_64__)

#define ROWS_TOGETHER 6 /* Rows whose sums fit into registers, twice. */
#define STEP (4 * COLUMNS) /* Bytes of a panel for four channels. */
#define TINY 1e-30f

int preamble_multiplies_int8(void)
{
    __builtin_cpu_init();
    return machine == AVX512_BF16 && __builtin_cpu_supports("avx512vnni");
}

void *room_for(int64_t bytes)
{
    static _Thread_local void *memory;
    static _Thread_local int64_t held;
    if (bytes > held) {
        free(memory);
        memory = malloc(bytes);
        if (!memory)
            abort();
        held = bytes;
    }
    return memory;
}

/* A row in bytes. What is not finite makes its group's scale so, and with that all results. */
INT8 void bring_to_bytes(const uint16_t *x, int64_t width, Group *to)
{
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    for (int64_t c = 0; c < width; c += GROUP, to++) {
        __m512 y[GROUP / LANES];
        __m512i most = _mm512_setzero_si512(), total = most;
        for (int i = 0; i < GROUP / LANES; i++) {
            y[i] = widened(x + c + i * LANES, first_lanes(width - c - i * LANES));
            /* As integers they are in the same order, and NaN is above all. */
            most = _mm512_max_epi32(most, _mm512_and_si512((__m512i)y[i], size));
        }
        const int32_t bits = _mm512_reduce_max_epi32(most);
        float largest;
        memcpy(&largest, &bits, 4);
        const float by = largest > TINY ? 127 / largest : 0;
        for (int i = 0; i < GROUP / LANES; i++) {
            __m512i codes = _mm512_cvtps_epi32(y[i] * by);
            total = _mm512_add_epi32(total, codes);
            _mm_storeu_si128((__m128i *)(to->codes + i * LANES), _mm512_cvtsepi32_epi8(codes));
        }
        to->scale = largest / 127;
        to->offset = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(total));
    }
}

/* Where a panel lies, and what is to be fetched meanwhile. */
typedef struct {
    const uint8_t *bytes, *ahead;
    const float *scales;
    int64_t column, stride; /* How much to fetch while four channels are worked on. */
} Panel;

/* One panel's columns of `rows` rows. */
INT8 INLINE void tile(const Product *p, const Panel *at, int64_t first, int rows)
{
    const int64_t groups = groups_of(p->weight->channels);
    const Group *x = p->groups + first * groups;
    const uint8_t *bytes = at->bytes, *ahead = at->ahead;
    __m512 sum[ROWS_TOGETHER][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i whole[ROWS_TOGETHER][2];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            whole[i][0] = whole[i][1] = _mm512_set1_epi32(x[i * groups + g].offset);
#pragma GCC unroll 2
        for (int k = 0; k < GROUP; k += 4, bytes += STEP, ahead += at->stride) {
            __m512i a = _mm512_loadu_si512(bytes), b = _mm512_loadu_si512(bytes + STEP / 2);
            _mm_prefetch((const char *)ahead, _MM_HINT_T0);
            _mm_prefetch((const char *)ahead + 64, _MM_HINT_T0);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                int32_t four;
                memcpy(&four, x[i * groups + g].codes + k, 4);
                __m512i all = _mm512_set1_epi32(four);
                add_bytes(&whole[i][0], a, all);
                add_bytes(&whole[i][1], b, all);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512 scale = _mm512_set1_ps(x[i * groups + g].scale);
            for (int half = 0; half < 2; half++)
                sum[i][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i][half]), scale,
                                               sum[i][half]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = _mm512_mul_ps(sum[i][half], _mm512_loadu_ps(at->scales + half * LANES));
    finish(p, sum, first, at->column, rows);
}

#define TILE_OF(n) case n: tile(p, &at, first, n); break;

/* One panel's columns of all rows. */
INT8 void multiply_bytes(const Product *p, int64_t panel)
{
    const Weight *w = p->weight;
    const int64_t size = groups_of(w->channels) * GROUP * COLUMNS;
    const int64_t count = (p->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    const int64_t each = (p->rows + count - 1) / count;
    Panel at = {(const uint8_t *)w->panels + panel * size, NULL, w->scales + panel * COLUMNS,
                panel * COLUMNS, STEP / count};
    /* With several tiles each fetches its share of the next panel, so that memory never waits. */
    at.ahead = at.bytes + (count > 1 ? size : 2048);
    for (int64_t first = 0; first < p->rows; first += each, at.ahead += size / count)
        switch (p->rows - first < each ? p->rows - first : each) {
            TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
        }
}

#endif
