/* Fused decoder layers: one call runs a range of layers.

   With few rows in a step, one Python call per kernel would take longer than the kernels. */

#include "experts.h"
#include "thread_pool.h"

#if defined(__x86_64__)

typedef struct {
    NormArgs norm; /* Before attention. */
    PackedWeight qkv;
    const uint16_t *qkv_bias;
    NormArgs q_norm, k_norm; /* Applied to each head. */
    PackedWeight proj;
    const uint16_t *proj_bias;
    NormArgs mlp_norm;
    const MoELayer *moe; /* NULL: the layer has a dense MLP, `fc1` and `fc2`. */
    int64_t first_expert_linear; /* Of the layer's experts, in StepArgs.expert_adapters. */
    PackedWeight fc1;
    const uint16_t *fc1_bias;
    PackedWeight fc2;
    const uint16_t *fc2_bias;
    const float *sinks; /* The logit of each query head's attention sink; NULL: no sinks. */
} DecoderLayer;

/* A range of layers. `groups`: KV heads; `queries`: query heads per KV head; `width`: channels per
   head. */
typedef struct {
    int64_t layers, hidden, groups, queries, width, ffn;
    int64_t activation;
    int64_t parallel_residual; /* Nonzero: the MLP reads the layer's input, like attention. */
    const float *alibi_slopes; /* Of each query head; NULL: no ALiBi. */
    const DecoderLayer *layer_array;
} LayerRange;

/* What layers with the same window, RoPE and KV group share in a step. */
typedef struct {
    int64_t rotary_dim;     /* Channels of a head that RoPE rotates; 0: no RoPE. */
    int64_t interleaved;    /* Nonzero: RoPE pairs channels 2i and 2i + 1; 0: the two halves. */
    const float *cos, *sin; /* (rows, rotary_dim / 2) */
    const int64_t *blocks;  /* Each row's block in the pool. */
    const void *decode;     /* DecodeArgs; NULL if the step has no decode rows. */
    const void *prefill;    /* PrefillArgs; NULL if the step has no prefill runs. */
} LayerKind;

typedef struct {
    int64_t rows, threads;
    uint16_t *x;      /* Input rows; replaced by the output. */
    uint16_t *memory; /* `preamble_decoder_scratch_numel` elements. */
    const LayerKind *kinds;
    const int64_t *layer_kinds; /* Each layer's index in `kinds`. */
    char **layer_pools;         /* Each layer's KV pool. */
    const int64_t *offsets;     /* Each row's offset in its block. */
    int64_t block_tokens;
    /* The rows that are needed after the range's last layer, and their number. For the other rows,
       the last layer does not compute projection and MLP. NULL: all rows are needed. */
    const int64_t *output_rows;
    int64_t output_count;
    /* The adapters of the step. An adapter has four linears for each layer of the range, in the
       order of `LayerLinear`. */
    int64_t adapter_count;
    const AdaptedLinear **adapters;
    const int64_t *row_adapters;        /* Each row's adapter, or -1. */
    const int64_t *output_row_adapters; /* Those of `output_rows`. */
    /* By adapter, the linears of the experts of all MoE layers; NULL: no adapter changes them. */
    const AdaptedLinear **expert_adapters;
} StepArgs;

/* FC1 and FC2 of an MoE layer are those of the shared expert. */
typedef enum { QKV, PROJ, FC1, FC2, LAYER_LINEARS } LayerLinear;

/* Buffers for the intermediate results of a step. */
typedef struct {
    uint16_t *qkv, *q, *attended, *mlp_residual;
    uint16_t *mlp_hidden; /* Or all buffers of an MoE layer. */
} Scratch;

/* The number of elements of the buffer `mlp_hidden`. */
static int64_t mlp_numel(const LayerRange *s, int64_t rows)
{
    int64_t numel = rows * s->ffn;
    for (const DecoderLayer *l = s->layer_array; l < s->layer_array + s->layers; l++) {
        const int64_t moe_numel =
            l->moe ? moe_scratch_bytes(l->moe, rows) / (int64_t)sizeof(uint16_t) : 0;
        numel = moe_numel > numel ? moe_numel : numel;
    }
    return numel;
}

static int64_t layout_scratch(const LayerRange *s, int64_t rows, uint16_t *memory, Scratch *to)
{
    const int64_t heads = s->groups * s->queries * s->width;
    /* `proj_and_mlp_of_rows` also stores copies of rows of x in the buffer `q`. */
    const int64_t q = heads > s->hidden ? heads : s->hidden;
    const int64_t sizes[] = {rows * (heads + 2 * s->groups * s->width), rows * q, rows * heads,
                             rows * s->hidden, mlp_numel(s, rows)};
    uint16_t **buffers[] = {&to->qkv, &to->q, &to->attended, &to->mlp_residual, &to->mlp_hidden};
    int64_t total = 0;
    for (int i = 0; i < 5; i++) {
        *buffers[i] = memory + total;
        total += (sizes[i] + 31) / 32 * 32;
    }
    return total;
}

