"""MLP: fc1, the activation, fc2. It is also one expert of a mixture-of-experts layer.

With a gated activation (SwiGLU, GEGLU), fc1 computes the gate columns, then the up columns; each
tensor rank has matching halves of both (`ShardRule.GATED` in gpt/parallel/weight_sharding.py).
"""

from typing import cast

from torch import Tensor, nn

from gpt.model.activation import activation_name
from gpt.model.build_context import BuildContext
from gpt.model.linear import ColumnParallelLinear, RowParallelLinear
from gpt.model.residual_dropout import Residual


class MLP(nn.Module):
    """fc1, the activation (gated if the configuration says so), fc2."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.config = build.config
        self.linear_fc1 = ColumnParallelLinear(build, f"{name}.linear_fc1")
        self.linear_fc2 = RowParallelLinear(build, f"{name}.linear_fc2")

    def forward(self, x: Tensor, tokens: int, residual: Residual | None = None) -> Tensor:
        y = self.linear_fc1(x, tokens, activation_name(self.config))
        return cast(Tensor, self.linear_fc2(y, residual))

    def partial_output(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, for rows that `to_column_parallel` returned."""
        y = self.linear_fc1.project_gathered(x, activation_name(self.config))
        return self.linear_fc2.partial_output(y)
