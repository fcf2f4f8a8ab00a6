"""The order in which examples are learned from: every one once in each round, rounds shuffled.

A step's batch follows from its number alone, so a run that goes on needs no cursor. A round ends
in the middle of a batch where it must; the next one fills it.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from ptuning.data.dataset import Example


class Order:
    """Batches of `size` examples, or of all of them if they are fewer."""

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        self._examples, self._seed = examples, seed
        self.size = min(size, len(examples))
        self._round = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[Example]:
        """What the step of this number, from 1, learns from."""
        count = len(self._examples)
        found = []
        for place in range((step - 1) * self.size, step * self.size):
            turn, index = divmod(place, count)
            found.append(self._examples[self._round(turn)[index]])
        return found

    def _shuffled(self, turn: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + turn) % 2**63)
        return torch.randperm(len(self._examples), generator=generator).tolist()
