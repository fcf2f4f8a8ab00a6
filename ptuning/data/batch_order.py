"""Batch order: the examples of each training step, reshuffled every epoch.

Each epoch contains every example once. The batch of a step is computed from the seed and the number
of the step, so a resumed run needs no saved position. If an epoch ends in the middle of a batch,
the batch is completed with examples of the next epoch. Tasks that are trained independently
(`TuneConfig.task_groups`) have batches as in runs of their own.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from ptuning.data.dataset import Example


class BatchOrder:
    """Batches of `batch_size` examples, or of all examples if there are fewer."""

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        self._examples = examples
        self._seed = seed
        self.batch_size = min(batch_size, len(examples))
        # A batch has examples of at most two epochs, so two permutations are cached.
        self._epoch_permutation = lru_cache(maxsize=2)(self._shuffle_epoch)

    def batch(self, step: int) -> list[Example]:
        """Return the examples of a step; steps count from 1."""
        count = len(self._examples)
        examples = []
        for position in range((step - 1) * self.batch_size, step * self.batch_size):
            epoch, index = divmod(position, count)
            examples.append(self._examples[self._epoch_permutation(epoch)[index]])
        return examples

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self._examples), generator=generator).tolist()


class BatchOrders:
    """The batches of a run: each task group has a `BatchOrder` of its own examples."""

    def __init__(
        self, group_examples: Sequence[Sequence[Example]], batch_size: int, seed: int
    ) -> None:
        self._orders = [BatchOrder(examples, batch_size, seed) for examples in group_examples]
        self._counts = [len(examples) for examples in group_examples]

    @property
    def batch_size(self) -> int:
        """The number of examples of a step in which all groups are trained."""
        return sum(order.batch_size for order in self._orders)

    def epochs(self, steps: int) -> float:
        """Return the number of epochs in a number of steps, the least of all groups."""
        return min(
            steps * order.batch_size / count
            for order, count in zip(self._orders, self._counts, strict=True)
        )

    def batch(self, step: int, groups: Iterable[int] | None = None) -> list[Example]:
        """Return the examples of some groups (None: all) in a step, group after group."""
        selected = range(len(self._orders)) if groups is None else groups
        return [example for group in selected for example in self._orders[group].batch(step)]
