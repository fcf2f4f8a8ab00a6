"""Triton kernels compiled without a GPU, and what they were launched with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt.attention.kv_cache import NARROW

# What a block of threads may have of shared memory, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


class Launched:
    """In a kernel's place: keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(one > 0 for one in grid)
        return lambda *args, **named: self.calls.append((args, named))


def compiled(one: Launched, capability: int) -> list[int]:
    """Bytes of shared memory of each launch, compiled for such a GPU as a launch would be."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    found = []
    for args, named in one.calls:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        given = dict(zip(one.kernel.arg_names, args, strict=False)) | named
        assert set(given) == set(one.kernel.arg_names)
        kinds = {name: _kind(value) for name, value in given.items()}
        for name in named:
            kinds[name] = "constexpr"
        constants = {name: given[name] for name, kind in kinds.items() if kind == "constexpr"}
        even = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, kind) in enumerate(kinds.items())
            if kind.startswith("*") or (kind == "i32" and given[name] % 16 == 0)
        }
        source = ASTSource(one.kernel, kinds, constants, even)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found.append(made.metadata.shared)
    return found


def _kind(value: object) -> str:
    """As Triton calls it."""
    if isinstance(value, Tensor):
        names = {torch.bfloat16: "bf16", NARROW: "fp8e4nv", torch.int32: "i32", torch.int64: "i64"}
        return f"*{names.get(value.dtype, 'fp32')}"
    return {int: "i32", float: "fp32"}.get(type(value), "constexpr")
