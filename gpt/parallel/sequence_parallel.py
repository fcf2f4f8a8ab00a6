"""Sequence parallelism: scatter, all-gather and reduce-scatter of rows, with gradients.

With sequence parallelism, each tensor rank has only some of the rows (tokens) of the hidden states
between the tensor-parallel linears, and computes norms, dropout and residuals of these rows only.
`tensor_parallel` selects the operation before and after the linears:

- Before a column-parallel linear: an all-gather, or without sequence parallelism a copy.
- After a row-parallel linear: a reduce-scatter, or without sequence parallelism an all-reduce.

Hidden states have the shape (tokens, hidden). If the number of tokens is not a multiple of the
number of tensor ranks, the rows are padded with zeros.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.parallel.collectives import all_gather_rows, pad_rows, reduce_scatter_rows
from gpt.parallel.mesh import Mesh


def scatter_to_sequence_parallel(x: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's rows of a replicated tensor; without sequence parallelism, all rows."""
    if not mesh.sequence_parallel:
        return x
    return cast(Tensor, _ScatterToSequenceParallel.apply(x, mesh))  # type: ignore[no-untyped-call]


def local_rows(rows: Tensor, tokens: int, mesh: Mesh) -> Tensor:
    """Return where this rank has those of `rows` that it has, of a batch of `tokens` rows.

    `rows` are ascending flat indices. Without sequence parallelism, a rank has all rows.
    """
    if not mesh.sequence_parallel:
        return rows
    rank_tokens = -(-tokens // mesh.tp)
    positions = rows - mesh.tp_rank * rank_tokens
    return positions[(positions >= 0) & (positions < rank_tokens)]


def gather_from_sequence_parallel(x: Tensor, mesh: Mesh, tokens: int) -> Tensor:
    """Return the rows of all ranks by an all-gather; the backward is a reduce-scatter.

    The result has `tokens` rows, because the padding rows are removed.
    """
    rows = _GatherFromSequenceParallel.apply(x, mesh, tokens)  # type: ignore[no-untyped-call]
    return cast(Tensor, rows)


def reduce_scatter_to_sequence_parallel(x: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's rows of the sum over the tensor ranks; the backward is an all-gather."""
    rows = _ReduceScatterToSequenceParallel.apply(x, mesh)  # type: ignore[no-untyped-call]
    return cast(Tensor, rows)


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, mesh: Mesh, tokens: int
) -> Tensor:
    """Return the output of a column-parallel linear with a trainable weight, for `tokens` rows.

    Autograd saves only this rank's rows of the input `x`. The gradient of the weight needs all
    rows, so the backward pass gathers them again.
    """
    y = _AllGatherLinear.apply(x, weight, bias, mesh, tokens)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


class _ScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        ctx.tokens = x.shape[0]
        # A copy, because a view would keep the memory of all rows allocated.
        return pad_rows(x, mesh).chunk(mesh.tp)[mesh.tp_rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.mesh)[: ctx.tokens], None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, tokens: int) -> Tensor:
        ctx.mesh = mesh
        return all_gather_rows(x, mesh)[:tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_rows(grads[0], ctx.mesh), None, None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        ctx.tokens = x.shape[0]
        return reduce_scatter_rows(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grads[0], ctx.mesh)[: ctx.tokens], None


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: Mesh, tokens: int
    ) -> Tensor:
        ctx.mesh = mesh
        ctx.tokens = tokens
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather_rows(x, mesh)[:tokens], weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = reduce_scatter_rows(dy @ weight, ctx.mesh) if ctx.needs_input_grad[0] else None
        dweight = dy.T @ all_gather_rows(x, ctx.mesh)[: ctx.tokens]
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None
