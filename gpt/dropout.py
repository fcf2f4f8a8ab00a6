"""Counter-based dropout masks, drawn from a seed and the site: the place of the dropout in a model.

No random state is stored. A mask depends only on the seed and the site, so every parallel split and
every recomputation draws the same mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """Draws all dropout masks of one seed."""

    seed: int

    def keep_mask(
        self, shape: tuple[int, ...], p: float, site: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Return a boolean mask on the device of `like`: True (keep) with probability 1 - p.

        `site` is the place of the dropout in the model, for example layer and sublayer.
        """
        key = self.seed
        for number in site:
            # A hash like SplitMix64, so that neighboring sites have independent masks.
            key = (key ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            key ^= key >> 31
        generator = torch.Generator(like.device).manual_seed(key - 2**63)
        return torch.rand(shape, generator=generator, device=like.device) >= p
