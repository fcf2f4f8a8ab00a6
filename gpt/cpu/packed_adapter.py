"""Adapters of packed linears on a CPU: low-rank terms in panels, factors and scales.

The C library applies the adapters of a step's rows inside of the GEMM of their linear
(gpt/cpu/src/low_rank.c). It reads A and B in layouts of its own, which have the bytes of the terms'
own ranks. A row's result does not depend on the other rows and their adapters, bit for bit.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
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
    new = {name: linear for name, linear in linears.items() if name not in packed}
    if new:
        packers = [_LinearPacker(terms, weight) for terms, weight in new.values()]
        packed |= zip(new, _pack(packers, allocate), strict=True)
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
    """The terms of an adapter for one linear, which are to be packed."""

    def __init__(self, terms: Sequence[LinearTerm], weight: PackedWeight) -> None:
        self._terms = terms
        self.low_rank = [term for term in terms if term.lora_a is not None]
        shape = _WeightShape(weight.columns, weight.channels, bool(weight.gated))
        ranks = tuple((term.columns, _rank(term)) for term in self.low_rank)
        self.structure = _LinearStructure(shape, ranks)

    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the factors, output scales and input scales; None: the terms have none."""
        shape = self.structure.shape
        factors = [(term.columns, term.output_factor) for term in self._terms]
        output_scales = [(term.columns, term.output_scale) for term in self._terms]
        return (
            _panel_vector(factors, shape),
            _panel_vector(output_scales, shape),
            _input_scales(self._terms),
        )


class _LinearStructure(NamedTuple):
    """What the layout of an adapter's terms for one linear depends on."""

    shape: _WeightShape
    ranks: tuple[tuple[OutputColumns | None, int], ...]  # The columns and the rank of each term.

    @property
    def even_ranks(self) -> tuple[tuple[OutputColumns | None, int], ...]:
        """`ranks`, rounded up: the library multiplies pairs of ranks."""
        return tuple((columns, rank + rank % 2) for columns, rank in self.ranks)


def _pack(packers: Sequence[_LinearPacker], allocate: HostAllocator | None) -> list[PackedTerms]:
    layout = _adapter_layout(tuple(packer.structure for packer in packers))
    memory = None if allocate is None else allocate(layout.nbytes)
    if memory is None:
        memory = _new_memory(layout.nbytes)
    for start, stop in layout.padded:
        memory[start:stop].numpy().fill(0)
    scales = np.empty(layout.scales, np.float32)
    _copy_matrices(packers, layout, memory, scales)
    terms, linears = layout.terms.copy(), layout.linears.copy()
    terms["b"] += memory.data_ptr()
    # A null pointer stays null.
    linears["a"][linears["rank"] > 0] += memory.data_ptr()
    linears["scales"][linears["rank"] > 0] += scales.ctypes.data
    linears["term_array"] += terms.ctypes.data
    packed, linear_bytes = [], linears.view(np.uint8).data
    for index, packer in enumerate(packers):
        args = AdaptedLinear.from_buffer(linear_bytes, index * linears.itemsize)
        vectors = packer.vectors()
        args.factors, args.output_scales, args.input_scales = (
            None if vector is None else vector.data_ptr() for vector in vectors
        )
        owners = (vector for vector in vectors if vector is not None)
        matrices = memory[slice(*layout.ranges[index])]
        packed.append(
            PackedTerms(args=args, memory=(matrices, *owners), references=(terms, scales))
        )
    return packed


def _copy_matrices(
    packers: Sequence[_LinearPacker],
    layout: "_AdapterLayout",
    memory: Tensor,
    scales: NDArray[np.float32],
) -> None:
    """Copy the matrices into `memory`, and the scale of each rank into `scales`, in one call."""
    sources, term_scales = list[Tensor](), list[float]()
    for packer, b_terms in zip(packers, layout.b_terms, strict=True):
        terms = packer.low_rank
        matrices = [term.lora_a for term in terms] + [terms[index].lora_b for index in b_terms]
        sources += (_readable(matrix) for matrix in matrices if matrix is not None)
        term_scales += (term.scale for term in terms)
        term_scales += (0.0 for _ in b_terms)  # Only those of the matrices A are read.
    array = layout.matrices.copy()
    array["source"] = [source.data_ptr() for source in sources]
    array["bf16"] = [source.dtype == torch.bfloat16 for source in sources]
    array["stride"] = [source.stride(0) for source in sources]
    array["scale"] = term_scales
    array["target"] += memory.data_ptr()
    array["scales"] += scales.ctypes.data
    lib = library()
    assert lib is not None, "packed weights need the library"
    lib.preamble_pack_low_rank(array.ctypes.data, len(array), torch.get_num_threads())


