"""GPU benchmark: decode and prefill vs device limits and transformers, and FP8 vs bf16.

The engines run one after another, because two of them may not fit into the memory of one GPU. The
rounds of each engine also time a memory copy and a large matmul, so that a change of the GPU clocks
is visible. The model has 5B random weights, which are drawn on the device. A row that cannot be
measured gives the reason. No download is needed.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


@dataclass(frozen=True)
class _Phase:
    """One engine, and the names of its timers. The limits are timed in every phase."""

    name: str
    timers: tuple[str, ...]
    overrides: dict[str, object] = field(default_factory=dict)  # Settings of our engine.


TRANSFORMERS = "transformers"
OUR_PHASES = (
    _Phase("bf16", ("single", "batch", "prefill", "decode")),
    _Phase("fp8", ("fp8 prefill",), FP8_PREFILL),
    _Phase("fp8 kv", ("fp8 kv decode",), FP8_DECODE),
)
# The timers that each row needs, beside the limits.
ROW_TIMERS = {
    "gpu/decode": ("single",),
    "gpu/batch": ("batch", TRANSFORMERS),
    "gpu/prefill": ("prefill",),
    "gpu/fp8-prefill": ("fp8 prefill", "prefill"),
    "gpu/fp8-decode": ("fp8 kv decode", "decode"),
}


def run_suite(
    rounds: int = 5,
    sizes: GpuSizes | None = None,
    rows: Collection[str] = tuple(ROW_TIMERS),
) -> Iterator[SuiteOutput]:
    """Measure the rows of the targets `rows`; all rows take minutes, mostly for transformers.

    The limits and the rows are yielded as soon as the engines that they need have run.
    """
    sizes = replace(sizes or GpuSizes(), rounds=rounds)
    timings, peer_attention = _InterleavedTimings(), ""
    remaining_rows = [name for name in ROW_TIMERS if name in rows]
    needed_timers = {timer for name in remaining_rows for timer in ROW_TIMERS[name]}
    yield _settings(sizes)
    for phase in OUR_PHASES:
        timers = [name for name in phase.timers if name in needed_timers]
        if not timers:
            continue
        with _device_limits(timings, sizes, phase.name), _our_engine(timings, sizes, phase, timers):
            timings.run_rounds(sizes.rounds)
        yield from _report_phase(phase.name, sizes)
        yield from _measured_limits(timings, sizes, phase.name)
        yield from _finished_rows(timings, sizes, remaining_rows, peer_attention)
    if TRANSFORMERS in needed_timers:
        with _device_limits(timings, sizes, TRANSFORMERS):
            model = _add_transformers(timings, sizes)
            timings.run_rounds(sizes.rounds)
            peer_attention = _attention_name(model)
            _free_manager(model)
            del model
        yield from _report_phase(TRANSFORMERS, sizes)
        yield from _finished_rows(timings, sizes, remaining_rows, peer_attention)
    for name, reason in timings.failures.items():
        yield f"not measured: {name}: {reason}"


def _report_phase(name: str, sizes: GpuSizes) -> Iterator[str]:
    """Yield the peak of the device memory in a phase, and start the peak of the next one."""
    device = torch.device(sizes.device)
    if device.type != "cuda":
        return
    yield f"{name}: peak device memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB"
    torch.cuda.reset_peak_memory_stats(device)


def _finished_rows(
    timings: _InterleavedTimings,
    sizes: GpuSizes,
    remaining_rows: list[str],
    peer_attention: str,
) -> Iterator[Row]:
    """Yield each remaining row that has no timer left to run, and remove it from the list."""
    for name in list(remaining_rows):
        if all(timer in timings.seconds or timer in timings.failures for timer in ROW_TIMERS[name]):
            remaining_rows.remove(name)
            yield _build_row(timings, sizes, name, peer_attention)


# ----------------------------------------------------------------------------------------- timers


@contextmanager
def _device_limits(timings: _InterleavedTimings, sizes: GpuSizes, phase: str) -> Iterator[None]:
    """Time the device limits in the rounds of a phase; free the memory of the phase at its end."""
    timings.timers |= _limit_timers(sizes, phase)
    try:
        yield
    finally:
        # The timers hold the engine, the peer's model and the buffers of the limits.
        timings.timers.clear()
        gc.collect()
        if torch.device(sizes.device).type == "cuda":
            torch.cuda.empty_cache()


def _limit_timers(sizes: GpuSizes, phase: str) -> dict[str, Callable[[], float]]:
    device = torch.device(sizes.device)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target, dtype = torch.empty_like(source), getattr(torch, sizes.network.dtype)
    square = torch.randn(sizes.matrix_side, sizes.matrix_side, device=device).to(dtype)
    out = torch.empty_like(square)
    return {
        f"{phase} copy": partial(time_call, device, lambda: target.copy_(source)),
        f"{phase} product": partial(time_call, device, lambda: torch.mm(square, square.T, out=out)),
    }


def measure_device_limits(rounds: int, sizes: GpuSizes | None = None) -> Iterator[MeasuredLimit]:
    """Measure the copy bandwidth and the matmul peak of the device, without an engine."""
    timings, sizes = _InterleavedTimings(), sizes or GpuSizes()
    with _device_limits(timings, sizes, "idle"):
        timings.run_rounds(rounds)
    yield from _measured_limits(timings, sizes, "idle")


@contextmanager
def _our_engine(
    timings: _InterleavedTimings, sizes: GpuSizes, phase: _Phase, names: Sequence[str]
) -> Iterator[None]:
    """Add the timers `names` of one of our engines, which closes at the end of the phase."""
    with ExitStack() as stack:
        try:
            config = sizes.server_config.with_fields(**phase.overrides)
            engine = stack.enter_context(open_random_engine(sizes, config))
        except (PreambleError, torch.OutOfMemoryError) as error:
            for name in names:
                timings.record_failure(name, error)
        else:
            timers = engine_timers(engine, sizes)
            timings.timers |= {name: timers[name.rpartition(" ")[2]] for name in names}
        yield


def engine_timers(engine: Engine, sizes: GpuSizes) -> dict[str, Callable[[], float]]:
    """Return the timers of one engine by name; `single` and `decode` time one decode step."""
    time_generation = partial(_time_generation, engine, random.Random(0), sizes)
    return {
        "single": partial(
            _time_decode_step, time_generation, 1, sizes.single_prompt_tokens, sizes.new_tokens
        ),
        "batch": partial(time_generation, sizes.requests, sizes.prompt_tokens, sizes.new_tokens),
        "prefill": partial(time_generation, 1, sizes.prefill_tokens, 1),
        "decode": partial(
            _time_decode_step,
            time_generation,
            sizes.decode_requests,
            sizes.decode_prompt_tokens,
            sizes.new_tokens,
        ),
    }


def open_random_engine(
    sizes: GpuSizes, config: ServerConfig, *, warm_up: bool = False
) -> AbstractContextManager[Engine]:
    """Return a context with an engine of random weights; `warm_up`: run its warm-up steps."""
    weights = device_checkpoint(sizes.network, parse_device(config.model_config.device))
    return running_engine(load_for_serving(weights, config), config, warm_up=warm_up)


def device_checkpoint(network: GPTConfig, device: torch.device) -> Checkpoint:
    """Build random weights on the device, because the host needs minutes to draw 5B numbers."""
    generator = torch.Generator(device).manual_seed(0)

    def draw_parameter(parameter: ParameterSpec) -> torch.Tensor:
        if len(parameter.shape) == 1:
            return initial_vector(parameter, device)
        weight = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        return weight.normal_(0.0, 0.02, generator=generator)

    return generated_checkpoint(network, draw_parameter)


def initial_vector(parameter: ParameterSpec, device: torch.device) -> torch.Tensor:
    """Return the initial value of a norm weight (ones) or of a bias (zeros)."""
    is_norm_weight = "norm" in parameter.name and parameter.name.endswith("weight")
    return torch.full(parameter.shape, float(is_norm_weight), device=device)


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


def _add_transformers(timings: _InterleavedTimings, sizes: GpuSizes) -> Any:
    """Add a timer of transformers' continuous batching; all rounds use one manager.

    Return the model of transformers; None: it cannot run, and the reason is recorded.
    """
    name = TRANSFORMERS
    if sizes.device != "cuda":
        timings.record_failure(
            name, ValueError("continuous batching in transformers needs a CUDA device")
        )
        return None
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

        # Not in inference mode: a thread of the manager changes tensors that this thread creates.
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
        return model
    except Exception as error:  # For example, transformers is not installed.
        timings.record_failure(name, error)
        return None


def _free_manager(model: Any) -> None:
    """Free the KV cache of transformers, which takes most of the memory."""
    destroy = getattr(model, "destroy_cached_continuous_batching_manager", None)
    if destroy is not None:
        destroy()


def _attention_name(model: Any) -> str:
    """Return the attention implementation that transformers selected, for example paged|sdpa."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def time_call(device: torch.device, call: Callable[[], object], repeats: int = 10) -> float:
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