/* Returns the number of bf16 elements of scratch memory that a step needs. */
int64_t preamble_decoder_scratch_numel(const LayerRange *s, int64_t rows)
{
    static uint16_t unused_memory[1];
    Scratch unused_scratch;
    return layout_scratch(s, rows, unused_memory, &unused_scratch);
}

TARGET_AVX512_BF16 INLINE __m512i round_to_bf16(__m512 x)
{
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}

/* Applies RoPE to the first 2 * `pairs` channels of a head. `cos` and `sin` have one number per
   pair of channels. */
TARGET_AVX512_BF16 static void apply_rope_avx512(uint16_t *x, const float *cos, const float *sin,
                                                 int64_t pairs, int64_t interleaved)
{
    for (int64_t c = 0; c < pairs; c += LANES) {
        const __mmask16 mask = lane_mask(pairs - c);
        const __m512 cosines = _mm512_maskz_loadu_ps(mask, cos + c);
        const __m512 sines = _mm512_maskz_loadu_ps(mask, sin + c);
        if (interleaved) {
            __m512i pair_bits = _mm512_maskz_loadu_epi32(mask, x + 2 * c);
            __m512 a = (__m512)_mm512_slli_epi32(pair_bits, 16);
            __m512 b = (__m512)_mm512_andnot_si512(_mm512_set1_epi32(0xffff), pair_bits);
            pair_bits = _mm512_slli_epi32(round_to_bf16(b * cosines + a * sines), 16);
            pair_bits = _mm512_or_si512(pair_bits, round_to_bf16(a * cosines - b * sines));
            _mm512_mask_storeu_epi32(x + 2 * c, mask, pair_bits);
        } else {
            __m512 a = load_bf16(x + c, mask), b = load_bf16(x + pairs + c, mask);
            _mm256_mask_storeu_epi16(x + c, mask,
                                     (__m256i)_mm512_cvtneps_pbh(a * cosines - b * sines));
            _mm256_mask_storeu_epi16(x + pairs + c, mask,
                                     (__m256i)_mm512_cvtneps_pbh(b * cosines + a * sines));
        }
    }
}

/* Like apply_rope_avx512, for CPUs without AVX512-bf16. */
static void apply_rope_plain(uint16_t *x, const float *cos, const float *sin, int64_t pairs,
                             int64_t interleaved)
{
    for (int64_t c = 0; c < pairs; c++) {
        uint16_t *first = x + (interleaved ? 2 * c : c);
        uint16_t *second = x + (interleaved ? 2 * c + 1 : pairs + c);
        const float a = bf16_to_fp32(*first), b = bf16_to_fp32(*second);
        *first = fp32_to_bf16(a * cos[c] - b * sin[c]);
        *second = fp32_to_bf16(b * cos[c] + a * sin[c]);
    }
}

/* Applies norm and RoPE, if the model has them, to a head of q or k; stores the head at `to`. */
static void norm_and_rope(const LayerKind *kind, const NormArgs *norm, int64_t row, int64_t width,
                          const uint16_t *from, uint16_t *to)
{
    const int64_t pairs = kind->rotary_dim / 2;
    if (norm->scale)
        norm_row(norm, from, width, to);
    else
        memcpy(to, from, width * sizeof *to);
    if (pairs)
        (isa_level < AVX512_BF16 ? apply_rope_plain : apply_rope_avx512)(
            to, kind->cos + row * pairs, kind->sin + row * pairs, pairs, kind->interleaved);
}

/* The context of the parallel loop over the rows of `qkv`. */
typedef struct {
    const LayerRange *range;
    const StepArgs *step;
    const DecoderLayer *layer;
    const LayerKind *kind;
    uint16_t *pool;
    const Scratch *scratch;
} QkvLoop;

/* Applies the head norms and RoPE to a row of `qkv`. Stores the row's queries contiguously in `q`,
   and the keys and values in the pool. */
static void split_qkv_row(const QkvLoop *loop, int64_t row)
{
    const LayerRange *s = loop->range;
    const StepArgs *p = loop->step;
    const DecoderLayer *layer = loop->layer;
    const LayerKind *kind = loop->kind;
    uint16_t *pool = loop->pool;
    const int64_t width = s->width, block_keys = s->groups * p->block_tokens;
    const uint16_t *from = loop->scratch->qkv + row * s->groups * (s->queries + 2) * width;
    uint16_t *queries = loop->scratch->q + row * s->groups * s->queries * width;
    for (int64_t group = 0; group < s->groups; group++) {
        for (int64_t i = 0; i < s->queries; i++, from += width, queries += width)
            norm_and_rope(kind, &layer->q_norm, row, width, from, queries);
        int64_t pool_row =
            kind->blocks[row] * 2 * block_keys + group * p->block_tokens + p->offsets[row];
        norm_and_rope(kind, &layer->k_norm, row, width, from, pool + pool_row * width);
        memcpy(pool + (pool_row + block_keys) * width, from + width, width * sizeof *pool);
        from += 2 * width;
    }
}

static void split_qkv(void *context, int64_t first, int64_t end)
{
    for (int64_t row = first; row < end; row++)
        split_qkv_row(context, row);
}

