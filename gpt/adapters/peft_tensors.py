"""Names of the tensors of PEFT's linear adapters, and the reading of one of them."""

import re

import torch
from torch import Tensor

from gpt.adapters.distributed_tensors import DTYPES
from gpt.adapters.linear_check import LINEARS_BYTES_MAX
from gpt.checkpoint.files.torch_save import is_dense
from gpt.checkpoint.logical_tensor import StoredTensor
from gpt.errors import AdapterError

KEY_PREFIX = "base_model.model."
LORA_A, LORA_B, MAGNITUDE, IA3_VECTOR = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_magnitude_vector",
    "ia3_l",
)
# The text part of a model with images, in two orders of the names.
TEXT_PART = re.compile(r"^(model\.language_model|language_model\.model)\.")


def read_tensor(stored: StoredTensor, shape: tuple[int, ...], source: str) -> Tensor:
    """Read a tensor as fp32; its shape and dtype are checked first."""
    if tuple(stored.shape) != shape:
        raise AdapterError(
            f"{source} has the shape {tuple(stored.shape)}; this model and the config need "
            f"{shape}: give the model that the adapter was trained on"
        )
    if stored.dtype not in DTYPES:
        raise AdapterError(
            f"{source} is {stored.dtype}; it must be float32, bfloat16 or float16: save it again"
        )
    tensor = stored.tensor()
    if not is_dense(tensor) or 4 * tensor.numel() > LINEARS_BYTES_MAX:
        raise AdapterError(f"{source} is no dense matrix of a usual size; save it again")
    return torch.empty(shape, dtype=torch.float32).copy_(tensor)
