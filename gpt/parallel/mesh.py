"""Mesh of tensor, sequence, expert, pipeline and data parallel ranks: coordinates, process groups.

Tensor, pipeline and data parallelism each have a process group; sequence parallelism uses the group
of the tensor ranks, and expert parallelism the group of `Mesh.expert_mesh`. The operations on a
mesh are in other modules:

- `tensor_parallel` and `sequence_parallel`: the operations of the layers, with gradients.
- `pipeline_communication`: the exchange of tensors between stages.
- `collectives`: the collectives that these modules use.

The model code is the same for all parallel sizes. On a mesh of one rank, these are no-ops: all
functions of `tensor_parallel`, and the functions `scatter_to_sequence_parallel`,
`all_reduce_no_grad`, `barrier`, `broadcast_from_first_stage` and `broadcast_from_last_stage`. All
other operations need a process group, and are called only if the mesh has several tensor ranks or
stages.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.errors import ConfigError
from gpt.parallel.weight_sharding import RankInStage

ProcessGroup = dist.ProcessGroup


def join_world(
    device: torch.device,
    *,
    timeout_s: float,
    stages: int,
    shares_device: bool = False,
    **options: Any,
) -> None:
    """Join the process group of all ranks, with NCCL on GPUs and gloo elsewhere.

    `shares_device`: whether any two ranks use the same GPU. NCCL does not support that, so all
    ranks then use gloo. `options`: more arguments of `init_process_group`.

    With `device_id`, NCCL creates one communicator per group, at once. The sends and receives of a
    group then run one after the other. A pipeline stage would wait to receive while its own send
    to another stage is not received yet, and training could deadlock. Therefore a mesh of several
    stages gets no `device_id`: NCCL then creates a communicator for each pair of stages.
    """
    uses_nccl = device.type == "cuda" and not shares_device
    if uses_nccl and stages == 1:
        options["device_id"] = device
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo", timeout=timedelta(seconds=timeout_s), **options
    )


class FastAllReduce(Protocol):
    """An all-reduce over the tensor ranks, without gradients, that is faster than the group's.

    All tensor ranks must call the same methods with tensors of the same shapes and dtypes.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the sum of `x`; None if the tensor is not supported."""

    @abstractmethod
    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory that the other ranks can read; None if such a tensor is not supported.

        Each call, and each sum, returns or overwrites the same memory.
        """

    @abstractmethod
    def sum_allocated(self, x: Tensor) -> Tensor:
        """Return the sum of `x`, which contains the first rows of the last `allocate`.

        The sum may be in the same memory: the next `allocate` or sum overwrites it.
        """


@dataclass(frozen=True)
class Mesh:
    """The position of this rank in the mesh of tensor x data x pipeline parallel ranks.

    The order of ranks is Megatron's: the tensor rank varies fastest, then data, then pipeline.

    The experts are divided over `ep` ranks (`RankInStage`). With `ep` > `tp`, `dp` is ep / tp, and
    the data parallel ranks compute the same batch: only the experts differ.
    """

    device: torch.device
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    tp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    stage_group: ProcessGroup | None = None  # All ranks of a stage; only with `ep` > `tp`.
    symmetric_all_reduce: FastAllReduce | None = None  # gpt/parallel/symmetric_memory.py

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
        ep: int = 1,
        device: torch.device | str = "cpu",
        sequence_parallel: bool = False,
    ) -> Self:
        """Create the process groups of the mesh; all ranks of the world must call this together.

        With `ep` > `tp`, `dp` is derived from them.
        """
        world_size = dist.get_world_size()
        if ep > tp:
            assert dp == 1, "with more expert than tensor parallel ranks, all compute one batch"
            dp = ep // tp
        if tp * pp * dp != world_size:
            sizes = f"tensor {tp} x pipeline {pp}" + (
                f" x data {dp} parallel" if ep == 1 else f" x expert {ep} parallel"
            )
            raise ConfigError(
                f"{sizes} needs {tp * pp * dp} ranks, but {world_size} were started; start "
                f"{tp * pp * dp}, or change the parallel sizes"
            )
        grid = torch.arange(world_size).view(pp, dp, tp)
        return cls(
            device=torch.device(device),
            tp=tp,
            dp=dp,
            pp=pp,
            ep=ep,
            rank=dist.get_rank(),
            sequence_parallel=sequence_parallel and tp > 1,
            tp_group=_new_group(grid.reshape(-1, tp)),
            dp_group=_new_group(grid.transpose(1, 2).reshape(-1, dp)),
            pp_group=_new_group(grid.permute(1, 2, 0).reshape(-1, pp)),
            stage_group=_new_group(grid.reshape(pp, -1)) if ep > tp else None,
        )

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

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
    def in_stage(self) -> RankInStage:
        """This rank's position in its stage, which says what part of the parameters it holds."""
        return RankInStage(self.rank % self.expert_mesh.tp, self.tp, self.ep)

    @property
    def is_first_in_stage(self) -> bool:
        return self.tp_rank == self.dp_rank == 0

    @cached_property
    def expert_mesh(self) -> "Mesh":
        """The mesh whose tensor ranks hold the experts: with `ep` > `tp`, all ranks of the stage.

        Otherwise it is this mesh.
        """
        if self.ep <= self.tp:
            return self
        return replace(
            self,
            tp=self.tp * self.dp,
            dp=1,
            tp_group=self.stage_group,
            dp_group=None,
            stage_group=None,
            symmetric_all_reduce=None,
        )

    @property
    def stages_through_host(self) -> bool:
        """Whether communication copies tensors through host memory: on a GPU with gloo."""
        group = self.tp_group or self.pp_group or self.stage_group
        return self.device.type != "cpu" and group is not None and group.name() == "gloo"

    def stage_rank(self, stage: int) -> int:
        """Return the global rank of stage `stage` in this rank's pipeline."""
        return self.rank + (stage - self.pp_rank) * self.tp * self.dp

    def local_rows(self, tokens: int) -> int:
        """Return the number of rows on this rank, for hidden states of `tokens` tokens.

        With sequence parallelism the rows are split over the tensor ranks, and the number includes
        padding rows.
        """
        return -(-tokens // self.tp) if self.sequence_parallel else tokens


def _new_group(rank_lists: Tensor) -> ProcessGroup | None:
    """Create a process group for each row of `rank_lists`, and return the group of this rank.

    torch requires that every rank creates all groups. Groups of one rank are not created; the
    result is then None.
    """
    if rank_lists.shape[1] == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(rank_lists.tolist())
    return cast(ProcessGroup, group)
