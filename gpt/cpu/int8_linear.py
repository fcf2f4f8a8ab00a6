"""INT8 linear layers on a CPU: packed int8 weights with one scale per column, multiplied by VNNI.

A column is an output column, which is a row of the weight in torch's (out, in) layout. The GEMM
also quantizes its bf16 input rows to int8, with a scale for each group of 64 channels of a row
(gpt/cpu/src/gemm_int8.c). An int8 weight has half of the bytes of a bf16 weight. The result of an
input row does not depend on the other rows. gpt/linear/quantization_check.py measures how much the
quantization changes a model's output.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu.kernels import library
from gpt.cpu.packed_linear import PANEL_COLUMNS, PackedLinear
from gpt.errors import ConfigError

# Channels of an input row that share a scale. Must equal GROUP_CHANNELS in gpt/cpu/src/gemm.h.
GROUP_CHANNELS = 64
# The largest magnitude of a weight's int8 code. The panels store codes as unsigned, with 128 added.
CODE_MAX = 127
# Weight elements that are quantized at once; a limit for the temporary memory.
CHUNK_ELEMENTS_MAX = 1 << 22


def has_int8_gemm() -> bool:
    """Return whether the library is available and this machine supports its int8 GEMM."""
    lib = library()
    # Only a library built for x86-64 has this function.
    probe = getattr(lib, "preamble_has_int8_gemm", None)
    return probe is not None and bool(probe())


def check_supported(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the device, the dtype or the CPU does not support int8 weights."""
    if device.type != "cpu":
        reason, remedy = f"the device is {device.type}", "set linear_backend: fp8 instead"
    elif dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        reason, remedy = f"the model's dtype is {name}", "set dtype: bfloat16"
    elif library() is None:
        reason, remedy = "the C library was not built", "build it (make kernels)"
    elif not has_int8_gemm():
        reason, remedy = "this CPU lacks AVX512-VNNI or AVX512-bf16", "set weights: auto"
    else:
        return
    raise ConfigError(f"weights 'int8' is unavailable: {reason}; {remedy}")


def packed_bytes(weight: Tensor, *, gated: bool = False) -> int:
    """Return the number of bytes of a weight in the panels of `Int8PackedLinear`."""
    columns, channels = weight.shape
    columns //= 1 + gated
    panels = -(-columns * (1 + gated) // PANEL_COLUMNS)
    groups = -(-channels // GROUP_CHANNELS)
    return panels * PANEL_COLUMNS * groups * GROUP_CHANNELS


class Int8PackedLinear(PackedLinear):
    """A linear with its int8 weight packed in panels, and one scale per column."""

    def __init__(
        self, weight: Tensor, memory: Tensor, *, fp32_output: bool = False, gated: bool = False
    ) -> None:
        """Quantize `weight` into `memory` (`packed_bytes` bytes), which this object references."""
        scales, _ = pack_int8(weight, memory, gated=gated)
        self._set_weight(weight, memory, scales, fp32_output=fp32_output, gated=gated)


def pack_int8(
    weight: Tensor, memory: Tensor, *, gated: bool = False, column_mean: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `weight - column_mean` (None: `weight`) into int8 panels in `memory`.

    Return each column's scale, and the norm of each column's quantization error, in panel order.
    """
    _, channels = weight.shape
    lanes = PANEL_COLUMNS // (1 + gated)
    halves = weight.detach().view(1 + gated, -1, channels)
    chunk_panels = max(1, CHUNK_ELEMENTS_MAX // (PANEL_COLUMNS * channels))
    scale_chunks: list[Tensor] = []
    error_chunks: list[Tensor] = []
    free_words = memory.view(torch.int32)
    for start in range(0, halves.shape[1], chunk_panels * lanes):
        chunk = halves[:, start : start + chunk_panels * lanes].float()
        chunk = chunk if column_mean is None else chunk - column_mean
        chunk = F.pad(chunk, (0, -channels % GROUP_CHANNELS, 0, -chunk.shape[1] % lanes))
        scales = chunk.abs().amax(-1, keepdim=True) / CODE_MAX
        codes = (chunk / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        codes.clamp_(-CODE_MAX, CODE_MAX)
        errors = (chunk - codes * scales).norm(dim=-1, keepdim=True)
        # A 32-bit word has the codes of four adjacent channels of one column.
        packed_codes = codes.add_(128).to(torch.uint8).view(torch.int32)
        packed_codes = packed_codes.view(1 + gated, -1, lanes, packed_codes.shape[-1]).permute(
            1, 3, 0, 2
        )
        target, free_words = free_words[: packed_codes.numel()], free_words[packed_codes.numel() :]
        target.view(packed_codes.shape).copy_(packed_codes)
        scale_chunks.append(_in_panel_order(scales, lanes))
        error_chunks.append(_in_panel_order(errors, lanes))
    assert not len(free_words), "memory must have `packed_bytes` bytes"
    return torch.cat(scale_chunks), torch.cat(error_chunks)


def _in_panel_order(values: Tensor, lanes: int) -> Tensor:
    """Flatten `values` (halves, columns of a half, 1), one number per column, into panel order.

    A gated weight has two halves, gate and up. Any other weight is one half.
    """
    return values.view(len(values), -1, lanes).transpose(0, 1).flatten()
