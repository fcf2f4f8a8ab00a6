"""Machine limits: measured memory bandwidth, and matmul throughput in bf16 and in int8.

The limits are measured on all cores, in the same run as the figures that are compared with them.
Several methods measure each limit in interleaved rounds; the limit is the median of the fastest
method. The hardware may be faster than a limit, because a faster method may exist.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness.roofline import MeasuredLimit, Peaks
from gpt.cpu import int8_linear
from gpt.cpu.huge_pages import huge_page_zeros
from gpt.cpu.int8_linear import Int8PackedLinear
from gpt.cpu.packed_linear import PackedLinear, packed_numel, supports_weight
from gpt.linear.cpu_linear import OneDnnLinear

ROUNDS = 5


@dataclass(frozen=True)
class MicrobenchmarkSizes:
    """Sizes of the buffers and matrices; tests use smaller ones."""

    read_bytes: int = 1 << 29  # Much larger than the caches.
    channels: int = 4096  # Input channels of the weight in the matrix-vector product.
    side: int = 2048  # Side of the large square matrices.
    rows: int = 512  # Rows of the activations in the matmul with the cached weight.
    cached_side: int = 1024  # Side of a square weight that fits in the cache.


@dataclass(frozen=True)
class MachineLimits:
    """Measured limits of all cores together."""

    read_bandwidth: MeasuredLimit
    bf16: MeasuredLimit
    int8: MeasuredLimit

    def peaks(self, weights: str) -> Peaks:
        """Return the peaks for a model with `bf16` or `int8` weights."""
        return Peaks(
            self.read_bandwidth.value, (self.int8 if weights == "int8" else self.bf16).value
        )

    @property
    def as_tuple(self) -> tuple[MeasuredLimit, ...]:
        return self.read_bandwidth, self.bf16, self.int8


# Maps the name of a method to (bytes or operations of one call, function that makes the call).
Methods = dict[str, tuple[float, Callable[[], object]]]


def measure_limits(
    rounds: int = ROUNDS, sizes: MicrobenchmarkSizes = MicrobenchmarkSizes()
) -> MachineLimits:
    """Measure all limits with all threads of torch, in a few seconds."""
    return MachineLimits(
        _measure_limit("read bandwidth", "B", _read_methods(sizes), rounds),
        _measure_limit("bf16 products", "FLOP", _bf16_matmul_methods(sizes), rounds),
        _measure_limit("int8 products", "OP", _int8_matmul_methods(sizes), rounds),
    )


def _measure_limit(name: str, unit: str, methods: Methods, rounds: int) -> MeasuredLimit:
    """Time all methods in interleaved rounds after a warm-up round; drop unsupported methods."""
    rates: dict[str, list[float]] = {}
    for round_index in range(rounds + 1):
        for method, (amount, call) in list(methods.items()):
            start = time.perf_counter()
            try:
                call()
            except RuntimeError:  # This torch build or CPU does not support the method.
                del methods[method]
                rates.pop(method, None)
                continue
            if round_index:
                rates.setdefault(method, []).append(amount / (time.perf_counter() - start))
    return MeasuredLimit(name, unit, rates)


def _read_methods(sizes: MicrobenchmarkSizes) -> Methods:
    """Return methods that read a large buffer, in huge pages where the system provides them."""
    count = sizes.read_bytes // 2
    memory = huge_page_zeros((count,), torch.bfloat16, torch.device("cpu"))
    memory.fill_(0.5)  # Untouched pages would all map to the kernel's single zero page.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    thread_bytes = sizes.read_bytes // threads
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = None

    def search_all() -> None:
        """Search for a byte that does not occur: almost pure memory reads."""
        addresses = [memory.data_ptr() + thread * thread_bytes for thread in range(threads)]
        list(pool.map(lambda address: memchr(address, 0x7F, thread_bytes), addresses))

    methods: Methods = {
        "memchr": (thread_bytes * threads, search_all),
        "torch's sum": (sizes.read_bytes, memory.view(torch.float32).sum),
    }
    weight = memory.view(-1, sizes.channels)
    if supports_weight(weight):
        row = torch.full((1, sizes.channels), 0.01, dtype=torch.bfloat16)
        methods["our product with one row"] = (sizes.read_bytes, _packed_matmul(weight, row))
    return methods


def _bf16_matmul_methods(sizes: MicrobenchmarkSizes) -> Methods:
    methods: Methods = {}
    for rows, side in ((sizes.side, sizes.side), (sizes.rows, sizes.cached_side)):
        x = torch.full((rows, side), 0.01, dtype=torch.bfloat16)
        weight = torch.full((side, side), 0.01, dtype=torch.bfloat16)
        # Small matmuls are repeated, so that each timing is long enough for the clock.
        repeats = max(1, sizes.side**3 // (rows * side * side))
        operations, shape = 2.0 * repeats * rows * side * side, f"{rows} x {side} x {side}"
        if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            matmul = partial(OneDnnLinear(weight).forward, x, None, None, None)
            methods[f"oneDNN, {shape}"] = operations, partial(_repeat, matmul, repeats)
        if supports_weight(weight):
            methods[f"ours, {shape}"] = (
                operations,
                partial(_repeat, _packed_matmul(weight, x), repeats),
            )
        methods[f"torch, {shape}"] = (
            operations,
            partial(_repeat, partial(torch.mm, x, weight), repeats),
        )
    return methods


def _int8_matmul_methods(sizes: MicrobenchmarkSizes) -> Methods:
    side = sizes.side
    x = torch.ones((side, side), dtype=torch.int8)
    operations, shape = 2.0 * side**3, f"{side} x {side} x {side}"
    methods: Methods = {f"torch, {shape}": (operations, partial(torch._int_mm, x, x))}
    with suppress(RuntimeError, AttributeError):  # torch was built without oneDNN's int8 linear.
        packed = torch.ops.onednn.qlinear_prepack(x, None)
        scales, weight_zero_points = torch.full((side,), 0.01), torch.zeros(side, dtype=torch.int32)
        activations = torch.ones((side, side), dtype=torch.uint8)
        matmul = partial(torch.ops.onednn.qlinear_pointwise, activations, 0.01, 0, packed, scales)
        epilogue_args: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        methods[f"oneDNN, {shape}"] = (
            operations,
            partial(matmul, weight_zero_points, *epilogue_args),
        )
    if int8_linear.has_int8_gemm():
        weight = torch.full((side, side), 0.01, dtype=torch.bfloat16)
        memory = huge_page_zeros(
            (int8_linear.packed_bytes(weight),), torch.uint8, torch.device("cpu")
        )
        matmul_ours = partial(Int8PackedLinear(weight, memory), weight, None, None, None)
        methods[f"ours, {shape}"] = operations, matmul_ours
    return methods


def _packed_matmul(weight: Tensor, x: Tensor) -> Callable[[], object]:
    memory = huge_page_zeros((packed_numel(weight),), torch.bfloat16, torch.device("cpu"))
    return partial(PackedLinear(weight, memory), x, None, None, None)


def _repeat(call: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        call()
