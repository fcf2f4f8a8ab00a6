"""Floating-point dtypes of weights and KV cache, by the names that configs and flags use.

Checkpoints, flags and messages all use the names of this table. Integer and fp8 dtypes are defined
in the modules that use them. `is_finite` checks the values of a tensor.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
FLOAT_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in FLOAT_DTYPE_NAMES.items()}


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are finite."""
    # min and max are NaN if any element is NaN. `aminmax` runs at memory speed, and unlike
    # `isfinite` it allocates no tensor of the size of `x`.
    return x.numel() == 0 or all(bool(extreme.isfinite()) for extreme in x.aminmax())
