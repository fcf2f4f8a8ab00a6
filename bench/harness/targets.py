"""What Preamble promises of its speed and size, and how a figure is judged by that.

Every row of the table has its promise here, by a name that stays the same from run to run, so that
runs can be compared. A promise on speed counts as kept, too, where we are at the machine's own
limit: no peer can be beaten by more than there is. Knows nothing of how anything is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

# So near to the bound, which limits measured in the same run give, a ratio counts as met.
BOUND_SHARE_MIN = 0.85

Verdict = Literal["met", "MISSED", "met by the bound", "not run"]


@dataclass(frozen=True)
class Promise:
    """One row of the table."""

    name: str  # What is measured by, and the row in it.
    what: str
    target: float
    unit: str
    at_most: bool = False
    extra: bool = False  # Measured only if that part of the bench is asked for by name.

    @property
    def part(self) -> str:
        return self.name.partition("/")[0]

    @property
    def wanted(self) -> str:
        return f"{'<=' if self.at_most else '>='} {said(self.target, self.unit)}"

    def kept(self, value: float) -> bool:
        """Not by what is not a number."""
        return value <= self.target if self.at_most else value >= self.target


def said(value: float, unit: str) -> str:
    figure = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{figure} {unit}"


def verdict(kept: bool) -> Verdict:
    return "met" if kept else "MISSED"


@dataclass(frozen=True)
class Row:
    """A promise beside what was measured; as a line of text, too."""

    promise: Promise
    value: float
    told: str = ""  # The figures behind it, in words.
    share: float | None = None  # Of the machine's bound; None: it has none.
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: str = ""  # Why it was not run; then there is no value.

    @property
    def verdict(self) -> Verdict:
        if self.missing:
            return "not run"
        if not self.promise.kept(self.value) and (self.share or 0.0) >= BOUND_SHARE_MIN:
            return "met by the bound"
        return verdict(self.promise.kept(self.value))

    def __str__(self) -> str:
        if self.missing:
            return f"{self.promise.what}: not run: {self.missing}"
        bound = f", {100 * self.share:.0f} % of the bound" if self.share is not None else ""
        told = f"{self.promise.what}: {self.told}"
        if not self.told:
            told = f"{self.promise.what}: {said(self.value, self.promise.unit)}"
        return f"{told}{bound}; target {self.promise.wanted}: {self.verdict}"


@dataclass(frozen=True)
class Settings:
    """What each side of a table is set to."""

    title: str
    sides: Mapping[str, str]

    def __str__(self) -> str:
        wide = max(map(len, self.sides), default=0)
        return "\n".join([self.title, *(f"  {name:{wide}} {v}" for name, v in self.sides.items())])


def judged(
    name: str,
    value: float,
    told: str = "",
    *,
    share: float | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Row:
    """What was measured for a promise."""
    return Row(PROMISES[name], value, told, share, samples or {})


def not_run(name: str, why: str) -> Row:
    return Row(PROMISES[name], float("nan"), missing=why)


def _least(name: str, target: float, unit: str, what: str) -> Promise:
    return Promise(name, what, target, unit)


def _most(name: str, target: float, unit: str, what: str) -> Promise:
    return Promise(name, what, target, unit, at_most=True)


# Settings and dtypes are in bench/peers/compare.py; of one request only decoding counts.
_CPU = (
    _least("peers/gpt2/1/vllm", 2.0, "x", "GPT-2 small, one request, beside vLLM"),
    _least("peers/gpt2/1/llama", 1.0, "x", "GPT-2 small, one request, beside llama.cpp bf16"),
    _least("peers/gpt2/8/vllm", 1.5, "x", "GPT-2 small, 8 of 128 + 128, beside vLLM"),
    _least("peers/gpt2/32/vllm", 1.5, "x", "GPT-2 small, 32 of 128 + 128, beside vLLM"),
    _least("peers/gpt2/960/vllm", 1.2, "x", "GPT-2 small, a prompt of 960, beside vLLM"),
    _least("peers/int8/1/llama", 1.0, "x", "GPT-2 small int8, one request, beside q8_0"),
    _least("peers/llama/8/vllm", 1.5, "x", "Llama 350M, 8 of 128 + 128, beside vLLM"),
    _least("peers/llama/32/vllm", 1.25, "x", "Llama 350M, 32 of 128 + 128, beside vLLM"),
)
_GPU = (
    _least("gpu/decode", 80, "%", "5B bf16, one request, of the copy bandwidth"),
    _least("gpu/batch", 2.0, "x", "5B bf16, 64 of 512 + 128, beside transformers"),
    _least("gpu/prefill", 65, "%", "5B bf16, a prompt of 2048, of the matrix peak"),
    _least("gpu/fp8-prefill", 1.5, "x", "5B FP8, a prompt of 2048, beside bf16"),
    _least("gpu/fp8-decode", 1.4, "x", "5B FP8 with FP8 KV, 32 at 640, beside bf16"),
)
_SERVING = (
    _most("front/share", 5, "%", "front end's CPU, of the ranks'"),
    _least("front/tokens", 20_000, "tokens/s", "streamed tokens for a second of CPU"),
    _least("front/profiles-itl", 25, "%", "profile latency, p95 between tokens lower by"),
    _least("front/profiles-tokens", 15, "%", "profile throughput, tokens/s more by"),
    _most("adapters/mixed", 2, "%", "64 adapters of 20 rows in a batch, slower by"),
    _most("adapters/first", 1, "ms", "first token behind 20 warm rows, later by"),
    _least("adapters/registered", 10_000, "adapters", "adapters in a folder"),
    _most("start/refusal", 1, "s", "a bad model or config is refused within"),
    _most("start/ready", 5, "s", "ready, beyond the time to load, within"),
)
_REST = (
    _least("convert/tp2", 0.8, "x", "TP4 x PP2 to TP2, of cp's speed"),
    _least("convert/hf", 0.8, "x", "TP4 x PP2 to Hugging Face, of cp's speed"),
    _least("convert/native", 0.8, "x", "TP4 x PP2 to native, of cp's speed"),
    _least("convert/torch-dist", 0.8, "x", "TP4 x PP2 to torch_dist, of cp's speed"),
    _most("convert/memory", 1, "x", "memory to convert, of what it may have"),
    _least("tuning/speed-20", 1.6, "x", "20 virtual tokens, beside PEFT"),
    _least("tuning/speed-100", 2.0, "x", "100 virtual tokens, beside PEFT"),
    _least("tuning/speed-mixed", 2.5, "x", "20 virtual tokens, mixed lengths, beside PEFT"),
    _most("tuning/memory-20", 0.5, "x", "20 virtual tokens, of PEFT's memory"),
    _most("tuning/memory-100", 0.5, "x", "100 virtual tokens, of PEFT's memory"),
    _most("tuning/memory-mixed", 0.5, "x", "20 virtual tokens, mixed lengths, of PEFT's memory"),
    _most("tuning/loss-20", 1e-4, "nats", "20 virtual tokens, losses in fp32 apart by"),
    _most("tuning/loss-100", 1e-4, "nats", "100 virtual tokens, losses in fp32 apart by"),
    _most("tuning/loss-mixed", 1e-4, "nats", "mixed lengths, losses in fp32 apart by"),
    _most("planner/training", 5, "%", "published training runs, mean error"),
    _most("planner/inference", 12, "%", "published inference runs, mean error"),
    _most("planner/activations", 0.5, "%", "activation memory, worst error"),
)
# What is promised elsewhere, and measured only where it is asked for.
_EXTRA = (
    _most("front/first", 3, "ms", "first token, later by gRPC"),
    _most("front/refused", 50, "ms", "overload, refused within (p99)"),
    _most("front/lost", 0, "calls", "overload, accepted and lost or late"),
    _most("front/growth", 10, "%", "overload, front end's memory grown by"),
    _most("adapters/mixed-32", 2, "%", "64 adapters of 32 rows in a batch, slower by"),
    _most("adapters/first-32", 1, "ms", "first token behind 32 warm rows, later by"),
    _most("adapters/cold", 20, "ms", "a cold adapter arrives, p99 between tokens more by"),
    _most("adapters/tasks-10", 1.1, "x", "8 tasks of 10 rows, of one prefill + the decodes"),
    _most("adapters/tasks-20", 1.1, "x", "8 tasks of 20 rows, of one prefill + the decodes"),
)

PROMISES: Mapping[str, Promise] = {
    one.name: one
    for one in (*_CPU, *_GPU, *_SERVING, *_REST, *(replace(one, extra=True) for one in _EXTRA))
}
