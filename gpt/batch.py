"""A batch: flat tokens of several sequences, and where each sequence's past lies.

Tokens of all sequences stand one after another, with no padding: (tokens, ...) is the only layout
of the model, for prefill, decode and training alike. A sequence may have a past in the KV pool,
found through its row of block numbers. These are facts about a step; no policy and no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """Masks drawn by counting, not by state: the same for any split, and in a recomputation."""

    seed: int

    def keep(self, shape: tuple[int, ...], p: float, site: tuple[int, ...], like: Tensor) -> Tensor:
        """Which elements stay, for one place in the network, named by numbers."""
        key = self.seed
        for number in site:
            # A 64-bit mix (SplitMix64), so that neighbouring sites share nothing.
            key = (key ^ (number + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            key ^= key >> 31
        generator = torch.Generator(like.device).manual_seed(key - 2**63)
        return torch.rand(shape, generator=generator, device=like.device) >= p


@dataclass(frozen=True)
class Batch:
    """One step's tokens. T is their number, B the number of sequences."""

    lengths: tuple[int, ...]  # New tokens of each sequence.
    past: tuple[int, ...]  # Tokens before these: in the KV pool, or a parent's.
    positions: Tensor  # (T,) in its own sequence, virtual tokens counted.
    # (T,) twice: the pool's block, and the place in it, where each new token's KV goes.
    slots: tuple[Tensor, Tensor] | None = None
    tables: Tensor | None = None  # (B, blocks) the pool blocks of each sequence, in order.
    rows: Tensor | None = None  # Which tokens need logits; None means all.
    # (B,) int32: what `contexts` has, where only the device knows. `past` is a bound then, and all
    # lengths are 1: see serving/worker/cuda_graphs.py.
    ends: Tensor | None = None
    dropout: Dropout | None = None  # Training only.
    # Training only: the earlier sequence whose tokens stand before each one's own, seen by it as
    # its past; None: nobody's. A parent has no parent. Empty: nobody has one.
    parents: tuple[int | None, ...] = ()
    # What the first layer finds out and the others use: see gpt/attention/paged.py.
    kept: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def plain(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        rows: Tensor | None = None,
        dropout: Dropout | None = None,
        parents: Sequence[int | None] = (),
    ) -> "Batch":
        """Whole sequences without a KV pool."""
        assert not parents or dropout is None, "what is shared cannot be dropped for each alone"
        past = tuple(0 if p is None else lengths[p] for p in parents) or (0,) * len(lengths)
        starts_lengths = zip(past, lengths, strict=True)
        positions = torch.cat([torch.arange(p, p + n) for p, n in starts_lengths]).to(device)
        return cls(
            tuple(lengths), past, positions, rows=rows, dropout=dropout, parents=tuple(parents)
        )

    @classmethod
    def paged(
        cls,
        lengths: Sequence[int],
        past: Sequence[int],
        tables: Tensor,
        block_tokens: int,
        *,
        rows: Tensor | None = None,
    ) -> "Batch":
        """New tokens of sequences whose KV lies in a pool of blocks of `block_tokens`."""
        # Counted on the host, where lengths are known, and copied to the device at once.
        count = np.array(lengths)
        sequence = np.repeat(np.arange(len(count)), count)
        positions = np.arange(len(sequence)) + (np.array(past) - count.cumsum() + count)[sequence]
        numbers = np.stack(
            [positions, sequence, positions // block_tokens, positions % block_tokens]
        )
        positions, sequence, block, place = torch.from_numpy(numbers).to(tables.device)
        slots = tables[sequence, block], place
        return cls(tuple(lengths), tuple(past), positions, slots, tables, rows)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Tokens that each sequence has after this step."""
        return tuple(p + n for p, n in zip(self.past, self.lengths, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The flat index of each sequence's first new token."""
        return (0, *accumulate(self.lengths[:-1]))

    @cached_property
    def last_rows(self) -> Tensor:
        """The flat index of each sequence's last token."""
        return torch.tensor(self.lengths, device=self.positions.device).cumsum(0) - 1

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """For each flat token: its sequence, and its place among that sequence's new tokens."""
        device = self.positions.device
        lengths = torch.tensor(self.lengths, device=device)
        sequence = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        return sequence, torch.arange(self.tokens, device=device) - starts[sequence]
