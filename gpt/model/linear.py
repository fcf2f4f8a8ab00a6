"""Column- and row-parallel linears, and the interface of the linear backends that compute them.

The input of a column-parallel linear and the output of a row-parallel linear pass through
`gpt.parallel.tensor_parallel`, which also handles sequence parallelism. A linear calls its
`LinearBackend` for everything else: norm, matmul, bias, activation and residual. The default
backend uses torch. gpt/linear has the other backends; the backend is chosen once, when the model is
loaded.
"""

from abc import abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cpu import training_kernels
from gpt.model.activation import ACTIVATIONS
from gpt.model.build_context import BuildContext
from gpt.model.norm import normalize
from gpt.model.residual_dropout import Residual
from gpt.parallel.sequence_parallel import all_gather_linear
from gpt.parallel.tensor_parallel import from_row_parallel, to_column_parallel


class LinearBackend(Protocol):
    """Base class of linear backends: computes one linear, and holds or references its weight."""

    # Whether `forward` applies the norm in front of the linear. Such a backend is used only where
    # no communication lies between the norm and the linear.
    includes_norm: bool = False

    @abstractmethod
    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        """Return the matmul of `x` after bias, activation (a key of ACTIVATIONS) and residual."""

    def add_residual(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Return the sum of an all-reduced output `y`, the bias and the residual."""
        return residual + (y if bias is None else y + bias)


class TorchLinear(LinearBackend):
    """A linear in plain torch: the reference of all other backends."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        y = F.linear(x, self.weight, bias)
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


class TrainingLinear(TorchLinear):
    """A linear in torch; on a CPU, the C library computes a frozen linear that needs a gradient."""

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        is_fusable = activation in training_kernels.ACTIVATIONS
        if is_fusable and training_kernels.supports_linear(x, self.weight):
            return training_kernels.linear(x, self.weight, bias, activation, residual)
        return super().forward(x, bias, activation, residual)


class Linear(nn.Module):
    """A weight and an optional bias, computed by a backend (`use_backend`)."""

    weight: Tensor  # None after a backend has stored the weight in its own layout.
    bias: Tensor | None

    def __init__(
        self, build: BuildContext, name: str, optional_parameters: tuple[str, ...] = ("bias",)
    ) -> None:
        super().__init__()
        for optional in optional_parameters:
            self.register_parameter(optional, None)
        self.mesh = build.mesh
        build.allocate_parameters(self, name)
        self.backend: LinearBackend = TrainingLinear(self.weight)

    def use_backend(self, backend: LinearBackend, *, keep_weight: bool = False) -> None:
        """Compute this linear with `backend`; free the weight parameter unless `keep_weight`."""
        self.backend = backend
        if not keep_weight:
            self._parameters["weight"] = None


class ColumnParallelLinear(Linear):
    """A linear whose weight rows are split: each rank computes its own output columns.

    This module contains the norm before the linear if the parameter table
    (`gpt.parallel.weight_sharding`) lists the norm's parameters under the linear's name.
    """

    layer_norm_weight: Tensor | None
    layer_norm_bias: Tensor | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, name, ("bias", "layer_norm_weight", "layer_norm_bias"))
        self.config = build.config

    def forward(self, x: Tensor, tokens: int, activation: str | None = None) -> Tensor:
        if self.backend.includes_norm:
            return self.project_gathered(x, activation)
        if self.layer_norm_weight is not None:
            x = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config)
        if self.mesh.sequence_parallel and self._trains_weight():
            y = all_gather_linear(x, self.weight, self.bias, self.mesh, tokens)
            return y if activation is None else ACTIVATIONS[activation](y)
        return self.project_gathered(to_column_parallel(x, self.mesh, tokens), activation)

    def project_gathered(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Run the backend on rows that `to_column_parallel` returned."""
        return self.backend.forward(x, self.bias, activation, None)

    def _trains_weight(self) -> bool:
        weight = self._parameters["weight"]
        return torch.is_grad_enabled() and weight is not None and weight.requires_grad


class RowParallelLinear(Linear):
    """A linear whose weight columns are split: the outputs of the ranks are summed."""

    def forward(self, x: Tensor, residual: Residual | None = None) -> Tensor:
        # Without dropout, the backend adds the residual.
        added = None if residual is None or residual.dropout is not None else residual.x
        if self.mesh.tp == 1:
            y = self.backend.forward(x, self.bias, None, added)
        else:
            y = from_row_parallel(self.partial_output(x), self.mesh)
            if added is not None:
                y = self.backend.add_residual(y, self.bias, added)
            elif self.bias is not None:
                y = y + self.bias
        return y if residual is None or added is not None else residual.add_output(y)

    def partial_output(self, x: Tensor) -> Tensor:
        """Return this rank's output before the sum over ranks, without the bias."""
        return self.backend.forward(x, None, None, None)
