"""Bottleneck adapters (Houlsby et al., 2019): a small network behind attention and behind the MLP.

The formula is that of NeMo 1 (`ParallelLinearAdapter`, PEFT scheme `adapter`), whose `adapter_1`
stands behind attention and `adapter_2` behind the MLP. With y, the product of the block's last
linear (linear_proj, linear_fc2) summed over the tensor ranks and without its bias, the output of
the block is

    y + post_norm(up silu(down pre_norm(y))) + bias,

to which hidden dropout and the residual are applied as without the adapter. A norm is a LayerNorm
with a weight, a bias and an epsilon of 1e-5, also in a model with RMSNorm. NeMo has one norm, in
front (`norm_position: pre`, its default) or behind (`post`), or none.

The network needs the whole sum of each row, so each tensor rank computes it with whole factors,
from the sum that the linear computes anyway. With sequence parallelism, a rank computes it for its
own rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

NORM_EPSILON = 1e-5
# The fields of `LinearAdapter` are this prefix and those of `Bottleneck`.
TENSOR_PREFIX = "bottleneck_"


@dataclass(frozen=True, eq=False)
class Bottleneck:
    """The tensors of the network of one block, all of them whole.

    In training they are in at least fp32, and are rounded to the dtype of the computation where
    they are used.
    """

    down: Tensor  # (bottleneck size, hidden size)
    up: Tensor  # (hidden size, bottleneck size)
    pre_norm_weight: Tensor | None = None  # (hidden size,)
    pre_norm_bias: Tensor | None = None
    post_norm_weight: Tensor | None = None
    post_norm_bias: Tensor | None = None

    def apply(self, y: Tensor) -> Tensor:
        """Return `y`, the rows of the block's product, with the output of the network added."""
        x = layer_norm(y, self.pre_norm_weight, self.pre_norm_bias)
        hidden = F.silu(x @ self.down.T.to(y.dtype))
        output = hidden @ self.up.T.to(y.dtype)
        return y + layer_norm(output, self.post_norm_weight, self.post_norm_bias)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Bottleneck":
        """Return the bottleneck with `function` applied to each tensor that is set."""
        changes: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changes)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the LayerNorm of `x`, which torch computes in at least fp32; `x` without a weight."""
    if weight is None or bias is None:
        return x
    return F.layer_norm(x, x.shape[1:], weight.to(x.dtype), bias.to(x.dtype), NORM_EPSILON)
