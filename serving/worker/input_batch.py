"""A step laid out for the model: flat ids, where they belong, and which of them need logits.

All numbers are found on the host and reach the device in one copy. Steps in which everybody has one
token, and draws the next, are most of all steps, and there is little to find out about them.
"""

from dataclasses import dataclass
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.batch import Batch
from gpt.device_transfers import to_device
from serving.messages import Step

Ints = NDArray[np.int64]
NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Flat:
    """Where it says row, one of the batch's is meant."""

    ids: Tensor
    largest: int  # Of the ids.
    batch: Batch
    rows: Tensor  # Those that need logits: first the drawing ones, then those that are scored.
    sequence: Ints  # For each row, its place in the step.
    drawing: Ints  # The place of each row after which a token is drawn,
    positions: Ints  # and the position that the token gets.
    scored: Ints  # Rows whose followers in the prompt are scored.
    all_draw: bool  # All that is wanted is a token after each row: `rows` are all, in order.


def lay_out(step: Step, tables: Ints, block_tokens: int, last: Tensor) -> Flat:
    """`tables` has a row of blocks for each slot, and `last`, on the model's device, what each drew
    last: an id below 0 stands for that, where a step was planned before the host knew.
    """
    slots, ids = np.array(step.slots), np.array(step.ids, np.int64)
    alone = len(ids) == len(slots) and all(step.draws) and not any(step.scores)
    width = -(-max(map(add, step.past, step.lengths)) // block_tokens)
    flat = (_alone if alone else _mixed)(
        step, ids, tables[slots, :width], block_tokens, last.device
    )
    if ids.min() < 0:
        drawn = last[to_device(slots[flat.sequence], last.device)]
        flat.ids.copy_(torch.where(flat.ids < 0, drawn, flat.ids))
    return flat


def _alone(step: Step, ids: Ints, tables: Ints, block_tokens: int, device: torch.device) -> Flat:
    """Of sequences that have one token each, and draw."""
    past, rows = np.array(step.past), np.arange(len(ids))
    blocks, places = np.divmod(past, block_tokens)
    numbers = np.concatenate([ids, past, tables[rows, blocks], places, rows, tables.ravel()])
    parts = torch.from_numpy(numbers).to(device).split([len(ids)] * 5 + [tables.size])
    of_ids, positions, slots, at, of_rows, of_tables = parts
    batch = Batch(
        (1,) * len(ids),
        tuple(step.past),
        positions,
        slots=(slots, at),
        tables=of_tables.view(tables.shape),
    )
    return Flat(of_ids, int(ids.max()), batch, of_rows, rows, rows, past + 1, NOBODY, True)


def _mixed(step: Step, ids: Ints, tables: Ints, block_tokens: int, device: torch.device) -> Flat:
    """Of any sequences."""
    lengths = np.array(step.lengths)
    contexts, ends = lengths + np.array(step.past), lengths.cumsum()
    drawing, scored = np.flatnonzero(np.array(step.draws)), NOBODY
    if any(step.scores):
        pairs = zip(ends - lengths, step.scores, strict=True)
        scored = np.concatenate([np.arange(start, start + count) for start, count in pairs])
    # One that draws has its last row, and the rows before it that its guesses need.
    counts = 1 + np.array(step.drafts)[drawing] if step.drafts else np.ones_like(drawing)
    before = np.repeat(counts.cumsum(), counts) - 1 - np.arange(counts.sum())
    drawing = np.repeat(drawing, counts)
    rows = np.concatenate([ends[drawing] - 1 - before, scored])
    packed = torch.from_numpy(np.concatenate([ids, rows, tables.ravel()]))
    of_ids, of_rows, of_tables = packed.to(device).split([len(ids), len(rows), tables.size])
    batch = Batch.paged(step.lengths, step.past, of_tables.view(tables.shape), block_tokens)
    sequence, positions = np.repeat(np.arange(len(lengths)), lengths), contexts[drawing] - before
    all_draw = len(drawing) == len(rows) == len(ids)
    facts = (sequence, drawing, positions, scored, all_draw)
    return Flat(of_ids, int(ids.max()), batch, of_rows, *facts)
