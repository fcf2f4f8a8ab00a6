"""All layers in one call of the library do what the modules do, row for row."""

import pytest
import torch
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.cpu import kernels
from tests.support.cpu_decoder_steps import MORE, STEPS, packed, step
from tests.support.models import CONFIGS, build

pytestmark = pytest.mark.skipif(
    kernels.machine() != kernels.MACHINES[-1],
    reason="modules do this on a machine without AVX512-bf16",
)


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
