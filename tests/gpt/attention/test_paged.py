"""Paged attention equals its slow reference, for any ragged batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpt.attention.backend import TorchAttention
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import ragged_attention, reference_attention, store_kv
from gpt.attention.varlen import visible_mask
from gpt.batch import Batch
from gpt.cpu import kernels
from tests.support.attention_cases import check_layers_with_different_options
from tests.support.paged_steps import draw_options
from tests.support.plain_attention import plain_attention

BLOCK = 4
DIM = 6


@st.composite
def new_and_past_lengths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Numbers of new tokens and of past tokens of a few sequences."""
    count = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    past = st.lists(st.integers(0, 11), min_size=count, max_size=count)
    return draw(sizes), draw(st.one_of(past, st.just([0] * count)))


def qkv(tokens: int, groups: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, groups * (queries + 2), DIM)
    heads = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, k, v = heads.split([groups * queries, groups, groups], dim=1)
    return q, k, v


@given(
    new_and_past_lengths(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 12)),
    st.fixed_dictionaries({"sinks": st.booleans(), "alibi": st.booleans()}),
    st.data(),
)
def test_paged_and_unpaged_attention_equal_the_formula(
    new_and_past: tuple[list[int], list[int]],
    groups: int,
    queries: int,
    window: int | None,
    softmax_terms: dict[str, Any],
    data: st.DataObject,
) -> None:
    lengths, past = new_and_past
    contexts = [n + p for n, p in zip(lengths, past, strict=True)]
    q, k, v = qkv(sum(contexts), groups, queries)
    unpaged = Batch.unpaged(contexts)
    options = draw_options(window, q.shape[1], **softmax_terms)
    want = plain_attention(q, k, v, unpaged, None, options)
    for attend in (reference_attention, ragged_attention):
        assert torch.allclose(attend(q, k, v, unpaged, None, options), want, atol=1e-12)

    # The same sequences with their past in a pool, with the blocks in a random order.
    needs = [-(-context // BLOCK) for context in contexts]
    blocks = data.draw(st.permutations(range(sum(needs) + 1)))
    tables = torch.zeros(len(needs), max(needs), dtype=torch.long)
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([blocks.pop() for _ in range(need)])
    # Slots that are not written hold finite values.
    kv = torch.full((sum(needs) + 1, 2, groups, BLOCK, DIM), 1e3, dtype=q.dtype)
    new_rows = torch.cat(
        [
            torch.arange(sum(contexts[:row]) + p, sum(contexts[: row + 1]))
            for row, p in enumerate(past)
        ]
    )
    is_past = torch.ones(sum(contexts), dtype=torch.bool).index_fill(0, new_rows, False)
    if is_past.any():
        rows = [row for row, p in enumerate(past) if p]
        past_batch = Batch.paged(
            [past[row] for row in rows],
            [0] * len(rows),
            tables[rows],
            BLOCK,
        )
        store_kv(k[is_past], v[is_past], past_batch, kv)
    step = Batch.paged(lengths, past, tables, BLOCK)
    store_kv(k[new_rows], v[new_rows], step, kv)
    for attend in (reference_attention, ragged_attention):
        output = attend(q[new_rows], k[new_rows], v[new_rows], step, kv, options)
        assert torch.allclose(output, want[new_rows], atol=1e-12)


def test_a_window_of_n_includes_the_token_itself() -> None:
    visible = visible_mask(torch.arange(4), torch.arange(4), 2)
    assert visible.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("attend", [reference_attention, ragged_attention])
def test_gradients_flow_to_queries_keys_and_values(attend: object) -> None:
    assert callable(attend)
    q, k, v = (x.clone().requires_grad_() for x in qkv(7, 1, 2))
    batch = Batch.unpaged([3, 4])
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, batch, None, AttentionOptions()), (q, k, v)
    )


@pytest.mark.parametrize("is_native", [True, False])
def test_layers_of_a_step_attend_with_their_own_options(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(kernels, "supports_tensors", lambda *_: False)
    check_layers_with_different_options(lambda _: TorchAttention(), torch.device("cpu"))
