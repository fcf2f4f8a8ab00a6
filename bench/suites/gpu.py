"""GPU benchmark: decode and prefill vs device limits and transformers, and FP8 vs bf16.

A memory copy, a large matmul and all generation workloads run in interleaved rounds, so that a
change of the GPU clocks affects all of them. The model has 5B random weights, which are drawn on
the device. A row that cannot be measured gives the reason. No download is needed.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bench.harness.offline_engine import (
    generate_all,
    greedy_request,
    load_for_serving,
    random_ids,
    running_engine,
)
from bench.harness.record import SuiteOutput
from bench.harness.roofline import MeasuredLimit, RooflineModel
from bench.harness.targets import Row, Settings, measured_row, not_run_row
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import generated_checkpoint
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.model.loading import parse_device
from gpt.parallel.weight_sharding import ParameterSpec
from serving.config import CacheConfig, ServerConfig
from serving.engine.engine import Engine

NETWORK = GPTConfig(
    num_layers=24,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=51200,
    max_position_embeddings=2304,
    dtype="bfloat16",
)
# Settings of the FP8 rows. Random weights have no meaningful output, so the divergence check is
# effectively disabled; the log has the measured divergence.
FP8_PREFILL = {"linear_backend": "fp8", "divergence_max": 1e3}
FP8_DECODE = FP8_PREFILL | {"kv_dtype": "fp8"}


@dataclass(frozen=True)
class GpuSizes:
    """Model, device and workloads; tests use smaller ones on the CPU."""

    rounds: int = 5
    network: GPTConfig = NETWORK
    device: str = "cuda"
    copy_bytes: int = 4 << 30
    matrix_side: int = 8192  # Side of the square matrices of the peak matmul.
    single_prompt_tokens: int = 32  # Prompt of the single decoding request.
    new_tokens: int = 128  # New tokens per request in every workload that decodes.
    requests: int = 64
    prompt_tokens: int = 512
    prefill_tokens: int = 2048
    decode_requests: int = 32
    decode_prompt_tokens: int = 576  # Plus half of the 128 new tokens: a mean context of 640.

    @property
    def server_config(self) -> ServerConfig:
        block_tokens = CacheConfig.kv_block_tokens
        batch_tokens_max = max(
            self.requests * (self.prompt_tokens + self.new_tokens),
            self.prefill_tokens + self.new_tokens,
        )
        return ServerConfig(
            "",
            device=self.device,
            dtype=self.network.dtype,
            running_requests_max=max(self.requests, self.decode_requests),
            # All prompts of a batch fit in one step, so that all later steps are decode steps.
            step_tokens_max=max(
                self.requests * self.prompt_tokens,
                self.decode_requests * self.decode_prompt_tokens,
                self.prefill_tokens,
            ),
            kv_tokens_max=batch_tokens_max
            + (max(self.requests, self.decode_requests) + 1) * 2 * block_tokens,
            prefix_cache=False,
        )


@dataclass
class _InterleavedTimings:
    """Timers that run in interleaved rounds. A timer that fails is replaced by its error."""

    timers: dict[str, Callable[[], float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def run_rounds(self, rounds: int) -> None:
        """Run a warm-up round and then `rounds` timed rounds."""
        for round_index in range(rounds + 1):
            for name, timer in list(self.timers.items()):
                try:
                    elapsed_s = timer()
                except Exception as error:
                    self.record_failure(name, error)
                    del self.timers[name]
                    self.seconds.pop(name, None)
                    continue
                if round_index:
                    self.seconds.setdefault(name, []).append(elapsed_s)

    def record_failure(self, name: str, error: Exception) -> None:
        message = (str(error).splitlines() or [""])[0]
        self.failures[name] = f"{type(error).__name__}: {message}"[:200]

    def failure_reasons(self, *names: str) -> str:
        """Return the errors of those `names` that failed; empty if none failed."""
        return "; ".join(
            f"{name}: {self.failures[name]}" for name in names if name in self.failures
        )

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def run_suite(rounds: int = 5, sizes: GpuSizes | None = None) -> Iterator[SuiteOutput]:
    """Measure all rows, which takes minutes, mostly for transformers."""
    sizes = replace(sizes or GpuSizes(), rounds=rounds)
    timings = _InterleavedTimings()
    with ExitStack() as stack:
        _add_device_limits(timings, sizes)
        _add_our_engine(timings, stack, sizes)
        _add_transformers(timings, sizes)
        yield _settings(sizes)
        timings.run_rounds(sizes.rounds)
    for name, reason in timings.failures.items():
        yield f"not measured: {name}: {reason}"
    yield from _target_rows(timings, sizes)


# ----------------------------------------------------------------------------------------- timers


def _add_device_limits(timings: _InterleavedTimings, sizes: GpuSizes) -> None:
    device = torch.device(sizes.device)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target, dtype = torch.empty_like(source), getattr(torch, sizes.network.dtype)
    square = torch.randn(sizes.matrix_side, sizes.matrix_side, device=device).to(dtype)
    out = torch.empty_like(square)
    timings.timers["copy"] = partial(_time_call, device, lambda: target.copy_(source))
    timings.timers["product"] = partial(
        _time_call, device, lambda: torch.mm(square, square.T, out=out)
    )


def _add_our_engine(timings: _InterleavedTimings, stack: ExitStack, sizes: GpuSizes) -> None:
    """Add timers of three engines: bf16, FP8 weights, and FP8 weights with an FP8 KV cache."""
    for prefix, overrides in {"": {}, "fp8 ": FP8_PREFILL, "fp8 kv ": FP8_DECODE}.items():
        try:
            config = sizes.server_config.with_fields(**overrides)
            engine = stack.enter_context(_open_engine(sizes, config))
        except PreambleError as error:
            for timer_name in ("single", "batch", "prefill", "decode"):
                timings.record_failure(prefix + timer_name, error)
            continue
        time_generation = partial(_time_generation, engine, random.Random(0), sizes)
        timers = {
            "single": partial(
                _time_decode_step, time_generation, 1, sizes.single_prompt_tokens, sizes.new_tokens
            ),
            "batch": partial(
                time_generation, sizes.requests, sizes.prompt_tokens, sizes.new_tokens
            ),
            "prefill": partial(time_generation, 1, sizes.prefill_tokens, 1),
            "decode": partial(
                _time_decode_step,
                time_generation,
                sizes.decode_requests,
                sizes.decode_prompt_tokens,
                sizes.new_tokens,
            ),
        }
        selected = {"": tuple(timers), "fp8 ": ("prefill",), "fp8 kv ": ("decode",)}[prefix]
        timings.timers |= {prefix + timer_name: timers[timer_name] for timer_name in selected}


def _open_engine(sizes: GpuSizes, config: ServerConfig) -> Any:
    weights = _random_checkpoint(sizes.network, parse_device(config.model_config.device))
    return running_engine(load_for_serving(weights, config), config)


def _random_checkpoint(network: GPTConfig, device: torch.device) -> Checkpoint:
    """Build random weights on the device, because the host needs minutes to draw 5B numbers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw_parameter(parameter: ParameterSpec) -> torch.Tensor:
        if len(parameter.shape) == 1:
            is_norm_weight = "norm" in parameter.name and parameter.name.endswith("weight")
            return torch.full(parameter.shape, float(is_norm_weight), device=device)
        weight = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        return weight.normal_(0.0, 0.02, generator=generator)

    return generated_checkpoint(network, draw_parameter)


