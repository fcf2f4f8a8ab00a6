/* The experts of a mixture-of-experts layer: two grouped GEMMs over pairs of a token and an expert.

   The pairs are sorted by expert; the pairs of one expert are a group. One parallel loop multiplies
   all groups by their experts' panels, so that the threads share the work evenly, although the
   groups have different numbers of rows. A group's panel is read from memory once for each block of
   rows, and few rows are one block. The time for few tokens is that of reading the weights: T tokens
   with k of E experts each choose about E(1 - (1 - k/E)^T) experts, and an expert with a gated
   activation has 3 x (intermediate size) x (hidden size) weights. */

#include "experts.h"
#include "low_rank.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* Pairs that are computed at once. This limits the memory for their rows. */
#define PAIRS_MAX (8 << 10)
/* For fewer elements, starting a parallel loop takes longer than the loop. */
#define PARALLEL_ELEMENTS_MIN (8 << 10)

/* The rows of one expert. */
typedef struct {
    Gemm product; /* Its first row is the group's first row. */
    RowAdapters adapters; /* Of the product, if it has any. */
    int64_t first_row, first_tile;
    int64_t first_item; /* The items are pairs of a block of rows and a panel. */
    int64_t block_rows, panels;
} Group;

typedef struct {
    Group *groups;
    int64_t count, rows, tiles, items;
    const uint16_t *x;      /* The rows before staging; for fp32 weights, fp32 numbers. */
    const int64_t *sources; /* For each row of the groups, its row of x; NULL if they are equal. */
    uint16_t *tile_memory;  /* For one tile of each thread. */
    /* The adapters of all rows of the groups; `linear` is the one of the first expert. `adapters`
       is NULL if there are none. */
    RowAdapters adapters;
    uint16_t *u; /* For each row, scale * A x of its adapter. */
    int64_t u_stride;
} GroupedGemm;

/* The 16-bit words of a number that the weight multiplies. */
static int64_t words_per_number(const PackedWeight *w) { return w->fp32 ? 2 : 1; }

/* The pairs of some tokens, sorted by expert. */
typedef struct {
    const float *weights;
    int64_t tokens, topk;
    int64_t *sources;   /* For each sorted pair, its token. */
    int64_t *positions; /* For each pair of a token, its index in the sorted order; -1 for an expert
                           of another rank. */
    int64_t *ends;      /* For each expert, the index after its last pair. */
    const int64_t *token_adapters; /* Each token's adapter, or NULL. */
    int64_t *adapters;             /* For each sorted pair, its token's adapter. */
} Pairs;

/* Sorts the pairs of the experts from `first_expert` on. `ids`: the number of each pair's expert. */
static void sort_pairs(const Pairs *pairs, const int64_t *ids, int64_t first_expert,
                       int64_t experts)
{
    const int64_t count = pairs->tokens * pairs->topk;
    memset(pairs->ends, 0, experts * sizeof *pairs->ends);
    for (int64_t i = 0; i < count; i++) {
        const int64_t expert = ids[i] - first_expert;
        if (expert >= 0 && expert < experts)
            pairs->ends[expert]++;
    }
    for (int64_t expert = 0, first = 0; expert < experts; expert++) {
        const int64_t rows = pairs->ends[expert];
        pairs->ends[expert] = first;
        first += rows;
    }
    for (int64_t i = 0; i < count; i++) { /* Each end grows from its group's first pair. */
        const int64_t expert = ids[i] - first_expert;
        const int is_local = expert >= 0 && expert < experts;
        const int64_t position = is_local ? pairs->ends[expert]++ : -1;
        if (is_local)
            pairs->sources[position] = i / pairs->topk;
        if (is_local && pairs->token_adapters)
            pairs->adapters[position] = pairs->token_adapters[i / pairs->topk];
        pairs->positions[i] = position;
    }
}

