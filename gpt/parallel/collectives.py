"""Collectives over the tensor parallel ranks, without gradients, and the barrier of all ranks.

The collectives are all-reduce, all-gather of rows or columns, gather of columns, broadcast, and
reduce-scatter of rows, for which `pad_rows` pads the rows. `warm_up_groups` uses each process group
once. The operations with a backward pass are in `tensor_parallel` and `sequence_parallel`. The gloo
backend reads only host memory, so for gloo `to_backend_memory` copies GPU tensors to the host.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import Mesh

# torch 2.13 renamed these functions and warns about the old names; torch 2.11 lacks the new names.
_all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_no_grad(
    x: Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Return the reduction of `x` over the tensor ranks by `op`, without a backward pass."""
    # A copy, because the reduction overwrites its input, which the backward pass may need.
    return x if mesh.tp == 1 else _all_reduce(x, mesh, op, copies=True)


def all_reduce_and_overwrite(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of `x` over the tensor ranks. The caller must not use `x` afterwards."""
    return x if mesh.tp == 1 else _all_reduce(x, mesh, dist.ReduceOp.SUM, copies=False)


def _all_reduce(x: Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType, *, copies: bool) -> Tensor:
    if mesh.symmetric_all_reduce is not None and op == dist.ReduceOp.SUM:
        fast_sum = mesh.symmetric_all_reduce(x.detach())
        if fast_sum is not None:
            return fast_sum
    local = to_backend_memory(x, mesh)
    # `to_backend_memory` has already copied a tensor that it moved to the host.
    y = local.clone() if copies and not mesh.stages_through_host else local
    dist.all_reduce(y, op, group=mesh.tp_group)
    return y.to(x.device)


def sum_over_expert_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of `x` over those tensor ranks that hold parts of the same experts.

    All tensor ranks must call this together, with tensors of the same shape.
    """
    gathered = all_gather_rows(x.unsqueeze(0), mesh)
    first = mesh.tp_rank - mesh.in_stage.expert_tp_rank
    return gathered[first : first + mesh.in_stage.expert_tp].sum(0)


def all_gather_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the rows of all tensor ranks, in the order of the ranks; padding rows are kept."""
    local = to_backend_memory(x, mesh)
    y = local.new_empty(mesh.tp * x.shape[0], *x.shape[1:])
    _all_gather_into_tensor(y, local, group=mesh.tp_group)
    return y.to(x.device)


def all_gather_columns(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the columns of all tensor ranks, in the order of the ranks."""
    return _concatenate_columns(all_gather_rows(x, mesh).view(mesh.tp, *x.shape))


def gather_columns_on_first_rank(x: Tensor, mesh: Mesh) -> Tensor | None:
    """Return the columns of all tensor ranks on the first of them, and None on the others.

    Unlike an all-gather, it sends nothing to the other ranks. It has no backward pass.
    """
    if mesh.tp == 1:
        return x
    local = to_backend_memory(x, mesh)
    if mesh.tp_rank > 0:
        dist.gather(local, None, group=mesh.tp_group, group_dst=0)
        return None
    shards = local.new_empty(mesh.tp, *x.shape)
    dist.gather(local, list(shards.unbind()), group=mesh.tp_group, group_dst=0)
    return _concatenate_columns(shards).to(x.device)


def broadcast_from_first_rank(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the `x` of the first tensor rank on all of them; `x` may be overwritten."""
    if mesh.tp == 1:
        return x
    buffer = to_backend_memory(x, mesh)
    dist.broadcast(buffer, group=mesh.tp_group, group_src=0)
    return buffer.to(x.device)


def _concatenate_columns(shards: Tensor) -> Tensor:
    """Return the shards (ranks, ..., columns) side by side: (..., ranks * columns)."""
    return shards.movedim(0, -2).flatten(-2)


def reduce_scatter_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """Sum `x` over the tensor ranks, and return this rank's rows; `pad_rows` pads `x` first."""
    padded = to_backend_memory(pad_rows(x, mesh), mesh)
    y = padded.new_empty(padded.shape[0] // mesh.tp, *x.shape[1:])
    _reduce_scatter_tensor(y, padded, group=mesh.tp_group)
    return y.to(x.device)


def pad_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """Pad `x` with zero rows to a multiple of the number of tensor ranks."""
    padding = -x.shape[0] % mesh.tp
    return torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) if padding else x


def to_backend_memory(x: Tensor, mesh: Mesh) -> Tensor:
    """Return `x`, detached and contiguous, in memory that the process group's backend can read."""
    return (x.detach().cpu() if mesh.stages_through_host else x.detach()).contiguous()


def barrier(mesh: Mesh) -> None:
    """Block until every rank of the mesh has called this function.

    NCCL's barrier is an all-reduce on a GPU. Without `device_ids`, torch guesses the GPU from the
    rank, and guesses wrong if the hosts have different numbers of ranks.
    """
    if mesh.ranks > 1:
        dist.barrier(device_ids=[mesh.device.index] if dist.get_backend() == "nccl" else None)


def warm_up_groups(mesh: Mesh) -> None:
    """Communicate once in each process group, and with each neighboring stage.

    NCCL allocates the memory of a communicator when it is first used. After this call the free
    memory of the device can be measured. All ranks of the mesh must call this together.
    """
    barrier(mesh)
    x = torch.zeros(1, device="cpu" if mesh.stages_through_host else mesh.device)
    for group in (mesh.tp_group, mesh.dp_group, mesh.pp_group, mesh.stage_group):
        if group is not None:
            dist.all_reduce(x, group=group)
    if mesh.pp_rank > 0:
        dist.recv(x, mesh.stage_rank(mesh.pp_rank - 1), group=mesh.pp_group)
    if mesh.pp_rank < mesh.pp - 1:
        dist.send(x, mesh.stage_rank(mesh.pp_rank + 1), group=mesh.pp_group)
