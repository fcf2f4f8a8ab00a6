"""The fused CPU decoder equals the layer modules, row for row."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.cpu import kernels
from gpt.kv_groups import kv_groups
from gpt.linear_adapter import AdaptedRows
from tests.support.models import EIGHT_EXPERTS
from tests.support.packed_models import (
    DECODER_CONFIGS,
    EXPERT_CONFIGS,
    STEPS,
    check_adapted_decoder,
    check_fused_decoder,
    mixed_adapters,
    packed_model,
    run_step,
)

pytestmark = pytest.mark.skipif(
    kernels.isa_level() != kernels.ISA_LEVELS[-1],
    reason="a machine without AVX512-bf16 uses the modules",
)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", DECODER_CONFIGS)
def test_skipping_unneeded_rows_does_not_change_other_rows(name: str, fused: bool) -> None:
    model, (lengths, past) = packed_model(DECODER_CONFIGS[name]), STEPS["all kinds"]
    all_logits, pool = run_step(model, lengths, past, fused=fused)
    for needed in ([0, 13, 14, 16, 41], [41], [30, 2]):
        rows = torch.tensor(needed)
        logits, other_pool = run_step(model, lengths, past, fused=fused, rows=rows)
        assert torch.equal(logits, all_logits[rows])
        assert all(torch.equal(a, b) for a, b in zip(pool, other_pool, strict=True))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", DECODER_CONFIGS)
def test_fused_decoder_equals_the_modules(name: str, kind: str) -> None:
    check_fused_decoder(name, kind)


@pytest.mark.parametrize("kind", STEPS)
def test_layers_use_the_blocks_of_their_kv_group(kind: str) -> None:
    config = DECODER_CONFIGS["windows in some layers"]
    model, groups = packed_model(config), kv_groups(config)
    assert [group.window for group in groups] == [None, 7, 7]
    got, pool = run_step(model, *STEPS[kind], fused=True, groups=groups)
    want, plain_pool = run_step(model, *STEPS[kind], fused=False, groups=groups)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
    # Also after a step with another pool.
    ungrouped_logits, _ = run_step(model, *STEPS[kind], fused=True)
    assert torch.equal(ungrouped_logits, run_step(model, *STEPS[kind], fused=False)[0])


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", ["classic", "modern", "ALiBi", "experts", "experts and dense"])
def test_fused_decoder_with_adapters_equals_the_modules(name: str, kind: str) -> None:
    check_adapted_decoder(name, kind)


@pytest.mark.parametrize("fused", [True, False])
def test_skipping_unneeded_rows_keeps_the_adapters_of_the_others(fused: bool) -> None:
    model, (lengths, past) = packed_model(DECODER_CONFIGS["modern"]), STEPS["all kinds"]
    adapters = mixed_adapters(model, sum(lengths))
    all_logits, _ = run_step(model, lengths, past, fused=fused, adapted_rows=adapters)
    for needed in ([0, 13, 14, 16, 41], [41], [30, 2]):
        rows = torch.tensor(needed)
        logits, _ = run_step(model, lengths, past, fused=fused, rows=rows, adapted_rows=adapters)
        assert torch.equal(logits, all_logits[rows])


@pytest.mark.parametrize("prepares_by_layer", [False, True])
def test_adapters_may_be_prepared_by_a_layerwise_decoder_or_not_at_all(
    prepares_by_layer: bool,
) -> None:
    model, (lengths, past) = packed_model(DECODER_CONFIGS["modern"]), STEPS["several"]
    want, _ = run_step(model, lengths, past, fused=True, adapted_rows=mixed_adapters(model, 9))
    adapters = mixed_adapters(model, 9, prepared=False)
    if prepares_by_layer:
        prepare = partial(model.layerwise_decoder().prepare_adapter, prepared={}, allocate=None)
        adapters = tuple(AdaptedRows(prepare(x.adapter), x.rows) for x in adapters)
    got, _ = run_step(model, lengths, past, fused=True, adapted_rows=adapters)
    assert torch.equal(got, want)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "experts and dense"])
def test_sequences_with_adapters_are_bit_identical_in_any_batch(name: str, int8: bool) -> None:
    model = packed_model(DECODER_CONFIGS[name], int8=int8)
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 6, 30, 2, 13)
    prompts = [torch.randint(90, (length,), generator=generator) for length in lengths]
    adapters = [adapted.adapter for adapted in mixed_adapters(model, 9)]

    def logits(batched: list[int]) -> dict[int, Tensor]:
        pieces = [prompts[prompt] for prompt in batched]
        kv = KVPool(model.config, model.layers, 25, block_tokens=8, dtype=torch.bfloat16)
        tables = 1 + torch.arange(4 * len(batched)).view(-1, 4)
        batch = Batch.paged(list(map(len, pieces)), [0] * len(pieces), tables, 8)
        # Prompt i has adapter i; the last prompt has none.
        adapted_rows = tuple(
            AdaptedRows(adapters[prompt], start + torch.arange(len(prompts[prompt])))
            for prompt, start in zip(batched, batch.query_starts, strict=True)
            if prompt < len(adapters)
        )
        outputs = model(torch.cat(pieces), replace(batch, adapted_rows=adapted_rows), kv)
        return dict(zip(batched, outputs.split(list(map(len, pieces))), strict=True))

    together = logits([4, 2, 0, 3, 1])
    for batched in ([0], [1], [2], [3], [4], [1, 2, 4]):
        assert all(torch.equal(x, together[prompt]) for prompt, x in logits(batched).items())


def test_equal_sequences_are_equal_beyond_the_pairs_that_are_computed_at_once() -> None:
    """The library computes 8,192 pairs of a token and an expert at once; the step has 9,600."""
    model = packed_model(EIGHT_EXPERTS.with_fields(moe_router_topk=8))
    sequences, length = 24, 50
    kv = KVPool(model.config, model.layers, 1 + 7 * sequences, block_tokens=8, dtype=torch.bfloat16)
    tables = 1 + torch.arange(7 * sequences).view(sequences, 7)
    prompt = torch.randint(100, (length,), generator=torch.Generator().manual_seed(0))
    batch = Batch.paged([length] * sequences, [0] * sequences, tables, 8)
    logits = model(prompt.repeat(sequences), batch, kv).view(sequences, length, -1)
    assert torch.equal(logits, logits[:1].expand_as(logits))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "odd", "turned in pairs", *EXPERT_CONFIGS])
def test_rows_are_bit_identical_in_any_batch(name: str, int8: bool) -> None:
    model = packed_model(DECODER_CONFIGS[name], int8=int8)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(model.config.vocab_size, (length,), generator=generator)
        for length in (1, 6, 30, 2, 13)
    ]

    def last_logits(batched: list[int], chunk: int) -> list[Tensor]:
        """Logits of the last token of each batched prompt, prefilled in chunks."""
        kv = KVPool(model.config, model.layers, 25, block_tokens=8, dtype=torch.bfloat16)
        tables = 1 + torch.arange(4 * len(batched)).view(-1, 4)
        last: dict[int, Tensor] = {}
        for start in range(0, 30, chunk):
            rows = [row for row, prompt in enumerate(batched) if len(prompts[prompt]) > start]
            pieces = [prompts[batched[row]][start : start + chunk] for row in rows]
            lengths = [len(piece) for piece in pieces]
            batch = Batch.paged(lengths, [start] * len(rows), tables[rows], 8)
            logits = model(torch.cat(pieces), batch, kv).split(lengths)
            last |= {row: piece_logits[-1] for row, piece_logits in zip(rows, logits, strict=True)}
        return [last[row] for row in range(len(batched))]

    for batched, chunk in (([2], 30), ([4, 2], 7), ([3, 1, 0, 4, 2], 1)):
        together = last_logits([0, 1, 2, 3, 4], chunk)
        for prompt, logits in zip(batched, last_logits(batched, chunk), strict=True):
            assert torch.equal(logits, together[prompt]), (prompt, batched, chunk)