/* Stages up to TILE rows of a group. */
static void stage_group_tile(const GroupedGemm *g, const Group *group, int64_t tile)
{
    const Gemm *p = &group->product;
    const int64_t channels = p->weight->channels, first = tile * TILE;
    const int64_t width = channels * words_per_number(p->weight);
    const int64_t count = p->rows - first < TILE ? p->rows - first : TILE;
    const int interleaved = first < p->interleaved_rows;
    const int uses_tile = interleaved || p->weight->scales;
    uint16_t *target = p->staged + first * p->x_stride;
    uint16_t *rows = uses_tile ? g->tile_memory + worker_index() * TILE * width : target;
    const int64_t stride = uses_tile ? width : p->x_stride;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = group->first_row + first + i;
        const uint16_t *from = g->x + (g->sources ? g->sources[row] : row) * width;
        if (p->weight->scales && !p->adapters)
            quantize_row(from, channels, p->groups + (first + i) * group_count(channels));
        else
            memcpy(rows + i * stride, from, width * sizeof *from);
    }
    if (p->adapters) {
        project_rows(p, rows, stride, first, count);
        for (int64_t i = 0; i < count; i++) {
            scale_input_row(p, first + i, rows + i * stride);
            if (p->weight->scales)
                quantize_row(rows + i * stride, channels,
                             p->groups + (first + i) * group_count(channels));
        }
    }
    if (interleaved)
        interleave_tile(rows, width, target);
}

static void stage_groups(void *context, int64_t first, int64_t end)
{
    const GroupedGemm *g = context;
    const Group *group = g->groups;
    for (int64_t i = first; i < end; i++) {
        while (group + 1 < g->groups + g->count && i >= group[1].first_tile)
            group++;
        stage_group_tile(g, group, i - group->first_tile);
    }
}

static void multiply_groups(void *context, int64_t first, int64_t end)
{
    const GroupedGemm *g = context;
    const Group *group = g->groups;
    for (int64_t i = first; i < end; i++) {
        while (group + 1 < g->groups + g->count && i >= group[1].first_item)
            group++;
        const int64_t item = i - group->first_item, rows = group->product.rows;
        const int64_t row = item / group->panels * group->block_rows;
        const int64_t end_row = row + group->block_rows < rows ? row + group->block_rows : rows;
        multiply_panel(&group->product, item % group->panels, row, end_row);
    }
}

/* Adds a group for each expert that has pairs. `outputs`: of all sorted pairs. A group without tiles
   reads its rows in place. */
static void plan_groups(GroupedGemm *g, const Pairs *pairs, int64_t experts,
                        const PackedWeight *weights, const uint16_t *const *biases,
                        int64_t activation, void *outputs, uint16_t *staged,
                        QuantizedGroup *quantized)
{
    const RowAdapters *all = &g->adapters;
    g->count = g->rows = g->tiles = g->items = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        const PackedWeight *w = weights + expert;
        const int64_t rows = pairs->ends[expert] - g->rows, first = g->rows;
        const int64_t words = words_per_number(w), width = w->channels * words;
        const int64_t stride = padded_stride(w->channels) * words;
        if (!rows)
            continue;
        Group *group = g->groups + g->count++;
        const RowAdapters adapters = {all->rows + first, all->count, all->linear + 2 * expert,
                                      all->adapters};
        const int adapts = all->adapters && adapters_change_linear(&adapters);
        const int interleave =
            !w->scales && !w->fp32 && rows >= INTERLEAVE_ROWS_MIN && isa_level == AVX512_BF16;
        /* The rows that are adjacent in g->x already need no copy. */
        const int in_place = !w->scales && !interleave && !adapts &&
                             (rows == 1 || (!g->sources && stride == width));
        const int64_t source = g->sources ? g->sources[first] : first;
        *group = (Group){
            .product = {.weight = w,
                        .x = in_place ? g->x + source * width : staged + first * stride,
                        .bias = biases ? biases[expert] : NULL,
                        .out = (char *)outputs +
                               first * w->columns * (w->fp32_output ? sizeof(float) : sizeof *staged),
                        .rows = rows,
                        .activation = activation,
                        .groups = quantized + first * group_count(w->channels),
                        .x_stride = stride,
                        .staged = staged + first * stride,
                        .interleaved_rows = interleave ? rows / TILE * TILE : 0,
                        .adapters = adapts ? &group->adapters : NULL,
                        .u = g->u + first * g->u_stride,
                        .u_stride = g->u_stride},
            .adapters = adapters,
            .first_row = first,
            .first_tile = g->tiles,
            .first_item = g->items,
            .block_rows = w->scales ? rows : cache_block_rows(rows, width),
            .panels = ((w->columns << w->gated) + COLUMNS - 1) / COLUMNS};
        g->rows += rows;
        g->tiles += in_place ? 0 : (rows + TILE - 1) / TILE;
        g->items += (rows + group->block_rows - 1) / group->block_rows * group->panels;
    }
}

