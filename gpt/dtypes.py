"""The floating-point dtypes of weights and KV cache, by the names that configs and flags use.

One table, so that a checkpoint, a flag and a message call a dtype alike. Knows of no checkpoint.
Integer and fp8 formats are their own modules' affair.
"""

from collections.abc import Mapping

import torch

FLOAT_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
FLOATS: Mapping[str, torch.dtype] = {name: dtype for dtype, name in FLOAT_NAMES.items()}
