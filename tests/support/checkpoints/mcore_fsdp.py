"""Checkpoints that the real Megatron-FSDP saves on CPU ranks: the oracle of `fsdp_dtensor`.

Every rank builds a model of Megatron-Core 0.19, saves it as an ordinary distributed checkpoint,
wraps it in FullyShardedDataParallel, and saves the wrapped model by the steps of Megatron's
`save_checkpoint`. Calls of CUDA that need only a device are stubbed. The ranks of a split that
remain are data parallel, so each has a share of the rows.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from tests.support.checkpoints import mcore_dist, mcore_hybrid, mcore_models
from tests.support.checkpoints.mcore_hybrid import SHARED, Hybrid, Run
from tests.support.checkpoints.mcore_models import MODERN, Case

EINOPS = mcore_hybrid.FOLDER / "einops"  # A library that Megatron-FSDP requires.
RANKS = 4
ITERATION = "iter_0000007"
# The pattern is that of a HybridModel, or empty for a GPTModel.
CASES: dict[str, tuple[Case, str]] = {
    "classic, tied, DP 4": (Case(), ""),
    "modern, TP 2 x DP 2": (Case(2, args=MODERN), ""),
    "experts, shared experts, EP 2": (Case(ep=2, args=SHARED), ""),
    "hybrid, TP 2 x DP 2": (Hybrid("*-*-", Case(2, args=MODERN)).case, "*-*-"),
    "hybrid, experts and dense, EP 2": (Hybrid("*-*E", Case(ep=2, args=SHARED)).case, "*-*E"),
}


def save_and_run(rank: int, root: Path) -> dict[str, Run]:
    """Save each case in the folders `ordinary` and `fsdp`; the last rank returns the logits."""
    mcore_hybrid.import_core()
    mcore_models._without_cuda()
    mcore_dist._write_in_threads()
    core = mcore_models._core
    runs = {}
    for name, (case, pattern) in CASES.items():
        core("parallel_state").initialize_model_parallel(
            case.tp, case.pp, expert_model_parallel_size=case.ep
        )
        build = mcore_hybrid._build if pattern else mcore_models._build
        model = build(case, 0, *([pattern] if pattern else []))
        mcore_models._randomize(model, case, 0)
        mcore_dist._save([model], case, root / name / "ordinary", {})
        ids_and_logits = mcore_models._run_forward(rank, [model], case)
        if ids_and_logits is not None:
            runs[name] = (ids_and_logits[0].numpy(), ids_and_logits[1].detach().numpy())
        with _stub_streams():
            _save(_wrap(model), case, root / name / "fsdp")
        core("parallel_state").destroy_model_parallel()
    return runs


class _Stream:
    """A CUDA stream without a device."""

    def wait_stream(self, stream: "_Stream") -> None:
        pass


@contextlib.contextmanager
def _stub_streams() -> Iterator[None]:
    stubs: dict[str, Any] = {
        "current_device": lambda: 0,
        "Stream": _Stream,
        "empty_cache": lambda: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda _state: None,
    }
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(patch.object(torch.cuda, name, stub))
        yield


class _CpuMesh:
    """A DeviceMesh of the CPU; Megatron-FSDP asks for one of CUDA devices."""

    @staticmethod
    def from_group(groups: Sequence[Any], device_type: str, **arguments: Any) -> DeviceMesh:
        return DeviceMesh.from_group(list(groups), "cpu", **arguments)


def _wrap(model: Any) -> Any:
    adapter = mcore_models._core("distributed.fsdp.mcore_fsdp_adapter")
    adapter.DeviceMesh = _CpuMesh
    settings = mcore_models._core("distributed").DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    return adapter.FullyShardedDataParallel(
        model.config, settings, model, device=torch.device("cpu")
    )


def _save(wrapped: Any, case: Case, root: Path) -> None:
    """As `preprocess_fsdp_dtensor_state_dict` and `save_checkpoint` of megatron.training."""
    args = Namespace(**mcore_models.arguments(case), ckpt_format="fsdp_dtensor")
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    state["model"] = wrapped.state_dict_for_save_checkpoint()
    saving = mcore_models._core("transformer.fsdp_dtensor_checkpoint")
    saving.handle_fp8_extra_state_case(state["model"])
    if args.swiglu:
        state["model"], _ = saving.handle_swiglu_in_state_dict(wrapped, state["model"], None)
    if args.num_experts:
        state["model"] = saving.handle_experts_in_state_dict(state["model"], args.num_experts)
    # An optimizer names its state by parameters, and shards it as them.
    moments = {name: {"exp_avg": value} for name, value in state["model"].items()}
    state["optimizer"] = {"state": moments, "param_groups": [{"lr": 1e-4}]}
    mcore_models._core(
        "distributed.fsdp.src.megatron_fsdp.uneven_dtensor"
    ).preprocess_state_dict_for_uneven_dtensor(state)
    save(state, storage_writer=FileSystemWriter(root / ITERATION))
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("7")
