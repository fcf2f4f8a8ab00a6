"""C kernels for training on a CPU: activations, RMSNorm and varlen attention, with backward passes.

Attention saves its inputs, and recomputes the probabilities in the backward pass. Callers must
check the `supports` functions first. If the result is False, they must use the torch versions in
gpt/model and gpt/attention/varlen.py. The linears are in gpt/cpu/training_linear.py.
"""

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.cpu.kernels import ISA_LEVELS, isa_level, library
from gpt.cpu.packed_linear import PANEL_COLUMNS

# The activations that the epilogue of a GEMM can compute; the index is the library's number.
ACTIVATIONS = (None, "gelu", "gelu_tanh")
GATED_SILU = "gated_silu"  # A gated activation with a backward pass in the library.

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _QkvTensors(ctypes.Structure):
    """The struct QkvTensors in gpt/cpu/src/training_qkv.c."""

    _fields_ = (
        *((name, _Int) for name in ("tokens", "groups", "queries", "width", "threads")),
        ("rotary_pairs", _Int),
        *((name, _Pointer) for name in ("cos", "sin", "qkv", "q", "k", "v")),
    )


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


def supports_rows(x: Tensor) -> bool:
    """Return whether the library supports the dtype and device of `x` on this machine."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and isa_level() == ISA_LEVELS[-1]


def supports_activation(x: Tensor, activation: str) -> bool:
    """Return whether the library supports `apply_activation` of `x`, and its backward pass."""
    return activation in (*ACTIVATIONS[1:], GATED_SILU) and supports_rows(x)


def apply_activation(x: Tensor, activation: str) -> Tensor:
    """Return activation(x), or silu(gate) * up of the columns of gates, then ups."""
    return cast(Tensor, _Activation.apply(x, activation))  # type: ignore[no-untyped-call]


def activation_backward(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """Return the gradient of the input of `apply_activation`, from that of its output."""
    if activation == GATED_SILU:
        return gated_silu_backward(x, dy)[0]
    dy, dx = dy.contiguous(), torch.empty_like(x)
    lib, threads = library(), torch.get_num_threads()
    assert lib is not None, "call supports_activation() first"
    addresses = x.data_ptr(), dy.data_ptr(), dx.data_ptr()
    number = ACTIVATIONS.index(activation)
    lib.preamble_activation_backward(*addresses, x.numel(), number, threads)
    return dx


def gated_silu(x: Tensor, factors: Tensor | None = None, late_bias: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of the columns of factors * x + late_bias: gates, then ups.

    The factors are in fp32. The call has no backward pass; callers must check
    `supports_activation` first.
    """
    x, y = x.contiguous(), x.new_empty(len(x), x.shape[1] // 2)
    lib = library()
    assert lib is not None, "call supports_activation() first"
    addresses = (data_ptr(tensor) for tensor in (x, factors, late_bias, y))
    lib.preamble_gated_silu(*addresses, *y.shape, torch.get_num_threads())
    return y


def gated_silu_backward(
    x: Tensor, dy: Tensor, factors: Tensor | None = None, late_bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x` and of the factors, from that of the output of `gated_silu`.

    The gradient of the factors is in fp32; None: there are no factors.
    """
    dy, dx = dy.contiguous(), torch.empty_like(x)
    dfactors = None if factors is None else torch.empty_like(factors)
    lib = library()
    assert lib is not None, "call supports_activation() first"
    addresses = (data_ptr(tensor) for tensor in (x, factors, late_bias, dy, dx, dfactors))
    lib.preamble_gated_silu_backward(*addresses, *dy.shape, torch.get_num_threads())
    return dx, dfactors


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.activation = activation
        if activation == GATED_SILU:
            return gated_silu(x)
        lib, threads = library(), torch.get_num_threads()
        assert lib is not None, "call supports_activation() first"
        y = torch.empty_like(x)
        number = ACTIVATIONS.index(activation)
        lib.preamble_activation(x.data_ptr(), y.data_ptr(), x.numel(), number, threads)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return activation_backward(x, grads[0], ctx.activation), None


def supports_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether the library supports `rms_norm` of `x`, and its backward pass."""
    return supports_rows(x) and not weight.requires_grad and weight.dtype == x.dtype


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm of the last dimension of `x`; `weight` is frozen."""
    return cast(Tensor, _RmsNorm.apply(x, weight, epsilon))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon = torch.tensor([epsilon], dtype=torch.float32)
        return _call_rms_norm("preamble_rms_norm", x, weight, ctx.epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        return _call_rms_norm("preamble_rms_norm_backward", x, weight, ctx.epsilon, dy), None, None


def _call_rms_norm(function: str, x: Tensor, *inputs: Tensor) -> Tensor:
    lib, y = library(), torch.empty_like(x)
    assert lib is not None, "call supports_rms_norm() first"
    addresses = [tensor.data_ptr() for tensor in (x, *inputs, y)]
    rows = x.numel() // x.shape[-1]
    getattr(lib, function)(*addresses, rows, x.shape[-1], torch.get_num_threads())
    return y


def scale_backward(
    dy: Tensor,
    y: Tensor,
    factor: Tensor,
    *,
    late_bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the factor, from that of activation(factor * y + late_bias).

    `factor` has one number for each column; its gradient is in fp32. `activation`: one of
    ACTIVATIONS. Callers must check `supports_rows` first.
    """
    lib = library()
    assert lib is not None, "call supports_rows() first"
    dy, y, factor = dy.contiguous(), y.contiguous(), factor.float().contiguous()
    scaled, sums = torch.empty_like(dy), dy.new_empty(dy.shape[1], dtype=torch.float32)
    lib.preamble_scale_backward(
        *(data_ptr(x) for x in (dy, y, factor, late_bias)),
        ACTIVATIONS.index(activation),
        *(data_ptr(x) for x in (scaled, sums)),
        *dy.shape,
        torch.get_num_threads(),
    )
    return scaled, sums


def data_ptr(x: Tensor | None) -> int | None:
    """Return the address of a tensor; None: there is no tensor."""
    return None if x is None else x.data_ptr()


def supports_split_qkv(grouped_qkv: Tensor) -> bool:
    """Return whether the library supports `split_qkv`, and its backward pass."""
    return supports_rows(grouped_qkv)


def split_qkv(
    grouped_qkv: Tensor, cos_sin: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (T, G, H / G + 2, D) into queries (T, H, D), keys (T, G, D) and values (T, G, D).

    `cos_sin` rotates the queries and keys, whose rotary embedding is not interleaved; it has their
    dtype, and is contiguous. None: they are not rotated. The outputs are copies. Callers must check
    `supports_split_qkv` first.
    """
    cos, sin = cos_sin or (None, None)
    qkv = _SplitAndRotate.apply(grouped_qkv, cos, sin)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], qkv)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped_qkv: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, groups, heads, d = grouped_qkv.shape
        q = grouped_qkv.new_empty(tokens, groups * (heads - 2), d)
        k, v = (grouped_qkv.new_empty(tokens, groups, d) for _ in range(2))
        ctx.save_for_backward(cos, sin)
        _call_split_qkv("preamble_split_qkv", grouped_qkv.contiguous(), (q, k, v), (cos, sin))
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        tokens, groups, d = dk.shape
        dqkv = dk.new_empty(tokens, groups, dq.shape[1] // groups + 2, d)
        _call_split_qkv("preamble_split_qkv_backward", dqkv, (dq, dk, dv), ctx.saved_tensors)
        return dqkv, None, None


def _call_split_qkv(
    function: str,
    qkv: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    cos_sin: tuple[Tensor | None, Tensor | None],
) -> None:
    lib, cos = library(), cos_sin[0]
    assert lib is not None, "call supports_split_qkv() first"
    tokens, groups, heads, d = qkv.shape
    sizes = tokens, groups, heads - 2, d, torch.get_num_threads()
    pairs = 0 if cos is None else cos.shape[1]
    tensors = _QkvTensors(*sizes, pairs, *(data_ptr(x) for x in (*cos_sin, qkv, *parts)))
    getattr(lib, function)(ctypes.byref(tensors))


def supports_attention(q: Tensor, k: Tensor, batch: Batch, window: int | None) -> bool:
    """Return whether the library supports attention of this batch and its backward pass."""
    return (
        supports_rows(q)
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
    tensors = _VarlenTensors(*(data_ptr(x) for x in (q, k, v, *grad_and_outputs)))
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
