"""Random initialization: a checkpoint of new weights, which are drawn when they are read.

Each logical (unsharded) tensor has a generator, whose seed is computed from the user's seed and the
tensor's name. Each rank draws a whole tensor and keeps its shard, so the weights do not depend on
the parallel sizes, and memory holds one whole tensor at a time. The initial values are Megatron's:

- matrices of row-parallel linears, whose output is added to the residual stream, are normal with
  standard deviation std / sqrt(2 * layers);
- all other matrices are normal with standard deviation `std`;
- norm weights are 1, or 0 if the checkpoint stores gamma - 1;
- biases are 0.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint, concat_rows
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.parallel.weight_sharding import ParameterSpec, ShardRule, parameter_specs

Initializer = Callable[[ParameterSpec], Tensor]


@dataclass(frozen=True)
class GeneratedTensor:
    """A stored tensor without a file: each call of `tensor` draws the same values again."""

    parameter: ParameterSpec
    dtype: torch.dtype
    initialize: Initializer

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def location(self) -> str:
        return f"fresh weights: {self.parameter.name}"

    def tensor(self) -> Tensor:
        return self.initialize(self.parameter).to(self.dtype)


def generated_checkpoint(config: GPTConfig, initialize: Initializer) -> Checkpoint:
    """Make a checkpoint whose tensors are drawn by `initialize`, in the config's dtype."""
    dtype = FLOAT_DTYPES[config.dtype]
    tensors = {
        name: concat_rows([(GeneratedTensor(parameter, dtype, initialize), 0, parameter.shape[0])])
        for name, parameter in parameter_specs(config).items()
    }
    return Checkpoint(Path("fresh"), "fresh", config, tensors)


def random_init_checkpoint(config: GPTConfig, seed: int, std: float = 0.02) -> Checkpoint:
    """Make a checkpoint with Megatron's initial values, from which training can start."""

    def initialize(parameter: ParameterSpec) -> Tensor:
        if len(parameter.shape) == 1:
            is_norm_weight = "norm" in parameter.name and parameter.name.endswith("weight")
            fills_with_ones = is_norm_weight and not config.layernorm_zero_centered_gamma
            return torch.full(parameter.shape, float(fills_with_ones))
        depth_scale = (
            (2 * config.num_layers) ** -0.5 if parameter.shard_rule is ShardRule.COLUMNS else 1.0
        )
        generator = torch.Generator().manual_seed(seed + zlib.crc32(parameter.name.encode()))
        return torch.randn(parameter.shape, generator=generator) * std * depth_scale

    return generated_checkpoint(config, initialize)
