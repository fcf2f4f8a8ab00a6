"""Adapter memory on a CPU: adapters written in several pieces, with packed and plain weights."""

import pytest
import torch
from torch import Tensor

from gpt.cpu import kernels
from gpt.linear_adapter import AdaptedRows
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from serving.messages import AdapterLinearsWrite
from serving.worker.adapter_memory import AdapterMemory
from tests.support.adapter_steps import linears_write
from tests.support.linear_adapters import random_linears
from tests.support.models import CONFIGS, build
from tests.support.packed_models import packed_model, run_step

LENGTHS, PAST = [1, 13, 1, 2], [9, 0, 30, 4]


def output(model: GPT, adapter: AdaptedRows) -> Tensor:
    is_fused = model.dtype == torch.bfloat16
    logits, _ = run_step(model, LENGTHS, PAST, fused=is_fused, adapted_rows=[adapter])
    return logits


def resident_adapter(memory: AdapterMemory, start: int) -> AdaptedRows:
    return AdaptedRows(memory._terms(start), None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_may_be_written_in_pieces_of_any_size(method: str, packed: bool) -> None:
    """A piece may end between two parts of a fused linear."""
    if packed and kernels.isa_level() == "plain":
        pytest.skip("this CPU has no packed weights")
    model = packed_model(CONFIGS["modern"]) if packed else build(CONFIGS["modern"])
    memory = AdapterMemory(model, 1 << 20, adapters_max=4)
    linears = random_linears(model.config, method, rank=3, by_parts=True)
    whole = linears_write(0, linears)
    memory.write(whole)
    want = output(model, resident_adapter(memory, 0))
    terms = shard_adapter(linears, model.config, model.layers)
    adapter = AdaptedRows(model.prepare_adapter(terms), None)
    assert torch.equal(output(model, adapter), want)
    for size in (1, 3):
        for first in range(0, len(whole.linears), size):
            piece = whole.linears[first : first + size]
            memory.write(AdapterLinearsWrite(1 << 19, "digest", first, len(piece), piece))
        assert torch.equal(output(model, resident_adapter(memory, 1 << 19)), want)


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