/* The adapters of a linear of layer `l` for rows with the adapters `row_adapters`. */
static RowAdapters linear_adapters(const LayerRange *s, const StepArgs *p, const DecoderLayer *l,
                                   LayerLinear linear, const int64_t *row_adapters)
{
    const int64_t index = (l - s->layer_array) * LAYER_LINEARS + linear;
    return (RowAdapters){row_adapters, p->adapter_count, index, p->adapters};
}

/* The part of a layer after attention: projection and MLP. Replaces the rows of x; `attended` is
   the attention output. */
static void proj_and_mlp(const LayerRange *s, const StepArgs *p, const DecoderLayer *l,
                         const Scratch *scratch, uint16_t *x, const uint16_t *attended,
                         int64_t rows, const int64_t *row_adapters)
{
    const RowAdapters proj = linear_adapters(s, p, l, PROJ, row_adapters);
    const RowAdapters fc1 = linear_adapters(s, p, l, FC1, row_adapters);
    const RowAdapters fc2 = linear_adapters(s, p, l, FC2, row_adapters);
    const int64_t threads = p->threads;
    uint16_t *residual = scratch->mlp_residual, *input = s->parallel_residual ? x : residual;
    preamble_gemm(&l->proj, attended, rows, l->proj_bias, 0, x, residual, threads, NULL,
                  &proj);
    if (l->moe) {
        const RowAdapters experts = {row_adapters, p->adapter_count, l->first_expert_linear,
                                     p->expert_adapters};
        const MoEAdapters adapters = {fc1, fc2, experts};
        moe_layer(l->moe, &l->mlp_norm, input, rows, residual, x, scratch->mlp_hidden, threads,
                  &adapters);
        return;
    }
    preamble_gemm(&l->fc1, input, rows, l->fc1_bias, s->activation, NULL, scratch->mlp_hidden,
                  threads, &l->mlp_norm, &fc1);
    preamble_gemm(&l->fc2, scratch->mlp_hidden, rows, l->fc2_bias, 0, residual, x, threads, NULL,
                  &fc2);
}

/* Like proj_and_mlp, but only for the rows in `output_rows`. */
static void proj_and_mlp_of_rows(const LayerRange *s, const StepArgs *p, const DecoderLayer *l,
                                 const Scratch *scratch)
{
    const int64_t attended_width = s->groups * s->queries * s->width, hidden = s->hidden;
    /* After attention, nothing else reads the buffers `q` and `qkv`, so they are reused. */
    uint16_t *x = scratch->q, *attended = scratch->qkv;
    for (int64_t i = 0; i < p->output_count; i++) {
        memcpy(x + i * hidden, p->x + p->output_rows[i] * hidden, hidden * sizeof *x);
        memcpy(attended + i * attended_width,
               scratch->attended + p->output_rows[i] * attended_width,
               attended_width * sizeof *attended);
    }
    proj_and_mlp(s, p, l, scratch, x, attended, p->output_count, p->output_row_adapters);
    for (int64_t i = 0; i < p->output_count; i++)
        memcpy(p->x + p->output_rows[i] * hidden, x + i * hidden, hidden * sizeof *x);
}

/* Runs all layers of a range. Returns nonzero if attention does not support the head dimension or
   the CPU. */
int preamble_decoder_layers(const LayerRange *s, const StepArgs *p)
{
    Scratch scratch;
    layout_scratch(s, p->rows, p->memory, &scratch);
    const int64_t head = s->width, row = s->groups * s->queries * head, threads = p->threads;
    for (int64_t layer = 0; layer < s->layers; layer++) {
        const DecoderLayer *l = s->layer_array + layer;
        const LayerKind *kind = p->kinds + p->layer_kinds[layer];
        char *pool = p->layer_pools[layer];
        const RowAdapters qkv = linear_adapters(s, p, l, QKV, p->row_adapters);
        preamble_gemm(&l->qkv, p->x, p->rows, l->qkv_bias, 0, NULL, scratch.qkv, threads, &l->norm,
                      &qkv);
        QkvLoop loop = {s, p, l, kind, (uint16_t *)pool, &scratch};
        /* For a few rows, threads would not be faster. */
        parallel_for(p->rows, items_per_chunk(p->rows, threads), p->rows < LANES ? 1 : threads,
                     STEALING, split_qkv, &loop);
        if (kind->decode &&
            preamble_decode_attention(kind->decode, scratch.q, row, head, l->sinks, s->alibi_slopes, pool,
                                      scratch.attended))
            return 1;
        if (kind->prefill &&
            preamble_prefill_attention(kind->prefill, scratch.q, row, head, l->sinks, s->alibi_slopes,
                                       pool, scratch.attended))
            return 1;
        if (p->output_rows && layer == s->layers - 1)
            proj_and_mlp_of_rows(s, p, l, &scratch);
        else
            proj_and_mlp(s, p, l, &scratch, p->x, scratch.attended, p->rows, p->row_adapters);
    }
    return 0;
}

#endif
