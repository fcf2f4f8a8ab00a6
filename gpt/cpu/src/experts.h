/* Mixture-of-experts layer: the router, the experts and the shared expert. */

#pragma once

#include "gemm.h"

#if defined(__x86_64__)

/* Consecutive experts of a layer: all of them, or with expert parallelism this rank's. Each array
   has an element for each expert. */
typedef struct {
    const PackedWeight *fc1, *fc2; /* The outputs of fc2 are fp32. */
    const uint16_t **fc1_biases, **fc2_biases; /* NULL if there are no biases. */
    int64_t experts, first_expert, activation;
} Experts;

/* The router computes one logit for each expert, chooses `topk` experts, and weights them. */
typedef struct {
    PackedWeight weight;      /* The logits are bf16; for an fp32 weight, fp32. */
    const uint16_t *bias;     /* Of the logits; NULL if there is none. */
    const float *expert_bias; /* Added to the scores that choose the experts; NULL: nothing. */
    int64_t topk;
    int64_t sigmoid;       /* Nonzero: the scores are sigmoids of the logits; 0: a softmax. */
    int64_t pre_softmax;   /* Nonzero: softmax over all experts; 0: over the chosen experts. */
    double scaling_factor; /* Of the weights. */
} Router;

typedef struct {
    Router router;
    Experts experts;
    /* The shared expert; `shared_fc1.panels` is NULL if there is none. The outputs of `shared_fc2`
       are fp32. The sigmoid of the output of `shared_gate`, if it has panels, is the factor of the
       shared expert's output. */
    PackedWeight shared_fc1, shared_fc2, shared_gate;
} MoELayer;

/* The adapters of the rows of an MoE layer. */
typedef struct {
    RowAdapters shared_fc1, shared_fc2;
    /* `linear` is the index of fc1 of the first of `Experts`; fc2 follows, then the next expert.
       `experts.adapters` is NULL if no adapter changes experts. */
    RowAdapters experts;
} MoEAdapters;

/* Defined in router.c. Returns the number of bytes of `memory` that `moe_layer` needs. */
HIDDEN int64_t moe_scratch_bytes(const MoELayer *layer, int64_t rows);
/* Stores the layer's output for the normed rows of x, plus the rows of `residual`, in `out`, which
   may be x or `residual`. */
HIDDEN void moe_layer(const MoELayer *layer, const NormArgs *norm, const uint16_t *x, int64_t rows,
                      const uint16_t *residual, uint16_t *out, void *memory, int64_t threads,
                      const MoEAdapters *adapters);

/* The experts of each token, and what is added to the sum of their outputs. */
typedef struct {
    const int64_t *ids; /* The numbers of each token's experts, (tokens, topk). */
    const float *weights;
    int64_t topk;
    const float *shared;          /* The outputs of the shared expert; NULL if there is none. */
    const uint16_t *shared_gates; /* For each token, before the sigmoid; NULL if there are none. */
    const uint16_t *residual;     /* NULL if there is none. */
} Routing;

/* Defined in experts.c. Stores the weighted sums of the experts' outputs in `out`, (tokens,
   hidden). `adapters`: as in MoEAdapters; its `adapters` may be NULL. */
HIDDEN void run_experts(const Experts *experts, const Routing *routing, const uint16_t *x,
                        int64_t tokens, void *out, int64_t threads, const RowAdapters *adapters);

#endif
