"""Packed bf16 linear layers on a CPU: GEMM fused with norm, bias, activation and residual.

`Fp32PackedLinear` is a simpler form in fp32, for experts.

The C code supports CPUs with AVX512-bf16 (gpt/cpu/src/gemm_bf16.c) and CPUs with only AVX2
(gpt/cpu/src/gemm_avx2.c); `supports_weight` checks the CPU and the weight. The GEMM can apply a
norm to its input rows, and bias, activation and residual to its outputs before it stores them.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu.kernels import (
    INT,
    ISA_LEVELS,
    KEEP_GIL_ELEMENTS_MAX,
    KEEP_GIL_ROWS_MAX,
    POINTER,
    isa_level,
    library,
    library_keeping_gil,
)

# Output columns per panel of the packed weight (COLUMNS in gpt/cpu/src/packed_weight.h). A panel of
# a gated weight has 16 gate columns and 16 up columns.
PANEL_COLUMNS = 32
# The activations of the library; the index is the library's number of an activation.
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu2", "relu", "quick_gelu")
# Name prefix of gated activations, which compute activation(gate) * up. The first half of a gated
# weight's columns is gate, the second half is up.
GATED_PREFIX = "gated_"


class PackedWeight(ctypes.Structure):
    """The struct PackedWeight in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("panels", POINTER),
        *((name, INT) for name in ("channels", "columns", "fp32_output", "gated")),
        ("scales", POINTER),
        *((name, ctypes.c_double) for name in ("limit", "offset")),
        ("fp32", INT),
    )


class NormArgs(ctypes.Structure):
    """The struct NormArgs in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("scale", POINTER),
        ("shift", POINTER),
        ("epsilon", ctypes.c_double),
        ("rms", INT),
    )


class AdaptedLinear(ctypes.Structure):
    """The struct AdaptedLinear in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("rank", INT),
        *((name, POINTER) for name in ("a", "scales")),
        ("terms", INT),
        ("term_array", POINTER),
        *((name, POINTER) for name in ("factors", "output_scales", "input_scales")),
    )


class _RowAdaptersArgs(ctypes.Structure):
    """The struct RowAdapters in gpt/cpu/src/packed_weight.h."""

    _fields_ = (
        ("rows", POINTER),
        *((name, INT) for name in ("count", "linear")),
        ("adapters", POINTER),
    )


class GateLimits(NamedTuple):
    """What a gated weight computes before and after the activation of the gate.

    gate is at most `limit`, and up is at least -limit and at most limit; 0: no limit. `offset` is
    added to up.
    """

    limit: float = 0.0
    offset: float = 0.0


NO_LIMITS = GateLimits()


