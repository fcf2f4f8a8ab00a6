"""Adapter memory on a CPU: adapters written in several pieces, with packed and plain weights."""

import os

import pytest
import torch
from torch import Tensor

from gpt.cpu import kernels
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import largest_rank_bytes, shard_adapter
from serving.messages import AdapterLinearsWrite
from serving.worker.adapter_memory import AdapterMemory
from tests.support.adapter_steps import linears_write
from tests.support.linear_adapters import random_linears
from tests.support.models import CONFIGS, build
from tests.support.packed_models import packed_model, run_step
from tests.support.process_memory import CAN_PREFAULT, resident_bytes
from tests.support.servers import eventually

LENGTHS, PAST = [1, 13, 1, 2], [9, 0, 30, 4]


def output(model: GPT, adapter: AdaptedRows) -> Tensor:
    is_fused = model.dtype == torch.bfloat16
    logits, _ = run_step(model, LENGTHS, PAST, fused=is_fused, adapted_rows=[adapter])
    return logits


def resident_adapter(memory: AdapterMemory, start: int) -> AdaptedRows:
    return AdaptedRows(memory._terms(start), None)


@pytest.mark.skipif(not CAN_PREFAULT, reason="this kernel cannot prefault memory")
def test_memory_may_be_prefaulted_before_the_first_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, a thread of the lowest priority would get almost no CPU time.
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    memory = AdapterMemory(build(CONFIGS["modern"]), size := 8 << 20, adapters_max=4)
    assert memory._host_memory is not None
    address = memory._host_memory.data_ptr()
    assert resident_bytes(address, size) == 0
    memory.prefault()
    eventually(lambda: resident_bytes(address, size) == size)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_may_be_written_in_pieces_of_any_size(method: str, packed: bool) -> None:
    """A piece may end between two parts of a fused linear."""
    if packed and kernels.isa_level() == "plain":
        pytest.skip("this CPU has no packed weights")
    model = packed_model(CONFIGS["modern"]) if packed else build(CONFIGS["modern"])
    memory = AdapterMemory(model, 1 << 20, adapters_max=4)
    linears = random_linears(model.config, method, rank=3, by_parts=True)
    linears_message = linears_write(0, linears)
    memory.write(linears_message)
    want = output(model, resident_adapter(memory, 0))
    terms = shard_adapter(linears, model.config, model.layers)
    adapter = AdaptedRows(model.prepare_adapter(terms), None)
    assert torch.equal(output(model, adapter), want)
    for size in (1, 3):
        for first in range(0, len(linears_message.linears), size):
            piece = linears_message.linears[first : first + size]
            start, nbytes = 1 << 19, linears_message.nbytes
            memory.write(AdapterLinearsWrite(start, nbytes, "digest", first, len(piece), piece))
        assert torch.equal(output(model, resident_adapter(memory, 1 << 19)), want)


@pytest.mark.skipif(kernels.isa_level() == "plain", reason="this CPU has no packed weights")
@pytest.mark.parametrize("rank", [3, 4])
def test_packed_adapters_are_in_their_ranges_if_they_fit(rank: int) -> None:
    """Padding makes an odd rank larger than its range."""
    config = CONFIGS["classic"].with_fields(hidden_size=64, num_attention_heads=4)
    model = packed_model(config)
    memory = AdapterMemory(model, 1 << 20, adapters_max=4)
    assert memory._host_memory is not None
    adapters = [random_linears(config, rank=rank, seed=seed) for seed in (1, 2)]
    nbytes = largest_rank_bytes(adapters[0], config, [model.layers], tp=1, itemsize=2)
    expected = []
    for index, linears in enumerate(adapters):
        terms = shard_adapter(linears, config, model.layers)
        expected.append(output(model, AdaptedRows(model.prepare_adapter(terms), None)))
        memory.write(linears_write(index * nbytes, linears, nbytes))
    got = [output(model, resident_adapter(memory, index * nbytes)) for index in range(2)]
    assert all(map(torch.equal, got, expected))
    assert bool(memory._host_memory[: 2 * nbytes].any()) == (rank % 2 == 0)
    assert not memory._host_memory[2 * nbytes :].any()
    # Another adapter replaces the first one.
    memory.write(linears_write(0, adapters[1], nbytes))
    assert torch.equal(output(model, resident_adapter(memory, 0)), expected[1])


def test_resident_adapters_do_not_share_memory_with_the_messages() -> None:
    model = build(CONFIGS["classic"], dtype=torch.float32)
    memory = AdapterMemory(model, 1 << 20, adapters_max=4)
    write = linears_write(0, random_linears(model.config))
    memory.write(write)
    want = output(model, resident_adapter(memory, 0))
    for linear_write in write.linears:
        for stored in linear_write.tensors.values():
            stored.data[:] = bytes(len(stored.data))
    assert torch.equal(output(model, resident_adapter(memory, 0)), want)
