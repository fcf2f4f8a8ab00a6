"""Linear adapters on a GPU: the terms and rows of all adapters of a batch, in device memory.

A `TermTable` has a slot for each adapter of a batch, with a descriptor of every term: where its
tensors are, its rank, its scale, and its columns. `pack_rows` sorts the rows of a batch into groups
with the same adapter. Kernels (gpt/linear/triton_low_rank.py) read both, so a linear needs the same
launches for any adapters. A slot keeps its content over the steps, so most steps copy only the
packed rows to the device. The reference of the kernels is gpt/model/adapted_linear.py.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.device_transfers import to_device
from gpt.linear.norm_activation import KERNEL_DTYPES
from gpt.linear_adapter import (
    AdaptedRows,
    AdapterKernels,
    LinearTerm,
    ModelAdapter,
    TermKernels,
)
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.model.adapted_linear import select_adapted_rows
from gpt.triton_runtime.availability import triton_unavailable_reason

# A descriptor has one entry for each of these fields, in the order of the constants in
# gpt/linear/triton_low_rank_kernels.py. `columns` is 0 in the descriptor of a missing term,
# `first_rank` is the sum of the ranks of the parts before, `scale` has the bits of an fp32 number,
# and the columns of a whole linear are one run. The last five fields are the first elements of
# tensors in the adapter memory, or -1.
DESCRIPTOR_FIELDS = (
    "columns",
    "rank",
    "first_rank",
    "scale",
    "offset",
    "width",
    "stride",
    "lora_a",
    "lora_b",
    "output_factor",
    "output_scale",
    "input_scale",
)
TENSOR_FIELDS = DESCRIPTOR_FIELDS[-5:]
PARTS_MAX = 3  # A fused QKV linear has three parts.
# The packed rows begin with the number of groups. Then come the groups, each with a slot, the
# position of its first row in the sorted order, and its number of rows. A group has at most
# `GROUP_ROWS` rows; in batches of many rows, `MANY_GROUP_ROWS`.
GROUP_HEADER = 4
GROUP_FIELDS = 4
GROUP_ROWS = 16
MANY_GROUP_ROWS = 32
FEW_ROWS_MAX = 256


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels cannot apply adapters to linears in this dtype; None if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in KERNEL_DTYPES:
        return f"the model's dtype is {dtype}"
    return triton_unavailable_reason(device)


@dataclass(frozen=True, eq=False)
class EncodedAdapter:
    """The descriptors of an adapter's terms, and what launches depend on."""

    descriptors: NDArray[np.int64]  # (linears, PARTS_MAX, fields)
    linears: frozenset[str]  # The linears that the adapter changes.
    input_scaled: frozenset[str]  # Of these, the linears with an input scale.
    ranks: int  # The largest sum of the ranks of a linear's parts.
    # The terms of the linears with bottlenecks, which have no descriptors.
    bottlenecks: ModelAdapter
    has_experts: bool = False  # Whether the adapter also changes linears of experts.


class TermTable:
    """Descriptors of the terms of adapters, in slots on the device.

    `memory` contains the tensors of all terms. `linears` are the linears that an adapter can
    change. A batch has at most `slots` adapters.
    """

    def __init__(self, memory: Tensor, linears: Sequence[str], slots: int) -> None:
        self.memory = memory
        self.linears: Mapping[str, int] = {name: index for index, name in enumerate(linears)}
        shape = (slots, len(linears), PARTS_MAX, len(DESCRIPTOR_FIELDS))
        self.descriptors = torch.zeros(shape, dtype=torch.int64, device=memory.device)
        # By key of an adapter, the least recently used first.
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        self._free_slots = list(range(slots))

    def encode(self, adapter: ModelAdapter) -> EncodedAdapter:
        """Return the descriptors of an adapter whose tensors are in the memory.

        The terms of experts have none: modules apply them (`LowRankKernels.expert_rows`).
        """
        descriptors = np.zeros(self.descriptors.shape[1:], np.int64)
        descriptors[..., -len(TENSOR_FIELDS) :] = -1
        ranks = 0
        bottlenecks = {
            name: terms for name, terms in adapter.items() if terms[0].bottleneck is not None
        }
        adapter = {name: terms for name, terms in adapter.items() if name not in bottlenecks}
        for name, terms in adapter.items():
            if LOCAL_EXPERTS in name:
                continue
            first_rank = 0
            for part, term in enumerate(terms):
                descriptors[self.linears[name], part] = _descriptor(term, first_rank)
                first_rank += 0 if term.lora_a is None else len(term.lora_a)
            ranks = max(ranks, first_rank)
        input_scaled = frozenset(
            name
            for name, terms in adapter.items()
            if any(term.input_scale is not None for term in terms)
        )
        names = frozenset(name for name in adapter if LOCAL_EXPERTS not in name)
        return EncodedAdapter(
            descriptors,
            names,
            input_scaled & names,
            ranks,
            bottlenecks,
            has_experts=len(names) < len(adapter),
        )

    def assign_slots(self, adapters: Mapping[Hashable, EncodedAdapter]) -> list[int]:
        """Return the slots of the adapters of a batch, by key; missing descriptors are copied.

        The slots of other adapters may be overwritten.
        """
        missing = adapters.keys() - self._slots.keys()
        for key in adapters.keys() - missing:
            self._slots.move_to_end(key)
        for key in missing:
            slot = (
                self._free_slots.pop() if self._free_slots else self._slots.popitem(last=False)[1]
            )
            self._slots[key] = slot
            self.descriptors[slot] = to_device(adapters[key].descriptors, self.memory.device)
        return [self._slots[key] for key in adapters]

    def forget(self, key: Hashable) -> None:
        """Copy the descriptors of this adapter again before its next batch."""
        if key in self._slots:
            self._free_slots.append(self._slots.pop(key))


