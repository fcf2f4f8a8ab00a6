"""Symmetric-memory all-reduce: selection of kernels, and the fallback to the process group."""

import inspect
import logging
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.linear.fused_linear import fuse_layers
from gpt.parallel import symmetric_memory
from gpt.parallel.collectives import all_reduce_no_grad
from gpt.parallel.mesh import Mesh
from gpt.parallel.symmetric_memory import (
    BUFFER_BYTES,
    KIB,
    SymmetricBuffer,
    SymmetricMemory,
    select_kernel,
    use_symmetric_memory,
)
from gpt.parallel.tensor_parallel import all_reduce, from_row_parallel
from tests.support.models import MODERN, build
from tests.support.ranks import ranks
from tests.support.symmetric_kernels import FakeMemory, Kernels
from tests.support.wheel_signatures import recorded_schemas


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("ranks_count", [2, 4, 8])
def test_small_sums_use_one_shot_and_larger_ones_two_shot(
    ranks_count: int, multicast: bool
) -> None:
    def kernel_for(tensor_bytes: int) -> str | None:
        return select_kernel(tensor_bytes, ranks_count, multicast=multicast)

    assert kernel_for(8 * KIB) == "one_shot"  # A token of hidden size 4096 in bf16.
    large_algorithm = "multimem" if multicast else "two_shot"
    assert kernel_for(BUFFER_BYTES) == ("one_shot" if ranks_count == 2 else large_algorithm)
    assert kernel_for(BUFFER_BYTES + 16) is None


@pytest.mark.parametrize("ranks_count", [1, 3, 5, 6, 7, 16])
def test_other_numbers_of_ranks_use_the_group(ranks_count: int) -> None:
    assert select_kernel(8 * KIB, ranks_count, multicast=True) is None


@pytest.mark.parametrize("tensor_bytes", [0, 8, 8 * KIB + 2])
def test_unaligned_sizes_use_the_group(tensor_bytes: int) -> None:
    assert select_kernel(tensor_bytes, 2, multicast=False) is None


def test_the_stub_has_the_parameters_of_torchs_operators() -> None:
    for name, schema in recorded_schemas().items():
        parameters = re.findall(r"(\w+)[,)]", schema.partition(" -> ")[0])
        assert list(inspect.signature(getattr(Kernels, name)).parameters)[1:] == parameters


