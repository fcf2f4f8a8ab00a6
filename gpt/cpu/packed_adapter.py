"""Adapters of packed linears on a CPU: low-rank terms in panels, factors and scales.

The C library applies the adapters of a step's rows inside of the GEMM of their linear
(gpt/cpu/src/low_rank.c). It reads A and B in layouts of its own, which have the bytes of the terms'
own ranks. A row's result does not depend on the other rows and their adapters, bit for bit.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.cpu.kernels import INT, POINTER
from gpt.cpu.packed_linear import PANEL_COLUMNS, AdaptedLinear, PackedWeight
from gpt.linear_adapter import LinearTerm, OutputColumns

# Rows of A in a block. Must equal LANES in gpt/cpu/src/vectors.h.
BLOCK_RANKS = 16


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
    references: tuple[object, ...] = ()  # The owners of the memory at the addresses in `args`.

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.references if isinstance(x, Tensor))


def adapter_of_each_row(rows: Sequence[Tensor | None], batch_rows: int) -> Tensor:
    """Return the index of each row's adapter, or -1; `rows` are each adapter's rows, None: all."""
    indices = torch.full((batch_rows,), -1)
    for index, adapter_rows in enumerate(rows):
        if adapter_rows is None:
            indices.fill_(index)
        else:
            indices[adapter_rows] = index
    return indices


def pack_terms(terms: Sequence[LinearTerm], weight: PackedWeight) -> PackedTerms:
    """Copy the terms of an adapter for the linear with this weight; matrices become bf16."""
    shape = _WeightShape(weight.columns, weight.channels, bool(weight.gated))
    low_rank = [term for term in terms if term.lora_a is not None]
    args, references = AdaptedLinear(), list[object]()

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        references.append(tensor)
        return tensor.data_ptr()

    term_array = (LowRankTerm * len(low_rank))()
    ranks = [_even_rank(term) for term in low_rank]
    for index, (term, term_args) in enumerate(zip(low_rank, term_array, strict=True)):
        layout = _panel_layout(term.columns, shape)
        term_args.first, term_args.pairs = sum(ranks[:index]), ranks[index] // 2
        term_args.positions = None if layout.positions is None else layout.positions.data_ptr()
        term_args.b = address(_pack_b(term, layout, shape))
    if low_rank:
        args.rank = sum(ranks)
        args.a = address(_pack_a(low_rank, shape.channels))
        scales = torch.tensor([term.scale for term in low_rank])
        args.scales = address(scales.repeat_interleave(torch.tensor(ranks)))
        args.terms, args.term_array = len(low_rank), ctypes.addressof(term_array)
        references.append(term_array)
    args.factors = address(_panel_vector([(t.columns, t.output_factor) for t in terms], shape))
    args.output_scales = address(_panel_vector([(t.columns, t.output_scale) for t in terms], shape))
    args.input_scales = address(_input_scales(terms))
    return PackedTerms(args=args, references=tuple(references))


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


@lru_cache
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


def _pack_b(term: LinearTerm, layout: _PanelLayout, shape: _WeightShape) -> Tensor:
    """Return the matrix B of a term in panels."""
    assert term.lora_b is not None
    rank = _even_rank(term)
    panels = torch.zeros(shape.panels * PANEL_COLUMNS, rank, dtype=torch.bfloat16)
    panels[layout.slots, : term.lora_b.shape[1]] = term.lora_b.bfloat16()
    pairs = panels.view(shape.panels, PANEL_COLUMNS, rank // 2, 2)[layout.panels]
    return pairs.transpose(1, 2).contiguous()


def _panel_vector(
    parts: Sequence[tuple[OutputColumns | None, Tensor | None]], shape: _WeightShape
) -> Tensor | None:
    """Return the factors of all columns in panel order, 1 where none is given; None: all are 1."""
    given = [(columns, values) for columns, values in parts if values is not None]
    if not given:
        return None
    vector = torch.ones(shape.panels * PANEL_COLUMNS)
    for columns, values in given:
        vector[_panel_layout(columns, shape).slots] *= values.float()
    return vector


def _input_scales(terms: Sequence[LinearTerm]) -> Tensor | None:
    given = [term.input_scale.float() for term in terms if term.input_scale is not None]
    return torch.stack(given).prod(0) if given else None