def _descriptor(term: LinearTerm, first_rank: int) -> list[int]:
    columns = term.columns
    tensors: list[Tensor | None] = [getattr(term, name) for name in TENSOR_FIELDS]
    if columns is None:
        by_column = (term.lora_b, term.output_factor, term.output_scale)
        width = next((len(tensor) for tensor in by_column if tensor is not None), 0)
        runs = (0, max(width, 1), 0)
        count = width
    else:
        runs = (columns.offset, columns.width, columns.stride)
        count = columns.width * columns.count
    scale = int(np.float32(term.scale).view(np.int32))
    return [
        count,
        0 if term.lora_a is None else len(term.lora_a),
        first_rank,
        scale,
        *runs,
        *(-1 if tensor is None else int(tensor.storage_offset()) for tensor in tensors),
    ]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of a batch on which adapters act, as views of one int32 tensor."""

    groups: Tensor  # The number of groups, and the groups.
    order: Tensor  # The rows, sorted by adapter.
    slots: Tensor  # The slot of each row; -1: no adapter acts on it.
    group_rows: int  # The largest number of rows of a group.
    group_count_max: int

    @staticmethod
    def view(packed: Tensor, rows: int, group_count_max: int) -> "PackedRows":
        """Return views of the array of `pack_rows`, or of a tensor with this array."""
        order_start, slots_start, _ = _packed_starts(rows, group_count_max)
        return PackedRows(
            packed[:order_start],
            packed[order_start : order_start + rows],
            packed[slots_start : slots_start + rows],
            group_rows_max(rows),
            group_count_max,
        )


def group_rows_max(rows: int) -> int:
    """Return the largest number of rows of a group in a batch."""
    return GROUP_ROWS if rows <= FEW_ROWS_MAX else MANY_GROUP_ROWS


def _packed_starts(rows: int, group_count_max: int) -> tuple[int, int, int]:
    """Return where the order, the slots and the end are, aligned to 16 bytes."""
    aligned_rows = rows + -rows % 4
    order_start = GROUP_HEADER + GROUP_FIELDS * group_count_max
    return order_start, order_start + aligned_rows, order_start + 2 * aligned_rows


def pack_rows(
    slots: NDArray[np.int64], *, rows: int | None = None, group_count_max: int | None = None
) -> NDArray[np.int32]:
    """Sort the rows of a batch into groups, given the slot of each row, or -1.

    `rows` and `group_count_max` are larger than the batch needs in the inputs of a CUDA graph.
    """
    rows = len(slots) if rows is None else rows
    groups = _groups_of(slots, group_rows_max(rows))
    group_count_max = len(groups) if group_count_max is None else group_count_max
    order_start, slots_start, end = _packed_starts(rows, group_count_max)
    packed = np.zeros(end, np.int32)
    packed[0] = len(groups)
    packed[GROUP_HEADER : GROUP_HEADER + groups.size] = groups.ravel()
    packed[order_start : order_start + len(slots)] = np.argsort(slots, kind="stable")
    packed[slots_start : slots_start + rows] = -1
    packed[slots_start : slots_start + len(slots)] = slots
    return packed


def _groups_of(slots: NDArray[np.int64], group_rows: int) -> NDArray[np.int64]:
    """Return the groups of the sorted rows; the rows without an adapter are the first ones."""
    numbers, starts, counts = np.unique(np.sort(slots), return_index=True, return_counts=True)
    groups = [
        (slot, start + first, min(group_rows, count - first), 0)
        for slot, start, count in zip(numbers, starts, counts, strict=True)
        if slot >= 0
        for first in range(0, count, group_rows)
    ]
    return np.array(groups, np.int64).reshape(-1, GROUP_FIELDS)


@dataclass(frozen=True, eq=False)
class LowRankKernels(AdapterKernels):
    """The adapters of a batch: a table of their terms, and the rows on which they act.

    `linears` are the linears that an adapter may change, `input_scaled` those with input scales.
    `ranks` is the largest sum of the ranks of a linear's parts.
    """

    table: TermTable
    rows: PackedRows
    linears: Collection[str]
    input_scaled: Collection[str]
    ranks: int
    bottlenecks: Sequence[AdaptedRows] = ()  # Of adapters with bottlenecks.
    expert_rows: Sequence[AdaptedRows] = ()  # Of adapters that change linears of experts.
    _by_linear: dict[str, "LinearKernels"] = field(default_factory=dict, repr=False)

    def for_linear(self, linear: str) -> TermKernels | None:
        if linear not in self.linears:
            return None
        kernels = self._by_linear.get(linear)
        if kernels is None:
            kernels = self._by_linear[linear] = LinearKernels(self, linear)
        return kernels

    def select_rows(self, rows: Tensor) -> AdapterKernels:
        """Make each of `rows` a group, which needs no sorting; the device computes it."""
        assert not self.bottlenecks, "the number of their rows would need a wait for the device"
        slots = self.rows.slots.index_select(0, rows)
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        # A group without rows has a valid slot, because the kernels read its descriptors.
        fields = [slots.clamp(min=0), order, (slots >= 0).int(), torch.zeros_like(slots)]
        groups = torch.stack(fields, dim=1)
        header = torch.full((GROUP_HEADER,), len(rows), dtype=torch.int32, device=rows.device)
        packed_groups = torch.cat([header, groups.flatten()])
        selected = PackedRows(packed_groups, order, slots, GROUP_ROWS, len(rows))
        return LowRankKernels(
            self.table,
            selected,
            self.linears,
            self.input_scaled,
            self.ranks,
            expert_rows=select_adapted_rows(self.expert_rows, rows),
        )


@dataclass(frozen=True, eq=False)
class LinearKernels(TermKernels):
    """The kernels of one linear."""

    adapters: LowRankKernels
    linear: str

    def scale_input(self, x: Tensor) -> Tensor:
        if self.linear not in self.adapters.input_scaled:
            return x
        from gpt.linear import triton_low_rank

        return triton_low_rank.scale_input(x, self.adapters, self.linear)

    def add_terms(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        from gpt.linear import triton_low_rank

        return triton_low_rank.add_terms(y, x, bias, self.adapters, self.linear)


def batch_kernels(
    table: TermTable,
    rows: PackedRows,
    adapters: Collection[EncodedAdapter],
    bottlenecks: Sequence[AdaptedRows] = (),
    expert_rows: Sequence[AdaptedRows] = (),
) -> LowRankKernels:
    """Return the kernels of a batch with these adapters.

    `bottlenecks`, `expert_rows`: those with bottlenecks, and those that change linears of experts.
    """
    return LowRankKernels(
        table,
        rows,
        frozenset[str]().union(*(adapter.linears for adapter in adapters)),
        frozenset[str]().union(*(adapter.input_scaled for adapter in adapters)),
        max(adapter.ranks for adapter in adapters),
        bottlenecks,
        expert_rows,
    )


def compile_kernels(table: TermTable, columns: int, channels: int, *, has_bias: bool) -> None:
    """Compile the kernels for a linear of this shape, by launches without adapters."""
    device, dtype = table.memory.device, table.memory.dtype
    linear = next(iter(table.linears))
    bias = torch.zeros(columns, dtype=dtype, device=device) if has_bias else None
    for rows in (1, FEW_ROWS_MAX + 1):
        packed = to_device(pack_rows(np.full(rows, -1), group_count_max=1), device)
        kernels = LowRankKernels(table, PackedRows.view(packed, rows, 1), [linear], [linear], 1)
        linear_kernels = kernels.for_linear(linear)
        assert linear_kernels is not None
        x = torch.zeros(rows, channels, dtype=dtype, device=device)
        y = torch.zeros(rows, columns, dtype=dtype, device=device)
        linear_kernels.add_terms(y, linear_kernels.scale_input(x), bias)
