"""Trainable adapter weights with random values, for tests of training."""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.linear_adapter import LinearAdapter
from gpt.model.gpt_model import GPT
from ptuning.config import MethodConfig
from ptuning.linears.layout import LinearsLayout, LinearTensor
from ptuning.linears.trainable_linears import TrainableLinears


def random_trainable_linears(
    method_configs: Sequence[MethodConfig], chunks: Sequence[GPT]
) -> TrainableLinears:
    """The whole tensors are drawn by name, so that every split has the same values."""
    layout = LinearsLayout.create(method_configs, chunks[0].config)
    drawn: list[dict[str, dict[str, Tensor]]] = [{} for _ in method_configs]
    for tensor in layout.tensors:
        if tensor.is_trained:
            drawn[tensor.task].setdefault(tensor.key, {})[tensor.name] = _draw(tensor)
    initial = [
        {
            # The norm is only there because a magnitude belongs to one; training computes it.
            key: LinearAdapter(**tensors, scale=scale, weight_norm=tensors.get("magnitude"))
            for key, tensors in task.items()
        }
        for task, scale in zip(drawn, layout.scales, strict=True)
    ]
    dropout_rates = [method_config.dropout for method_config in method_configs]
    return TrainableLinears(layout, initial, chunks, dropout_rates=dropout_rates)


def _draw(tensor: LinearTensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.parameter_name.encode()))
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if tensor.name in ("magnitude", "output_scale", "input_scale", "bottleneck_pre_norm_weight"):
        return 1 + 0.2 * values
    if tensor.name == "bottleneck_pre_norm_bias":
        return 0.2 * values
    return values / math.sqrt(tensor.shape[1])
