"""Input batch: a step as flat token ids, positions, block tables and rows that need logits.

The host computes all indices and packs them, so that one copy sends them to the device.
Decode-only steps are the most frequent ones and have a shorter path: every sequence has one new
token and samples the next.
"""

from dataclasses import dataclass, replace
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.batch import Batch, token_indices
from gpt.device_transfers import to_device
from serving.messages import Step

IntArray = NDArray[np.int64]
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class InputBatch:
    """The model's inputs for one step, and the rows of its output that are sampled or scored.

    A row is a new token of the batch. A sequence is identified by its index in the step.
    """

    token_ids: Tensor
    token_id_max: int  # The largest id; virtual tokens have ids from the vocabulary size on.
    batch: Batch
    # Indices of the rows that need logits: first the sampled rows, then the scored rows.
    logits_rows: Tensor
    row_sequences: IntArray  # The sequence of each row.
    sampled_sequences: IntArray  # The sequence of each sampled row.
    # For each sampled row: the position of the sampled token in its sequence. It is the row's
    # position in the sequence + 1.
    positions: IntArray
    scored_rows: IntArray  # Indices of the rows whose logits score the next token of the prompt.
    scored_positions: IntArray  # For each scored row: its position in its sequence.
    # Whether a token is sampled from every row, in order, and no row is scored.
    samples_every_row: bool


def build_input_batch(
    step: Step, block_tables: IntArray, block_tokens: int, last_tokens: Tensor
) -> InputBatch:
    """Build the flat input tensors of a step.

    `block_tables`: the block numbers, (KV groups, slots, blocks). `last_tokens`: each slot's last
    sampled token, on the model's device. With asynchronous scheduling a step may be planned before
    the host knows this token. The step then has the id -1 instead, which this function replaces by
    the token.
    """
    slots, ids = np.array(step.slots), np.array(step.token_ids, np.int64)
    is_decode_only = (
        len(ids) == len(slots) and all(step.draws) and not any(step.prompt_score_counts)
    )
    table_width = -(-max(map(add, step.past, step.lengths)) // block_tokens)
    tables = block_tables[0, slots, :table_width]
    inputs = (_decode_batch if is_decode_only else _mixed_batch)(
        step, ids, tables, block_tokens, last_tokens.device
    )
    if len(block_tables) > 1:
        other_tables = block_tables[1:, slots, :table_width]
        batch = _with_groups(inputs, step, other_tables, block_tokens, last_tokens.device)
        inputs = replace(inputs, batch=batch)
    if ids.min() < 0:
        sampled_ids = last_tokens[to_device(slots[inputs.row_sequences], last_tokens.device)]
        inputs.token_ids.copy_(torch.where(inputs.token_ids < 0, sampled_ids, inputs.token_ids))
    return inputs


def _with_groups(
    inputs: InputBatch,
    step: Step,
    tables: IntArray,
    block_tokens: int,
    device: torch.device,
) -> Batch:
    """Return the batch with the KV groups after the first, whose block tables are `tables`."""
    _, row_sequences, table_columns, _ = token_indices(step.lengths, step.past, block_tokens)
    slot_blocks = tables[:, row_sequences, table_columns]
    packed = to_device(np.concatenate([slot_blocks.ravel(), tables.ravel()]), device)
    group_blocks, group_tables = packed.split([slot_blocks.size, tables.size])
    return inputs.batch.with_groups(
        list(
            zip(group_blocks.view(slot_blocks.shape), group_tables.view(tables.shape), strict=True)
        )
    )


def _decode_batch(
    step: Step, ids: IntArray, block_tables: IntArray, block_tokens: int, device: torch.device
) -> InputBatch:
    """Build the batch of a decode-only step: every sequence has one token and samples one."""
    past, rows = np.array(step.past), np.arange(len(ids))
    blocks, block_offsets = np.divmod(past, block_tokens)
    packed_inputs = np.concatenate(
        [ids, past, block_tables[rows, blocks], block_offsets, rows, block_tables.ravel()]
    )
    tensors = to_device(packed_inputs, device).split([len(ids)] * 5 + [block_tables.size])
    ids_tensor, positions, slot_blocks, slot_offsets, rows_tensor, tables_tensor = tensors
    batch = Batch(
        (1,) * len(ids),
        tuple(step.past),
        positions,
        slot_mapping=(slot_blocks, slot_offsets),
        block_tables=tables_tensor.view(block_tables.shape),
    )
    return InputBatch(
        ids_tensor,
        int(ids.max()),
        batch,
        logits_rows=rows_tensor,
        row_sequences=rows,
        sampled_sequences=rows,
        positions=past + 1,
        scored_rows=NO_ROWS,
        scored_positions=NO_ROWS,
        samples_every_row=True,
    )


def _mixed_batch(
    step: Step, ids: IntArray, block_tables: IntArray, block_tokens: int, device: torch.device
) -> InputBatch:
    """Build the batch of any step: prefill chunks, decodes, drafts and prompt scores."""
    lengths = np.array(step.lengths)
    contexts, ends = lengths + np.array(step.past), lengths.cumsum()
    sampled_sequences, scored_rows = np.flatnonzero(np.array(step.draws)), NO_ROWS
    if any(step.prompt_score_counts):
        pairs = zip(ends - lengths, step.prompt_score_counts, strict=True)
        scored_rows = np.concatenate([np.arange(start, start + count) for start, count in pairs])
    # A sequence with n draft tokens samples from its last n + 1 rows.
    sampled_counts = (
        1 + np.array(step.draft_counts)[sampled_sequences]
        if step.draft_counts
        else np.ones_like(sampled_sequences)
    )
    rows_before_last = (
        np.repeat(sampled_counts.cumsum(), sampled_counts) - 1 - np.arange(sampled_counts.sum())
    )
    sampled_sequences = np.repeat(sampled_sequences, sampled_counts)
    rows = np.concatenate([ends[sampled_sequences] - 1 - rows_before_last, scored_rows])
    token_positions, row_sequences, table_columns, block_offsets = token_indices(
        step.lengths, step.past, block_tokens
    )
    slot_blocks = block_tables[row_sequences, table_columns]
    arrays = [ids, rows, token_positions, slot_blocks, block_offsets, block_tables.ravel()]
    tensors = to_device(np.concatenate(arrays), device).split([len(array) for array in arrays])
    ids_tensor, rows_tensor, positions, device_blocks, device_offsets, tables_tensor = tensors
    batch = Batch(
        tuple(step.lengths),
        tuple(step.past),
        positions,
        slot_mapping=(device_blocks, device_offsets),
        block_tables=tables_tensor.view(block_tables.shape),
    )
    return InputBatch(
        ids_tensor,
        int(ids.max()),
        batch,
        logits_rows=rows_tensor,
        row_sequences=row_sequences,
        sampled_sequences=sampled_sequences,
        positions=contexts[sampled_sequences] - rows_before_last,
        scored_rows=scored_rows,
        scored_positions=token_positions[scored_rows],
        samples_every_row=len(sampled_sequences) == len(rows) == len(ids),
    )
