"""Flat, unpadded batch of tokens from several sequences, with their block tables in the KV cache.

The tokens of all sequences are concatenated without padding: the model uses only the layout
(tokens, ...), for prefill, decode and training. The keys and values of a sequence's earlier tokens
may be in the KV cache, in the blocks that the sequence's row of the block table lists. A batch only
describes one step; the module contains no scheduling policy and no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gpt.dropout import Dropout


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T new tokens of B sequences."""

    query_lengths: tuple[int, ...]  # Number of new tokens of each sequence.
    # Number of earlier tokens of each sequence, which are in the KV pool or in the parent.
    past_lengths: tuple[int, ...]
    positions: Tensor  # (T,) position of each token in its sequence, virtual tokens included.
    # Two (T,) tensors: the KV pool block, and the offset in it, where each token's KV is written.
    slot_mapping: tuple[Tensor, Tensor] | None = None
    block_tables: Tensor | None = None  # (B, blocks) block numbers of each sequence, in order.
    logit_rows: Tensor | None = None  # Flat rows of the tokens that need logits; None means all.
    # (B,) int32 context lengths if only the device has them, as in serving/worker/cuda_graphs.py.
    # Then `past_lengths` is an upper bound, and all query lengths are 1.
    device_context_lengths: Tensor | None = None
    dropout: Dropout | None = None  # Training only.
    # Training only: for each sequence, the index of its parent or None. A parent is an earlier
    # sequence whose tokens precede the sequence's own tokens; it has no parent itself. Empty: no
    # sequence has a parent.
    parents: tuple[int | None, ...] = ()
    # Cache of attention metadata, which the first layer computes and later layers reuse (see
    # gpt/attention/paged.py).
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
        """Make a batch of whole sequences without a KV pool."""
        assert not parents or dropout is None, "dropout does not support shared parent sequences"
        past_lengths = tuple(0 if p is None else lengths[p] for p in parents) or (0,) * len(lengths)
        past_and_lengths = zip(past_lengths, lengths, strict=True)
        positions = torch.cat([torch.arange(p, p + n) for p, n in past_and_lengths]).to(device)
        return cls(
            tuple(lengths),
            past_lengths,
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
        """Make a batch of new tokens; the sequences' KV is in blocks of `block_tokens` tokens."""
        # The host has the lengths, so it computes the indices, and one copy sends them to the
        # device.
        counts = np.array(query_lengths)
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions = (
            np.arange(len(sequence)) + (np.array(past_lengths) - counts.cumsum() + counts)[sequence]
        )
        indices = np.stack(
            [positions, sequence, positions // block_tokens, positions % block_tokens]
        )
        positions, sequence, block, offset = torch.from_numpy(indices).to(block_tables.device)
        slot_mapping = block_tables[sequence, block], offset
        return cls(
            tuple(query_lengths),
            tuple(past_lengths),
            positions,
            slot_mapping,
            block_tables,
            logit_rows,
        )

    @cached_property
    def tokens(self) -> int:
        return sum(self.query_lengths)

    @cached_property
    def context_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence after this step."""
        return tuple(p + n for p, n in zip(self.past_lengths, self.query_lengths, strict=True))

    @cached_property
    def query_starts(self) -> tuple[int, ...]:
        """The flat index of each sequence's first new token."""
        return (0, *accumulate(self.query_lengths[:-1]))

    @cached_property
    def last_rows(self) -> Tensor:
        """The flat index of each sequence's last token."""
        return torch.tensor(self.query_lengths, device=self.positions.device).cumsum(0) - 1