def _time_generation(
    engine: Engine,
    rng: random.Random,
    sizes: GpuSizes,
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
) -> float:
    vocabulary = sizes.network.vocab_size
    batch = [
        greedy_request(random_ids(rng, vocabulary, prompt_tokens), new_tokens, "throughput")
        for _ in range(requests)
    ]
    start = time.perf_counter()
    generate_all(engine, batch)
    return time.perf_counter() - start


def _time_decode_step(
    time_generation: Callable[[int, int, int], float],
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
) -> float:
    """Return the seconds of one decode step, without the prefill.

    This is the extra time of generating `new_tokens` more tokens, divided by `new_tokens`.
    """
    return (
        time_generation(requests, prompt_tokens, new_tokens + 1)
        - time_generation(requests, prompt_tokens, 1)
    ) / new_tokens


def _add_transformers(timings: _InterleavedTimings, sizes: GpuSizes) -> None:
    """Add a timer of transformers' continuous batching, whose manager persists over all rounds."""
    name = "transformers"
    if sizes.device != "cuda":
        timings.record_failure(
            name, ValueError("continuous batching in transformers needs a CUDA device")
        )
        return
    try:
        import transformers
        from transformers import GenerationConfig

        network = sizes.network
        settings = transformers.GPT2Config(
            n_layer=network.num_layers,
            n_embd=network.hidden_size,
            n_head=network.num_attention_heads,
            vocab_size=network.vocab_size,
            n_positions=network.max_position_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
        dtype = getattr(torch, network.dtype)
        with torch.device(sizes.device):
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                model: Any = transformers.GPT2LMHeadModel(settings)
            finally:
                torch.set_default_dtype(default_dtype)
        model.eval()
        generation_config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=sizes.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        rng = random.Random(1)

        @torch.inference_mode()
        def time_batch() -> float:
            prompts = [
                list(random_ids(rng, network.vocab_size, sizes.prompt_tokens))
                for _ in range(sizes.requests)
            ]
            start = time.perf_counter()
            outputs = model.generate_batch(
                prompts, generation_config=generation_config, persistent_manager=True
            )
            elapsed_s = time.perf_counter() - start
            counts = [len(output.generated_tokens) for output in outputs.values()]
            if counts != [sizes.new_tokens] * sizes.requests:
                raise RuntimeError(
                    f"generated {sum(counts)} tokens for {len(counts)} requests, expected "
                    f"{sizes.new_tokens} for each of {sizes.requests}"
                )
            return elapsed_s

        timings.timers[name] = time_batch
    except Exception as error:  # For example, transformers is not installed.
        timings.record_failure(name, error)


def _time_call(device: torch.device, call: Callable[[], object], repeats: int = 10) -> float:
    """Return the mean seconds of one call, measured with CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start_event.record()
    for _ in range(repeats):
        call()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3 / repeats


# ------------------------------------------------------------------------------------------- rows


def _settings(sizes: GpuSizes) -> Settings:
    network, config = sizes.network, sizes.server_config
    return Settings(
        f"{network.num_layers} x {network.hidden_size}, {network.num_attention_heads} heads, "
        f"V {network.vocab_size}, {network.dtype}, torch {torch.__version__}",
        {
            "ours": f"step_tokens_max {config.scheduler_config.step_tokens_max}, throughput, "
            "no prefix cache",
            "fp8": ", ".join(f"{name}: {setting}" for name, setting in FP8_PREFILL.items()),
            "fp8 kv": ", ".join(f"{name}: {setting}" for name, setting in FP8_DECODE.items()),
            "transformers": "GPT2LMHeadModel.generate_batch, persistent_manager",
        },
    )


def _target_rows(timings: _InterleavedTimings, sizes: GpuSizes) -> Iterator[SuiteOutput]:
    cost = RooflineModel(sizes.network).cost
    copied_bytes, side = 2.0 * sizes.copy_bytes, sizes.matrix_side
    if not timings.failure_reasons("copy"):
        yield MeasuredLimit("copy bandwidth", "B", {"torch": _rates(timings, "copy", copied_bytes)})
    if not timings.failure_reasons("product"):
        rates = _rates(timings, "product", 2.0 * side**3)
        yield MeasuredLimit(f"{sizes.network.dtype} products", "FLOP", {f"torch, {side}": rates})
    bytes_read = cost([sizes.single_prompt_tokens + sizes.new_tokens // 2], [1]).read_bytes
    yield _limit_share_row(timings, "gpu/decode", "single", bytes_read, "copy", copied_bytes)
    yield _speedup_row(timings, "gpu/batch", "batch", "transformers")
    operations = cost([0], [sizes.prefill_tokens]).operations
    yield _limit_share_row(timings, "gpu/prefill", "prefill", operations, "product", 2.0 * side**3)
    yield _speedup_row(timings, "gpu/fp8-prefill", "fp8 prefill", "prefill")
    yield _speedup_row(timings, "gpu/fp8-decode", "fp8 kv decode", "decode")


def _rates(timings: _InterleavedTimings, name: str, amount: float) -> Sequence[float]:
    return [amount / elapsed_s for elapsed_s in timings.seconds[name]]


def _limit_share_row(
    timings: _InterleavedTimings,
    target_name: str,
    name: str,
    amount: float,
    limit: str,
    limit_amount: float,
) -> Row:
    """Build the row that gives the speed of a workload in percent of a device limit."""
    reason = timings.failure_reasons(name, limit)
    if reason:
        return not_run_row(target_name, reason)
    achieved, limit_rate = amount / timings.median(name), limit_amount / timings.median(limit)
    summary = f"{100 * achieved / limit_rate:.0f} % ({1e3 * timings.median(name):.3f} ms)"
    samples = {timer_name: timings.seconds[timer_name] for timer_name in (name, limit)}
    return measured_row(target_name, 100 * achieved / limit_rate, summary, samples=samples)


def _speedup_row(timings: _InterleavedTimings, target_name: str, name: str, baseline: str) -> Row:
    """Build the row that gives the speedup of a workload over a baseline."""
    reason = timings.failure_reasons(name, baseline)
    if reason:
        return not_run_row(target_name, reason)
    speedup = timings.median(baseline) / timings.median(name)
    summary = (
        f"{speedup:.2f} x ({timings.median(name):.4f} s, "
        f"{baseline} {timings.median(baseline):.4f} s)"
    )
    return measured_row(
        target_name,
        speedup,
        summary,
        samples={timer_name: timings.seconds[timer_name] for timer_name in (name, baseline)},
    )
