"""A random attention step over a KV pool, and its exact result in fp64."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention.options import AttentionOptions, alibi_slopes
from gpt.attention.paged import ragged_attention, store_kv
from gpt.batch import Batch
from tests.support.plain_attention import plain_attention

FULL = AttentionOptions()


@dataclass
class Case:
    """A step, its queries, and a pool with random values in unused slots too."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor

    def attend(self, options: AttentionOptions = FULL) -> Tensor:
        store_kv(self.k, self.v, self.batch, self.kv)
        return ragged_attention(self.q, self.k, self.v, self.batch, self.kv, options)

    def exact(self, options: AttentionOptions = FULL) -> Tensor:
        return plain_attention(self.q, self.k, self.v, self.batch, self.kv, options)


def draw_options(
    window: int | None, heads: int, *, sinks: bool, alibi: bool, device: torch.device | str = "cpu"
) -> AttentionOptions:
    """Options with sinks and slopes that differ between heads, and that change the output."""
    return AttentionOptions(
        window,
        torch.linspace(-2.0, 3.0, heads, device=device).roll(1) if sinks else None,
        torch.tensor(alibi_slopes(heads), device=device) if alibi else None,
    )


def case(
    lengths: list[int],
    past: list[int],
    heads: tuple[int, int, int],
    size: int,
    dtype: torch.dtype,
    *,
    shared: list[tuple[int, int]] | None = None,
) -> Case:
    """Draw a step.

    `heads` is (groups, queries per group, channels), and `size` is the number of tokens per block.
    `shared` gives, for each sequence, an earlier sequence and the number of common first blocks.
    """
    groups, queries, width = heads
    draw = random.Random(size)
    generator = torch.Generator().manual_seed(width)
    needs = [-(-(n + p) // size) for n, p in zip(lengths, past, strict=True)]
    blocks = draw.sample(range(1, sum(needs) + 1), sum(needs))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    for row, (earlier, count) in enumerate(shared or ()):
        tables[row, :count] = tables[earlier, :count]
    kv = torch.randn(sum(needs) + 1, 2, groups, size, width, generator=generator).to(dtype)
    x = torch.randn(sum(lengths), groups, queries + 2, width, generator=generator).to(dtype)
    q = x[:, :, :-2].reshape(len(x), -1, width)
    batch = Batch.paged(lengths, past, tables, size)
    return Case(batch, q, x[:, :, -2], x[:, :, -1], kv)
