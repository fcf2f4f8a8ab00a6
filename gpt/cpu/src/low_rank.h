/* Linear adapters in a GEMM: what its staging and its epilogue call (low_rank.c). */

#pragma once

#include <sys/syscall.h>

#include "gemm.h"

#if defined(__x86_64__)

/* The largest rank, and whether there are input scales, among the adapters of a step. */
HIDDEN int64_t adapters_rank_max(const RowAdapters *adapters);
HIDDEN int adapters_scale_inputs(const RowAdapters *adapters);
/* Whether an adapter changes this linear. */
HIDDEN int adapters_change_linear(const RowAdapters *adapters);

/* The only term of the linear if it is the same for all rows, has all columns, and if no factors or
   scales follow; else NULL. */
HIDDEN const LowRankTerm *common_term(const RowAdapters *adapters, int64_t rows);

/* The number of groups of adjacent rows with the same adapter. */
HIDDEN int64_t adapter_groups(const RowAdapters *adapters, int64_t rows);

/* Stores u of `rows` rows, from `first` on. `x` is the first row; adjacent rows are `stride`
   elements apart. */
HIDDEN void project_rows(const Gemm *p, const uint16_t *x, int64_t stride, int64_t first,
                         int64_t rows);
#define SPINS_PER_YIELD 64

/* Waits until another thread has stored u, if `p->is_projected` is set. A function call here would
   make the compiler keep the sums of the GEMM in memory, which takes twice as long. Therefore the
   system call sched_yield, with which the other thread gets this core, is inline. */
INLINE void await_projection(const Gemm *p)
{
    if (!p->is_projected)
        return;
    for (int64_t spins = 1; !atomic_load_explicit(p->is_projected, memory_order_acquire); spins++)
        if (spins % SPINS_PER_YIELD) {
            _mm_pause();
        } else {
            int64_t result = SYS_sched_yield;
            __asm__ volatile("syscall" : "+a"(result) : : "rcx", "r11", "memory");
        }
}

/* Applies the input scale of a row's adapter, if any, to the row `x`. */
HIDDEN void scale_input_row(const Gemm *p, int64_t row, uint16_t *x);

/* What an adapter changes in the linear; NULL for a row without an adapter. */
INLINE const AdaptedLinear *row_adapter(const RowAdapters *adapters, int64_t row)
{
    const int64_t adapter = adapters->rows[row];
    return adapter < 0 ? NULL : adapters->adapters[adapter] + adapters->linear;
}

/* The low-rank terms of a tile of rows for one panel's columns. */
typedef struct {
    int is_general; /* `add_terms` must add the terms: there is more than one low-rank term. */
    int is_uniform; /* All rows have the same adapter. */
    int64_t u_stride;
    int64_t pairs[TILE];
    const uint16_t *u[TILE], *b[TILE];
    /* Elements from `u` to the numbers for the second half of the columns. */
    int64_t second_half[TILE];
} TileTerms;

/* `plan_tile_terms` without a common term. */
HIDDEN void plan_different_terms(const Gemm *p, int64_t column, int64_t first, int rows,
                                 TileTerms *to);

/* Finds the terms of the rows from `first` on, and prefetches their panels of B. */
TARGET_AVX512_BF16 INLINE void plan_tile_terms(const Gemm *p, int64_t column, int64_t first,
                                               int rows, TileTerms *to)
{
    const LowRankTerm *term = p->common_term;
    if (!term) {
        plan_different_terms(p, column, first, rows, to);
        return;
    }
    const uint16_t *b = term->b + column * term->pairs * 2;
    for (int64_t k = 0; !first && k < term->pairs * 2; k++) /* Later tiles read the same panel. */
        _mm_prefetch((const char *)(b + k * COLUMNS), _MM_HINT_T0);
    to->is_general = 0, to->is_uniform = 1;
    to->u_stride = p->u_stride;
    to->pairs[0] = term->pairs;
    to->b[0] = b;
    to->u[0] = p->u + first * p->u_stride + term->first;
    to->second_half[0] = term->first_of_second_half - term->first;
}

/* A pair of numbers of u in each 32-bit word. */
TARGET_AVX512_BF16 INLINE __m512bh load_pair(const uint16_t *u)
{
    int32_t bits;
    memcpy(&bits, u, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

/* Continues the sums of a tile's rows with their low-rank terms, if these are not general. */
TARGET_AVX512_BF16 INLINE void add_tile_terms(const TileTerms *terms, __m512 (*sum)[2], int rows)
{
    if (terms->is_general)
        return;
    for (int64_t k = 0; terms->is_uniform && k < terms->pairs[0]; k++) {
        const uint16_t *b = terms->b[0] + k * 2 * COLUMNS, *u = terms->u[0] + 2 * k;
        const __m512bh first = (__m512bh)_mm512_loadu_si512(b);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(b + COLUMNS);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const uint16_t *pair = u + i * terms->u_stride;
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], load_pair(pair), first);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], load_pair(pair + terms->second_half[0]), second);
        }
    }
    if (terms->is_uniform)
        return;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        const uint16_t *b = terms->b[i], *u = terms->u[i];
        for (int64_t k = 0; k < terms->pairs[i]; k++, b += 2 * COLUMNS, u += 2) {
            sum[i][0] =
                _mm512_dpbf16_ps(sum[i][0], load_pair(u), (__m512bh)_mm512_loadu_si512(b));
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], load_pair(u + terms->second_half[i]),
                                         (__m512bh)_mm512_loadu_si512(b + COLUMNS));
        }
    }
}

#endif
