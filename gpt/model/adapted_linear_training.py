"""Autograd function of a frozen linear with adapters: the gradients of A, B, magnitudes and scales.

The reference (`gpt.model.adapted_linear`) lets torch derive the backward pass. Torch would then
keep several copies of each output, and would add the gradients of the input in a separate pass.
This function saves the input, which the gradient of A needs, and the low-rank activations A x; with
a magnitude or an output scale it also saves the output before the factor. The gradient of the
weight is never computed, nor that of the input if no earlier linear is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cpu import training_kernels
from gpt.linear_adapter import LinearTerm, OutputColumns
from gpt.model.adapted_linear import RowTerms

# The tensors of a term, in the order in which they are arguments of the function.
TERM_TENSORS = ("lora_a", "lora_b", "output_factor", "output_scale", "input_scale")


def supports_terms(weight: Tensor, terms: RowTerms) -> bool:
    """Return whether `adapted_linear` computes these terms and their gradients."""
    if not torch.is_grad_enabled() or weight.requires_grad or len(terms) != 1:
        return False
    rows, row_group = terms[0]
    if rows is not None or any(term.input_dropout is not None for term in row_group):
        return False
    # One of both factors at most, so that one saved output gives the gradients.
    has_factor = any(term.output_factor is not None for term in row_group)
    has_output_scale = any(term.output_scale is not None for term in row_group)
    input_scales = sum(term.input_scale is not None for term in row_group)
    return not (has_factor and has_output_scale) and input_scales <= 1


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    row_group: Sequence[LinearTerm],
) -> Tensor:
    """Return the output of a linear with the terms of one adapter on all rows, plus `residual`."""
    layout = tuple(TermLayout(term.columns, term.scale) for term in row_group)
    tensors = [getattr(term, name) for term in row_group for name in TERM_TENSORS]
    y = _AdaptedLinear.apply(layout, x, weight, bias, residual, *tensors)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


@dataclass(frozen=True)
class TermLayout:
    """The numbers of a term; its tensors are arguments of the autograd function."""

    columns: OutputColumns | None
    scale: float


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Sequence[TermLayout],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        terms = _terms(layout, tensors)
        scale_of_input = next((t.input_scale for t in terms if t.input_scale is not None), None)
        scaled_x = x if scale_of_input is None else x * scale_of_input.to(x.dtype)
        factors = [_factor(term) for term in terms]
        is_plain = all(factor is None for factor in factors)
        # With a factor c of the product, the bias is added behind it; an output scale includes it.
        has_early_bias = all(term.output_factor is None for term in terms)
        y = _matmul(
            scaled_x, weight, bias if has_early_bias else None, residual if is_plain else None
        )
        hidden = [_add_low_rank(y, x, term) for term in terms]
        unscaled = None
        if not is_plain:
            unscaled, y = y, _scaled(y, terms, factors)
            if bias is not None and not has_early_bias:
                y += bias
            if residual is not None:
                y += residual
        ctx.layout = layout
        ctx.term_count = len(terms)
        needs_x = any(term.lora_a is not None or term.input_scale is not None for term in terms)
        ctx.save_for_backward(x if needs_x else None, weight, unscaled, *hidden, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, unscaled, *saved = ctx.saved_tensors
        hidden, tensors = saved[: ctx.term_count], saved[ctx.term_count :]
        terms, dy = _terms(ctx.layout, tensors), grads[0].contiguous()
        dresidual = dy if ctx.needs_input_grad[4] else None
        term_grads: list[dict[str, Tensor]] = [{} for _ in terms]
        factors = [_factor(term) for term in terms]
        if unscaled is not None:
            for term, factor, found in zip(terms, factors, term_grads, strict=True):
                if factor is not None:
                    name = "output_factor" if term.output_factor is not None else "output_scale"
                    found[name] = _column_sums(dy, unscaled, term.columns, factor)
            dy = _scaled(dy, terms, factors)
        needs_dx = ctx.needs_input_grad[1]
        low_rank_dx: Tensor | None = None
        for term, u, found in zip(terms, hidden, term_grads, strict=True):
            if term.lora_a is None or term.lora_b is None:
                continue
            a, b = term.lora_a.to(dy.dtype), term.lora_b.to(dy.dtype)
            dy_columns = _select_columns(dy, term.columns)
            v = (dy_columns @ b).mul_(term.scale)
            found["lora_a"] = (v.T @ x).to(term.lora_a.dtype)
            found["lora_b"] = (dy_columns.T @ u).to(term.lora_b.dtype).mul_(term.scale)
            if needs_dx:
                low_rank_dx = v @ a if low_rank_dx is None else low_rank_dx.addmm_(v, a)
        dx: Tensor | None = None
        scaled_term = next((t for t in terms if t.input_scale is not None), None)
        if needs_dx or scaled_term is not None:
            dx = _matmul_transposed(dy, weight, low_rank_dx)
        if scaled_term is not None:
            assert dx is not None and scaled_term.input_scale is not None
            found = term_grads[terms.index(scaled_term)]
            found["input_scale"] = _column_sums(dx, x, None, scaled_term.input_scale)
            dx = dx.mul_(scaled_term.input_scale.to(dx.dtype)) if needs_dx else None
        flat = [found.get(name) for found in term_grads for name in TERM_TENSORS]
        return None, dx, None, None, dresidual, *flat


def _terms(layout: Sequence[TermLayout], tensors: Sequence[Tensor | None]) -> list[LinearTerm]:
    size = len(TERM_TENSORS)
    terms = []
    for index, term in enumerate(layout):
        a, b, output_factor, output_scale, input_scale = tensors[size * index : size * (index + 1)]
        terms.append(
            LinearTerm(term.columns, a, b, term.scale, output_factor, output_scale, input_scale)
        )
    return terms


def _factor(term: LinearTerm) -> Tensor | None:
    return term.output_scale if term.output_factor is None else term.output_factor


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias + residual, in memory that nothing else uses."""
    if training_kernels.supports_matmul(x, weight):
        return training_kernels.matmul(x, weight, bias, residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def _matmul_transposed(dy: Tensor, weight: Tensor, addend: Tensor | None) -> Tensor:
    """Return dy @ weight + addend; `addend` may be overwritten."""
    if training_kernels.supports_matmul(dy, weight):
        return training_kernels.matmul(dy, weight, None, addend, transposed=True)
    return dy @ weight if addend is None else addend.addmm_(dy, weight)


def _add_low_rank(y: Tensor, x: Tensor, term: LinearTerm) -> Tensor | None:
    """Add scale * B (A x) to the columns of the term in place, and return A x."""
    if term.lora_a is None or term.lora_b is None:
        return None
    hidden = x @ term.lora_a.T.to(x.dtype)
    b = term.lora_b.to(x.dtype)
    columns = _column_view(y, term.columns)
    if columns.dim() == 2:
        columns.addmm_(hidden, b.T, alpha=term.scale)
    else:
        columns += (hidden @ b.T).view(columns.shape).mul_(term.scale)
    return hidden


def _scaled(y: Tensor, terms: Sequence[LinearTerm], factors: Sequence[Tensor | None]) -> Tensor:
    """Return a copy of `y` with the columns of each term multiplied by its factor."""
    if len(terms) == 1 and terms[0].columns is None:
        assert factors[0] is not None
        return y * factors[0].to(y.dtype)
    scaled = y.clone()
    for term, factor in zip(terms, factors, strict=True):
        if factor is not None:
            columns = _column_view(scaled, term.columns)
            columns *= factor.to(y.dtype).view(columns.shape[1:])
    return scaled


def _column_sums(dy: Tensor, y: Tensor, columns: OutputColumns | None, like: Tensor) -> Tensor:
    """Return the sums over the rows of dy * y in the columns, the gradient of their factor."""
    products = _column_view(dy, columns) * _column_view(y, columns)
    return products.sum(0, dtype=like.dtype).flatten()


def _select_columns(y: Tensor, columns: OutputColumns | None) -> Tensor:
    return _column_view(y, columns).flatten(1)


def _column_view(y: Tensor, columns: OutputColumns | None) -> Tensor:
    """Return a view of columns of `y`: (rows, columns), or (rows, runs, width) of several runs."""
    if columns is None:
        return y
    if columns.count == 1:
        return y[:, columns.offset : columns.offset + columns.width]
    runs = y[:, : columns.count * columns.stride].view(len(y), columns.count, columns.stride)
    return runs[:, :, columns.offset : columns.offset + columns.width]
