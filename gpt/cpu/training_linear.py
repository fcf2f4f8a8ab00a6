"""Linears with a frozen bf16 weight in training on a CPU, with backward passes.

The GEMMs of forward and backward pack panels of the weight on the fly, so no packed copy is stored.
They compute the low-rank product of an adapter as further channels of the weight. Callers must
check the `supports` functions first. If the result is False, they must use the torch versions in
gpt/model/linear.py and gpt/model/adapted_linear_training.py.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from gpt.cpu.kernels import library
from gpt.cpu.packed_linear import PANEL_COLUMNS
from gpt.cpu.training_kernels import (
    ACTIVATIONS,
    GATED_SILU,
    activation_backward,
    data_ptr,
    gated_silu,
    gated_silu_backward,
    scale_backward,
    supports_rows,
)
from gpt.linear_adapter import LinearTerm, OutputColumns

# The library computes low-rank products whose rank is a multiple of this number.
RANK_MULTIPLE = 16
# With fewer rows, packing the panels costs more time than it saves in the GEMM.
ROWS_MIN = 64


class _ColumnScaling(ctypes.Structure):
    """The struct ColumnScaling in gpt/cpu/src/gemm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("factors", "late_bias", "unscaled")),
        *((name, ctypes.c_void_p) for name in ("multiplied", "sums")),
    )


class _LinearEpilogue(ctypes.Structure):
    """The struct LinearEpilogue in gpt/cpu/src/training_linear.c."""

    _fields_ = (
        ("activation", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "scaling")),
    )


class _LowRankProduct(ctypes.Structure):
    """The struct LowRankProduct in gpt/cpu/src/training_linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("projection", "expansion", "panel_ranks")),
        ("rank", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("u", ctypes.c_void_p),
    )

    @classmethod
    def create(
        cls,
        projection: Tensor,
        expansion: Tensor,
        layout: "_LinearLayout",
        u: Tensor,
        panel_ranks: Tensor | None,
    ) -> "_LowRankProduct":
        """Return the addresses of contiguous bf16 matrices, and of u, which the call stores."""
        addresses = projection.data_ptr(), expansion.data_ptr(), data_ptr(panel_ranks)
        return cls(*addresses, layout.rank, layout.scale, u.data_ptr())


def supports_matmul(x: Tensor, weight: Tensor) -> bool:
    """Return whether the library supports `matmul` and `linear` with a frozen weight."""
    return (
        supports_rows(x)
        and x.dim() == 2
        and len(x) >= ROWS_MIN
        and not weight.requires_grad
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and all(size % PANEL_COLUMNS == 0 for size in weight.shape)
    )


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return x @ weight.T + bias + residual, or x @ weight + residual if `transposed`.

    The call has no backward pass; callers must check `supports_matmul` first.
    """
    return _gemm(x, weight, bias, residual, transposed=transposed)


