"""`python -m bench --only tuning`: learning a prompt, beside HF PEFT, taken in turn in one run.

GPT-2 small with random weights, the same file for both, each in a process of its own. Both get the
same batches in the same order. Text tokens a second are medians of rounds in turn, and CPU seconds
stand beside them, which other work on the machine hardly moves. Each line has its target and a
verdict; none fails anything.
"""

import json
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
from bench.harness.record import Item
from bench.harness.targets import Settings, judged
from bench.peers.peft_process import Batches
from bench.suites.conversion import own_memory

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("speed", "memory", "losses")
# Theirs comes with some, and ours has none in front of a frozen model.
NO_DROPOUT: dict[str, float | None] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SAMPLE_S = 0.003
# A thread of a process may go on spinning for a while after its work.
REST_S = 0.3
# So many batches' examples are sorted at once where batches are of alike lengths.
GROUPED_BATCHES = 50


@dataclass(frozen=True)
class Case:
    """What is learned from."""

    name: str  # In the names of what is promised.
    title: str
    virtual: int
    low: int  # Text tokens of an example, at least
    high: int  # and at most, the answer's counted.

    @property
    def mixed(self) -> bool:
        return self.low < self.high


CASES = (
    Case("20", "8 x 128 text tokens, 20 virtual", 20, 128, 128),
    Case("100", "8 x 128 text tokens, 100 virtual", 100, 128, 128),
    Case("mixed", "8 x 16-256 text tokens, 20 virtual", 20, 16, 256),
)


@dataclass(frozen=True)
class Sizes:
    """How much is asked; a test asks for less."""

    cases: tuple[Case, ...] = CASES
    batch: int = 8
    answer: int = 8  # Tokens at the end of each example that are learned.
    rounds: int = 5
    steps: int = 4  # Of a round; lengths differ from step to step, so
    mixed_steps: int = 8  # there are more of them where they are mixed.
    memory_steps: int = 3
    losses_steps: int = 6
    threads: int = 2
    vocabulary: int = GPT2.settings["vocab_size"]


@dataclass(frozen=True)
class Spent:
    """What a round took."""

    seconds: float
    cpu_s: float
    losses: list[float]


