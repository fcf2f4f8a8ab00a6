"""Autograd function of a frozen linear with adapters: the gradients of A, B, magnitudes and scales.

The reference (`gpt.model.adapted_linear`) lets torch derive the backward pass. Torch would then
keep several copies of each output, and would add the gradients of the input in a separate pass.
This function saves the input, which the gradient of A needs, and the low-rank activations A x; with
a magnitude or an output scale it also saves the output before the factor. The gradient of the
weight is never computed, nor that of the input if no earlier linear is trained. The rows of a batch
may have different adapters: the products of the weight are those of all rows, and the low-rank
products are computed for the rows of each adapter. On a CPU, gpt/cpu/training_linear.py computes
the low-rank products of an adapter of all rows as a part of the products of the weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cpu import training_kernels, training_linear
from gpt.linear_adapter import LinearTerm, OutputColumns
from gpt.model.adapted_linear import RowTerms

# The tensors of a term, in the order in which they are arguments of the function.
TERM_TENSORS = ("lora_a", "lora_b", "output_factor", "output_scale", "input_scale")


def supports_terms(weight: Tensor, terms: RowTerms) -> bool:
    """Return whether `adapted_linear` computes these terms and their gradients."""
    if not torch.is_grad_enabled() or weight.requires_grad:
        return False
    return all(_supports_group(row_group) for _, row_group in terms)


def _supports_group(row_group: Sequence[LinearTerm]) -> bool:
    if any(term.input_dropout is not None for term in row_group):
        return False
    # One of both factors at most, so that one saved output gives the gradients.
    has_factor = any(term.output_factor is not None for term in row_group)
    has_output_scale = any(term.output_scale is not None for term in row_group)
    input_scales = sum(term.input_scale is not None for term in row_group)
    return not (has_factor and has_output_scale) and input_scales <= 1


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, terms: RowTerms
) -> Tensor:
    """Return the output of a linear with the terms of adapters, plus `residual`.

    The product of the weight is computed once for the rows of all adapters.
    """
    layout = tuple(
        GroupLayout(
            _row_index(rows), tuple(TermLayout(term.columns, term.scale) for term in row_group)
        )
        for rows, row_group in terms
    )
    tensors = [
        getattr(term, name) for _, row_group in terms for term in row_group for name in TERM_TENSORS
    ]
    y = _AdaptedLinear.apply(layout, x, weight, bias, residual, *tensors)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


# The rows of an adapter; a slice has views, which need no copies. None: all rows.
RowIndex = Tensor | slice | None


@dataclass(frozen=True)
class TermLayout:
    """The numbers of a term; its tensors are arguments of the autograd function."""

    columns: OutputColumns | None
    scale: float


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """The rows and terms of an adapter."""

    rows: RowIndex
    terms: tuple[TermLayout, ...]


def _row_index(rows: Tensor | None) -> RowIndex:
    """Return consecutive rows as a slice, if that does not wait for a device."""
    if rows is None or rows.device.type != "cpu" or not len(rows):
        return rows
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _take(x: Tensor, rows: RowIndex) -> Tensor:
    """Return some rows of `x`: a view, or a copy if they are indices."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _put(x: Tensor, rows: RowIndex, part: Tensor) -> None:
    """Write rows that `_take` has returned, and that have changed, into `x`."""
    if isinstance(rows, Tensor):
        x.index_copy_(0, rows, part)
    else:
        view = _take(x, rows)
        if view.data_ptr() != part.data_ptr():
            view.copy_(part)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Sequence[GroupLayout],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        groups = _groups(layout, tensors)
        has_input_scale = any(_input_scale(terms) is not None for _, terms in groups)
        factors = [_column_factor(terms, len(weight), x) for _, terms in groups]
        has_factor = any(factor is not None for factor in factors)
        # With a factor c of the product, the bias is added behind it; an output scale includes it.
        has_late_bias = bias is not None and any(_has_output_factor(terms) for _, terms in groups)
        y = _matmul(
            _scale_inputs(x, groups) if has_input_scale else x,
            weight,
            None if has_late_bias else bias,
            None if has_factor else residual,
        )
        hidden: list[Tensor | None] = []
        unscaled: list[Tensor | None] = []
        for (rows, terms), factor in zip(groups, factors, strict=True):
            part = _take(y, rows)
            late_bias = bias if has_late_bias else None
            if late_bias is not None and factor is not None and not _has_output_factor(terms):
                part += late_bias
                late_bias = None
            hidden.append(_add_low_rank(part, _take(x, rows), _low_rank_terms(terms)))
            if factor is None:
                unscaled.append(None)
            elif rows is None:  # The adapter of all rows: no copy of its output is needed.
                unscaled.append(part)
                y = part * factor if residual is None else torch.addcmul(residual, part, factor)
                part, residual = y, None
            else:
                unscaled.append(part.clone())
                part *= factor
            if late_bias is not None:
                part += late_bias
            _put(y, rows, part)
        if has_late_bias and bias is not None:
            _add_to_other_rows(y, groups, bias)
        if residual is not None and has_factor:
            y += residual
        ctx.layout = layout
        needs_x = has_input_scale or any(part is not None for part in hidden)
        ctx.save_for_backward(x if needs_x else None, weight, *unscaled, *hidden, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.layout)
        x, weight, *saved = ctx.saved_tensors
        unscaled, hidden, tensors = saved[:count], saved[count : 2 * count], saved[2 * count :]
        groups, dy = _groups(ctx.layout, tensors), grads[0].contiguous()
        dresidual = dy if ctx.needs_input_grad[4] else None
        needs_dx = ctx.needs_input_grad[1]
        term_grads: list[list[dict[str, Tensor]]] = [[{} for _ in terms] for _, terms in groups]
        is_single = count == 1 and groups[0][0] is None
        if not is_single and any(part is not None for part in unscaled):
            dy = dy.clone()  # The rows of adapters with factors are replaced.
        low_rank_dx: Tensor | None = None
        for index, (rows, terms) in enumerate(groups):
            part = _take(dy, rows)
            factor = _column_factor(terms, len(weight), dy)
            if factor is not None:
                part, sums = _scale_backward(part, unscaled[index], factor)
                _store_factor_grads(terms, sums, term_grads[index])
                if is_single:
                    dy = part
                else:
                    _put(dy, rows, part)
            if hidden[index] is None:
                continue
            dx_part = _low_rank_backward(
                part, _take(x, rows), hidden[index], terms, term_grads[index], needs_dx=needs_dx
            )
            if dx_part is not None and is_single:
                low_rank_dx = dx_part
            elif dx_part is not None:
                low_rank_dx = torch.zeros_like(x) if low_rank_dx is None else low_rank_dx
                _put(low_rank_dx, rows, dx_part)
        dx: Tensor | None = None
        if needs_dx or any(_input_scale(terms) is not None for _, terms in groups):
            dx = _matmul_transposed(dy, weight, low_rank_dx)
            dx = _input_scales_backward(dx, x, groups, term_grads)
        flat = [
            named_grads.get(name)
            for group_grads in term_grads
            for named_grads in group_grads
            for name in TERM_TENSORS
        ]
        return None, dx if needs_dx else None, None, None, dresidual, *flat


