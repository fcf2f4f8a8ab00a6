/* Router of a mixture-of-experts layer: chooses the experts of each token, and computes the layer.

   Of experts with equal scores, the one with the lowest number is chosen first, as in
   `choose_experts` of gpt/model/moe.py. */

#include "experts.h"
#include "thread_pool.h"

#if defined(__x86_64__)

/* For fewer elements, starting a parallel loop takes longer than the loop. */
#define PARALLEL_ELEMENTS_MIN (8 << 10)

/* The sigmoid of gpt/model/moe.py, in fp32. */
static float sigmoid_fp32(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Replaces numbers by their softmax. */
static void softmax_row(float *x, int64_t count)
{
    float max = x[0], sum = 0;
    for (int64_t i = 1; i < count; i++)
        max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] = expf(x[i] - max);
    for (int64_t i = 0; i < count; i++)
        x[i] /= sum;
}

/* The score by which an expert is chosen. NaN is the largest score. */
static float selection_score(const Router *router, const float *scores, int64_t expert)
{
    const float score = scores[expert] + (router->expert_bias ? router->expert_bias[expert] : 0);
    return score == score ? score : INFINITY;
}

/* Stores the numbers of the `topk` experts with the largest scores, in descending order. */
static void select_experts(const Router *router, const float *scores, int64_t *ids)
{
    int64_t count = 0;
    for (int64_t expert = 0; expert < router->weight.columns; expert++) {
        const float score = selection_score(router, scores, expert);
        int64_t position = count;
        while (position && score > selection_score(router, scores, ids[position - 1]))
            position--;
        if (position == router->topk)
            continue;
        count += count < router->topk;
        for (int64_t i = count - 1; i > position; i--)
            ids[i] = ids[i - 1];
        ids[position] = expert;
    }
}

/* Chooses the experts of one token. `scores` is memory for a number for each expert. */
static void choose_row(const Router *router, const void *logits, int64_t row, float *scores,
                       int64_t *ids, float *weights)
{
    const int64_t experts = router->weight.columns, topk = router->topk;
    for (int64_t i = 0; i < experts; i++) {
        const float logit = load_scalar(logits, row * experts + i, !router->weight.fp32);
        scores[i] = router->sigmoid ? sigmoid_fp32(logit) : logit;
    }
    if (!router->sigmoid && router->pre_softmax)
        softmax_row(scores, experts);
    select_experts(router, scores, ids);
    float sum = 0;
    for (int64_t i = 0; i < topk; i++)
        sum += weights[i] = scores[ids[i]];
    if (router->sigmoid && topk > 1)
        for (int64_t i = 0; i < topk; i++)
            weights[i] /= sum + 1e-20f;
    if (!router->sigmoid && !router->pre_softmax)
        softmax_row(weights, topk);
    for (int64_t i = 0; i < topk; i++)
        weights[i] *= (float)router->scaling_factor;
}

typedef struct {
    const Router *router;
    const void *logits;
    int64_t *ids;
    float *weights, *scores; /* `scores`: for the experts of one row of each thread. */
} ChoiceLoop;

static void choose_rows(void *context, int64_t first, int64_t end)
{
    const ChoiceLoop *loop = context;
    const int64_t experts = loop->router->weight.columns, topk = loop->router->topk;
    for (int64_t row = first; row < end; row++)
        choose_row(loop->router, loop->logits, row, loop->scores + worker_index() * experts,
                   loop->ids + row * topk, loop->weights + row * topk);
}

/* Stores the numbers and the weights of the experts of each row, (rows, topk), for router logits
   (rows, experts). */
void preamble_choose_experts(const Router *router, const void *logits, int64_t rows, int64_t *ids,
                             float *weights, int64_t threads)
{
    const int64_t experts = router->weight.columns;
    float *scores = thread_scratch(threads * experts * sizeof *scores);
    ChoiceLoop loop = {router, logits, ids, weights, scores};
    parallel_for(rows, items_per_chunk(rows, threads),
                 rows * experts < PARALLEL_ELEMENTS_MIN ? 1 : threads, STEALING, choose_rows, &loop);
}

