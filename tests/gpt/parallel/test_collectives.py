"""Process groups: how they are joined and used first, and sums that overwrite their input."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.collectives import (
    all_gather_columns,
    all_reduce_no_grad,
    barrier,
    broadcast_from_first_rank,
    gather_columns_on_first_rank,
    warm_up_groups,
)
from gpt.parallel.mesh import Mesh, join_world
from gpt.parallel.tensor_parallel import all_reduce, from_row_parallel
from tests.support.ranks import ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda:3")


@pytest.mark.parametrize(
    ("device", "stages", "shares_device", "backend", "device_id"),
    [
        (CPU, 1, False, "gloo", None),
        (GPU, 1, False, "nccl", GPU),
        (GPU, 1, True, "gloo", None),
        # With a device_id, the sends and receives between stages would wait for each other.
        (GPU, 2, False, "nccl", None),
    ],
)
def test_nccl_gets_its_gpu_unless_there_are_several_stages(
    device: torch.device,
    stages: int,
    shares_device: bool,
    backend: str,
    device_id: torch.device | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **options: calls.append((name, options))
    )
    join_world(device, timeout_s=9, stages=stages, shares_device=shares_device, rank=1)
    ((name, options),) = calls
    assert name == backend and options.get("device_id") == device_id
    assert options["timeout"].total_seconds() == 9 and options["rank"] == 1


@pytest.mark.parametrize(("backend", "device_ids"), [("nccl", [3]), ("gloo", None)])
def test_the_barrier_of_nccl_names_the_gpu_of_the_rank(
    backend: str, device_ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: calls.append(device_ids))
    barrier(Mesh(GPU, tp=2))
    assert calls == [device_ids]


def log_first_uses(rank: int) -> list[str]:
    """Return the names of the groups and operations that `warm_up_groups` uses, in order."""
    mesh, uses = Mesh.create(2, 3), []
    names = {mesh.tp_group: "tp", mesh.pp_group: "pp"}
    original_all_reduce, original_send, original_barrier = dist.all_reduce, dist.send, dist.barrier

    def all_reduce(x: Tensor, group: Any) -> None:
        uses.append(names[group])
        original_all_reduce(x, group=group)

    def send(x: Tensor, target: int, group: Any) -> None:
        uses.append(f"{names[group]} to {target}")
        original_send(x, target, group=group)

    def barrier(device_ids: Any) -> None:
        uses.append("all")
        original_barrier(device_ids=device_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "send", send)
        patch.setattr(dist, "barrier", barrier)
        warm_up_groups(mesh)
    return uses


def test_each_group_and_each_pair_of_stages_is_used_once() -> None:
    first_uses = ranks(6, log_first_uses)
    for rank, uses in enumerate(first_uses):
        next_stage = [f"pp to {rank + 2}"] if rank < 4 else []
        assert uses == ["all", "tp", "pp", *next_stage]


def check_overwritten_inputs(rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for function in (from_row_parallel, all_reduce):
        x = torch.full((2, 3), rank + 1.0)
        with torch.inference_mode():
            y = function(x, mesh)
        assert bool((y == 3).all()) and y.data_ptr() == x.data_ptr()
        x = torch.full((2, 3), rank + 1.0, requires_grad=True)
        y = function(x * 1, mesh)
        assert bool((y == 3).all())
        y.sum().backward()
        assert x.grad is not None and bool((x.grad == 1).all())
    x = torch.full((2, 3), rank + 1.0)
    y = all_reduce_no_grad(x, mesh)
    assert bool((y == 3).all()) and bool((x == rank + 1).all())


def test_sums_without_gradients_overwrite_their_input() -> None:
    ranks(2, check_overwritten_inputs)


def gather_and_broadcast(rank: int) -> None:
    mesh = Mesh.create(2, 2)
    shards = torch.arange(12.0).view(2, 3, 2) + 100 * mesh.pp_rank  # (ranks, rows, columns)
    local = shards[mesh.tp_rank].clone()
    columns = torch.cat(list(shards), dim=1)
    assert torch.equal(all_gather_columns(local, mesh), columns)
    gathered = gather_columns_on_first_rank(local, mesh)
    assert (gathered is None) == (mesh.tp_rank > 0)
    assert gathered is None or torch.equal(gathered, columns)
    # Also a tensor that is not contiguous.
    received = broadcast_from_first_rank(local.t(), mesh)
    assert torch.equal(received, shards[0].t())


def test_columns_are_gathered_and_tokens_broadcast_in_each_group() -> None:
    ranks(4, gather_and_broadcast)


def test_one_rank_gathers_and_broadcasts_nothing() -> None:
    x = torch.ones(2, 3)
    assert gather_columns_on_first_rank(x, Mesh.single()) is x
    assert broadcast_from_first_rank(x, Mesh.single()) is x
