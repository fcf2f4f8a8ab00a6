"""A machine's calibration, made: models' steps are timed, and a server's own part is measured.

Plain models of a few widths stand for all others, and the user's own model for itself. What is
between steps, and on a call's way to them, is what a real server took longer under a small load
than its steps alone. Nothing is kept but the figures.
"""

import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
import yaml

from checkpoints_tools.conversion.convert import write_native
from clients.load.generator import Length, LoadError, Where, Work, run
from clients.load.report import Report
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import check_dtype, device_of
from planning.inference.calibration_file import Measured, StepCosts
from planning.inference.step_cost import Steps
from planning.measurement.child_command import server
from planning.measurement.step_timing import Timed, time_model
from serving.ranks.rank import share_cores
from serving.ranks.rank_position import Place

Say = Callable[[str], None]

# Widths, layers, heads: of models that stand for others. A GPU is not busy with small ones.
PLAIN = {
    "cpu": ((64, 8, 2), (256, 8, 4), (512, 8, 8), (1024, 8, 16)),
    "cuda": ((1024, 24, 16), (2048, 16, 16), (4096, 8, 32)),
}
VOCABULARY, CONTEXT = 32000, 1024
# The load under which a server's own part is seen.
STREAMS = (1, 4, 16, 32)
PROMPT_TOKENS, NEW_TOKENS, FEW_TOKENS = 32, 48, 8
LONG_TOKENS, LONG_CALLS = 256, 8
SLOW_S = 20.0  # A load that takes longer is made smaller.
# A stream's first calls, in which memory is new and caches are cold, do not count.
WARM_CALLS = 2
LOAD_S = 120.0
START_S = 600.0


@dataclass(frozen=True)
class Overhead:
    """What a server adds: to each step, for each sequence in it, and to a call as a whole."""

    step_s: float
    sequence_s: float
    request_s: float
    token_s: float  # And of its prompt's tokens, each.


@dataclass(frozen=True)
class Aims:
    """What is to be calibrated, and how long one model may take (loading not counted)."""

    model: Path | None = None
    device: str = "cpu"
    dtype: str | None = None  # None: as stored; plain models in bfloat16 and float32.
    seconds: float = 8.0
    plain: Sequence[tuple[int, int, int]] | None = None  # None: those of the device's kind.
    server: bool = True


def calibrate(aims: Aims, say: Say) -> StepCosts:
    """One to three minutes, unless the model is large."""
    check_dtype(aims.dtype)
    device = device_of(aims.device)
    share_cores(Place(0, 1, 0, 1), said=True)
    own = None if aims.model is None else _own(aims, aims.model, say)
    timed = list(_plain(aims, device.type, own, say))
    overhead = None
    if aims.server and timed:
        overhead = _plain_overhead(aims, timed, say)
    measured = [_with(one.measured, overhead) for one in timed]
    if own is not None:
        assert aims.model is not None
        found = _overhead(aims.model, aims, own.measured, say) if aims.server else None
        overhead = found or overhead
        measured.append(_with(own.measured, found or overhead))
        timed.append(own)
    fastest = max(timed, key=lambda one: one.flops)
    return StepCosts(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=device_name(device),
        kind=device.type,
        memory_bytes=_memory_bytes(device),
        flops=fastest.flops,
        bandwidth_bytes=max(one.bandwidth_bytes for one in timed),
        threads=torch.get_num_threads(),
        versions=_versions(device),
        request_s=0.0 if overhead is None else overhead.request_s,
        request_token_s=0.0 if overhead is None else overhead.token_s,
        models=tuple(measured),
    )


def _own(aims: Aims, model: Path, say: Say) -> Timed:
    checkpoint = open_checkpoint(model)
    say(f"{model.name}: its steps")
    name = model.name
    return time_model(
        checkpoint, device=aims.device, dtype=aims.dtype, seconds=aims.seconds, name=name
    )


def _plain(aims: Aims, kind: str, own: Timed | None, say: Say) -> Iterator[Timed]:
    dtypes = [aims.dtype or own.measured.dtype] if own else [aims.dtype or "bfloat16"]
    if own is None and aims.dtype is None:
        dtypes = ["bfloat16", "float32"] if kind == "cpu" else ["bfloat16"]
    for dtype in dtypes:
        for sizes in PLAIN[kind] if aims.plain is None else aims.plain:
            network = plain_network(sizes)
            name = f"{network.num_layers} x {network.hidden_size}"
            say(f"{name}, {dtype}: its steps")
            checkpoint = fresh(network.with_fields(dtype=dtype), 0)
            yield time_model(
                checkpoint, device=aims.device, dtype=dtype, seconds=aims.seconds, name=name
            )


def plain_network(sizes: tuple[int, int, int]) -> GPTConfig:
    width, layers, heads = sizes
    return GPTConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
    )


# --------------------------------------------------------------------------- beside the steps


def _plain_overhead(aims: Aims, timed: Sequence[Timed], say: Say) -> Overhead | None:
    """By one of the plain models: the same is added to all."""
    known = PLAIN[device_of(aims.device).type] if aims.plain is None else aims.plain
    # One in the middle: of small ones a server's own part hides the steps.
    place = len(known) // 2
    sizes, one = known[place], timed[place].measured
    with fresh_checkpoint(plain_network(sizes).with_fields(dtype=one.dtype)) as model:
        return _overhead(model, aims, one, say)


