"""New weights for a model that has none yet, the same at any split.

Each logical tensor is drawn whole, from a generator that its name and the seed decide, and a rank
keeps its part. The rule is Megatron's: normal weights, the residual's writers smaller by depth.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.sharding import Parameter, Split, parameters, part

Draw = Callable[[Parameter], Tensor]


def megatron_draw(config: GPTConfig, seed: int, std: float = 0.02) -> Draw:
    """Megatron's initial values: what a training run starts from."""

    def draw(parameter: Parameter) -> Tensor:
        if len(parameter.shape) == 1:
            norm = "norm" in parameter.name and parameter.name.endswith("weight")
            return torch.full(
                parameter.shape, float(norm and not config.layernorm_zero_centered_gamma)
            )
        writes_residual = parameter.split is Split.COLUMNS
        scale = (2 * config.num_layers) ** -0.5 if writes_residual else 1.0
        generator = torch.Generator().manual_seed(seed + zlib.crc32(parameter.name.encode()))
        return torch.randn(parameter.shape, generator=generator) * std * scale

    return draw


@torch.no_grad()
def fill(model: GPT, draw: Draw) -> GPT:
    """Give every parameter of this rank its part of what `draw` makes for the whole tensor."""
    table = parameters(model.config)
    for name, held in model.named_parameters():
        full = draw(table[name])
        piece = part(table[name], model.config, model.mesh.tp_rank, model.mesh.tp)
        held.zero_()
        start = 0
        for first, last in piece.ranges:
            held.narrow(piece.dim, start, last - first).copy_(
                full.narrow(piece.dim, first, last - first)
            )
            start += last - first
    return model
