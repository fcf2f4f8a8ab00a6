"""Options of a layer's attention: sliding window, attention sinks, and ALiBi.

All attention backends take an `AttentionOptions`. A score is the scaled dot product of a query and
a key. ALiBi (https://arxiv.org/abs/2108.12409) subtracts slope x distance from it, where the
distance is the number of positions from the key to the query. A sink is a learned logit of a query
head: one more term exp(sink) in the denominator of the softmax, without a value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What may differ between the attention of layers. The tensors are for this rank's heads."""

    # Number of keys that a query sees, its own included. None: all keys up to its own.
    window: int | None = None
    sinks: Tensor | None = None  # (query heads,), in any floating-point dtype.
    alibi_slopes: Tensor | None = None  # (query heads,), in fp32.

    @property
    def has_plain_softmax(self) -> bool:
        """Whether attention has neither sinks nor ALiBi."""
        return self.sinks is None and self.alibi_slopes is None


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slopes of a model with this number of query heads.

    For a power of two they are 2^(-8i / heads), i = 1, 2, ... For another number, they are those of
    the next lower power of two P, then 2^(-4i / P), i = 1, 3, 5, ...
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores` (..., rows, keys) over the keys.

    `sinks`: the logit of each row's sink, which broadcasts to (..., rows).
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
