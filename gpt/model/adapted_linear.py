"""Applies adapters to the rows of a linear, in torch: the reference of the other backends."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gpt.bottleneck_adapter import Bottleneck
from gpt.linear_adapter import (
    AdaptedRows,
    AdapterKernels,
    BatchAdapters,
    LinearTerm,
    ModelAdapter,
    OutputColumns,
    TermKernels,
)

# The terms that act on some rows of a linear's input; None: on all rows.
RowTerms = Sequence[tuple[Tensor | None, Sequence[LinearTerm]]]
# The bottlenecks that act on some rows of a linear's output; None: on all rows.
RowBottlenecks = Sequence[tuple[Tensor | None, Bottleneck]]


def row_terms(adapted_rows: Iterable[AdaptedRows], linear: str) -> RowTerms:
    """Return the terms of the adapters that change the product of the linear with this name."""
    return [
        (adapted.rows, adapted.adapter[linear])
        for adapted in adapted_rows
        if linear in adapted.adapter and not has_bottleneck(adapted.adapter, linear)
    ]


def has_bottleneck(adapter: ModelAdapter, linear: str) -> bool:
    """Whether the change of a linear is a bottleneck, which is then the only change."""
    terms = adapter.get(linear, ())
    return bool(terms) and terms[0].bottleneck is not None


def row_bottlenecks(adapters: BatchAdapters, linear: str) -> RowBottlenecks:
    """Return the bottlenecks of the output of the linear with this name."""
    if isinstance(adapters, AdapterKernels):
        adapters = adapters.bottlenecks
    return [
        (adapted.rows, term.bottleneck)
        for adapted in adapters
        for term in adapted.adapter.get(linear, ())
        if term.bottleneck is not None
    ]


def terms_of(adapters: BatchAdapters, linear: str) -> RowTerms | TermKernels:
    """Return the terms of a linear, or the kernels that apply them; empty: it is not changed."""
    if isinstance(adapters, AdapterKernels):
        return adapters.for_linear(linear) or ()
    return row_terms(adapters, linear)


def adapted_product(
    x: Tensor, terms: RowTerms, multiply: Callable[[Tensor], Tensor], bias: Tensor | None
) -> Tensor:
    """Return the output of a linear with adapters, before its activation.

    `multiply` computes the product of the base weight.
    """
    scaled_x = x
    for rows, row_group in terms:
        for term in row_group:
            if term.input_scale is not None:
                scaled_x = _scale_rows(scaled_x, rows, term.input_scale)
    y = multiply(scaled_x)
    for rows, row_group in terms:
        for term in row_group:
            y = _add_term(y, x, rows, term)
    if bias is not None:
        y = y + bias
    for rows, row_group in terms:
        for term in row_group:
            if term.output_scale is not None:
                y = _scale_columns(y, rows, term.columns, term.output_scale)
    return y


def select_adapters(adapters: BatchAdapters, rows: Tensor) -> BatchAdapters:
    """Return the adapters of a batch of which only `rows` are left, in this order."""
    if isinstance(adapters, AdapterKernels):
        return adapters.select_rows(rows)
    return select_adapted_rows(adapters, rows)


def select_adapted_rows(adapters: Sequence[AdaptedRows], rows: Tensor) -> tuple[AdaptedRows, ...]:
    """Return the adapters of a batch of which only `rows` are left, in this order."""
    selected = []
    for adapted in adapters:
        if adapted.rows is None:
            selected.append(adapted)
            continue
        positions = torch.isin(rows, adapted.rows).nonzero().flatten()
        if len(positions):
            selected.append(AdaptedRows(adapted.adapter, positions))
    return tuple(selected)


def _add_term(y: Tensor, x: Tensor, rows: Tensor | None, term: LinearTerm) -> Tensor:
    """Return factor * (y + scale * B (A x)) in the rows and columns of the term, y elsewhere."""
    if term.lora_a is not None:
        assert term.lora_b is not None
        input_rows = x if rows is None else x.index_select(0, rows)
        if term.input_dropout is not None:
            input_rows = term.input_dropout(input_rows)
        hidden = input_rows @ term.lora_a.T.to(x.dtype)
        product = (hidden * term.scale) @ term.lora_b.T.to(x.dtype)
        y = _update(y, rows, term.columns, lambda part: part + product)
    if term.output_factor is not None:
        y = _scale_columns(y, rows, term.columns, term.output_factor)
    return y


def _scale_rows(x: Tensor, rows: Tensor | None, scale: Tensor) -> Tensor:
    return _scale_columns(x, rows, None, scale)


def _scale_columns(
    y: Tensor, rows: Tensor | None, columns: OutputColumns | None, scale: Tensor
) -> Tensor:
    return _update(y, rows, columns, lambda part: part * scale.to(part.dtype))


def _update(
    y: Tensor,
    rows: Tensor | None,
    columns: OutputColumns | None,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return a copy of `y` in which `change` replaces the selected rows and columns."""
    selected = y if rows is None else y.index_select(0, rows)
    if columns is None:
        changed = change(selected)
    else:
        column_indices = _column_indices(columns, y.device)
        part = change(selected.index_select(1, column_indices))
        changed = selected.index_copy(1, column_indices, part)
    return changed if rows is None else y.index_copy(0, rows, changed)


def _column_indices(columns: OutputColumns, device: torch.device) -> Tensor:
    starts = columns.offset + columns.stride * torch.arange(columns.count, device=device)
    return (starts.unsqueeze(1) + torch.arange(columns.width, device=device)).flatten()
