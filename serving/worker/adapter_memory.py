"""Adapter memory: adapters' changes of linears on this rank's device, for the steps that use them.

The memory is one tensor of bytes. The scheduler assigns a range to each adapter and says which
changes a step writes. This rank writes only its shards of them, in the dtype of the model, one
behind the other. The terms of an adapter are views of this memory, so kernels can read them by
address.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from gpt.batch import token_indices
from gpt.device_transfers import to_device
from gpt.linear_adapter import AdaptedRows, LinearAdapter, LinearTerm, split_key
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import adaptable_linears, aligned_bytes, shard_linear_adapter
from gpt.parallel.weight_sharding import layer_number
from serving.messages import AdapterLinearsWrite, LinearWrite, Step


@dataclass
class _ResidentAdapter:
    """The terms of an adapter that were written so far, by linear."""

    end: int  # First byte behind the terms.
    terms: dict[str, list[LinearTerm]] = field(default_factory=dict)


class AdapterMemory:
    """The adapters' changes of linears on this rank, by the first byte of their range."""

    def __init__(self, model: GPT, nbytes: int) -> None:
        self._model = model
        self._linears = adaptable_linears(model.config)
        # On a CPU, memory that no adapter has needed is not committed by the kernel.
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=model.mesh.device)
        self._adapters: dict[int, _ResidentAdapter] = {}

    def write(self, linears_write: AdapterLinearsWrite) -> None:
        """Write this rank's shards of some changes of an adapter."""
        start = linears_write.start
        if not linears_write.first:
            self._adapters[start] = _ResidentAdapter(start)
        adapter = self._adapters[start]
        for linear_write in linears_write.linears:
            name, part = split_key(linear_write.key)
            if layer_number(name) in self._model.layers:
                term = self._local_term(linear_write, name, part)
                adapter.terms.setdefault(name, []).append(self._store(term, adapter))
        # The ranges of adapters that were evicted may begin inside this one.
        for other in [other for other in self._adapters if start < other < adapter.end]:
            del self._adapters[other]

    def _local_term(self, linear_write: LinearWrite, name: str, part: str) -> LinearTerm:
        tensors = {
            tensor_name: torch.frombuffer(bytearray(stored.data), dtype=torch.float32).view(
                stored.shape
            )
            for tensor_name, stored in linear_write.tensors.items()
        }
        model, mesh = self._model, self._model.mesh
        adapter = LinearAdapter(**tensors, scale=linear_write.scale)
        return shard_linear_adapter(
            adapter, self._linears[name], part, model.config, rank=mesh.tp_rank, tp=mesh.tp
        )

    def _store(self, term: LinearTerm, adapter: _ResidentAdapter) -> LinearTerm:
        """Copy the tensors of a term into the memory behind the adapter's other terms."""
        stored = {term_field.name: getattr(term, term_field.name) for term_field in fields(term)}
        for name, value in stored.items():
            if isinstance(value, Tensor):
                nbytes = value.numel() * self._model.dtype.itemsize
                view = self._memory[adapter.end : adapter.end + nbytes].view(self._model.dtype)
                stored[name] = view.view(value.shape).copy_(value)
                adapter.end += aligned_bytes(nbytes)
        return LinearTerm(**stored)

    def adapted_rows(self, step: Step) -> tuple[AdaptedRows, ...]:
        """Return the rows of a step's batch on which adapters act, by adapter."""
        if not step.adapter_starts:
            return ()
        positions, sequences, *_ = token_indices(step.lengths, step.past, 1)
        starts = np.array(step.adapter_starts)[sequences]
        acts = (starts >= 0) & (positions >= np.array(step.adapted_from)[sequences])
        if not acts.any():
            return ()
        if acts.all() and len(adapters := np.unique(starts)) == 1:
            return (AdaptedRows(self._terms(int(adapters[0])), None),)
        device = self._model.mesh.device
        return tuple(
            AdaptedRows(
                self._terms(int(start)), to_device(np.flatnonzero(acts & (starts == start)), device)
            )
            for start in np.unique(starts[acts])
        )

    def _terms(self, start: int) -> Mapping[str, Sequence[LinearTerm]]:
        return self._adapters[start].terms
