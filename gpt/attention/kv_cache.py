"""Paged KV cache: one preallocated pool of fixed-size blocks (pages) of keys and values.

The KV pool contains the blocks of this rank's layers and KV heads, in the model's dtype or in fp8.
The module does not record which sequence owns a block. A batch does: its block tables list the
blocks that each sequence reads, and its slot mapping says where each new token's KV is written.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.huge_pages import huge_page_zeros, prefault
from gpt.device_transfers import to_device
from gpt.kv_groups import KVGroup
from gpt.parallel.weight_sharding import first_kv_head, local_kv_heads

BLOCK_TOKENS = 32
FP8_DTYPE = torch.float8_e4m3fn
# The pool's dtype for each value of the setting `kv_dtype`. The value "auto" is not in the table:
# with it, the pool has the model's dtype.
KV_DTYPES = {"fp8": FP8_DTYPE}


class KVPool:
    """Memory for keys and values: `blocks` blocks in each of `layers` (global layer numbers).

    Shape of a layer: (blocks, 2, KV heads, block tokens, channels); in the dimension of size 2,
    index 0 is keys and index 1 is values. The keys of one head in a block are contiguous, so a
    kernel reads them as one range of memory.

    `groups`: the KV groups of the model (gpt/kv_groups.py). Layer i of each group uses the same
    memory, because a block belongs to one group at a time. None: all layers are one group.
    """

    def __init__(
        self,
        config: GPTConfig,
        layers: Sequence[int],
        blocks: int,
        *,
        tp: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        groups: Sequence[KVGroup] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        kv_heads = local_kv_heads(config, tp)
        # By group: the pool's layers, as indices in `layers`.
        self._group_rows = [
            [row for row, layer in enumerate(layers) if groups is None or layer in group.layers]
            for group in groups or [KVGroup(None, tuple(layers))]
        ]
        parts = max(map(len, self._group_rows))
        shape = (parts, blocks, 2, kv_heads, block_tokens, config.kv_channels)
        self._memory = huge_page_zeros(shape, dtype, torch.device(device))
        # torch does not index fp8 tensors, so indexing uses a view of the memory as bytes.
        self._indexable = self._memory.view(torch.uint8) if dtype == FP8_DTYPE else self._memory
        self._layers: dict[int, Tensor] = {}
        self._group_of_layer: dict[int, int] = {}
        for group, rows in enumerate(self._group_rows):
            for part, row in enumerate(rows):
                self._layers[layers[row]] = self._memory[part]
                self._group_of_layer[layers[row]] = group

    def layer(self, layer: int) -> Tensor:
        """Return the keys and values of the layer with this global number."""
        return self._layers[layer]

    def group(self, layer: int) -> int:
        """Return the KV group of the layer with this global number."""
        return self._group_of_layer[layer]

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, in all layers of its group."""
        return self._memory.nbytes // self._memory.shape[1]

    def prefault(self, free_bytes: Callable[[], int]) -> None:
        """Pre-fault the OS pages of a pool in CPU memory, in a background thread.

        Without the thread, the first prefill that writes to an OS page waits for a page fault;
        these faults took 10 % of the prefill time or more. `free_bytes`: as in `prefault`.
        """
        if self._memory.device.type == "cpu":
            prefault(self._memory, free_bytes, "pool")

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero the blocks in every layer, so that the next sequence in them reads no old NaN."""
        self._indexable[:, to_device(np.array(blocks, np.int64), self._memory.device)] = 0

    def write_tokens(
        self, blocks: Sequence[int], start: int, values: Tensor, group: int = 0
    ) -> None:
        """Write a group's part of keys and values into its blocks.

        `values`: (tokens, layers, 2, KV heads, channels), for all layers of the pool. The tokens
        are consecutive; the first one is written at the offset `start` of `blocks[0]`.
        """
        rows = self._group_rows[group]
        if len(rows) < values.shape[1]:
            values = values[:, rows]
        memory = self._memory
        positions = torch.arange(start, start + len(values), device=memory.device)
        device_blocks = to_device(np.array(blocks, np.int64), memory.device)
        token_blocks = device_blocks[positions // self.block_tokens]
        # Clamp to the finite range of the pool's dtype. Attention multiplies masked values by 0,
        # and 0 x inf is NaN. Without the clamp, an infinite number would therefore make the output
        # NaN, for this sequence and for the next sequence that uses the block.
        dtype_max = torch.finfo(memory.dtype).max
        is_fp8 = memory.dtype == FP8_DTYPE
        clamp_dtype = values.dtype if is_fp8 else torch.promote_types(values.dtype, memory.dtype)
        values = values.to(memory.device, clamp_dtype).clamp(-dtype_max, dtype_max).to(memory.dtype)
        values = values.view(self._indexable.dtype)
        memory = self._indexable[: len(rows)]
        memory[:, token_blocks, :, :, positions % self.block_tokens] = values

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks `sources` to `targets` in every layer; all reads precede the writes."""
        device = self._memory.device
        contents = self._indexable.index_select(1, to_device(np.array(sources, np.int64), device))
        self._indexable.index_copy_(1, to_device(np.array(targets, np.int64), device), contents)


def prefix_shard(
    table: Tensor, config: GPTConfig, layers: Sequence[int], rank: int, tp: int
) -> Tensor:
    """Return the part of a prefix adapter's `table` for the `layers` and KV heads of one rank.

    The result has the shape (virtual tokens, layers, 2, KV heads, channels).
    """
    shape = (-1, config.num_layers, 2, config.num_query_groups, config.kv_channels)
    first_head, heads = first_kv_head(config, rank, tp), local_kv_heads(config, tp)
    return table.view(shape)[:, list(layers), :, first_head : first_head + heads]
