"""Residual connection, with hidden dropout and a factor of the sublayer output.

Hidden dropout is applied to the output of each sublayer before the residual is added, and to the
embeddings. The masks are counter-based, so every parallel split has the same masks.
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
    """The residual `x` of a sublayer, and the dropout and the factor of the sublayer's output.

    The sum of both is the input of the next sublayer.
    """

    x: Tensor
    dropout: Callable[[Tensor], Tensor] | None  # None: no dropout.
    multiplier: float = 1.0

    @property
    def is_plain_sum(self) -> bool:
        """Whether the output is added as it is."""
        return self.dropout is None and self.multiplier == 1.0

    def add_output(self, output: Tensor) -> Tensor:
        if self.dropout is not None:
            output = self.dropout(output)
        return self.x + (output if self.multiplier == 1.0 else output * self.multiplier)


def apply_hidden_dropout(
    x: Tensor, config: GPTConfig, mesh: Mesh, batch: Batch, site: tuple[int, int]
) -> Tensor:
    """Return this rank's rows `x` after hidden dropout; without dropout, return `x` unchanged.

    The mask is drawn for all rows of the batch, then split over the tensor ranks like the rows.
    `site`: see `Dropout.keep_mask`.
    """
    p = config.hidden_dropout
    if batch.dropout is None or not p:
        return x
    keep_mask = batch.dropout.keep_mask((batch.tokens, x.shape[1]), p, site, x)
    return x * scatter_to_sequence_parallel(keep_mask, mesh) / (1 - p)
