"""A step of attention over a pool, drawn at random, and its plain twin in fp64."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention.paged import ragged, reference, store
from gpt.batch import Batch


@dataclass
class Case:
    """A step, its queries, and a pool with random numbers also where nobody wrote."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor

    def attend(self, window: int | None) -> Tensor:
        store(self.k, self.v, self.batch, self.kv)
        return ragged(self.q, self.k, self.v, self.batch, self.kv, window)

    def exact(self, window: int | None) -> Tensor:
        q, k, v, kv = (x.double() for x in (self.q, self.k, self.v, self.kv))
        return reference(q, k, v, self.batch, kv, window)


def case(
    lengths: list[int],
    past: list[int],
    heads: tuple[int, int, int],
    size: int,
    dtype: torch.dtype,
    *,
    shared: list[tuple[int, int]] | None = None,
) -> Case:
    """`heads`: groups, queries of each, channels. `size`: tokens of a block.

    `shared`: for each sequence an earlier one, and how many of its first blocks they both have.
    """
    groups, queries, width = heads
    draw, generator = random.Random(size), torch.Generator().manual_seed(width)
    needs = [-(-(n + p) // size) for n, p in zip(lengths, past, strict=True)]
    blocks = draw.sample(range(1, sum(needs) + 1), sum(needs))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    for row, (other, count) in enumerate(shared or ()):
        tables[row, :count] = tables[other, :count]
    kv = torch.randn(sum(needs) + 1, 2, groups, size, width, generator=generator).to(dtype)
    x = torch.randn(sum(lengths), groups, queries + 2, width, generator=generator).to(dtype)
    q = x[:, :, :-2].reshape(len(x), -1, width)
    batch = Batch.paged(lengths, past, tables, size)
    return Case(batch, q, x[:, :, -2], x[:, :, -1], kv)
