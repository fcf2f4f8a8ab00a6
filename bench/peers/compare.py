"""Peer comparison: our generation speed compared with other engines, in interleaved rounds.

`python -m bench --only peers` runs this suite. All engines load the same checkpoint with random
weights. Each engine is a process in its own virtual environment (`bench/peers_install.sh`) and
receives requests through a pipe; only one engine works at a time. Prompts are new in every round,
so no prefix cache helps. Figures are medians and are compared with the roofline bound of the
measured machine limits. If an engine is not installed or fails, its rows give the reason.
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

from bench.harness.machine_limits import MachineLimits, measure_limits
from bench.harness.model_shapes import GPT2, LLAMA, QWEN3_MOE, SMALL_LLAMA, ModelShape
from bench.harness.record import SuiteOutput
from bench.harness.roofline import Peaks, RooflineModel
from bench.harness.targets import TARGETS, Settings, measured_row, not_run_row
from bench.peers.lora_adapters import save_random_adapters
from gpt.child_processes import ChildProcess
from gpt.cpu import int8_linear
from gpt.cpu.exact_argmax import ROWS_MAX
from gpt.cpu_threads import limit_openmp_spinning
from gpt.formats.registry import open_checkpoint

PEERS_FOLDER = Path("build/peers")
ENGINE_NAMES = ("vllm", "zentorch", "llama", "transformers", "ctranslate2")
# Pause before each timing, because an engine's OpenMP threads can spin for a while after a request.
COOLDOWN_SECONDS = 0.3
ADAPTERS = "adapters"  # The folder of the adapters, beside the model.
STOP_SECONDS = 30.0  # Time that an engine gets to end after SIGTERM.


@dataclass(frozen=True)
class PeerWorkload:
    """Requests of equal lengths that are submitted at once."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    decode_only: bool = False  # Whether the time of the prefill is subtracted.

    @property
    def name(self) -> str:
        """Return the part of the target's name that identifies the workload."""
        return str(self.requests if self.new_tokens > 1 else self.prompt_tokens)

    @property
    def counted_tokens(self) -> int:
        """Return the number of tokens that the speed counts.

        The new tokens count, or the prompt tokens if each request has only one new token. With
        `decode_only`, the first new token does not count, because the prefill computes it.
        """
        if self.new_tokens > 1:
            return self.requests * (self.new_tokens - self.decode_only)
        return self.requests * self.prompt_tokens

    def bound_tokens_per_s(self, model: RooflineModel, peaks: Peaks) -> float:
        """Return the counted tokens per second at the roofline bound."""
        prefill_s = model.prefill_s(self.requests, self.prompt_tokens, peaks)
        decode_s = model.decode_s(self.requests, self.prompt_tokens, self.new_tokens - 1, peaks)
        return self.counted_tokens / (decode_s if self.decode_only else prefill_s + decode_s)


SINGLE_DECODE = PeerWorkload(1, 128, 128, True)
BATCH_OF_8 = PeerWorkload(8, 128, 128)
DECODE_OF_8 = PeerWorkload(8, 128, 128, True)
BATCH_OF_32 = PeerWorkload(32, 128, 128)
LONG_PREFILL = PeerWorkload(1, 960, 1)
SHORT_ANSWER = PeerWorkload(1, 16, 24)
SHORT_ANSWERS = PeerWorkload(8, 16, 24)


@dataclass(frozen=True)
class PeerTable:
    """A comparison of engines on one model with one weight dtype."""

    name: str
    shape: ModelShape
    weights: str  # "bf16" or "int8".
    peers: Sequence[str]
    workloads: Sequence[PeerWorkload]
    adapters: int = 0  # LoRA adapters; the prompts of a request use them in turn.

    def target_name(self, workload: PeerWorkload, peer: str) -> str | None:
        """Return the name of the target for this peer and workload, or None if there is none."""
        name = f"peers/{self.name}/{workload.name}/{peer}"
        return name if name in TARGETS else None


TABLES = (
    PeerTable(
        "gpt2", GPT2, "bf16", ENGINE_NAMES, (SINGLE_DECODE, BATCH_OF_8, BATCH_OF_32, LONG_PREFILL)
    ),
    PeerTable(
        "int8", GPT2, "int8", ("llama", "ctranslate2"), (SINGLE_DECODE, BATCH_OF_8, BATCH_OF_32)
    ),
    PeerTable("llama", LLAMA, "bf16", ("vllm", "zentorch"), (BATCH_OF_8, BATCH_OF_32)),
    PeerTable(
        "qwen3-moe", QWEN3_MOE, "bf16", ("llama", "transformers"), (SINGLE_DECODE, DECODE_OF_8)
    ),
    PeerTable(
        "lora", SMALL_LLAMA, "bf16", ("vllm",), (SHORT_ANSWER, SHORT_ANSWERS, LONG_PREFILL), 8
    ),
)
PARTS = tuple(table.name for table in TABLES)


