"""MLP of a layer, or one expert of a mixture-of-experts layer: fc1, activation, fc2.

With a gated activation (SwiGLU, GEGLU), the output of fc1 consists of gate columns, then up
columns. Each tensor rank computes one range of the gate columns and the same range of the up
columns (`ShardRule.GATED` in gpt/parallel/weight_sharding.py).
"""

from typing import cast

from torch import Tensor, nn

from gpt.linear_adapter import BatchAdapters
from gpt.model.activation import activation_name, torch_activation, xielu
from gpt.model.build_context import BuildContext
from gpt.model.linear import ColumnParallelLinear, RowParallelLinear
from gpt.model.residual_dropout import Residual


class Xielu(nn.Module):
    """The activation xIELU with its learned parameters, of which each tensor rank has a copy."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        build.allocate_parameters(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class MLP(nn.Module):
    """Computes fc2(activation(fc1(x))). In a dense layer, fc1 includes the norm of its input."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.config = build.config
        self._fused_activation = activation_name(build.config)
        self.linear_fc1 = ColumnParallelLinear(build, f"{name}.linear_fc1")
        self.linear_fc2 = RowParallelLinear(build, f"{name}.linear_fc2")
        self.activation_func: Xielu | None = None
        if build.config.activation == "xielu":
            self.activation_func = Xielu(build, f"{name}.activation_func")

    def use_fused_activation(self, name: str) -> None:
        """Let the backend of fc1 compute the activation, which it knows as `name`."""
        self._fused_activation = name

    def forward(
        self,
        x: Tensor,
        tokens: int,
        residual: Residual | None = None,
        adapted_rows: BatchAdapters = (),
    ) -> Tensor:
        y = self._activate(self.linear_fc1(x, tokens, self._fused_activation, adapted_rows))
        return cast(Tensor, self.linear_fc2(y, residual, adapted_rows))

    def partial_output(
        self, x: Tensor, fc2_bias: Tensor | None = None, adapted_rows: BatchAdapters = ()
    ) -> Tensor:
        """Return the output before the sum over tensor ranks; one rank gives the bias of fc2.

        `x` has all rows, as `to_column_parallel` returns them.
        """
        y = self.linear_fc1.project_gathered(x, self._fused_activation, adapted_rows)
        return self.linear_fc2.partial_output(self._activate(y), fc2_bias, adapted_rows)

    def _activate(self, y: Tensor) -> Tensor:
        """Compute the activation in torch, if the backend of fc1 does not compute it."""
        if self._fused_activation is not None:
            return y
        if self.activation_func is not None:
            return cast(Tensor, self.activation_func(y))
        return torch_activation(self.config, y)