def _groups(
    layout: Sequence[GroupLayout], tensors: Sequence[Tensor | None]
) -> list[tuple[RowIndex, list[LinearTerm]]]:
    """Return the rows and the terms of each adapter."""
    groups, size, first = [], len(TERM_TENSORS), 0
    for group in layout:
        terms = []
        for term in group.terms:
            a, b, output_factor, output_scale, input_scale = tensors[first : first + size]
            first += size
            terms.append(
                LinearTerm(term.columns, a, b, term.scale, output_factor, output_scale, input_scale)
            )
        groups.append((group.rows, terms))
    return groups


def _has_output_factor(terms: Sequence[LinearTerm]) -> bool:
    return any(term.output_factor is not None for term in terms)


def _scale_inputs(x: Tensor, groups: Sequence[tuple[RowIndex, Sequence[LinearTerm]]]) -> Tensor:
    """Return a copy of `x` with the rows of adapters multiplied by their input scales."""
    first_scale = _input_scale(groups[0][1])
    if groups[0][0] is None and first_scale is not None:  # The adapter of all rows.
        return x * first_scale.to(x.dtype)
    scaled_x = x.clone()
    for rows, terms in groups:
        input_scale = _input_scale(terms)
        if input_scale is not None:
            _put(scaled_x, rows, _take(x, rows) * input_scale.to(x.dtype))
    return scaled_x


