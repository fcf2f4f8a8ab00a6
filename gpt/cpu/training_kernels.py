"""C kernels for training on a CPU: frozen bf16 linears and varlen attention, with backward passes.

The GEMMs of forward and backward pack panels of the weight on the fly, so no packed copy is stored.
Attention saves its inputs, and recomputes the probabilities in the backward pass. Callers must
check `supports_linear` or `supports_attention` first. If the result is False, they must use the
torch versions in gpt/model/linear.py and gpt/attention/varlen.py.
"""

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.cpu.kernels import ISA_LEVELS, isa_level, library
from gpt.cpu.packed_linear import PANEL_COLUMNS

# The activations with a backward pass in the library; the index is the library's number.
ACTIVATIONS = (None, "gelu", "gelu_tanh")
GATED_SILU = "gated_silu"  # A gated activation with a backward pass in the library.
# With fewer rows, packing the panels costs more time than it saves in the GEMM.
ROWS_MIN = 64

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _VarlenArgs(ctypes.Structure):
    """The struct VarlenArgs in gpt/cpu/src/varlen_attention.c."""

    _fields_ = (
        *((name, _Int) for name in ("sequences", "tokens", "heads", "groups", "width", "threads")),
        ("scale", ctypes.c_double),
        *((name, _Pointer) for name in ("start", "length", "parent", "past")),
    )


class _VarlenTensors(ctypes.Structure):
    """The struct VarlenTensors in gpt/cpu/src/varlen_attention.c."""

    _fields_ = tuple((name, _Pointer) for name in ("q", "k", "v", "dy", "out", "dk", "dv"))


def _has_backward(x: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and x.requires_grad
        and isa_level() == ISA_LEVELS[-1]
    )


def supports_linear(x: Tensor, weight: Tensor) -> bool:
    """Return whether the library supports this linear and its backward pass."""
    return _has_backward(x) and supports_matmul(x, weight)


def supports_matmul(x: Tensor, weight: Tensor) -> bool:
    """Return whether the library supports `matmul` of these rows and a frozen weight."""
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and isa_level() == ISA_LEVELS[-1]
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
    return _gemm(x, weight, bias, None, residual, pre_activation=None, transposed=transposed)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """Return activation(x @ weight.T + bias) + residual; `activation`: one of ACTIVATIONS."""
    y = _Linear.apply(x, weight, bias, activation, residual)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


class _Linear(torch.autograd.Function):
    """Autograd function of `linear`: saves the weight and the activation's input, but not `x`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> Tensor:
        pre_activation = None if activation is None else x.new_empty(len(x), len(weight))
        ctx.activation = activation
        ctx.save_for_backward(weight, pre_activation)
        epilogue = (bias, activation, residual)
        return _gemm(x, weight, *epilogue, pre_activation=pre_activation, transposed=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, pre_activation = ctx.saved_tensors
        dy = grads[0].contiguous()
        if pre_activation is not None:
            lib, dx = library(), torch.empty_like(dy)
            assert lib is not None
            lib.preamble_activation_backward(
                pre_activation.data_ptr(),
                dy.data_ptr(),
                dx.data_ptr(),
                dy.numel(),
                ACTIVATIONS.index(ctx.activation),
                torch.get_num_threads(),
            )
            dy = dx
        dx = _gemm(dy, weight, None, None, None, pre_activation=None, transposed=True)
        return dx, None, None, None, grads[0] if ctx.needs_input_grad[4] else None


def supports_activation(x: Tensor, activation: str) -> bool:
    """Return whether the library supports `apply_activation` of `x`, and its backward pass."""
    return activation in (*ACTIVATIONS[1:], GATED_SILU) and _has_backward(x)


def apply_activation(x: Tensor, activation: str) -> Tensor:
    """Return activation(x), or silu(gate) * up of the columns of gates, then ups."""
    return cast(Tensor, _Activation.apply(x, activation))  # type: ignore[no-untyped-call]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.activation = activation
        lib, threads = library(), torch.get_num_threads()
        assert lib is not None, "call supports_activation() first"
        if activation == GATED_SILU:
            y = x.new_empty(len(x), x.shape[1] // 2)
            lib.preamble_gated_silu(x.data_ptr(), y.data_ptr(), *y.shape, threads)
            return y
        y = torch.empty_like(x)
        number = ACTIVATIONS.index(activation)
        lib.preamble_activation(x.data_ptr(), y.data_ptr(), x.numel(), number, threads)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dy, dx = grads[0].contiguous(), torch.empty_like(x)
        lib, threads = library(), torch.get_num_threads()
        assert lib is not None
        addresses = x.data_ptr(), dy.data_ptr(), dx.data_ptr()
        if ctx.activation == GATED_SILU:
            lib.preamble_gated_silu_backward(*addresses, *dy.shape, threads)
        else:
            number = ACTIVATIONS.index(ctx.activation)
            lib.preamble_activation_backward(*addresses, x.numel(), number, threads)
        return dx, None


def supports_scale_backward(dy: Tensor) -> bool:
    """Return whether the library supports `scale_backward`."""
    return dy.dtype == torch.bfloat16 and dy.device.type == "cpu" and isa_level() == ISA_LEVELS[-1]


def scale_backward(dy: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return factor * dy, and the sums of dy * y over the rows in fp32.

    `factor` has one number for each column. Callers must check `supports_scale_backward` first.
    """
    lib = library()
    assert lib is not None, "call supports_scale_backward() first"
    dy, y, factor = dy.contiguous(), y.contiguous(), factor.to(dy.dtype).contiguous()
    scaled, sums = torch.empty_like(dy), dy.new_empty(dy.shape[1], dtype=torch.float32)
    addresses = [tensor.data_ptr() for tensor in (dy, y, factor, scaled, sums)]
    lib.preamble_scale_backward(*addresses, *dy.shape, torch.get_num_threads())
    return scaled, sums


