"""Steps of a packed model on a CPU, by the fused decoder or by its modules."""

import random

import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.backends.cpu_packing import pack
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from tests.support.models import EXPERTS, MODERN, build

MORE = {
    "wide": MODERN.with_fields(kv_channels=64, hidden_size=96, window_size=None),
    "turned in pairs": MODERN.with_fields(
        kv_channels=80, rotary_percent=1.0, rotary_interleaved=True, qk_layernorm=False
    ),
    "biases": MODERN.with_fields(mlp_bias=True, proj_bias=True, activation="gelu_tanh"),
    "experts last": EXPERTS.with_fields(moe_layers=(False, False, False, True)),
    "experts and dense": EXPERTS.with_fields(moe_layers=(False, True, False, False)),
}


def packed(config: GPTConfig, *, int8: bool = False) -> GPT:
    model = build(config, dtype=torch.bfloat16)
    pack(model, int8=int8)
    assert model.walk is not None
    return model


def step(
    model: GPT, lengths: list[int], past: list[int], *, walks: bool, rows: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits of a step over a pool that has a past, and what the pool is afterwards."""
    size, config = 8, model.config
    draw, generator = random.Random(1), torch.Generator().manual_seed(2)
    needs = [-(-(n + p) // size) for n, p in zip(lengths, past, strict=True)]
    blocks = draw.sample(range(1, sum(needs) + 1), sum(needs))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    kv = KVPool(config, model.layers, sum(needs) + 1, block_tokens=size, dtype=model.dtype)
    for layer in model.layers:
        held = kv.layer(layer)
        held.copy_(torch.randn(held.shape, generator=generator).bfloat16())
    ids = torch.randint(config.vocab_size, (sum(lengths),), generator=generator)
    walk, model.walk = model.walk, model.walk if walks else None
    try:
        logits = model(ids, Batch.paged(lengths, past, tables, size, rows=rows), kv)
    finally:
        model.walk = walk
    return logits, [kv.layer(layer).clone() for layer in model.layers]


STEPS = {
    "one": ([1], [5]),
    "several": ([1] * 9, [0, 3, 7, 8, 20, 1, 15, 16, 40]),
    "a prompt": ([37], [0]),
    "all kinds": ([1, 13, 1, 2, 25], [9, 0, 30, 4, 11]),
}
