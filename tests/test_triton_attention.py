"""Our Triton kernels without a GPU: in Triton's interpreter, and compiled for GPUs."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.kv import NARROW
from tests.paged import case

ROOT = Path(__file__).resolve().parent.parent
CASES, PARTS = 30, 2
# What a block of threads may have of shared memory, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make tools"),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_random_steps_in_the_interpreter_equal_the_plain_twin(part: int) -> None:
    each = CASES // PARTS
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention_cases", str(part * each), str(each)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("heads", "dtype", "eight_bits", "capability"),
    [
        ((4, 1, 128), torch.bfloat16, False, 90),
        ((4, 1, 128), torch.bfloat16, True, 90),
        ((1, 8, 256), torch.bfloat16, False, 90),
        ((1, 48, 64), torch.bfloat16, True, 90),
        ((2, 4, 128), torch.bfloat16, False, 80),
        ((4, 1, 256), torch.float32, False, 90),
        ((2, 1, 80), torch.float32, False, 80),
    ],
)
def test_the_kernels_compile_for_gpus_and_fit_their_shared_memory(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    eight_bits: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpt import triton_attention, triton_kernels

    spied = []
    for name in ("attend_single", "attend_tile", "merge", "append"):
        spied.append(Launched(getattr(triton_kernels, name)))
        monkeypatch.setattr(triton_kernels, name, spied[-1])
    attention = triton_attention.TritonAttention(torch.ones(1, 2) if eight_bits else None)
    for lengths, window in (([1, 1], None), ([2, 2], None), ([200, 1], 64)):
        one = case(lengths, [300] * 2, heads, 16, dtype)
        kv = one.kv.to(NARROW) if eight_bits else one.kv
        attention.store(one.k, one.v, one.batch, kv)
        attention.attend(one.q, one.k, one.v, one.batch, kv, window)
    assert sum(len(spy.calls) for spy in spied) > 6
    for spy in spied:
        assert all(shared <= SHARED_BYTES[capability] for shared in compiled(spy, capability))
