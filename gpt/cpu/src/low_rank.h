/* Adapters of linears in a GEMM: what its staging and its epilogue call (low_rank.c). */

#pragma once

#include "gemm.h"

#if defined(__x86_64__)

/* The largest rank, and whether there are input scales, among the adapters of a step. */
HIDDEN int64_t adapters_rank_max(const RowAdapters *adapters);
HIDDEN int adapters_scale_inputs(const RowAdapters *adapters);
/* Whether an adapter changes this linear. */
HIDDEN int adapters_change_linear(const RowAdapters *adapters);

/* Stores u of `rows` rows, from `first` on. `x` is the first row; adjacent rows are `stride`
   elements apart. */
HIDDEN void project_rows(const Gemm *p, const uint16_t *x, int64_t stride, int64_t first,
                         int64_t rows);
/* Applies the input scale of a row's adapter, if any, to the row `x`. */
HIDDEN void scale_input_row(const Gemm *p, int64_t row, uint16_t *x);
/* Prefetches the panels of B for a panel of the weight and `rows` rows from `first` on. */
HIDDEN void prefetch_terms(const Gemm *p, int64_t panel, int64_t first, int rows);

/* What an adapter changes in the linear; NULL for a row without an adapter. */
INLINE const AdaptedLinear *row_adapter(const RowAdapters *adapters, int64_t row)
{
    const int64_t adapter = adapters->rows[row];
    return adapter < 0 ? NULL : adapters->adapters[adapter] + adapters->linear;
}

#endif
