"""Adapters of packed linears on a CPU: low-rank terms in panels, factors and scales.

The C library applies the adapters of a step's rows inside of the GEMM of their linear
(gpt/cpu/src/low_rank.c). It reads A and B in layouts of its own, which have the bytes of the terms'
own ranks. A row's result does not depend on the other rows and their adapters, bit for bit.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt.cpu.huge_pages import huge_page_zeros
from gpt.cpu.kernels import INT, POINTER, library
from gpt.cpu.packed_linear import PANEL_COLUMNS, AdaptedLinear, PackedWeight
from gpt.linear_adapter import HostAllocator, LinearTerm, OutputColumns

# Rows of A in a block. Must equal LANES in gpt/cpu/src/vectors.h.
BLOCK_RANKS = 16
BF16_BYTES = 2
HALF_COLUMNS = PANEL_COLUMNS // 2
ALIGNMENT_BYTES = 64  # A cache line.
HUGE_PAGE_BYTES = 2 << 20


class LowRankTerm(ctypes.Structure):
    """The struct LowRankTerm in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        *((name, INT) for name in ("first", "first_of_second_half", "pairs")),
        *((name, POINTER) for name in ("positions", "b")),
    )


@dataclass(frozen=True, eq=False)
class PackedTerms(LinearTerm):
    """All terms of an adapter for one packed linear, in the C library's layout.

    It replaces them in a `ModelAdapter`; the other fields of the base class are not set.
    """

    args: AdaptedLinear = field(default_factory=AdaptedLinear)
    # The owners of the memory at the addresses in `args`.
    memory: tuple[Tensor, ...] = ()  # Of the matrices, then of the vectors.
    references: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)


def adapter_of_each_row(rows: Sequence[Tensor | None], batch_rows: int) -> Tensor:
    """Return the index of each row's adapter, or -1; `rows` are each adapter's rows, None: all."""
    # numpy is faster than torch for a few numbers; a step may have many adapters.
    indices = np.full(batch_rows, -1, np.int64)
    for index, adapter_rows in enumerate(rows):
        indices[slice(None) if adapter_rows is None else adapter_rows.numpy()] = index
    return torch.from_numpy(indices)


def pack_adapter(
    linears: Mapping[str, tuple[Sequence[LinearTerm], PackedWeight]],
    allocate: HostAllocator | None = None,
) -> dict[str, PackedTerms]:
    """Copy the terms of an adapter by linear, with the linears' weights, into one allocation.

    The matrices are rounded to bf16. Terms that are packed already are not copied.
    """
    packed = {
        name: terms[0] for name, (terms, _) in linears.items() if isinstance(terms[0], PackedTerms)
    }
    packers = {
        name: _LinearPacker(
            terms, _WeightShape(weight.columns, weight.channels, bool(weight.gated))
        )
        for name, (terms, weight) in linears.items()
        if name not in packed
    }
    if not packers:
        return packed
    matrix_bytes = sum(packer.matrix_bytes for packer in packers.values())
    memory = None if allocate is None else allocate(matrix_bytes)
    if memory is None:
        memory = _new_memory(matrix_bytes)
    copies = _MatrixCopies()
    start = 0
    for name, packer in packers.items():
        packed[name] = packer.pack(memory[start : start + packer.matrix_bytes], copies)
        start += packer.matrix_bytes
    copies.run()
    return packed


