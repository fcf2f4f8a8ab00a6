"""Calibration: times the steps of reference models and a user's model, and a server's overhead.

Reference models of several widths stand for models that are not timed. The server overhead is the
difference between the latencies of a real server under a small load and the durations of the
server's steps. The overhead is fitted as a time per step, per sequence, per request and per prompt
token.
"""

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
from clients.load.generator import LengthSampler, LoadError, LoadSpec, ServerEndpoint, run_load
from clients.load.report import LoadReport
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from gpt.host_limits import total_memory_bytes
from gpt.model.loading import check_dtype, parse_device
from planning.inference.calibration_file import Calibration, MeasuredModel
from planning.inference.step_cost import StepCostModel
from planning.measurement.child_command import run_server
from planning.measurement.step_timing import TimedModel, time_model
from serving.ranks.rank_position import RankPosition
from serving.ranks.rank_resources import set_thread_count

LogFunction = Callable[[str], None]

# Hidden size, layers and heads of the reference models. Small models would not use a GPU fully.
REFERENCE_MODELS = {
    "cpu": ((64, 8, 2), (256, 8, 4), (512, 8, 8), (1024, 8, 16)),
    "cuda": ((1024, 24, 16), (2048, 16, 16), (4096, 8, 32)),
}
VOCAB_SIZE, CONTEXT_TOKENS = 32000, 1024
# The load that measures the server overhead.
CONCURRENCIES = (1, 4, 16, 32)
PROMPT_TOKENS = 32
NEW_TOKENS = 48
NEW_TOKENS_SLOW = 8
LONG_PROMPT_TOKENS, LONG_PROMPT_REQUESTS = 256, 8
LOAD_TARGET_S_MAX = 20.0  # A load that would take longer is reduced or left out.
# Number of first requests per client that are not counted, because memory and caches are cold.
WARMUP_REQUESTS = 2
LOAD_TIMEOUT_S = 120.0
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServerOverhead:
    """The time that a server adds per step, sequence in a step, request and prompt token."""

    step_s: float
    sequence_s: float
    request_s: float
    prompt_token_s: float  # Additional time per prompt token of a request.


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration. `seconds` is the measuring time per model, without its loading."""

    model: Path | None = None
    device: str = "cpu"
    # None: the checkpoint's dtype; without a checkpoint bfloat16, and on a CPU also float32.
    dtype: str | None = None
    seconds: float = 8.0
    # Hidden size, layers and heads of each model; None: REFERENCE_MODELS of the device.
    reference_models: Sequence[tuple[int, int, int]] | None = None
    measure_server: bool = True


def calibrate(options: CalibrationOptions, log: LogFunction) -> Calibration:
    """Calibrate this machine, in one to three minutes unless the user's model is large."""
    check_dtype(options.dtype)
    device = parse_device(options.device)
    set_thread_count(RankPosition(0, 1, 0, 1), respect_environment=True)
    user_model = None if options.model is None else _time_user_model(options, options.model, log)
    timed_models = list(_time_reference_models(options, device.type, user_model, log))
    overhead = None
    if options.measure_server and timed_models:
        overhead = _reference_overhead(options, timed_models, log)
    model_costs = [_add_overhead(timed_model.measured, overhead) for timed_model in timed_models]
    if user_model is not None:
        assert options.model is not None
        user_overhead = (
            _measure_overhead(options.model, options, user_model.measured, log)
            if options.measure_server
            else None
        )
        overhead = user_overhead or overhead
        model_costs.append(_add_overhead(user_model.measured, user_overhead or overhead))
        timed_models.append(user_model)
    fastest = max(timed_models, key=lambda timed_model: timed_model.flops)
    return Calibration(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=device_name(device),
        kind=device.type,
        memory_bytes=_memory_bytes(device),
        flops=fastest.flops,
        bandwidth_bytes=max(timed_model.memory_bytes_per_s for timed_model in timed_models),
        threads=torch.get_num_threads(),
        versions=_versions(device),
        request_s=0.0 if overhead is None else overhead.request_s,
        request_token_s=0.0 if overhead is None else overhead.prompt_token_s,
        models=tuple(model_costs),
    )


