"""Contention benchmark: speed of serving and tuning beside busy processes.

With k busy processes on c cores, an ideal engine that can use all c cores reaches the fraction c /
(c + k) of its speed alone: its fair speed. Linux may share the cores among sessions instead of
threads (`sched_autogroup_enabled`). Each process of this benchmark runs in its own session, and a
busy process uses at most one core. The fraction is then the larger of 1 / (k + 1) and (c - k) / c.
Threads that spin at barriers reach less, because they use up CPU time while they wait for a
preempted thread. A round times each engine alone, and then beside one and two busy processes.
Figures are medians of the rounds' shares. If our engine fails, its rows give the reason.
"""

import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.harness.model_shapes import GPT2
from bench.harness.record import SuiteOutput
from bench.harness.targets import Settings, measured_row, not_run_row
from bench.peers.compare import PEERS_FOLDER, EngineProcess
from bench.peers.prompt_tuning import (
    CASES,
    NO_DROPOUT,
    TrainerProcess,
    TuningSizes,
    random_batches,
    start_trainers,
)
from gpt.child_processes import ChildProcess
from gpt.host_limits import usable_cores

PARTS = ("serving", "tuning")
BUSY_PROCESSES = (0, 1, 2)  # Numbers of busy processes that each round measures.
AUTOGROUP_FILE = Path("/proc/sys/kernel/sched_autogroup_enabled")
START_S = 60.0  # Time limit for the start of a busy process.
# A busy process runs until its standard input is closed, which happens at the latest when this
# process ends.
BUSY_SCRIPT = """
import sys, threading
def wait_for_end():
    sys.stdin.read()
    ended.set()
ended = threading.Event()
threading.Thread(target=wait_for_end, daemon=True).start()
print("ready", flush=True)
while not ended.is_set():
    for _ in range(100_000):
        pass
"""


@dataclass(frozen=True)
class ContentionSizes:
    """Sizes of the timed work; tests use smaller ones."""

    rounds: int = 5
    prompt_tokens: int = 32
    new_tokens: int = 128  # Of the one request that is timed.
    tuning: TuningSizes = field(
        default_factory=lambda: TuningSizes(steps=2, threads=usable_cores())
    )


class ContentionError(Exception):
    """An engine failed during the timed work."""


# Runs the timed work once, and returns its speed. Raises ContentionError if the engine has failed.
SpeedFunction = Callable[[], float]


