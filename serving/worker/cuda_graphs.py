"""CUDA graphs: decode steps of a few padded sizes are captured once and replayed.

Decode steps of one size run the same kernels and differ only in their inputs. The inputs of a step
are packed into one array, padded to one of a few batch sizes, and copied into a fixed buffer; a
CUDA graph replays the kernels on that buffer. The block tables are also on the device, and only
their changes are copied. Each sequence is one row of the batch; padding rows write to a scratch
block. The graph computes the logits and the greedy token of each row; the sampler does all other
sampling. All graphs use the same input buffers, and write their logits to one buffer.

The graphs of tensor parallel ranks contain the collectives. All ranks capture the same sizes in the
same order, and agree after each capture: they replay a graph together, or none of them uses graphs.
Only the first tensor rank has logits and samples. With asynchronous scheduling, the graph begins
with a broadcast of the token ids from this rank.

Steps in which adapters change linears replay graphs of their own, which also launch the kernels of
the adapters (serving/worker/graph_adapters.py). They are captured when such an adapter is in the
adapter memory.
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
from gpt.cpu.packed_linear import argmax_rows
from gpt.device_transfers import PendingHostCopy, to_device
from gpt.linear import low_rank
from gpt.linear_adapter import AdapterKernels
from gpt.model.gpt_model import GPT
from gpt.model.moe import MoELayer
from gpt.parallel.collectives import broadcast_from_first_rank
from gpt.parallel.rank_agreement import gather_failures
from serving.config import SchedulerConfig
from serving.messages import Step
from serving.worker.graph_adapters import GraphAdapters

log = logging.getLogger(__name__)

Work = Callable[[], object]
Capturer = Callable[[Work], Work]  # Captures the work; returns a function that replays it.

# Bytes reserved for each graph in addition to its outputs: its part of the graph memory pool, and
# the captured kernel launches.
GRAPH_BYTES = 32 << 20
# The same for a graph with adapters. It reuses the memory pool of the graphs without adapters.
ADAPTER_GRAPH_BYTES = 16 << 20
# A step captures a missing graph with adapters when this number of steps have run without it.
# Otherwise it would be missing as long as the server is never idle.
STEPS_BEFORE_CAPTURE = 200
# The logits of the largest size in fp32: the buffer that all graphs write, and in the graph memory
# pool the logits before the copy and their intermediate results.
LOGITS_COPIES = 3
# With several tensor ranks, also the shards before and after they are put side by side, in 16 bits.
GATHERED_LOGITS_COPIES = 1
# CUDA's errors for work that cannot be captured, cudaErrorStreamCaptureUnsupported and the numbers
# after it. The device remains usable after them.
CAPTURE_ERROR_CODES = range(900, 909)
GRAPH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 4096, 32))
# Fields of the packed input array (fields, batch size). The first three have an entry for each
# sequence: its token id (-1: the slot's last sampled token), its position and its slot. The last
# two list the changed cells of these sequences' block tables, as flat indices into the array of all
# block tables, and the new block number of each cell.
IDS, POSITIONS, SLOTS, TABLE_CELLS, BLOCKS = FIELDS = range(5)
# After a capture, a tensor rank waits this long for the others. Another rank may still be compiling
# its kernels.
AGREEMENT_S = 120.0
# Bits that say which values of a row are not finite.
BAD_LOGITS, BAD_HIDDEN = 1, 2


@dataclass(frozen=True)
class GraphOutput:
    """The outputs of a step on the device, one row for each sequence.

    `x`: the hidden states. Only the first tensor rank of the last pipeline stage has `logits` and
    `argmax_and_faults`.
    """

    x: Tensor
    logits: Tensor | None = None
    # (2, rows): the greedy token and the BAD_* bits of each row.
    argmax_and_faults: PendingHostCopy | None = None


@dataclass
class _GraphBuffers:
    """The inputs and outputs of the graph of one size, at fixed addresses."""

    packed_inputs: Tensor  # (fields, rows), int32
    hidden: Tensor | None  # Hidden states from the previous pipeline stage; None on the first one.
    x: Tensor | None = None
    argmax_and_faults: Tensor | None = None


class GraphCaptureError(Exception):
    """A step cannot be captured as a CUDA graph. Steps without graphs still run on the device.

    All tensor ranks raise it together.
    """


class WarmUpError(RuntimeError):
    """The work failed before its capture, when it was run without a graph.

    With several tensor ranks, the other ranks may then wait for this rank in a collective. The
    ranks must be started again.
    """


def unsupported_reason(model: GPT, config: SchedulerConfig) -> str | None:
    """The reason why steps are not captured as CUDA graphs; None: decode steps are captured."""
    if config.cuda_graphs == "off":
        return "cuda_graphs is off"
    if model.mesh.device.type != "cuda":
        return "the device is not a CUDA device"
    if model.mesh.stages_through_host:
        return "the ranks share a device, and communicate through host memory"
    if not all(layer.experts_backend.is_capturable for layer in _moe_layers(model)):
        return "MoE routing reads the number of rows of each expert on the host"
    if not model.attention_backend.is_capturable:
        return (
            f"the attention in {type(model.attention_backend).__module__} reads lengths on the host"
        )
    return None


def _moe_layers(model: GPT) -> list[MoELayer]:
    return [layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, MoELayer)]


def graph_sizes(config: SchedulerConfig) -> tuple[int, ...]:
    """The batch sizes to capture, in rows."""
    size_max = min(config.running_requests_max, config.cuda_graph_rows_max)
    return (*(size for size in GRAPH_SIZES if size < size_max), size_max)


def graph_bytes_max(model: GPT, config: SchedulerConfig, adapter_pages: int = 0) -> int:
    """Upper bound of the bytes of all graphs; 0 if no step is captured.

    With `adapter_pages`, steps with linear adapters are captured too.
    """
    if unsupported_reason(model, config) is not None:
        return 0
    capture_sizes = graph_sizes(config)
    logits_bytes = capture_sizes[-1] * model.config.vocab_size * 4
    hidden_bytes = sum(capture_sizes) * model.config.hidden_size * model.dtype.itemsize
    copies = LOGITS_COPIES + (GATHERED_LOGITS_COPIES if model.mesh.tp > 1 else 0)
    graph_bytes = len(capture_sizes) * GRAPH_BYTES + copies * logits_bytes + hidden_bytes
    reason = low_rank.unsupported_reason(model.mesh.device, model.dtype)
    if not adapter_pages or reason is not None:
        return graph_bytes
    return graph_bytes + len(capture_sizes) * ADAPTER_GRAPH_BYTES + hidden_bytes


class CudaGraphRunner:
    """Captures decode steps of each size, and replays them.

    After a `GraphCaptureError` the object must not be used any more. Without `adapters`, steps with
    linear adapters are not captured.

    `block_tables`: the block tables on the host, (KV groups, slots, blocks). `last_tokens`: each
    slot's last sampled token, on the device, and a last entry for padding rows. With
    `broadcasts_ids`, only the `last_tokens` of the first tensor rank are used. Padding rows write
    their keys and values to block `scratch_block` of the pool.
    """

    def __init__(
        self,
        model: GPT,
        pool: KVPool,
        *,
        adapter_rows: Tensor | None,
        block_tables: NDArray[np.int64],
        last_tokens: Tensor,
        scratch_block: int,
        sizes: Sequence[int],
        broadcasts_ids: bool = False,
        adapters: GraphAdapters | None = None,
        capturer: Capturer | None = None,
    ) -> None:
        device = model.mesh.device
        self._model = model
        self._pool = pool
        self._adapter_rows = adapter_rows
        self._host_tables = block_tables
        self._last_tokens = last_tokens
        self._broadcasts_ids = broadcasts_ids
        groups, slots, self._width = block_tables.shape
        # Each KV group has two more block tables than slots. Padding rows have table `slots`. Table
        # `slots + 1` is a discard area: unused entries of the list of changed cells write there.
        self._pad_slot = slots
        self._discard_cell = (slots + 1) * self._width
        self._group_cells = (slots + 2) * self._width
        device_tables = torch.zeros(
            groups, slots + 2, self._width, dtype=torch.int32, device=device
        )
        device_tables[:, slots] = scratch_block
        self._device_tables = device_tables
        self._device_cells = device_tables.view(-1)
        # By slot and group: the range (start, end) of the block table that has changed on the host
        # and is not on the device yet; `end` is exclusive.
        self._changed_entries: dict[tuple[int, int], tuple[int, int]] = {}
        self.sizes = tuple(sizes)
        # By size: the graphs of steps without linear adapters, and of steps with them.
        self._captured_graphs: dict[int, tuple[_GraphBuffers, Work]] = {}
        self._adapter_graphs: dict[int, tuple[_GraphBuffers, Work]] = {}
        self._adapters = adapters
        self._captures_adapters = False
        self._steps_without_graph = 0  # Since the last capture of a graph with adapters.
        rows = self.sizes[-1]
        self._packed_inputs = torch.zeros(len(FIELDS) * rows, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None
        if not model.is_first_stage:
            shape = rows, model.config.hidden_size
            self._hidden = torch.zeros(shape, dtype=model.dtype, device=device)
        # Only the first tensor rank of the last pipeline stage has logits.
        self._logits: Tensor | None = None
        if model.is_last_stage and model.mesh.is_first_in_stage:
            self._logits = torch.empty(
                (rows, model.config.vocab_size),
                dtype=torch.promote_types(model.dtype, torch.float32),
                device=device,
            )
        self._capturer = capturer or _CudaGraphCapturer(device)

    def supports(self, step: Step) -> bool:
        """Whether a graph can compute the step.

        The step must be decode-only, must not score a prompt, and must have 1 to `sizes[-1]`
        sequences. The kernels must support its linear adapters.
        """
        if step.adapter_starts and (self._adapters is None or not self._adapters.supports(step)):
            return False
        return (
            0 < len(step.slots) <= self.sizes[-1]
            and len(step.token_ids) == len(step.slots)
            and not any(step.prompt_score_counts)
        )

    def captured_size(self, count: int, *, adapted: bool = False) -> int | None:
        """Return the smallest captured size of at least `count` rows; None if there is none.

        `adapted`: of the graphs with linear adapters.
        """
        graphs = self._adapter_graphs if adapted else self._captured_graphs
        return min((size for size in graphs if size >= count), default=None)

    def capture_for(self, count: int, *, adapted: bool = False) -> None:
        """Capture the graph of the size for `count` rows if it is missing."""
        size = next(size for size in self.sizes if size >= count)
        if size not in (self._adapter_graphs if adapted else self._captured_graphs):
            self._capture(size, adapted=adapted)

    def prepare(self, step: Step) -> bool:
        """Return whether a graph that is large enough for the step is captured.

        If the step may capture graphs, the graph of its size is captured first.
        """
        count, adapted = len(step.slots), self._is_adapted(step)
        if step.may_capture_graph:
            self.capture_for(count, adapted=adapted)
        elif adapted and self.captured_size(count, adapted=True) is None:
            self._steps_without_graph += 1
            if self._steps_without_graph >= STEPS_BEFORE_CAPTURE:
                self.capture_for(count, adapted=True)
        return self.captured_size(count, adapted=adapted) is not None

    def capture_adapters(self) -> None:
        """From now on, count the graphs with linear adapters as missing."""
        self._captures_adapters = self._adapters is not None

    def capture_next(self) -> None:
        """Capture the largest missing graph, if any; graphs with adapters are the last.

        The largest is first, because the graphs of smaller sizes reuse its memory.
        """
        if missing := set(self.sizes) - self._captured_graphs.keys():
            self._capture(max(missing), adapted=False)
        elif self.has_missing_graphs:
            self._capture(max(set(self.sizes) - self._adapter_graphs.keys()), adapted=True)

    @property
    def has_missing_graphs(self) -> bool:
        """Whether not every size is captured."""
        captured = [self._captured_graphs]
        if self._captures_adapters:
            captured.append(self._adapter_graphs)
        return any(len(graphs) < len(self.sizes) for graphs in captured)

    def _is_adapted(self, step: Step) -> bool:
        return self._adapters is not None and self._adapters.acts(step)

    def mark_changed(self, slot: int, start: int, end: int, group: int = 0) -> None:
        """Record that entries [start, end) of a block table have changed on the host."""
        key = slot, group
        low, high = self._changed_entries.get(key, (start, end))
        self._changed_entries[key] = min(low, start), max(high, end)

    def run(self, step: Step, x: Tensor | None) -> GraphOutput:
        """Launch the step without waiting for it. A graph that is large enough must be captured.

        `x`: the hidden states from the previous pipeline stage; None on the first stage.
        """
        count, adapted = len(step.slots), self._is_adapted(step)
        size = self.captured_size(count, adapted=adapted)
        assert size is not None, "no captured graph is large enough"
        buffers, replay = (self._adapter_graphs if adapted else self._captured_graphs)[size]
        self._copy_inputs(self._pack_inputs(step, size), buffers)
        if adapted and self._adapters is not None:
            self._adapters.copy_inputs(step, size)
        if x is not None:
            assert buffers.hidden is not None
            buffers.hidden[:count] = x
        replay()
        assert buffers.x is not None
        if self._logits is None or buffers.argmax_and_faults is None:
            return GraphOutput(buffers.x[:count])
        return GraphOutput(
            buffers.x[:count], self._logits[:count], PendingHostCopy(buffers.argmax_and_faults)
        )

    # ------------------------------------------------------------------------------- on the host

    def _pack_inputs(self, step: Step | None, size: int) -> Tensor:
        """Pack the inputs of a step into pinned memory; without a step, all rows are padding."""
        pinned = self._model.mesh.device.type == "cuda"
        host_inputs = torch.zeros(len(FIELDS), size, dtype=torch.int32, pin_memory=pinned)
        fields = host_inputs.numpy()
        fields[SLOTS], fields[TABLE_CELLS] = self._pad_slot, self._discard_cell
        if step is not None:
            count = len(step.slots)
            fields[IDS, :count], fields[POSITIONS, :count] = step.token_ids, step.past
            fields[SLOTS, :count] = step.slots
            cells, blocks = self._changed_cells(step.slots)
            if len(cells) <= size:
                fields[TABLE_CELLS, : len(cells)], fields[BLOCKS, : len(cells)] = cells, blocks
            else:  # New sequences can change more cells than the packed array has entries.
                device = self._device_tables.device
                self._device_cells[to_device(cells, device)] = to_device(
                    blocks.astype(np.int32), device
                )
        return host_inputs

    def _changed_cells(self, slots: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the changed cells of these slots with their blocks, and mark them as unchanged.

        Cells are flat indices into the tensor of all block tables on the device.
        """
        cells = [np.zeros(0, np.int64)]
        blocks = [np.zeros(0, np.int64)]
        for slot in slots if self._changed_entries else ():
            for group, tables in enumerate(self._host_tables):
                if (slot, group) in self._changed_entries:
                    start, end = self._changed_entries.pop((slot, group))
                    first_cell = group * self._group_cells + slot * self._width
                    cells.append(np.arange(start, end) + first_cell)
                    blocks.append(tables[slot, start:end])
        return np.concatenate(cells), np.concatenate(blocks)

    def _copy_inputs(self, packed: Tensor, buffers: _GraphBuffers) -> None:
        buffers.packed_inputs.copy_(packed, non_blocking=True)

    def _capture(self, size: int, *, adapted: bool) -> None:
        """Capture the graph of one size, with padding rows only: they write to scratch memory."""
        adapters = None
        if adapted:
            assert self._adapters is not None
            self._adapters.copy_inputs(None, size)
            adapters = self._adapters.kernels(size)
            self._steps_without_graph = 0
        started_at, bytes_before = time.perf_counter(), _device_reserved_bytes()
        buffers = _GraphBuffers(
            self._packed_inputs[: len(FIELDS) * size].view(len(FIELDS), size),
            None if self._hidden is None else self._hidden[:size],
        )
        self._copy_inputs(self._pack_inputs(None, size), buffers)
        replay = self._capture_on_all_ranks(lambda: self._forward(buffers, adapters), size)
        seconds = time.perf_counter() - started_at
        bytes_added = _device_reserved_bytes() - bytes_before
        log.info(
            "event=graph_recorded rows=%d seconds=%.2f bytes=%d adapters=%s",
            size,
            seconds,
            bytes_added,
            adapted,
        )
        (self._adapter_graphs if adapted else self._captured_graphs)[size] = buffers, replay

    def _capture_on_all_ranks(self, work: Work, size: int) -> Work:
        """Capture the work, and return its replay if all ranks of the stage have captured it."""
        replay: Work | None = None
        failure: str | None = None
        cause: RuntimeError | None = None
        mesh = self._model.mesh.expert_mesh
        try:
            replay = self._capturer(work)
        except RuntimeError as error:
            if mesh.tp > 1 and isinstance(error, WarmUpError):
                raise
            cause = error
            failure = str(_first_error_or_raise(error, allows_memory=mesh.tp > 1))
        failures = gather_failures(mesh, failure, AGREEMENT_S)
        if replay is not None and not failures:
            return replay
        rank, text = min(failures.items())
        # The message of a single rank does not contain its number.
        rank_text = f"tensor rank {rank}: " if mesh.tp > 1 else ""
        raise GraphCaptureError(f"{rank_text}{size} rows: {text}") from cause

    # ----------------------------------------------------------------------------- on the device

    def _forward(self, buffers: _GraphBuffers, adapters: AdapterKernels | None) -> None:
        """The captured work: it must not read any value on the host."""
        model, block_tokens = self._model, self._pool.block_tokens
        fields = buffers.packed_inputs.long()
        self._device_cells.index_copy_(0, fields[TABLE_CELLS], buffers.packed_inputs[BLOCKS])
        slots, positions = fields[SLOTS], fields[POSITIONS]
        columns = (positions // block_tokens).unsqueeze(1)
        group_tables = [tables.index_select(0, slots) for tables in self._device_tables]
        group_blocks = [tables.gather(1, columns).squeeze(1).long() for tables in group_tables]
        # The context may be longer than all KV blocks.
        context = min(model.config.max_position_embeddings, self._width * block_tokens)
        count, position_max = len(slots), context - 1
        batch = Batch(
            (1,) * count,
            (position_max,) * count,
            positions,
            (group_blocks[0], positions % block_tokens),
            group_tables[0],
            device_context_lengths=buffers.packed_inputs[POSITIONS] + 1,
            adapter_kernels=adapters,
        )
        if len(group_tables) > 1:
            batch = batch.with_groups(list(zip(group_blocks[1:], group_tables[1:], strict=True)))
        x = buffers.hidden
        if x is None:
            ids = fields[IDS]
            x = torch.where(ids < 0, self._last_tokens.index_select(0, slots), ids)
            if self._broadcasts_ids:
                x = broadcast_from_first_rank(x, model.mesh.expert_mesh)
        buffers.x = x = model.forward_hidden(x, batch, self._pool, self._adapter_rows)
        if not model.is_last_stage or model.mesh.dp_rank > 0:
            return
        step_logits = model.compute_logits_on_first_rank(x, batch)
        if step_logits is None or self._logits is None:
            return
        logits = self._logits[:count].copy_(step_logits)
        tokens = argmax_rows(logits)
        self._last_tokens.index_copy_(0, slots, tokens)
        nonfinite = [tensor.isfinite().all(-1).logical_not().long() for tensor in (logits, x)]
        buffers.argmax_and_faults = torch.stack(
            [tokens, BAD_LOGITS * nonfinite[0] + BAD_HIDDEN * nonfinite[1]]
        )


class _CudaGraphCapturer:
    """Captures CUDA graphs. They can share one memory pool, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: cuBLAS keeps a workspace of 32 MiB for each stream that it has
        # ever used.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            return self._capture(work)

    def _capture(self, work: Work) -> Work:
        # The first calls compile and tune kernels and initialize libraries. This may synchronize
        # with the device or call cudaMalloc, which is not allowed during capture. (New tensors are
        # allowed: they come from the graph's memory pool.)
        main_stream = torch.cuda.current_stream()
        self._stream.wait_stream(main_stream)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    work()
        except RuntimeError as error:
            raise WarmUpError(str(error)) from error
        main_stream.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # If the work cannot be captured, `torch.cuda.graph` raises an error before it restores the
        # current stream. "thread_local": other threads may use the device during the capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with torch.cuda.stream(main_stream), capture:
                work()
        except RuntimeError:
            # Raises an error if the device is unusable. Also, no graph may be deleted while it
            # runs.
            torch.cuda.synchronize()
            raise
        return graph.replay


def _first_error_or_raise(error: BaseException, *, allows_memory: bool) -> BaseException:
    """Return the first error of a failed capture.

    Raise it again if a step without a graph would fail too, because the memory is exhausted or the
    device is unusable. With `allows_memory`, exhausted memory is a failure of the capture alone.
    The error of the work itself comes first in a chain of errors: the end of the capture raises a
    further one.
    """
    errors = [error]
    while errors[-1].__context__ is not None:
        errors.append(errors[-1].__context__)
    for cause in errors:
        is_device_error = (
            isinstance(cause, torch.AcceleratorError)
            and getattr(cause, "error_code", None) not in CAPTURE_ERROR_CODES
        )
        is_memory_error = isinstance(cause, torch.OutOfMemoryError)
        if is_device_error or (is_memory_error and not allows_memory):
            raise cause
    return errors[-1]


def _device_reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
