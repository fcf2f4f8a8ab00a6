"""Benchmark of LoRA, activated LoRA, DoRA and IA3: training speed and memory compared with PEFT.

`python -m bench --only linear-tuning` runs this suite. Our trainer and PEFT (eager attention) run
in two processes, load the same checkpoint with random weights in bfloat16, change all linears
with rank 16, and receive the same batches in interleaved rounds. A ratio of speeds is the median of
the rounds' ratios: other programs on the machine slow down both trainers of a round. CPU time per
token is reported as well. The peak memory is that of a new process, model loading included.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness.model_shapes import GPT2, SMALL_LLAMA
from bench.harness.record import SuiteOutput
from bench.harness.targets import Settings, measured_row
from bench.peers.linear_tuning_process import INVOCATION, Batches
from bench.peers.prompt_tuning import NO_DROPOUT, PeakMemory, TrainerProcess

MODELS = {"gpt2": GPT2, "llama": SMALL_LLAMA}
METHODS = ("lora", "dora", "ia3", "alora")
PARTS = tuple(f"{family}-{method}" for family in MODELS for method in METHODS)
FIRST_TOKEN = 20  # Smaller ids are those of the invocation.


@dataclass(frozen=True)
class LinearTuningSizes:
    """Sizes of batches and rounds; tests use smaller ones."""

    batch_size: int = 8
    text_tokens: int = 128
    # For activated LoRA: nine tenths of the tokens are before the invocation.
    activated_text_tokens: int = 256
    context_tokens: int = 230
    answer_tokens: int = 8  # Tokens at the end of each example that the loss covers.
    rounds: int = 7
    steps: int = 4  # Steps per round.
    threads: int = 2
    vocab_size: int = GPT2.settings["vocab_size"]


class LinearTrainerProcess(TrainerProcess):
    """A child process that runs one trainer; see bench/peers/linear_tuning_process.py."""

    module = "bench.peers.linear_tuning_process"

    def load_family(self, model: Path, family: str) -> str:
        request = {"model": str(model), "dtype": "bfloat16", "family": family}
        return str(self._request(request)["about"])

    def start_method(self, method: str) -> None:
        self._request({"method": method})


def run_suite(
    parts: Sequence[str] = (),
    sizes: LinearTuningSizes = LinearTuningSizes(),
    **network: float | None,
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts; `network` overrides config values of GPT-2 small."""
    for family in MODELS:
        methods = [method for method in METHODS if f"{family}-{method}" in (parts or PARTS)]
        if not methods:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            folder = Path(name)
            changes = NO_DROPOUT | network if family == "gpt2" else network
            MODELS[family].save_random(folder / "model", **changes)
            yield f"{MODELS[family].title}, {sizes.threads} threads, torch {torch.__version__}"
            for method in methods:
                yield from measure_method(folder, family, method, sizes)


def measure_method(
    folder: Path, family: str, method: str, sizes: LinearTuningSizes
) -> Iterator[SuiteOutput]:
    trainers: list[LinearTrainerProcess] = []
    # Text tokens per second and per CPU second of each round, by trainer.
    rates: dict[str, list[tuple[float, float]]] = {"ours": [], "peft": []}
    peaks_mib = {}
    try:
        for name in rates:
            trainer = LinearTrainerProcess(name, sizes.threads, folder / f"{name}.log")
            trainers.append(trainer)
        rng = random.Random(0)
        warm_up = random_batches(rng, method, sizes)
        descriptions = {}
        for trainer in trainers:
            with PeakMemory(trainer) as peak_memory:
                descriptions[trainer.name] = trainer.load_family(folder / "model", family)
                trainer.start_method(method)
                trainer.train(warm_up, sizes.answer_tokens)
            peaks_mib[trainer.name] = (peak_memory.peak_kib - trainer.idle_kib) / 1024
        yield Settings(f"{family}, {method}, bfloat16", descriptions)
        for _ in range(sizes.rounds):
            batches = random_batches(rng, method, sizes)
            tokens = sum(len(example) for batch in batches for example in batch)
            for trainer in trainers:
                training_round = trainer.train(batches, sizes.answer_tokens)
                rates[trainer.name].append(
                    (tokens / training_round.seconds, tokens / training_round.cpu_s)
                )
    finally:
        for trainer in trainers:
            trainer.close()
    speeds = {
        name: statistics.median(speed for speed, _ in values) for name, values in rates.items()
    }
    ratio, cpu_ratio = (
        statistics.median(
            ours[column] / peft[column]
            for ours, peft in zip(rates["ours"], rates["peft"], strict=True)
        )
        for column in range(2)
    )
    yield measured_row(
        f"linear-tuning/{family}/speed-{method}",
        ratio,
        f"{ratio:.2f} x ({speeds['ours']:,.0f} vs {speeds['peft']:,.0f} text tokens/s; per CPU "
        f"second {cpu_ratio:.2f} x)",
        samples={name: [rate for rate, _ in values] for name, values in rates.items()},
    )
    share = peaks_mib["ours"] / peaks_mib["peft"]
    yield measured_row(
        f"linear-tuning/{family}/memory-{method}",
        share,
        f"ours {peaks_mib['ours']:,.0f} MiB, PEFT {peaks_mib['peft']:,.0f} MiB: {share:.2f} x",
        samples={name: [peak] for name, peak in peaks_mib.items()},
    )


def random_batches(rng: random.Random, method: str, sizes: LinearTuningSizes) -> Batches:
    """Draw the batches of a round; those of activated LoRA contain the invocation."""

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, sizes.vocab_size) for _ in range(count)]

    def draw_example() -> list[int]:
        if method != "alora":
            return draw(sizes.text_tokens)
        rest = sizes.activated_text_tokens - sizes.context_tokens - len(INVOCATION)
        return [*draw(sizes.context_tokens), *INVOCATION, *draw(rest)]

    return [[draw_example() for _ in range(sizes.batch_size)] for _ in range(sizes.steps)]
