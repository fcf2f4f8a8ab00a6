"""Agreement of tensor ranks: all of them learn of a failure, and a missing rank is reported."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gpt.parallel.mesh import Mesh
from gpt.parallel.rank_agreement import AgreementTimeoutError, gather_failures
from tests.support.ranks import ranks


def run_agreements(rank: int) -> tuple[list[dict[int, str]], str]:
    """Four agreements of two ranks, and one that rank 1 reaches after the time limit of rank 0.

    The four are on success, on a failure of rank 1, on failures of both, and on success again.
    """
    mesh = Mesh.create(2, 1)
    failures = [None, "no memory" if rank == 1 else None, f"rank {rank}", None]
    agreed = [gather_failures(mesh, failure, 60.0) for failure in failures]
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=60))
    with pytest.raises(AgreementTimeoutError) as raised:
        gather_failures(mesh, None, 0.2 if rank == 0 else 60.0)
    store.set("rank 0 has given up", "yes")
    return agreed, str(raised.value)


def test_all_ranks_learn_of_each_failure_and_a_missing_rank_is_named() -> None:
    expected = [{}, {1: "no memory"}, {0: "rank 0", 1: "rank 1"}, {}]
    missing = "tensor ranks [1] did not reach an agreement within 0.2 s"
    late = "a tensor rank was late for an agreement within 60 s"
    assert ranks(2, run_agreements) == [(expected, missing), (expected, late)]


def run_groups(rank: int) -> dict[int, str]:
    """Two groups of two tensor ranks agree apart."""
    mesh = Mesh.create(2, 2)
    return gather_failures(mesh, f"stage {mesh.pp_rank}" if mesh.tp_rank == 0 else None, 60.0)


@pytest.mark.slow
def test_each_group_of_tensor_ranks_agrees_alone() -> None:
    assert ranks(4, run_groups) == [{0: "stage 0"}] * 2 + [{0: "stage 1"}] * 2


def test_a_single_rank_agrees_with_itself() -> None:
    assert gather_failures(Mesh.single(), None, 0.0) == {}
    assert gather_failures(Mesh.single(), "no memory", 0.0) == {0: "no memory"}