def _time_user_model(options: CalibrationOptions, model: Path, log: LogFunction) -> TimedModel:
    checkpoint = open_checkpoint(model)
    log(f"{model.name}: timing steps")
    name = model.name
    return time_model(
        checkpoint, device=options.device, dtype=options.dtype, seconds=options.seconds, name=name
    )


def _time_reference_models(
    options: CalibrationOptions, kind: str, user_model: TimedModel | None, log: LogFunction
) -> Iterator[TimedModel]:
    dtypes = (
        [options.dtype or user_model.measured.dtype]
        if user_model
        else [options.dtype or "bfloat16"]
    )
    if user_model is None and options.dtype is None:
        dtypes = ["bfloat16", "float32"] if kind == "cpu" else ["bfloat16"]
    for dtype in dtypes:
        for sizes in (
            REFERENCE_MODELS[kind] if options.reference_models is None else options.reference_models
        ):
            config = reference_config(sizes)
            name = f"{config.num_layers} x {config.hidden_size}"
            log(f"{name}, {dtype}: timing steps")
            checkpoint = random_init_checkpoint(config.with_fields(dtype=dtype), 0)
            yield time_model(
                checkpoint, device=options.device, dtype=dtype, seconds=options.seconds, name=name
            )


def reference_config(sizes: tuple[int, int, int]) -> GPTConfig:
    hidden_size, layers, heads = sizes
    return GPTConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
    )


# --------------------------------------------------------------------------- server overhead


def _reference_overhead(
    options: CalibrationOptions, timed_models: Sequence[TimedModel], log: LogFunction
) -> ServerOverhead | None:
    """Return the overhead of a server with one reference model, for all reference models."""
    model_sizes = (
        REFERENCE_MODELS[parse_device(options.device).type]
        if options.reference_models is None
        else options.reference_models
    )
    # The model has a medium size, because with small models the overhead exceeds the step times.
    index = len(model_sizes) // 2
    sizes, middle_model = model_sizes[index], timed_models[index].measured
    with random_checkpoint(reference_config(sizes).with_fields(dtype=middle_model.dtype)) as model:
        return _measure_overhead(model, options, middle_model, log)


@contextmanager
def random_checkpoint(config: GPTConfig) -> Iterator[Path]:
    """Write random weights to disk for the `with` block.

    The checkpoint has no tokenizer, so no end-of-text token ends a completion early.
    """
    with tempfile.TemporaryDirectory(prefix="preamble-plan-") as folder:
        write_native(random_init_checkpoint(config, 0), Path(folder) / "model")
        yield Path(folder) / "model"


def _measure_overhead(
    model: Path, options: CalibrationOptions, measured: MeasuredModel, log: LogFunction
) -> ServerOverhead | None:
    log(f"{measured.name or model.name}: timing a server under a small load")
    server_settings = {"device": options.device, "dtype": measured.dtype, "prove": False}
    try:
        with _run_server(model, server_settings) as address:
            reports = {
                concurrency: _run_load(address, concurrency, requests, new_tokens)
                for concurrency, requests, new_tokens in load_sizes(measured.steps)
            }
            is_slow = (
                LONG_PROMPT_REQUESTS * measured.steps.rows.interpolate(LONG_PROMPT_TOKENS)
                > LOAD_TARGET_S_MAX
            )
            long_prompt_report = (
                None
                if is_slow
                else _run_load(address, 1, LONG_PROMPT_REQUESTS, 2, LONG_PROMPT_TOKENS)
            )
    except (PreambleError, LoadError) as error:
        # The calibration is still useful without the overhead, whose fields are then 0.
        log(f"the server overhead could not be measured: {error}")
        return None
    return fit_overhead(measured.steps, reports, long_prompt_report)


@contextmanager
def _run_server(model: Path, settings: Mapping[str, object]) -> Iterator[str]:
    """Run a server with these settings and yield its HOST:PORT."""
    with tempfile.TemporaryDirectory(prefix="preamble-plan-") as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(dict(settings)))
        server_args: list[str | Path] = [model, "--config", config, "--no-page"]
        with run_server(server_args, Path(folder) / "log", START_TIMEOUT_S) as (_, address):
            yield address