def _measured_limits(
    timings: _InterleavedTimings, sizes: GpuSizes, phase: str
) -> Iterator[MeasuredLimit]:
    """Yield the limits of a phase; phases after the first one have their name in the limit's."""
    suffix = "" if phase in ("idle", OUR_PHASES[0].name) else f" beside {phase}"
    if not timings.failure_reasons(copy := f"{phase} copy"):
        rates = _rates(timings, copy, 2.0 * sizes.copy_bytes)
        yield MeasuredLimit(f"copy bandwidth{suffix}", "B", {"torch": rates})
    if not timings.failure_reasons(product := f"{phase} product"):
        rates = _rates(timings, product, 2.0 * sizes.matrix_side**3)
        method = f"torch, {sizes.matrix_side}"
        yield MeasuredLimit(f"{sizes.network.dtype} products{suffix}", "FLOP", {method: rates})


def _build_row(
    timings: _InterleavedTimings, sizes: GpuSizes, target_name: str, peer_attention: str
) -> Row:
    cost, phase = RooflineModel(sizes.network).cost, OUR_PHASES[0].name
    if target_name == "gpu/decode":
        context_tokens = sizes.single_prompt_tokens + sizes.new_tokens // 2
        bytes_read = cost([context_tokens], [1]).read_bytes
        return _limit_share_row(
            timings, target_name, "single", bytes_read, f"{phase} copy", 2.0 * sizes.copy_bytes
        )
    if target_name == "gpu/prefill":
        operations = cost([0], [sizes.prefill_tokens]).operations
        limit_operations = 2.0 * sizes.matrix_side**3
        return _limit_share_row(
            timings, target_name, "prefill", operations, f"{phase} product", limit_operations
        )
    name, baseline = ROW_TIMERS[target_name]
    # Paged SDPA, which transformers uses without flash-attn, is slower than its FlashAttention.
    peer_text = f", attention {peer_attention}" if baseline == TRANSFORMERS else ""
    return _speedup_row(timings, target_name, name, baseline, peer_text)


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


def _speedup_row(
    timings: _InterleavedTimings, target_name: str, name: str, baseline: str, baseline_text: str
) -> Row:
    """Build the row that gives the speedup of a workload over a baseline."""
    reason = timings.failure_reasons(name, baseline)
    if reason:
        return not_run_row(target_name, reason)
    speedup = timings.median(baseline) / timings.median(name)
    summary = (
        f"{speedup:.2f} x ({timings.median(name):.4f} s, "
        f"{baseline} {timings.median(baseline):.4f} s{baseline_text})"
    )
    return measured_row(
        target_name,
        speedup,
        summary,
        samples={timer_name: timings.seconds[timer_name] for timer_name in (name, baseline)},
    )
