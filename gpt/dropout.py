"""Counter-based dropout masks, drawn from a seed and the position in the model.

No generator has state, so the masks are equal for every parallel split and in every recomputation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """Counter-based dropout masks: equal for every parallel split and in every recomputation."""

    seed: int

    def keep_mask(
        self, shape: tuple[int, ...], p: float, site: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Draw the boolean mask of elements to keep; `site` is the position in the model."""
        key = self.seed
        for number in site:
            # SplitMix64, a 64-bit hash, so that the masks of neighbouring sites are independent.
            key = (key ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            key ^= key >> 31
        generator = torch.Generator(like.device).manual_seed(key - 2**63)
        return torch.rand(shape, generator=generator, device=like.device) >= p
