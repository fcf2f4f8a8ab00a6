"""Rank runner: it returns results in rank order and reports every kind of failure of a rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ranks


class UnpicklableError(Exception):
    def __init__(self, actual: int, needed: int) -> None:
        super().__init__(f"found {actual}, need {needed}")


def square(rank: int, offset: int) -> int:
    time.sleep(0.05 * (2 - rank))  # The last rank finishes first.
    return rank * rank + offset


def all_reduce_sum(rank: int, row: torch.Tensor) -> torch.Tensor:
    total = row * (rank + 1)
    dist.all_reduce(total)
    return total


def fail_while_others_wait(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 rejects the split")
    dist.barrier()


def fail_with_unpicklable_error(rank: int) -> None:
    raise UnpicklableError(3, 4)


def wait_for_absent_rank(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def kill_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def process_id(rank: int) -> int:
    return os.getpid()


def thread_count(rank: int) -> int:
    return torch.get_num_threads()


def test_results_are_in_rank_order() -> None:
    assert ranks(3, square, 100) == [100, 101, 104]


def test_ranks_share_a_process_group() -> None:
    row = torch.tensor([1.0, 10.0])
    assert [total.tolist() for total in ranks(3, all_reduce_sum, row)] == [[6.0, 60.0]] * 3


def test_an_error_of_a_rank_is_raised_at_once_with_its_stack() -> None:
    # The other ranks wait in the barrier. Without the error of rank 1, `ranks` would raise
    # TimeoutError at its time limit.
    with pytest.raises(ValueError, match="rank 1 rejects the split") as raised:
        ranks(3, fail_while_others_wait)
    assert "rank 1:" in raised.value.__notes__[0]
    assert "in fail_while_others_wait" in raised.value.__notes__[0]


def test_the_text_of_an_unpicklable_error_is_reported() -> None:
    with pytest.raises(RuntimeError, match="UnpicklableError: found 3, need 4"):
        ranks(1, fail_with_unpicklable_error)


def test_a_hanging_rank_is_killed_at_the_time_limit_and_its_stack_is_shown() -> None:
    stacks = ""
    for timeout_s in (2, 10, 50):  # On a busy machine a rank reaches the barrier later.
        with pytest.raises(TimeoutError, match=f"after {timeout_s} s") as raised:
            ranks(2, wait_for_absent_rank, timeout_s=timeout_s)
        stacks = "".join(raised.value.__notes__)
        if "in wait_for_absent_rank" in stacks:
            break
    assert "in wait_for_absent_rank" in stacks


def test_the_exit_code_of_a_killed_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match="rank 1 died, exit code -9"):
        ranks(2, kill_rank_1)


def test_rank_processes_end_with_the_call() -> None:
    for pid in ranks(2, process_id):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_each_rank_uses_a_single_thread() -> None:
    assert ranks(2, thread_count) == [1, 1]
