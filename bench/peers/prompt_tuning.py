"""Prompt-tuning benchmark: training speed, memory and losses compared with Hugging Face PEFT.

`python -m bench --only tuning` runs this suite. Our trainer and PEFT run in two processes. Both
load the same checkpoint, GPT-2 small with random weights, and receive the same batches in the same
order. Text tokens per second are medians of interleaved rounds. CPU time per token is reported as
well, because other programs on the machine hardly change it. A missed target is reported as a
verdict and does not change the exit status.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.model_shapes import GPT2
from bench.harness.record import SuiteOutput
from bench.harness.targets import Settings, measured_row
from bench.peers.peft_process import Batches
from bench.suites.conversion import process_memory_kib
from gpt.child_processes import ChildProcess, child_environment
from gpt.cpu_threads import limit_openmp_spinning

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("speed", "memory", "losses")
# transformers' GPT-2 has dropout by default; our trainer has none in a frozen model.
NO_DROPOUT: dict[str, float | None] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SAMPLE_S = 0.003  # Interval of memory samples.
# Pause before each timing, because OpenMP threads can spin for a while after their work.
COOLDOWN_S = 0.3
# `length_sorted_batches` sorts the examples of this number of batches together.
GROUPED_BATCHES = 50


@dataclass(frozen=True)
class TuningCase:
    """The shape of the training examples of one case."""

    name: str  # Last part of the target's name.
    title: str
    virtual_tokens: int
    text_tokens_min: int  # Shortest example, answer included.
    text_tokens_max: int  # Longest example, answer included.

    @property
    def is_mixed(self) -> bool:
        return self.text_tokens_min < self.text_tokens_max


CASES = (
    TuningCase("20", "8 x 128 text tokens, 20 virtual", 20, 128, 128),
    TuningCase("100", "8 x 128 text tokens, 100 virtual", 100, 128, 128),
    TuningCase("mixed", "8 x 16-256 text tokens, 20 virtual", 20, 16, 256),
)


@dataclass(frozen=True)
class TuningSizes:
    """Sizes of batches and rounds; tests use smaller ones."""

    cases: tuple[TuningCase, ...] = CASES
    batch_size: int = 8
    answer_tokens: int = 8  # Tokens at the end of each example that the loss covers.
    rounds: int = 5
    steps: int = 4  # Steps per round if all examples have the same length.
    # Steps per round with mixed lengths; more than `steps`, because the step times differ.
    mixed_steps: int = 8
    memory_steps: int = 3
    losses_steps: int = 6
    threads: int = 2
    vocab_size: int = GPT2.settings["vocab_size"]


@dataclass(frozen=True)
class TrainingRound:
    """Time and losses of one round."""

    seconds: float
    cpu_s: float
    losses: list[float]


class TrainerProcess:
    """A child process that runs one trainer; see bench/peers/peft_process.py."""

    module = "bench.peers.peft_process"

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name = name
        self._log = log.open("w+")
        environment = child_environment(os.environ)
        if name == "ours":
            limit_openmp_spinning(environment)  # As `preamble tune` does.
        self._process = ChildProcess(
            [sys.executable, "-m", self.module, name, str(threads)],
            environment=environment,
            folder=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._read_reply()  # The process sends an empty reply after its imports.
        self.idle_kib = self.memory_kib()

    def load_model(self, model: Path, dtype: str) -> str:
        return str(self._request({"model": str(model), "dtype": dtype})["about"])

    def start_training(self, virtual_tokens: int) -> None:
        self._request({"virtual": virtual_tokens})

    def train(self, batches: Batches, answer_tokens: int) -> TrainingRound:
        time.sleep(COOLDOWN_S)
        return TrainingRound(**self._request({"batches": batches, "answer": answer_tokens}))

    def memory_kib(self) -> int:
        return process_memory_kib(self._process.pid)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # Also closes the pipes.
        self._log.close()

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read_reply()

    def _read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise RuntimeError(
                f"the {self.name} process exited: {lines[-1] if lines else 'without any output'}"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


class PeakMemory:
    """Context manager that samples the peak memory of a trainer process."""

    def __init__(self, trainer: TrainerProcess) -> None:
        self.peak_kib = 0
        self._trainer = trainer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak_kib = max(self.peak_kib, self._trainer.memory_kib())


def run_suite(
    parts: Sequence[str] = (), sizes: TuningSizes = TuningSizes(), **network: float | None
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts; `network` overrides config values of GPT-2 small."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        GPT2.save_random(folder / "model", **NO_DROPOUT | network)
        yield f"GPT-2 small, {sizes.threads} threads each, torch {torch.__version__}"
        measurements = {
            "speed": measure_speed,
            "memory": measure_memory,
            "losses": measure_losses,
        }
        for part in parts or PARTS:
            yield from measurements[part](folder, sizes)


@contextmanager
def start_trainers(
    folder: Path, sizes: TuningSizes, names: Sequence[str]
) -> Iterator[list[TrainerProcess]]:
    with ExitStack() as stack:
        trainers = []
        for name in names:
            trainer = TrainerProcess(name, sizes.threads, folder / f"{name}.log")
            stack.callback(trainer.close)
            trainers.append(trainer)
        yield trainers


def measure_speed(folder: Path, sizes: TuningSizes) -> Iterator[SuiteOutput]:
    with start_trainers(folder, sizes, ("ours", "peft")) as (ours, peft):
        descriptions = {
            trainer.name: trainer.load_model(folder / "model", "bfloat16")
            for trainer in (ours, peft)
        }
        yield Settings("prompt tuning, bfloat16", descriptions)
        yield f"{'text tokens/s (CPU ms per token)':36}{'ours':>16}{'PEFT':>16}{'ratio':>7}"
        for case in sizes.cases:
            for trainer in (ours, peft):
                trainer.start_training(case.virtual_tokens)
            yield from time_rounds(ours, peft, case, sizes)


def time_rounds(
    ours: TrainerProcess, peft: TrainerProcess, case: TuningCase, sizes: TuningSizes
) -> Iterator[SuiteOutput]:
    """Time interleaved rounds after a warm-up round."""
    # Text tokens per second and CPU milliseconds per text token, one pair per round.
    rates_by_side: dict[str, list[tuple[float, float]]] = {}
    rng = random.Random(0)
    steps = sizes.mixed_steps if case.is_mixed else sizes.steps
    for round_index in range(sizes.rounds + 1):
        batches = random_batches(rng, case, sizes, steps)
        sides_with_batches = [("ours", ours, batches), ("PEFT", peft, batches)]
        if case.is_mixed:
            sides_with_batches.append(
                ("PEFT by length", peft, length_sorted_batches(rng, case, sizes, steps))
            )
        for title, trainer, side_batches in sides_with_batches:
            training_round = trainer.train(side_batches, sizes.answer_tokens)
            tokens = sum(len(example) for batch in side_batches for example in batch)
            if round_index:
                rates = tokens / training_round.seconds, 1000 * training_round.cpu_s / tokens
                rates_by_side.setdefault(title, []).append(rates)
    medians = {
        title: tuple(statistics.median(column) for column in zip(*rates, strict=True))
        for title, rates in rates_by_side.items()
    }
    our_rates = medians.pop("ours")
    for title, peer_rates in medians.items():
        ratio = our_rates[0] / peer_rates[0]
        label = case.title if title == "PEFT" else f"  {title}"
        yield (
            f"{label:36}{_format_rates(our_rates):>16}{_format_rates(peer_rates):>16}{ratio:7.2f}"
            f" (CPU ratio {peer_rates[1] / our_rates[1]:.2f})"
        )
    ratio = our_rates[0] / medians["PEFT"][0]
    samples = {title: [speed for speed, _ in rates] for title, rates in rates_by_side.items()}
    summary = f"{ratio:.2f} x ({our_rates[0]:,.0f} vs {medians['PEFT'][0]:,.0f} text tokens/s)"
    yield measured_row(f"tuning/speed-{case.name}", ratio, summary, samples=samples)


def _format_rates(rates: tuple[float, ...]) -> str:
    return f"{rates[0]:,.0f} ({rates[1]:.2f})"


def measure_memory(folder: Path, sizes: TuningSizes) -> Iterator[SuiteOutput]:
    """Measure peak memory in a new process per case and trainer, model loading included."""
    for case in sizes.cases:
        batches = random_batches(random.Random(0), case, sizes, sizes.memory_steps)
        # The peak depends on the longest example, so one example has the maximum length.
        batches[0][0] = _random_ids(random.Random(1), case.text_tokens_max, sizes)
        peak_mib = []
        for name in ("ours", "peft"):
            with (
                start_trainers(folder, sizes, (name,)) as (trainer,),
                PeakMemory(trainer) as peak_memory,
            ):
                trainer.load_model(folder / "model", "bfloat16")
                trainer.start_training(case.virtual_tokens)
                trainer.train(batches, sizes.answer_tokens)
            peak_mib.append((peak_memory.peak_kib - trainer.idle_kib) / 1024)
        share = peak_mib[0] / peak_mib[1]
        yield measured_row(
            f"tuning/memory-{case.name}",
            share,
            f"ours {peak_mib[0]:,.0f} MiB, PEFT {peak_mib[1]:,.0f} MiB: {share:.2f} x",
            samples={"ours": peak_mib[:1], "PEFT": peak_mib[1:]},
        )


def measure_losses(folder: Path, sizes: TuningSizes) -> Iterator[SuiteOutput]:
    """Compare the losses of each step in fp32; equal losses mean the same training."""
    with start_trainers(folder, sizes, ("ours", "peft")) as trainers:
        for trainer in trainers:
            trainer.load_model(folder / "model", "float32")
        for case in sizes.cases:
            batches = random_batches(random.Random(0), case, sizes, sizes.losses_steps)
            loss_curves = []
            for trainer in trainers:
                trainer.start_training(case.virtual_tokens)
                loss_curves.append(trainer.train(batches, sizes.answer_tokens).losses)
            yield f"losses in fp32, {case.title}:"
            for trainer, curve in zip(trainers, loss_curves, strict=True):
                yield f"  {trainer.name} " + " ".join(f"{loss:.5f}" for loss in curve)
            loss_gap_max = max(abs(a - b) for a, b in zip(*loss_curves, strict=True))
            yield measured_row(
                f"tuning/loss-{case.name}", loss_gap_max, f"at most {loss_gap_max:.1e}"
            )


def random_batches(rng: random.Random, case: TuningCase, sizes: TuningSizes, steps: int) -> Batches:
    """Draw batches of examples with random lengths in random order."""
    return [
        [
            _random_ids(rng, rng.randint(case.text_tokens_min, case.text_tokens_max), sizes)
            for _ in range(sizes.batch_size)
        ]
        for _ in range(steps)
    ]


def length_sorted_batches(
    rng: random.Random, case: TuningCase, sizes: TuningSizes, steps: int
) -> Batches:
    """Draw batches of examples with similar lengths.

    Many examples are sorted by length and divided into batches. `steps` of these batches, spread
    over all lengths, are returned in random order.
    """
    examples = [
        example for batch in random_batches(rng, case, sizes, GROUPED_BATCHES) for example in batch
    ]
    examples.sort(key=len)
    sorted_batches = [
        examples[start : start + sizes.batch_size]
        for start in range(0, len(examples), sizes.batch_size)
    ]
    stride = len(sorted_batches) / steps
    batches = [sorted_batches[int((step + rng.random()) * stride)] for step in range(steps)]
    rng.shuffle(batches)
    return batches


def _random_ids(rng: random.Random, length: int, sizes: TuningSizes) -> list[int]:
    return [rng.randrange(sizes.vocab_size) for _ in range(length)]
