"""Buffer pool: memory returns with the last view, and is limited."""

import gc
import os
import threading

import pytest
import torch
from torch import Tensor

from gpt.files.buffer_pool import POOLED_BYTES_MIN, PREFAULTED_MAX, BufferPool

SIZE = 3 * POOLED_BYTES_MIN


def allocate(pool: BufferPool, size: int) -> Tensor:
    return torch.frombuffer(pool.allocate(size), dtype=torch.uint8)


def test_memory_is_used_again_when_its_last_view_is_deleted() -> None:
    pool = BufferPool(free_bytes_max=4 * SIZE)
    memory = allocate(pool, SIZE)
    address = memory.data_ptr()
    view = memory[8:12].view(torch.float32)
    data = memory.numpy().data
    del memory
    assert pool.free_bytes == 0, "a view needs the memory"
    del view
    assert pool.free_bytes == 0, "a memoryview needs the memory"
    del data
    gc.collect()
    assert pool.free_bytes == SIZE
    again = allocate(pool, SIZE - 7)
    assert again.data_ptr() == address and len(again) == SIZE - 7
    assert allocate(pool, SIZE).data_ptr() != address


def test_a_buffer_is_not_used_for_much_less() -> None:
    pool = BufferPool(free_bytes_max=4 * SIZE)
    address = allocate(pool, SIZE).data_ptr()
    assert allocate(pool, SIZE // 2 - 1).data_ptr() != address
    assert pool.allocate(POOLED_BYTES_MIN - 1).nbytes == POOLED_BYTES_MIN - 1


def test_the_next_buffers_are_prefaulted_at_the_lowest_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: priorities.append(arguments[-1]))
    pool = BufferPool(free_bytes_max=4 * SIZE)
    assert pool.prefault_next() is None, "no buffer was allocated yet"
    memory = allocate(pool, SIZE)
    thread = pool.prefault_next()
    assert thread is not None
    thread.join()
    assert pool.free_bytes == PREFAULTED_MAX * SIZE
    assert priorities == [19]
    assert pool.prefault_next() is None, "enough free buffers fit"
    others = [allocate(pool, SIZE) for _ in range(PREFAULTED_MAX)]
    assert memory.data_ptr() not in [other.data_ptr() for other in others]
    assert pool.free_bytes == 0, "the other tensors have the buffers"


def test_no_buffer_beyond_the_limit_is_prefaulted() -> None:
    pool = BufferPool(free_bytes_max=SIZE - 1)
    memory = allocate(pool, SIZE)
    assert pool.prefault_next() is None
    pool = BufferPool(free_bytes_max=2 * SIZE - 1)
    memory = allocate(pool, SIZE)
    thread = pool.prefault_next()
    assert thread is not None
    thread.join()
    assert pool.free_bytes == memory.nbytes == SIZE


def test_a_buffer_is_lacking_only_if_the_pool_may_have_it() -> None:
    pool = BufferPool(free_bytes_max=SIZE)
    assert pool.lacks(SIZE) and pool.lacks(POOLED_BYTES_MIN)
    assert not pool.lacks(SIZE + 1), "the pool may not keep it"
    assert not pool.lacks(POOLED_BYTES_MIN - 1), "the C library allocates it"
    allocate(pool, SIZE)
    assert not pool.lacks(SIZE)


def test_the_free_bytes_are_limited() -> None:
    pool = BufferPool(free_bytes_max=2 * SIZE)
    tensors = [pool.allocate(SIZE) for _ in range(5)]
    del tensors
    gc.collect()
    assert pool.free_bytes == 2 * SIZE


def test_threads_never_share_memory_in_use() -> None:
    pool = BufferPool(free_bytes_max=8 * SIZE)
    errors = list[int]()

    def run(number: int) -> None:
        for _ in range(40):
            memory = allocate(pool, SIZE).fill_(number)
            if int(memory[::4096].min()) != number or int(memory[::4096].max()) != number:
                errors.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
