"""Tensor parallelism: the collectives before and after tensor-parallel linears, with gradients.

`to_column_parallel` computes the input of a column-parallel linear:

- Forward: a copy; backward: an all-reduce.
- With sequence parallelism, forward: an all-gather of the rows; backward: a reduce-scatter.

`from_row_parallel` sums the outputs of a row-parallel linear:

- Forward: an all-reduce; backward: a copy.
- With sequence parallelism, forward: a reduce-scatter of the rows; backward: an all-gather.

On one tensor rank all operations of this module are no-ops.
"""

from typing import Any, cast

import torch
from torch import Tensor

from gpt.parallel.collectives import (
    all_gather_columns,
    all_reduce_and_overwrite,
    all_reduce_no_grad,
)
from gpt.parallel.mesh import Mesh
from gpt.parallel.sequence_parallel import (
    gather_from_sequence_parallel,
    reduce_scatter_to_sequence_parallel,
)


def to_column_parallel(x: Tensor, mesh: Mesh, tokens: int) -> Tensor:
    """Return all `tokens` rows of `x`, as the input of a column-parallel linear.

    The backward pass sums the gradients over the tensor ranks.
    """
    if mesh.tp == 1:
        return x
    if mesh.sequence_parallel:
        return gather_from_sequence_parallel(x, mesh, tokens)
    return cast(Tensor, _CopyToTensorParallel.apply(x, mesh))  # type: ignore[no-untyped-call]


def from_row_parallel(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over the tensor ranks of `x`, the output of a row-parallel linear.

    With sequence parallelism, return only this rank's rows of the sum. The caller must not use `x`
    afterwards: without gradients, the sum overwrites it.
    """
    if mesh.tp == 1:
        return x
    if mesh.sequence_parallel:
        return reduce_scatter_to_sequence_parallel(x, mesh)
    if not torch.is_grad_enabled():
        return all_reduce_and_overwrite(x, mesh)
    return cast(Tensor, _ReduceFromTensorParallel.apply(x, mesh))  # type: ignore[no-untyped-call]


def all_reduce(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of `x` over the tensor ranks: all rows, even with sequence parallelism.

    The backward pass is the identity. The caller must not use `x` afterwards: without gradients,
    the sum overwrites it.
    """
    if mesh.tp == 1:
        return x
    if not torch.is_grad_enabled():
        return all_reduce_and_overwrite(x, mesh)
    return cast(Tensor, _ReduceFromTensorParallel.apply(x, mesh))  # type: ignore[no-untyped-call]


def sum_over_tensor_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of `x` over the tensor ranks; the backward pass sums the gradients too.

    For a sum that every rank uses for its own part of the model, such as a mean over all heads.
    """
    if mesh.tp == 1:
        return x
    if not torch.is_grad_enabled():
        return all_reduce_no_grad(x, mesh)
    copied = _CopyToTensorParallel.apply(  # type: ignore[no-untyped-call]
        _ReduceFromTensorParallel.apply(x, mesh),  # type: ignore[no-untyped-call]
        mesh,
    )
    return cast(Tensor, copied)


def gather_columns(x: Tensor, mesh: Mesh) -> Tensor:
    """Concatenate the columns of all tensor ranks, such as the logits of a sharded vocabulary."""
    if mesh.tp == 1:
        return x
    return cast(Tensor, _GatherColumns.apply(x, mesh))  # type: ignore[no-untyped-call]


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_no_grad(grads[0], ctx.mesh), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        return all_reduce_no_grad(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        ctx.columns = x.shape[-1]
        return all_gather_columns(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        start = ctx.mesh.tp_rank * ctx.columns
        return grads[0][..., start : start + ctx.columns].contiguous(), None
