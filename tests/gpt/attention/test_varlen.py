"""Training's forms of the model say what the plain ones say: values, and every gradient."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.attention.paged import reference
from gpt.attention.varlen import TILE_QUERIES, Drop, Rectangle, lean, rectangle, unfused
from gpt.batch import Batch, Dropout
from gpt.config import GPTConfig
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.model.vocab_parallel_cross_entropy import token_losses
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, MODERN, ODD, lively
from tests.support.ranks import ranks

# fp64 sums in another order.
EXACT = 1e-12
HEADS, GROUPS, DIM = 4, 2, 6
KINDS = (Recompute("none"), Recompute("selective"), Recompute("block", 2), Recompute("full"))
# The first one is split too.
CASES = ((MODERN, 0.2), (CLASSIC, 0.2), (ODD, 0.0))

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def core_gradients(core: Core, tokens: int) -> list[Tensor]:
    """What a core makes of random queries, keys and values, and their gradients."""
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


def assert_alike(core: Core, twin: Core, tokens: int) -> None:
    found, wanted = core_gradients(core, tokens), core_gradients(twin, tokens)
    assert len(found) == len(wanted) == 4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@st.composite
def families(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    """Parents, their children, and sequences of nobody, in an order that mixes them."""
    lengths: list[int] = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    parents: list[int | None] = [None] * len(lengths)
    for _ in range(draw(st.integers(0, 5))):
        lengths.append(draw(st.integers(1, 40)))
        parents.append(draw(st.sampled_from([None, *range(lengths.index(lengths[0]), 1)])))
    return lengths, parents


@settings(max_examples=15, deadline=None, derandomize=True)
@given(families(), st.sampled_from([None, 1, 3, 30]))
def test_whole_sequences_attend_as_the_reference_does_parents_and_windows_included(
    family: tuple[list[int], list[int | None]], window: int | None
) -> None:
    lengths, parents = family
    batch = Batch.plain(lengths, parents=parents)
    twin = partial(reference, batch=batch, kv=None, window=window)
    for core in (
        partial(lean, batch=batch, window=window),
        partial(rectangle, batch=batch, window=window),
        partial(unfused, batch=batch, kv=None, window=window),
    ):
        assert_alike(core, twin, batch.tokens)


@pytest.mark.parametrize("window", [None, 50])
def test_tiles_of_a_long_sequence_see_its_parent_and_all_before_them(window: int | None) -> None:
    lengths = (20, 2 * TILE_QUERIES + 5, TILE_QUERIES)
    batch = Batch.plain(lengths, parents=(None, 0, 0))
    twin = partial(reference, batch=batch, kv=None, window=window)
    assert_alike(partial(lean, batch=batch, window=window), twin, batch.tokens)


def test_rectangles_of_mixed_lengths_hold_few_tokens_of_nobody() -> None:
    generator = torch.Generator().manual_seed(0)
    for parents in ((), (None, *[0] * 32)):
        lengths = [60, *torch.randint(16, 257, (32,), generator=generator).tolist()]
        batch = Batch.plain(lengths, parents=parents)
        x = torch.zeros(batch.tokens, 1, 2)
        rectangle(x, x, x, batch, None)
        made, order = cast(tuple[list[Rectangle], Tensor], batch.kept[rectangle, None])
        assert sorted(order.tolist()) != order.tolist()
        assert len(made) <= 8
        slots = sum(part.queries.numel() for part in made if part.queries is not None)
        assert batch.tokens <= slots <= 1.2 * batch.tokens


def test_dropped_probabilities_are_the_same_in_the_plain_form() -> None:
    batch = Batch.plain((5, 1, 9))

    def keep(sequence: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        return Dropout(3).keep((HEADS, *shape), 0.5, (sequence,), like)

    cores = [
        partial(core, batch=batch, kv=None, window=None, drop=Drop(0.5, keep))
        for core in (unfused, reference)
    ]
    assert_alike(cores[0], cores[1], batch.tokens)
    whole = core_gradients(partial(unfused, batch=batch, kv=None, window=None), batch.tokens)
    assert not torch.allclose(core_gradients(cores[0], batch.tokens)[0], whole[0])


def step(
    config: GPTConfig, mesh: Mesh, recompute: Recompute, *, dropout: float
) -> dict[str, Tensor]:
    """The loss of a batch, and the gradient of every parameter and of an adapter's table."""
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
        batch = Batch.plain(lengths, rows=rows, dropout=Dropout(4))
    else:
        batch = Batch.plain(lengths, rows=rows, parents=(None, 0, 0))
    logits = model.head_shard(model.hidden(ids, batch, None, table), batch)
    losses = token_losses(logits, torch.tensor([7, 96, 1, 55]), mesh, config.vocab_size)
    losses.sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters())) and table.grad is not None
    return {"losses": losses.detach(), "table": table.grad, **gradients}


def steps(mesh: Mesh, cases: Sequence[tuple[GPTConfig, float]]) -> list[dict[str, Tensor]]:
    """For each network and dropout, one after another, all kinds of recomputation."""
    return [
        step(config, mesh, recompute, dropout=dropout)
        for config, dropout in cases
        for recompute in KINDS
    ]


def steps_and_losses_of_rank(
    rank: int, logits: Tensor, answers: Tensor, vocab_size: int
) -> tuple[list[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    mesh = Mesh.create(2, 1, sequence_parallel=True)
    return steps(mesh, CASES[:1]), split_losses(mesh, logits, answers, vocab_size)


def split_losses(
    mesh: Mesh, logits: Tensor, answers: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of this rank's part of the logits."""
    mine = logits.chunk(mesh.tp, dim=1)[mesh.tp_rank].clone().requires_grad_()
    losses = token_losses(mine * 1.0, answers, mesh, vocab_size)
    (losses * torch.arange(1.0, len(answers) + 1)).sum().backward()
    assert mine.grad is not None
    return losses.detach(), mine.grad


@pytest.mark.slow
def test_recomputing_changes_no_gradient_and_a_split_loss_is_cross_entropy() -> None:
    # Four of 20 columns pad the vocabulary, and huge logits there say nothing.
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, 16:] = 1e6
    logits[0] += 1e4
    answers, vocab_size = torch.tensor([0, 9, 10, 15, 3, 12]), 16
    plain = logits.clone().requires_grad_()
    losses = F.cross_entropy(plain[:, :vocab_size], answers, reduction="none")
    (losses * torch.arange(1.0, 7)).sum().backward()
    assert plain.grad is not None

    both = ranks(2, steps_and_losses_of_rank, logits, answers, vocab_size)
    alone = split_losses(Mesh.single(), logits, answers, vocab_size)
    for found in (alone[0], *(rank[1][0] for rank in both)):
        torch.testing.assert_close(found, losses.detach(), rtol=EXACT, atol=EXACT)
    for gradient in (alone[1], torch.cat([rank[1][1] for rank in both], dim=1)):
        torch.testing.assert_close(gradient, plain.grad, rtol=EXACT, atol=EXACT)

    whole = steps(Mesh.single(), CASES)
    for results in (whole, *(rank[0] for rank in both)):
        for start in range(0, len(results), len(KINDS)):
            first, *others = results[start : start + len(KINDS)]
            assert first["table"].abs().max() > 1e-3
            for other in others:
                assert other.keys() == first.keys()
                for name, gradient in first.items():
                    torch.testing.assert_close(other[name], gradient, rtol=EXACT, atol=EXACT)
    for one, *split in zip(whole, *(rank[0] for rank in both), strict=False):
        for other in split:
            for name in ("losses", "table"):
                torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-10)