class Side:
    """One trainer's process."""

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name, self._log = name, log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.peft_process", name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        self._answer()  # It has imported what it needs.
        self.idle_kib = self.kib()

    def load(self, model: Path, dtype: str) -> str:
        return str(self._ask({"model": str(model), "dtype": dtype})["about"])

    def begin(self, virtual: int) -> None:
        self._ask({"virtual": virtual})

    def learn(self, batches: Batches, answer: int) -> Spent:
        time.sleep(REST_S)
        return Spent(**self._ask({"batches": batches, "answer": answer}))

    def kib(self) -> int:
        return own_memory(self._process.pid)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # Which closes the pipes as well.
        self._log.close()

    def _ask(self, work: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise RuntimeError(f"{self.name} ended: {lines[-1] if lines else 'no word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Watch:
    """The most memory that a process has held inside a `with`, sampled from outside of it."""

    def __init__(self, side: Side) -> None:
        self.kib, self._side = 0, side
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.kib = max(self.kib, self._side.kib())


def lines(
    parts: Sequence[str] = (), sizes: Sizes = Sizes(), **network: float | None
) -> Iterator[Item]:
    """The parts that are asked for; none: all. `network` is what is not as in GPT-2 small."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        GPT2.write(folder / "model", **NO_DROPOUT | network)
        yield f"GPT-2 small, {sizes.threads} threads each, torch {torch.__version__}"
        for part in parts or PARTS:
            yield from {"speed": speed, "memory": memory, "losses": losses}[part](folder, sizes)


@contextmanager
def sides(folder: Path, sizes: Sizes, names: Sequence[str]) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            side = Side(name, sizes.threads, folder / f"{name}.log")
            stack.callback(side.close)
            made.append(side)
        yield made


def speed(folder: Path, sizes: Sizes) -> Iterator[Item]:
    with sides(folder, sizes, ("ours", "peft")) as (ours, peft):
        about = {side.name: side.load(folder / "model", "bfloat16") for side in (ours, peft)}
        yield Settings("learning, bfloat16", about)
        yield f"{'text tokens/s (CPU ms per token)':36}{'ours':>16}{'PEFT':>16}{'ratio':>7}"
        for case in sizes.cases:
            for side in (ours, peft):
                side.begin(case.virtual)
            yield from timed(ours, peft, case, sizes)


def timed(ours: Side, peft: Side, case: Case, sizes: Sizes) -> Iterator[Item]:
    """Rounds in turn, after one that is not counted."""
    made: dict[str, list[tuple[float, float]]] = {}
    draw = random.Random(0)
    steps = sizes.mixed_steps if case.mixed else sizes.steps
    for turn in range(sizes.rounds + 1):
        batches = drawn(draw, case, sizes, steps)
        asked = [("ours", ours, batches), ("PEFT", peft, batches)]
        if case.mixed:
            asked.append(("PEFT by length", peft, grouped(draw, case, sizes, steps)))
        for title, side, some in asked:
            spent = side.learn(some, sizes.answer)
            tokens = sum(len(example) for batch in some for example in batch)
            if turn:
                each = tokens / spent.seconds, 1000 * spent.cpu_s / tokens
                made.setdefault(title, []).append(each)
    found = {
        title: tuple(statistics.median(one) for one in zip(*some, strict=True))
        for title, some in made.items()
    }
    mine = found.pop("ours")
    for title, theirs in found.items():
        ratio = mine[0] / theirs[0]
        named = case.title if title == "PEFT" else f"  {title}"
        yield (
            f"{named:36}{_figure(mine):>16}{_figure(theirs):>16}{ratio:7.2f}"
            f" ({theirs[1] / mine[1]:.2f} of CPU)"
        )
    ratio = mine[0] / found["PEFT"][0]
    samples = {title: [speed for speed, _ in some] for title, some in made.items()}
    told = f"{ratio:.2f} x ({mine[0]:,.0f} to {found['PEFT'][0]:,.0f} text tokens/s)"
    yield judged(f"tuning/speed-{case.name}", ratio, told, samples=samples)


def _figure(one: tuple[float, ...]) -> str:
    return f"{one[0]:,.0f} ({one[1]:.2f})"


def memory(folder: Path, sizes: Sizes) -> Iterator[Item]:
    """Each case and side in a process of its own, from before the model is loaded."""
    for case in sizes.cases:
        batches = drawn(random.Random(0), case, sizes, sizes.memory_steps)
        # Lengths are drawn, but a peak is the longest's.
        batches[0][0] = _text(random.Random(1), case.high, sizes)
        peaks = []
        for name in ("ours", "peft"):
            with sides(folder, sizes, (name,)) as (side,), Watch(side) as watch:
                side.load(folder / "model", "bfloat16")
                side.begin(case.virtual)
                side.learn(batches, sizes.answer)
            peaks.append((watch.kib - side.idle_kib) / 1024)
        share = peaks[0] / peaks[1]
        yield judged(
            f"tuning/memory-{case.name}",
            share,
            f"ours {peaks[0]:,.0f} MiB, PEFT {peaks[1]:,.0f} MiB: {share:.2f} x",
            samples={"ours": peaks[:1], "PEFT": peaks[1:]},
        )


def losses(folder: Path, sizes: Sizes) -> Iterator[Item]:
    """The same steps in fp32: what is faster is no other training."""
    with sides(folder, sizes, ("ours", "peft")) as both:
        for side in both:
            side.load(folder / "model", "float32")
        for case in sizes.cases:
            batches = drawn(random.Random(0), case, sizes, sizes.losses_steps)
            curves = []
            for side in both:
                side.begin(case.virtual)
                curves.append(side.learn(batches, sizes.answer).losses)
            yield f"losses in fp32, {case.title}:"
            for side, curve in zip(both, curves, strict=True):
                yield f"  {side.name} " + " ".join(f"{loss:.5f}" for loss in curve)
            apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
            yield judged(f"tuning/loss-{case.name}", apart, f"{apart:.1e} at most")


def drawn(draw: random.Random, case: Case, sizes: Sizes, steps: int) -> Batches:
    """Batches in random order."""
    return [
        [_text(draw, draw.randint(case.low, case.high), sizes) for _ in range(sizes.batch)]
        for _ in range(steps)
    ]


def grouped(draw: random.Random, case: Case, sizes: Sizes, steps: int) -> Batches:
    """Batches of alike lengths: some of those that many examples make, if they are sorted."""
    many = [e for batch in drawn(draw, case, sizes, GROUPED_BATCHES) for e in batch]
    many.sort(key=len)
    cuts = [many[at : at + sizes.batch] for at in range(0, len(many), sizes.batch)]
    share = len(cuts) / steps
    chosen = [cuts[int((step + draw.random()) * share)] for step in range(steps)]
    draw.shuffle(chosen)
    return chosen


def _text(draw: random.Random, length: int, sizes: Sizes) -> list[int]:
    return [draw.randrange(sizes.vocabulary) for _ in range(length)]
