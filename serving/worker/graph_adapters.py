"""Graph adapters: the adapters of a step that replays a CUDA graph, in buffers at fixed addresses.

A graph with adapters launches the kernels of gpt/linear/low_rank.py in every linear that an adapter
can change. The kernels read the rows of the step from a buffer, and the terms from the table of the
adapter memory, so one graph serves any adapters within the limits of this module.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from gpt.device_transfers import to_device
from gpt.linear import low_rank
from gpt.linear.low_rank import EncodedAdapter, LowRankKernels, PackedRows
from gpt.linear_adapter import AdapterKernels
from serving.messages import Step
from serving.worker.adapter_memory import AdapterMemory, row_adapters

# The largest sum of the ranks of a linear's parts: three parts of rank 64. The partial sums of a
# graph have memory for it.
GRAPH_RANKS_MAX = 192
# The linears whose input a graph can scale. IA3 scales the input of fc2 alone.
INPUT_SCALED_SUFFIX = ".linear_fc2"


class GraphAdapters:
    """The adapters of replayed steps of at most `rows_max` rows."""

    def __init__(self, memory: AdapterMemory, rows_max: int, device: torch.device) -> None:
        assert memory.table is not None
        self._memory = memory
        self._table = memory.table
        self._input_scaled = [name for name in self._table.linears if _scales_input(name)]
        size = len(_pack(np.zeros(0, np.int64), rows_max))
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)

    def acts(self, step: Step) -> bool:
        """Whether an adapter acts on a row of the step."""
        return row_adapters(step) is not None

    def supports(self, step: Step) -> bool:
        """Whether a graph can apply the adapters of the step."""
        starts = row_adapters(step)
        if starts is None:
            return True
        return all(map(_is_supported, self._memory.encoded(starts)))

    def kernels(self, rows: int) -> AdapterKernels:
        """Return the kernels of the graph of a number of rows, which read the buffers."""
        packed = PackedRows.view(self._packed, rows, rows)
        linears = self._table.linears
        return LowRankKernels(self._table, packed, linears, self._input_scaled, GRAPH_RANKS_MAX)

    def copy_inputs(self, step: Step | None, rows: int) -> None:
        """Copy the adapters of a step to the buffers; without a step, no adapter acts."""
        starts = None if step is None else row_adapters(step)
        slots = np.zeros(0, np.int64) if starts is None else self._memory.assign_slots(starts)
        packed = _pack(slots, rows)
        self._packed[: len(packed)] = to_device(packed, self._packed.device)


def _pack(slots: NDArray[np.int64], rows: int) -> NDArray[np.int32]:
    return low_rank.pack_rows(slots, rows=rows, group_count_max=rows)


def _is_supported(adapter: EncodedAdapter) -> bool:
    # A graph has no bottlenecks and no experts' terms, whose rows are those of the step.
    has_products = adapter.ranks <= GRAPH_RANKS_MAX
    has_rows = bool(adapter.bottlenecks) or adapter.has_experts
    return has_products and not has_rows and all(map(_scales_input, adapter.input_scaled))


def _scales_input(linear: str) -> bool:
    return linear.endswith(INPUT_SCALED_SUFFIX)
