/* Exact greedy argmax: int8 logit bounds screen the LM head, bf16 panels decide.

   An int8 copy of the LM head has half of the bytes of the bf16 head. The int8 logits give an upper
   and a lower bound of each token's exact logit. Only panels whose upper bound reaches the row's
   largest lower bound are scored: their logits are computed from the bf16 head, and are
   bit-identical to those of gemm_bf16.c. */

#include "gemm.h"
#include "thread_pool.h"

#if defined(__x86_64__)

#define ROWS_MAX 256 /* Must equal ROWS_MAX in gpt/cpu/exact_argmax.py. */
/* For fewer rows, starting a parallel loop takes longer than quantizing the rows. */
#define PARALLEL_ROWS_MIN 8

typedef struct {
    PackedWeight int8_weight;  /* The LM head minus `column_mean`, in int8. */
    const float *error_norms;  /* Upper bound of the norm of each column's quantization error. */
    const float *column_norms; /* Upper bound of the norm of each quantized column. */
    const float *column_mean;  /* The mean of the columns; subtracted before the quantization. */
    const uint16_t *bf16_panels; /* The LM head in bf16 panels. */
    /* Upper bound of the norms of all columns, before and after subtraction and quantization. */
    double norm_max;
} ScreenedHead;

/* Error bounds of a row's int8 logits. For column c of the LM head:

       |bf16 logit - mean_logit - int8 logit|
           <= norm * error_norms[c] + error_norm * column_norms[c] + slack

   `norm` is the L2 norm of the row, `error_norm` the L2 norm of the row's quantization error,
   `slack` the bound of the rounding errors, and `mean_logit` the product of the row and
   `column_mean`. */
typedef struct {
    float norm, error_norm, slack, mean_logit;
} RowError;

/* A lower bound of (a row's largest logit - mean_logit), and the panel that gives the bound. */
typedef struct {
    float logit;
    int32_t panel;
} LowerBound;

struct Bounds {
    const ScreenedHead *head;
    const RowError *errors; /* One for each row. */
    float *upper;           /* Upper bound of the logits of each panel and row: (panels, rows). */
    LowerBound *lower;      /* Lower bounds for each thread and row: (threads, rows). */
};

typedef struct {
    float logit;
    int64_t column;
} Candidate;

/* The error bounds of a quantized row, including fp32 rounding here and in gemm_bf16.c. */
TARGET_AVX512_VNNI static RowError row_error(const uint16_t *x, const ScreenedHead *s,
                                             const QuantizedGroup *groups)
{
    const int64_t channels = s->int8_weight.channels;
    __m512 squares = _mm512_setzero_ps(), error_squares = squares, mean_products = squares;
    for (int64_t c = 0; c < channels; c += LANES) {
        const __mmask16 mask = lane_mask(channels - c);
        const QuantizedGroup *group = groups + c / GROUP_CHANNELS;
        const __m128i codes = _mm_loadu_si128((const __m128i *)(group->codes + c % GROUP_CHANNELS));
        const __m512 dequantized = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)) * group->scale;
        const __m512 y = load_bf16(x + c, mask);
        squares += y * y;
        error_squares += (y - dequantized) * (y - dequantized);
        mean_products += y * _mm512_maskz_loadu_ps(mask, s->column_mean + c);
    }
    const float norm = sqrtf(_mm512_reduce_add_ps(squares)) * 1.001f;
    const float error_norm = sqrtf(_mm512_reduce_add_ps(error_squares)) * 1.001f + norm * 0x1p-20f;
    /* There are at most 2 * channels + 256 roundings. The error of each is at most 2^-24 * norm *
       norm_max. */
    const float rounding = norm * (2 * channels + 256) * 0x1p-24f;
    const float slack = (float)s->norm_max * rounding * 1.001f + 1e-22f;
    return (RowError){norm, error_norm, slack, _mm512_reduce_add_ps(mean_products)};
}

