"""Adapters of packed linears on a CPU: low-rank terms in panels, factors and scales.

The C library applies the adapters of a step's rows inside of the GEMM of their linear
(gpt/cpu/src/low_rank.c). It reads A and B in layouts of its own, which have the bytes of the terms'
own ranks. A row's result does not depend on the other rows and their adapters, bit for bit.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt.cpu.huge_pages import huge_page_zeros
from gpt.cpu.kernels import INT, POINTER
from gpt.cpu.packed_linear import PANEL_COLUMNS, AdaptedLinear, PackedWeight
from gpt.linear_adapter import LinearTerm, OutputColumns

# Rows of A in a block. Must equal LANES in gpt/cpu/src/vectors.h.
BLOCK_RANKS = 16
ALIGNMENT_BYTES = 64  # A cache line.
HUGE_PAGE_BYTES = 2 << 20


class LowRankTerm(ctypes.Structure):
    """The struct LowRankTerm in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        *((name, INT) for name in ("first", "pairs")),
        *((name, POINTER) for name in ("positions", "b")),
    )


@dataclass(frozen=True, eq=False)
class PackedTerms(LinearTerm):
    """All terms of an adapter for one packed linear, in the C library's layout.

    It replaces them in a `ModelAdapter`; the other fields of the base class are not set.
    """

    args: AdaptedLinear = field(default_factory=AdaptedLinear)
    # The owners of the memory at the addresses in `args`.
    arrays: tuple[Tensor, ...] = ()
    references: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def adapter_of_each_row(rows: Sequence[Tensor | None], batch_rows: int) -> Tensor:
    """Return the index of each row's adapter, or -1; `rows` are each adapter's rows, None: all."""
    # numpy is faster than torch for a few numbers; a step may have many adapters.
    indices = np.full(batch_rows, -1, np.int64)
    for index, adapter_rows in enumerate(rows):
        indices[slice(None) if adapter_rows is None else adapter_rows.numpy()] = index
    return torch.from_numpy(indices)


def pack_adapter(
    linears: Mapping[str, tuple[Sequence[LinearTerm], PackedWeight]],
) -> dict[str, PackedTerms]:
    """Copy the terms of an adapter by linear, with the linears' weights, into one allocation.

    The matrices are rounded to bf16. Terms that are packed already are not copied.
    """
    packed = {
        name: terms[0] for name, (terms, _) in linears.items() if isinstance(terms[0], PackedTerms)
    }
    linears = {name: linear for name, linear in linears.items() if name not in packed}
    shapes = {
        name: _WeightShape(weight.columns, weight.channels, bool(weight.gated))
        for name, (_, weight) in linears.items()
    }
    arrays = {name: _TermArrays.build(terms, shapes[name]) for name, (terms, _) in linears.items()}
    size = sum(map(_aligned_bytes, (x for of_linear in arrays.values() for x in of_linear.all)))
    free_memory = _allocate(size)

    def copy_array(array: Tensor) -> Tensor:
        nonlocal free_memory
        copied = free_memory[: array.nbytes].view(array.dtype).view(array.shape).copy_(array)
        free_memory = free_memory[_aligned_bytes(array) :]
        return copied

    return packed | {
        name: _make_packed_terms(terms, arrays[name].map(copy_array), shapes[name])
        for name, (terms, _) in linears.items()
    }


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