@dataclass(frozen=True)
class PeerSelection:
    """The selected tables, peers and batch sizes, and the number of rounds."""

    rounds: int = 5
    tables: Sequence[PeerTable] = TABLES
    peers: Sequence[str] = ENGINE_NAMES
    requests: Sequence[int] = ()  # Selected batch sizes; empty: all.


class EngineProcess:
    """A child process that runs one engine; see bench/peers/engine_process.py."""

    def __init__(
        self,
        name: str,
        python: Path,
        model: Path,
        weights: str = "bf16",
        adapters: Path | None = None,
    ) -> None:
        """`adapters`: a folder of PEFT adapters, which the prompts of a request use in turn."""
        self.name = name
        self.failure = ""  # Completes the sentence "NAME failed ..."; empty: no failure.
        if not python.exists():
            raise OSError(
                f"the environment of {name} is not installed ({python} does not exist); "
                "run: make peers"
            )
        self._log = (model.parent / f"{name}.log").open("w+")
        self._process = ChildProcess(
            [
                *(python, Path(__file__).with_name("engine_process.py"), name, model, weights),
                *([] if adapters is None else [adapters]),
            ],
            # The default environment would add modules of this checkout.
            environment=_engine_environment(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self.description = str(self._read_reply()["about"])
        except RuntimeError:
            self.close()
            raise

    def time_generation(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Return the seconds of a generation, or NaN once the engine has failed (see `failure`)."""
        if self.failure:
            return math.nan
        time.sleep(COOLDOWN_SECONDS)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new": new_tokens}) + "\n")
            self._process.stdin.flush()
            reply = self._read_reply()
        except (RuntimeError, OSError) as error:
            self.failure = f"at {len(prompts)} requests: {error}"
            return math.nan
        if reply["made"] != len(prompts) * new_tokens:
            self.failure = (
                f"because it generated {reply['made']} of {len(prompts) * new_tokens} tokens"
            )
            return math.nan
        return float(reply["seconds"])

    def close(self) -> None:
        self._process.stop(STOP_SECONDS)
        self._log.close()

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


def _engine_environment(name: str) -> dict[str, str]:
    """Return the environment of an engine process."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = os.environ | {
        # Huge pages for malloc, in our engine and in the others.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # By default vLLM reserves one core; give it all cores for compute, like the other engines.
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    if name == "ours":
        limit_openmp_spinning(environment)  # As `preamble serve` does.
    return environment


def run_suite(selection: PeerSelection = PeerSelection()) -> Iterator[SuiteOutput]:
    """Run the selected tables; yield each line as soon as it is measured."""
    for table in selection.tables:
        workloads = [
            workload
            for workload in table.workloads
            if not selection.requests or workload.requests in selection.requests
        ]
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            model = Path(name) / "model"
            table.shape.save_random(model)
            if table.adapters:
                save_random_adapters(model, model.parent / ADAPTERS, table.adapters)
            yield from _run_table(table, workloads, model, selection)


def _run_table(
    table: PeerTable, workloads: Sequence[PeerWorkload], model: Path, selection: PeerSelection
) -> Iterator[SuiteOutput]:
    engines: list[EngineProcess] = []
    unavailable: dict[str, str] = {}
    try:
        for peer in ("ours", *(name for name in table.peers if name in selection.peers)):
            python = PEERS_FOLDER / peer / "bin" / "python"
            if peer == "ours":
                python = Path(sys.executable)
            yield f"starting {peer}"  # Some engines compile for minutes at start.
            try:
                adapters = model.parent / ADAPTERS if table.adapters else None
                engines.append(EngineProcess(peer, python, model, table.weights, adapters))
            except (RuntimeError, OSError) as error:
                unavailable[peer] = str(error)
        sides = {engine.name: engine.description for engine in engines}
        left_out = {peer: f"not run: {reason}" for peer, reason in unavailable.items()}
        yield Settings(f"{table.shape.title}, {table.weights}", sides | left_out)
        if "ours" in unavailable:
            for workload in workloads:
                yield from _unavailable_rows(
                    table, workload, dict.fromkeys(table.peers, unavailable["ours"])
                )
            return
        # An engine is timed while the other engines are loaded and idle. The limits are therefore
        # measured while all engines are loaded and idle.
        limits = measure_limits()
        yield from limits.as_tuple
        bytes_per_weight = 1.0 if table.weights == "int8" else 0.0
        int8_head_rows_max = ROWS_MAX if int8_linear.has_int8_gemm() else 0
        roofline = RooflineModel(
            open_checkpoint(model).config, bytes_per_weight, int8_head_rows_max
        )
        for workload in workloads:
            yield from _unavailable_rows(table, workload, unavailable)
        yield from measure_table(table, workloads, engines, roofline, limits, selection.rounds)
    finally:
        for engine in engines:
            engine.close()


def _unavailable_rows(
    table: PeerTable, workload: PeerWorkload, unavailable: Mapping[str, str]
) -> Iterator[SuiteOutput]:
    for peer, reason in unavailable.items():
        name = table.target_name(workload, peer)
        if name is not None:
            yield not_run_row(name, reason)


@dataclass
class EngineSpeeds:
    """Tokens per second of one engine, one sample per round."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median, or NaN if the engine failed in every round."""
        return statistics.median(self.samples) if self.samples else math.nan

    @property
    def spread(self) -> float:
        """Return half of (fastest - slowest round), relative to the median."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


def measure_table(
    table: PeerTable,
    workloads: Sequence[PeerWorkload],
    engines: Sequence[EngineProcess],
    roofline: RooflineModel,
    limits: MachineLimits,
    rounds: int,
) -> Iterator[SuiteOutput]:
    """Time the workloads on all engines; `engines[0]` is ours."""
    header = "".join(f"{engine.name:>24}" for engine in engines)
    yield f"{'requests':>8} {'prompt':>6} {'new':>4}{header}{'bound (our share)':>22}"
    for workload in workloads:
        speeds_by_engine = time_rounds(engines, workload, rounds, roofline.config.vocab_size)
        ours = speeds_by_engine["ours"]
        bound = workload.bound_tokens_per_s(roofline, limits.peaks(table.weights))
        bound_share = ours.median / bound
        title = f"{workload.requests:8} {workload.prompt_tokens:6} {workload.new_tokens:4}"
        if workload.decode_only:
            title = f"{f'{workload.requests}, decode only':>20}"
        cells = "".join(
            _format_speed(speeds, ours).rjust(24) for speeds in speeds_by_engine.values()
        )
        yield f"{title}{cells}{f'{bound:,.0f} ({100 * bound_share:.0f} %)':>22}"
        for engine in engines:
            name = table.target_name(workload, engine.name)
            if name is None:
                continue
            failed_engine = engine if engine.failure else engines[0]
            if failed_engine.failure:
                yield not_run_row(name, f"{failed_engine.name} failed {failed_engine.failure}")
                continue
            theirs = speeds_by_engine[engine.name]
            ratio = ours.median / theirs.median
            summary = f"{ratio:.2f} x ({ours.median:,.1f} vs {theirs.median:,.1f} tokens/s)"
            samples = {"ours": ours.samples, engine.name: theirs.samples, "bound": [bound]}
            yield measured_row(name, ratio, summary, bound_share=bound_share, samples=samples)
    yield from (f"{engine.name} failed {engine.failure}" for engine in engines if engine.failure)
    yield "new tokens/s, prefill included unless decode only; with one new token: prompt tokens/s"
    yield "+-: (fastest - slowest round) / 2 / median; in parentheses: our speed / engine's speed"
    yield f"{rounds} interleaved rounds; load {_load_average()}"


def _load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _format_speed(speeds: EngineSpeeds, ours: EngineSpeeds) -> str:
    text = f"{speeds.median:,.0f} +-{100 * speeds.spread:.0f}%" if speeds.samples else "failed"
    if speeds is ours or not speeds.samples:
        return text
    return f"{text} ({ours.median / speeds.median:.2f})"


def time_rounds(
    engines: Sequence[EngineProcess], workload: PeerWorkload, rounds: int, vocab_size: int
) -> dict[str, EngineSpeeds]:
    """Time interleaved rounds after a warm-up round; the first engine of a round rotates."""
    speeds_by_engine = {engine.name: EngineSpeeds() for engine in engines}
    for round_index in range(rounds + 1):
        prompts = [
            random.sample(range(vocab_size), workload.prompt_tokens)
            for _ in range(workload.requests)
        ]
        for position in range(len(engines)):
            engine = engines[(position + round_index) % len(engines)]
            seconds = engine.time_generation(prompts, workload.new_tokens)
            if workload.decode_only:
                # Subtract the time of a prefill and its first token, measured with other prompts.
                other_prompts = [
                    random.sample(range(vocab_size), workload.prompt_tokens) for _ in prompts
                ]
                seconds -= engine.time_generation(other_prompts, 1)
            if round_index and math.isfinite(seconds):
                speeds_by_engine[engine.name].samples.append(workload.counted_tokens / seconds)
    return speeds_by_engine