def supports_terms(terms: Sequence[LinearTerm]) -> bool:
    """Return whether `linear` supports the terms of an adapter."""
    if any(term.input_dropout is not None or term.bottleneck is not None for term in terms):
        return False
    has_output_scale = any(term.output_scale is not None for term in terms)
    has_output_factor = any(term.output_factor is not None for term in terms)
    low_rank = [term for term in terms if term.lora_a is not None]
    input_scales = sum(term.input_scale is not None for term in terms)
    return (
        # The bias is added either before the factors or behind them.
        not (has_output_scale and has_output_factor)
        and len({term.scale for term in low_rank}) <= 1
        # A low-rank product reads the rows without the scale.
        and input_scales <= (0 if low_rank else 1)
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    terms: Sequence[LinearTerm] = (),
) -> Tensor:
    """Return activation(x @ weight.T + bias) + residual, with the terms of an adapter of all rows.

    `activation`: one of ACTIVATIONS, or GATED_SILU. The tensors of the terms get gradients. Callers
    must check `supports_matmul` and `supports_terms` first.
    """
    input_scale = next((term.input_scale for term in terms if term.input_scale is not None), None)
    layout = _LinearLayout.create(activation, terms, len(weight))
    tensors = [
        tensor for term in terms for tensor in (term.lora_a, term.lora_b, term.column_factor)
    ]
    arguments = x, weight, bias, residual, layout, input_scale, *tensors
    return cast(Tensor, _Linear.apply(*arguments))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _LinearLayout:
    """The activation of a linear, and the terms of an adapter as one A, one B and one factor.

    A has the shape (ranks, channels), B (columns, ranks), and the factor (columns). In the columns
    that a term does not change, B is 0 and the factor is 1. The tensors of the terms are three for
    each term, of which some are None: A, B and the factor.
    """

    activation: str | None
    columns: tuple[OutputColumns | None, ...]  # Those of each term.
    ranks: tuple[int, ...]  # 0: the term has no low-rank product.
    has_factors: bool
    scales_bias: bool  # False: the bias is added behind the factors.
    scale: float  # Of the low-rank products.
    linear_columns: int

    @classmethod
    def create(
        cls, activation: str | None, terms: Sequence[LinearTerm], linear_columns: int
    ) -> "_LinearLayout":
        return cls(
            activation,
            tuple(term.columns for term in terms),
            tuple(0 if term.lora_a is None else len(term.lora_a) for term in terms),
            any(term.column_factor is not None for term in terms),
            all(term.output_factor is None for term in terms),
            next((term.scale for term in terms if term.lora_a is not None), 1.0),
            linear_columns,
        )

    @property
    def rank(self) -> int:
        """The sum of the ranks, up to a multiple of RANK_MULTIPLE."""
        return -(-sum(self.ranks) // RANK_MULTIPLE) * RANK_MULTIPLE

    def matrices(self, tensors: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B in the dtype of `like`, with zeros after the last rank."""
        a, b = tensors[:2]
        if self.ranks == (self.rank,) and self.columns[0] is None:
            assert a is not None and b is not None
            return a.to(like.dtype).contiguous(), b.to(like.dtype).contiguous()
        a = like.new_zeros(self.rank, like.shape[1])
        b = like.new_zeros(self.linear_columns, self.rank)
        for target, tensor in zip(self.views(a, b, None), tensors, strict=True):
            if target is not None and tensor is not None:
                target.copy_(tensor.view(target.shape))
        return a, b

    def factors(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return the factor of each column in fp32; None: the terms have no factors."""
        if not self.has_factors:
            return None
        factors = torch.ones(self.linear_columns)
        for target, tensor in zip(self.views(None, None, factors), tensors, strict=True):
            if target is not None and tensor is not None:
                target.copy_(tensor.view(target.shape))
        return factors

    def views(
        self, a: Tensor | None, b: Tensor | None, factors: Tensor | None
    ) -> list[Tensor | None]:
        """Return the views of the terms' tensors, three for each term; None: it has no such tensor.

        The shapes are (rank, channels), (runs, width, rank) and (runs, width, 1).
        """
        views: list[Tensor | None] = []
        end = 0
        for columns, rank in zip(self.columns, self.ranks, strict=True):
            ranks, end = slice(end, end + rank), end + rank
            views += [
                None if a is None or not rank else a[ranks],
                None if b is None or not rank else _row_runs(b, columns)[..., ranks],
                None if factors is None else _row_runs(factors.unsqueeze(1), columns),
            ]
        return views


@lru_cache(maxsize=1024)  # By linear shape, activation and terms: a few for each model.
def _panel_ranks(layout: _LinearLayout) -> Tensor | None:
    """Return for each panel of columns: its first rank with nonzero B, and the number of ranks.

    Both are multiples of RANK_MULTIPLE. None: each panel has all ranks.
    """
    if len(layout.ranks) <= 1 or not layout.rank:
        return None
    has_rank = torch.zeros(layout.linear_columns, layout.rank, dtype=torch.bool)
    for view in layout.views(None, has_rank, None):
        if view is not None:
            view.fill_(True)
    blocks = has_rank.view(-1, PANEL_COLUMNS, layout.rank // RANK_MULTIPLE, RANK_MULTIPLE)
    indices = blocks.any(3).any(1).int()
    first = indices.argmax(1)
    last = indices.shape[1] - indices.flip(1).argmax(1)
    count = torch.where(indices.any(1), last - first, 0)
    return torch.stack([first, count], dim=1) * RANK_MULTIPLE


def _row_runs(matrix: Tensor, columns: OutputColumns | None) -> Tensor:
    """Return a view of the rows of a linear's columns: (runs, width, ranks)."""
    if columns is None:
        return matrix.unsqueeze(0)
    if columns.count == 1:
        return matrix[columns.offset : columns.offset + columns.width].unsqueeze(0)
    run_rows = matrix[: columns.count * columns.stride]
    runs = run_rows.view(columns.count, columns.stride, matrix.shape[1])
    return runs[:, columns.offset : columns.offset + columns.width]


class _Linear(torch.autograd.Function):
    """Autograd function of `linear`: the gradients of x, of the residual, and of the terms.

    It saves x if the gradient of A or of the input scale needs it, u = scale * A x, and the product
    before the factors and the activation, if there are any of these.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        layout: _LinearLayout,
        *input_scale_and_tensors: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        input_scale, *tensors = input_scale_and_tensors
        a = b = u = low_rank = None
        if layout.rank:
            a, b = layout.matrices(tensors, x)
            u = x.new_empty(len(x), layout.rank)
            low_rank = _LowRankProduct.create(a, b, layout, u, _panel_ranks(layout))
        if input_scale is not None:
            input_scale = input_scale.float().contiguous()
        factors = layout.factors(tensors)
        late_bias = None if layout.scales_bias else bias
        early_bias = bias if layout.scales_bias else None
        multiply = partial(_gemm, x, weight, early_bias, input_scale=input_scale, low_rank=low_rank)
        if layout.activation == GATED_SILU:
            unscaled = multiply()
            y = gated_silu(unscaled, factors, late_bias)
            y = y if residual is None else y.add_(residual)
        else:
            unscaled = None
            saves_input = layout.activation is not None and any(ctx.needs_input_grad)
            if factors is not None or saves_input:
                unscaled = x.new_empty(len(x), len(weight))
            scaling = _column_scaling(factors=factors, late_bias=late_bias, unscaled=unscaled)
            y = multiply(residual, layout.activation, scaling=scaling)
        ctx.layout = layout
        ctx.shapes = [None if tensor is None else tensor.shape for tensor in tensors]
        saved_x = x if u is not None or ctx.needs_input_grad[5] else None
        saved = saved_x, weight, input_scale, a, b, u, unscaled, factors, late_bias
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, input_scale, a, b, u, unscaled, factors, late_bias = ctx.saved_tensors
        layout: _LinearLayout = ctx.layout
        dy, dfactors, da, db = grads[0].contiguous(), None, None, None
        if layout.activation == GATED_SILU:
            dy, dfactors = gated_silu_backward(unscaled, dy, factors, late_bias)
        elif factors is not None:
            dy, dfactors = scale_backward(
                dy, unscaled, factors, late_bias=late_bias, activation=layout.activation
            )
        elif layout.activation is not None:
            dy = activation_backward(unscaled, dy, layout.activation)
        dx: Tensor | None = None
        dinput_scale: Tensor | None = None
        needs_dx, needs_dinput_scale = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        if u is not None:
            du = torch.empty_like(u)
            low_rank = _LowRankProduct.create(b, a, layout, du, None)
            # Without columns, only du is computed.
            needed_weight = weight if needs_dx else weight[:, :0]
            dx = _gemm(dy, needed_weight, transposed=True, low_rank=low_rank)
            da = _row_products(du, x, None, transposed=False)
            db = _row_products(u, dy, _panel_ranks(layout), transposed=True)
        elif needs_dx or needs_dinput_scale:
            if needs_dinput_scale:
                dinput_scale = torch.zeros_like(input_scale)
            multiplied = x if needs_dinput_scale else None
            scaling = _column_scaling(factors=input_scale, multiplied=multiplied, sums=dinput_scale)
            dx = _gemm(dy, weight, scaling=scaling, transposed=True)
        dresidual = grads[0] if ctx.needs_input_grad[3] else None
        term_grads = [
            None if grad is None or shape is None else grad.reshape(shape)
            for grad, shape in zip(layout.views(da, db, dfactors), ctx.shapes, strict=True)
        ]
        dx = dx if needs_dx else None
        return dx, None, None, dresidual, None, dinput_scale, *term_grads


def _row_products(u: Tensor, y: Tensor, panel_ranks: Tensor | None, *, transposed: bool) -> Tensor:
    """Return u.T @ y in fp32, or its transpose: the gradient of a low-rank matrix.

    With `panel_ranks`, the other ranks of each panel's columns have no defined values.
    """
    lib, rank, columns = library(), u.shape[1], y.shape[1]
    assert lib is not None, "call supports_matmul() first"
    shape = (columns, rank) if transposed else (rank, columns)
    grad = y.new_empty(shape, dtype=torch.float32)
    lib.preamble_low_rank_gradient(
        u.data_ptr(),
        y.data_ptr(),
        grad.data_ptr(),
        len(y),
        rank,
        columns,
        transposed,
        data_ptr(panel_ranks),
        torch.get_num_threads(),
    )
    return grad


def _column_scaling(**tensors: Tensor | None) -> _ColumnScaling | None:
    """Return the addresses of the tensors of a scaling, by name; None: there are no tensors."""
    addresses = {name: data_ptr(tensor) for name, tensor in tensors.items() if tensor is not None}
    return _ColumnScaling(**addresses) if addresses else None


def _gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    input_scale: Tensor | None = None,
    scaling: _ColumnScaling | None = None,
    transposed: bool = False,
    low_rank: _LowRankProduct | None = None,
) -> Tensor:
    """Return activation(scaling((input_scale * x) @ weight.T + bias)) + residual.

    `transposed`: compute x @ weight instead of x @ weight.T, for the gradient of the input.
    `low_rank` is added to the product.
    """
    lib = library()
    assert lib is not None, "call supports_matmul() first"
    columns, channels = weight.shape[::-1] if transposed else weight.shape
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    assert bias is None or bias.dtype == x.dtype
    assert residual is None or (residual.dtype == x.dtype and len(residual) == len(x))
    y = x.new_empty(len(x), columns)
    epilogue = _LinearEpilogue(
        ACTIVATIONS.index(activation),
        data_ptr(bias),
        data_ptr(residual),
        None if scaling is None else ctypes.addressof(scaling),
    )
    lib.preamble_gemm_unpacked(
        weight.data_ptr(),
        channels,
        columns,
        transposed,
        x.data_ptr(),
        data_ptr(input_scale),
        len(x),
        ctypes.byref(epilogue),
        y.data_ptr(),
        torch.get_num_threads(),
        None if low_rank is None else ctypes.byref(low_rank),
    )
    return y
