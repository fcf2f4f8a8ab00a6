"""The pool's memory: there when it is written, or all of it ahead, and gone with the pool.

What is written into blocks is tested with those who write it.
"""

import gc
import platform
import threading

import pytest
import torch

from gpt.kv import KVPool
from tests.memory import anonymous_bytes
from tests.models import CLASSIC
from tests.servers import eventually

BLOCKS = 20_000
RELEASE = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdecimal())


def filling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pool"]


@pytest.mark.skipif(RELEASE < (5, 14), reason="this kernel gives memory only where it is written")
def test_all_memory_is_taken_ahead_and_what_was_written_stays() -> None:
    pool = KVPool(CLASSIC, range(CLASSIC.num_layers), BLOCKS)
    first, last = pool.layer(0), pool.layer(CLASSIC.num_layers - 1)
    size = first.nbytes * CLASSIC.num_layers
    assert size > 64 << 20
    first[0], last[-1] = 1.0, 2.0
    before = anonymous_bytes()
    pool.populate()
    eventually(lambda: not filling())
    assert anonymous_bytes() - before > 0.9 * size
    assert (first[0] == 1).all() and (last[-1] == 2).all()
    assert not first[1:].any() and not last[:-1].any()


def test_nobody_takes_memory_for_a_pool_that_is_gone() -> None:
    gc.collect()
    before = anonymous_bytes()
    KVPool(CLASSIC, range(CLASSIC.num_layers), 10 * BLOCKS).populate()
    gc.collect()
    eventually(lambda: not filling())
    assert anonymous_bytes() - before < 64 << 20


def test_other_devices_have_theirs_at_once() -> None:
    KVPool(CLASSIC, [0], 2, device="meta", dtype=torch.bfloat16).populate()
    assert not filling()
