"""Small sums go through shared memory where all ranks have it, large ones and others do not."""

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel import symmetric_memory
from gpt.parallel.mesh import Mesh, leave, reduced, total
from gpt.parallel.symmetric_memory import BUFFER_BYTES, KIB, Shared, quicken, way
from tests.support.models import MODERN, build
from tests.support.ranks import ranks


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("ranks_count", [2, 4, 8])
def test_small_sums_are_read_at_once_and_larger_ones_shared_out(
    ranks_count: int, multicast: bool
) -> None:
    def how(count_bytes: int) -> str | None:
        return way(count_bytes, ranks_count, multicast=multicast)

    assert how(8 * KIB) == "one_shot"  # A token of hidden size 4096 in bf16.
    shared = "multimem" if multicast else "two_shot"
    assert how(BUFFER_BYTES) == ("one_shot" if ranks_count == 2 else shared)
    assert how(BUFFER_BYTES + 16) is None


@pytest.mark.parametrize("ranks_count", [1, 3, 5, 6, 7, 16])
def test_other_numbers_of_ranks_are_left_to_the_group(ranks_count: int) -> None:
    assert way(8 * KIB, ranks_count, multicast=True) is None


@pytest.mark.parametrize("count_bytes", [0, 8, 8 * KIB + 2])
def test_what_kernels_cannot_move_in_one_piece_is_left_to_the_group(count_bytes: int) -> None:
    assert way(count_bytes, 2, multicast=False) is None


@dataclass
class Kernels:
    """As torch.ops.symm_mem has them, through the group; `wrong` is added to what they make."""

    wrong: float = 0.0
    asked: list[str] = field(default_factory=list)

    def one_shot_all_reduce_copy(self, held: Tensor, x: Tensor, op: str, group: str) -> Tensor:
        assert held.shape == x.shape and held.dtype == x.dtype and op == "sum" and group == "ours"
        return self._sum("one_shot", x)

    def two_shot_all_reduce_out(self, held: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        assert op == "sum" and group == "ours"
        return out.copy_(self._sum("two_shot", held))

    def multimem_all_reduce_(self, held: Tensor, op: str, group: str) -> Tensor:
        assert op == "sum" and group == "ours"
        return held.copy_(self._sum("multimem", held))

    def _sum(self, name: str, x: Tensor) -> Tensor:
        self.asked.append(name)
        y = x.clone()
        dist.all_reduce(y)
        return y + self.wrong


def opened(kernels: Kernels, *, multicast: bool = False) -> Any:
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    return lambda mesh: Shared(buffer, multicast, "ours", kernels)


def summing(rank: int) -> list[str]:
    """Sums of some sizes and dtypes, and a model's; what was asked of the kernels for them."""
    plain = Mesh.create(2, 1)
    kernels = Kernels()
    mesh = quicken(plain, opened(kernels))
    assert mesh.sums is not None and quicken(Mesh.single()).sums is None
    tried, kernels.asked[:] = list(kernels.asked), []
    for function in (leave, total):
        for dtype, shape in ((torch.bfloat16, (3, 8)), (torch.float32, (1, 4))):
            x = torch.randn(shape).to(dtype)
            assert torch.equal(function(x, mesh), function(x, plain))
        assert kernels.asked == ["one_shot"] * 2
        kernels.asked.clear()
        # Another dtype, an odd size, more than there is room for, and no sum.
        for x in (torch.ones(4, 4).double(), torch.ones(3), torch.ones(BUFFER_BYTES // 4 + 4)):
            assert bool((function(x, mesh) == 2).all())
    assert float(reduced(torch.full((4,), rank + 1.0), mesh, dist.ReduceOp.MAX).max()) == 2
    assert kernels.asked == []
    ids = torch.arange(2, 26).view(2, 12)
    want = build(MODERN, plain, dtype=torch.float32).logits(ids)
    assert torch.equal(build(MODERN, mesh, dtype=torch.float32).logits(ids), want)
    # The embedding, and twice in each layer.
    assert kernels.asked == ["one_shot"] * (1 + 2 * MODERN.num_layers)
    return tried


def test_a_models_sums_go_through_shared_memory() -> None:
    for tried in ranks(2, summing):
        assert tried == ["one_shot", "one_shot", "two_shot", "two_shot"]


def sharing_out(rank: int) -> list[str]:
    """With the table of four ranks, whose larger sums are shared out."""
    kernels = Kernels()
    symmetric_memory.ONE_SHOT_BYTES_MAX = {2: 64}
    asked = []
    for multicast in (False, True):
        mesh = quicken(Mesh.create(2, 1), opened(kernels, multicast=multicast))
        kernels.asked.clear()
        x = torch.randn(5, 64)
        assert torch.equal(total(x, mesh), total(x, Mesh.create(2, 1)))
        asked += kernels.asked
        # What came of it is nobody else's memory.
        y = total(torch.ones(5, 64), mesh)
        total(torch.zeros(5, 64), mesh)
        assert bool((y == 2).all())
    return asked


def test_larger_sums_are_added_by_shares_or_by_the_switch() -> None:
    assert ranks(2, sharing_out) == [["two_shot", "multimem"]] * 2


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def failing(rank: int) -> list[str]:
    """Whatever fails on one rank, both go on with the group's own sums; what each says of it."""
    mesh, heard = Mesh.create(2, 1), Heard()
    symmetric_memory.log.addHandler(heard)
    symmetric_memory.log.setLevel(logging.INFO)

    def one_cannot(mesh: Mesh) -> Shared:
        if mesh.rank == 1:
            raise RuntimeError("no peer access\nand a stack")
        shared: Shared = opened(Kernels())(mesh)
        return shared

    for open_shared in (one_cannot, opened(Kernels(wrong=float(rank))), Shared.open):
        assert quicken(mesh, open_shared) is mesh
    assert bool((total(torch.ones(4), mesh) == 2).all())
    return heard.messages


def test_what_fails_on_one_rank_is_left_to_the_group_on_all() -> None:
    reasons = [[line.partition(" reason=")[2] for line in said] for said in ranks(2, failing)]
    assert reasons == [
        ["'another rank cannot'", "'another rank cannot'", "'their device is cpu'"],
        [
            "'RuntimeError: no peer access'",
            "'one_shot sums of bfloat16 are wrong'",
            "'their device is cpu'",
        ],
    ]