def _input_scales_backward(
    dx: Tensor,
    x: Tensor,
    groups: Sequence[tuple[RowIndex, Sequence[LinearTerm]]],
    term_grads: Sequence[Sequence[dict[str, Tensor]]],
) -> Tensor:
    """Store the gradients of the input scales; return the gradient of `x` from that of scaled x."""
    for (rows, terms), group_grads in zip(groups, term_grads, strict=True):
        input_scale = _input_scale(terms)
        if input_scale is None:
            continue
        part, sums = _scale_backward(_take(dx, rows), _take(x, rows), input_scale.to(dx.dtype))
        if rows is None:
            dx = part
        else:
            _put(dx, rows, part)
        for term, named_grads in zip(terms, group_grads, strict=True):
            if term.input_scale is not None:
                named_grads["input_scale"] = sums.to(term.input_scale.dtype)
    return dx


def _add_to_other_rows(
    y: Tensor, groups: Sequence[tuple[RowIndex, Sequence[LinearTerm]]], bias: Tensor
) -> None:
    """Add the bias to the rows of `y` that belong to no adapter."""
    is_other = torch.ones(len(y), 1, dtype=y.dtype, device=y.device)
    for rows, _ in groups:
        is_other[slice(None) if rows is None else rows] = 0
    y.addcmul_(is_other, bias)


def _input_scale(terms: Sequence[LinearTerm]) -> Tensor | None:
    return next((term.input_scale for term in terms if term.input_scale is not None), None)


def _low_rank_terms(terms: Sequence[LinearTerm]) -> list[LinearTerm]:
    return [term for term in terms if term.lora_a is not None]


def _column_factor(terms: Sequence[LinearTerm], columns: int, like: Tensor) -> Tensor | None:
    """Return the factor of each output column; None if no term has a factor."""
    factors = [(term, term.column_factor) for term in terms]
    if all(factor is None for _, factor in factors):
        return None
    merged = like.new_ones(1, columns)
    for term, factor in factors:
        if factor is not None:
            view = _column_view(merged, term.columns)
            view.copy_(factor.view(view.shape))
    return merged.flatten()


