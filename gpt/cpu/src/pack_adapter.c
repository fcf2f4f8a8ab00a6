/* Packing of low-rank matrices into the layouts that low_rank.c reads (packed_weight.h). */

#include "packed_weight.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* A matrix A or B of a low-rank term. Its rank is rounded up to an even number in `target`, which
   contains zeros before. */
typedef struct {
    const void *source; /* A: (rank, channels). B: (columns, rank). */
    int64_t bf16;       /* Nonzero: the source is bf16; 0: fp32. */
    int64_t stride;     /* Elements between adjacent rows of the source. */
    int64_t rank, width; /* `width`: the number of channels of A, or of columns of B. */
    /* A: NULL. B: the index of each column in panel order. */
    const int64_t *slots;
    const int32_t *positions; /* As in LowRankTerm. */
    int64_t first, total;     /* A: the first of its rows among those of all terms, and their sum. */
    uint16_t *target;
    /* A: the scale of its term, and the scales of the rows of all terms. */
    float scale, *scales;
} LowRankMatrix;

INLINE uint16_t load_rounded(const void *from, int64_t at, int bf16)
{
    return bf16 ? ((const uint16_t *)from)[at] : fp32_to_bf16(((const float *)from)[at]);
}

#define NUMBERS 16 /* Numbers that are rounded together. */

INLINE void pack_a(const LowRankMatrix *matrix, int bf16)
{
    for (int64_t r = 0; r < matrix->rank + matrix->rank % 2; r++)
        matrix->scales[matrix->first + r] = matrix->scale;
    for (int64_t r = 0; r < matrix->rank;) {
        /* The rows of this matrix in one block of rows. */
        const int64_t row = matrix->first + r, block = row / LANES * LANES;
        const int64_t left = matrix->total - block, lanes = left < LANES ? left : LANES;
        const int64_t space = block + lanes - row, rows_left = matrix->rank - r;
        const int64_t rows = rows_left < space ? rows_left : space;
        uint16_t *to = matrix->target + block * matrix->width + (row - block) * 2;
        int64_t c = 0;
        for (; c + NUMBERS <= matrix->width; c += NUMBERS, to += NUMBERS * lanes)
            for (int64_t i = 0; i < rows; i++) {
                uint16_t rounded[NUMBERS];
                for (int k = 0; k < NUMBERS; k++)
                    rounded[k] =
                        load_rounded(matrix->source, (r + i) * matrix->stride + c + k, bf16);
                for (int k = 0; k < NUMBERS; k += 2)
                    memcpy(to + k * lanes + 2 * i, rounded + k, 4);
            }
        for (; c < matrix->width; c += 2, to += 2 * lanes)
            for (int64_t i = 0; i < rows; i++) {
                const int64_t at = (r + i) * matrix->stride + c;
                to[2 * i] = load_rounded(matrix->source, at, bf16);
                to[2 * i + 1] = load_rounded(matrix->source, at + 1, bf16);
            }
        r += rows;
    }
}

INLINE void pack_b(const LowRankMatrix *matrix, int bf16)
{
    const int64_t pairs = (matrix->rank + 1) / 2;
    for (int64_t c = 0; c < matrix->width; c++) {
        const int64_t slot = matrix->slots[c], panel = slot / COLUMNS;
        const int64_t position = matrix->positions ? matrix->positions[panel] : panel;
        uint16_t *to = matrix->target + (position * pairs * COLUMNS + slot % COLUMNS) * 2;
        int64_t r = 0;
        for (; r + NUMBERS <= matrix->rank; r += NUMBERS, to += NUMBERS * COLUMNS) {
            uint16_t rounded[NUMBERS];
            for (int i = 0; i < NUMBERS; i++)
                rounded[i] = load_rounded(matrix->source, c * matrix->stride + r + i, bf16);
            for (int i = 0; i < NUMBERS; i += 2)
                memcpy(to + i * COLUMNS, rounded + i, 4);
        }
        for (int64_t i = 0; r + i < matrix->rank; i++)
            to[i / 2 * COLUMNS * 2 + i % 2] =
                load_rounded(matrix->source, c * matrix->stride + r + i, bf16);
    }
}

static void pack_matrices(void *context, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) {
        const LowRankMatrix *matrix = (const LowRankMatrix *)context + i;
        if (matrix->slots && matrix->bf16)
            pack_b(matrix, 1);
        else if (matrix->slots)
            pack_b(matrix, 0);
        else if (matrix->bf16)
            pack_a(matrix, 1);
        else
            pack_a(matrix, 0);
    }
}

void preamble_pack_low_rank(LowRankMatrix *matrices, int64_t count, int64_t threads)
{
    parallel_for(count, 1, threads, STEALING, pack_matrices, matrices);
}

#endif
