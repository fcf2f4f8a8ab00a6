"""`python -m bench --only peers`: our generation beside other engines, taken in turn in one run.

Models have random weights, the same files for all. Each engine is a process in an environment of
its own (`bench/peers_install.sh`), and gets work by a pipe, one engine at a time. Prompts are new
in every round, so no cache of prefixes helps. Figures are medians, beside the bound that this
machine's limits give; a peer that is not there, or fails, is a line that says so.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.machine_limits import Limits, measure
from bench.harness.model_shapes import GPT2, LLAMA, Shape
from bench.harness.record import Item
from bench.harness.roofline import Model, Peaks
from bench.harness.targets import PROMISES, Settings, judged, not_run
from gpt.cpu import int8_linear
from gpt.cpu.exact_argmax import ROWS_MAX
from gpt.formats.registry import open_checkpoint

FOLDER = Path("build/peers")
NAMES = ("vllm", "zentorch", "llama", "transformers", "ctranslate2")
# An engine's threads may go on spinning for a while after its work.
REST_SECONDS = 0.3


@dataclass(frozen=True)
class Work:
    """Requests at once. Of `decoding`, the time to the first tokens is taken off."""

    requests: int
    prompt: int
    new: int
    decoding: bool = False

    @property
    def name(self) -> str:
        """As promises call it."""
        return str(self.requests if self.new > 1 else self.prompt)

    @property
    def tokens(self) -> int:
        """What is counted: new tokens, or those of the prompt where only one is new."""
        new = self.new - self.decoding
        return self.requests * (new if self.new > 1 else self.prompt)

    def bound(self, model: Model, peaks: Peaks) -> float:
        """As many of them as there could be in a second, at best."""
        first = model.prefill_s(self.requests, self.prompt, peaks)
        rest = model.decode_s(self.requests, self.prompt, self.new - 1, peaks)
        return self.tokens / (rest if self.decoding else first + rest)


ONE, EIGHT, MANY = Work(1, 128, 128, True), Work(8, 128, 128), Work(32, 128, 128)
LONG = Work(1, 960, 1)


@dataclass(frozen=True)
class Table:
    """One model, in one kind of weights."""

    name: str
    shape: Shape
    weights: str
    peers: Sequence[str]
    works: Sequence[Work]

    def promised(self, work: Work, peer: str) -> str | None:
        """The name of what is promised of us beside this peer; None: nothing is."""
        name = f"peers/{self.name}/{work.name}/{peer}"
        return name if name in PROMISES else None


TABLES = (
    Table("gpt2", GPT2, "bf16", NAMES, (ONE, EIGHT, MANY, LONG)),
    Table("int8", GPT2, "int8", ("llama", "ctranslate2"), (ONE, EIGHT, MANY)),
    Table("llama", LLAMA, "bf16", ("vllm", "zentorch"), (EIGHT, MANY)),
)
PARTS = tuple(table.name for table in TABLES)


@dataclass(frozen=True)
class Asked:
    """Which of it, and how often."""

    rounds: int = 5
    tables: Sequence[Table] = TABLES
    peers: Sequence[str] = NAMES
    requests: Sequence[int] = ()  # Of the rows; none: all.


class Engine:
    """One engine's process."""

    def __init__(self, name: str, python: Path, model: Path, weights: str = "bf16") -> None:
        self.name, self.failure = name, ""
        if not python.exists():
            raise OSError(f"{python} is missing; make peers installs it")
        self._log = (model.parent / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            [
                str(python),
                str(Path(__file__).with_name("engine_process.py")),
                name,
                str(model),
                weights,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _around(),
        )
        try:
            self.about = str(self._answer()["about"])
        except RuntimeError:
            self.close()
            raise

    def run(self, prompts: list[list[int]], new: int) -> float:
        """Seconds that it took; not a number once it has failed, which `failure` then tells."""
        if self.failure:
            return math.nan
        time.sleep(REST_SECONDS)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
        except (RuntimeError, OSError) as error:
            self.failure = f"at {len(prompts)} requests: {error}"
            return math.nan
        if answer["made"] != len(prompts) * new:
            self.failure = f"made {answer['made']} of {len(prompts) * new} tokens"
            return math.nan
        return float(answer["seconds"])

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()  # Which closes the pipes as well.
        self._log.close()

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


def _around() -> dict[str, str]:
    """Variables of all engines: each looks at its own."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        # Huge pages for whoever allocates by malloc, ours and theirs.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # All cores for computing, of which vLLM would keep one for itself.
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }


def lines(asked: Asked = Asked()) -> Iterator[Item]:
    """Each table, line by line as it is measured."""
    for table in asked.tables:
        works = [w for w in table.works if not asked.requests or w.requests in asked.requests]
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            model = Path(name) / "model"
            table.shape.write(model)
            yield from _table(table, works, model, asked)


def _table(table: Table, works: Sequence[Work], model: Path, asked: Asked) -> Iterator[Item]:
    engines: list[Engine] = []
    absent: dict[str, str] = {}
    try:
        for peer in ("ours", *(one for one in table.peers if one in asked.peers)):
            python = FOLDER / peer / "bin" / "python"
            if peer == "ours":
                python = Path(sys.executable)
            yield f"starting {peer}"  # Some compile for minutes.
            try:
                engines.append(Engine(peer, python, model, table.weights))
            except (RuntimeError, OSError) as error:
                absent[peer] = str(error)
        sides = {one.name: one.about for one in engines}
        left_out = {peer: f"left out: {why}" for peer, why in absent.items()}
        yield Settings(f"{table.shape.title}, {table.weights}", sides | left_out)
        if "ours" in absent:
            for work in works:
                yield from _refused(table, work, dict.fromkeys(table.peers, absent["ours"]))
            return
        # With the engines there, and idle, as they are in each other's rounds.
        limits = measure()
        yield from limits.all
        each = 1.0 if table.weights == "int8" else 0.0
        few = ROWS_MAX if int8_linear.multiplies() else 0
        network = Model(open_checkpoint(model).config, each, few)
        for work in works:
            yield from _refused(table, work, absent)
        yield from measured(table, works, engines, network, limits, asked.rounds)
    finally:
        for engine in engines:
            engine.close()


def _refused(table: Table, work: Work, absent: Mapping[str, str]) -> Iterator[Item]:
    for peer, why in absent.items():
        name = table.promised(work, peer)
        if name is not None:
            yield not_run(name, why)


@dataclass
class Speeds:
    """Tokens a second of one engine, round by round."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Not a number where it has failed in every round."""
        return statistics.median(self.samples) if self.samples else math.nan

    @property
    def spread(self) -> float:
        """Half of what lies between the slowest and the fastest, of the median."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


def measured(
    table: Table,
    works: Sequence[Work],
    engines: Sequence[Engine],
    network: Model,
    limits: Limits,
    rounds: int,
) -> Iterator[Item]:
    heads = "".join(f"{one.name:>24}" for one in engines)
    yield f"{'requests':>8} {'prompt':>6} {'new':>4}{heads}{'bound (ours of it)':>22}"
    for work in works:
        found = timed(engines, work, rounds, network.config.vocab_size)
        ours = found["ours"]
        bound = work.bound(network, limits.peaks(table.weights))
        share = ours.median / bound
        title = f"{work.requests:8} {work.prompt:6} {work.new:4}"
        if work.decoding:
            title = f"{'1, decoding only':>20}"
        cells = "".join(_cell(one, ours).rjust(24) for one in found.values())
        yield f"{title}{cells}{f'{bound:,.0f} ({100 * share:.0f} %)':>22}"
        for engine in engines:
            name = table.promised(work, engine.name)
            if name is None:
                continue
            if engine.failure or engines[0].failure:
                yield not_run(name, f"{engine.name} failed {engine.failure or engines[0].failure}")
                continue
            theirs = found[engine.name]
            ratio = ours.median / theirs.median
            told = f"{ratio:.2f} x ({ours.median:,.1f} to {theirs.median:,.1f} tokens/s)"
            samples = {"ours": ours.samples, engine.name: theirs.samples, "bound": [bound]}
            yield judged(name, ratio, told, share=share, samples=samples)
    yield from (f"{one.name} failed {one.failure}" for one in engines if one.failure)
    yield "tokens/s: new ones, prompts included in the time; of the prompt where one is new"
    yield f"(ours / theirs), +- half of the spread; {rounds} rounds in turn; load {_load()}"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _cell(one: Speeds, ours: Speeds) -> str:
    said = f"{one.median:,.0f} +-{100 * one.spread:.0f}%" if one.samples else "failed"
    if one is ours or not one.samples:
        return said
    return f"{said} ({ours.median / one.median:.2f})"


def timed(engines: Sequence[Engine], work: Work, rounds: int, vocab_size: int) -> dict[str, Speeds]:
    """Rounds in turn, after one that is not counted; each begins with another engine."""
    found = {engine.name: Speeds() for engine in engines}
    for turn in range(rounds + 1):
        prompts = [random.sample(range(vocab_size), work.prompt) for _ in range(work.requests)]
        for at in range(len(engines)):
            engine = engines[(at + turn) % len(engines)]
            seconds = engine.run(prompts, work.new)
            if work.decoding:
                # What is left of a round without its prompt and first token, of other prompts.
                others = [random.sample(range(vocab_size), work.prompt) for _ in prompts]
                seconds -= engine.run(others, 1)
            if turn and math.isfinite(seconds):
                found[engine.name].samples.append(work.tokens / seconds)
    return found
