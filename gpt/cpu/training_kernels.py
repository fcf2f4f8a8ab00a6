"""What the library in C does for learning on a CPU: frozen bf16 weights, and attention's gradients.

Products forwards and backwards make panels of a weight that lies as it came, in passing, so nobody
holds a second copy; attention keeps what comes in and makes the probabilities again. Whoever calls
asks first whether it is served; the same in torch is in gpt/model/layers.py and
gpt/attention/varlen.py.
"""

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.cpu.kernels import MACHINES, library, machine
from gpt.cpu.packed_linear import COLUMNS

# What a product can end with, as the library counts it, where it knows the slope.
ACTIVATIONS = (None, "gelu", "gelu_tanh")
# For fewer rows the panels cost more than they save.
ROWS_MIN = 64

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _Families(ctypes.Structure):
    """As in gpt/cpu/src/varlen_attention.c."""

    _fields_ = (
        *((name, _Int) for name in ("sequences", "tokens", "heads", "groups", "width", "threads")),
        ("scale", ctypes.c_double),
        *((name, _Pointer) for name in ("start", "length", "parent", "past")),
    )


class _Tensors(ctypes.Structure):
    """As in gpt/cpu/src/varlen_attention.c."""

    _fields_ = tuple((name, _Pointer) for name in ("q", "k", "v", "dy", "out", "dk", "dv"))


def _learns(x: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and x.requires_grad
        and machine() == MACHINES[-1]
    )


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether the library is there, and has the product of such rows and its gradient."""
    return (
        _learns(x)
        and x.dim() == 2
        and len(x) >= ROWS_MIN
        and not weight.requires_grad
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and all(size % COLUMNS == 0 for size in weight.shape)
    )


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """The product, and what comes after it; `activation` is one of `ACTIVATIONS`."""
    y = _Product.apply(x, weight, bias, activation, residual)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


class _Product(torch.autograd.Function):
    """Keeps what the activation is taken of, and no rows if there is none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> Tensor:
        before = None if activation is None else x.new_empty(len(x), len(weight))
        ctx.activation = activation
        ctx.save_for_backward(weight, before)
        end = (bias, activation, residual)
        return _multiplied(x, weight, *end, before=before, turned=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, before = ctx.saved_tensors
        dy = grads[0].contiguous()
        if before is not None:
            found, dx = library(), torch.empty_like(dy)
            assert found is not None
            found.preamble_before_activation(
                *(before.data_ptr(), dy.data_ptr(), dx.data_ptr(), dy.numel()),
                *(ACTIVATIONS.index(ctx.activation), torch.get_num_threads()),
            )
            dy = dx
        dx = _multiplied(dy, weight, None, None, None, before=None, turned=True)
        return dx, None, None, None, grads[0] if ctx.needs_input_grad[4] else None


def _multiplied(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    *,
    before: Tensor | None,
    turned: bool,
) -> Tensor:
    """Rows times the weight's rows; `turned`: times its columns, as gradients go."""
    found, threads = library(), torch.get_num_threads()
    assert found is not None, "ask `multiplies` first"
    columns, channels = weight.shape[::-1] if turned else weight.shape
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    assert bias is None or bias.dtype == x.dtype
    assert residual is None or (residual.dtype == x.dtype and len(residual) == len(x))
    y, memory = x.new_empty(len(x), columns), x.new_empty(threads * channels * COLUMNS)
    found.preamble_multiply_by(
        *(weight.data_ptr(), channels, columns, turned, x.data_ptr(), len(x)),
        *(_address(bias), ACTIVATIONS.index(activation), _address(residual), y.data_ptr()),
        *(_address(before), threads, memory.data_ptr()),
    )
    return y


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def attends(q: Tensor, k: Tensor, batch: Batch, window: int | None) -> bool:
    """Whether the library is there, and has attention of such a batch and its gradients."""
    return (
        (_learns(q) or _learns(k))  # Of a learned prefix, in the first layer keys alone do.
        and q.shape[-1] % COLUMNS == 0
        and (window is None or window >= max(batch.contexts))
        # Gradients of a group are one thread's.
        and k.shape[1] >= torch.get_num_threads()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Whole sequences and their parents, without a pool."""
    return cast(Tensor, _Attention.apply(q, k, v, batch))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        ctx.save_for_backward(q, k, v)
        ctx.batch = batch
        y = torch.empty_like(q)
        _attended(batch, q, k, v, (None, y, None, None))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        made = [torch.empty_like(x) for x in (q, k, v)]
        _attended(ctx.batch, q, k, v, (grads[0].contiguous(), *made))
        return *made, None


def _attended(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, others: tuple[Tensor | None, ...]
) -> None:
    """`others`: what y gets, and what is made: y; or what q gets, what k gets, what v gets."""
    found = library()
    assert found is not None, "ask `attends` first"
    numbers = _numbers(batch)
    families = _Families(
        *(len(batch.lengths), len(q), q.shape[1], k.shape[1], q.shape[2], torch.get_num_threads()),
        q.shape[2] ** -0.5,
        *(row.data_ptr() for row in numbers),
    )
    tensors = _Tensors(*(_address(x) for x in (q, k, v, *others)))
    if found.preamble_attend_families(ctypes.byref(families), ctypes.byref(tensors)):
        raise MemoryError("there is no memory for attention's gradients; make batches smaller")


def _numbers(batch: Batch) -> Tensor:
    """Each sequence's start and length, its parent's start, and its past."""
    numbers = batch.kept.get(_numbers)
    if numbers is None:
        parents = batch.parents or (None,) * len(batch.lengths)
        starts = [0 if parent is None else batch.starts[parent] for parent in parents]
        rows = [batch.starts, batch.lengths, starts, batch.past]
        numbers = batch.kept[_numbers] = torch.tensor(rows)
    return cast(Tensor, numbers)
