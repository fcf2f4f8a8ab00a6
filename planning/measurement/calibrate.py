"""Calibration: times the steps of reference models and a user's model; measures server overhead.

The costs of models that are not timed are interpolated between reference models of several widths.
The server overhead is the difference between the latencies of a real server under a small load and
the durations of its steps. It is fitted as a time per step, per sequence, per request and per
prompt token.
"""

import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import yaml

from checkpoints_tools.conversion.convert import write_native
from clients.load.generator import LengthSampler, LoadError, LoadSpec, ServerEndpoint, run_load
from clients.load.report import LoadReport
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.cpu_threads import set_thread_count
from gpt.errors import PreambleError
from gpt.files.abandoned_files import temporary_folder
from gpt.formats.registry import open_checkpoint
from gpt.host_limits import total_memory_bytes
from gpt.model.loading import check_dtype, parse_device
from gpt.software_versions import preamble_version
from planning.inference.calibration_file import Calibration, MeasuredModel
from planning.inference.step_cost import StepCostModel
from planning.measurement.child_command import run_server
from planning.measurement.step_timing import TimedModel, time_model

LogFunction = Callable[[str], None]

# Hidden size, layers and heads of the reference models. The models for a GPU are larger, because
# small models would not use a GPU fully.
REFERENCE_MODELS = {
    "cpu": ((64, 8, 2), (256, 8, 4), (512, 8, 8), (1024, 8, 16)),
    "cuda": ((1024, 24, 16), (2048, 16, 16), (4096, 8, 32)),
}
VOCAB_SIZE, CONTEXT_TOKENS = 32000, 1024
# The load that measures the server overhead.
CONCURRENCIES = (1, 4, 16, 32)
PROMPT_TOKENS = 32
NEW_TOKENS = 48
# Replaces NEW_TOKENS if a load with NEW_TOKENS would take longer than LOAD_TARGET_S_MAX.
NEW_TOKENS_SLOW = 8
# The load that measures the overhead per prompt token.
LONG_PROMPT_TOKENS, LONG_PROMPT_REQUESTS = 256, 8
LOAD_TARGET_S_MAX = 20.0  # A load that would take longer is reduced or left out.
# Number of first requests per client that are not counted, because memory and caches are cold.
WARMUP_REQUESTS = 2
LOAD_TIMEOUT_S = 120.0
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServerOverhead:
    """The seconds that a server adds to the engine's step times."""

    step_s: float  # Per step.
    sequence_s: float  # Per sequence in a step.
    request_s: float  # Per request.
    prompt_token_s: float  # Per prompt token of a request, in addition to `request_s`.


@dataclass(frozen=True)
class CalibrationOptions:
    model: Path | None = None  # A checkpoint to measure in addition to the reference models.
    device: str = "cpu"
    # None: the dtype of `model`. Without `model`: bfloat16 on a GPU, bfloat16 and float32 on a CPU.
    dtype: str | None = None
    seconds: float = 8.0  # Measuring time per model, without loading the model.
    # Hidden size, layers and heads of each reference model; None: as in REFERENCE_MODELS.
    reference_models: Sequence[tuple[int, int, int]] | None = None
    measure_server: bool = True


def calibrate(options: CalibrationOptions, log: LogFunction) -> Calibration:
    """Calibrate this machine. This takes one to three minutes, or longer with a large model."""
    check_dtype(options.dtype)
    device = parse_device(options.device)
    set_thread_count()
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
    if options.dtype is not None:
        dtypes = [options.dtype]
    elif user_model is not None:
        dtypes = [user_model.measured.dtype]
    else:
        dtypes = ["bfloat16", "float32"] if kind == "cpu" else ["bfloat16"]
    for dtype in dtypes:
        for sizes in _reference_sizes(options, kind):
            config = reference_config(sizes)
            name = f"{config.num_layers} x {config.hidden_size}"
            log(f"{name}, {dtype}: timing steps")
            checkpoint = random_init_checkpoint(config.with_fields(dtype=dtype), 0)
            yield time_model(
                checkpoint, device=options.device, dtype=dtype, seconds=options.seconds, name=name
            )


def _reference_sizes(options: CalibrationOptions, kind: str) -> Sequence[tuple[int, int, int]]:
    """Return hidden size, layers and heads of the reference models."""
    if options.reference_models is not None:
        return options.reference_models
    return REFERENCE_MODELS[kind]


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
    """Measure the server overhead with one reference model; `calibrate` uses it for all of them."""
    model_sizes = _reference_sizes(options, parse_device(options.device).type)
    # The model has a medium size. With a small model, the overhead would exceed the step times,
    # which is not typical.
    index = len(model_sizes) // 2
    middle_model = timed_models[index].measured
    config = reference_config(model_sizes[index]).with_fields(dtype=middle_model.dtype)
    with random_checkpoint(config) as model:
        return _measure_overhead(model, options, middle_model, log)


@contextmanager
def random_checkpoint(config: GPTConfig) -> Iterator[Path]:
    """Write a checkpoint with random weights; it is removed at the end of the `with` block.

    The checkpoint has no tokenizer, so no end-of-text token ends a completion early.
    """
    with temporary_folder("plan") as folder:
        write_native(random_init_checkpoint(config, 0), folder / "model")
        yield folder / "model"


