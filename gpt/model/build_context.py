"""Build context: configuration, mesh, dtype and device from which all layers are allocated.

The table in `gpt.parallel.weight_sharding` gives the names and shapes of the parameters. The layers
allocate them without initial values, and `gpt.model.loading` reads the values.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpt.attention.backend import AttentionBackend
from gpt.config import GPTConfig
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import ParameterSpec, parameter_dtype, parameter_specs


@dataclass(frozen=True)
class BuildContext:
    """What the constructor of every layer needs, besides the layer's number or name."""

    config: GPTConfig
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    recompute: RecomputePolicy

    @cached_property
    def parameters_by_module(self) -> dict[str, list[ParameterSpec]]:
        """The specifications of all parameters, by the name of their module."""
        by_module: dict[str, list[ParameterSpec]] = {}
        for name, parameter in parameter_specs(self.config).items():
            by_module.setdefault(name.rpartition(".")[0], []).append(parameter)
        return by_module

    def allocate_parameters(self, module: nn.Module, name: str) -> None:
        """Allocate this rank's shards of the parameters `name`.*, as attributes of `module`."""
        for parameter in self.parameters_by_module[name]:
            attribute = parameter.name.rpartition(".")[2]
            shard = self.mesh.in_stage.shard(parameter, self.config)
            assert shard is not None, "only this rank's experts are allocated"
            dtype = parameter_dtype(parameter.name, str(self.dtype).removeprefix("torch."))
            shape = shard.local_shape(parameter.shape)
            values = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            module.register_parameter(attribute, nn.Parameter(values))
