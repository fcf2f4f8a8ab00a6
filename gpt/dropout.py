"""Counter-based dropout masks, drawn from a seed and the position in the model.

No random state is stored: a mask is drawn from these numbers alone, so it is equal at every
parallel split and in every recomputation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """The dropout masks of one seed."""

    seed: int

    def keep_mask(
        self, shape: tuple[int, ...], p: float, site: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Return a boolean mask on the device of `like`: an element is kept with probability 1 - p.

        `site` is the position in the model, for example layer and sublayer.
        """
        key = self.seed
        for number in site:
            # A hash like SplitMix64, so that neighboring sites have independent masks.
            key = (key ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            key ^= key >> 31
        generator = torch.Generator(like.device).manual_seed(key - 2**63)
        return torch.rand(shape, generator=generator, device=like.device) >= p