def _store_factor_grads(
    terms: Sequence[LinearTerm], sums: Tensor, term_grads: Sequence[dict[str, Tensor]]
) -> None:
    """Store the gradients of the terms' factors, from those of all columns."""
    for term, named_grads in zip(terms, term_grads, strict=True):
        factor = term.column_factor
        if factor is not None:
            name = "output_scale" if term.output_factor is None else "output_factor"
            grad = _column_view(sums.unsqueeze(0), term.columns).flatten()
            named_grads[name] = grad.to(factor.dtype)


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias + residual, in memory that nothing else uses."""
    if training_linear.supports_matmul(x, weight):
        return training_linear.matmul(x, weight, bias, residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def _matmul_transposed(dy: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    """Return dy @ weight + addend; `addend` may be overwritten."""
    if training_linear.supports_matmul(dy, weight):
        return training_linear.matmul(dy, weight, None, addend, transposed=True)
    return dy @ weight if addend is None else addend.addmm_(dy, weight)


def _stacked_a(terms: Sequence[LinearTerm], dtype: torch.dtype) -> Tensor:
    """Return the matrices A of all terms, one below the other."""
    matrices = [term.lora_a.to(dtype) for term in terms if term.lora_a is not None]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _ranks(terms: Sequence[LinearTerm]) -> list[int]:
    return [len(term.lora_a) for term in terms if term.lora_a is not None]


def _add_low_rank(y: Tensor, x: Tensor, terms: Sequence[LinearTerm]) -> Tensor | None:
    """Add scale * B (A x) to the columns of each term in place; return A x of all terms."""
    if not terms:
        return None
    hidden = x @ _stacked_a(terms, x.dtype).T
    if _interleaves_columns(terms):
        y.addmm_(hidden, _stacked_b(terms, y))
        return hidden
    for term, term_hidden in zip(terms, hidden.split(_ranks(terms), dim=1), strict=True):
        assert term.lora_b is not None
        b = term.lora_b.to(x.dtype)
        columns = _column_view(y, term.columns)
        if columns.dim() == 2:
            columns.addmm_(term_hidden, b.T, alpha=term.scale)
        else:
            columns += (term_hidden @ b.T).view(columns.shape).mul_(term.scale)
    return hidden


def _interleaves_columns(terms: Sequence[LinearTerm]) -> bool:
    """Return whether the columns of a term are several runs, as those of queries with groups."""
    return any(term.columns is not None and term.columns.count > 1 for term in terms)


def _stacked_b(terms: Sequence[LinearTerm], like: Tensor) -> Tensor:
    """Return scale * B^T of all terms, one below the other, with zeros in the other columns.

    One product with this matrix takes less time than strided sums of the terms' products.
    """
    stacked = like.new_zeros(sum(_ranks(terms)), like.shape[1])
    for term, rows in zip(terms, stacked.split(_ranks(terms)), strict=True):
        assert term.lora_b is not None
        view = _column_view(rows, term.columns)
        view.copy_((term.lora_b.T * term.scale).view(view.shape))
    return stacked


def _low_rank_backward(
    dy: Tensor,
    x: Tensor,
    hidden: Tensor,
    terms: Sequence[LinearTerm],
    term_grads: Sequence[dict[str, Tensor]],
    *,
    needs_dx: bool,
) -> Tensor | None:
    """Store the gradients of A and B; return the share of the low-rank products in that of x."""
    low_rank = _low_rank_terms(terms)
    named_grads = [grads for term, grads in zip(terms, term_grads, strict=True) if term in low_rank]
    if _interleaves_columns(low_rank):
        stacked = dy @ _stacked_b(low_rank, dy).T
        b_grads = (hidden.T @ dy).split(_ranks(low_rank))
        for term, grads, grad in zip(low_rank, named_grads, b_grads, strict=True):
            assert term.lora_b is not None
            grad = _column_view(grad, term.columns).flatten(1).T
            grads["lora_b"] = grad.to(term.lora_b.dtype) * term.scale
        return _store_a_grads(stacked, x, low_rank, named_grads, needs_dx=needs_dx)
    dhidden = []
    for term, grads, term_hidden in zip(
        low_rank, named_grads, hidden.split(_ranks(low_rank), dim=1), strict=True
    ):
        assert term.lora_b is not None
        dy_columns = _column_view(dy, term.columns).flatten(1)
        dhidden.append((dy_columns @ term.lora_b.to(dy.dtype)).mul_(term.scale))
        grad = dy_columns.T @ term_hidden
        grads["lora_b"] = grad.to(term.lora_b.dtype).mul_(term.scale)
    stacked = dhidden[0] if len(dhidden) == 1 else torch.cat(dhidden, dim=1)
    return _store_a_grads(stacked, x, low_rank, named_grads, needs_dx=needs_dx)


def _store_a_grads(
    stacked: Tensor,
    x: Tensor,
    low_rank: Sequence[LinearTerm],
    named_grads: Sequence[dict[str, Tensor]],
    *,
    needs_dx: bool,
) -> Tensor | None:
    """Store the gradients of A from those of A x; return the share of A x in the gradient of x."""
    a_grads = (stacked.T @ x).split(_ranks(low_rank))
    for term, grads, grad in zip(low_rank, named_grads, a_grads, strict=True):
        assert term.lora_a is not None
        grads["lora_a"] = grad.to(term.lora_a.dtype)
    return stacked @ _stacked_a(low_rank, x.dtype) if needs_dx else None


def _scale_backward(dy: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the factor, from that of factor * y."""
    if training_kernels.supports_rows(dy):
        return training_kernels.scale_backward(dy, y, factor)
    sum_dtype = torch.promote_types(dy.dtype, torch.float32)
    return dy * factor, (dy * y).sum(0, dtype=sum_dtype)


def _column_view(y: Tensor, columns: OutputColumns | None) -> Tensor:
    """Return a view of columns of `y`: (rows, columns), or (rows, runs, width) of several runs."""
    if columns is None:
        return y
    if columns.count == 1:
        return y[:, columns.offset : columns.offset + columns.width]
    runs = y[:, : columns.count * columns.stride].view(len(y), columns.count, columns.stride)
    return runs[:, :, columns.offset : columns.offset + columns.width]
