"""Conversion benchmark: speed and peak memory of `preamble convert`, compared with `cp`.

The source model is generated, 4 GB of bf16 by default. Conversion and `cp` alternate for several
rounds. Before each timing, the source is dropped from the page cache; a timing ends when the target
is flushed to the disk. The memory figure is the peak of anonymous and shared memory, minus the
memory of the process after its imports.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness.record import SuiteOutput
from bench.harness.targets import measured_row
from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.layout.layout import ParallelSplit
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from gpt.child_processes import ChildProcess
from gpt.config import GPTConfig
from gpt.parallel.weight_sharding import parameter_specs

POOL_ELEMENTS = 1 << 27  # Size of the pool of random numbers.
ROUNDS = 5
SAMPLE_SECONDS = 0.02  # Interval of memory samples.
STOP_SECONDS = 10.0  # Time that the child process gets to end after SIGTERM.

# The keys are the row names in bench/harness/targets.py without "convert/".
CONVERT_FLAGS: dict[str, tuple[str, ...]] = {
    "tp2": ("--to", "megatron", "--tp", "2"),
    "hf": ("--to", "hf"),
    "native": ("--to", "native"),
    "torch-dist": ("--to", "megatron-dist"),
}
# Memory budget of a conversion: twice the largest tensor plus 300 MB.
LARGEST_TENSORS_IN_FLIGHT, OVERHEAD_MIB = 2, 300e6 / (1 << 20)


def model_config(layers: int) -> GPTConfig:
    """Build the config of a Llama-shaped model with about 0.1 GB per layer."""
    return GPTConfig(
        num_layers=layers,
        hidden_size=2048,
        num_attention_heads=16,
        num_query_groups=8,
        ffn_hidden_size=5632,
        vocab_size=50257,
        max_position_embeddings=2048,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="silu",
        gated=True,
        qkv_bias=False,
        proj_bias=False,
        mlp_bias=False,
        untie_embeddings_and_output_weights=True,
        dtype="bfloat16",
    )


def random_source(config: GPTConfig) -> Checkpoint:
    """Build a checkpoint whose tensors are views into one pool of random numbers."""
    pool = torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors, start = {}, 0
    for name, parameter in parameter_specs(config).items():
        count = torch.Size(parameter.shape).numel()
        start = (start + 7919) % (POOL_ELEMENTS - count)  # Tensors get different numbers.
        tensors[name] = pool[start : start + count].view(parameter.shape)
    return checkpoint_from_tensors(config, tensors)


def run_suite(
    rounds: int = ROUNDS, layers: int = 38, disk: str | None = None
) -> Iterator[SuiteOutput]:
    """Measure each target format; `disk` is a folder on the disk to measure."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=disk) as name:
        folder = Path(name)
        source, config = folder / "source", model_config(layers)
        options = ConversionOptions(target_format="megatron", split=ParallelSplit(tp=4, pp=2))
        convert(plan(random_source(config), source, options))
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        largest = max(
            torch.Size(parameter.shape).numel() * 2
            for parameter in parameter_specs(config).values()
        )
        yield f"generated model of {size / 1e9:.2f} GB; largest tensor {largest >> 20} MiB"
        yield "medians of interleaved rounds; source not in the page cache, target flushed to disk"
        peak_mib: dict[str, float] = {}
        for target_name, arguments in CONVERT_FLAGS.items():
            timing = time_conversions(source, folder / "target", arguments, rounds)
            ours_s, cp_s = statistics.median(timing.ours_s), statistics.median(timing.cp_s)
            yield measured_row(
                f"convert/{target_name}",
                cp_s / ours_s,
                f"{size / ours_s / 1e9:.2f} GB/s, cp {size / cp_s / 1e9:.2f}: "
                f"{cp_s / ours_s:.2f} x; "
                f"{timing.memory_mib:.0f} MiB above idle",
                samples={"ours, s": timing.ours_s, "cp, s": timing.cp_s},
            )
            peak_mib[target_name] = timing.memory_mib
        allowed_mib = LARGEST_TENSORS_IN_FLIGHT * largest / (1 << 20) + OVERHEAD_MIB
        peak_mib_max = max(peak_mib.values())
        yield measured_row(
            "convert/memory",
            peak_mib_max / allowed_mib,
            f"peak {peak_mib_max:.0f} MiB above idle, budget {allowed_mib:.0f} MiB: "
            f"{peak_mib_max / allowed_mib:.2f} x",
            samples={target_name: [peak] for target_name, peak in peak_mib.items()},
        )


@dataclass(frozen=True)
class ConversionTiming:
    """Seconds of each round, and the peak memory over all rounds."""

    ours_s: Sequence[float]
    cp_s: Sequence[float]
    memory_mib: float


def time_conversions(
    source: Path, target: Path, arguments: Sequence[str], rounds: int
) -> ConversionTiming:
    ours_s = []
    cp_s = []
    memory_mib = []
    for _ in range(rounds):
        drop_page_cache(source)
        cp_s.append(time_cp(source, target))
        drop_page_cache(source)
        seconds, above_idle_mib = time_convert(source, target, arguments)
        ours_s.append(seconds)
        memory_mib.append(above_idle_mib)
    return ConversionTiming(ours_s, cp_s, max(memory_mib))


def drop_page_cache(source: Path) -> None:
    """Flush pending writes, then drop the source from the page cache."""
    os.sync()
    for file in source.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def time_cp(source: Path, target: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


# The child reports that its imports are done, waits for a line, and converts, while the parent
# samples the memory of the child.
CHILD_SCRIPT = """
import json, sys, time
from checkpoints_tools import __main__ as command
from checkpoints_tools.conversion import convert
print("idle", flush=True); sys.stdin.readline()
started = time.perf_counter()
code = command.main(json.loads(sys.argv[1]))
print(json.dumps([code, time.perf_counter() - started]), flush=True)
"""


def time_convert(source: Path, target: Path, arguments: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of a conversion and its peak memory above idle in MiB."""
    arguments_json = json.dumps(["convert", str(source), str(target), *arguments])
    child = ChildProcess(
        [sys.executable, "-c", CHILD_SCRIPT, arguments_json],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "idle\n"
        idle_kib = peak_kib = process_memory_kib(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            peak_kib = max(peak_kib, process_memory_kib(child.pid))
            time.sleep(SAMPLE_SECONDS)
        code, seconds = json.loads(child.stdout.read().splitlines()[-1])
    finally:
        child.stop(STOP_SECONDS)
    assert code == 0, f"convert {arguments} failed"
    shutil.rmtree(target)
    return seconds, (peak_kib - idle_kib) / 1024


def process_memory_kib(pid: int) -> int:
    """Return the KiB of anonymous and shared memory of a process.

    Pages of mapped files do not count, because the kernel can drop them at any time.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines())
    if "RssAnon" not in sizes:
        return 0
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))