def load_sizes(step_costs: StepCostModel) -> Iterator[tuple[int, int, int]]:
    """Yield concurrency, number of requests and new tokens of each load.

    For a slow model, loads have fewer new tokens, and loads of high concurrency are left out.
    """
    for concurrency in CONCURRENCIES:
        step_s = step_costs.step_seconds(concurrency, concurrency, 0, 0, concurrency)
        rounds = max(2, 6 // concurrency)
        new_tokens = (
            NEW_TOKENS if rounds * NEW_TOKENS * step_s < LOAD_TARGET_S_MAX else NEW_TOKENS_SLOW
        )
        if concurrency == 1 or rounds * new_tokens * step_s < LOAD_TARGET_S_MAX:
            yield concurrency, rounds * concurrency, new_tokens


def _run_load(
    address: str, concurrency: int, requests: int, new_tokens: int, prompt: int = PROMPT_TOKENS
) -> LoadReport:
    work = LoadSpec(
        concurrency=concurrency,
        requests_max=requests,
        warmup_requests=WARMUP_REQUESTS,
        prompt_length=LengthSampler("fixed", prompt, prompt),
        output_length=LengthSampler("fixed", new_tokens, new_tokens),
        timeout_s=LOAD_TIMEOUT_S,
    )
    return LoadReport.from_run(run_load(ServerEndpoint(address), work))


def fit_overhead(
    step_costs: StepCostModel,
    reports: Mapping[int, LoadReport],
    long_prompt_report: LoadReport | None = None,
) -> ServerOverhead | None:
    """Fit the overhead to the differences of measured latencies and step durations.

    Return None if a load has no inter-token latency.
    """
    points = []
    for concurrency, report in reports.items():
        if report.itl_ms is None:
            return None
        context = concurrency * (PROMPT_TOKENS + NEW_TOKENS / 2)
        decode_step_s = step_costs.step_seconds(concurrency, concurrency, context, 0, concurrency)
        extra_s = max(0.0, report.itl_ms.p50 / 1e3 - decode_step_s)
        # Step durations have a relative error, so points are weighted by their inverse variance.
        points.append((float(concurrency), extra_s, decode_step_s**-2))
    step_s, sequence_s = _fit_line(points)

    def overhead_s(report: LoadReport, prompt: int) -> float:
        """Return the time to first token minus the duration of its step."""
        if report.ttft_ms is None:
            return 0.0
        prefill_step_s = step_costs.step_seconds(prompt, 1, 0, prompt * (prompt + 1) // 2, 1)
        return report.ttft_ms.p50 / 1e3 - prefill_step_s - step_s - sequence_s

    request_s = overhead_s(reports[min(reports)], PROMPT_TOKENS)
    if long_prompt_report is None:
        return ServerOverhead(step_s, sequence_s, max(0.0, request_s), 0.0)
    extra_s = overhead_s(long_prompt_report, LONG_PROMPT_TOKENS) - request_s
    token_s = max(0.0, extra_s / (LONG_PROMPT_TOKENS - PROMPT_TOKENS))
    request_s = max(0.0, request_s - PROMPT_TOKENS * token_s)
    return ServerOverhead(step_s, sequence_s, request_s, token_s)


def _fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a line to weighted points; return its intercept and slope, both at least 0."""
    weight_sum = sum(weight for _, _, weight in points)
    x, y = (sum(point[axis] * point[2] for point in points) / weight_sum for axis in (0, 1))
    spread = sum(weight * (a - x) ** 2 for a, _, weight in points)
    slope = sum(weight * (a - x) * (b - y) for a, b, weight in points) / spread if spread else 0.0
    slope = max(0.0, slope)
    if y - slope * x >= 0:
        return y - slope * x, slope
    squares = sum(weight * a * a for a, _, weight in points)
    return 0.0, sum(weight * a * b for a, b, weight in points) / squares


def _add_overhead(model_costs: MeasuredModel, overhead: ServerOverhead | None) -> MeasuredModel:
    if overhead is None:
        return model_costs
    steps = model_costs.steps
    step_costs_with_overhead = replace(
        steps,
        step_s=steps.step_s + overhead.step_s,
        sequence_s=steps.sequence_s + overhead.sequence_s,
    )
    return replace(model_costs, steps=step_costs_with_overhead)


# -------------------------------------------------------------------------------- the machine


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_memory_bytes()


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        versions["preamble"] = metadata.version("preamble")
    except metadata.PackageNotFoundError:
        versions["preamble"] = "not installed"
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["driver"] = _driver_version()
    return versions


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return match[1] if match else "unknown"
