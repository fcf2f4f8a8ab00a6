"""All layers in one call of the library do what the modules do, row for row."""

import random

import pytest
import torch
from torch import Tensor

from gpt import kernels
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.kv import KVPool
from gpt.model import GPT
from gpt.packed import pack
from tests.models import CONFIGS, EXPERTS, MODERN, build

pytestmark = pytest.mark.skipif(
    kernels.machine() != kernels.MACHINES[-1],
    reason="modules do this on a machine without AVX512-bf16",
)

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


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize("name", [*CONFIGS, *MORE])
def test_what_nobody_reads_is_left_out_and_changes_nothing(name: str, walks: bool) -> None:
    model, (lengths, past) = packed((CONFIGS | MORE)[name]), STEPS["all kinds"]
    every, pool = step(model, lengths, past, walks=walks)
    for asked in ([0, 13, 14, 16, 41], [41], [30, 2]):
        rows = torch.tensor(asked)
        got, same_pool = step(model, lengths, past, walks=walks, rows=rows)
        assert torch.equal(got, every[rows])
        assert all(torch.equal(a, b) for a, b in zip(pool, same_pool, strict=True))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", [*CONFIGS, *MORE])
def test_it_walks_as_the_modules_go(name: str, kind: str) -> None:
    model = packed((CONFIGS | MORE)[name])
    got, pool = step(model, *STEPS[kind], walks=True)
    want, plain_pool = step(model, *STEPS[kind], walks=False)
    if not model.config.rotary and not model.config.qk_layernorm:
        assert torch.equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
        return
    # Modules round the angles and each product of a rotation to bf16; here all is rounded once.
    exact, _ = step(build(model.config, dtype=torch.float64), *STEPS[kind], walks=False)
    # Where two experts are about as good, a last digit decides, here or there.
    share = 0.1 if model.config.num_experts else 0.02
    assert (got - exact).std() < share * exact.std()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "odd", "turned in pairs"])
def test_a_row_is_the_same_to_the_bit_in_whatever_batch(name: str, int8: bool) -> None:
    model = packed((CONFIGS | MORE)[name], int8=int8)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(model.config.vocab_size, (length,), generator=generator)
        for length in (1, 6, 30, 2, 13)
    ]

    def logits(some: list[int], chunk: int) -> list[Tensor]:
        """Of the last token of each, brought in pieces."""
        kv = KVPool(model.config, model.layers, 25, block_tokens=8, dtype=torch.bfloat16)
        tables = 1 + torch.arange(4 * len(some)).view(-1, 4)
        last: dict[int, Tensor] = {}
        for start in range(0, 30, chunk):
            here = [place for place, one in enumerate(some) if len(prompts[one]) > start]
            pieces = [prompts[some[place]][start : start + chunk] for place in here]
            batch = Batch.paged([len(p) for p in pieces], [start] * len(here), tables[here], 8)
            made = model(torch.cat(pieces), batch, kv).split([len(p) for p in pieces])
            last |= {place: rows[-1] for place, rows in zip(here, made, strict=True)}
        return [last[place] for place in range(len(some))]

    for some, chunk in (([2], 30), ([4, 2], 7), ([3, 1, 0, 4, 2], 1)):
        together = logits([0, 1, 2, 3, 4], chunk)
        for one, row in zip(some, logits(some, chunk), strict=True):
            assert torch.equal(row, together[one]), (one, some, chunk)
