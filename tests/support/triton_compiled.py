"""Triton kernels compiled without a GPU, and what they were launched with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt.attention.kv_cache import FP8_DTYPE

# The shared memory limit of a thread block, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


class Launched:
    """Replaces a kernel, and records the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return lambda *args, **keywords: self.calls.append((args, keywords))


def compiled(launched: Launched, capability: int) -> list[int]:
    """Bytes of shared memory of each launch, compiled for a GPU of the capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    shared_bytes = []
    for args, keywords in launched.calls:
        options = {
            name: keywords.pop(name) for name in ("num_warps", "num_stages") if name in keywords
        }
        arguments = dict(zip(launched.kernel.arg_names, args, strict=False)) | keywords
        assert set(arguments) == set(launched.kernel.arg_names)
        kinds = {name: _kind(value) for name, value in arguments.items()}
        for name in keywords:
            kinds[name] = "constexpr"
        constants = {name: arguments[name] for name, kind in kinds.items() if kind == "constexpr"}
        even = {
            (position,): [["tt.divisibility", 16]]
            for position, (name, kind) in enumerate(kinds.items())
            if kind.startswith("*") or (kind == "i32" and arguments[name] % 16 == 0)
        }
        source = ASTSource(launched.kernel, kinds, constants, even)
        kernel = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        shared_bytes.append(kernel.metadata.shared)
    return shared_bytes


def _kind(value: object) -> str:
    """The type as Triton spells it."""
    if isinstance(value, Tensor):
        names = {
            torch.bfloat16: "bf16",
            FP8_DTYPE: "fp8e4nv",
            torch.int32: "i32",
            torch.int64: "i64",
        }
        return f"*{names.get(value.dtype, 'fp32')}"
    return {int: "i32", float: "fp32"}.get(type(value), "constexpr")
