"""Distributed checkpoints that the real Megatron-Core saves, of the small GPTs of mcore_models.

Every rank gives its chunks' sharded state dict, and `dist_checkpointing.save` writes them as a
training run does: one save of all ranks, arguments in the common state, metadata.json last.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import mcore_models
from tests.mcore_models import EXPERTS, MODERN, Case


@dataclass(frozen=True)
class Sharded:
    """A model and its split, and how its layers are keyed on disk."""

    case: Case
    metadata: dict[str, Any] = field(default_factory=dict)


PER_LAYER = {"non_homogeneous_layers": True}
SINGLETON = {"singleton_local_shards": True}
SHARDED = {
    "classic, TP 2 x PP 2 x VPP 2": Sharded(Case(2, 2, 2)),
    "classic, per layer, TP 2 x PP 2": Sharded(Case(2, 2), PER_LAYER),
    "modern, TP 2 x PP 2": Sharded(Case(2, 2, args=MODERN)),
    "modern, fewer groups than ranks, TP 4": Sharded(Case(4, args=MODERN)),
    "modern, singletons, TP 2": Sharded(Case(2, args=MODERN), SINGLETON),
    "experts, TP 2 x EP 2": Sharded(Case(2, ep=2, args=EXPERTS)),
    "experts, singletons, EP 2": Sharded(Case(ep=2, args=EXPERTS), SINGLETON),
    "experts, PP 2 x EP 2, some layers dense": Sharded(
        Case(
            pp=2,
            ep=2,
            args={
                **EXPERTS,
                "moe_layer_freq": [0, 1, 1, 0],
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_shared_expert_intermediate_size": 20,
            },
        )
    ),
}


def save_and_run(rank: int, sharded: Sharded, root: Path) -> tuple[Tensor, Tensor] | None:
    """As that of mcore_models, but what the ranks save together is one distributed checkpoint."""
    _write_in_threads()

    def save(chunks: list[Any], case: Case, root: Path) -> None:
        _save(chunks, case, root, sharded.metadata)

    mcore_models._save = save
    return mcore_models.save_and_run(rank, sharded.case, root)


def _write_in_threads() -> None:
    """Its writers are processes, which a daemon may not start, and which wait for CUDA before."""
    cuda: Any = torch.cuda
    cuda.synchronize = lambda: None
    writer: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    context = SimpleNamespace(Queue=Queue, JoinableQueue=Queue, Process=Thread)
    writer.mp = SimpleNamespace(get_context=lambda _kind: context, Queue=Queue)
    writer._get_write_results_queue = Queue


def _save(chunks: list[Any], case: Case, root: Path, metadata: dict[str, Any]) -> None:
    path = root / "iter_0000007"
    rank = torch.distributed.get_rank()
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    record: dict[str, Any] = {
        "args": Namespace(**mcore_models.arguments(case)),
        "checkpoint_version": 3.0,
        "iteration": 7,
    }
    for number, chunk in enumerate(chunks):
        key = f"model{number}" if case.vpp else "model"
        record[key] = chunk.sharded_state_dict(metadata=metadata)
    saving: Any = import_module("megatron.core.dist_checkpointing")
    saving.save(record, path, content_metadata=metadata)
    if rank == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("7")
