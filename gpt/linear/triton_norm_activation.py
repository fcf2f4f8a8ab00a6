"""Launchers of Triton kernels: residual-add + norm, and activation, optionally with fp8 output.

The numbers of programs and warps per row depend on the width of the row, but not on the number of
rows, so a row's result does not depend on the other rows. No launch synchronizes the device.
"""

import torch
from torch import Tensor

from gpt.cpu.packed_linear import ACTIVATIONS, GATED_PREFIX
from gpt.fp8_rows import Fp8Rows
from gpt.linear import triton_row_kernels as kernels
from gpt.linear.norm_activation import NormParameters, Rows
from gpt.triton_runtime import launcher
from gpt.triton_runtime.block_sizes import next_power_of_two

# Blocks of the activation kernel, in elements. With e4m3 output one program reads a row: in one
# block up to SINGLE_BLOCK_SIZE_MAX, or else twice, block by block. Otherwise there is one program
# per block.
SINGLE_BLOCK_SIZE_MAX = 32768
BLOCK_SIZE = 4096  # Of wider rows with e4m3 output.
SPLIT_BLOCK_SIZE_MAX = 1024  # For unquantized output.
# On an H100, 8 warps are as fast as 16 or faster: 64 us instead of 82 for 2048 rows of 16384.
ACTIVATION_WARPS_MAX = 8
ELEMENTS_PER_WARP = 512  # Elements of a block that one warp processes.


def add_norm(
    y: Tensor, bias: Tensor | None, x: Tensor, norm: NormParameters | None, fp8: bool
) -> tuple[Tensor, Rows | None]:
    """Compute `norm_activation.add_norm` in Triton."""
    residual_sum = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed_rows = None if norm is None else _allocate_rows(x, x.shape[1], fp8)
    _launch_add_norm(x, norm, normed_rows, (y.contiguous(), bias, residual_sum))
    return residual_sum, normed_rows


def norm_rows(x: Tensor, norm: NormParameters, fp8: bool) -> Rows:
    """Compute `norm_activation.norm_rows` in Triton."""
    out = _allocate_rows(x, x.shape[1], fp8)
    _launch_add_norm(x, norm, out, None)
    return out


def activate_rows(x: Tensor, activation: str) -> Tensor:
    """Compute `norm_activation.activate_rows` in Triton."""
    out = _allocate_rows(x, x.shape[1] // (1 + activation.startswith(GATED_PREFIX)), fp8=False)
    assert isinstance(out, Tensor)
    _launch_activation(x, activation, out)
    return out


def quantize_rows(x: Tensor, activation: str | None) -> Fp8Rows:
    """Compute `norm_activation.quantize_rows` in Triton."""
    out = _allocate_rows(
        x, x.shape[1] // (1 + (activation or "").startswith(GATED_PREFIX)), fp8=True
    )
    assert isinstance(out, Fp8Rows)
    _launch_activation(x, activation, out)
    return out


def _allocate_rows(x: Tensor, width: int, fp8: bool) -> Rows:
    return Fp8Rows.allocate(len(x), width, x.device) if fp8 else x.new_empty(len(x), width)


def _launch_add_norm(
    x: Tensor,
    norm: NormParameters | None,
    out: Rows | None,
    addition: tuple[Tensor, Tensor | None, Tensor] | None,
) -> None:
    """Launch the norm kernel. The norm is written to `out`; if `out` is None, there is no norm.

    `addition` is (tensor to add to `x`, bias, output of the sum); None: nothing is added.
    """
    x = x.contiguous()
    # For each argument that the kernel does not use, `x` is passed as a placeholder.
    y, bias, residual_sum = addition or (x, None, x)
    scale = x if norm is None else norm.scale
    shift = None if norm is None else norm.shift
    values, scales = _output_pointers(out, x)
    block_size = max(next_power_of_two(values.shape[1]), 16)
    launcher.launch(
        kernels.add_norm_row,
        (x.shape[0],),
        x,
        y,
        x if bias is None else bias,
        residual_sum,
        scale,
        x if shift is None else shift,
        values,
        scales,
        x.shape[1],
        values.shape[1],
        0.0 if norm is None else norm.epsilon,
        ADD_RESIDUAL=addition is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        IS_RMS=norm is not None and norm.is_rms,
        HAS_SHIFT=shift is not None,
        QUANTIZE=isinstance(out, Fp8Rows),
        BLOCK_SIZE=block_size,
        num_warps=_warp_count(block_size),
    )


def _launch_activation(x: Tensor, activation: str | None, out: Rows) -> None:
    x = x.contiguous()
    gated = activation is not None and activation.startswith(GATED_PREFIX)
    activation_id = ACTIVATIONS.index((activation or "").removeprefix(GATED_PREFIX) or None)
    values, scales = _output_pointers(out, x)
    is_fp8 = isinstance(out, Fp8Rows)
    width = x.shape[1] // (1 + gated)
    block_size = max(next_power_of_two(values.shape[1]), 16)
    has_single_block = is_fp8 and block_size <= SINGLE_BLOCK_SIZE_MAX
    if not has_single_block:
        block_size = min(block_size, BLOCK_SIZE if is_fp8 else SPLIT_BLOCK_SIZE_MAX)
    blocks = 1 if is_fp8 else -(-width // block_size)
    launcher.launch(
        kernels.activate_row,
        (x.shape[0], blocks),
        x,
        values,
        scales,
        width,
        values.shape[1],
        ACTIVATION=activation_id,
        GATED=gated,
        QUANTIZE=is_fp8,
        SINGLE_BLOCK=has_single_block,
        BLOCK_SIZE=block_size,
        num_warps=min(_warp_count(block_size), ACTIVATION_WARPS_MAX),
    )


def _output_pointers(out: Rows | None, placeholder: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output tensors of values and scales; `placeholder` for an unused output."""
    if out is None:
        return placeholder, placeholder
    return (out.values, out.scales) if isinstance(out, Fp8Rows) else (out, placeholder)


def _warp_count(elements: int) -> int:
    return min(max(elements // ELEMENTS_PER_WARP, 1), 16)
