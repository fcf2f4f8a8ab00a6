"""Residual connection, and hidden dropout before it.

Hidden dropout is applied to the output of each sublayer before the residual connection, and to the
embeddings. Its masks are counter-based, so they are equal for every parallel layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.parallel.mesh import Mesh
from gpt.parallel.sequence_parallel import scatter_to_sequence_parallel


@dataclass(frozen=True)
class Residual:
    """The residual stream, and the dropout of the sublayer output that is added to it."""

    x: Tensor
    dropout: Callable[[Tensor], Tensor] | None

    def add_output(self, output: Tensor) -> Tensor:
        return self.x + (output if self.dropout is None else self.dropout(output))


def apply_hidden_dropout(
    x: Tensor, config: GPTConfig, mesh: Mesh, batch: Batch, site: tuple[int, int]
) -> Tensor:
    """Apply dropout to hidden states: draw the mask for all rows, then split it like the rows."""
    p = config.hidden_dropout
    if batch.dropout is None or not p:
        return x
    keep_mask = batch.dropout.keep_mask((batch.tokens, x.shape[1]), p, site, x)
    return x * scatter_to_sequence_parallel(keep_mask, mesh) / (1 - p)
