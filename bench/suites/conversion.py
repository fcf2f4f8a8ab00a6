"""Converting a checkpoint, beside a plain copy of the same files on the same disk.

The model is generated, 4 GB of bf16 unless told otherwise. Each way is timed with the source's
pages dropped before and the target on the disk at the end, in turn with `cp`, several times. Memory
is what our process holds of its own at its most, above what it holds idle after its imports.
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

from bench.harness.record import Item
from bench.harness.targets import judged
from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.layout.layout import Division
from checkpoints_tools.writers.registry import Wish
from gpt.checkpoint.logical_tensor import Checkpoint, in_memory
from gpt.config import GPTConfig
from gpt.parallel.sharding import parameters

POOL_ELEMENTS = 1 << 27
ROUNDS = 5
SAMPLE_SECONDS = 0.02

# By the names of what is promised of them.
WAYS: dict[str, tuple[str, ...]] = {
    "tp2": ("--to", "megatron", "--tp", "2"),
    "hf": ("--to", "hf"),
    "native": ("--to", "native"),
    "torch-dist": ("--to", "megatron-dist"),
}
# What a worker may hold: so often the largest tensor, and so many MiB.
TENSORS, BESIDES_MIB = 2, 300e6 / (1 << 20)


def config_of(layers: int) -> GPTConfig:
    """About 0.1 GB a layer."""
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


def generated(config: GPTConfig) -> Checkpoint:
    """Random weights that share one pool of numbers, each from a place of its own."""
    pool = torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors, start = {}, 0
    for name, parameter in parameters(config).items():
        count = torch.Size(parameter.shape).numel()
        start = (start + 7919) % (POOL_ELEMENTS - count)
        tensors[name] = pool[start : start + count].view(parameter.shape)
    return in_memory(config, tensors)


def lines(rounds: int = ROUNDS, layers: int = 38, disk: str | None = None) -> Iterator[Item]:
    """Way by way, as it is measured; `disk` is a folder on the one that is meant."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=disk) as name:
        folder = Path(name)
        source, config = folder / "source", config_of(layers)
        wish = Wish(to="megatron", division=Division(tp=4, pp=2))
        convert(plan(generated(config), source, wish))
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        largest = max(torch.Size(p.shape).numel() * 2 for p in parameters(config).values())
        yield f"a generated model of {size / 1e9:.2f} GB; largest tensor {largest >> 20} MiB"
        yield "medians of rounds in turn; both to the disk, from a source whose pages were dropped"
        peaks: dict[str, float] = {}
        for way, words in WAYS.items():
            found = measured(source, folder / "target", words, rounds)
            ours, peer = statistics.median(found.ours_s), statistics.median(found.peer_s)
            yield judged(
                f"convert/{way}",
                peer / ours,
                f"{size / ours / 1e9:.2f} GB/s, cp {size / peer / 1e9:.2f}: {peer / ours:.2f} x; "
                f"{found.memory_mib:.0f} MiB above idle",
                samples={"ours, s": found.ours_s, "cp, s": found.peer_s},
            )
            peaks[way] = found.memory_mib
        allowed = TENSORS * largest / (1 << 20) + BESIDES_MIB
        most = max(peaks.values())
        yield judged(
            "convert/memory",
            most / allowed,
            f"{most:.0f} MiB above idle at most, of {allowed:.0f}: {most / allowed:.2f} x",
            samples={way: [peak] for way, peak in peaks.items()},
        )


@dataclass(frozen=True)
class Measured:
    """Seconds of each round, and the most memory of any."""

    ours_s: Sequence[float]
    peer_s: Sequence[float]
    memory_mib: float


def measured(source: Path, target: Path, words: Sequence[str], rounds: int) -> Measured:
    ours, peer, memory = [], [], []
    for _ in range(rounds):
        settle(source)
        peer.append(copied(source, target))
        settle(source)
        seconds, above = converted(source, target, words)
        ours.append(seconds)
        memory.append(above)
    return Measured(ours, peer, max(memory))


def settle(source: Path) -> None:
    """Nothing of the source in memory, nothing of the last round on its way to the disk."""
    os.sync()
    for file in source.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copied(source: Path, target: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


# Runs the command in a process that tells what it holds idle, waits, and is watched from outside.
CHILD = """
import json, sys, time
from checkpoints_tools import __main__ as command
from checkpoints_tools.conversion import convert
print("idle", flush=True); sys.stdin.readline()
started = time.perf_counter()
code = command.main(json.loads(sys.argv[1]))
print(json.dumps([code, time.perf_counter() - started]), flush=True)
"""


def converted(source: Path, target: Path, words: Sequence[str]) -> tuple[float, float]:
    """Seconds, and MiB at most above an idle process."""
    line = json.dumps(["convert", str(source), str(target), *words])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "idle\n"
    idle = most = own_memory(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    while child.poll() is None:
        most = max(most, own_memory(child.pid))
        time.sleep(SAMPLE_SECONDS)
    code, seconds = json.loads(child.stdout.read().splitlines()[-1])
    assert code == 0, f"convert {words} failed"
    shutil.rmtree(target)
    return seconds, (most - idle) / 1024


def own_memory(pid: int) -> int:
    """KiB of anonymous and shared memory; pages of mapped files can be dropped at any time."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in text.splitlines())
    if "RssAnon" not in sizes:
        return 0
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))
