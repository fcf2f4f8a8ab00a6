"""The mesh of ranks, and the few collectives that a split model needs.

Tensor parallelism is two pairs of operations, each the other's gradient: `enter` a column-split
linear (copy, or gather the rows under sequence parallelism) and `leave` a row-split one (sum, or
sum and scatter the rows). On a mesh of one they are no-ops, so the model is written once. Hidden
states are flat: (tokens, hidden). Rows that do not divide are padded here, and nowhere else.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gpt.errors import ConfigError

Group = dist.ProcessGroup

# torch 2.13 renamed these two, and warns at the old names; 2.11 has only those.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands among tensor x data x pipeline ranks, tensor ranks being neighbours.

    The order of ranks is Megatron's: tensor fastest, then data, then pipeline.
    """

    device: torch.device
    tp: int = 1
    dp: int = 1
    pp: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    tp_group: Group | None = None
    dp_group: Group | None = None
    pp_group: Group | None = None
    # A quicker sum over tensor ranks, of what it serves; see gpt/parallel/symmetric_memory.py.
    sums: Callable[[Tensor], Tensor | None] | None = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Self:
        return cls(torch.device(device))

    @classmethod
    def create(
        cls,
        tp: int,
        pp: int,
        dp: int = 1,
        *,
        device: torch.device | str = "cpu",
        sequence_parallel: bool = False,
    ) -> Self:
        """Join the mesh; every rank of the initialised process group must call it together."""
        world = dist.get_world_size()
        if tp * pp * dp != world:
            raise ConfigError(
                f"tensor {tp} x pipeline {pp} x data {dp} parallel needs {tp * pp * dp} ranks; "
                f"{world} were started"
            )
        grid = torch.arange(world).view(pp, dp, tp)
        return cls(
            device=torch.device(device),
            tp=tp,
            dp=dp,
            pp=pp,
            rank=dist.get_rank(),
            sequence_parallel=sequence_parallel and tp > 1,
            tp_group=_join(grid.reshape(-1, tp)),
            dp_group=_join(grid.transpose(1, 2).reshape(-1, dp)),
            pp_group=_join(grid.permute(1, 2, 0).reshape(-1, pp)),
        )

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp * self.dp)

    @property
    def staged(self) -> bool:
        """Whether messages pass through host memory: gloo between ranks whose tensors are not."""
        group = self.tp_group or self.pp_group
        return self.device.type != "cpu" and group is not None and group.name() == "gloo"

    def stage_rank(self, stage: int) -> int:
        """The global rank that stands at `stage` of this rank's pipeline."""
        return self.rank + (stage - self.pp_rank) * self.tp * self.dp

    def rows(self, tokens: int) -> int:
        """Rows of hidden states that this rank keeps between the split linears."""
        return -(-tokens // self.tp) if self.sequence_parallel else tokens


def _join(rows: Tensor) -> Group | None:
    """The group among `rows` of ranks that this rank is in. All ranks make all groups."""
    if rows.shape[1] == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    return cast(Group, mine)


def enter(x: Tensor, mesh: Mesh, tokens: int) -> Tensor:
    """What a column-split linear reads: all rows, whose gradients are summed over tensor ranks."""
    if mesh.tp == 1:
        return x
    if mesh.sequence_parallel:
        return _apply(_Gather, x, mesh, tokens)
    return _apply(_Copy, x, mesh)


def leave(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum over tensor ranks of what a row-split linear made; this rank's rows of it."""
    if mesh.tp == 1:
        return x
    function = _SumScatter if mesh.sequence_parallel else _Sum
    return _apply(function, x, mesh)


def total(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum over tensor ranks, all rows on each; the gradient is every rank's own."""
    return x if mesh.tp == 1 else _apply(_Sum, x, mesh)


def scatter_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's rows of what all ranks hold; whole unless sequence parallel."""
    return _apply(_Scatter, x, mesh) if mesh.sequence_parallel else x


def gather_columns(x: Tensor, mesh: Mesh) -> Tensor:
    """All ranks' columns side by side, as the logits of a split vocabulary."""
    return x if mesh.tp == 1 else _apply(_Columns, x, mesh)


def reduced(x: Tensor, mesh: Mesh, by: dist.ReduceOp.RedOpType) -> Tensor:
    """The sum, the maximum or such over tensor ranks; nothing for a gradient to pass through."""
    return x if mesh.tp == 1 else _all_reduce(x, mesh, by)


def linear_of_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, mesh: Mesh, tokens: int
) -> Tensor:
    """A column-split linear of rows that are shared out, which keeps this rank's rows alone.

    Its own gradient needs all rows, so they are gathered once more. For weights that learn.
    """
    return _apply(_LinearOfGathered, x, weight, bias, mesh, tokens)


def _apply(function: Any, *arguments: object) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.mesh), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        return _all_reduce(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Rows gathered; the gradient, which differs by rank, is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, tokens: int) -> Tensor:
        ctx.mesh = mesh
        return _all_gather(x, mesh)[:tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], ctx.mesh), None, None


