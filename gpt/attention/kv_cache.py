"""Paged KV cache: one preallocated pool of fixed-size blocks (pages) of keys and values.

The KV pool contains the blocks of this rank's layers and KV heads, in the model's dtype or in fp8.
Some engines call a block a page. The module does not know which sequence owns a block: the block
table of a batch lists the blocks that a sequence reads, and the slot mapping lists the slots that
the new tokens fill.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.cpu.huge_pages import huge_page_zeros
from gpt.parallel.weight_sharding import first_kv_head, local_kv_heads

BLOCK_TOKENS = 32
FP8_DTYPE = torch.float8_e4m3fn
# Bytes per madvise() call of the prefault thread, and the advice constant (not defined in Python).
_PREFAULT_CHUNK_BYTES = 1 << 23
_MADV_POPULATE_WRITE = 23
# The values of `kv_dtype` besides "auto", which means the model's dtype.
KV_DTYPES = {"fp8": FP8_DTYPE}


class KVPool:
    """Keys and values of `blocks` blocks; a layer is (blocks, 2, KV heads, tokens, channels).

    The keys of one head in a block are contiguous, so that kernels read few long rows.
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
    ) -> None:
        self.block_tokens = block_tokens
        kv_heads = local_kv_heads(config, tp)
        shape = (len(layers), blocks, 2, kv_heads, block_tokens, config.kv_channels)
        self._memory = huge_page_zeros(shape, dtype, torch.device(device))
        # torch does not index fp8 tensors, so the same memory is viewed as bytes.
        self._indexable = self._memory.view(torch.uint8) if dtype == FP8_DTYPE else self._memory
        self._layers = {layer: self._memory[index] for index, layer in enumerate(layers)}

    def layer(self, layer: int) -> Tensor:
        """Return the keys and values of one layer, by its global number."""
        return self._layers[layer]

    def prefault(self, free_bytes: Callable[[], int]) -> None:
        """Pre-fault the memory pages of a pool in CPU memory, in a low-priority background thread.

        Otherwise the prefill that first writes a page waits for the page fault, which took a tenth
        of the prefill time and more. The thread stops when the free memory is smaller than this
        pool, because several servers that start together may have counted the same free memory.
        """
        if self._memory.device.type == "cpu":
            arguments = (weakref.ref(self), free_bytes)
            thread = threading.Thread(target=_prefault, args=arguments, daemon=True)
            thread.name = "pool"
            thread.start()

    def _prefault_chunk(self, start: int, free_bytes: Callable[[], int]) -> bool:
        """Pre-fault the chunk at `start`; False at the end, or if prefaulting must stop."""
        length = min(_PREFAULT_CHUNK_BYTES, self._memory.nbytes - start)
        if length <= 0 or free_bytes() < self._memory.nbytes:
            return False
        return _madvise(self._memory.data_ptr() + start, length, _MADV_POPULATE_WRITE) == 0

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero the blocks in every layer, so that NaN values do not reach the next sequence."""
        self._indexable[:, torch.tensor(blocks, device=self._memory.device)] = 0

    def write_tokens(self, blocks: Sequence[int], start: int, values: Tensor) -> None:
        """Write keys and values (tokens, layers, 2, KV heads, channels) into `blocks`.

        `start` is the offset of the first token in the first block.
        """
        memory = self._memory
        positions = torch.arange(start, start + len(values), device=memory.device)
        token_blocks = torch.tensor(blocks, device=memory.device)[positions // self.block_tokens]
        # Clamped, because values outside the range of the pool's dtype would become infinite, and
        # would stay in the block when another sequence gets the block.
        dtype_max = torch.finfo(memory.dtype).max
        is_fp8 = memory.dtype == FP8_DTYPE
        clamp_dtype = values.dtype if is_fp8 else torch.promote_types(values.dtype, memory.dtype)
        values = values.to(memory.device, clamp_dtype).clamp(-dtype_max, dtype_max).to(memory.dtype)
        values = values.view(self._indexable.dtype)
        self._indexable[:, token_blocks, :, :, positions % self.block_tokens] = values

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks in every layer; all are read before any is written."""
        device = self._memory.device
        contents = self._indexable.index_select(1, torch.tensor(sources, device=device))
        self._indexable.index_copy_(1, torch.tensor(targets, device=device), contents)


def _prefault(pool_ref: "weakref.ref[KVPool]", free_bytes: Callable[[], int]) -> None:
    """Pre-fault the pool chunk by chunk until it is done or the pool is freed."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Only this thread.
    start, has_more = 0, True
    while has_more:
        pool = pool_ref()
        has_more = pool is not None and pool._prefault_chunk(start, free_bytes)
        start += _PREFAULT_CHUNK_BYTES
        del pool


def _madvise(address: int, length: int, advice: int) -> int:
    """Call libc's madvise() and return its result.

    Python's mmap.madvise() would hold the GIL during the call.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return -1
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, length, advice))


def prefix_shard(
    table: Tensor, config: GPTConfig, layers: Sequence[int], rank: int, tp: int
) -> Tensor:
    """Return the part of a prefix adapter's table for a rank: its `layers` and its KV heads."""
    shape = (-1, config.num_layers, 2, config.num_query_groups, config.kv_channels)
    first_head, heads = first_kv_head(config, rank, tp), local_kv_heads(config, tp)
    return table.view(shape)[:, list(layers), :, first_head : first_head + heads]