def _readable(matrix: Tensor) -> Tensor:
    """Return the matrix with contiguous rows, in bf16 or fp32."""
    if matrix.dtype not in (torch.bfloat16, torch.float32):
        matrix = matrix.float()
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


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


class _AdapterLayout(NamedTuple):
    """Where the matrices of all linears are in the memory of an adapter.

    The arrays have the C library's structs, for adapters of one structure: pointers into the
    memory, into the scales and into the array of terms are offsets from their first bytes, and what
    depends on the adapter's own tensors is 0.
    """

    nbytes: int
    scales: int  # The number of scales: one for each rank.
    ranges: tuple[tuple[int, int], ...]  # The bytes of each linear.
    padded: tuple[tuple[int, int], ...]  # The linears of which some bytes belong to no element.
    # Of each linear: the matrices A of all terms, then the matrices B of the terms `b_terms`.
    matrices: NDArray[np.void]
    b_terms: tuple[tuple[int, ...], ...]
    terms: NDArray[np.void]  # LowRankTerm
    linears: NDArray[np.void]  # AdaptedLinear


# Users choose the ranks of their adapters, so the number of structures has no limit.
@lru_cache(maxsize=256)
def _adapter_layout(structures: tuple[_LinearStructure, ...]) -> _AdapterLayout:
    ranges, padded, b_terms = [], [], []
    matrices, terms, linears = list[_LowRankMatrix](), list[LowRankTerm](), list[AdaptedLinear]()
    start = scales = 0
    for structure in structures:
        shape, layout = structure.shape, _matrix_layout(structure.even_ranks, structure.shape)
        linears.append(
            AdaptedLinear(
                layout.total,
                start,
                ctypes.sizeof(ctypes.c_float) * scales,
                len(layout.b),
                ctypes.sizeof(LowRankTerm) * len(terms),
            )
        )
        for (_, rank), first in zip(structure.ranks, layout.first, strict=True):
            matrices.append(
                _LowRankMatrix(
                    rank=rank,
                    width=shape.channels,
                    first=first,
                    total=layout.total,
                    target=start,
                    scales=ctypes.sizeof(ctypes.c_float) * scales,
                )
            )
        terms_with_b = list[int]()
        for b_start, indices in layout.b:
            # The two halves of the panels may have different terms, of one rank and one layout.
            panels = _panel_layout(structure.ranks[indices[-1]][0], shape)
            first, first_of_second_half = (layout.first[index] for index in indices)
            pairs = structure.even_ranks[indices[0]][1] // 2
            terms.append(
                LowRankTerm(
                    first, first_of_second_half, pairs, panels.positions_address, start + b_start
                )
            )
            for index in dict.fromkeys(indices):
                columns, rank = structure.ranks[index]
                panels = _panel_layout(columns, shape)
                matrices.append(
                    _LowRankMatrix(
                        rank=rank,
                        width=len(panels.slots),
                        slots=panels.slots.data_ptr(),
                        positions=panels.positions_address,
                        target=start + b_start,
                    )
                )
                terms_with_b.append(index)
        b_terms.append(tuple(terms_with_b))
        ranges.append((start, start + layout.nbytes))
        if layout.has_gaps or any(rank % 2 for _, rank in structure.ranks):
            padded.append(ranges[-1])
        start += layout.nbytes
        scales += layout.total
    return _AdapterLayout(
        start,
        scales,
        tuple(ranges),
        tuple(padded),
        _struct_array(_LowRankMatrix, matrices),
        tuple(b_terms),
        _struct_array(LowRankTerm, terms),
        _struct_array(AdaptedLinear, linears),
    )


def _struct_array(
    struct: type[ctypes.Structure], values: Sequence[ctypes.Structure]
) -> NDArray[np.void]:
    dtype = cast("np.dtype[np.void]", np.dtype(struct))
    return np.frombuffer(bytes((struct * len(values))(*values)), dtype).copy()


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