class _LinearOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: Mesh, tokens: int
    ) -> Tensor:
        ctx.mesh, ctx.tokens = mesh, tokens
        ctx.save_for_backward(x, weight)
        return F.linear(_all_gather(x, mesh)[:tokens], weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dx = _reduce_scatter(dy @ weight, ctx.mesh) if ctx.needs_input_grad[0] else None
        dweight = dy.T @ _all_gather(x, ctx.mesh)[: ctx.tokens]
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh, ctx.tokens = mesh, x.shape[0]
        return _reduce_scatter(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.mesh)[: ctx.tokens], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh, ctx.tokens = mesh, x.shape[0]
        return _own_rows(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.mesh)[: ctx.tokens], None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh, ctx.columns = mesh, x.shape[-1]
        sent = _wire(x, mesh)
        pieces = [torch.empty_like(sent) for _ in range(mesh.tp)]
        dist.all_gather(pieces, sent, group=mesh.tp_group)
        return torch.cat(pieces, dim=-1).to(x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        start = ctx.mesh.tp_rank * ctx.columns
        return grads[0][..., start : start + ctx.columns].contiguous(), None


def _wire(x: Tensor, mesh: Mesh) -> Tensor:
    """`x` where the group's backend can read it; gloo is handed host memory."""
    return (x.detach().cpu() if mesh.staged else x.detach()).contiguous()


def _all_reduce(x: Tensor, mesh: Mesh, by: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if mesh.sums is not None and by == dist.ReduceOp.SUM:
        quick = mesh.sums(x.detach())
        if quick is not None:
            return quick
    sent = _wire(x, mesh)
    y = sent if mesh.staged else sent.clone()
    dist.all_reduce(y, by, group=mesh.tp_group)
    return y.to(x.device)


def _all_gather(x: Tensor, mesh: Mesh) -> Tensor:
    """All ranks' rows, padding included."""
    sent = _wire(x, mesh)
    y = sent.new_empty(mesh.tp * x.shape[0], *x.shape[1:])
    _gather_into(y, sent, group=mesh.tp_group)
    return y.to(x.device)


def _reduce_scatter(x: Tensor, mesh: Mesh) -> Tensor:
    sent = _wire(_padded(x, mesh), mesh)
    y = sent.new_empty(sent.shape[0] // mesh.tp, *x.shape[1:])
    _reduce_scatter_into(y, sent, group=mesh.tp_group)
    return y.to(x.device)


def _padded(x: Tensor, mesh: Mesh) -> Tensor:
    """`x` with rows of zeros up to a multiple of the tensor ranks."""
    missing = -x.shape[0] % mesh.tp
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _own_rows(x: Tensor, mesh: Mesh) -> Tensor:
    # A copy, so that whoever keeps these rows does not keep the others too.
    return _padded(x, mesh).chunk(mesh.tp)[mesh.tp_rank].clone()


def send_to(x: Tensor, mesh: Mesh, stage: int) -> None:
    """Hand hidden states, or their gradient, to another stage of this pipeline."""
    dist.send(_wire(x, mesh), mesh.stage_rank(stage), group=mesh.pp_group)


class Sends:
    """Tensors on their way to another stage of this pipeline, which may be busy yet.

    Each is kept until it has arrived. With more than `kept_max` on their way, the sender waits.
    """

    def __init__(self, mesh: Mesh, stage: int, kept_max: int) -> None:
        self._mesh, self._to, self._kept_max = mesh, mesh.stage_rank(stage), kept_max
        self._kept: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        # The next step may use this memory again, so what is on its way has its own.
        sent = x.detach().cpu() if self._mesh.staged else x.detach().clone()
        work = dist.isend(sent, self._to, group=self._mesh.pp_group)
        assert work is not None, "this rank is not in its own pipeline"
        self._kept.append((work, sent))
        # The backend does not tell for free whether a send is done; an old one is, so ask that.
        while len(self._kept) > self._kept_max:
            self._kept.popleft()[0].wait()


def receive_from(like: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, stage: int) -> Tensor:
    """Take what that stage sends; both must know its shape."""
    x = torch.empty(like, dtype=dtype, device="cpu" if mesh.staged else mesh.device)
    dist.recv(x, mesh.stage_rank(stage), group=mesh.pp_group)
    return x.to(mesh.device)


def meet(mesh: Mesh) -> None:
    """Come back when every rank of the mesh has come here."""
    if mesh.tp * mesh.dp * mesh.pp > 1:
        dist.barrier()


def share_from_last(x: Tensor, mesh: Mesh) -> Tensor:
    """The last stage's tensor, on every stage of this pipeline; others give one of its shape."""
    return _share(x, mesh, mesh.pp - 1)


def share_from_first(x: Tensor, mesh: Mesh) -> Tensor:
    """The first stage's tensor, likewise."""
    return _share(x, mesh, 0)


def _share(x: Tensor, mesh: Mesh, stage: int) -> Tensor:
    if mesh.pp == 1:
        return x
    sent = _wire(x, mesh)
    dist.broadcast(sent, mesh.stage_rank(stage), group=mesh.pp_group)
    return sent.to(x.device)