/* Updates the bounds of some rows from their int8 logits of one panel. */
TARGET_AVX512_VNNI void update_bounds(const Gemm *p, const __m512 (*sum)[2], int64_t first,
                                      int64_t column, int rows)
{
    const Bounds *b = p->bounds;
    const ScreenedHead *s = b->head;
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    float *upper = b->upper + column / COLUMNS * p->rows + first;
    LowerBound *lower = b->lower + worker_index() * p->rows + first;
    for (int i = 0; i < rows; i++) {
        const RowError error = b->errors[first + i];
        __m512 upper_logits = lowest, lower_logits = lowest;
        for (int half = 0; half < 2; half++) {
            const int64_t begin = column + half * LANES;
            const __mmask16 mask = lane_mask(s->int8_weight.columns - begin);
            __m512 margin = _mm512_loadu_ps(s->error_norms + begin) * error.norm + error.slack;
            margin = _mm512_loadu_ps(s->column_norms + begin) * error.error_norm + margin;
            upper_logits =
                _mm512_mask_max_ps(upper_logits, mask, upper_logits, sum[i][half] + margin);
            lower_logits =
                _mm512_mask_max_ps(lower_logits, mask, lower_logits, sum[i][half] - margin);
        }
        /* In most panels no upper bound reaches the row's lower bound. Such a panel needs no
           reduction. */
        upper[i] = -INFINITY;
        if (_mm512_cmp_ps_mask(upper_logits, _mm512_set1_ps(lower[i].logit), _CMP_GE_OQ)) {
            const float row_lower = _mm512_reduce_max_ps(lower_logits);
            upper[i] = _mm512_reduce_max_ps(upper_logits);
            if (row_lower > lower[i].logit)
                lower[i] = (LowerBound){row_lower, column / COLUMNS};
        }
    }
}

static const Candidate NO_CANDIDATE = {-INFINITY, INT64_MAX};

INLINE int is_better(Candidate a, Candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.column < b.column);
}

/* Scores a panel for one row: computes the logits from the bf16 head, and updates `best`. */
TARGET_AVX512_VNNI static void score_panel(const ScreenedHead *s, const uint16_t *x, int64_t panel,
                                           Candidate *best)
{
    const int64_t channels = s->int8_weight.channels;
    __m512 logits[1][2] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
    accumulate(logits, x, channels, s->bf16_panels + panel * channels * COLUMNS, channels / 2, 1);
    for (int half = 0; half < 2; half++) {
        const int64_t column = panel * COLUMNS + half * LANES;
        const __mmask16 mask = lane_mask(s->int8_weight.columns - column);
        const float largest = _mm512_mask_reduce_max_ps(mask, logits[0][half]);
        const __mmask16 ties =
            _mm512_mask_cmp_ps_mask(mask, logits[0][half], _mm512_set1_ps(largest), _CMP_EQ_OQ);
        const Candidate candidate = {largest, column + __builtin_ctz(ties | 1 << LANES)};
        if (ties && is_better(candidate, *best))
            *best = candidate;
    }
}

/* The state of the search for the largest logits of some rows. */
typedef struct {
    Gemm product;   /* The int8 GEMM. */
    int64_t threads;
    const NormArgs *norm;
    const uint16_t *input; /* The rows before the norm. */
    const uint16_t *x; /* The rows that the LM head multiplies: after the norm, if there is one. */
    uint16_t *normed;  /* Memory for the rows after the norm. */
    RowError errors[ROWS_MAX];
    Candidate best[ROWS_MAX];
    LowerBound lower[ROWS_MAX];
    Candidate *thread_best; /* The best candidates of each thread and row: (threads, rows). */
    int64_t scored;         /* The number of scored (row, panel) pairs. */
} Search;

/* Applies the norm, if it is not NULL, to a row; quantizes the row and returns its error bounds. */
TARGET_AVX512_VNNI static RowError quantize_query(const Search *search, int64_t row)
{
    const Gemm *p = &search->product;
    const int64_t channels = p->weight->channels;
    QuantizedGroup *groups = p->groups + row * group_count(channels);
    const uint16_t *x = search->x + row * channels;
    if (search->norm)
        norm_row(search->norm, search->input + row * channels, channels,
                 search->normed + row * channels);
    quantize_row(x, channels, groups);
    return row_error(x, p->bounds->head, groups);
}

/* Scores the panel that gives the row's highest lower bound, and raises the row's lower bound to
   (the panel's largest logit - mean_logit - rounding errors). After this, only a few more panels
   have an upper bound that reaches the row's lower bound. */
TARGET_AVX512_VNNI static void score_likeliest_panel(Search *search, int64_t row)
{
    const Bounds *bounds = search->product.bounds;
    const RowError *error = bounds->errors + row;
    LowerBound *lower = search->lower + row;
    *lower = bounds->lower[row];
    for (int64_t i = 1; i < search->threads; i++)
        if (bounds->lower[i * search->product.rows + row].logit > lower->logit)
            *lower = bounds->lower[i * search->product.rows + row];
    if (lower->panel < 0)
        return;
    Candidate *best = search->best + row;
    score_panel(bounds->head, search->x + row * bounds->head->int8_weight.channels, lower->panel,
                best);
    lower->logit = fmaxf(lower->logit, best->logit - error->mean_logit - 2 * error->slack);
}