static void run_groups(GroupedGemm *g, int64_t threads)
{
    if (!g->rows)
        return;
    const int64_t elements = g->rows * g->groups->product.weight->channels;
    parallel_for(g->tiles, items_per_chunk(g->tiles, threads),
                 elements < PARALLEL_ELEMENTS_MIN ? 1 : threads, STEALING, stage_groups, g);
    parallel_for(g->items, items_per_chunk(g->items, threads), threads, STEALING, multiply_groups,
                 g);
}

/* The sums of the tokens' outputs, as the context of a parallel loop over tokens. */
typedef struct {
    const Routing *routing;
    const Pairs *pairs;
    int64_t first; /* The first token of the pairs. */
    const float *outputs;
    void *out;
    int64_t hidden, fp32; /* `fp32`: nonzero if the numbers of `out` are fp32, 0 if they are bf16. */
} WeightedSum;

/* The factor of the shared expert's output. */
static float shared_factor(const Routing *routing, int64_t token)
{
    if (!routing->shared_gates)
        return 1;
    return 1 / (1 + expf(-bf16_to_fp32(routing->shared_gates[token])));
}

TARGET_AVX512_BF16 static void sum_token_avx512(const WeightedSum *s, int64_t token)
{
    const Routing *routing = s->routing;
    const int64_t topk = s->pairs->topk, row = (s->first + token) * s->hidden;
    const float factor = shared_factor(routing, s->first + token);
    for (int64_t c = 0; c < s->hidden; c += LANES) {
        const __mmask16 mask = lane_mask(s->hidden - c);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
            if (s->pairs->positions[i] < 0)
                continue;
            const float *output = s->outputs + s->pairs->positions[i] * s->hidden + c;
            sum += _mm512_maskz_loadu_ps(mask, output) * s->pairs->weights[i];
        }
        if (routing->shared)
            sum += _mm512_maskz_loadu_ps(mask, routing->shared + row + c) * factor;
        if (routing->residual)
            sum += load_bf16(routing->residual + row + c, mask);
        if (s->fp32)
            _mm512_mask_storeu_ps((float *)s->out + row + c, mask, sum);
        else
            _mm256_mask_storeu_epi16((uint16_t *)s->out + row + c, mask,
                                     (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

static void sum_token(const WeightedSum *s, int64_t token)
{
    const Routing *routing = s->routing;
    const int64_t topk = s->pairs->topk, row = (s->first + token) * s->hidden;
    const float factor = shared_factor(routing, s->first + token);
    for (int64_t c = 0; c < s->hidden; c++) {
        float sum = 0;
        for (int64_t i = token * topk; i < (token + 1) * topk; i++) {
            if (s->pairs->positions[i] < 0)
                continue;
            sum += s->outputs[s->pairs->positions[i] * s->hidden + c] * s->pairs->weights[i];
        }
        if (routing->shared)
            sum += routing->shared[row + c] * factor;
        if (routing->residual)
            sum += bf16_to_fp32(routing->residual[row + c]);
        if (s->fp32)
            ((float *)s->out)[row + c] = sum;
        else
            ((uint16_t *)s->out)[row + c] = fp32_to_bf16(sum);
    }
}

static void sum_tokens(void *context, int64_t first, int64_t end)
{
    for (int64_t token = first; token < end; token++)
        (isa_level < AVX512_BF16 ? sum_token : sum_token_avx512)(context, token);
}

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* The largest rank of the experts' linears among the adapters; 0 without adapters. */
static int64_t experts_rank_max(const Experts *e, const RowAdapters *adapters)
{
    RowAdapters linear = *adapters;
    int64_t rank = 0;
    for (int64_t i = 0; adapters->adapters && i < 2 * e->experts; i++, linear.linear++)
        rank = largest(rank, adapters_rank_max(&linear));
    return rank;
}

void run_experts(const Experts *e, const Routing *routing, const uint16_t *x, int64_t tokens,
                 void *out, int64_t threads, const RowAdapters *adapters)
{
    const int64_t hidden = e->fc1->channels, columns = e->fc1->columns, topk = routing->topk;
    const int64_t words = words_per_number(e->fc1);
    const int64_t tokens_max = PAIRS_MAX / topk + 1, chunk = tokens < tokens_max ? tokens : tokens_max;
    const int64_t pairs_max = chunk * topk, width = largest(hidden, columns);
    const int64_t quantized_numel = e->fc1->scales ? pairs_max * group_count(width) : 0;
    const int64_t staged_numel =
        pairs_max * largest(padded_stride(hidden), padded_stride(columns)) * words;
    const int64_t rank = experts_rank_max(e, adapters);
    if (!tokens)
        return;
    QuantizedGroup *quantized = thread_scratch(
        quantized_numel * sizeof *quantized + e->experts * (sizeof(Group) + sizeof(int64_t)) +
        3 * pairs_max * sizeof(int64_t) + pairs_max * hidden * sizeof(float) +
        (staged_numel + (pairs_max * columns + threads * TILE * width) * words +
         pairs_max * rank) * sizeof *x);
    Group *groups = (Group *)(quantized + quantized_numel);
    Pairs pairs = {.topk = topk, .ends = (int64_t *)(groups + e->experts)};
    pairs.sources = pairs.ends + e->experts;
    pairs.positions = pairs.sources + pairs_max;
    pairs.adapters = pairs.positions + pairs_max;
    float *outputs = (float *)(pairs.adapters + pairs_max);
    uint16_t *staged = (uint16_t *)(outputs + pairs_max * hidden);
    uint16_t *activated = staged + staged_numel;
    GroupedGemm g = {.groups = groups,
                     .tile_memory = activated + pairs_max * columns * words,
                     .adapters = {pairs.adapters, adapters->count, 0, adapters->adapters},
                     .u_stride = rank};
    g.u = g.tile_memory + threads * TILE * width * words;
    for (int64_t first = 0; first < tokens; first += chunk) {
        pairs.tokens = tokens - first < chunk ? tokens - first : chunk;
        pairs.weights = routing->weights + first * topk;
        pairs.token_adapters = adapters->adapters ? adapters->rows + first : NULL;
        sort_pairs(&pairs, routing->ids + first * topk, e->first_expert, e->experts);
        g.x = x + first * hidden * words, g.sources = pairs.sources;
        g.adapters.linear = adapters->linear;
        plan_groups(&g, &pairs, e->experts, e->fc1, e->fc1_biases, e->activation, activated, staged,
                    quantized);
        run_groups(&g, threads);
        g.x = activated, g.sources = NULL;
        g.adapters.linear++;
        plan_groups(&g, &pairs, e->experts, e->fc2, e->fc2_biases, NO_ACTIVATION, outputs, staged,
                    quantized);
        run_groups(&g, threads);
        WeightedSum sum = {routing, &pairs, first, outputs, out, hidden, e->fc1->fp32};
        const int64_t elements = pairs.tokens * topk * hidden;
        parallel_for(pairs.tokens, items_per_chunk(pairs.tokens, threads),
                     elements < PARALLEL_ELEMENTS_MIN ? 1 : threads, STEALING, sum_tokens, &sum);
    }
}

/* Stores the weighted sums of the experts' outputs in `out`, (tokens, hidden). `ids` and `weights`:
   the numbers of each token's experts and their weights, (tokens, topk). For fp32 weights, x and
   `out` are fp32, and there are no adapters. `adapters`: as in MoEAdapters, or NULL. */
void preamble_experts(const Experts *experts, const uint16_t *x, int64_t tokens, const int64_t *ids,
                      const float *weights, int64_t topk, void *out, int64_t threads,
                      const RowAdapters *adapters)
{
    const Routing routing = {.ids = ids, .weights = weights, .topk = topk};
    const RowAdapters none = {0};
    run_experts(experts, &routing, x, tokens, out, threads, adapters ? adapters : &none);
}

#endif
