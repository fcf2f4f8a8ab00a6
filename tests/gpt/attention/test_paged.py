"""The fast attention says what the plain one says, for any ragged batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpt.attention.paged import ragged, reference, store
from gpt.attention.varlen import visible
from gpt.batch import Batch

BLOCK = 4
DIM = 6


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """New tokens and past tokens of a few sequences."""
    count = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    past = st.lists(st.integers(0, 11), min_size=count, max_size=count)
    return draw(sizes), draw(st.one_of(past, st.just([0] * count)))


def qkv(tokens: int, groups: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, groups * (queries + 2), DIM)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, k, v = x.split([groups * queries, groups, groups], dim=1)
    return q, k, v


@given(
    shapes(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 12)),
    st.data(),
)
def test_paged_attention_equals_the_plain_twin_and_whole_sequences(
    sizes: tuple[list[int], list[int]],
    groups: int,
    queries: int,
    window: int | None,
    data: st.DataObject,
) -> None:
    lengths, past = sizes
    contexts = [n + p for n, p in zip(lengths, past, strict=True)]
    q, k, v = qkv(sum(contexts), groups, queries)
    whole = Batch.plain(contexts)
    want = reference(q, k, v, whole, None, window)
    assert torch.allclose(ragged(q, k, v, whole, None, window), want, atol=1e-12)

    # The same sequences with their past in a pool, whose blocks are in any order.
    needs = [-(-context // BLOCK) for context in contexts]
    blocks = data.draw(st.permutations(range(sum(needs) + 1)))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    # What nobody wrote is finite and nothing else.
    kv = torch.full((sum(needs) + 1, 2, groups, BLOCK, DIM), 1e3, dtype=q.dtype)
    new = torch.cat(
        [
            torch.arange(sum(contexts[:row]) + p, sum(contexts[: row + 1]))
            for row, p in enumerate(past)
        ]
    )
    old = torch.ones(sum(contexts), dtype=torch.bool).index_fill(0, new, False)
    if old.any():
        lines = [row for row, p in enumerate(past) if p]
        before = Batch.paged([past[row] for row in lines], [0] * len(lines), tables[lines], BLOCK)
        store(k[old], v[old], before, kv)
    step = Batch.paged(lengths, past, tables, BLOCK)
    store(k[new], v[new], step, kv)
    for attend in (reference, ragged):
        got = attend(q[new], k[new], v[new], step, kv, window)
        assert torch.allclose(got, want[new], atol=1e-12)


def test_a_window_of_n_sees_n_tokens_with_itself() -> None:
    seen = visible(torch.arange(4), torch.arange(4), 2)
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("attend", [reference, ragged])
def test_gradients_flow_to_queries_keys_and_values(attend: object) -> None:
    assert callable(attend)
    q, k, v = (x.clone().requires_grad_() for x in qkv(7, 1, 2))
    batch = Batch.plain([3, 4])
    assert torch.autograd.gradcheck(lambda *x: attend(*x, batch, None, None), (q, k, v))
