"""Micro-batches: some examples as one flat batch, what they begin with computed once.

Nothing is padded. Examples of one task begin alike, with the virtual tokens at least: these ids are
a sequence of their own, which the others see as their past. Causal attention makes that exact.
Knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.batch import Batch, Dropout
from ptuning.data.dataset import Example


@dataclass(frozen=True)
class MicroBatch:
    """What one pass through the model computes."""

    ids: Tensor  # (T,), virtual ones at or above the vocabulary.
    batch: Batch  # Its rows are the tokens that predict a learned one.
    answers: Tensor  # (rows,) the ids that they should predict.


def micro_batch(
    examples: Sequence[Example],
    device: torch.device | str = "cpu",
    *,
    share: bool = True,
    dropout: Dropout | None = None,
) -> MicroBatch:
    """Examples of a task share their beginning, if `share` is set and nothing is dropped."""
    examples = sorted(examples, key=lambda example: example.task)
    begins = _beginnings(examples) if share and dropout is None else {}
    lengths = list(begins.values())
    parents: list[int | None] = [None] * len(begins)
    ids: list[int] = []
    for task, length in begins.items():
        ids += next(example.ids[:length] for example in examples if example.task == task)
    rows: list[int] = []
    places = list(begins)
    for example in examples:
        shared = begins.get(example.task, 0)
        # The last token predicts nothing.
        own = example.ids[shared:-1]
        rows += [len(ids) + place - 1 - shared for place in example.learned]
        parents.append(places.index(example.task) if shared else None)
        lengths.append(len(own))
        ids += own
    batch = Batch.plain(
        lengths,
        device,
        rows=torch.tensor(rows, device=device),
        dropout=dropout,
        parents=parents if begins else (),
    )
    answers = [example.ids[place] for example in examples for place in example.learned]
    return MicroBatch(torch.tensor(ids, device=device), batch, torch.tensor(answers, device=device))


def _beginnings(examples: Sequence[Example]) -> dict[int, int]:
    """For each task, how many leading ids all its examples have in common, if several do."""
    found: dict[int, int] = {}
    for task in dict.fromkeys(example.task for example in examples):
        some = [example for example in examples if example.task == task]
        # Each keeps the token that predicts its first learned one, and no less.
        limit = min(example.learned[0] - 1 for example in some)
        first, *others = some
        common = next(
            (n for n in range(limit) if any(one.ids[n] != first.ids[n] for one in others)), limit
        )
        if others and common > 0:
            found[task] = common
    return found


def portions(
    examples: Sequence[Example], count_max: int | None, tokens_max: int | None
) -> list[list[Example]]:
    """A step's examples in passes of at most so many, and of at most so many tokens if possible."""
    found: list[list[Example]] = [[]]
    tokens = 0
    for example in examples:
        size = len(example.ids)
        full = count_max is not None and len(found[-1]) >= count_max
        heavy = tokens_max is not None and tokens + size > tokens_max
        if found[-1] and (full or heavy):
            found.append([])
            tokens = 0
        found[-1].append(example)
        tokens += size
    return found if found[0] else []
