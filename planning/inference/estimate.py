"""Our own engine under a load: what first tokens, next tokens and whole requests will take.

A workload's requests are played through the rules by which the scheduler fills its steps, each step
as long as its price says, and times are counted as a load generator counts them: no formula for
queues is needed. Arithmetic only: no torch, no server.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.inference import RankCost, rank_costs
from gpt.errors import ConfigError
from planning.hardware import Cluster
from planning.inference.calibration_file import StepCosts
from planning.inference.simulator import Call, Played, Rules, simulation
from planning.inference.step_pricing import Priced, price
from planning.memory_ledger import FITS_SHARE, Ledger
from planning.plan import Trust

BLOCK_TOKENS = 16
# Requests that are played: enough for a percentile, and for a load to become steady.
CALLS_MIN, CALLS_MAX = 160, 3000
AT_ONCE_MAX = 1000  # Of the calls that are played: who comes beyond them waits.
STAGED_CALLS_MIN = 60  # Of several stages each step is played.
WARM_SHARE = 0.25
# A queue that grows by more than this part of what comes has no end.
BEHIND = 0.05
# Memory of a GPU that a program takes before it has anything, with its libraries' buffers.
CONTEXT_BYTES = 1 << 30
GROUP_BYTES = 400 << 20  # More, where it talks to other ranks.
SCORED_BYTES = 256 << 20
ADAPTER_ROWS = 4096  # The pool that all adapters share.
# What the keys and values of a server on a CPU take of the memory that is free.
HOST_SHARE = 0.25
# The widest spread that a lognormal has with such a 95th percentile over its mean.
SPREAD_MAX = math.exp(0.5 * NormalDist().inv_cdf(0.95) ** 2)


@dataclass(frozen=True)
class Lengths:
    """How many tokens, over all requests; with both alike each has just so many."""

    mean: float
    p95: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < float("inf"):
            raise ConfigError(f"the mean length is {self.mean}; it must be at least 1 token")
        if not self.mean <= self.p95 <= SPREAD_MAX * self.mean:
            raise ConfigError(
                f"lengths of {self.mean:g} tokens on average have a 95th percentile of "
                f"{self.p95:g}; it must be from {self.mean:g} to {SPREAD_MAX * self.mean:.0f}"
            )

    def draw(self, count: int, seed: int) -> list[int]:
        """As many, in any order, that have this mean and spread: lognormal."""
        above = NormalDist().inv_cdf(0.95)
        spread = above - math.sqrt(max(0.0, above**2 - 2 * math.log(self.p95 / self.mean)))
        middle = math.log(self.mean) - spread**2 / 2
        places = [NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)]
        values = [math.exp(middle + spread * one) for one in places]
        # What lies beyond the last place is missing; all of them make up for it.
        scale = self.mean * count / sum(values)
        lengths = [max(1, round(one * scale)) for one in values]
        random.Random(seed).shuffle(lengths)
        return lengths


@dataclass(frozen=True)
class Workload:
    """One of `request_rate` (a second, as a Poisson process) and `concurrency` is set."""

    input_tokens: Lengths
    output_tokens: Lengths
    request_rate: float | None
    concurrency: int | None
    adapters: int = 0
    virtual_tokens: int = 0  # Of each request's prompt, before its input; they are cached.

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.concurrency is None):
            raise ConfigError("a workload has a request_rate or a concurrency, one of the two")
        load = self.request_rate if self.request_rate is not None else self.concurrency
        assert load is not None
        if not 0 < load < float("inf"):
            name = "request_rate" if self.concurrency is None else "concurrency"
            raise ConfigError(f"{name} is {load}; it must be more than 0")
        for name in ("adapters", "virtual_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")


@dataclass(frozen=True)
class ServingSplit:
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    running_requests_max: int = 64
    step_tokens_max: int = 512
    kv_tokens: int | None = None  # Of each replica; None: what memory allows.
    prefill_stall_ms_max: float = 15.0
    kv_dtype: str = "auto"  # Or fp8: keys and values in eight bits, of which only memory is told.

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "replicas", "running_requests_max", "step_tokens_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_stall_ms_max <= 0:
            raise ConfigError(
                f"prefill_stall_ms_max is {self.prefill_stall_ms_max}; it must be more than 0"
            )
        if self.running_requests_max > self.step_tokens_max:
            raise ConfigError(
                f"running_requests_max is {self.running_requests_max}, and a step has "
                f"{self.step_tokens_max} tokens (step_tokens_max); each that runs needs one"
            )

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.replicas


@dataclass(frozen=True)
class Percentiles:
    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[tuple[float, int]]) -> "Percentiles":
        """Of values, each of which came so often."""
        ordered = sorted(values)
        count = sum(times for _, times in ordered)
        if not count:
            return cls(0.0, 0.0, 0.0)

        def quantile(part: float) -> float:
            passed = 0
            for value, times in ordered:
                passed += times
                if passed >= part * count:
                    return value
            return ordered[-1][0]

        mean = sum(value * times for value, times in ordered) / count
        return cls(mean, quantile(0.5), quantile(0.95))


NEVER = Percentiles(math.inf, math.inf, math.inf)
NOTHING = Percentiles(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ServingEstimate:
    """Rates are of all replicas together; the ledger is of the fullest device.

    Where more comes than can be served, `utilization` is above 1 and waits are infinite.
    """

    ttft_ms: Percentiles
    itl_ms: Percentiles
    request_ms: Percentiles
    tokens_per_s: float
    requests_per_s: float
    concurrency: float  # Requests in the system, on average.
    utilization: float  # The part of the time in which steps run, or the load over the capacity.
    kv_tokens: int  # That each replica holds.
    memory: Ledger
    trust: Trust
    steps: int = 0  # That were played,
    step_tokens: float = 0.0  # and the new tokens in one, on average.
    preemptions: int = 0


def estimate_serving(
    model: GPTConfig,
    dtype: str,
    workload: Workload,
    split: ServingSplit,
    cluster: Cluster,
    costs: StepCosts | None,
) -> ServingEstimate:
    """What a server of this split would do under the workload. No costs: by the spec sheet.

    One whose memory has no room for a request serves nothing, and its ledger says so.
    """
    priced = price(model, dtype, split.tp, split.pp, cluster, costs)
    on_cpu = costs is not None and costs.kind == "cpu"
    memory, kv_tokens = serving_memory(model, dtype, split, cluster, on_cpu=on_cpu)
    longest = workload.virtual_tokens + workload.input_tokens.p95 + workload.output_tokens.p95
    if memory.verdict == "over" or kv_tokens < longest:
        return ServingEstimate(
            *(NEVER, NEVER, NEVER, 0.0, 0.0, 0.0, math.inf, kv_tokens, memory, priced.trust)
        )
    rules = Rules(
        running_max=split.running_requests_max,
        step_tokens_max=split.step_tokens_max,
        stall_s=split.prefill_stall_ms_max / 1000,
        kv_tokens=kv_tokens,
        stages=split.pp,
        block_tokens=BLOCK_TOKENS,
    )
    return _Told(workload, split, rules, priced).estimate(memory, priced.trust)


def serving_memory(
    model: GPTConfig, dtype: str, split: ServingSplit, cluster: Cluster, *, on_cpu: bool = False
) -> tuple[Ledger, int]:
    """What the fullest rank holds, and for how many tokens a replica has keys and values."""
    ranks = _ranks(model, split.tp, split.pp, dtype, split.kv_dtype)
    capacity = cluster.device.memory_bytes
    shared = split.tp * split.pp * split.replicas if on_cpu else 1
    workspace = _workspace(model, dtype, split, on_cpu=on_cpu)
    tokens = split.kv_tokens
    if tokens is None:
        tokens = kv_room(model, dtype, split, cluster, on_cpu=on_cpu)
        if on_cpu:  # More would only be cache.
            blocks = -(-model.max_position_embeddings // BLOCK_TOKENS)
            tokens = min(tokens, split.running_requests_max * blocks * BLOCK_TOKENS)
    fullest = max(ranks, key=lambda one: one.weight_bytes + tokens * one.kv_bytes_per_token)
    ledger = Ledger(
        capacity=capacity,
        weights=fullest.weight_bytes * shared,
        kv=(tokens + BLOCK_TOKENS) * fullest.kv_bytes_per_token * shared,
        workspace=workspace * shared,
    )
    return ledger, tokens


def kv_room(
    model: GPTConfig, dtype: str, split: ServingSplit, cluster: Cluster, *, on_cpu: bool = False
) -> int:
    """Tokens whose keys and values a server lets in where nobody says how many."""
    capacity = cluster.device.memory_bytes
    shared = split.tp * split.pp * split.replicas if on_cpu else 1
    workspace = _workspace(model, dtype, split, on_cpu=on_cpu)
    rooms = []
    for one in _ranks(model, split.tp, split.pp, dtype, split.kv_dtype):
        if not one.kv_bytes_per_token:
            continue
        if on_cpu:
            room = int(HOST_SHARE * max(0, capacity // shared - one.weight_bytes - workspace))
        else:
            room = int(FITS_SHARE * capacity) - one.weight_bytes - workspace
        rooms.append(room // one.kv_bytes_per_token)
    # Block 0 is nobody's.
    return max(0, min(rooms) // BLOCK_TOKENS - 1) * BLOCK_TOKENS


@lru_cache(maxsize=256)
def _ranks(model: GPTConfig, tp: int, pp: int, dtype: str, kv_dtype: str) -> list[RankCost]:
    """A search asks for the same ones thousands of times."""
    return rank_costs(model, tp, pp, dtype=dtype, kv_dtype=kv_dtype)


def _workspace(model: GPTConfig, dtype: str, split: ServingSplit, *, on_cpu: bool) -> int:
    """As the runner reserves it: a step's hidden states, logits in fp32, scores of prompts."""
    widths = 8 * model.hidden_size + 3 * model.ffn_hidden_size
    hidden = 2 * split.step_tokens_max * widths * DTYPE_BYTES[dtype]
    hidden += ADAPTER_ROWS * model.hidden_size * DTYPE_BYTES[dtype]
    logits = 4 * 4 * split.running_requests_max * model.vocab_size
    known = hidden + logits + SCORED_BYTES
    if on_cpu:
        return known
    return known + CONTEXT_BYTES + (GROUP_BYTES if split.tp * split.pp > 1 else 0)