typedef struct {
    const NormArgs *norm;
    const uint16_t *x;
    uint16_t *out;
    int64_t width;
} NormLoop;

static void norm_rows(void *context, int64_t first, int64_t end)
{
    const NormLoop *loop = context;
    for (int64_t row = first; row < end; row++)
        norm_row(loop->norm, loop->x + row * loop->width, loop->width,
                 loop->out + row * loop->width);
}

/* Buffers for the intermediate results of a layer. */
typedef struct {
    int64_t *ids;
    float *weights, *shared_output;
    uint16_t *normed, *logits, *shared_hidden, *shared_gates;
} MoEScratch;

static void *take(char **memory, int64_t bytes)
{
    void *taken = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return taken;
}

/* Returns the number of bytes of all buffers. */
static int64_t layout_moe_scratch(const MoELayer *layer, int64_t rows, char *memory, MoEScratch *to)
{
    const int64_t topk = layer->router.topk, hidden = layer->router.weight.channels;
    const int64_t shared_rows = layer->shared_fc1.panels ? rows : 0;
    char *next = memory;
    to->ids = take(&next, rows * topk * sizeof *to->ids);
    to->weights = take(&next, rows * topk * sizeof *to->weights);
    to->normed = take(&next, rows * hidden * sizeof *to->normed);
    to->logits = take(&next, rows * layer->router.weight.columns * sizeof *to->logits);
    to->shared_hidden =
        take(&next, shared_rows * layer->shared_fc1.columns * sizeof *to->shared_hidden);
    to->shared_output = take(&next, shared_rows * hidden * sizeof *to->shared_output);
    to->shared_gates = take(&next, shared_rows * sizeof *to->shared_gates);
    return next - memory;
}

int64_t moe_scratch_bytes(const MoELayer *layer, int64_t rows)
{
    static char unused_memory[1];
    MoEScratch unused_scratch;
    return layout_moe_scratch(layer, rows, unused_memory, &unused_scratch);
}

void moe_layer(const MoELayer *layer, const NormArgs *norm, const uint16_t *x, int64_t rows,
               const uint16_t *residual, uint16_t *out, void *memory, int64_t threads,
               const MoEAdapters *adapters)
{
    const Router *router = &layer->router;
    const int64_t hidden = router->weight.channels;
    MoEScratch scratch;
    layout_moe_scratch(layer, rows, memory, &scratch);
    NormLoop loop = {norm, x, scratch.normed, hidden};
    parallel_for(rows, items_per_chunk(rows, threads),
                 rows * hidden < PARALLEL_ELEMENTS_MIN ? 1 : threads, STEALING, norm_rows, &loop);
    preamble_gemm(&router->weight, scratch.normed, rows, router->bias, NO_ACTIVATION, NULL,
                  scratch.logits, threads, NULL, NULL);
    preamble_choose_experts(router, scratch.logits, rows, scratch.ids, scratch.weights, threads);
    Routing routing = {.ids = scratch.ids,
                       .weights = scratch.weights,
                       .topk = router->topk,
                       .residual = residual};
    if (layer->shared_fc1.panels) {
        preamble_gemm(&layer->shared_fc1, scratch.normed, rows, NULL,
                      layer->experts.activation, NULL, scratch.shared_hidden, threads, NULL,
                      &adapters->shared_fc1);
        preamble_gemm(&layer->shared_fc2, scratch.shared_hidden, rows, NULL,
                      NO_ACTIVATION, NULL, scratch.shared_output, threads, NULL,
                      &adapters->shared_fc2);
        routing.shared = scratch.shared_output;
    }
    if (layer->shared_gate.panels) {
        preamble_gemm(&layer->shared_gate, scratch.normed, rows, NULL, NO_ACTIVATION, NULL,
                      scratch.shared_gates, threads, NULL, NULL);
        routing.shared_gates = scratch.shared_gates;
    }
    run_experts(&layer->experts, &routing, scratch.normed, rows, out, threads,
                &adapters->experts);
}

#endif
