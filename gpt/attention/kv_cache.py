"""The memory for keys and values: blocks of tokens, allocated once.

A pool holds the blocks of this rank's layers and KV heads, in the model's dtype or in eight bits.
Who owns a block is not known here: a batch says which blocks a sequence reads and which slots its
new tokens fill.
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
from gpt.cpu.huge_pages import zeros
from gpt.parallel.sharding import first_group, local_groups

BLOCK_TOKENS = 32
NARROW = torch.float8_e4m3fn
# How much of a pool is taken at once, and what madvise() calls that; Python has no name for it.
_PIECE_BYTES = 1 << 23
_POPULATE_WRITE = 23
# How keys and values may be kept; "auto" is the model's own dtype.
KINDS = {"fp8": NARROW}


class KVPool:
    """Keys and values of `blocks` blocks, for each layer (blocks, 2, groups, tokens, channels).

    A block's keys of one head lie together, so that reading it takes few and long rows.
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
        groups = local_groups(config, tp)
        shape = (len(layers), blocks, 2, groups, block_tokens, config.kv_channels)
        self._memory = zeros(shape, dtype, torch.device(device))
        # The same as what torch can index: of numbers of eight bits, bytes.
        self._moved = self._memory.view(torch.uint8) if dtype == NARROW else self._memory
        self._layers = {layer: self._memory[place] for place, layer in enumerate(layers)}

    def layer(self, layer: int) -> Tensor:
        """Keys and values of a global layer."""
        return self._layers[layer]

    def populate(self, free_bytes: Callable[[], int]) -> None:
        """Have the system give all of this memory, in spare time; a thread of its own waits for it.

        Otherwise each new page is waited for by the prompt that is first to write there, which took
        a tenth of its time and more. As much as the pool has is left to others: where several
        servers begin at once, each has counted the same memory as free.
        """
        if self._memory.device.type == "cpu":
            arguments = (weakref.ref(self), free_bytes)
            thread = threading.Thread(target=_populate, args=arguments, daemon=True)
            thread.name = "pool"
            thread.start()

    def _take(self, start: int, free_bytes: Callable[[], int]) -> bool:
        """A piece of the memory; False if there is none, or the system cannot be asked."""
        length = min(_PIECE_BYTES, self._memory.nbytes - start)
        if length <= 0 or free_bytes() < self._memory.nbytes:
            return False
        return _madvise(self._memory.data_ptr() + start, length, _POPULATE_WRITE) == 0

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero them in every layer: what is not finite would reach their next owner."""
        self._moved[:, torch.tensor(blocks, device=self._memory.device)] = 0

    def fill(self, blocks: Sequence[int], start: int, values: Tensor) -> None:
        """Write keys and values of tokens, (tokens, layers, 2, groups, channels).

        `start` is the first one's place in the first of these blocks.
        """
        memory = self._memory
        places = torch.arange(start, start + len(values), device=memory.device)
        held = torch.tensor(blocks, device=memory.device)[places // self.block_tokens]
        # What is not finite would reach the block's next owner, whatever became of this one.
        most = torch.finfo(memory.dtype).max
        narrow = memory.dtype == NARROW
        wide = values.dtype if narrow else torch.promote_types(values.dtype, memory.dtype)
        values = values.to(memory.device, wide).clamp(-most, most).to(memory.dtype)
        values = values.view(self._moved.dtype)
        self._moved[:, held, :, :, places % self.block_tokens] = values

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks in every layer; all are read before any is written."""
        device = self._memory.device
        held = self._moved.index_select(1, torch.tensor(sources, device=device))
        self._moved.index_copy_(1, torch.tensor(targets, device=device), held)


def _populate(pool: "weakref.ref[KVPool]", free_bytes: Callable[[], int]) -> None:
    """As long as there is such a pool."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Of this thread, on Linux.
    start, there = 0, True
    while there:
        held = pool()
        there = held is not None and held._take(start, free_bytes)
        start += _PIECE_BYTES
        del held


def _madvise(address: int, length: int, advice: int) -> int:
    """As the system has it: Python's own keeps all other threads waiting."""
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is None:
        return -1
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(call(address, length, advice))


def prefix_part(
    table: Tensor, config: GPTConfig, layers: Sequence[int], rank: int, tp: int
) -> Tensor:
    """Of a prefix adapter's table what a rank's pool takes: these layers, and its KV heads."""
    shape = (-1, config.num_layers, 2, config.num_query_groups, config.kv_channels)
    first, count = first_group(config, rank, tp), local_groups(config, tp)
    return table.view(shape)[:, list(layers), :, first : first + count]
