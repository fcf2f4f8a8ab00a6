"""A checkpoint of new weights, for a model that has none yet: drawn as they are read.

Each logical tensor is drawn whole, from a generator that its name and the seed decide, and a rank
keeps its part; so a fresh model is the same at any split, and none is ever whole in memory. The
rule is Megatron's: normal weights, those that write to the residual smaller by depth.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint, stack
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.parallel.sharding import Parameter, Split, parameters

Draw = Callable[[Parameter], Tensor]


@dataclass(frozen=True)
class Drawn:
    """A stored tensor that no file holds: every look at it draws it again."""

    parameter: Parameter
    dtype: torch.dtype
    draw: Draw

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def where(self) -> str:
        return f"fresh weights: {self.parameter.name}"

    def tensor(self) -> Tensor:
        return self.draw(self.parameter).to(self.dtype)


def drawn(config: GPTConfig, draw: Draw) -> Checkpoint:
    """The checkpoint whose every tensor is what `draw` makes, in the config's dtype."""
    dtype = FLOATS[config.dtype]
    tensors = {
        name: stack([(Drawn(parameter, dtype, draw), 0, parameter.shape[0])])
        for name, parameter in parameters(config).items()
    }
    return Checkpoint(Path("fresh"), "fresh", config, tensors)


def fresh(config: GPTConfig, seed: int, std: float = 0.02) -> Checkpoint:
    """What a training run starts from: Megatron's initial values."""

    def draw(parameter: Parameter) -> Tensor:
        if len(parameter.shape) == 1:
            scale = "norm" in parameter.name and parameter.name.endswith("weight")
            ones = scale and not config.layernorm_zero_centered_gamma
            return torch.full(parameter.shape, float(ones))
        shrink = (2 * config.num_layers) ** -0.5 if parameter.split is Split.COLUMNS else 1.0
        generator = torch.Generator().manual_seed(seed + zlib.crc32(parameter.name.encode()))
        return torch.randn(parameter.shape, generator=generator) * std * shrink

    return drawn(config, draw)
