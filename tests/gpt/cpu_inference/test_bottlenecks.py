"""Bottleneck adapters on packed weights: exact, and bit-identical in any batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.cpu import kernels
from gpt.cpu_inference.batch_split import select_sequences, sequences_of_rows
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from tests.support.linear_adapters import BOTTLENECKS, random_linears
from tests.support.models import build
from tests.support.packed_models import (
    ADAPTERS,
    DECODER_CONFIGS,
    STEPS,
    mixed_adapters,
    packed_model,
    run_step,
)

pytestmark = pytest.mark.skipif(kernels.isa_level() == "plain", reason="no packed weights")

METHODS = (*ADAPTERS, *((method, False) for method in BOTTLENECKS))


@pytest.mark.parametrize("kind", ["several", "all kinds"])
@pytest.mark.parametrize("name", ["classic", "modern", "experts and dense"])
def test_packed_bottlenecks_are_as_exact_as_the_torch_layers(name: str, kind: str) -> None:
    config, (lengths, past) = DECODER_CONFIGS[name], STEPS[kind]
    model, reference = packed_model(config), build(config, dtype=torch.float64)

    def logits(model: GPT, *, fused: bool, prepared: bool = True) -> Tensor:
        adapters = mixed_adapters(model, sum(lengths), prepared=prepared, methods=METHODS)
        return run_step(model, lengths, past, fused=fused, adapted_rows=adapters)[0]

    got, exact = logits(model, fused=True), logits(reference, fused=False)
    share = 0.1 if config.num_experts else 0.03
    assert (got - exact).std() < share * exact.std()
    assert torch.equal(logits(model, fused=True, prepared=False), got)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "experts and dense"])
def test_sequences_are_bit_identical_in_any_batch(name: str, int8: bool) -> None:
    """Also those without a bottleneck, which the fused decoder computes in a step of their own."""
    model = packed_model(DECODER_CONFIGS[name], int8=int8)
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 6, 30, 2, 13, 5)
    prompts = [torch.randint(90, (length,), generator=generator) for length in lengths]
    methods = ("bottleneck", "bottleneck-post", "bottleneck-plain", "lora", "ia3")
    adapters = [
        model.prepare_adapter(
            shard_adapter(
                random_linears(model.config, method), model.config, model.layers, dtype=model.dtype
            )
        )
        for method in methods
    ]

    def logits(batched: list[int]) -> dict[int, Tensor]:
        pieces = [prompts[prompt] for prompt in batched]
        kv = KVPool(model.config, model.layers, 25, block_tokens=8, dtype=torch.bfloat16)
        tables = 1 + torch.arange(4 * len(batched)).view(-1, 4)
        batch = Batch.paged(list(map(len, pieces)), [0] * len(pieces), tables, 8)
        # Prompt i has adapter i; the last prompt has none. The bottleneck of the prompt 2 acts only
        # from its seventh token on.
        adapted_rows = tuple(
            AdaptedRows(
                adapters[prompt],
                start + torch.arange(6 if prompt == 2 else 0, len(prompts[prompt])),
            )
            for prompt, start in zip(batched, batch.query_starts, strict=True)
            if prompt < len(adapters)
        )
        outputs = model(torch.cat(pieces), replace(batch, adapted_rows=adapted_rows), kv)
        return dict(zip(batched, outputs.split(list(map(len, pieces))), strict=True))

    together = logits([4, 2, 5, 0, 3, 1])
    for batched in ([0], [1], [2], [3], [4], [5], [1, 2, 4], [2, 0], [5, 1]):
        assert all(torch.equal(x, together[prompt]) for prompt, x in logits(batched).items())


@pytest.mark.parametrize("fused", [True, False])
def test_skipping_unneeded_rows_keeps_the_bottlenecks_of_the_others(fused: bool) -> None:
    model, (lengths, past) = packed_model(DECODER_CONFIGS["modern"]), STEPS["all kinds"]
    adapters = mixed_adapters(model, sum(lengths), methods=METHODS)
    all_logits, _ = run_step(model, lengths, past, fused=fused, adapted_rows=adapters)
    for needed in ([0, 13, 14, 16, 41], [41], [30, 2]):
        rows = torch.tensor(needed)
        logits, _ = run_step(model, lengths, past, fused=fused, rows=rows, adapted_rows=adapters)
        assert torch.equal(logits, all_logits[rows])


def test_a_batch_is_divided_by_sequences() -> None:
    tables = torch.tensor([[1, 2], [3, 4], [5, 6]])
    batch = Batch.paged([2, 1, 3], [0, 5, 1], tables, 4, logit_rows=torch.tensor([1, 2, 5]))
    assert sequences_of_rows(batch, None) == [0, 1, 2]
    assert sequences_of_rows(batch, torch.tensor([0, 1, 5])) == [0, 2]
    selected, rows = select_sequences(batch, [0, 2])
    expected = Batch.paged([2, 3], [0, 1], tables[[0, 2]], 4)
    assert rows.tolist() == [0, 1, 3, 4, 5]
    assert selected.query_lengths == expected.query_lengths
    assert selected.past_lengths == expected.past_lengths
    assert torch.equal(selected.positions, expected.positions)
    assert selected.slot_mapping is not None and expected.slot_mapping is not None
    assert all(map(torch.equal, selected.slot_mapping, expected.slot_mapping))
    assert selected.block_tables is not None
    assert selected.block_tables.tolist() == [[1, 2], [5, 6]]
    assert selected.logit_rows is not None and selected.logit_rows.tolist() == [1, 4]
    assert select_sequences(batch, [1])[0].logit_rows is not None
    unread = replace(batch, logit_rows=torch.tensor([0]))
    assert select_sequences(unread, [1])[0].logit_rows is None