class _WeightShape(NamedTuple):
    """The shape of a packed weight; `columns` as in `PackedWeight`."""

    columns: int
    channels: int
    gated: bool

    @property
    def panels(self) -> int:
        return -(-self.columns * (1 + self.gated) // PANEL_COLUMNS)


class _PanelLayout(NamedTuple):
    """Where some columns of a linear are in the panels of its weight."""

    slots: Tensor  # Each column's index in panel order.
    panels: Tensor  # The panels with at least one of the columns, ascending.
    # (all panels,) int32: the index of the panel in `panels`, or -1. None: `panels` has all panels.
    positions: Tensor | None
    has_gaps: bool  # Whether the panels have other columns, too.
    # 0 or 1: the columns are exactly the first or the second halves of all panels, as those of the
    # gate or of the other part of a gated linear.
    half: int | None

    @property
    def positions_address(self) -> int | None:
        return None if self.positions is None else self.positions.data_ptr()


class _LinearPacker:
    """Packs the terms of an adapter for one linear."""

    def __init__(self, terms: Sequence[LinearTerm], shape: _WeightShape) -> None:
        self._terms = terms
        self._low_rank = [term for term in terms if term.lora_a is not None]
        self._parts = tuple((term.columns, _even_rank(term)) for term in self._low_rank)
        self._shape = shape
        self._layout = _matrix_layout(self._parts, shape)

    @property
    def matrix_bytes(self) -> int:
        return self._layout.nbytes

    def pack(self, memory: Tensor, copies: "_MatrixCopies") -> PackedTerms:
        """Return the terms, with the matrices in `memory`; `copies` will copy the matrices."""
        if self._has_padding():
            memory.numpy().fill(0)
        base, total = memory.data_ptr(), self._layout.total
        scales = torch.from_numpy(np.empty(total, np.float32))
        for term, first in zip(self._low_rank, self._layout.first, strict=True):
            assert term.lora_a is not None
            copies.add_a(term.lora_a, term.scale, first, total, base, scales.data_ptr())
        term_array = (LowRankTerm * len(self._layout.b))()
        for (start, indices), args in zip(self._layout.b, term_array, strict=True):
            args.first, args.first_of_second_half = (self._layout.first[i] for i in indices)
            args.pairs, args.b = self._parts[indices[0]][1] // 2, base + start
            for index in dict.fromkeys(indices):
                layout = _panel_layout(self._parts[index][0], self._shape)
                lora_b = self._low_rank[index].lora_b
                assert lora_b is not None
                args.positions = layout.positions_address
                copies.add_b(lora_b, layout, args.b)
        vectors = self._vectors()
        linear = AdaptedLinear(
            total,
            base if total else None,
            scales.data_ptr() if total else None,
            len(term_array),
            ctypes.addressof(term_array),
            *(None if vector is None else vector.data_ptr() for vector in vectors),
        )
        owners = (scales, *(vector for vector in vectors if vector is not None))
        return PackedTerms(args=linear, memory=(memory, *owners), references=(term_array,))

    def _has_padding(self) -> bool:
        """Whether some bytes of the matrices belong to no element of the terms."""
        return self._layout.has_gaps or any(_rank(term) % 2 for term in self._low_rank)

    def _vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the factors, output scales and input scales; None: the terms have none."""
        factors = [(term.columns, term.output_factor) for term in self._terms]
        output_scales = [(term.columns, term.output_scale) for term in self._terms]
        return (
            _panel_vector(factors, self._shape),
            _panel_vector(output_scales, self._shape),
            _input_scales(self._terms),
        )


class _MatrixLayout(NamedTuple):
    """Where the matrices of the terms of a linear are, as bytes of its memory. A is at byte 0."""

    first: tuple[int, ...]  # Of each term: the first of its rows among the rows of A.
    total: int  # Rows of A.
    # Of each B: its first byte, and the indices of the terms in the first and in the second halves
    # of its panels.
    b: tuple[tuple[int, tuple[int, int]], ...]
    nbytes: int
    has_gaps: bool  # Whether panels of B have columns of no term.


# Few combinations occur: those of the linears of a model, for each rank.
@cache
def _matrix_layout(
    parts: tuple[tuple[OutputColumns | None, int], ...], shape: _WeightShape
) -> _MatrixLayout:
    """Return the layout of terms; `parts`: the columns and the even rank of each term."""
    layouts = [_panel_layout(columns, shape) for columns, _ in parts]
    *first, total = (0, *accumulate(rank for _, rank in parts))
    # A gate, and another part with the same rank, have their matrices B in the same panels.
    second_halves = {
        rank: index for index, (_, rank) in enumerate(parts) if layouts[index].half == 1
    }
    partners = {
        index: second_halves.pop(rank)
        for index, (_, rank) in enumerate(parts)
        if layouts[index].half == 0 and rank in second_halves
    }
    b, start, has_gaps = [], _aligned_bytes(BF16_BYTES * total * shape.channels), False
    for index, (layout, (_, rank)) in enumerate(zip(layouts, parts, strict=True)):
        if index in partners.values():
            continue
        b.append((start, (index, partners.get(index, index))))
        is_full = index in partners and shape.columns % HALF_COLUMNS == 0
        has_gaps |= layout.has_gaps and not is_full
        start += _aligned_bytes(BF16_BYTES * len(layout.panels) * PANEL_COLUMNS * rank)
    return _MatrixLayout(tuple(first), total, tuple(b), start, has_gaps)


class _LowRankMatrix(ctypes.Structure):
    """The struct LowRankMatrix in gpt/cpu/src/pack_adapter.c."""

    _fields_ = (
        ("source", POINTER),
        *((name, INT) for name in ("bf16", "stride", "rank", "width")),
        *((name, POINTER) for name in ("slots", "positions")),
        *((name, INT) for name in ("first", "total")),
        ("target", POINTER),
        ("scale", ctypes.c_float),
        ("scales", POINTER),
    )


class _MatrixCopies:
    """Copies the matrices of adapters into the layouts of the library, in one call."""

    def __init__(self) -> None:
        self._matrices: list[_LowRankMatrix] = []
        self._sources: list[Tensor] = []  # Keeps the memory of the sources allocated.

    def add_a(
        self, lora_a: Tensor, scale: float, first: int, total: int, target: int, scales: int
    ) -> None:
        """`first`: the first of its rows among the `total` rows of all terms."""
        source, is_bf16 = self._add_source(lora_a)
        rank, channels = source.shape
        self._matrices.append(
            _LowRankMatrix(
                source.data_ptr(),
                is_bf16,
                source.stride(0),
                rank,
                channels,
                None,
                None,
                first,
                total,
                target,
                scale,
                scales,
            )
        )

    def add_b(self, lora_b: Tensor, layout: _PanelLayout, target: int) -> None:
        source, is_bf16 = self._add_source(lora_b)
        columns, rank = source.shape
        self._matrices.append(
            _LowRankMatrix(
                source.data_ptr(),
                is_bf16,
                source.stride(0),
                rank,
                columns,
                layout.slots.data_ptr(),
                layout.positions_address,
                0,
                0,
                target,
            )
        )

    def run(self) -> None:
        lib = library()
        assert lib is not None, "packed weights need the library"
        array = (_LowRankMatrix * len(self._matrices))(*self._matrices)
        lib.preamble_pack_low_rank(
            ctypes.addressof(array), len(self._matrices), torch.get_num_threads()
        )

    def _add_source(self, matrix: Tensor) -> tuple[Tensor, bool]:
        """Return the matrix with contiguous rows, in bf16 or fp32, and whether it is bf16."""
        is_bf16 = matrix.dtype == torch.bfloat16
        if not is_bf16 and matrix.dtype != torch.float32:
            matrix = matrix.float()
        source = matrix if matrix.stride(1) == 1 else matrix.contiguous()
        self._sources.append(source)
        return source, is_bf16


def _aligned_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _new_memory(size_bytes: int) -> Tensor:
    if size_bytes < HUGE_PAGE_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8)
    # Steps read the terms of many adapters in small pieces, so TLB misses would be frequent.
    return huge_page_zeros((size_bytes,), torch.uint8, torch.device("cpu"))


# The layouts are kept for ever, because `LowRankTerm` has addresses of their tensors. There are a
# few: a model has few shapes of linears.
@cache
def _panel_layout(columns: OutputColumns | None, shape: _WeightShape) -> _PanelLayout:
    numbers = torch.arange(shape.columns * (1 + shape.gated))
    if columns is not None:
        starts = columns.offset + columns.stride * torch.arange(columns.count)
        numbers = (starts.unsqueeze(1) + torch.arange(columns.width)).flatten()
    # A panel of a gated weight has some gates, then the columns that they multiply.
    lanes = PANEL_COLUMNS // (1 + shape.gated)
    half, column = numbers // shape.columns, numbers % shape.columns
    slots = column // lanes * PANEL_COLUMNS + half * lanes + column % lanes
    panels = (slots // PANEL_COLUMNS).unique()
    positions = None
    if len(panels) < shape.panels:
        positions = torch.full((shape.panels,), -1, dtype=torch.int32)
        positions[panels] = torch.arange(len(panels), dtype=torch.int32)
    has_gaps = len(slots) < len(panels) * PANEL_COLUMNS
    halves = (slots % PANEL_COLUMNS // HALF_COLUMNS).unique().tolist()
    has_half = shape.gated and len(slots) == shape.columns and len(halves) == 1
    return _PanelLayout(slots, panels, positions, has_gaps, halves[0] if has_half else None)


def _even_rank(term: LinearTerm) -> int:
    """Return the rank of a low-rank term, rounded up: the library multiplies pairs of ranks."""
    rank = _rank(term)
    return rank + rank % 2


def _rank(term: LinearTerm) -> int:
    assert term.lora_a is not None
    return term.lora_a.shape[0]  # Faster than `len`.


def _panel_vector(
    parts: Sequence[tuple[OutputColumns | None, Tensor | None]], shape: _WeightShape
) -> Tensor | None:
    """Return the factors of all columns in panel order, 1 where none is given; None: all are 1."""
    factors = [(columns, values) for columns, values in parts if values is not None]
    if not factors:
        return None
    vector = torch.ones(shape.panels * PANEL_COLUMNS)
    for columns, values in factors:
        vector[_panel_layout(columns, shape).slots] *= values.float()
    return vector


def _input_scales(terms: Sequence[LinearTerm]) -> Tensor | None:
    scales = [term.input_scale.float() for term in terms if term.input_scale is not None]
    return torch.stack(scales).prod(0) if scales else None