def supports_weight(weight: Tensor) -> bool:
    """Return whether the library is available and supports this weight."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.shape[1] % 2 == 0
        and isa_level() in ISA_LEVELS[1:]
    )


def supports_fp32_weight(weight: Tensor) -> bool:
    """Return whether the library is available and supports this weight in `Fp32PackedLinear`."""
    is_fp32_on_cpu = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_fp32_on_cpu and isa_level() in ISA_LEVELS[1:]


def packed_numel(weight: Tensor, *, gated: bool = False) -> int:
    """Return the number of elements of a weight in the panels of a bf16 or fp32 linear."""
    columns, channels = weight.shape
    columns //= 1 + gated
    return -(-columns * (1 + gated) // PANEL_COLUMNS) * PANEL_COLUMNS * channels


class CpuNorm:
    """The parameters of a LayerNorm or RMSNorm for the C library."""

    def __init__(self, scale: Tensor, shift: Tensor | None, epsilon: float, *, rms: bool) -> None:
        # This object keeps the tensors allocated, because the library gets their addresses.
        self._tensors = [x.detach().float().contiguous() for x in (scale, shift) if x is not None]
        addresses = [x.data_ptr() for x in self._tensors]
        shift_address = addresses[1] if shift is not None else None
        self.norm_args = NormArgs(addresses[0], shift_address, epsilon, rms)


class RowAdapters:
    """The adapters of the rows of a batch, for one GEMM or for several."""

    def __init__(
        self, rows: Tensor, adapters: "Sequence[AdaptedLinear | ctypes.Array[AdaptedLinear]]"
    ) -> None:
        """`rows`: (batch rows,) the index of each row's adapter in `adapters`, or -1 (int64).

        An adapter is one linear, or the linears of several GEMMs.
        """
        self._rows = rows
        self._adapters = adapters
        self._pointers = (POINTER * len(adapters))(*map(ctypes.addressof, adapters))
        self.args = _RowAdaptersArgs(
            rows.data_ptr(), len(adapters), 0, ctypes.addressof(self._pointers)
        )


class PackedLinear:
    """A linear whose weight, of shape (output columns, input channels), is packed in panels.

    The output of an input row does not depend on the other rows, bit for bit.
    """

    def __init__(
        self, weight: Tensor, memory: Tensor, *, fp32_output: bool = False, gated: bool = False
    ) -> None:
        """Pack `weight` into `memory` (`packed_numel` elements), which this object references.

        `fp32_output`: whether the output is fp32; otherwise it is rounded to the weight's dtype.
        `gated`: whether the first half of the columns is the gate of the second half.
        """
        lanes, channels = PANEL_COLUMNS // (1 + gated), weight.shape[1]
        halves = weight.detach().view(1 + gated, -1, channels)
        padded = F.pad(halves, (0, 0, 0, -halves.shape[1] % lanes))
        pairs = padded.view(1 + gated, -1, lanes, channels // 2, 2).permute(1, 3, 0, 2, 4)
        memory.view(pairs.shape).copy_(pairs)
        self._set_weight(weight, memory, None, fp32_output=fp32_output, gated=gated)

    def _set_weight(
        self,
        weight: Tensor,
        memory: Tensor,
        scales: Tensor | None,
        *,
        fp32_output: bool,
        gated: bool,
    ) -> None:
        """Set the weight, which is packed in `memory`.

        An int8 weight has one scale per column; for a bf16 weight, `scales` is None.
        """
        self.input_dtype = weight.dtype
        self._dtype = torch.float32 if fp32_output else weight.dtype
        self._columns = weight.shape[0] // (1 + gated)
        # This object keeps the tensors allocated, because the library gets their addresses.
        self._memory = memory
        self._scales = scales
        self.numel = memory.numel()
        self.nbytes = memory.nbytes + (0 if scales is None else scales.nbytes)
        self.weight_args = PackedWeight(
            memory.data_ptr(),
            weight.shape[1],
            self._columns,
            fp32_output,
            gated,
            None if scales is None else scales.data_ptr(),
        )
        lib = library()
        assert lib is not None, "call supports_weight() first"
        self._gemm = lib.preamble_gemm
        keeps_gil = memory.numel() <= KEEP_GIL_ELEMENTS_MAX
        self._gemm_keeping_gil = library_keeping_gil().preamble_gemm if keeps_gil else self._gemm
        self._gemm_argmax = lib.preamble_gemm_argmax

    @property
    def gate_limits(self) -> GateLimits:
        return GateLimits(self.weight_args.limit, self.weight_args.offset)

    def use_gate_limits(self, limits: GateLimits) -> None:
        """Apply `limits` to the outputs of a gated weight."""
        assert self.weight_args.gated or limits == NO_LIMITS
        self.weight_args.limit, self.weight_args.offset = limits

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        *,
        norm: CpuNorm | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Return activation(norm(x) @ weight.T + bias) + residual; None omits an operation.

        `adapters` change the rows on which they act (gpt/cpu/packed_adapter.py).
        """
        x, rows, weight_args = x.contiguous(), x.shape[0], self.weight_args
        if residual is not None:
            residual = residual.contiguous()
        assert x.dtype == self.input_dtype and x.shape[1] == weight_args.channels
        assert bias is None or bias.dtype == x.dtype
        assert residual is None or (residual.dtype == x.dtype and residual.shape[0] == rows)
        y = torch.empty((rows, self._columns), dtype=self._dtype)
        gemm = self._gemm_keeping_gil if rows <= KEEP_GIL_ROWS_MAX else self._gemm
        gemm(
            ctypes.byref(weight_args),
            x.data_ptr(),
            rows,
            None if bias is None else bias.data_ptr(),
            activation_code(activation, gated=bool(weight_args.gated)),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            None if norm is None else ctypes.byref(norm.norm_args),
            None if adapters is None else ctypes.byref(adapters.args),
        )
        return y

    def matmul_argmax(self, x: Tensor, norm: CpuNorm | None, columns: int) -> Tensor | None:
        """Return the index of each row's largest output in the first `columns` columns.

        If several outputs are equally large, return the lowest index. Return None if any output is
        not finite.
        """
        x, rows = x.contiguous(), x.shape[0]
        indices = torch.empty(rows, dtype=torch.int64)
        full_args = self.weight_args
        weight_args = PackedWeight(
            full_args.panels,
            full_args.channels,
            columns,
            full_args.fp32_output,
            full_args.gated,
            full_args.scales,
        )
        has_nonfinite = self._gemm_argmax(
            ctypes.byref(weight_args),
            x.data_ptr(),
            rows,
            None if norm is None else ctypes.byref(norm.norm_args),
            indices.data_ptr(),
            torch.get_num_threads(),
        )
        return None if has_nonfinite else indices


