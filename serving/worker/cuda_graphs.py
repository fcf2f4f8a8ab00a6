"""Decoding without asking for each kernel: a step's work is recorded once, and then replayed.

Steps in which each sequence has one new token differ in numbers only. These are packed into one
array, padded to one of a few sizes, and copied into memory that stays; the work on that memory is a
CUDA graph. Where blocks lie is on the device, too, and only what changed is sent. Rows that pad
write to a block of their own. How tokens are chosen by other rules than the best is not known here.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.cpu.packed_linear import best
from gpt.device_transfers import Coming, to_device
from gpt.model.gpt_model import GPT
from serving.config import ServerConfig
from serving.messages import Step

log = logging.getLogger(__name__)

Work = Callable[[], object]
Record = Callable[[Work], Work]  # Something that does the work again whenever it is called.

# What each graph may take beside what it leaves behind: its part of the pool, and its launches.
GRAPH_BYTES = 32 << 20
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 32))
# Rows of what a step is packed into, a column for each sequence: its token (-1: what its slot drew
# last), its position, its slot; and places in all tables that changed, with their blocks.
IDS, POSITIONS, SLOTS, CELLS, BLOCKS = FIELDS = range(5)
# What is told of a row beside its likeliest token: which of its numbers are not finite.
BAD_LOGITS, BAD_HIDDEN = 1, 2


@dataclass(frozen=True)
class Made:
    """What a step came to on the device, a row for each sequence."""

    x: Tensor
    logits: Tensor | None = None  # Of the last stage, as
    told: Coming | None = None  # (2, rows) the likeliest tokens, and what is not finite.


@dataclass
class _Frame:
    """The memory of steps of one size."""

    packed: Tensor  # (fields, rows), int32
    hidden: Tensor | None  # What the stage before sends.
    x: Tensor | None = None
    logits: Tensor | None = None
    told: Tensor | None = None


def unfit(model: GPT, config: ServerConfig) -> str | None:
    """Why nothing is recorded; None: it can be."""
    if config.cuda_graphs == "off":
        return "cuda_graphs is off"
    if model.mesh.device.type != "cuda":
        return "there are none on a CPU"
    if model.mesh.tp > 1:
        return "sums over several tensor ranks are not recorded"
    if model.config.num_experts:
        return "which rows an expert has is looked at on the host"
    for block in model.blocks:
        attend = block.self_attention.attend
        # An attention that reads nothing but `Batch.ends` and such says so, or its object does.
        if not getattr(getattr(attend, "__self__", attend), "captured", False):
            return f"the attention in {attend.__module__} counts on the host"
    return None


def sizes(config: ServerConfig) -> tuple[int, ...]:
    """Of the steps that are recorded: few, and none much larger than what it is for."""
    most = min(config.running_requests_max, config.cuda_graph_rows_max)
    return (*(size for size in SIZES if size < most), most)


def reserved_bytes(model: GPT, config: ServerConfig) -> int:
    """What graphs may come to hold."""
    if unfit(model, config) is not None:
        return 0
    each = sizes(config)
    row = model.config.vocab_size * 4 + model.config.hidden_size * model.dtype.itemsize
    return len(each) * GRAPH_BYTES + sum(each) * row


class Graphs:
    """Steps of few sizes. `tables` is the host's own, and `last` what each slot drew last, with one
    place more for rows that pad; they write to the pool's block `scratch`.
    """

    def __init__(
        self,
        model: GPT,
        pool: KVPool,
        *,
        rows: Tensor | None,
        tables: NDArray[np.int64],
        last: Tensor,
        scratch: int,
        sizes: Sequence[int],
        record: Record | None = None,
    ) -> None:
        device = model.mesh.device
        self._model, self._pool, self._rows = model, pool, rows
        self._host, self._last = tables, last
        slots, self._width = tables.shape
        # One more row is what pads have, and the last one takes what is sent for nothing.
        self._pad, self._nowhere = slots, (slots + 1) * self._width
        held = torch.zeros(slots + 2, self._width, dtype=torch.int32, device=device)
        held[slots] = scratch
        self._held, self._cells = held, held.view(-1)
        self._changed: dict[int, tuple[int, int]] = {}  # Columns of a slot's table, from and to.
        self.sizes = tuple(sizes)
        self._frames: dict[int, tuple[_Frame, Work]] = {}
        self._record = record or _Capture(device)

    def takes(self, step: Step) -> bool:
        """Whether the step is of the kind that is recorded."""
        return (
            0 < len(step.slots) <= self.sizes[-1]
            and len(step.ids) == len(step.slots)
            and not any(step.scores)
        )

    def change(self, slot: int, start: int, end: int) -> None:
        """These columns of a slot's table are new on the host."""
        low, high = self._changed.get(slot, (start, end))
        self._changed[slot] = min(low, start), max(high, end)

    def run(self, step: Step, x: Tensor | None) -> Made:
        """The step, once; `x`: what came from the stage before. Nothing is waited for."""
        count = len(step.slots)
        size = next(size for size in self.sizes if size >= count)
        frame, replay = self._frames.get(size) or self._open(size)
        self._send(self._packed(step, size), frame)
        if x is not None:
            assert frame.hidden is not None
            frame.hidden[:count] = x
        replay()
        assert frame.x is not None
        if frame.logits is None or frame.told is None:
            return Made(frame.x[:count])
        return Made(frame.x[:count], frame.logits[:count], Coming(frame.told))

    # ------------------------------------------------------------------------------- on the host

    def _packed(self, step: Step | None, size: int) -> Tensor:
        """A step's numbers, or of pads alone, in memory that the device can copy by itself."""
        pinned = self._model.mesh.device.type == "cuda"
        host = torch.zeros(len(FIELDS), size, dtype=torch.int32, pin_memory=pinned)
        numbers = host.numpy()
        numbers[SLOTS], numbers[CELLS] = self._pad, self._nowhere
        if step is not None:
            count = len(step.slots)
            numbers[IDS, :count], numbers[POSITIONS, :count] = step.ids, step.past
            numbers[SLOTS, :count] = step.slots
            cells = self._news(step.slots)
            blocks = self._host.ravel()[cells]
            if len(cells) <= size:
                numbers[CELLS, : len(cells)], numbers[BLOCKS, : len(cells)] = cells, blocks
            else:  # Whole tables of those who begin.
                device = self._held.device
                self._cells[to_device(cells, device)] = to_device(blocks.astype(np.int32), device)
        return host

    def _news(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Places in all tables that the device has not heard of, of these slots."""
        spans = [
            np.arange(*self._changed.pop(slot)) + slot * self._width
            for slot in (slots if self._changed else ())
            if slot in self._changed
        ]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def _send(self, packed: Tensor, frame: _Frame) -> None:
        frame.packed.copy_(packed, non_blocking=True)

    def _open(self, size: int) -> tuple[_Frame, Work]:
        """Record what is done for steps of a size. Meanwhile all rows pad, so nothing is harmed."""
        began, before = time.perf_counter(), _held_bytes()
        model = self._model
        device = model.mesh.device
        packed = torch.zeros(len(FIELDS), size, dtype=torch.int32, device=device)
        hidden = None
        if not model.first:
            shape = size, model.config.hidden_size
            hidden = torch.zeros(shape, dtype=model.dtype, device=device)
        frame = _Frame(packed, hidden)
        self._send(self._packed(None, size), frame)

        def work() -> None:
            self._pass(frame)

        try:
            replay = self._record(work)
        except RuntimeError as error:  # Something in it cannot be recorded; but it can be done.
            log.warning("event=graph_not_recorded rows=%d reason=%r", size, str(error))
            replay = work
        else:
            spent = time.perf_counter() - began
            more = _held_bytes() - before
            log.info("event=graph_recorded rows=%d seconds=%.2f bytes=%d", size, spent, more)
        self._frames[size] = frame, replay
        return frame, replay

    # ----------------------------------------------------------------------------- on the device

    def _pass(self, frame: _Frame) -> None:
        """What is recorded: no number of it is looked at on the host."""
        model, size = self._model, self._pool.block_tokens
        fields = frame.packed.long()
        self._cells.index_copy_(0, fields[CELLS], frame.packed[BLOCKS])
        slots, positions = fields[SLOTS], fields[POSITIONS]
        tables = self._held.index_select(0, slots)
        block = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1).long()
        count, bound = len(slots), model.config.max_position_embeddings - 1
        batch = Batch(
            (1,) * count,
            (bound,) * count,
            positions,
            (block, positions % size),
            tables,
            ends=frame.packed[POSITIONS] + 1,
        )
        x = frame.hidden
        if x is None:
            ids = fields[IDS]
            x = torch.where(ids < 0, self._last.index_select(0, slots), ids)
        frame.x = x = model.hidden(x, batch, self._pool, self._rows)
        if not model.last:
            return
        frame.logits = logits = model.head(x, batch)
        tokens = best(logits)
        self._last.index_copy_(0, slots, tokens)
        finite = [one.isfinite().all(-1).logical_not().long() for one in (logits, x)]
        frame.told = torch.stack([tokens, BAD_LOGITS * finite[0] + BAD_HIDDEN * finite[1]])


class _Capture:
    """CUDA graphs that share their memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            return self._recorded(work)

    def _recorded(self, work: Work) -> Work:
        # What is compiled, tuned or allocated at a first call must not be so while it is recorded.
        beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(2):
                work()
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


def _held_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