def run_suite(
    parts: Sequence[str] = (),
    sizes: ContentionSizes = ContentionSizes(),
    **network: float | None,
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts; `network` overrides config values of GPT-2 small."""
    measurements = {"serving": measure_serving, "tuning": measure_tuning}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "model"
        GPT2.save_random(model, **NO_DROPOUT | network)
        vocab_size = int(network.get("vocab_size") or GPT2.settings["vocab_size"])
        sharers = "sessions" if shares_by_session() else "threads"
        yield f"GPT-2 small, bf16, {usable_cores()} cores shared by {sharers}"
        for part in parts or PARTS:
            yield from measurements[part](model, vocab_size, sizes)


def measure_serving(model: Path, vocab_size: int, sizes: ContentionSizes) -> Iterator[SuiteOutput]:
    """Time one request on our engine and on llama.cpp, if it is installed."""

    def speed_of(engine: EngineProcess) -> SpeedFunction:
        def generate() -> float:
            prompt = random.sample(range(vocab_size), sizes.prompt_tokens)
            seconds = engine.time_generation([prompt], sizes.new_tokens)
            if engine.failure:
                raise ContentionError(f"{engine.name} failed {engine.failure}")
            return sizes.new_tokens / seconds

        return generate

    with ExitStack() as stack:
        engines: list[EngineProcess] = []
        descriptions: dict[str, str] = {}
        failures: dict[str, str] = {}
        for name, python in (
            ("ours", Path(sys.executable)),
            ("llama", PEERS_FOLDER / "llama" / "bin" / "python"),
        ):
            try:
                engine = EngineProcess(name, python, model)
            except (RuntimeError, OSError) as error:
                failures[name] = str(error)
                descriptions[name] = f"not run: {error}"
                continue
            stack.callback(engine.close)
            engines.append(engine)
            descriptions[name] = engine.description
        yield Settings("one request", descriptions)
        speeds = {engine.name: speed_of(engine) for engine in engines}
        yield from report_shares("serving", "new tokens/s", speeds, failures, sizes.rounds)


def measure_tuning(model: Path, vocab_size: int, sizes: ContentionSizes) -> Iterator[SuiteOutput]:
    """Time steps of prompt tuning with our trainer."""
    case, rng = CASES[0], random.Random(0)
    tuning_sizes = replace(sizes.tuning, vocab_size=vocab_size)

    def speed_of(trainer: TrainerProcess) -> SpeedFunction:
        def train() -> float:
            batches = random_batches(rng, case, tuning_sizes, tuning_sizes.steps)
            tokens = sum(len(example) for batch in batches for example in batch)
            try:
                return tokens / trainer.train(batches, tuning_sizes.answer_tokens).seconds
            except (RuntimeError, OSError) as error:
                raise ContentionError(str(error)) from error

        return train

    with ExitStack() as stack:
        speeds: dict[str, SpeedFunction] = {}
        failures: dict[str, str] = {}
        try:
            trainers = stack.enter_context(start_trainers(model.parent, tuning_sizes, ("ours",)))
            for trainer in trainers:
                trainer.load_model(model, "bfloat16")
                trainer.start_training(case.virtual_tokens)
                speeds[trainer.name] = speed_of(trainer)
        except (RuntimeError, OSError) as error:
            failures["ours"] = str(error)
        yield from report_shares("tuning", "text tokens/s", speeds, failures, sizes.rounds)


def report_shares(
    part: str,
    unit: str,
    speeds: Mapping[str, SpeedFunction],
    start_failures: Mapping[str, str],
    rounds: int,
) -> Iterator[SuiteOutput]:
    """Time the engines; yield a line per engine, and our rows.

    `start_failures`: the reasons of the engines that did not start, which `speeds` lacks.
    """
    failures = dict(start_failures)
    samples = time_rounds(speeds, failures, rounds)
    yield from (failures[name] for name in speeds if name in failures)
    for name, by_count in samples.items():
        cells = ", ".join(
            f"{statistics.median(by_count[count]):,.1f} with {count} busy"
            for count in BUSY_PROCESSES
        )
        yield f"{name}: {cells} {unit}"
    for count in BUSY_PROCESSES[1:]:
        row_name = f"contention/{part}-{count}"
        if "ours" in failures:
            yield not_run_row(row_name, failures["ours"])
            continue
        shares = {name: fair_shares(samples[name], count) for name in samples}
        medians = {name: statistics.median(values) for name, values in shares.items()}
        summary = ", ".join(f"{name} {100 * share:.0f} %" for name, share in medians.items())
        yield measured_row(row_name, 100 * medians["ours"], summary, samples=shares)


def time_rounds(
    speeds: Mapping[str, SpeedFunction], failures: MutableMapping[str, str], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Time interleaved rounds after a warm-up; return the speeds by engine and busy processes.

    If an engine fails, the reason is added to `failures`, and its speeds are dropped.
    """
    samples: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in BUSY_PROCESSES} for name in speeds
    }
    for round_index in range(rounds + 1):
        for name in list(samples):
            measure = speeds[name]
            try:
                if round_index == 0:
                    measure()
                    continue
                for count in BUSY_PROCESSES:
                    with busy_processes(count):
                        samples[name][count].append(measure())
            except ContentionError as error:
                failures[name] = str(error)
                del samples[name]
    return samples


def fair_shares(by_count: Mapping[int, Sequence[float]], busy: int) -> list[float]:
    """Return the share of the fair speed that each round reached beside `busy` processes."""
    fair = fair_fraction(usable_cores(), busy, by_session=shares_by_session())
    return [
        speed / (alone * fair) for alone, speed in zip(by_count[0], by_count[busy], strict=True)
    ]


def fair_fraction(cores: int, busy: int, *, by_session: bool) -> float:
    """Return the fair fraction of the speed alone beside `busy` processes."""
    if by_session:
        return max(cores / (busy + 1), cores - busy) / cores
    return cores / (cores + busy)


def shares_by_session() -> bool:
    """Return whether Linux shares the cores among sessions."""
    try:
        return AUTOGROUP_FILE.read_text().strip() == "1"
    except OSError:
        return False


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each keep a core busy."""
    processes = []
    try:
        for _ in range(count):
            processes.append(
                ChildProcess(
                    [sys.executable, "-c", BUSY_SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for process in processes:
            if process.read_line(START_S) != "ready\n":
                raise RuntimeError("a busy process ended at its start")
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # Also closes the pipes.
