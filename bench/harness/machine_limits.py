"""What this machine can do at best, measured in the same run as what is held against it.

How fast all cores read from memory, and multiply matrices in bf16 and int8. Each limit is tried in
several ways, taken in turn, and is what the best of them does in its median round: a program that
comes closer than any of these would raise the limit. Knows nothing of models.
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

from bench.harness.roofline import Limit, Peaks
from gpt.backends.cpu_packing import Packed
from gpt.cpu import int8_linear
from gpt.cpu.huge_pages import zeros
from gpt.cpu.int8_linear import Int8Panels
from gpt.cpu.packed_linear import Panels, multiplies, size

ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """How much is read and multiplied; a test does less."""

    read_bytes: int = 1 << 29  # Far more than any cache holds.
    channels: int = 4096  # Of a weight that is read by a single row.
    side: int = 2048  # Of large matrices.
    rows: int = 512  # Behind a weight that a cache holds,
    near: int = 1024  # which has so many columns and channels.


@dataclass(frozen=True)
class Limits:
    """Of all cores together."""

    read: Limit
    bf16: Limit
    int8: Limit

    def peaks(self, weights: str) -> Peaks:
        """For a model whose weights are `bf16` or `int8`."""
        return Peaks(self.read.value, (self.int8 if weights == "int8" else self.bf16).value)

    @property
    def all(self) -> tuple[Limit, ...]:
        return self.read, self.bf16, self.int8


Ways = dict[str, tuple[float, Callable[[], object]]]  # What one call of it does, and the call.


def measure(rounds: int = ROUNDS, sizes: Sizes = Sizes()) -> Limits:
    """Takes seconds, and all cores that torch was given."""
    return Limits(
        _taken("read bandwidth", "B", _reads(sizes), rounds),
        _taken("bf16 products", "FLOP", _products(sizes), rounds),
        _taken("int8 products", "OP", _int8_products(sizes), rounds),
    )


def _taken(name: str, unit: str, ways: Ways, rounds: int) -> Limit:
    """Rounds in turn, after one that is not counted; a way that this machine lacks is left out."""
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for way, (amount, run) in list(ways.items()):
            start = time.perf_counter()
            try:
                run()
            except RuntimeError:  # This torch, or this machine, has no such product.
                del ways[way]
                found.pop(way, None)
                continue
            if turn:
                found.setdefault(way, []).append(amount / (time.perf_counter() - start))
    return Limit(name, unit, found)


def _reads(sizes: Sizes) -> Ways:
    """Of huge pages where the system gives them."""
    count = sizes.read_bytes // 2
    memory = zeros((count,), torch.bfloat16, torch.device("cpu"))
    memory.fill_(0.5)  # Pages that were never written to are all one.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    each = sizes.read_bytes // threads
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), None

    def searched() -> None:
        """For a byte that is not there: reading, and hardly anything else."""
        places = [memory.data_ptr() + part * each for part in range(threads)]
        list(pool.map(lambda place: search(place, 0x7F, each), places))

    ways: Ways = {
        "memchr": (each * threads, searched),
        "torch's sum": (sizes.read_bytes, memory.view(torch.float32).sum),
    }
    weight = memory.view(-1, sizes.channels)
    if multiplies(weight):
        row = torch.full((1, sizes.channels), 0.01, dtype=torch.bfloat16)
        ways["our product with one row"] = (sizes.read_bytes, _ours(weight, row))
    return ways


def _products(sizes: Sizes) -> Ways:
    ways: Ways = {}
    for rows, side in ((sizes.side, sizes.side), (sizes.rows, sizes.near)):
        x = torch.full((rows, side), 0.01, dtype=torch.bfloat16)
        weight = torch.full((side, side), 0.01, dtype=torch.bfloat16)
        # A small one several times, or it is over before the clock has seen it.
        times = max(1, sizes.side**3 // (rows * side * side))
        amount, shape = 2.0 * times * rows * side * side, f"{rows} x {side} x {side}"
        if torch.backends.mkldnn.is_available():
            multiply = partial(Packed(weight), x, None, None, None)
            ways[f"oneDNN, {shape}"] = amount, partial(_often, multiply, times)
        if multiplies(weight):
            ways[f"ours, {shape}"] = amount, partial(_often, _ours(weight, x), times)
        ways[f"torch, {shape}"] = amount, partial(_often, partial(torch.mm, x, weight), times)
    return ways


def _int8_products(sizes: Sizes) -> Ways:
    side = sizes.side
    x = torch.ones((side, side), dtype=torch.int8)
    amount, shape = 2.0 * side**3, f"{side} x {side} x {side}"
    ways: Ways = {f"torch, {shape}": (amount, partial(torch._int_mm, x, x))}
    with suppress(RuntimeError, AttributeError):  # Where torch was built without it.
        packed = torch.ops.onednn.qlinear_prepack(x, None)
        scales, nothing = torch.full((side,), 0.01), torch.zeros(side, dtype=torch.int32)
        rows = torch.ones((side, side), dtype=torch.uint8)
        multiply = partial(torch.ops.onednn.qlinear_pointwise, rows, 0.01, 0, packed, scales)
        after: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        ways[f"oneDNN, {shape}"] = amount, partial(multiply, nothing, *after)
    if int8_linear.multiplies():
        weight = torch.full((side, side), 0.01, dtype=torch.bfloat16)
        memory = zeros((int8_linear.size(weight),), torch.uint8, torch.device("cpu"))
        ours = partial(Int8Panels(weight, memory), weight, None, None, None)
        ways[f"ours, {shape}"] = amount, ours
    return ways


def _ours(weight: Tensor, x: Tensor) -> Callable[[], object]:
    memory = zeros((size(weight),), torch.bfloat16, torch.device("cpu"))
    return partial(Panels(weight, memory), x, None, None, None)


def _often(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
