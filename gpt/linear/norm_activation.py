"""Fused residual-add + norm + activation between two matmuls, with optional fp8 quantized output.

On a GPU with Triton, each operation is one kernel (gpt/linear/triton_norm_activation.py). Elsewhere
torch computes it; the torch code is also the reference. Output rows are optionally quantized to
e4m3 with one scale per row, as input of fp8 matmuls. Intermediate values are in at least fp32 and
are rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.packed_linear import GATED_PREFIX
from gpt.fp8_rows import ABSMAX_MIN, FP8_ALIGNMENT, FP8_DTYPE, FP8_MAX, Fp8Rows
from gpt.model.activation import UNGATED_ACTIVATIONS
from gpt.model.linear import ColumnParallelLinear, Linear
from gpt.triton_runtime.availability import triton_unavailable_reason

# The dtypes that the Triton kernels support, and the largest row width of the norm kernel, which
# holds a whole row in registers. The activation kernel reads rows of any width block by block.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NORM_WIDTH_MAX = 32768


Rows = Tensor | Fp8Rows


@dataclass(frozen=True)
class NormParameters:
    """The parameters of a LayerNorm or RMSNorm, in at least fp32."""

    scale: Tensor  # gamma; for a zero-centered gamma, the stored weight + 1.
    shift: Tensor | None  # beta; None for RMSNorm.
    epsilon: float
    is_rms: bool

    @staticmethod
    def from_module(scale: Tensor, shift: Tensor | None, config: GPTConfig) -> "NormParameters":
        """Convert the parameters of a norm module, given the model's configuration."""
        compute_dtype = torch.promote_types(scale.dtype, torch.float32)
        scale = scale.detach().to(compute_dtype) + (
            1 if config.layernorm_zero_centered_gamma else 0
        )
        is_rms = config.normalization == "RMSNorm"
        wide_shift = None if is_rms or shift is None else shift.detach().to(compute_dtype)
        return NormParameters(scale, wide_shift, config.layernorm_epsilon, is_rms)

    @staticmethod
    def before_linear(linear: Linear) -> "NormParameters | None":
        """Return the parameters of the norm that `linear` contains; None without a norm."""
        if not isinstance(linear, ColumnParallelLinear) or linear.layer_norm_weight is None:
            return None
        return NormParameters.from_module(
            linear.layer_norm_weight, linear.layer_norm_bias, linear.config
        )


def add_norm(
    y: Tensor, bias: Tensor | None, x: Tensor, norm: NormParameters | None, *, fp8: bool = False
) -> tuple[Tensor, Rows | None]:
    """Return the sum x + y + bias, and the norm of the sum (None if `norm` is None).

    `x` is the residual, and `y` the output of a matmul. With `fp8` the norm is in e4m3.
    """
    triton_module = _triton_module_for(x, NORM_WIDTH_MAX)
    if triton_module is not None:
        return triton_module.add_norm(y, bias, x, norm, fp8)  # type: ignore[no-any-return]
    wide_sum = x.to(_compute_dtype(x)) + y
    if bias is not None:
        wide_sum = wide_sum + bias
    residual_sum = wide_sum.to(x.dtype)
    return residual_sum, None if norm is None else norm_rows(residual_sum, norm, fp8=fp8)


def norm_rows(x: Tensor, norm: NormParameters, *, fp8: bool = False) -> Rows:
    """Return the LayerNorm or RMSNorm of each row; with `fp8`, in e4m3."""
    triton_module = _triton_module_for(x, NORM_WIDTH_MAX)
    if triton_module is not None:
        return triton_module.norm_rows(x, norm, fp8)  # type: ignore[no-any-return]
    shape = (x.shape[-1],)
    if norm.is_rms:
        y = F.rms_norm(x.to(_compute_dtype(x)), shape, norm.scale, norm.epsilon)
    else:
        y = F.layer_norm(x.to(_compute_dtype(x)), shape, norm.scale, norm.shift, norm.epsilon)
    return quantize_e4m3(y) if fp8 else y.to(x.dtype)


def activate_rows(x: Tensor, activation: str) -> Tensor:
    """Return the activation of each row; a gated activation halves the row width."""
    triton_module = _triton_module_for(x)
    if triton_module is not None:
        return triton_module.activate_rows(x, activation)  # type: ignore[no-any-return]
    return _activate_in_torch(x, activation).to(x.dtype)


def quantize_rows(x: Tensor, activation: str | None = None) -> Fp8Rows:
    """Return the rows in e4m3, after an optional activation."""
    triton_module = _triton_module_for(x)
    if triton_module is not None:
        return triton_module.quantize_rows(x, activation)  # type: ignore[no-any-return]
    return quantize_e4m3(
        x.to(_compute_dtype(x)) if activation is None else _activate_in_torch(x, activation)
    )


def quantize_e4m3(x: Tensor) -> Fp8Rows:
    """Quantize the rows to e4m3 in torch, each scaled by its absolute maximum.

    If a row contains NaN or inf, the dequantized row contains NaN or inf too, so that later checks
    find it.
    """
    absmax = x.abs().amax(-1, keepdim=True).float().clamp_min(ABSMAX_MIN)
    values = F.pad(x * (FP8_MAX / absmax), (0, -x.shape[-1] % FP8_ALIGNMENT)).to(FP8_DTYPE)
    return Fp8Rows(values, absmax / FP8_MAX)


def _activate_in_torch(x: Tensor, activation: str) -> Tensor:
    x = x.to(_compute_dtype(x))
    activation_function: Callable[[Tensor], Tensor] = UNGATED_ACTIVATIONS[
        activation.removeprefix(GATED_PREFIX)
    ]
    if not activation.startswith(GATED_PREFIX):
        return activation_function(x)
    gate, up = x.chunk(2, dim=-1)
    return activation_function(gate) * up


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _triton_module_for(x: Tensor, width_max: int | None = None) -> ModuleType | None:
    """Return the module that launches the Triton kernels; None if they do not support `x`.

    `width_max`: the largest row width that the kernel supports; None: it supports all widths.
    """
    if not x.is_cuda or x.dtype not in KERNEL_DTYPES:
        return None
    if width_max is not None and x.shape[-1] > width_max:
        return None
    if triton_unavailable_reason(x.device) is not None:
        return None
    from gpt.linear import triton_norm_activation

    return triton_norm_activation
