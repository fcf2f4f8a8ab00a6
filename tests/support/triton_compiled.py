"""Launches of Triton kernels recorded without a GPU, and their kernels compiled for GPUs.

A fake CUDA driver stands for the GPU. Triton's own JIT computes the key of each launch from the
arguments: dtypes, alignment of pointers, constants and options. Its cache hook records the launch
and stops it, so nothing runs. `Launch.compile` compiles what a GPU would have run.

As a program it compiles the kernels of some attention steps and prints their resources as JSON:
python -m tests.support.triton_compiled CASE, such as "90 8 1 128 bfloat16 float8_e4m3fn": compute
capability, KV heads, queries per KV head, channels, dtype of the model, dtype of the KV pool, and
"sinks" or "alibi" if the layers have them; layers with sinks also have a window. The
case "90 sampler bfloat16" is the kernel of the sampler, for logits in this dtype, and "90 linear
bfloat16" are the kernels of linears with few rows.
With --write instead of a case it writes the resources of all core cases to the golden file.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from sysconfig import get_path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from gpt.attention.options import AttentionOptions
from gpt.linear.unquantized_matmul import COMPILED_ROWS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/triton_kernels.json"
# Where the versions of Triton are: of the torch on a GPU machine, and of constraints.txt.
# `make tools` installs them.
VERSIONS = {"3.6.0": Path(get_path("purelib")), "3.7.1": ROOT / "build/triton/3.7.1"}
CORE_CASES = (
    "90 8 1 128 bfloat16 bfloat16",
    "80 8 4 64 float16 float16",
    "100 4 8 128 bfloat16 float8_e4m3fn",
    "90 8 8 64 bfloat16 bfloat16 sinks",
    "90 14 1 128 bfloat16 bfloat16 alibi",
    "90 sampler bfloat16",
    "90 sampler float64",
    "90 linear bfloat16",
    "90 linear float16",
)
# All cases: GQA of wide heads, MQA, and heads of an odd width. An fp8 pool needs compute capability
# 8.9.
MATRIX_CASES = tuple(
    f"{capability} {heads} {dtypes}"
    for capability in (80, 90, 100)
    for heads in ("2 8 256", "1 48 64", "12 1 80")
    for dtypes in (
        "bfloat16 bfloat16",
        "float16 float16",
        "bfloat16 float8_e4m3fn",
        "float32 float32",
    )
    if capability > 80 or "float8" not in dtypes
)
SAMPLED_VOCABULARY = 51200
# Weight (rows, columns) and activation of the linears of Llama: the projection, and fc1.
LINEARS = ((4096, 4096, None), (28672, 4096, "gated_silu"))
FP8_CAPABILITY_MIN = 89  # Older GPUs have no e4m3.
# By kernel: the fields of `KernelResources`.
Resources = dict[str, dict[str, int]]
# The shared memory limit of a thread block, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class KernelResources:
    """What a thread block or a thread of a compiled kernel uses."""

    registers: int  # Per thread.
    spilled_bytes: int  # Per thread: registers that did not fit, in local memory.
    shared_bytes: int  # Per thread block.
    wgmma: int  # Matrix products of Hopper's tensor cores in the code.


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, as far as it determines the machine code."""

    name: str
    function: Any
    specialization: Any  # The arguments of Triton's cache hook.
    capability: int

    @property
    def label(self) -> str:
        """The kernel's name and its constants that differ between variants of one model."""
        # A constant's position is the number of its parameter.
        constants = {
            self.function.arg_names[position]: value
            for (position,), value in self.specialization["constants"].items()
        }
        shown = [f"{name}={constants[name]}" for name in ("TOKENS", "ROWS") if name in constants]
        if constants.get("QUANTIZE") and self.name == "merge_tiles":
            shown.append("QUANTIZE")
        if constants.get("GATED"):
            shown.append("GATED")
        return " ".join([self.name, *shown])

    def compile(self) -> KernelResources:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        source = ASTSource(
            self.function,
            self.specialization["signature"],
            self.specialization["constants"],
            self.specialization["configs"][0],
        )
        options = {name: self.specialization[name] for name in ("num_warps", "num_stages")}
        kernel = compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        registers, stack_bytes = _registers_and_stack(kernel.asm["cubin"])
        products = kernel.asm["ptx"].count("wgmma.mma_async")
        return KernelResources(registers, stack_bytes, kernel.metadata.shared, products)