def _gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    *,
    pre_activation: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Return activation(x @ weight.T + bias) + residual.

    `transposed`: compute x @ weight instead of x @ weight.T, for the gradient of the input.
    `pre_activation` receives the input of the activation.
    """
    lib, threads = library(), torch.get_num_threads()
    assert lib is not None, "call supports_linear() first"
    columns, channels = weight.shape[::-1] if transposed else weight.shape
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    assert bias is None or bias.dtype == x.dtype
    assert residual is None or (residual.dtype == x.dtype and len(residual) == len(x))
    y, scratch = x.new_empty(len(x), columns), x.new_empty(threads * channels * PANEL_COLUMNS)
    lib.preamble_gemm_unpacked(
        weight.data_ptr(),
        channels,
        columns,
        transposed,
        x.data_ptr(),
        len(x),
        _data_ptr(bias),
        ACTIVATIONS.index(activation),
        _data_ptr(residual),
        y.data_ptr(),
        _data_ptr(pre_activation),
        threads,
        scratch.data_ptr(),
    )
    return y


def _data_ptr(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def supports_attention(q: Tensor, k: Tensor, batch: Batch, window: int | None) -> bool:
    """Return whether the library supports attention of this batch and its backward pass."""
    return (
        # In the first layer of prefix tuning, only the keys and values need gradients.
        (_has_backward(q) or _has_backward(k))
        and q.shape[-1] % PANEL_COLUMNS == 0
        and (window is None or window >= max(batch.context_lengths))
        # Each thread computes the gradients of whole KV heads. With fewer KV heads than threads,
        # some threads would have no work.
        and k.shape[1] >= torch.get_num_threads()
    )


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Compute attention of complete sequences, without a KV pool.

    A sequence may have a parent sequence, whose tokens it sees before its own tokens.
    """
    return cast(Tensor, _VarlenAttention.apply(q, k, v, batch))  # type: ignore[no-untyped-call]


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        ctx.save_for_backward(q, k, v)
        ctx.batch = batch
        y = torch.empty_like(q)
        _call_attention(batch, q, k, v, (None, y, None, None))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        input_grads = [torch.empty_like(x) for x in (q, k, v)]
        _call_attention(ctx.batch, q, k, v, (grads[0].contiguous(), *input_grads))
        return *input_grads, None


def _call_attention(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, grad_and_outputs: tuple[Tensor | None, ...]
) -> None:
    """Call the library, which writes the attention output or the gradients.

    `grad_and_outputs`: (None, y, None, None) for forward, (dy, dq, dk, dv) for backward.
    """
    lib = library()
    assert lib is not None, "call supports_attention() first"
    index_arrays = _sequence_arrays(batch)
    args = _VarlenArgs(
        len(batch.query_lengths),
        len(k),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        torch.get_num_threads(),
        q.shape[2] ** -0.5,
        *(array.data_ptr() for array in index_arrays),
    )
    tensors = _VarlenTensors(*(_data_ptr(x) for x in (q, k, v, *grad_and_outputs)))
    if lib.preamble_varlen_attention(ctypes.byref(args), ctypes.byref(tensors)):
        raise MemoryError(
            "the C library could not allocate the buffers of attention; use smaller micro-batches"
        )


def _sequence_arrays(batch: Batch) -> Tensor:
    """Return an int64 tensor (4, sequences): start, length, start of the parent, past length.

    A start is the row of the sequence's first token in q, k and v. For a sequence without a parent,
    the past length is 0 and the start of the parent is not used.
    """
    arrays = batch.attention_metadata.get(_sequence_arrays)
    if arrays is None:
        past_rows = [batch.past_row(sequence) for sequence in range(len(batch.query_lengths))]
        rows = [batch.query_starts, batch.query_lengths, past_rows, batch.past_lengths]
        arrays = batch.attention_metadata[_sequence_arrays] = torch.tensor(rows)
    return cast(Tensor, arrays)
