"""Flat, unpadded batch of tokens from several sequences, with their block tables in the KV cache.

The tokens of all sequences are concatenated: the model uses only the layout (tokens, ...), for
prefill, decode and training. In inference each sequence has a block table: the list of its KV-cache
blocks. A batch describes one step; the module contains no scheduling policy and no weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.device_transfers import to_device
from gpt.dropout import Dropout
from gpt.linear_adapter import AdaptedRows, AdapterKernels, BatchAdapters


@dataclass(frozen=True, eq=False)
class FrozenContext:
    """Training only: earlier tokens whose keys and values are constants, without gradients.

    The model has computed them in an earlier pass (`Batch.recorded_kv`).
    """

    starts: tuple[int, ...]  # For each sequence of the batch, the row of its first earlier token.
    # Keys and values of the earlier tokens by layer, each (tokens, KV heads, channels).
    kv_by_layer: Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T new tokens of B sequences."""

    query_lengths: tuple[int, ...]  # Number of new tokens of each sequence.
    # Number of earlier tokens of each sequence. In inference, their keys and values are in the KV
    # pool. In training, the earlier tokens of a child sequence are all tokens of its parent (see
    # `parents`), those of other sequences are in the frozen context.
    past_lengths: tuple[int, ...]
    positions: Tensor  # (T,) position of each token in its sequence; virtual tokens count too.
    # Where each token's KV is written: (T,) block numbers, and (T,) offsets in the block. None
    # without a KV pool.
    slot_mapping: tuple[Tensor, Tensor] | None = None
    # (B, blocks) block numbers of each sequence, in order. None without a KV pool.
    block_tables: Tensor | None = None
    # Flat indices of the tokens whose logits are computed. None: all tokens.
    logit_rows: Tensor | None = None
    # (B,) int32 context lengths on the device, for decode steps in a CUDA graph
    # (serving/worker/cuda_graphs.py); all query lengths are 1. The graph is captured once and
    # replayed with other context lengths. Attention reads the lengths from this tensor, and
    # `past_lengths` is only an upper bound. None: `past_lengths` is exact.
    device_context_lengths: Tensor | None = None
    dropout: Dropout | None = None  # Training only.
    # Training only: for each sequence, the index of its parent, or None. A parent is an earlier
    # sequence of the batch that has no parent. Each child sequence begins with the parent's tokens,
    # which are computed only once. An empty tuple: no sequence has a parent.
    parents: tuple[int | None, ...] = ()
    # Training only: the earlier tokens of all sequences; None: they are in the batch, or in a KV
    # pool. Attention then gets the keys and values of the batch, followed by those of the context.
    context: FrozenContext | None = None
    # If set, each layer stores its keys and values here, for a `FrozenContext`.
    recorded_kv: dict[int, tuple[Tensor, Tensor]] | None = None
    # The adapters that change linears, and the rows on which they act; empty: the base model.
    adapted_rows: tuple[AdaptedRows, ...] = ()
    # The same adapters in the memory of a GPU, for kernels. If set, `adapted_rows` is empty.
    adapter_kernels: AdapterKernels | None = None
    # This batch for each KV group after the first (gpt/kv_groups.py), with the group's slot mapping
    # and block tables.
    other_groups: tuple["Batch", ...] = ()
    # Cache of attention metadata (gpt/attention/paged.py): the first layer computes it, and the
    # later layers reuse it.
    attention_metadata: dict[object, object] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def unpaged(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        logit_rows: Tensor | None = None,
        dropout: Dropout | None = None,
        parents: Sequence[int | None] = (),
    ) -> "Batch":
        """Make a batch of whole sequences without a KV pool.

        `lengths`: the number of tokens of each sequence, without the tokens of its parent.
        """
        past_lengths = [0] * len(lengths)
        if parents:
            past_lengths = [0 if parent is None else lengths[parent] for parent in parents]
        return cls.continued(
            lengths, past_lengths, device, logit_rows=logit_rows, dropout=dropout, parents=parents
        )

    @classmethod
    def continued(
        cls,
        lengths: Sequence[int],
        past_lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        logit_rows: Tensor | None = None,
        dropout: Dropout | None = None,
        parents: Sequence[int | None] = (),
    ) -> "Batch":
        """Make a batch of sequences with earlier tokens, without a KV pool.

        The earlier tokens of a sequence are those of its parent, or will be a `FrozenContext`.
        """
        assert not parents or dropout is None, "dropout does not support shared parent sequences"
        positions = torch.cat(
            [
                torch.arange(past, past + length)
                for past, length in zip(past_lengths, lengths, strict=True)
            ]
        ).to(device)
        return cls(
            tuple(lengths),
            tuple(past_lengths),
            positions,
            logit_rows=logit_rows,
            dropout=dropout,
            parents=tuple(parents),
        )

    @classmethod
    def paged(
        cls,
        query_lengths: Sequence[int],
        past_lengths: Sequence[int],
        block_tables: Tensor,
        block_tokens: int,
        *,
        logit_rows: Tensor | None = None,
    ) -> "Batch":
        """Make a batch of new tokens; KV is stored in pool blocks of `block_tokens` tokens."""
        # The host computes all indices from the lengths, and one copy sends them to the device.
        indices = np.stack(token_indices(query_lengths, past_lengths, block_tokens))
        positions, sequences, block_indices, offsets = to_device(indices, block_tables.device)
        slot_mapping = block_tables[sequences, block_indices], offsets
        return cls(
            tuple(query_lengths),
            tuple(past_lengths),
            positions,
            slot_mapping,
            block_tables,
            logit_rows,
        )

    def with_groups(self, tables: Sequence[tuple[Tensor, Tensor]]) -> "Batch":
        """Return the batch with other KV groups.

        `tables`: for each of them, the block number of each token's slot, and the block tables.
        """
        assert self.slot_mapping is not None
        offsets = self.slot_mapping[1]
        other_groups = tuple(
            replace(
                self,
                slot_mapping=(slot_blocks, offsets),
                block_tables=block_tables,
                attention_metadata={},
            )
            for slot_blocks, block_tables in tables
        )
        return replace(self, other_groups=other_groups)

    def in_group(self, group: int) -> "Batch":
        """Return the batch for a KV group."""
        return self.other_groups[group - 1] if group else self

    @property
    def adapters(self) -> BatchAdapters:
        """The adapters that change linears."""
        return self.adapter_kernels or self.adapted_rows

    def past_row(self, sequence: int) -> int:
        """Return the row of a sequence's first earlier token among the keys and values.

        For training; 0 for a sequence without earlier tokens.
        """
        if not self.past_lengths[sequence]:
            return 0
        parent = self.parents[sequence] if self.parents else None
        if parent is not None:
            return self.query_starts[parent]
        assert self.context is not None
        return self.tokens + self.context.starts[sequence]

    @cached_property
    def tokens(self) -> int:
        return sum(self.query_lengths)

    @cached_property
    def context_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence after this step."""
        return tuple(
            past + new for past, new in zip(self.past_lengths, self.query_lengths, strict=True)
        )

    @cached_property
    def is_first_prefill(self) -> bool:
        """Whether no sequence has earlier tokens, and each has several new tokens."""
        return not any(self.past_lengths) and min(self.query_lengths) > 1

    @cached_property
    def query_starts(self) -> tuple[int, ...]:
        """The flat index of each sequence's first new token."""
        return (0, *accumulate(self.query_lengths[:-1]))

    @cached_property
    def last_rows(self) -> Tensor:
        """The flat index of each sequence's last new token."""
        return torch.tensor(self.query_lengths, device=self.positions.device).cumsum(0) - 1


def token_indices(
    query_lengths: Sequence[int], past_lengths: Sequence[int], block_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return four arrays with an entry for each new token of a batch.

    They are the token's position in its sequence, the index of the sequence, the column of the
    sequence's block table with the token's block, and the token's offset in this block.
    """
    counts = np.array(query_lengths)
    query_starts = counts.cumsum() - counts
    sequences = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(sequences)) + (np.array(past_lengths) - query_starts)[sequences]
    return positions, sequences, positions // block_tokens, positions % block_tokens
