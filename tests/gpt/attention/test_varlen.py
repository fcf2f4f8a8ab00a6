"""Varlen attention and recomputation equal their references: values and every gradient."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.attention.paged import ragged_attention, reference_attention
from gpt.attention.varlen import (
    TILE_QUERIES,
    AttentionDropout,
    PaddedGroup,
    memory_efficient,
    padded_sdpa,
    unfused_attention,
)
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.dropout import Dropout
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.vocab_parallel_cross_entropy import token_losses
from tests.support.models import CLASSIC, MODERN, ODD, lively
from tests.support.paged_steps import FULL, draw_options
from tests.support.plain_attention import plain_attention
from tests.support.ranks import ranks

# The tolerance of fp64 sums in another order.
EXACT = 1e-12
HEADS, GROUPS, DIM = 4, 2, 6
POLICIES = (
    RecomputePolicy("none"),
    RecomputePolicy("selective"),
    RecomputePolicy("block", 2),
    RecomputePolicy("full"),
)
# Architectures and dropout rates. The first case is also run with tensor parallelism.
CASES = ((MODERN, 0.2), (CLASSIC, 0.2), (ODD, 0.0))

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def core_gradients(core: Core, tokens: int) -> list[Tensor]:
    """The output of a core for random queries, keys and values, and their gradients."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, dy = (
        torch.randn(tokens, heads, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    for x in (q, k, v):
        x.requires_grad_()
    y = core(q, k, v)
    y.backward(dy)
    return [y.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def assert_equal_cores(core: Core, reference: Core, tokens: int) -> None:
    gradients = core_gradients(core, tokens)
    reference_gradients = core_gradients(reference, tokens)
    assert len(gradients) == len(reference_gradients) == 4
    for gradient, reference_gradient in zip(gradients, reference_gradients, strict=True):
        torch.testing.assert_close(gradient, reference_gradient, rtol=EXACT, atol=EXACT)


@st.composite
def lengths_and_parents(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    """Parents, their children, and sequences without a parent, in a mixed order."""
    lengths: list[int] = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    parents: list[int | None] = [None] * len(lengths)
    for _ in range(draw(st.integers(0, 5))):
        lengths.append(draw(st.integers(1, 40)))
        parents.append(draw(st.sampled_from([None, *range(lengths.index(lengths[0]), 1)])))
    return lengths, parents


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths_and_parents(), st.sampled_from([None, 1, 3, 30]), st.booleans(), st.booleans())
def test_varlen_attention_equals_the_formula_with_parents_and_options(
    family: tuple[list[int], list[int | None]], window: int | None, sinks: bool, alibi: bool
) -> None:
    lengths, parents = family
    batch = Batch.unpaged(lengths, parents=parents)
    options = draw_options(window, HEADS, sinks=sinks, alibi=alibi)
    reference = partial(plain_attention, batch=batch, kv=None, options=options)
    for core in (
        partial(memory_efficient, batch=batch, options=options),
        partial(padded_sdpa, batch=batch, options=options),
        partial(unfused_attention, batch=batch, kv=None, options=options),
        partial(ragged_attention, batch=batch, kv=None, options=options),
    ):
        assert_equal_cores(core, reference, batch.tokens)


def test_layers_of_a_batch_attend_with_their_own_options() -> None:
    batch = Batch.unpaged((5, 30, 2), parents=(None, 0, None))
    terms = (False, True)
    for window, sinks, alibi in product((None, 9), terms, terms):
        options = draw_options(window, HEADS, sinks=sinks, alibi=alibi)
        reference = partial(plain_attention, batch=batch, kv=None, options=options)
        for core in (memory_efficient, padded_sdpa):
            assert_equal_cores(partial(core, batch=batch, options=options), reference, batch.tokens)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softmax_terms", [False, True])
def test_tiles_of_a_long_sequence_read_the_parent_and_all_earlier_keys(
    window: int | None, softmax_terms: bool
) -> None:
    lengths = (20, 2 * TILE_QUERIES + 5, TILE_QUERIES)
    batch = Batch.unpaged(lengths, parents=(None, 0, 0))
    options = draw_options(window, HEADS, sinks=softmax_terms, alibi=softmax_terms)
    reference = partial(reference_attention, batch=batch, kv=None, options=options)
    assert_equal_cores(
        partial(memory_efficient, batch=batch, options=options), reference, batch.tokens
    )


def test_padded_groups_of_mixed_lengths_have_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    for parents in ((), (None, *[0] * 32)):
        lengths = [60, *torch.randint(16, 257, (32,), generator=generator).tolist()]
        batch = Batch.unpaged(lengths, parents=parents)
        x = torch.zeros(batch.tokens, 1, 2)
        padded_sdpa(x, x, x, batch, FULL)
        groups, order = cast(
            tuple[list[PaddedGroup], Tensor], batch.attention_metadata[padded_sdpa, None, False]
        )
        assert sorted(order.tolist()) != order.tolist()
        assert len(groups) <= 8
        slots = sum(group.queries.numel() for group in groups if group.queries is not None)
        assert batch.tokens <= slots <= 1.2 * batch.tokens


def test_attention_dropout_equals_the_reference() -> None:
    batch = Batch.unpaged((5, 1, 9))

    def keep_mask(sequence: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        return Dropout(3).keep_mask((HEADS, *shape), 0.5, (sequence,), like)

    cores = [
        partial(core, batch=batch, kv=None, options=FULL, dropout=AttentionDropout(0.5, keep_mask))
        for core in (unfused_attention, reference_attention)
    ]
    assert_equal_cores(cores[0], cores[1], batch.tokens)
    without_dropout = core_gradients(
        partial(unfused_attention, batch=batch, kv=None, options=FULL), batch.tokens
    )
    assert not torch.allclose(core_gradients(cores[0], batch.tokens)[0], without_dropout[0])


def losses_and_gradients(
    config: GPTConfig, mesh: Mesh, recompute: RecomputePolicy, *, dropout: float
) -> dict[str, Tensor]:
    """The losses of a batch, and the gradients of all parameters and of an adapter's table."""
    config = config.with_fields(hidden_dropout=dropout, attention_dropout=dropout)
    checkpoint = lively(config.with_fields(dtype="float64"))
    model: GPT = load_model(checkpoint, mesh, recompute=recompute).requires_grad_()
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(3, config.hidden_size, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    lengths = (3, 8, 5)
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator)
    ids[[0, 1, 2, 5, 12]] = config.vocab_size + torch.tensor([0, 1, 2, 0, 1])
    rows = torch.tensor([9, 10, 14, 15])
    if dropout:
        batch = Batch.unpaged(lengths, logit_rows=rows, dropout=Dropout(4))
    else:
        batch = Batch.unpaged(lengths, logit_rows=rows, parents=(None, 0, 0))
    logits = model.compute_logits_shard(model.forward_hidden(ids, batch, None, table), batch)
    losses = token_losses(logits, torch.tensor([7, 96, 1, 55]), mesh, config.vocab_size)
    losses.sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters())) and table.grad is not None
    return {"losses": losses.detach(), "table": table.grad, **gradients}


def losses_and_gradients_of_cases(
    mesh: Mesh, cases: Sequence[tuple[GPTConfig, float]]
) -> list[dict[str, Tensor]]:
    """The losses and gradients of each case with each recomputation policy, case by case."""
    return [
        losses_and_gradients(config, mesh, recompute, dropout=dropout)
        for config, dropout in cases
        for recompute in POLICIES
    ]


def gradients_and_losses_of_rank(
    rank: int, logits: Tensor, targets: Tensor, vocab_size: int
) -> tuple[list[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    mesh = Mesh.create(2, 1, sequence_parallel=True)
    gradients = losses_and_gradients_of_cases(mesh, CASES[:1])
    return gradients, split_losses(mesh, logits, targets, vocab_size)


def split_losses(
    mesh: Mesh, logits: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of this rank's shard of the logits."""
    shard = logits.chunk(mesh.tp, dim=1)[mesh.tp_rank].clone().requires_grad_()
    losses = token_losses(shard * 1.0, targets, mesh, vocab_size)
    (losses * torch.arange(1.0, len(targets) + 1)).sum().backward()
    assert shard.grad is not None
    return losses.detach(), shard.grad


@pytest.mark.slow
def test_recomputation_does_not_change_gradients_and_split_loss_is_cross_entropy() -> None:
    # The last 4 of the 20 columns pad the vocabulary; their huge logits must have no effect.
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, 16:] = 1e6
    logits[0] += 1e4
    targets = torch.tensor([0, 9, 10, 15, 3, 12])
    vocab_size = 16
    plain = logits.clone().requires_grad_()
    losses = F.cross_entropy(plain[:, :vocab_size], targets, reduction="none")
    (losses * torch.arange(1.0, 7)).sum().backward()
    assert plain.grad is not None

    split = ranks(2, gradients_and_losses_of_rank, logits, targets, vocab_size)
    alone = split_losses(Mesh.single(), logits, targets, vocab_size)
    for rank_losses in (alone[0], *(rank[1][0] for rank in split)):
        torch.testing.assert_close(rank_losses, losses.detach(), rtol=EXACT, atol=EXACT)
    for gradient in (alone[1], torch.cat([rank[1][1] for rank in split], dim=1)):
        torch.testing.assert_close(gradient, plain.grad, rtol=EXACT, atol=EXACT)

    single = losses_and_gradients_of_cases(Mesh.single(), CASES)
    for gradients in (single, *(rank[0] for rank in split)):
        for start in range(0, len(gradients), len(POLICIES)):
            first, *others = gradients[start : start + len(POLICIES)]
            assert first["table"].abs().max() > 1e-3
            for other in others:
                assert other.keys() == first.keys()
                for name, gradient in first.items():
                    torch.testing.assert_close(other[name], gradient, rtol=EXACT, atol=EXACT)
    for single_step, *rank_steps in zip(single, *(rank[0] for rank in split), strict=False):
        for rank_step in rank_steps:
            for name in ("losses", "table"):
                torch.testing.assert_close(
                    rank_step[name], single_step[name], rtol=1e-9, atol=1e-10
                )
