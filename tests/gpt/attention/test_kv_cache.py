"""KV pool memory: allocated on the first write or prefaulted, and freed with the pool.

The contents of blocks are tested with the functions that write them.
"""

import gc
import os
import threading

import pytest
import torch

from gpt.attention.kv_cache import KVPool
from gpt.kv_groups import kv_groups
from tests.support.models import CLASSIC
from tests.support.process_memory import CAN_PREFAULT, resident_bytes
from tests.support.servers import eventually

BLOCKS = 4_000
# Threads of the pools of earlier tests. They may still run, because their priority is low.
EARLIER_THREADS: list[threading.Thread] = []


def build_pool(blocks: int) -> KVPool:
    return KVPool(CLASSIC, range(CLASSIC.num_layers), blocks)


def pool_bytes(pool: KVPool) -> int:
    return pool.layer(0).nbytes * CLASSIC.num_layers


@pytest.fixture(autouse=True)
def priority_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The arguments of each call of os.setpriority, which has no effect in these tests.

    On a busy machine a thread of the lowest priority gets almost no CPU time, so the time until
    it ends has no bound that a test could wait for.
    """
    EARLIER_THREADS[:] = prefault_threads()
    priority_calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: priority_calls.append(arguments))
    return priority_calls


def prefault_threads() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name == "pool"]
    return [thread for thread in threads if thread not in EARLIER_THREADS]


@pytest.mark.skipif(not CAN_PREFAULT, reason="this kernel cannot prefault memory")
def test_prefault_allocates_all_memory_and_keeps_written_values(
    priority_calls: list[tuple[int, int, int]],
) -> None:
    pool = build_pool(BLOCKS)
    address, size = pool.layer(0).data_ptr(), pool_bytes(pool)
    assert size > 64 << 20 and resident_bytes(address, size) == 0
    first, last = pool.layer(0), pool.layer(CLASSIC.num_layers - 1)
    first[0], last[-1] = 1.0, 2.0
    resident = resident_bytes(address, size)
    assert resident is not None and resident <= 8 << 20
    pool.prefault(lambda: 1 << 50)
    eventually(lambda: not prefault_threads())
    assert resident_bytes(address, size) == size
    assert (first[0] == 1).all() and (last[-1] == 2).all()
    assert not first[1:].any() and not last[:-1].any()
    ((which, _, priority),) = priority_calls
    assert (which, priority) == (os.PRIO_PROCESS, 19), "the thread must only use spare CPU time"


def test_prefault_stops_when_free_memory_is_below_the_pool_size() -> None:
    pool = build_pool(BLOCKS)
    address, size = pool.layer(0).data_ptr(), pool_bytes(pool)

    def free_bytes() -> int:
        """Free memory of a machine with twice the pool's size, a quarter of it used elsewhere."""
        resident = resident_bytes(address, size)
        assert resident is not None
        return 2 * size - resident - size // 2

    pool.prefault(free_bytes)
    eventually(lambda: not prefault_threads())
    resident = resident_bytes(address, size)
    assert resident is not None and 0.4 * size < resident < 0.75 * size


def test_prefault_stops_when_the_pool_is_freed() -> None:
    pool = build_pool(10 * BLOCKS)
    address, size = pool.layer(0).data_ptr(), pool_bytes(pool)
    assert resident_bytes(address, size) is not None
    pool.prefault(lambda: 1 << 50)
    del pool
    gc.collect()
    eventually(lambda: not prefault_threads())
    assert resident_bytes(address, size) is None


def test_pool_on_another_device_is_not_prefaulted() -> None:
    KVPool(CLASSIC, [0], 2, device="meta", dtype=torch.bfloat16).prefault(lambda: 1 << 50)
    eventually(lambda: not prefault_threads())


def test_layers_of_different_groups_share_memory_and_have_blocks_of_their_own() -> None:
    windows = (True, True, False, True)
    config = CLASSIC.with_fields(num_layers=4, moe_layers=(), window_size=8, window_layers=windows)
    layers = [1, 2, 3]  # The second of two stages that are unequal.
    pool = KVPool(config, layers, 4, block_tokens=2, groups=kv_groups(config))
    values = torch.rand(3, len(layers), 2, config.num_query_groups, config.kv_channels)
    for group, blocks in enumerate([[1, 2], [3, 1], [2, 3], [1, 2]]):
        if all(pool.group(layer) != group for layer in layers):
            continue
        pool.write_tokens(blocks, 0, values, group)
        for row, layer in enumerate(layers):
            if pool.group(layer) == group:
                stored = pool.layer(layer)[blocks].permute(0, 3, 1, 2, 4).flatten(0, 1)[:3]
                assert torch.equal(stored, values[:, row])
