"""The pool's memory: there when it is written, or all of it ahead, and gone with the pool.

What is written into blocks is tested with those who write it.
"""

import ctypes
import gc
import mmap
import platform
import threading

import pytest
import torch

from gpt.attention.kv_cache import KVPool
from tests.support.models import CLASSIC
from tests.support.servers import eventually

BLOCKS = 4_000
RELEASE = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdecimal())


def made(blocks: int) -> KVPool:
    return KVPool(CLASSIC, range(CLASSIC.num_layers), blocks)


def bytes_of(pool: KVPool) -> int:
    return pool.layer(0).nbytes * CLASSIC.num_layers


def resident(address: int, size: int) -> int | None:
    """Bytes from there on that are there; None if not all of these addresses are in use."""
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        return None
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def filling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pool"]


@pytest.mark.skipif(RELEASE < (5, 14), reason="this kernel gives memory only where it is written")
def test_all_memory_is_taken_ahead_and_what_was_written_stays() -> None:
    pool = made(BLOCKS)
    address, size = pool.layer(0).data_ptr(), bytes_of(pool)
    assert size > 64 << 20 and resident(address, size) == 0
    first, last = pool.layer(0), pool.layer(CLASSIC.num_layers - 1)
    first[0], last[-1] = 1.0, 2.0
    few = resident(address, size)
    assert few is not None and few <= 8 << 20
    pool.populate(lambda: 1 << 50)
    eventually(lambda: not filling())
    assert resident(address, size) == size
    assert (first[0] == 1).all() and (last[-1] == 2).all()
    assert not first[1:].any() and not last[:-1].any()


def test_as_much_as_the_pool_has_is_left_to_others() -> None:
    pool = made(BLOCKS)
    address, size = pool.layer(0).data_ptr(), bytes_of(pool)

    def free_bytes() -> int:
        """Of a machine that has twice as much, of which another has taken a quarter."""
        held = resident(address, size)
        assert held is not None
        return 2 * size - held - size // 2

    pool.populate(free_bytes)
    eventually(lambda: not filling())
    held = resident(address, size)
    assert held is not None and 0.4 * size < held < 0.75 * size


def test_nobody_takes_memory_for_a_pool_that_is_gone() -> None:
    pool = made(10 * BLOCKS)
    address, size = pool.layer(0).data_ptr(), bytes_of(pool)
    assert resident(address, size) is not None
    pool.populate(lambda: 1 << 50)
    del pool
    gc.collect()
    eventually(lambda: not filling())
    assert resident(address, size) is None


def test_other_devices_have_theirs_at_once() -> None:
    KVPool(CLASSIC, [0], 2, device="meta", dtype=torch.bfloat16).populate(lambda: 1 << 50)
    eventually(lambda: not filling())
