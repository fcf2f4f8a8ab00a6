"""Distributed checkpoints saved by the real Megatron-Core, and ours loaded by it.

Every rank gives its chunks' sharded state dict, and `dist_checkpointing.save` writes them as a
training run does: one save of all ranks, arguments in the common state, metadata.json last. For
loading, a model is built from the checkpoint's arguments alone, at any split.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints import mcore_models
from tests.support.checkpoints.mcore_models import EXPERTS, LENGTH, MODERN, Case


@dataclass(frozen=True)
class Sharded:
    """A model and its split, and the metadata that decides its keys on disk."""

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
    """As mcore_models.save_and_run, but the ranks save one distributed checkpoint."""
    _write_in_threads()

    def save(chunks: list[Any], case: Case, root: Path) -> None:
        _save(chunks, case, root, sharded.metadata)

    mcore_models._save = save
    return mcore_models.save_and_run(rank, sharded.case, root)


def _write_in_threads() -> None:
    """Its writers are processes, which a daemon may not start, and which wait for CUDA."""
    cuda: Any = torch.cuda
    cuda.synchronize = lambda: None
    writer: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    manager = SimpleNamespace(Queue=Queue)  # Of Megatron-Core 0.19.
    context = SimpleNamespace(
        Queue=Queue, JoinableQueue=Queue, Process=Thread, Manager=lambda: manager
    )
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


@dataclass(frozen=True)
class Loaded:
    """The logits of a model loaded from a checkpoint, and the keys without a counterpart."""

    ids: Tensor
    logits: Tensor  # Of the last stage.
    missing: set[str]  # Only in the checkpoint.
    unexpected: set[str]  # Only in the model.


# A split by its parallel sizes; the other ranks are data-parallel replicas.
Split = tuple[int, int, int]  # Tensor, pipeline, expert.
PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)


def load_and_run(
    rank: int, folders: Sequence[Path], splits: Sequence[Sequence[Split]]
) -> list[list[Loaded]]:
    """On every rank, for each folder and split: build the model, load it, run a forward pass."""
    mcore_models._without_cuda()
    return [
        [_load(folder, split) for split in folder_splits]
        for folder, folder_splits in zip(folders, splits, strict=True)
    ]


def _load(folder: Path, split: Split) -> Loaded:
    parallel = mcore_models._core("parallel_state")
    tp, pp, ep = split
    parallel.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    loading: Any = import_module("megatron.core.dist_checkpointing")
    common = loading.load_common_state_dict(str(folder))
    assert common["checkpoint_version"] == 3.0
    arguments = {
        name: value for name, value in vars(common["args"]).items() if name not in PARALLEL
    }
    # Megatron-LM pads the vocabulary for its own number of ranks, not the saver's.
    step = arguments["make_vocab_size_divisible_by"] * tp
    arguments["padded_vocab_size"] = -(-arguments["vocab_size"] // step) * step
    case = Case(tp, pp, ep=ep, layers=arguments["num_layers"], args=arguments)
    chunk = mcore_models._build(case, 0)
    metadata = loading.load_content_metadata(preloaded_state_dict=common)

    def sharded_state_dict() -> dict[str, Any]:
        return {"model": chunk.sharded_state_dict(metadata=dict(metadata))}

    _, missing, unexpected = loading.load(sharded_state_dict(), str(folder), strict="return_all")
    record = loading.load(sharded_state_dict(), str(folder))  # Its default, and Megatron-LM's.
    chunk.load_state_dict(record["model"], strict=True)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, arguments["vocab_size"], (2, LENGTH), generator=generator)
    logits = mcore_models._forward([chunk], case, ids)
    parallel.destroy_model_parallel()
    return Loaded(ids, logits, missing, unexpected)