class FakeDriver:
    """A CUDA driver of one GPU that launches nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def fake_gpu(capability: int = 90, driver: FakeDriver | None = None) -> Iterator[None]:
    """Let Triton compile for a GPU of this compute capability that does not exist."""
    from triton import JITFunction, runtime

    from gpt.attention import triton_kernels
    from gpt.linear import (
        triton_expert_kernels,
        triton_low_rank_kernels,
        triton_matmul_kernels,
        triton_row_kernels,
    )
    from gpt.triton_runtime import launcher
    from serving.worker import triton_sampling_kernels

    # None: Triton looks for a GPU when it needs one.
    driver_before: Any = runtime.driver._active
    runtime.driver.set_active(driver or FakeDriver(capability))
    try:
        yield
    finally:
        runtime.driver.set_active(driver_before)
        launcher._compiled_kernels.clear()
        for module in (
            triton_kernels,
            triton_expert_kernels,
            triton_low_rank_kernels,
            triton_matmul_kernels,
            triton_row_kernels,
            triton_sampling_kernels,
        ):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.device_caches.clear()


@contextmanager
def recorded_launches(capability: int = 90) -> Iterator[dict[str, Launch]]:
    """Yield a dictionary, to which each launch with a new key is added; nothing is compiled."""
    from triton import knobs

    launches: dict[str, Launch] = {}

    def record(*, key: str, fn: Any, compile: Any, **_: object) -> bool:
        name = fn.name.rpartition(".")[2]
        launches.setdefault(f"{name} {key}", Launch(name, fn.jit_function, compile, capability))
        return True  # Do not compile.

    with fake_gpu(capability), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = record
        yield launches


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack memory of each thread; the kernels use the stack for spills."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [program, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    (registers, stack_bytes), *others = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    assert not others
    return int(registers), int(stack_bytes)


def compile_case(case: str) -> Resources:
    """Compile the kernels of a case, in this process."""
    if "sampler" in case:
        return _compile_sampler(case)
    if "linear" in case:
        return _compile_linears(case)
    from tests.support.served_attention import ServedLayer

    *shape, dtype, kv_dtype = case.removesuffix(" sinks").removesuffix(" alibi").split()
    capability, groups, queries, channels = map(int, shape)
    options = AttentionOptions()
    if case.endswith("sinks"):
        options = AttentionOptions(128, sinks=torch.zeros(groups * queries, dtype=torch.bfloat16))
    elif case.endswith("alibi"):
        options = AttentionOptions(alibi_slopes=torch.zeros(groups * queries))
    with recorded_launches(capability) as launches:
        for rotary in (False, True):
            layer = ServedLayer(
                (groups, queries, channels),
                getattr(torch, dtype),
                getattr(torch, kv_dtype),
                rotary=rotary,
                options=[options],
            )
            layer.run_lengths([1] * 60 + [3, 200], [300] * 62)
        if capability >= FP8_CAPABILITY_MIN:
            layer = ServedLayer(
                (groups, queries, channels),
                getattr(torch, dtype),
                getattr(torch, kv_dtype),
                quantizes=True,
                options=[options],
            )
            layer.run_lengths([1] * 60, [300] * 60)
    return {launch.label: asdict(launch.compile()) for launch in launches.values()}


def _compile_sampler(case: str) -> Resources:
    """Compile the sampler's kernel for logits of a dtype."""
    from serving.worker.triton_sampler import sample_rows

    capability, _, dtype = case.split()
    with recorded_launches(int(capability)) as launches:
        sample_rows(
            torch.zeros(2, SAMPLED_VOCABULARY, dtype=getattr(torch, dtype)),
            torch.zeros(2, 5, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
        )
    return {launch.label: asdict(launch.compile()) for launch in launches.values()}


def _compile_linears(case: str) -> Resources:
    """Compile the kernels of LINEARS with few rows, for a dtype."""
    from gpt.linear import triton_few_rows

    capability, _, dtype = case.split()
    with recorded_launches(int(capability)) as launches:
        for rows, columns, activation in LINEARS:
            weight = torch.zeros(rows, columns, dtype=getattr(torch, dtype))
            for row_count in COMPILED_ROWS:
                triton_few_rows.multiply(weight[:row_count], weight, None, activation)
    return {launch.label: asdict(launch.compile()) for launch in launches.values()}


def resources_with(version: str, case: str) -> Resources:
    """Compile the kernels of a case with this version of Triton, in a process of its own."""
    paths = [str(ROOT), str(VERSIONS[version])]
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compiled", case],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(reversed(paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["version"] == version
    resources: Resources = answer["kernels"]
    return resources


def main(argument: str) -> None:
    if argument == "--write":
        golden = {
            version: {case: resources_with(version, case) for case in CORE_CASES}
            for version in VERSIONS
        }
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        return
    import triton

    json.dump({"version": triton.__version__, "kernels": compile_case(argument)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