/* Scores a panel for each row whose largest logit may be in the panel, and returns the number of
   these rows. Skips the rows for which `score_likeliest_panel` has scored the panel. */
TARGET_AVX512_VNNI static int64_t score_candidate_panel(const Search *search, int64_t panel,
                                                        Candidate *best)
{
    const ScreenedHead *s = search->product.bounds->head;
    const int64_t rows = search->product.rows;
    const float *upper = search->product.bounds->upper + panel * rows;
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++)
        if (upper[row] >= search->lower[row].logit && search->lower[row].panel != panel)
            score_panel(s, search->x + row * s->int8_weight.channels, panel, best + row), count++;
    return count;
}

static void quantize_queries(void *context, int64_t first, int64_t end)
{
    Search *search = context;
    for (int64_t row = first; row < end; row++)
        search->errors[row] = quantize_query(search, row);
}

static void bound_panels(void *context, int64_t first, int64_t end)
{
    const Search *search = context;
    for (int64_t panel = first; panel < end; panel++)
        gemm_int8_panel(&search->product, panel);
}

static void score_likeliest_panels(void *context, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        score_likeliest_panel(context, row);
}

static void score_candidate_panels(void *context, int64_t first, int64_t end)
{
    Search *search = context;
    Candidate *best = search->thread_best + worker_index() * search->product.rows;
    int64_t scored = 0;
    for (int64_t panel = first; panel < end; panel++)
        scored += score_candidate_panel(search, panel, best);
    __atomic_fetch_add(&search->scored, scored, __ATOMIC_RELAXED);
}

/* Stores the column of each row's largest logit in `best`; on a tie, the first such column. There
   are at most ROWS_MAX rows. `norm`, if not NULL, is applied to the rows first. Returns the number
   of scored (row, panel) pairs. Returns -1, and leaves `best` undefined, if the L2 norm of a row is
   outside the supported range. */
TARGET_AVX512_VNNI int64_t preamble_screened_argmax(const ScreenedHead *s, const NormArgs *norm,
                                                    const uint16_t *x, int64_t rows, int64_t *best,
                                                    int64_t threads)
{
    const int64_t channels = s->int8_weight.channels;
    const int64_t panels = (s->int8_weight.columns + COLUMNS - 1) / COLUMNS;
    const int64_t chunk = panels / (threads * 8) + 1;
    const int64_t best_bytes = threads * rows * sizeof(Candidate),
                  lower_bytes = threads * rows * sizeof(LowerBound),
                  upper_bytes = panels * rows * sizeof(float);
    const int64_t group_bytes = rows * group_count(channels) * sizeof(QuantizedGroup);
    char *scratch = thread_scratch(best_bytes + lower_bytes + upper_bytes + group_bytes +
                                   (norm ? rows * channels * sizeof *x : 0));
    char *lower = scratch + best_bytes, *upper = lower + lower_bytes, *groups = upper + upper_bytes;
    Bounds bounds = {.head = s, .upper = (float *)upper, .lower = (LowerBound *)lower};
    Search search = {.product = {.weight = &s->int8_weight, .rows = rows, .bounds = &bounds},
                     .threads = threads,
                     .norm = norm,
                     .input = x,
                     .thread_best = (Candidate *)scratch,
                     .scored = rows};
    bounds.errors = search.errors;
    search.product.groups = (QuantizedGroup *)groups;
    search.normed = (uint16_t *)(groups + group_bytes);
    search.x = norm ? search.normed : x;
    for (int64_t row = 0; row < rows; row++)
        search.best[row] = NO_CANDIDATE;
    for (int64_t i = 0; i < threads * rows; i++)
        bounds.lower[i] = (LowerBound){-INFINITY, -1}, search.thread_best[i] = NO_CANDIDATE;
    parallel_for(rows, 1, rows < PARALLEL_ROWS_MIN ? 1 : threads, STEALING, quantize_queries,
                 &search);
    for (int64_t row = 0; row < rows; row++)
        /* Outside this range, squares underflow or overflow in fp32. If a number of the row is not
           finite, the norm is outside too. */
        if (!(search.errors[row].norm > 1e-10f && search.errors[row].norm < 1e10f))
            return -1;
    parallel_for(panels, chunk, threads, STEALING, bound_panels, &search);
    parallel_for(rows, 1, threads, IN_ORDER, score_likeliest_panels, &search);
    parallel_for(panels, chunk, threads, STEALING, score_candidate_panels, &search);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = row; i < threads * rows; i += rows)
            if (is_better(search.thread_best[i], search.best[row]))
                search.best[row] = search.thread_best[i];
        best[row] = search.best[row].column;
    }
    return search.scored;
}

#endif