@dataclass(frozen=True)
class _Told:
    """A workload on one replica, played and told for all of them."""

    workload: Workload
    split: ServingSplit
    rules: Rules
    priced: Priced

    def estimate(self, memory: Ledger, trust: Trust) -> ServingEstimate:
        simulated = simulation(self.priced.steps, self.rules)
        if self.workload.concurrency is not None:
            inside = min(self._concurrency, max(AT_ONCE_MAX, 2 * self.rules.running_max))
            played = simulated.closed(self._calls(1, inside), inside, self.priced.request_s)
            told = self._read(played, inside, memory, trust)
            return _queued(told, (self._concurrency - inside) * self.split.replicas)
        played = simulated.open(self._calls(1))
        told = self._read(played, 0, memory, trust)
        if told.requests_per_s >= (1 - BEHIND) * self._rate * self.split.replicas:
            return told
        # Either it was not steady yet, or it never will be.
        most = self._capacity()
        load = self._rate / most
        if load < 1:
            played = simulation(self.priced.steps, self.rules).open(self._calls(4))
            told = self._read(played, 0, memory, trust)
            return replace(told, utilization=min(load, told.utilization))
        return replace(told, ttft_ms=NEVER, request_ms=NEVER, utilization=load)

    def _capacity(self) -> float:
        """Requests a second of one that always has as many as may run."""
        full = 2 * self.rules.running_max
        played = simulation(self.priced.steps, self.rules).closed(self._calls(1, full), full, 0.0)
        since, until = _window(played, full)
        return sum(since < one.end_s <= until for one in played.calls) / max(until - since, 1e-9)

    def _read(
        self, played: Played, concurrency: int, memory: Ledger, trust: Trust
    ) -> ServingEstimate:
        since, until = _window(played, concurrency)
        span, replicas = max(until - since, 1e-9), self.split.replicas
        seen = [one for one in played.calls if since <= one.arrival_s <= until]
        gaps = [(gap, count) for gap, count, when in played.gaps if since < when <= until]
        ended = sum(since < one.end_s <= until for one in played.calls)
        firsts = sum(since < one.first_s <= until for one in played.calls)
        inside_s = sum(
            max(0.0, min(one.end_s + self.priced.request_s, until) - max(one.arrival_s, since))
            for one in played.calls
        )
        return ServingEstimate(
            ttft_ms=Percentiles.of([(self._ms(one, one.first_s), 1) for one in seen]),
            itl_ms=Percentiles.of([(1e3 * gap, count) for gap, count in gaps]),
            request_ms=Percentiles.of([(self._ms(one, one.end_s), 1) for one in seen]),
            tokens_per_s=replicas * (sum(count for _, count in gaps) + firsts) / span,
            requests_per_s=replicas * ended / span,
            concurrency=replicas * inside_s / span,
            utilization=played.busy_s / max(one.end_s for one in played.calls),
            kv_tokens=self.rules.kv_tokens,
            memory=memory,
            trust=trust,
            steps=played.steps,
            step_tokens=played.rows / max(1, played.steps),
            preemptions=played.preemptions,
        )

    def _ms(self, call: Call, until_s: float) -> float:
        """As a client sees it, who is a way off."""
        way_s = self.priced.request_s + self.priced.request_token_s * (call.prompt - call.cached)
        return 1e3 * (until_s - call.arrival_s + way_s)

    @property
    def _rate(self) -> float:
        assert self.workload.request_rate is not None
        return self.workload.request_rate / self.split.replicas

    @property
    def _concurrency(self) -> int:
        assert self.workload.concurrency is not None
        return max(1, round(self.workload.concurrency / self.split.replicas))

    def _calls(self, times: int, inside: int = 0) -> list[Call]:
        """So many times as many as are in the system at once, and several."""
        workload = self.workload
        least = CALLS_MIN if self.rules.stages == 1 else STAGED_CALLS_MIN
        count = round(min(CALLS_MAX, max(least, 5 * (inside or self._inside))) * times)
        prompts = workload.input_tokens.draw(count, 1)
        outputs = workload.output_tokens.draw(count, 2)
        # They stay in the cache, unless there are more than it holds beside what runs.
        known = workload.virtual_tokens
        if known * max(1, workload.adapters) > self.rules.kv_tokens // 2:
            known = 0
        arrivals = [0.0] * count
        if workload.concurrency is None:
            gaps = [-math.log(1 - (place + 0.5) / count) / self._rate for place in range(count)]
            random.Random(3).shuffle(gaps)
            now = 0.0
            for place, gap in enumerate(gaps):
                now += gap
                arrivals[place] = now
        return [
            Call(number, time, workload.virtual_tokens + prompt, output, known)
            for number, (time, prompt, output) in enumerate(
                zip(arrivals, prompts, outputs, strict=True)
            )
        ]

    @property
    def _inside(self) -> float:
        """About how many requests are in the system at once."""
        if self.workload.concurrency is not None:
            return self._concurrency
        workload, batch = self.workload, self.rules.running_max
        prompt, output = workload.input_tokens.mean, workload.output_tokens.mean
        context = batch * (prompt + output / 2)
        step_s = self.priced.steps.seconds(batch, batch, context, 0, batch)
        return self._rate * output * self.rules.stages * step_s


def _queued(told: ServingEstimate, more: int) -> ServingEstimate:
    """With more who wait: each for that many answers, as only so many are played."""
    if not more or not told.requests_per_s:
        return told
    wait_ms = 1e3 * more / told.requests_per_s
    ttft, request = (
        Percentiles(one.mean + wait_ms, one.p50 + wait_ms, one.p95 + wait_ms)
        for one in (told.ttft_ms, told.request_ms)
    )
    return replace(told, ttft_ms=ttft, request_ms=request, concurrency=told.concurrency + more)


def _window(played: Played, concurrency: int) -> tuple[float, float]:
    """From when a load is steady until nobody comes any more. 0: an open loop."""
    arrivals = sorted(one.arrival_s for one in played.calls)
    warm = int(WARM_SHARE * len(arrivals))
    if concurrency:
        # Those that are there at once begin alike, and end before it is steady.
        warm = min(max(warm, concurrency), len(arrivals) - 2)
    return arrivals[max(0, warm)], arrivals[-1]
