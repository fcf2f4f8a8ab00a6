"""Linear adapters on a GPU: packed rows, slots of the table, and the kernels without a GPU."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from gpt.linear import low_rank
from gpt.linear.low_rank import (
    FEW_ROWS_MAX,
    GROUP_FIELDS,
    GROUP_HEADER,
    GROUP_ROWS,
    MANY_GROUP_ROWS,
    PackedRows,
    TermTable,
    pack_rows,
)
from gpt.linear_adapter import LinearTerm
from tests.support.interpreted_cases import check_interpreted_cases
from tests.support.low_rank_batches import KINDS, LINEAR, LinearBatch, LowRankCase
from tests.support.triton_compiled import SHARED_BYTES, recorded_launches

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: make tools"
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 7, GROUP_ROWS + 1, 100, FEW_ROWS_MAX + 50])
def test_groups_contain_each_adapted_row_once(rows: int) -> None:
    slots = np.random.default_rng(rows).integers(-1, 5, rows)
    packed = pack_rows(slots)
    view = PackedRows.view(torch.from_numpy(packed), rows, int(packed[0]))
    assert view.slots.tolist() == slots.tolist()
    assert view.group_rows == (GROUP_ROWS if rows <= FEW_ROWS_MAX else MANY_GROUP_ROWS)
    order, grouped = view.order.tolist(), list[int]()
    for slot, start, count, _ in view.groups[GROUP_HEADER:].view(-1, GROUP_FIELDS).tolist():
        group = order[start : start + count]
        assert 0 < count <= view.group_rows and all(slots[row] == slot for row in group)
        grouped += group
    assert sorted(grouped) == np.flatnonzero(slots >= 0).tolist()


def test_the_inputs_of_a_graph_have_a_fixed_layout() -> None:
    slots = np.array([2, -1, 2])
    packed = pack_rows(slots, rows=6, group_count_max=6)
    assert len(packed) == len(pack_rows(np.zeros(0, np.int64), rows=6, group_count_max=6))
    view = PackedRows.view(torch.from_numpy(packed), 6, 6)
    assert view.groups[0] == 1 and view.slots.tolist() == [2, -1, 2, -1, -1, -1]
    # Kernels load 16 aligned bytes, so that their code is the same in every step.
    offsets = [tensor.storage_offset() for tensor in (view.groups, view.order, view.slots)]
    assert all(offset % 4 == 0 for offset in offsets)


def test_the_slots_of_a_batch_are_kept_and_others_are_reused() -> None:
    table = TermTable(torch.zeros(64), [LINEAR], slots=2)
    adapters = {
        key: table.encode({LINEAR: [LinearTerm(output_scale=table.memory[4 * key : 4 * key + 4])]})
        for key in range(4)
    }

    def slots_of(*keys: int) -> list[int]:
        slots = table.assign_slots({key: adapters[key] for key in keys})
        for key, slot in zip(keys, slots, strict=True):
            stored = table.descriptors[slot].numpy()
            assert np.array_equal(stored, adapters[key].descriptors)
        return slots

    first = slots_of(0, 1)
    assert sorted(first) == [0, 1] and slots_of(1, 0) == first[::-1]
    assert slots_of(0) == first[:1]
    assert slots_of(2) == first[1:], "the least recently used slot"
    assert slots_of(0, 2) == first
    table.forget(0)
    adapters[0] = adapters[3]
    assert slots_of(2, 0) == first[::-1]


def launch_all(dtype: torch.dtype) -> None:
    """Launch the kernels for few and many rows, with and without a bias."""
    for rows in (8, FEW_ROWS_MAX + 1):
        for has_bias in (False, True):
            case = LowRankCase("qkv", KINDS, rows, bias=has_bias)
            batch = LinearBatch(case, CPU, dtype)
            batch.output(batch.kernels())


@needs_triton
def test_the_kernels_are_compiled_before_the_first_step_with_an_adapter() -> None:
    with recorded_launches() as launches:
        batch = LinearBatch(LowRankCase("qkv", KINDS, 1), CPU, torch.bfloat16)
        for has_bias in (False, True):
            low_rank.compile_kernels(batch.table, 96, 48, has_bias=has_bias)
        compiled = set(launches)
        names = [launch.name for launch in launches.values()]
        assert sorted(names) == [
            *["expand_rows"] * 4,
            "scale_input_rows",
            *["shrink_rows"] * 2,
        ]
        launch_all(torch.bfloat16)
        assert set(launches) == compiled


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_with_few_spills(capability: int, dtype: torch.dtype) -> None:
    with recorded_launches(capability) as launches:
        launch_all(dtype)
    for launch in launches.values():
        resources = launch.compile()
        # The compiler may spill a few registers so that more thread blocks run at the same time.
        assert resources.spilled_bytes <= 32
        # Several thread blocks fit on a multiprocessor.
        assert 2 * resources.shared_bytes <= SHARED_BYTES[capability]


@pytest.mark.slow
@needs_triton
def test_interpreted_kernels_equal_the_torch_reference() -> None:
    check_interpreted_cases("tests/support/low_rank_cases.py")


@pytest.mark.slow
@needs_triton
def test_interpreted_steps_equal_those_of_the_torch_reference() -> None:
    check_interpreted_cases("tests/support/adapter_graph_cases.py")
