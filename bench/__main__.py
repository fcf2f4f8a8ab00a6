"""`make bench`: our generate loop and a peer, conversion and `cp`, taken in turn in one run.

The model is GPT-2 small with random weights. Both sides decode greedily from the same ids, in the
same dtype, with the same threads; each row is the median of interleaved rounds, so that a noisy
machine is noisy for both. A timing never fails anything.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gpt
from bench import adapters, front, offline, tuning
from bench.gpt2 import VOCABULARY, random_model
from gpt.generate import generate
from gpt.model import GPT
from gpt.packed import pack
from gpt.sampling import Sampling

# What is timed: requests, prompt tokens, new tokens.
ROWS = ((1, 32, 64), (8, 128, 64), (1, 960, 1))
TABLES = ("generate", "convert", "peers", "engine", "adapters", "front", "tuning")

Run = Callable[[Tensor, int], None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=TABLES, help="one")
    parser.add_argument("--disk", metavar="FOLDER", help="where checkpoints are converted")
    parser.add_argument("--peers", nargs="*", help="which engines; see bench/peers_install.sh")
    parser.add_argument("--requests", nargs="*", type=int, help="of that table, some rows only")
    offline.add_flags(parser)
    parts = {"front": list(front.PARTS), "tuning": list(tuning.PARTS)}
    known = "; ".join(f"{name}: {', '.join(some)}" for name, some in parts.items())
    parser.add_argument("--parts", nargs="*", default=[], help=f"some only. {known}")
    flags = parser.parse_args(argv)
    if set(flags.parts) - set(parts.get(flags.only, ())):
        parser.error(f"--parts is for --only {known}")
    if flags.only in ("engine", "adapters"):
        for line in offline.asked(flags) if flags.only == "engine" else adapters.lines():
            print(line, flush=True)
        return 0
    if flags.only in parts:
        table = front.lines if flags.only == "front" else tuning.lines
        for line in table(tuple(flags.parts)):
            print(line, flush=True)
        return 0
    if flags.only == "peers":
        from bench import peers

        for line in peers.lines(flags.rounds, flags.peers or peers.NAMES, flags.requests):
            print(line, flush=True)
        return 0
    if flags.only != "convert":
        code = generation(flags)
        if code:
            return code
    if flags.only == "convert" or (flags.only is None and flags.device == "cpu"):
        from bench import conversion

        for line in conversion.lines(flags.rounds, disk=flags.disk):
            print(line, flush=True)
    return 0


def generation(flags: argparse.Namespace) -> int:
    if flags.device == "cuda" and not torch.cuda.is_available():
        print("bench: no CUDA device is visible to torch; without --device cuda the CPU is timed")
        return 1
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        peer = transformers_peer(Path(folder), flags.device, flags.dtype)
        loaded = gpt.load(folder, device=flags.device, dtype=flags.dtype)
    pack(loaded)
    ours = ours_of(loaded)
    where = torch.cuda.get_device_name() if flags.device == "cuda" else f"{threads()} threads"
    print(f"GPT-2 small, {flags.dtype}, {where}, torch {torch.__version__}")
    print(f"{'requests':>8} {'prompt':>7} {'new':>4} {'ours':>9} {'transformers':>13} {'ratio':>6}")
    for requests, prompt, new in ROWS:
        ids = torch.randint(VOCABULARY, (requests, prompt), device=flags.device)
        tokens = requests * (new if new > 1 else prompt)
        speeds = [tokens / s for s in rounds((ours, peer), ids, new, flags.rounds)]
        ratio = speeds[0] / speeds[1]
        print(
            f"{requests:8} {prompt:7} {new:4} {speeds[0]:9,.0f} {speeds[1]:13,.0f} {ratio:6.2f}",
            flush=True,
        )
    print("tokens/s: new ones, prompts included in the time; of the prompt where one is new")
    return 0


def threads() -> int:
    return torch.get_num_threads()


def ours_of(model: GPT) -> Run:
    def run(ids: Tensor, new: int) -> None:
        generate(model, ids.tolist(), Sampling(new))

    return run


def transformers_peer(folder: Path, device: str, dtype: str) -> Run:
    """Its own GPT-2 with its own attention kernels; its weights are saved for ours to load."""
    model = random_model(dtype)
    model.save_pretrained(folder)
    model = model.to(device)

    @torch.inference_mode()
    def run(ids: Tensor, new: int) -> None:
        mask = torch.ones_like(ids)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )

    return run


def rounds(runs: tuple[Run, Run], ids: Tensor, new: int, count: int) -> list[float]:
    """The median seconds of each, after one round that is not counted."""
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(count + 1):
        for run, spent in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run(ids, new)  # Ends with ids in host memory, so a device has finished too.
            if turn:
                spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in seconds]


if __name__ == "__main__":
    sys.exit(main())
