"""Build context: configuration, mesh, dtype and device from which all layers are allocated.

Parameters are allocated by the table in `gpt.parallel.weight_sharding` and filled by
`gpt.model.loading`; no module initializes its own values.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpt.attention.backend import AttentionBackend
from gpt.config import GPTConfig
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import ParameterSpec, parameter_dtype, parameter_specs, shard_spec


@dataclass(frozen=True)
class BuildContext:
    """The arguments of every layer's constructor: configuration, mesh, allocation, attention."""

    config: GPTConfig
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    recompute: RecomputePolicy

    @cached_property
    def parameters_by_module(self) -> dict[str, list[ParameterSpec]]:
        """Return the specifications of all parameters, by the name of their module."""
        by_module: dict[str, list[ParameterSpec]] = {}
        for name, parameter in parameter_specs(self.config).items():
            by_module.setdefault(name.rpartition(".")[0], []).append(parameter)
        return by_module

    def allocate_parameters(self, module: nn.Module, name: str) -> None:
        """Register on `module` this rank's shards of the parameters of the module `name`."""
        for parameter in self.parameters_by_module[name]:
            attribute = parameter.name.rpartition(".")[2]
            shard = shard_spec(parameter, self.config, self.mesh.tp_rank, self.mesh.tp)
            dtype = parameter_dtype(parameter.name, str(self.dtype).removeprefix("torch."))
            shape = shard.local_shape(parameter.shape)
            values = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            module.register_parameter(attribute, nn.Parameter(values))
