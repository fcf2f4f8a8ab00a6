"""`python -m bench --only peers`: our generation beside other engines, taken in turn in one run.

GPT-2 small with random weights, the same files for all. Each engine is a process of its own, in an
environment of its own (`bench/peers_install.sh` makes them), and keeps its model; it gets work by a
pipe, one engine at a time. Prompts are fresh in every round, so no cache of prefixes helps. A row
is the median of the rounds; a peer that is not there, or fails, is a line that says so.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpt2 import VOCABULARY, random_model

FOLDER = Path("build/peers")
NAMES = ("vllm", "transformers", "ctranslate2", "llama")
# An engine's threads may go on spinning for a while after its work.
REST_SECONDS = 0.3


@dataclass(frozen=True)
class Work:
    requests: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """What is counted: new tokens, or those of the prompt where only one is new."""
        return self.requests * (self.new if self.new > 1 else self.prompt)


FIRST = Work(1, 128, 1)
ONE = Work(1, 128, 128)
WORKS = (ONE, Work(8, 128, 128), Work(32, 128, 128), Work(1, 960, 1))


class Engine:
    """One engine's process."""

    def __init__(self, name: str, python: Path, model: Path) -> None:
        self.name, self.failure = name, ""
        # Both cores for computing: vLLM would keep one for its scheduler.
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        # Huge pages for whoever allocates by malloc, ours and theirs.
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        if name == "ours":
            python = Path(sys.executable)
        elif not python.exists():
            raise OSError(f"{python} is missing; bench/peers_install.sh makes it")
        self._log = (model.parent / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("peer.py")), name, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.about = str(self._answer()["about"])

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


def lines(
    rounds: int, peers: Sequence[str] = NAMES, requests: Sequence[int] | None = None
) -> Iterator[str]:
    """The table, line by line as it is measured."""
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "model"
        random_model("bfloat16").save_pretrained(model)
        try:
            for peer in ("ours", *peers):
                python = FOLDER / peer / "bin" / "python"
                try:
                    engines.append(Engine(peer, python, model))
                    yield f"{peer}: {engines[-1].about}"
                except (RuntimeError, OSError) as error:
                    yield f"{peer}: left out: {error}"
            works = [work for work in WORKS if not requests or work.requests in requests]
            yield from table(engines, works, rounds)
        finally:
            for engine in engines:
                engine.close()


def table(engines: Sequence[Engine], works: Sequence[Work], rounds: int) -> Iterator[str]:
    yield f"{'requests':>8} {'prompt':>6} {'new':>4}" + "".join(f"{e.name:>20}" for e in engines)
    for work in works:
        seconds = timed(engines, work, rounds)
        yield line(f"{work.requests:8} {work.prompt:6} {work.new:4}", work.tokens, seconds)
        if work == ONE:
            # What is left of a round without its prompt and first token.
            first = timed(engines, FIRST, rounds)
            rest = [a - b for a, b in zip(seconds, first, strict=True)]
            yield line(f"{'decoding only':>20}", work.new - 1, rest)
    yield from (f"{one.name} failed {one.failure}" for one in engines if one.failure)
    yield "tokens/s: new ones, prompts included in the time; of the prompt where one is new"
    yield f"(ours / theirs); medians of {rounds} rounds in turn; load {os.getloadavg()[0]:.1f}"


def line(title: str, tokens: int, seconds: Sequence[float]) -> str:
    return title + "".join(f"{f'{tokens / s:,.0f} ({s / seconds[0]:.2f})':>20}" for s in seconds)


def timed(engines: Sequence[Engine], work: Work, rounds: int) -> list[float]:
    """The median seconds of each, after one round that is not counted."""
    spent: list[list[float]] = [[] for _ in engines]
    for turn in range(rounds + 1):
        prompts = [random.sample(range(VOCABULARY), work.prompt) for _ in range(work.requests)]
        for engine, times in zip(engines, spent, strict=True):
            seconds = engine.run(prompts, work.new)
            if turn:
                times.append(seconds)
    return [statistics.median(times) for times in spent]