@dataclass(frozen=True)
class _TermArrays:
    """The arrays of an adapter of one linear, in the layout of the library; None: not set."""

    a: Tensor | None
    b: list[Tensor]  # Of each low-rank term.
    scales: Tensor | None
    factors: Tensor | None
    output_scales: Tensor | None
    input_scales: Tensor | None

    @classmethod
    def build(cls, terms: Sequence[LinearTerm], shape: _WeightShape) -> "_TermArrays":
        low_rank = _low_rank_terms(terms)
        ranks = torch.tensor([_even_rank(term) for term in low_rank])
        scales = torch.tensor([term.scale for term in low_rank])
        return cls(
            _pack_a(low_rank, shape.channels) if low_rank else None,
            [_pack_b(term, shape) for term in low_rank],
            scales.repeat_interleave(ranks) if low_rank else None,
            _panel_vector([(term.columns, term.output_factor) for term in terms], shape),
            _panel_vector([(term.columns, term.output_scale) for term in terms], shape),
            _input_scales(terms),
        )

    @property
    def all(self) -> list[Tensor]:
        optional = (self.a, self.scales, self.factors, self.output_scales, self.input_scales)
        return [*self.b, *(array for array in optional if array is not None)]

    def map(self, function: Callable[[Tensor], Tensor]) -> "_TermArrays":
        def apply(array: Tensor | None) -> Tensor | None:
            return None if array is None else function(array)

        return _TermArrays(
            apply(self.a),
            list(map(function, self.b)),
            apply(self.scales),
            apply(self.factors),
            apply(self.output_scales),
            apply(self.input_scales),
        )


def _make_packed_terms(
    terms: Sequence[LinearTerm], arrays: _TermArrays, shape: _WeightShape
) -> PackedTerms:
    low_rank = _low_rank_terms(terms)
    term_array = (LowRankTerm * len(low_rank))()
    first = 0
    for term, b, args in zip(low_rank, arrays.b, term_array, strict=True):
        positions = _panel_layout(term.columns, shape).positions
        rank = _even_rank(term)
        args.first, args.pairs, args.b = first, rank // 2, b.data_ptr()
        args.positions = None if positions is None else positions.data_ptr()
        first += rank
    linear = AdaptedLinear(
        first,
        _address(arrays.a),
        _address(arrays.scales),
        len(low_rank),
        ctypes.addressof(term_array),
        _address(arrays.factors),
        _address(arrays.output_scales),
        _address(arrays.input_scales),
    )
    return PackedTerms(args=linear, arrays=tuple(arrays.all), references=(term_array,))


def _address(array: Tensor | None) -> int | None:
    return None if array is None else array.data_ptr()


def _aligned_bytes(array: Tensor) -> int:
    return -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _allocate(size_bytes: int) -> Tensor:
    if size_bytes < HUGE_PAGE_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8)
    # Steps read the terms of many adapters in small pieces, so TLB misses would be frequent.
    return huge_page_zeros((size_bytes,), torch.uint8, torch.device("cpu"))


def _low_rank_terms(terms: Sequence[LinearTerm]) -> list[LinearTerm]:
    return [term for term in terms if term.lora_a is not None]


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
    return _PanelLayout(slots, panels, positions)


def _even_rank(term: LinearTerm) -> int:
    """Return the rank of a low-rank term, rounded up: the library multiplies pairs of ranks."""
    assert term.lora_a is not None
    return len(term.lora_a) + len(term.lora_a) % 2


def _pack_a(terms: Sequence[LinearTerm], channels: int) -> Tensor:
    """Return the matrices A of all terms in blocks of rows, by pairs of channels."""
    stacked = torch.zeros(sum(map(_even_rank, terms)), channels, dtype=torch.bfloat16)
    for term, rows in zip(terms, stacked.split(list(map(_even_rank, terms))), strict=True):
        assert term.lora_a is not None
        rows[: len(term.lora_a)] = term.lora_a
    blocks = stacked.view(len(stacked), -1, 2).split(BLOCK_RANKS)
    return torch.cat([block.transpose(0, 1).flatten() for block in blocks])


def _pack_b(term: LinearTerm, shape: _WeightShape) -> Tensor:
    """Return the matrix B of a term in panels."""
    assert term.lora_b is not None
    rank, layout = _even_rank(term), _panel_layout(term.columns, shape)
    panels = torch.zeros(shape.panels * PANEL_COLUMNS, rank, dtype=torch.bfloat16)
    panels[layout.slots, : term.lora_b.shape[1]] = term.lora_b.bfloat16()
    pairs = panels.view(shape.panels, PANEL_COLUMNS, rank // 2, 2)[layout.panels]
    return pairs.transpose(1, 2).contiguous()


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
