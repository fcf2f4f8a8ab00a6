"""How soon `preamble serve` says no to what cannot work, and how soon it is ready to what can.

A refusal is timed in a process that has imported all that serving imports, from the command's call
to its end; readiness from the start of the process, imports and all, and what loading the weights
takes in a process that does only that is taken off. Medians of rounds; of refusals the slowest.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import Item
from bench.harness.server_process import random_checkpoint, served
from bench.harness.targets import judged
from gpt.config import GPTConfig

WAIT_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """How much is asked; a test asks for less."""

    rounds: int = 3


# The words of a command come on standard input, once all is imported.
REFUSED = """
import json, sys, time
from serving import __main__ as command, server
words = json.loads(sys.stdin.readline())
started = time.perf_counter()
code = command.main(["serve", *words])
print(json.dumps([code, time.perf_counter() - started]), flush=True)
"""
LOADED = """
import sys, time
from bench.harness.offline_engine import loaded
from gpt.formats.registry import open_checkpoint
from serving.config import ServerConfig
started = time.perf_counter()
loaded(open_checkpoint(sys.argv[1]), ServerConfig(sys.argv[1]))
print(time.perf_counter() - started)
"""


def lines(sizes: Sizes = Sizes(), network: GPTConfig = GPT2_SMALL) -> Iterator[Item]:
    with random_checkpoint(network) as model, tempfile.TemporaryDirectory() as folder:
        yield from refusals(model, Path(folder), sizes)
        yield from readiness(model, sizes)


def refusals(model: Path, folder: Path, sizes: Sizes) -> Iterator[Item]:
    """Of paths, headers and settings that cannot be right."""
    found: dict[str, list[float]] = {}
    for why, words in bad(model, folder).items():
        found[why] = [refused_s(words) for _ in range(sizes.rounds)]
        yield f"  {why}: refused in {1e3 * statistics.median(found[why]):.0f} ms"
    slowest = max(found, key=lambda why: statistics.median(found[why]))
    seconds = statistics.median(found[slowest])
    yield judged("start/refusal", seconds, f"{seconds:.2f} s ({slowest})", samples=found)


def bad(model: Path, folder: Path) -> dict[str, list[str]]:
    """What is wrong, and the words of `preamble serve` that it is in."""
    unknown, cut = folder / "unknown.yaml", folder / "cut"
    unknown.write_text("runing_requests_max: 8\n")
    cut.mkdir()
    for file in model.iterdir():
        whole = file.read_bytes()
        # The header of the weights stays, and promises more than there is.
        (cut / file.name).write_bytes(whole[:-1000] if file.suffix == ".safetensors" else whole)
    return {
        "no such path": [str(folder / "nowhere")],
        "an unknown setting": [str(model), "--config", str(unknown)],
        "weights that are cut short": [str(cut)],
        "heads that do not divide": [str(model), "--tp", "5"],
        "an open address without a key": [str(model), "--host", "0.0.0.0"],
    }


def refused_s(words: list[str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        input=json.dumps([*words, "--port", "0", "--http-port", "0"]) + "\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    code, seconds = json.loads(done.stdout.splitlines()[-1])
    assert code == 1, f"{words} was not refused"
    return float(seconds)


def readiness(model: Path, sizes: Sizes) -> Iterator[Item]:
    """With a server's defaults, proof and warm-up included."""
    whole, load = [], []
    for _ in range(sizes.rounds):
        line = [sys.executable, "-c", LOADED, str(model)]
        told = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=True)
        load.append(float(told.stdout.splitlines()[-1]))
        started = time.perf_counter()
        with served(model):
            whole.append(time.perf_counter() - started)
    beyond = statistics.median(whole) - statistics.median(load)
    told_s = f"{statistics.median(whole):.2f} s, of which {statistics.median(load):.2f} s load"
    samples = {"ready": whole, "load": load}
    yield judged("start/ready", beyond, f"{beyond:.2f} s ({told_s})", samples=samples)
