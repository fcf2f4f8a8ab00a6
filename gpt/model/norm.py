"""Norm: LayerNorm and RMSNorm, computed in at least fp32."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.cpu import training_kernels
from gpt.model.activation_checkpointing import recompute_from_inputs
from gpt.model.build_context import BuildContext
from gpt.parallel.tensor_parallel import sum_over_tensor_ranks


class Norm(nn.Module):
    """LayerNorm or RMSNorm, computed in at least fp32."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.config = build.config
        build.allocate_parameters(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.config)


class AllHeadsNorm(nn.Module):
    """RMSNorm of the queries (or keys) of all heads together, whose heads the tensor ranks share.

    `copies`: the number of tensor ranks that have the same heads.
    """

    weight: Tensor

    def __init__(self, build: BuildContext, name: str, *, copies: int) -> None:
        super().__init__()
        self.config = build.config
        self.mesh = build.mesh
        self._copies = copies
        build.allocate_parameters(self, name)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, which has this rank's heads: (T, heads, channels)."""
        rows = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        width = rows.shape[1] * self.mesh.tp // self._copies
        square_sum = sum_over_tensor_ranks(rows.square().sum(-1, keepdim=True), self.mesh)
        mean_square = square_sum / (self._copies * width)
        gamma = self.weight.to(rows.dtype) + self.config.layernorm_zero_centered_gamma
        y = rows * torch.rsqrt(mean_square + self.config.layernorm_epsilon) * gamma
        return y.to(x.dtype).view_as(x)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, config: GPTConfig) -> Tensor:
    """Return the LayerNorm or RMSNorm of `x`, in the dtype of `x`.

    torch computes a norm of bf16 or fp16 rows in fp32. A zero-centered gamma is converted to fp32
    before 1 is added, because bf16 has too few digits for 1 + gamma.
    """
    if config.layernorm_zero_centered_gamma:
        return recompute_from_inputs(
            partial(_normalize_zero_centered, config=config), x, weight, bias
        )
    if config.normalization == "RMSNorm":
        if training_kernels.supports_rms_norm(x, weight):
            return training_kernels.rms_norm(x, weight, config.layernorm_epsilon)
        # `recompute_from_inputs` saves only the inputs. On a CPU, autograd would also save fp32
        # intermediates of the RMSNorm.
        return recompute_from_inputs(partial(_normalize, config=config), x, weight, bias)
    return _normalize(x, weight, bias, config)


def _normalize_zero_centered(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: GPTConfig
) -> Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(compute_dtype)
    return _normalize(x.to(compute_dtype), weight.to(compute_dtype) + 1, shift, config).to(x.dtype)


def _normalize(x: Tensor, scale: Tensor, shift: Tensor | None, config: GPTConfig) -> Tensor:
    shape, epsilon = (x.shape[-1],), config.layernorm_epsilon
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, shape, scale, epsilon)
    return F.layer_norm(x, shape, scale, shift, epsilon)
