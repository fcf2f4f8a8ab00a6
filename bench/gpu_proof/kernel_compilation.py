"""Kernel compilation of a GPU proof: processes compile the attention kernels into one cache.

The later stages load the kernels from the cache. A process compiles one combination of head shape
and dtypes, as the attention backend prepares it at the start of a server.

    python -m bench.gpu_proof.kernel_compilation HEADS KV_HEADS CHANNELS DTYPE KV_DTYPE
"""

import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from bench.gpu_proof.stage_context import StageContext, StageFailure
from gpt.attention.kv_cache import FP8_DTYPE
from gpt.attention.options import AttentionOptions
from gpt.child_processes import module_command
from gpt.host_limits import usable_cores

# Query heads, KV heads, channels: of the models that the other stages run, and of common models.
HEAD_SHAPES = ((32, 32, 128), (32, 8, 128), (8, 8, 64), (16, 16, 96), (8, 1, 256))
DTYPES = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "fp8"),
    ("float32", "float32"),
)
PROCESS_S_MAX = 80.0
BLOCK_TOKENS = 16


def compile_in_processes(stage: StageContext, cache: Path) -> None:
    """Compile all combinations, and record the kernels, the seconds and the register spills."""
    start = time.monotonic()
    combinations = list(product(HEAD_SHAPES, DTYPES))
    with ThreadPoolExecutor(max(1, usable_cores() - 2)) as pool:
        errors = [error for error in pool.map(_compile_combination, combinations) if error]
    stage.figures.add("combinations", len(combinations))
    stage.figures.add("seconds", round(time.monotonic() - start, 1))
    binaries = sorted(cache.rglob("*.cubin"))
    stage.figures.add("kernels", len(binaries))
    stage.figures.add("spills", _spills(binaries))
    if errors:
        stage.figures.add("errors", errors)
        raise StageFailure(f"{len(errors)} combinations failed; the first: {errors[0]}")


def _compile_combination(combination: tuple[tuple[int, ...], tuple[str, str]]) -> str:
    """Compile one combination in a process; return the error, or an empty text."""
    shape, dtypes = combination
    command = module_command(["bench.gpu_proof.kernel_compilation", *map(str, shape), *dtypes])
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{combination}: it did not end within {PROCESS_S_MAX:.0f} s"
    last_lines = process.stderr.strip().splitlines()[-1:]
    return f"{combination}: {''.join(last_lines)}" if process.returncode else ""


def _spills(binaries: list[Path]) -> dict[str, str]:
    """Describe the kernels that use the stack, by name and dtypes, with CUDA's or Triton's tool."""
    stack_bytes: dict[str, list[int]] = defaultdict(list)
    tool = shutil.which("cuobjdump") or _bundled_tool()
    if tool is None:
        return {}
    for binary in binaries:
        command = [tool, "--dump-resource-usage", str(binary)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        kernel_bytes = sum(int(count) for count in re.findall(r"STACK:(\d+)", output))
        if kernel_bytes:
            stack_bytes[f"{binary.stem}, {_pointer_types(binary.with_suffix('.ttir'))}"].append(
                kernel_bytes
            )
    return {
        kernel: f"{len(counts)} variants, {min(counts)} to {max(counts)} bytes a thread"
        for kernel, counts in sorted(stack_bytes.items())
    }


def _pointer_types(intermediate_code: Path) -> str:
    """Return the types of a kernel's pointers, from the intermediate code beside the binary."""
    if not intermediate_code.exists():
        return "unknown types"
    types = re.findall(r"!tt\.ptr<(\w+)", intermediate_code.read_text("utf-8"))
    return " ".join(sorted(set(types)))


def _bundled_tool() -> str | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def main() -> int:
    from gpt.attention.triton_paged import TritonAttention

    heads, kv_heads, channels = map(int, sys.argv[1:4])
    dtype, kv_dtype = (
        FP8_DTYPE if name == "fp8" else getattr(torch, name) for name in sys.argv[4:6]
    )
    q = torch.zeros(1, heads, channels, dtype=dtype, device="cuda")
    shape = (4, 2, kv_heads, BLOCK_TOKENS, channels)
    kv = torch.zeros(shape, dtype=torch.float32, device="cuda").to(kv_dtype)
    TritonAttention(None).compile_kernels(q, kv, AttentionOptions())
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
