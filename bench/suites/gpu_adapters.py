"""GPU benchmark of linear adapters: their kernels beside the linears of a decode step.

The linears of some layers, with random weights, run as one CUDA graph: without adapters, with the
terms of LoRAs, and the terms alone. The bound of the terms is the time to read the low-rank
matrices of the distinct adapters, at the measured bandwidth of a copy. The weights of all layers
are larger than the L2 cache. The suite takes less than a minute.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.harness.record import SuiteOutput
from bench.suites.gpu import time_call
from gpt.device_transfers import to_device
from gpt.linear import low_rank
from gpt.linear.low_rank import LowRankKernels, PackedRows, TermTable
from gpt.linear.unquantized_matmul import UnquantizedMatmul
from gpt.linear_adapter import LinearTerm
from gpt.parallel.adaptable_linears import aligned_bytes


@dataclass(frozen=True)
class LinearShapes:
    """The output columns and input channels of the linears of a layer, and a number of layers."""

    layers: int
    linears: tuple[tuple[int, int], ...]


SHAPES = {
    # 12 x 768.
    "gpt2": LinearShapes(12, ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    # 4 of the 32 layers of Llama-3.1-8B.
    "8b": LinearShapes(4, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
}
PARTS = tuple(SHAPES)
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class LowRankSizes:
    """The workloads; tests use smaller ones."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    rank: int = 16
    rows: tuple[int, ...] = (1, 8, 32)
    adapters: tuple[int, ...] = (1, 8, 32)
    copy_bytes: int = COPY_BYTES
    repeats: int = 50


@torch.inference_mode()
def run_suite(
    parts: Collection[str] = PARTS,
    sizes: LowRankSizes | None = None,
    shapes: dict[str, LinearShapes] | None = None,
) -> Iterator[SuiteOutput]:
    """Yield a line for each number of rows and of distinct adapters."""
    sizes, shapes = sizes or LowRankSizes(), shapes or SHAPES
    bandwidth = _copy_bandwidth(sizes)
    yield f"copy: {bandwidth / 1e9:.0f} GB/s"
    for name, shape in shapes.items():
        if parts and name not in parts:
            continue
        layers = _Linears(shape, sizes)
        for rows in sizes.rows:
            for adapters in (count for count in sizes.adapters if count <= rows):
                yield f"{name}, {layers.measure(rows, adapters, bandwidth)}"
        del layers
        if sizes.device == "cuda":
            torch.cuda.empty_cache()


def _copy_bandwidth(sizes: LowRankSizes) -> float:
    """Return the bytes that a copy reads and writes per second."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    seconds = time_call(source.device, lambda: target.copy_(source))
    return 2 * sizes.copy_bytes / seconds


class _Linears:
    """The linears of all layers, and as many LoRAs as a batch has at most."""

    def __init__(self, shape: LinearShapes, sizes: LowRankSizes) -> None:
        self._sizes, self._device = sizes, torch.device(sizes.device)
        self._shapes = shape.linears * shape.layers
        self._names = [str(index) for index in range(len(self._shapes))]
        self._matmuls = [UnquantizedMatmul(self._random(*linear)) for linear in self._shapes]
        self._adapter_bytes = sum(
            aligned_bytes(sizes.rank * size * sizes.dtype.itemsize)
            for linear in self._shapes
            for size in linear
        )
        adapters = max(sizes.adapters)
        memory = torch.empty(adapters * self._adapter_bytes, dtype=torch.uint8, device=self._device)
        self._memory = memory.view(sizes.dtype).normal_()
        self._table = TermTable(self._memory, self._names, adapters)
        encoded = [self._table.encode(self._terms(index)) for index in range(adapters)]
        self._slots = self._table.assign_slots(dict(enumerate(encoded)))
        self._encoded = encoded

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).mul_(0.02).to(self._sizes.dtype)

    def _terms(self, adapter: int) -> dict[str, list[LinearTerm]]:
        rank, start = self._sizes.rank, adapter * self._adapter_bytes
        terms = {}
        for name, (columns, channels) in zip(self._names, self._shapes, strict=True):
            tensors = []
            for shape in ((rank, channels), (columns, rank)):
                first = start // self._sizes.dtype.itemsize
                count = shape[0] * shape[1]
                tensors.append(self._memory[first : first + count].view(shape))
                start += aligned_bytes(count * self._sizes.dtype.itemsize)
            terms[name] = [LinearTerm(lora_a=tensors[0], lora_b=tensors[1], scale=0.01)]
        return terms

    def measure(self, rows: int, adapters: int, bandwidth: float) -> str:
        """Return the times of a batch in which row i has adapter i % `adapters`."""
        slots = np.array(self._slots)[np.arange(rows) % adapters]
        # The launches of a CUDA graph of this size have as many groups as rows.
        packed = to_device(low_rank.pack_rows(slots, group_count_max=rows), self._device)
        kernels = low_rank.batch_kernels(
            self._table, PackedRows.view(packed, rows, rows), self._encoded[:adapters]
        )
        inputs = [self._random(rows, channels) for _, channels in self._shapes]
        outputs = [self._random(rows, columns) for columns, _ in self._shapes]
        base_s = self._graph_s(lambda: self._multiply(inputs, None))
        adapted_s = self._graph_s(lambda: self._multiply(inputs, kernels))
        terms_s = self._graph_s(lambda: self._add_terms(outputs, inputs, kernels))
        nbytes = adapters * self._adapter_bytes
        weight_bytes = sum(
            columns * channels * self._sizes.dtype.itemsize for columns, channels in self._shapes
        )
        return (
            f"{rows} rows, {adapters} adapters of rank {self._sizes.rank}: "
            f"linears {1e6 * base_s:.1f} us (bytes bound {1e6 * weight_bytes / bandwidth:.1f}), "
            f"with adapters {1e6 * adapted_s:.1f} us ({adapted_s / base_s:.3f} x), "
            f"terms alone {1e6 * terms_s:.1f} us "
            f"(bytes bound {1e6 * nbytes / bandwidth:.1f} us, {nbytes / 1e6:.1f} MB)"
        )

    def _multiply(self, inputs: Sequence[Tensor], kernels: LowRankKernels | None) -> None:
        for name, matmul, x in zip(self._names, self._matmuls, inputs, strict=True):
            y = matmul(x, None, None)
            linear = None if kernels is None else kernels.for_linear(name)
            if linear is not None:
                linear.add_terms(y, x, None)

    def _add_terms(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kernels: LowRankKernels
    ) -> None:
        for name, y, x in zip(self._names, outputs, inputs, strict=True):
            linear = kernels.for_linear(name)
            assert linear is not None
            linear.add_terms(y, x, None)

    def _graph_s(self, work: Callable[[], None]) -> float:
        """Return the seconds of the work as a replayed CUDA graph; on a CPU, of the work itself."""
        if self._device.type != "cuda":
            return time_call(self._device, work, 1)
        work()  # Compiles kernels.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return time_call(self._device, graph.replay, self._sizes.repeats)