@contextmanager
def fresh_checkpoint(network: GPTConfig) -> Iterator[Path]:
    """New weights on disk. No tokenizer, so that nothing ends an answer early."""
    with tempfile.TemporaryDirectory(prefix="preamble-plan-") as folder:
        write_native(fresh(network, 0), Path(folder) / "model")
        yield Path(folder) / "model"


def _overhead(model: Path, aims: Aims, measured: Measured, say: Say) -> Overhead | None:
    say(f"{measured.name or model.name}: a server under a small load")
    limits = {"device": aims.device, "dtype": measured.dtype, "prove": False}
    try:
        with _server(model, limits) as address:
            reports = {
                streams: _load(address, streams, calls, new)
                for streams, calls, new in loads(measured.steps)
            }
            slow = LONG_CALLS * measured.steps.rows.at(LONG_TOKENS) > SLOW_S
            long = None if slow else _load(address, 1, LONG_CALLS, 2, LONG_TOKENS)
    except (PreambleError, LoadError) as error:
        # Steps are known all the same; who reads the file is told by its figures.
        say(f"the server's own part is not known: {error}")
        return None
    return overhead_of(measured.steps, reports, long)


@contextmanager
def _server(model: Path, limits: Mapping[str, object]) -> Iterator[str]:
    """HOST:PORT of one with these settings."""
    with tempfile.TemporaryDirectory(prefix="preamble-plan-") as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(dict(limits)))
        words: list[str | Path] = [model, "--config", config, "--no-page"]
        with server(words, Path(folder) / "log", START_S) as (_, address):
            yield address


def loads(steps: Steps) -> Iterator[tuple[int, int, int]]:
    """How many streams, calls and new tokens; of a slow model fewer."""
    for streams in STREAMS:
        step_s = steps.seconds(streams, streams, 0, 0, streams)
        rounds = max(2, 6 // streams)
        new = NEW_TOKENS if rounds * NEW_TOKENS * step_s < SLOW_S else FEW_TOKENS
        if streams == 1 or rounds * new * step_s < SLOW_S:
            yield streams, rounds * streams, new


def _load(address: str, streams: int, calls: int, new: int, prompt: int = PROMPT_TOKENS) -> Report:
    work = Work(
        concurrency=streams,
        requests_max=calls,
        warmup_requests=WARM_CALLS,
        prompt=Length("fixed", prompt, prompt),
        new=Length("fixed", new, new),
        timeout_s=LOAD_S,
    )
    return Report.of(run(Where(address), work))


def overhead_of(
    steps: Steps, reports: Mapping[int, Report], long: Report | None = None
) -> Overhead | None:
    """How much longer tokens took than their steps; never less than nothing."""
    points = []
    for streams, report in reports.items():
        if report.itl_ms is None:
            return None
        context = streams * (PROMPT_TOKENS + NEW_TOKENS / 2)
        alone_s = steps.seconds(streams, streams, context, 0, streams)
        more_s = max(0.0, report.itl_ms.p50 / 1e3 - alone_s)
        # What is off by a part of a step is off by as much of a short one as of a long one.
        points.append((float(streams), more_s, alone_s**-2))
    step_s, sequence_s = _line(points)

    def beside_s(report: Report, prompt: int) -> float:
        """What of the time to a first token is no step's."""
        if report.ttft_ms is None:
            return 0.0
        alone_s = steps.seconds(prompt, 1, 0, prompt * (prompt + 1) // 2, 1)
        return report.ttft_ms.p50 / 1e3 - alone_s - step_s - sequence_s

    request_s = beside_s(reports[min(reports)], PROMPT_TOKENS)
    if long is None:
        return Overhead(step_s, sequence_s, max(0.0, request_s), 0.0)
    more_s = beside_s(long, LONG_TOKENS) - request_s
    token_s = max(0.0, more_s / (LONG_TOKENS - PROMPT_TOKENS))
    request_s = max(0.0, request_s - PROMPT_TOKENS * token_s)
    return Overhead(step_s, sequence_s, request_s, token_s)


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The best line through weighted points, whose start and slope are not below 0."""
    whole = sum(weight for _, _, weight in points)
    x, y = (sum(one[place] * one[2] for one in points) / whole for place in (0, 1))
    spread = sum(weight * (a - x) ** 2 for a, _, weight in points)
    slope = sum(weight * (a - x) * (b - y) for a, b, weight in points) / spread if spread else 0.0
    slope = max(0.0, slope)
    if y - slope * x >= 0:
        return y - slope * x, slope
    squares = sum(weight * a * a for a, _, weight in points)
    return 0.0, sum(weight * a * b for a, b, weight in points) / squares


def _with(measured: Measured, overhead: Overhead | None) -> Measured:
    if overhead is None:
        return measured
    steps = measured.steps
    more = replace(
        steps,
        step_s=steps.step_s + overhead.step_s,
        sequence_s=steps.sequence_s + overhead.sequence_s,
    )
    return replace(measured, steps=more)


# -------------------------------------------------------------------------------- the machine


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        versions["preamble"] = metadata.version("preamble")
    except metadata.PackageNotFoundError:
        versions["preamble"] = "not installed"
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["driver"] = _driver()
    return versions


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found[1] if found else "unknown"
