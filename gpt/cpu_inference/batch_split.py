"""Division of a batch by sequences, which the fused decoder and the layers of gpt/model compute."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.model.adapted_linear import select_adapted_rows


def sequences_of_rows(batch: Batch, rows: Tensor | None) -> list[int]:
    """Return the sequences that have some of the rows, in ascending order; None: all rows."""
    if rows is None:
        return list(range(len(batch.query_lengths)))
    starts = torch.tensor(batch.query_starts)
    owners = torch.searchsorted(starts, rows, right=True) - 1
    sequences: list[int] = owners.unique().tolist()
    return sequences


def select_sequences(batch: Batch, sequences: Sequence[int]) -> tuple[Batch, Tensor]:
    """Return a batch with a KV pool and only these sequences, and the rows of its tokens."""
    assert batch.slot_mapping is not None and batch.block_tables is not None
    starts, lengths = batch.query_starts, batch.query_lengths
    rows = torch.cat([starts[index] + torch.arange(lengths[index]) for index in sequences])
    blocks, offsets = batch.slot_mapping
    logit_rows = None
    if batch.logit_rows is not None:
        positions = torch.full((batch.tokens,), -1)
        positions[rows] = torch.arange(len(rows))
        selected = positions[batch.logit_rows]
        # Without a row, the values of no row are read, so all rows may be computed.
        logit_rows = selected[selected >= 0] if bool((selected >= 0).any()) else None
    selected_batch = replace(
        batch,
        query_lengths=tuple(lengths[index] for index in sequences),
        past_lengths=tuple(batch.past_lengths[index] for index in sequences),
        positions=batch.positions[rows],
        slot_mapping=(blocks[rows], offsets[rows]),
        block_tables=batch.block_tables[torch.tensor(sequences)],
        logit_rows=logit_rows,
        adapted_rows=select_adapted_rows(batch.adapted_rows, rows),
        other_groups=tuple(select_sequences(group, sequences)[0] for group in batch.other_groups),
        attention_metadata={},
    )
    return selected_batch, rows
