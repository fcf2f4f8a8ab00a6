"""Bottleneck adapters for the CPU kernels: packed factors, with the norm and the activation.

The result of a row does not depend on the other rows, bit for bit, as with the model's own linears.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.bottleneck_adapter import NORM_EPSILON, Bottleneck, layer_norm
from gpt.cpu.packed_linear import CpuNorm, PackedLinear, packed_numel


@dataclass(frozen=True, eq=False)
class PackedBottleneck(Bottleneck):
    """A bottleneck in bf16 for the C library; `down` and `up` are not used by `apply`."""

    packed_down: PackedLinear | None = None
    packed_up: PackedLinear | None = None
    pre_norm: CpuNorm | None = None

    def apply(self, y: Tensor) -> Tensor:
        assert self.packed_down is not None and self.packed_up is not None
        hidden = self.packed_down(y, None, "silu", None, norm=self.pre_norm)
        if self.post_norm_weight is None:
            return self.packed_up(hidden, None, None, y)
        output = self.packed_up(hidden, None, None, None)
        return y + layer_norm(output, self.post_norm_weight, self.post_norm_bias)


def pack_bottleneck(bottleneck: Bottleneck) -> PackedBottleneck:
    """Copy a bottleneck to packed weights; one that is packed already is not copied."""
    if isinstance(bottleneck, PackedBottleneck):
        return bottleneck
    # The library needs an even number of input channels. Another channel of zeros has no effect.
    padding = len(bottleneck.down) % 2
    weight, bias = bottleneck.pre_norm_weight, bottleneck.pre_norm_bias
    norm = None if weight is None else CpuNorm(weight, bias, NORM_EPSILON, rms=False)
    tensors = {
        name: value.bfloat16()
        for name, value in vars(bottleneck).items()
        if isinstance(value, Tensor)
    }
    down = F.pad(tensors.pop("down"), (0, 0, 0, padding))
    up = F.pad(tensors.pop("up"), (0, padding))
    # The factors are only in the packed weights.
    return PackedBottleneck(
        down[:0],
        up[:0],
        **tensors,
        packed_down=_pack(down),
        packed_up=_pack(up),
        pre_norm=norm,
    )


def _pack(weight: Tensor) -> PackedLinear:
    return PackedLinear(weight, torch.empty(packed_numel(weight), dtype=torch.bfloat16))
