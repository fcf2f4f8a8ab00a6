"""Quantized Hugging Face checkpoints of tiny models, and plain formulas that dequantize them.

The formulas decode the bytes with numpy in fp64 and do not use torch's FP8 dtypes, so they are an
oracle for the reader.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints.hf_models import edit_json

E4M3_MAX = 448.0
LINEAR_SUFFIXES = ("_proj.weight", "c_fc.weight", "dense.weight")
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_linear(key: str) -> bool:
    return key.endswith(LINEAR_SUFFIXES)


def quantize_fp8(
    weight: Tensor, block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the e4m3 values and the scale of each block; the last blocks may be cut."""
    rows, columns = weight.shape
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    values = torch.empty_like(weight, dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scale = float(weight[box].abs().max()) / E4M3_MAX
            if power_of_two:
                scale = 2.0 ** math.ceil(math.log2(scale))
            scales[i, j] = scale
            values[box] = weight[box].float() / scale
    return values.to(torch.float8_e4m3fn), scales


def decode_e4m3(values: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Decode the bytes: a sign, four bits of exponent with bias 7, three bits of mantissa."""
    codes = values.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, mantissa = 1.0 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.asarray(sign * magnitude, np.float64)


def dequantize_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """W[r, c] = q[r, c] * scale[r div block rows, c div block columns], in fp64."""
    rows, columns = np.indices(values.shape)
    matrix = scales.double().numpy()[rows // block[0], columns // block[1]]
    return torch.from_numpy(decode_e4m3(values) * matrix)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights (experts, out, in), value by value, in fp64."""
    experts, outputs, groups, width = blocks.shape
    result = np.empty((experts, outputs, groups * width * 2))
    packed, exponents = blocks.tolist(), scales.tolist()
    for e, o, g, i in np.ndindex(experts, outputs, groups, width):
        for half, code in enumerate((packed[e][o][g][i] & 15, packed[e][o][g][i] >> 4)):
            value = MXFP4_VALUES[code & 7] * 2.0 ** (exponents[e][o][g] - 127)
            result[e, o, g * width * 2 + 2 * i + half] = -value if code & 8 else value
    return torch.from_numpy(result)


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {
        key: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def write_weights(
    folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, dtype: str
) -> None:
    """Replace the weights in a saved folder, and record how they are quantized."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors"
    )

    def change(record: dict[str, Any]) -> None:
        record["dtype"] = dtype
        record.pop("torch_dtype", None)
        record.pop("quantization_config", None)
        if quantization is not None:
            record["quantization_config"] = quantization

    edit_json(folder / "config.json", change)
