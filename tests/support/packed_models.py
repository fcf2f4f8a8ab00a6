"""Steps of a packed model on a CPU, by the fused decoder or by its modules."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.cpu.exact_argmax import CpuGreedyHead, ScreenedArgmax
from gpt.cpu_inference.fused_decoder import FusedDecoder
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.kv_groups import KVGroup
from gpt.linear.cpu_linear import CpuLinear
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from tests.support.linear_adapters import random_linears
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, LAYERED, MODERN, XIELU, build

MORE = {
    "wide": MODERN.with_fields(kv_channels=64, hidden_size=96, window_size=None),
    "turned in pairs": MODERN.with_fields(
        kv_channels=80, rotary_percent=1.0, rotary_interleaved=True, qk_layernorm=False
    ),
    "biases": MODERN.with_fields(mlp_bias=True, proj_bias=True, activation="gelu_tanh"),
    "limited gates": MODERN.with_fields(
        activation="quick_gelu", activation_func_clamp_value=0.6, glu_linear_offset=1.0
    ),
    "sinks in all layers": MODERN.with_fields(attention_sinks=True),
    "ALiBi, grouped queries": CLASSIC.with_fields(
        position_embedding_type="alibi", num_attention_heads=8, num_query_groups=4
    ),
    "longrope, divided logits": MODERN.with_fields(
        rope_scaling=XIELU.rope_scaling,
        embedding_multiplier=1.5,
        embedding_multiplier_scope="all",
        logits_scaling=0.7,
    ),
    # The fused decoder must not compute these two.
    "multiplied outputs": MODERN.with_fields(residual_multiplier=0.5),
    "scaled queries": MODERN.with_fields(query_scaling_beta=0.5, query_scaling_length=4),
    "windows in some layers": CLASSIC.with_fields(
        num_layers=6, moe_layers=(), window_size=7, window_layers=(True, True, False) * 2
    ),
    "windows and rotary embeddings": LAYERED.with_fields(norm_placement="pre", softmax_scale=0.0),
    "experts, parallel residual": EXPERTS.with_fields(parallel_residual=True),
    "experts, router bias": EXPERTS.with_fields(
        moe_router_bias=True, moe_router_pre_softmax=True, moe_shared_expert_gate=False
    ),
    "experts last": EXPERTS.with_fields(moe_layers=(False, False, False, True)),
    "experts and dense": EXPERTS.with_fields(moe_layers=(False, True, False, False)),
}


# The networks whose layers the fused decoder computes.
DECODER_CONFIGS = {
    name: config
    for name, config in (CONFIGS | MORE).items()
    if FusedDecoder.supports_config(config)
}


EXPERT_CONFIGS = [name for name, config in DECODER_CONFIGS.items() if config.num_experts]


def packed_model(config: GPTConfig, *, int8: bool = False) -> GPT:
    model = build(config, dtype=torch.bfloat16)
    pack_weights(model, int8=int8)
    assert isinstance(model.decoder_backend, FusedDecoder)
    return model


def screened_argmax(model: GPT) -> ScreenedArgmax | None:
    """The screened argmax of a packed model."""
    assert isinstance(model.greedy_head, CpuGreedyHead)
    return model.greedy_head.screened


def disable_screening(model: GPT) -> None:
    """Compute greedy tokens of a packed model from all panels of its head."""
    head = model.head_backend
    assert isinstance(head, CpuLinear)
    model.use_greedy_head(CpuGreedyHead(head.packed, head.norm, model.config.vocab_size))


def run_step(
    model: GPT,
    lengths: list[int],
    past: list[int],
    *,
    fused: bool,
    rows: Tensor | None = None,
    groups: Sequence[KVGroup] | None = None,
    adapted_rows: Sequence[AdaptedRows] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Logits of a step over a pool with past tokens, and the pool after the step."""
    size = 8
    config = model.config
    draw = random.Random(1)
    generator = torch.Generator().manual_seed(2)
    needs = [-(-(n + p) // size) for n, p in zip(lengths, past, strict=True)]
    count = sum(needs) * len(groups or [None])
    blocks = draw.sample(range(1, count + 1), count)
    tables = torch.zeros(len(groups or [None]), len(needs), max(needs), dtype=torch.long)
    for group_tables in tables:
        for row, need in enumerate(needs):
            group_tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    kv = KVPool(
        config, model.layers, count + 1, block_tokens=size, dtype=model.dtype, groups=groups
    )
    for layer in model.layers:
        layer_kv = kv.layer(layer)
        layer_kv.copy_(torch.randn(layer_kv.shape, generator=generator).bfloat16())
    ids = torch.randint(config.vocab_size, (sum(lengths),), generator=generator)
    batch, *others = (Batch.paged(lengths, past, t, size, logit_rows=rows) for t in tables)
    batch = replace(batch, adapted_rows=tuple(adapted_rows))
    if others:
        slots = [other.slot_mapping[0] for other in others if other.slot_mapping is not None]
        batch = batch.with_groups(list(zip(slots, tables[1:], strict=True)))
    backend = model.decoder_backend
    if not fused:
        model.use_decoder_backend(model.layerwise_decoder())
    try:
        logits = model(ids, batch, kv)
    finally:
        model.use_decoder_backend(backend)
    return logits, [kv.layer(layer).clone() for layer in model.layers]


STEPS = {
    "one": ([1], [5]),
    "several": ([1] * 9, [0, 3, 7, 8, 20, 1, 15, 16, 40]),
    "a prompt": ([37], [0]),
    "all kinds": ([1, 13, 1, 2, 25], [9, 0, 30, 4, 11]),
}


def check_fused_decoder(name: str, kind: str) -> None:
    """The fused decoder's logits and KV cache equal those of the modules."""
    model = packed_model((CONFIGS | MORE)[name])
    got, pool = run_step(model, *STEPS[kind], fused=True)
    want, plain_pool = run_step(model, *STEPS[kind], fused=False)
    if not model.config.uses_rope and not model.config.qk_layernorm:
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
        return
    # Modules round the angles and each product of a rotation to bf16; the decoder rounds only once.
    exact, _ = run_step(build(model.config, dtype=torch.float64), *STEPS[kind], fused=False)
    # If two experts have nearly equal scores, rounding may select another expert.
    share = 0.1 if model.config.num_experts else 0.02
    assert (got - exact).std() < share * exact.std()


# (method, whether parts of fused linears are changed separately) of some adapters.
ADAPTERS = (("lora", False), ("lora", True), ("dora", True), ("ia3", False))


def mixed_adapters(
    model: GPT,
    rows: int,
    *,
    prepared: bool = True,
    methods: Sequence[tuple[str, bool]] = ADAPTERS,
) -> tuple[AdaptedRows, ...]:
    """Adapters of several methods for rows of a batch; some rows have none.

    Adjacent rows have the same adapter in the second half of the batch only.
    """
    indices = torch.arange(rows)
    owners = torch.where(indices < rows // 2, indices, indices // 15) % (len(methods) + 1)
    adapted_rows = []
    for owner, (method, by_parts) in enumerate(methods):
        linears = random_linears(model.config, method, rank=3 + 4 * owner, by_parts=by_parts)
        adapter = shard_adapter(linears, model.config, model.layers, dtype=model.dtype)
        owned = (owners == owner).nonzero().flatten()
        if len(owned):
            prepared_adapter = model.prepare_adapter(adapter) if prepared else adapter
            adapted_rows.append(AdaptedRows(prepared_adapter, owned))
    return tuple(adapted_rows)


def check_adapted_decoder(name: str, kind: str) -> None:
    """With adapters, the fused decoder's logits and KV cache equal those of the modules."""
    model, (lengths, past) = packed_model(DECODER_CONFIGS[name]), STEPS[kind]
    adapted_rows = mixed_adapters(model, sum(lengths))
    got, pool = run_step(model, lengths, past, fused=True, adapted_rows=adapted_rows)
    want, plain_pool = run_step(model, lengths, past, fused=False, adapted_rows=adapted_rows)
    base, _ = run_step(model, lengths, past, fused=True)
    assert not torch.allclose(got, base, rtol=0.1, atol=0.1)
    if not model.config.uses_rope and not model.config.qk_layernorm:
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
        return
    reference = build(model.config, dtype=torch.float64)
    exact_adapters = mixed_adapters(reference, sum(lengths))
    exact, _ = run_step(reference, lengths, past, fused=False, adapted_rows=exact_adapters)
    share = 0.1 if model.config.num_experts else 0.03
    assert (got - exact).std() < share * exact.std()