def _measure_overhead(
    model: Path, options: CalibrationOptions, measured: MeasuredModel, log: LogFunction
) -> ServerOverhead | None:
    """Return the overhead of a server with this model; None: it could not be measured."""
    log(f"{measured.name or model.name}: timing a server under a small load")
    server_settings = {"device": options.device, "dtype": measured.dtype, "prove": False}
    try:
        with _run_server(model, server_settings) as address:
            reports = {
                concurrency: _run_load(address, concurrency, requests, new_tokens)
                for concurrency, requests, new_tokens in load_sizes(measured.steps)
            }
            long_prompt_report = None
            prefill_s = measured.steps.rows.interpolate(LONG_PROMPT_TOKENS)
            if LONG_PROMPT_REQUESTS * prefill_s <= LOAD_TARGET_S_MAX:
                long_prompt_report = _run_load(
                    address, 1, LONG_PROMPT_REQUESTS, 2, LONG_PROMPT_TOKENS
                )
    except (PreambleError, LoadError) as error:
        # The calibration is useful even without this overhead.
        log(f"the server overhead could not be measured: {error}")
        return None
    return fit_overhead(measured.steps, reports, long_prompt_report)


@contextmanager
def _run_server(model: Path, settings: Mapping[str, object]) -> Iterator[str]:
    """Run a server with these settings and yield its HOST:PORT."""
    with temporary_folder("plan") as folder:
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump(dict(settings)))
        server_args: list[str | Path] = [model, "--config", config, "--no-page"]
        with run_server(server_args, folder / "log", START_TIMEOUT_S) as (_, address):
            yield address


def load_sizes(step_costs: StepCostModel) -> Iterator[tuple[int, int, int]]:
    """Yield concurrency, number of requests and new tokens of each load.

    For a slow model, loads have fewer new tokens, and loads of high concurrency are left out.
    """
    for concurrency in CONCURRENCIES:
        step_s = step_costs.step_seconds(concurrency, concurrency, 0, 0, concurrency)
        requests_per_client = max(2, 6 // concurrency)
        new_tokens = NEW_TOKENS
        if requests_per_client * new_tokens * step_s >= LOAD_TARGET_S_MAX:
            new_tokens = NEW_TOKENS_SLOW
        if concurrency == 1 or requests_per_client * new_tokens * step_s < LOAD_TARGET_S_MAX:
            yield concurrency, requests_per_client * concurrency, new_tokens


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

    `reports` are keyed by concurrency. Return None if a load has no inter-token latency.
    """
    points = []  # (concurrency, seconds that the server adds to a step, weight).
    for concurrency, report in reports.items():
        if report.itl_ms is None:
            return None
        context = concurrency * (PROMPT_TOKENS + NEW_TOKENS / 2)
        decode_step_s = step_costs.step_seconds(concurrency, concurrency, context, 0, concurrency)
        extra_s = max(0.0, report.itl_ms.p50 / 1e3 - decode_step_s)
        # The error of a step's duration is proportional to the duration. The weight of a point is
        # the inverse of the squared error, and therefore 1 / duration^2.
        points.append((float(concurrency), extra_s, decode_step_s**-2))
    step_s, sequence_s = _fit_line(points)

    def request_overhead_s(report: LoadReport, prompt: int) -> float:
        """Return the time to first token minus the prefill step with its server overhead."""
        if report.ttft_ms is None:
            return 0.0
        prefill_step_s = step_costs.step_seconds(prompt, 1, 0, prompt * (prompt + 1) // 2, 1)
        return report.ttft_ms.p50 / 1e3 - prefill_step_s - step_s - sequence_s

    request_s = request_overhead_s(reports[min(reports)], PROMPT_TOKENS)
    if long_prompt_report is None:
        return ServerOverhead(step_s, sequence_s, max(0.0, request_s), 0.0)
    long_prompt_extra_s = request_overhead_s(long_prompt_report, LONG_PROMPT_TOKENS) - request_s
    prompt_token_s = max(0.0, long_prompt_extra_s / (LONG_PROMPT_TOKENS - PROMPT_TOKENS))
    request_s = max(0.0, request_s - PROMPT_TOKENS * prompt_token_s)
    return ServerOverhead(step_s, sequence_s, request_s, prompt_token_s)


def _fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a line to (x, y, weight) points; return its intercept and slope, both at least 0."""
    weight_sum = sum(weight for _, _, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / weight_sum
    mean_y = sum(y * weight for _, y, weight in points) / weight_sum
    variance = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = 0.0
    if variance:
        covariance = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points)
        slope = max(0.0, covariance / variance)
    intercept = mean_y - slope * mean_x
    if intercept >= 0:
        return intercept, slope
    # The intercept must not be negative, so the line is fitted with an intercept of 0.
    squares = sum(weight * x * x for x, _, weight in points)
    return 0.0, sum(weight * x * y for x, y, weight in points) / squares


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
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "preamble": preamble_version(),
    }
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