class Fp32PackedLinear(PackedLinear):
    """A linear with an fp32 weight in packed panels, for fp32 rows; no norm, no residual."""

    def __init__(self, weight: Tensor, memory: Tensor, *, gated: bool = False) -> None:
        """Pack `weight` into `memory` (`packed_numel` elements), which this object references."""
        lanes, channels = PANEL_COLUMNS // (1 + gated), weight.shape[1]
        halves = weight.detach().view(1 + gated, -1, channels)
        padded = F.pad(halves, (0, 0, 0, -halves.shape[1] % lanes))
        panels = padded.view(1 + gated, -1, lanes, channels).permute(1, 3, 0, 2)
        memory.view(panels.shape).copy_(panels)
        self._set_weight(weight, memory, None, fp32_output=True, gated=gated)
        self.weight_args.fp32 = True

    def unpacked(self) -> Tensor:
        """Return a copy of the weight, (output columns, input channels)."""
        halves, channels = 1 + self.weight_args.gated, int(self.weight_args.channels)
        panels = self._memory.view(-1, channels, halves, PANEL_COLUMNS // halves)
        columns = panels.permute(2, 0, 3, 1).reshape(halves, -1, channels)[:, : self._columns]
        return columns.reshape(-1, channels)

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        *,
        norm: CpuNorm | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        has_unsupported = residual is not None or norm is not None or adapters is not None
        assert not has_unsupported, "an fp32 linear has no residual, no norm and no adapters"
        return super().__call__(x, bias, activation, None)


def activation_code(activation: str | None, *, gated: bool) -> int:
    """Return the library's number of an activation; `gated` must match the activation's name."""
    name = activation or ""
    assert name.startswith(GATED_PREFIX) == gated, (activation, gated)
    return ACTIVATIONS.index(name.removeprefix(GATED_PREFIX) or None)


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the index of each row's largest logit, the first of equal logits.

    `logits`: (rows, vocabulary). The C kernel is used for fp32 logits with contiguous rows on a CPU
    with AVX512-bf16; it ignores NaN. Otherwise torch is used. For a row with NaN, torch returns the
    index of the first NaN.
    """
    is_dense_fp32 = (
        logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1
    )
    if not is_dense_fp32 or isa_level() != ISA_LEVELS[-1]:
        return logits.argmax(-1)
    rows, vocab_size = logits.shape
    indices = torch.empty(rows, dtype=torch.int64)
    library_keeping_gil().preamble_argmax(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        indices.data_ptr(),
        torch.get_num_threads(),
    )
    return indices
