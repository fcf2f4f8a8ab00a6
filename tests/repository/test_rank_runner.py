"""The rank runner: results in rank order, and every way a rank can fail is seen in the test."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ranks


class Unpicklable(Exception):
    def __init__(self, found: int, needed: int) -> None:
        super().__init__(f"found {found}, need {needed}")


def squared(rank: int, offset: int) -> int:
    time.sleep(0.05 * (2 - rank))  # The last rank finishes first.
    return rank * rank + offset


def summed(rank: int, row: torch.Tensor) -> torch.Tensor:
    total = row * (rank + 1)
    dist.all_reduce(total)
    return total


def fails_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one found a split that cannot be")
    dist.barrier()


def fails_with_an_error_that_cannot_travel(rank: int) -> None:
    raise Unpicklable(3, 4)


def waits_for_a_rank_that_never_comes(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def own_pid(rank: int) -> int:
    return os.getpid()


def threads(rank: int) -> int:
    return torch.get_num_threads()


def test_results_come_in_rank_order_whoever_finishes_first() -> None:
    assert ranks(3, squared, 100) == [100, 101, 104]


def test_ranks_share_a_process_group() -> None:
    row = torch.tensor([1.0, 10.0])
    assert [total.tolist() for total in ranks(3, summed, row)] == [[6.0, 60.0]] * 3


def test_an_error_in_one_rank_is_raised_with_its_stack_and_does_not_hang() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="a split that cannot be") as caught:
        ranks(3, fails_while_others_wait)
    assert time.monotonic() - start < 20
    assert "rank 1:" in caught.value.__notes__[0]
    assert "in fails_while_others_wait" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_pickled_still_shows_its_text() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: found 3, need 4"):
        ranks(1, fails_with_an_error_that_cannot_travel)


def test_a_hang_ends_at_the_limit_and_shows_where_the_rank_stood() -> None:
    with pytest.raises(TimeoutError, match="after 5 s") as caught:
        ranks(2, waits_for_a_rank_that_never_comes, timeout_s=5)
    assert "in waits_for_a_rank_that_never_comes" in "".join(caught.value.__notes__)


def test_a_rank_that_dies_is_reported_by_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match="rank 1 died, exit code -9"):
        ranks(2, dies)


def test_no_process_is_left_behind() -> None:
    for pid in ranks(2, own_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_each_rank_computes_on_one_thread() -> None:
    assert ranks(2, threads) == [1, 1]
