"""Adapter memory: adapters' weights on this rank's device, for the steps that use them.

The scheduler assigns a range of bytes to each adapter and says which changes a step writes. This
rank writes only its shards of them, in the dtype of the model. On a GPU the memory is one tensor,
and the terms of an adapter are views of it, one behind the other, so the kernels can read them
(gpt/linear/low_rank.py). On a CPU the terms are in the layout of the backends of their linears. The
fused decoder's are in the range of the adapter, too, because new memory would cost page faults in a
step. Terms of other backends, bottlenecks, and terms that padding makes larger than the range, have
memory of their own; the ranges then only limit the sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.batch import Batch, token_indices
from gpt.cpu.huge_pages import huge_page_zeros, prefault
from gpt.device_transfers import to_device
from gpt.host_limits import available_memory_bytes
from gpt.linear import low_rank
from gpt.linear.low_rank import EncodedAdapter, PackedRows, TermTable
from gpt.linear_adapter import AdaptedRows, LinearAdapter, LinearTerm, ModelAdapter
from gpt.linear_parts import split_key
from gpt.model.gpt_model import GPT, NO_LINEARS
from gpt.parallel.adaptable_linears import adaptable_linears, aligned_bytes
from gpt.parallel.adapter_sharding import shard_linear_adapter
from gpt.parallel.weight_sharding import layer_number
from serving.messages import AdapterLinearsWrite, LinearWrite, Step


@dataclass
class _ResidentAdapter:
    """The terms of an adapter that were written so far, by linear."""

    end: int  # First byte behind the terms that were written so far.
    limit: int  # First byte behind the range.
    # On a CPU, only the parts of the last linear, of which the next write may have more.
    terms: dict[str, list[LinearTerm]] = field(default_factory=dict)
    # On a CPU, the other terms, in the layout of the model's backends.
    prepared: ModelAdapter = field(default_factory=lambda: NO_LINEARS)
    encoded: EncodedAdapter | None = None  # The terms for kernels, when a step has needed them.


class AdapterMemory:
    """The adapters' weights on this rank, by the first byte of their range.

    A step has at most `adapters_max` adapters.
    """

    def __init__(self, model: GPT, nbytes: int, adapters_max: int) -> None:
        self._model = model
        self._linears = adaptable_linears(model.config)
        self._memory: Tensor | None = None  # On a GPU, or for kernels.
        self._host_memory: Tensor | None = None  # On a CPU, for the fused decoder.
        self._is_prefaulted = False
        self._adapters: dict[int, _ResidentAdapter] = {}
        # The terms for kernels; None: no kernels support this model.
        self.table: TermTable | None = None
        has_kernels = low_rank.unsupported_reason(model.mesh.device, model.dtype) is None
        if has_kernels or model.mesh.device.type != "cpu":
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=model.mesh.device)
        if nbytes and has_kernels and self._memory is not None:
            # The kernels do not change the linears of experts.
            stage_linears = [
                name
                for name, linear in self._linears.items()
                if layer_number(name) in model.layers and linear.expert is None
            ]
            memory = self._memory.view(model.dtype)
            self.table = TermTable(memory, stage_linears, adapters_max)
        if nbytes and self._memory is None:
            self._host_memory = huge_page_zeros((nbytes,), torch.uint8, model.mesh.device)

    def prefault(self) -> None:
        """Pre-fault the memory's pages in a background thread, if it is on a CPU."""
        if self._host_memory is not None and not self._is_prefaulted:
            prefault(self._host_memory, available_memory_bytes, "adapters")
            self._is_prefaulted = True

    def write(self, linears_write: AdapterLinearsWrite) -> None:
        """Write this rank's shards of some changes of an adapter."""
        start = linears_write.start
        self.prefault()
        if not linears_write.first:
            self._adapters[start] = _ResidentAdapter(start, start + linears_write.nbytes)
            self._remove_evicted(start)
        adapter = self._adapters[start]
        self._forget(start)
        for linear_write in linears_write.linears:
            name, part = split_key(linear_write.key)
            split = self._model.mesh.in_stage.split_of(name, self._model.config)
            if layer_number(name) in self._model.layers and split is not None:
                term = self._store(self._local_term(linear_write, name, part, split), adapter)
                adapter.terms.setdefault(name, []).append(term)
        if self._memory is None and linears_write.linears:
            last, part = split_key(linears_write.linears[-1].key)
            self._prepare(adapter, [name for name in adapter.terms if name != last or not part])

    def _prepare(self, adapter: _ResidentAdapter, names: Iterable[str]) -> None:
        """Copy the terms of these linears into the layout of the model's backends."""
        terms = {name: adapter.terms.pop(name) for name in names}
        if terms:
            adapter.prepared = self._model.prepare_adapter(
                terms, adapter.prepared, partial(self._allocate, adapter)
            )

    def _allocate(self, adapter: _ResidentAdapter, nbytes: int) -> Tensor | None:
        """Return memory of the adapter's range; None if the range has too little."""
        start, end = adapter.end, adapter.end + nbytes
        if self._host_memory is None or end > adapter.limit:
            return None
        adapter.end = end
        return self._host_memory[start:end]

    def _remove_evicted(self, start: int) -> None:
        """Remove the adapters whose ranges overlap that of the adapter at `start`."""
        limit = self._adapters[start].limit
        for other, adapter in list(self._adapters.items()):
            if other != start and other < limit and start < adapter.limit:
                self._forget(other)
                del self._adapters[other]

    def _forget(self, start: int) -> None:
        """Encode the terms of this adapter again before its next step."""
        self._adapters[start].encoded = None
        if self.table is not None:
            self.table.forget(start)

    def _local_term(
        self, linear_write: LinearWrite, name: str, part: str, split: tuple[int, int]
    ) -> LinearTerm:
        tensors = {
            tensor_name: torch.frombuffer(stored.data, dtype=torch.float32).view(stored.shape)
            for tensor_name, stored in linear_write.tensors.items()
        }
        adapter = LinearAdapter(**tensors, scale=linear_write.scale)
        linear, (rank, tp) = self._linears[name], split
        return shard_linear_adapter(adapter, linear, part, self._model.config, rank=rank, tp=tp)

    def _store(self, term: LinearTerm, adapter: _ResidentAdapter) -> LinearTerm:
        """Copy the tensors of a term into the device's memory, behind the adapter's other terms."""
        memory, dtype = self._memory, self._model.dtype
        if memory is None:
            return term

        def copy(value: Tensor) -> Tensor:
            start, nbytes = adapter.end, value.numel() * dtype.itemsize
            adapter.end += aligned_bytes(nbytes)
            view = memory[start : start + nbytes].view(dtype).view(value.shape)
            return view.copy_(to_device(value.to(dtype).contiguous(), memory.device))

        return term.map_tensors(copy)

    def add_adapters(self, batch: Batch, step: Step) -> Batch:
        """Return the batch of a step with the adapters that act on its rows."""
        starts = row_adapters(step)
        if starts is None:
            return batch
        if self.table is None:
            return replace(batch, adapted_rows=self._adapted_rows(starts))
        packed = low_rank.pack_rows(self.assign_slots(starts))
        device_rows = to_device(packed, self._model.mesh.device)
        rows = PackedRows.view(device_rows, len(starts), int(packed[0]))
        encoded = self.encoded(starts)
        expert_rows: tuple[AdaptedRows, ...] = ()
        if any(adapter.has_experts for adapter in encoded):
            expert_rows = self._adapted_rows(starts)
        kernels = low_rank.batch_kernels(
            self.table, rows, encoded, self._bottlenecks(starts), expert_rows
        )
        return replace(batch, adapter_kernels=kernels)

    def _bottlenecks(self, starts: NDArray[np.int64]) -> list[AdaptedRows]:
        """Return the rows of the adapters with bottlenecks, which torch computes."""
        device = self._model.mesh.device
        return [
            AdaptedRows(terms, to_device(np.flatnonzero(starts == start), device))
            for start in np.unique(starts).tolist()
            if start >= 0 and (terms := self._encode(start).bottlenecks)
        ]

    def _adapted_rows(self, starts: NDArray[np.int64]) -> tuple[AdaptedRows, ...]:
        """Return the rows on which each adapter acts."""
        # For the few rows of a decode step this is faster than numpy.
        adapters = sorted(set(starts.tolist()))
        if len(adapters) == 1:
            return (AdaptedRows(self._terms(adapters[0]), None),)
        device = self._model.mesh.device
        return tuple(
            AdaptedRows(self._terms(start), to_device(np.flatnonzero(starts == start), device))
            for start in adapters
            if start >= 0
        )

    def _terms(self, start: int) -> Mapping[str, Sequence[LinearTerm]]:
        adapter = self._adapters[start]
        if self._memory is not None:
            return adapter.terms
        # All changes are written before the first step with the adapter.
        self._prepare(adapter, list(adapter.terms))
        return adapter.prepared

    def encoded(self, starts: NDArray[np.int64]) -> list[EncodedAdapter]:
        """Return the terms of the adapters of these rows for kernels."""
        return [self._encode(start) for start in np.unique(starts).tolist() if start >= 0]

    def assign_slots(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write the adapters of these rows to the table; return the slot of each row, or -1."""
        assert self.table is not None
        adapters, indices = np.unique(starts, return_inverse=True)
        acting = [start for start in adapters.tolist() if start >= 0]
        slots = self.table.assign_slots({start: self._encode(start) for start in acting})
        # Rows without an adapter have the lowest start, -1.
        return np.array([-1] * (len(adapters) - len(acting)) + slots)[indices]

    def _encode(self, start: int) -> EncodedAdapter:
        assert self.table is not None
        adapter = self._adapters[start]
        if adapter.encoded is None:
            adapter.encoded = self.table.encode(adapter.terms)
        return adapter.encoded

    def compile_kernels(self) -> None:
        """Compile the kernels that steps with adapters launch; a compilation would stop a step.

        Kernels in fp32 are compiled by the first step that needs them: they multiply without the
        tensor cores, so their loops are unrolled, and a server in fp32 would start much later.
        """
        if self.table is None or self._model.dtype == torch.float32:
            return
        mesh, config = self._model.mesh, self._model.config
        shapes = set()
        for name in self.table.linears:
            linear = self._linears[name]
            sharded = sum(
                stop - start for start, stop in linear.shard(config, mesh.tp_rank, mesh.tp).ranges
            )
            has_bias = self._model.get_submodule(name).bias is not None
            if linear.is_row_parallel:
                shapes.add((linear.out_features, sharded, has_bias and mesh.tp_rank == 0))
            else:
                shapes.add((sharded, linear.in_features, has_bias))
        for columns, channels, has_bias in sorted(shapes):
            low_rank.compile_kernels(self.table, columns, channels, has_bias=has_bias)


def row_adapters(step: Step) -> NDArray[np.int64] | None:
    """Return the start of the adapter that acts on each row of a step, or -1; None: none acts."""
    if not step.adapter_starts:
        return None
    if len(step.token_ids) == len(step.slots):  # A decode step has a row for each sequence.
        sequences = zip(step.adapter_starts, step.past, step.adapted_from, strict=True)
        acting = [start if past >= first else -1 for start, past, first in sequences]
        return np.array(acting) if max(acting) >= 0 else None
    positions, indices, *_ = token_indices(step.lengths, step.past, 1)
    starts = np.array(step.adapter_starts)[indices]
    starts[positions < np.array(step.adapted_from)[indices]] = -1
    return starts if (starts >= 0).any() else None