def run_all_reduces(rank: int) -> list[str]:
    """All-reduces of some sizes and dtypes, and of a model; returns the called kernels."""
    plain = Mesh.create(2, 1)
    kernels = Kernels()
    mesh = use_symmetric_memory(plain, FakeMemory(kernels))
    assert (
        mesh.symmetric_all_reduce is not None
        and use_symmetric_memory(Mesh.single()).symmetric_all_reduce is None
    )
    called_first = list(kernels.called)
    kernels.called.clear()
    for function in (from_row_parallel, all_reduce):
        for dtype, shape in ((torch.bfloat16, (3, 8)), (torch.float32, (1, 4))):
            x = torch.randn(shape).to(dtype)
            assert torch.equal(function(x, mesh), function(x, plain))
        assert kernels.called == ["one_shot"] * 2
        kernels.called.clear()
        # Another dtype, an odd size, one beyond the buffer, and another reduction.
        for x in (torch.ones(4, 4).double(), torch.ones(3), torch.ones(BUFFER_BYTES // 4 + 4)):
            assert bool((function(x, mesh) == 2).all())
    assert (
        float(all_reduce_no_grad(torch.full((4,), rank + 1.0), mesh, dist.ReduceOp.MAX).max()) == 2
    )
    assert kernels.called == []
    ids = torch.arange(2, 26).view(2, 12)
    want = build(MODERN, plain, dtype=torch.float32).logits(ids)
    assert torch.equal(build(MODERN, mesh, dtype=torch.float32).logits(ids), want)
    # The embedding, and twice in each layer.
    assert kernels.called == ["one_shot"] * (1 + 2 * MODERN.num_layers)
    return called_first


def test_a_model_uses_symmetric_memory() -> None:
    for called in ranks(2, run_all_reduces):
        assert called == [
            *["one_shot", "one_shot in the buffer"] * 2,
            *["two_shot", "two_shot in the buffer"] * 2,
        ]


def run_large_all_reduces(rank: int) -> list[str]:
    """With the thresholds of four ranks, whose larger all-reduces use two-shot."""
    kernels = Kernels()
    symmetric_memory.ONE_SHOT_BYTES_MAX = {2: 64}
    called = []
    for multicast in (False, True):
        mesh = use_symmetric_memory(Mesh.create(2, 1), FakeMemory(kernels, multicast=multicast))
        kernels.called.clear()
        x = torch.randn(5, 64)
        assert torch.equal(all_reduce(x, mesh), all_reduce(x, Mesh.create(2, 1)))
        called += kernels.called
        # The result is not in shared memory.
        y = all_reduce(torch.ones(5, 64), mesh)
        all_reduce(torch.zeros(5, 64), mesh)
        assert bool((y == 2).all())
    return called


def test_larger_sums_use_two_shot_or_multimem() -> None:
    assert ranks(2, run_large_all_reduces) == [["two_shot", "multimem"]] * 2


def run_fused_model(rank: int, fp8: bool) -> list[list[str]]:
    """Logits of fused layers, whose matmuls write to the buffer; returns the called kernels."""
    config = MODERN.with_fields(ffn_hidden_size=64)
    layers = range(1, config.num_layers - 1) if fp8 else ()
    ids, called = torch.arange(2, 26).view(2, 12), []

    def logits_of(mesh: Mesh) -> Tensor:
        model = build(config, mesh, dtype=torch.bfloat16)
        fuse_layers(model, layers)
        return model.logits(ids)

    with torch.inference_mode():
        want = logits_of(Mesh.create(2, 1))
        for bytes_max, multicast in ((1 << 20, False), (0, False), (0, True)):
            symmetric_memory.ONE_SHOT_BYTES_MAX = {2: bytes_max}
            kernels = Kernels()
            memory = FakeMemory(kernels, multicast=multicast)
            mesh = use_symmetric_memory(Mesh.create(2, 1), memory)
            kernels.called.clear()
            assert torch.equal(logits_of(mesh), want)
            called.append(sorted(set(kernels.called)))
    return called


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_matmuls_write_to_the_buffer(fp8: bool) -> None:
    for called in ranks(2, run_fused_model, fp8):
        # The embedding is summed from other memory.
        assert called == [
            ["one_shot", "one_shot in the buffer"],
            ["two_shot", "two_shot in the buffer"],
            ["multimem"],
        ]


class MessageHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run_with_failures(rank: int) -> list[str]:
    """With a failure on one rank, both use the process group; returns the logged messages."""
    mesh = Mesh.create(2, 1)
    handler = MessageHandler()
    symmetric_memory.log.addHandler(handler)
    symmetric_memory.log.setLevel(logging.INFO)

    class FailingAllocation(FakeMemory):
        def allocate(self, mesh: Mesh) -> Tensor:
            if mesh.rank == 1:
                raise RuntimeError("no peer access\nand a stack")
            return super().allocate(mesh)

    class FailingRendezvous(FakeMemory):
        def rendezvous(self, buffer: Tensor, mesh: Mesh) -> SymmetricBuffer:
            if mesh.rank == 1:
                raise RuntimeError("no handle")
            dist.distributed_c10d._get_default_store().get("the address of rank 1")
            return super().rendezvous(buffer, mesh)

    symmetric_memory.RENDEZVOUS_S = 0.2
    failing_allocation = FailingAllocation(Kernels())
    for memory in (
        failing_allocation,
        FailingRendezvous(Kernels()),
        FakeMemory(Kernels(wrong=float(rank))),
        SymmetricMemory(),
    ):
        assert use_symmetric_memory(mesh, memory) is mesh
    assert not failing_allocation.has_met, "a rank waits in the rendezvous for one that has failed"
    store = dist.distributed_c10d._get_default_store()
    assert store.timeout > timedelta(seconds=1)  # type: ignore[attr-defined]
    assert bool((all_reduce(torch.ones(4), mesh) == 2).all())
    return handler.messages


def test_a_failure_on_one_rank_disables_it_on_all() -> None:
    reasons = [
        [line.partition(" reason=")[2] for line in messages]
        for messages in ranks(2, run_with_failures)
    ]
    other = "tensor rank 1 cannot use symmetric memory: "
    wrong = "'one_shot sums of bfloat16 are wrong'"
    on_cpu = "'the device is cpu'"
    assert reasons[0][0] == f"'{other}RuntimeError: no peer access'"
    assert reasons[0][2:] == [f"'{other}one_shot sums of bfloat16 are wrong'", on_cpu]
    # The rendezvous had a deadline. The type of the error depends on torch's version.
    assert re.search("Error: .*the address of rank 1 after 200 ?ms", reasons[0][1])
    allocation, rendezvous = "'RuntimeError: no peer access'", "'RuntimeError: no handle'"
    assert reasons[1] == [allocation, rendezvous, wrong, on_cpu]
