"""Serving estimate: time to first token, inter-token latency and throughput of a configuration.

The requests of the workload are simulated by the scheduler's rules, with step durations from the
step cost model. Latencies are computed from the simulated times as a load generator computes them
from measured times. Queueing is simulated too. But if a closed loop has more clients than the
simulation allows, the excess clients only add waiting time (`_with_queue`). The module does not
import torch, and runs no server.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.costs.inference import RankCost, rank_costs
from gpt.errors import ConfigError
from planning.hardware import Cluster
from planning.inference.adapter_memory import ServedAdapters, server_memory_mb
from planning.inference.calibration_file import Calibration
from planning.inference.kv_capacity import request_tokens_max, requests_that_fit, sequence_blocks
from planning.inference.model_split import ModelSplit
from planning.inference.simulator import (
    SchedulerRules,
    SimulatedRequest,
    SimulationResult,
    make_simulation,
)
from planning.inference.step_pricing import StepPrices, price_adapters, price_steps
from planning.memory_ledger import MemoryLedger
from planning.plan import Confidence
from serving.memory_budget import (
    ADAPTER_PAGE_BYTES,
    ADAPTER_ROWS_MAX,
    KV_BLOCK_TOKENS,
    KVBlockLayout,
    check_step_tokens,
    kv_cache_bytes,
    running_kv_tokens_max,
    workspace_bytes,
)

# Limits of the number of simulated requests, which must suffice for percentiles and a steady load.
SIMULATED_REQUESTS_MIN, SIMULATED_REQUESTS_MAX = 160, 3000
# Maximum concurrency that is simulated, unless 2 * running_requests_max is larger.
SIMULATED_CONCURRENCY_MAX = 1000
# Replaces SIMULATED_REQUESTS_MIN if there are several pipeline stages. It is smaller, because the
# simulation of a pipeline takes longer: each step is simulated separately.
PIPELINE_REQUESTS_MIN = 60
WARMUP_FRACTION = 0.25  # Fraction of the requests that arrive before the load counts as steady.
# If more than this fraction of the arriving requests does not finish in the simulated time, the
# load is not steady yet or the server is overloaded. The server is overloaded if the request rate
# exceeds the capacity.
BACKLOG_GROWTH_MAX = 0.05
# GPU memory of a process that has no tensors: the CUDA context and buffers of libraries.
CUDA_CONTEXT_BYTES = 1 << 30
PROCESS_GROUP_BYTES = 400 << 20  # Communication buffers, if there is more than one rank.
# The largest ratio of 95th percentile to mean that a lognormal distribution can have.
P95_OVER_MEAN_MAX = math.exp(0.5 * NormalDist().inv_cdf(0.95) ** 2)


@dataclass(frozen=True)
class LengthDistribution:
    """The distribution of a token count over requests; constant if `mean` equals `p95`."""

    mean: float
    p95: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < float("inf"):
            raise ConfigError(
                f"the mean number of input or output tokens is {self.mean}; it must be at least 1, "
                "and finite"
            )
        if not self.mean <= self.p95 <= P95_OVER_MEAN_MAX * self.mean:
            raise ConfigError(
                f"the 95th percentile of input or output tokens is {self.p95:g}, and the mean is "
                f"{self.mean:g}; the percentile must be from {self.mean:g} to "
                f"{P95_OVER_MEAN_MAX * self.mean:.0f}"
            )

    def sample_lengths(self, count: int, seed: int) -> list[int]:
        """Return `count` lengths in random order.

        The lengths are quantiles of the lognormal distribution with this mean and p95.
        """
        # A lognormal distribution has mean = exp(mu + sigma^2 / 2) and p95 = exp(mu + z * sigma),
        # where z is the 0.95 quantile of the normal distribution. It follows that
        #   sigma^2 - 2 z sigma + 2 ln(p95 / mean) = 0.
        # `sigma` is the smaller solution.
        z = NormalDist().inv_cdf(0.95)
        sigma = z - math.sqrt(max(0.0, z**2 - 2 * math.log(self.p95 / self.mean)))
        mu = math.log(self.mean) - sigma**2 / 2
        normal_quantiles = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
        quantiles = [math.exp(mu + sigma * variate) for variate in normal_quantiles]
        # The quantiles lack the tail of the distribution; the scale restores the mean.
        scale = self.mean * count / sum(quantiles)
        lengths = [max(1, round(quantile * scale)) for quantile in quantiles]
        random.Random(seed).shuffle(lengths)
        return lengths


@dataclass(frozen=True)
class Workload:
    """The requests of a load. Either `request_rate` or `concurrency` is set."""

    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    request_rate: float | None  # Open loop: requests per second, arriving as a Poisson process.
    concurrency: int | None  # Closed loop: number of clients with one request at a time.
    adapters: int = 0
    # Number of virtual tokens at the start of each prompt, usually in the prefix cache.
    virtual_tokens: int = 0
    # Each request uses one of these linear adapters; None: the adapters have virtual tokens.
    served_adapters: ServedAdapters | None = None

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.concurrency is None):
            raise ConfigError("a workload needs exactly one of request_rate and concurrency")
        rate_or_concurrency = (
            self.request_rate if self.request_rate is not None else self.concurrency
        )
        assert rate_or_concurrency is not None
        if not 0 < rate_or_concurrency < float("inf"):
            name = "request_rate" if self.concurrency is None else "concurrency"
            raise ConfigError(
                f"{name} is {rate_or_concurrency}; it must be more than 0, and finite"
            )
        for name in ("adapters", "virtual_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")

    @property
    def request_tokens_mean(self) -> int:
        """Number of tokens of a finished request of average length."""
        return math.ceil(self.virtual_tokens + self.input_tokens.mean + self.output_tokens.mean)

    @property
    def request_tokens_p95(self) -> int:
        """Number of tokens of a long request: virtual tokens + p95 of input + p95 of output."""
        return math.ceil(self.virtual_tokens + self.input_tokens.p95 + self.output_tokens.p95)


@dataclass(frozen=True)
class ServingSplit:
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    running_requests_max: int = 64
    step_tokens_max: int = 512
    # Size of a replica's KV cache in tokens; None: the default of the server (`kv_token_capacity`).
    kv_tokens: int | None = None
    prefill_stall_ms_max: float = 15.0
    kv_dtype: str = "auto"  # "auto" or "fp8"; affects the memory, but not the step time.
    ep: int = 1
    # Size of the memory for linear adapters on each rank; None: there are no such adapters. A
    # server's memory has at least its default size.
    adapter_memory_mb: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "replicas", "running_requests_max", "step_tokens_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_stall_ms_max <= 0:
            raise ConfigError(
                f"prefill_stall_ms_max is {self.prefill_stall_ms_max}; it must be more than 0"
            )
        check_step_tokens(self.running_requests_max, self.step_tokens_max)

    @property
    def model_split(self) -> ModelSplit:
        return ModelSplit(self.tp, self.pp, self.ep)

    @property
    def gpus(self) -> int:
        return self.model_split.ranks * self.replicas


@dataclass(frozen=True)
class Percentiles:
    mean: float
    p50: float
    p95: float

    @classmethod
    def from_weighted(cls, values: Sequence[tuple[float, int]]) -> "Percentiles":
        """Return the mean and the percentiles of (value, weight) pairs; all are 0 without pairs."""
        ordered = sorted(values)
        count = sum(weight for _, weight in ordered)
        if not count:
            return cls(0.0, 0.0, 0.0)

        def quantile(fraction: float) -> float:
            cumulative_weight = 0
            for value, weight in ordered:
                cumulative_weight += weight
                if cumulative_weight >= fraction * count:
                    return value
            return ordered[-1][0]

        mean = sum(value * weight for value, weight in ordered) / count
        return cls(mean, quantile(0.5), quantile(0.95))


INFINITE_LATENCY = Percentiles(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class ServingEstimate:
    """The predicted figures of a configuration under a workload.

    Rates are totals over all replicas. `memory` is the ledger of the device that needs the most
    memory. Under overload, `utilization` is at least 1, TTFT and request time are infinite, and the
    other figures are those of the simulated part of the load.
    """

    ttft_ms: Percentiles
    itl_ms: Percentiles
    request_ms: Percentiles
    tokens_per_s: float
    requests_per_s: float
    concurrency: float  # Mean number of requests in the system.
    # Fraction of time in which steps run. Under overload: request rate divided by capacity.
    # Infinite: the memory is too small for the weights or for one request.
    utilization: float
    kv_tokens: int  # Size of each replica's KV cache in tokens.
    # Number of requests of average length that each replica's KV cache holds.
    kv_requests: int
    memory: MemoryLedger
    confidence: Confidence
    steps: int = 0  # Number of simulated steps.
    step_tokens: float = 0.0  # Mean number of new tokens in a step.
    preemptions: int = 0


def estimate_serving(
    model: GPTConfig,
    dtype: str,
    workload: Workload,
    split: ServingSplit,
    cluster: Cluster,
    calibration: Calibration | None,
) -> ServingEstimate:
    """Predict the figures of a server under a workload.

    Step costs come from the calibration or, if it is None, from the specification sheet. If the
    weights or one request do not fit in memory, all latencies are infinite.
    """
    prices = price_steps(model, dtype, split.model_split, cluster, calibration)
    if workload.served_adapters is not None:
        prices = price_adapters(
            prices,
            model,
            dtype,
            workload.served_adapters,
            split.model_split,
            cluster=cluster,
            calibration=calibration,
        )
    on_cpu = calibration is not None and calibration.kind == "cpu"
    memory, kv_tokens = serving_memory(model, dtype, split, cluster, on_cpu=on_cpu)
    is_too_small = request_tokens_max(model, kv_tokens) < workload.request_tokens_p95
    if memory.verdict == "over" or is_too_small:
        return ServingEstimate(
            ttft_ms=INFINITE_LATENCY,
            itl_ms=INFINITE_LATENCY,
            request_ms=INFINITE_LATENCY,
            tokens_per_s=0.0,
            requests_per_s=0.0,
            concurrency=0.0,
            utilization=math.inf,
            kv_tokens=kv_tokens,
            kv_requests=0,
            memory=memory,
            confidence=prices.confidence,
        )
    rules = SchedulerRules(
        running_requests_max=split.running_requests_max,
        step_tokens_max=split.step_tokens_max,
        prefill_stall_s=split.prefill_stall_ms_max / 1000,
        kv_tokens=kv_tokens,
        pipeline_stages=split.pp,
        block_tokens=KV_BLOCK_TOKENS,
        windows=sequence_blocks(model).windows,
        attention_span=attention_span(model),
    )
    kv_requests = requests_that_fit(model, kv_tokens, workload.request_tokens_mean)
    load_estimator = _LoadEstimator(workload, split, rules, kv_requests, prices)
    return load_estimator.estimate(memory, prices.confidence)


def serving_memory(
    model: GPTConfig, dtype: str, split: ServingSplit, cluster: Cluster, *, on_cpu: bool = False
) -> tuple[MemoryLedger, int]:
    """Return the memory ledger of the fullest device, and a replica's KV cache size in tokens."""
    ranks = _cached_rank_costs(model, split.model_split, dtype, split.kv_dtype)
    capacity = cluster.device.memory_bytes
    ranks_per_device = _ranks_per_device(split, on_cpu=on_cpu)
    workspace = _workspace_bytes(model, dtype, split, on_cpu=on_cpu)
    kv_tokens = split.kv_tokens
    if kv_tokens is None:
        kv_tokens = kv_token_capacity(model, dtype, split, cluster, on_cpu=on_cpu)
        if on_cpu:
            # On a CPU, the server limits its default in the same way: more tokens would only extend
            # the prefix cache.
            tokens_max = running_kv_tokens_max(
                split.running_requests_max, model.max_position_embeddings, KV_BLOCK_TOKENS
            )
            kv_tokens = min(kv_tokens, tokens_max)
    blocks = sequence_blocks(model).count(kv_tokens, 0) + 1  # With block 0.
    fullest = max(
        ranks, key=lambda rank: rank.weight_bytes + blocks * _block_layout(model, rank).block_bytes
    )
    ledger = MemoryLedger(
        capacity=capacity,
        weights=fullest.weight_bytes * ranks_per_device,
        kv=blocks * _block_layout(model, fullest).block_bytes * ranks_per_device,
        adapters=_adapter_bytes(split, on_cpu=on_cpu) * ranks_per_device,
        workspace=workspace * ranks_per_device,
    )
    return ledger, kv_tokens


def kv_token_capacity(
    model: GPTConfig, dtype: str, split: ServingSplit, cluster: Cluster, *, on_cpu: bool = False
) -> int:
    """Return the KV cache size in tokens that fills the server's default share of the memory."""
    memory_bytes = cluster.device.memory_bytes // _ranks_per_device(split, on_cpu=on_cpu)

    def kv_bytes(reserved_bytes: int) -> int:
        # A server computes the size of its KV cache from the memory that is free after loading. The
        # planner does not know this memory, and plans a KV cache that is usually smaller
        # (`_workspace_bytes` describes an exception):
        # - GPU: 0.9 * total memory - weights - workspace, because a plan fits if all parts together
        #   need at most 0.9 of the memory. The server's KV cache is larger by 0.1 * (weights + CUDA
        #   context + communication buffers), and by the difference between the estimated workspace
        #   and the memory of a step that the server measures.
        # - CPU: 0.25 * (total memory - weights - workspace). The server's KV cache is larger by
        #   0.25 * workspace. With 1.3B parameters on 64 GiB, the server has 84,000 tokens, and the
        #   plan 83,472.
        return kv_cache_bytes(memory_bytes, reserved_bytes, on_cpu=on_cpu)

    return _kv_tokens_of_ranks(model, dtype, split, kv_bytes, on_cpu=on_cpu)


def kv_tokens_within(
    model: GPTConfig,
    dtype: str,
    split: ServingSplit,
    usable_bytes: float,
    *,
    on_cpu: bool = False,
) -> int:
    """Return the largest KV cache size in tokens with which no device needs over `usable_bytes`."""
    rank_bytes = int(usable_bytes / _ranks_per_device(split, on_cpu=on_cpu))
    return _kv_tokens_of_ranks(
        model, dtype, split, lambda reserved_bytes: rank_bytes - reserved_bytes, on_cpu=on_cpu
    )


def _kv_tokens_of_ranks(
    model: GPTConfig,
    dtype: str,
    split: ServingSplit,
    kv_bytes: Callable[[int], int],
    *,
    on_cpu: bool,
) -> int:
    """Return the size in tokens of the smallest KV cache of a rank; all ranks have this size.

    `kv_bytes` returns a rank's bytes for the KV cache. Its argument is the bytes of the rank's
    weights, adapters and workspace.
    """
    workspace = _workspace_bytes(model, dtype, split, on_cpu=on_cpu)
    workspace += _adapter_bytes(split, on_cpu=on_cpu)
    token_capacities = []
    for rank in _cached_rank_costs(model, split.model_split, dtype, split.kv_dtype):
        if rank.kv_bytes_per_token:
            layout = _block_layout(model, rank)
            blocks = layout.blocks_within(max(0, kv_bytes(rank.weight_bytes + workspace)))
            token_capacities.append(layout.token_capacity(blocks))
    return min(token_capacities)


def _ranks_per_device(split: ServingSplit, *, on_cpu: bool) -> int:
    """Return the number of ranks that share the memory: on a CPU all ranks of all replicas."""
    return split.gpus if on_cpu else 1


def _block_layout(model: GPTConfig, rank: RankCost) -> KVBlockLayout:
    groups = len(sequence_blocks(model).windows)
    return KVBlockLayout(KV_BLOCK_TOKENS, rank.kv_bytes_per_token // groups, groups)


@lru_cache(maxsize=256)
def _cached_rank_costs(
    model: GPTConfig, split: ModelSplit, dtype: str, kv_dtype: str
) -> list[RankCost]:
    """Return `rank_costs(...)`, cached because a search needs the same costs thousands of times."""
    return rank_costs(model, split.tp, split.pp, dtype=dtype, kv_dtype=kv_dtype, ep=split.ep)


def _workspace_bytes(model: GPTConfig, dtype: str, split: ServingSplit, *, on_cpu: bool) -> int:
    """Return a rank's bytes other than weights and KV cache, as the memory ledger counts them.

    They differ from the bytes that a server reserves:
    - They are an estimate; a server on a GPU measures the memory of its largest steps.
    - On a GPU they include the CUDA context and communication buffers. The free memory that a
      server measures already excludes these.
    - They exclude CUDA graphs, the rows of speculative decoding and the history of penalties, which
      the planner does not model. With a small model, the server's KV cache may therefore be smaller
      than the planned one.
    """
    total_bytes = workspace_bytes(
        model,
        DTYPE_BYTES[dtype],
        step_tokens_max=split.step_tokens_max,
        logits_rows=split.running_requests_max,
        adapter_rows=ADAPTER_ROWS_MAX,
    )
    if on_cpu:
        return total_bytes
    communication_bytes = PROCESS_GROUP_BYTES if split.model_split.ranks > 1 else 0
    return total_bytes + CUDA_CONTEXT_BYTES + communication_bytes


def _adapter_bytes(split: ServingSplit, *, on_cpu: bool) -> int:
    """Return the bytes of a rank's adapter memory; on a CPU, of its pages that adapters need."""
    planned_mb = split.adapter_memory_mb
    memory_mb = planned_mb or 0 if on_cpu else server_memory_mb(planned_mb)
    return memory_mb * 1_000_000 // ADAPTER_PAGE_BYTES * ADAPTER_PAGE_BYTES


@dataclass(frozen=True)
class _LoadEstimator:
    """Simulates a workload on one replica, and scales its figures to all replicas."""

    workload: Workload
    split: ServingSplit
    rules: SchedulerRules
    kv_requests: int  # As in `ServingEstimate`.
    prices: StepPrices

    def estimate(self, memory: MemoryLedger, confidence: Confidence) -> ServingEstimate:
        simulator = make_simulation(self.prices.steps, self.rules)
        if self.workload.concurrency is not None:
            concurrency = min(
                self._replica_concurrency,
                max(SIMULATED_CONCURRENCY_MAX, 2 * self.rules.running_requests_max),
            )
            simulation_result = simulator.run_closed_loop(
                self._make_requests(1, concurrency), concurrency, self.prices.request_s
            )
            estimate = self._summarize(simulation_result, concurrency, memory, confidence)
            return _with_queue(
                estimate, (self._replica_concurrency - concurrency) * self.split.replicas
            )
        simulation_result = simulator.run_open_loop(self._make_requests(1))
        estimate = self._summarize(simulation_result, 0, memory, confidence)
        if (
            estimate.requests_per_s
            >= (1 - BACKLOG_GROWTH_MAX) * self._replica_request_rate * self.split.replicas
        ):
            return estimate
        # The simulated load is not steady yet, or the server is overloaded.
        capacity = self._requests_per_s_max()
        utilization = self._replica_request_rate / capacity
        if utilization < 1:
            simulation_result = make_simulation(self.prices.steps, self.rules).run_open_loop(
                self._make_requests(4)
            )
            estimate = self._summarize(simulation_result, 0, memory, confidence)
            return replace(estimate, utilization=min(utilization, estimate.utilization))
        return replace(
            estimate, ttft_ms=INFINITE_LATENCY, request_ms=INFINITE_LATENCY, utilization=utilization
        )

    def _requests_per_s_max(self) -> float:
        """Return the capacity of one replica: requests per second if its queue is never empty."""
        concurrency = 2 * self.rules.running_requests_max
        simulation_result = make_simulation(self.prices.steps, self.rules).run_closed_loop(
            self._make_requests(1, concurrency), concurrency, 0.0
        )
        start_s, end_s = _steady_window(simulation_result, concurrency)
        finished_count = sum(
            start_s < request.end_s <= end_s for request in simulation_result.requests
        )
        return finished_count / max(end_s - start_s, 1e-9)

    def _summarize(
        self,
        simulation_result: SimulationResult,
        concurrency: int,
        memory: MemoryLedger,
        confidence: Confidence,
    ) -> ServingEstimate:
        """Return the figures of the time in which the load is steady.

        `concurrency` is 0 for an open loop.
        """
        start_s, end_s = _steady_window(simulation_result, concurrency)
        window_s, replicas = max(end_s - start_s, 1e-9), self.split.replicas
        arrivals = [
            request
            for request in simulation_result.requests
            if start_s <= request.arrival_s <= end_s
        ]
        gaps = [
            (gap, count)
            for gap, count, gap_end_s in simulation_result.token_gaps
            if start_s < gap_end_s <= end_s
        ]
        finished_count = sum(
            start_s < request.end_s <= end_s for request in simulation_result.requests
        )
        first_token_count = sum(
            start_s < request.first_token_s <= end_s for request in simulation_result.requests
        )
        # The time in the window that each request spends in the system, summed over the requests.
        in_system_s = sum(
            max(
                0.0,
                min(request.end_s + self.prices.request_s, end_s) - max(request.arrival_s, start_s),
            )
            for request in simulation_result.requests
        )
        return ServingEstimate(
            ttft_ms=Percentiles.from_weighted(
                [
                    (self._client_latency_ms(request, request.first_token_s), 1)
                    for request in arrivals
                ]
            ),
            itl_ms=Percentiles.from_weighted([(1e3 * gap, count) for gap, count in gaps]),
            request_ms=Percentiles.from_weighted(
                [(self._client_latency_ms(request, request.end_s), 1) for request in arrivals]
            ),
            tokens_per_s=replicas
            * (sum(count for _, count in gaps) + first_token_count)
            / window_s,
            requests_per_s=replicas * finished_count / window_s,
            concurrency=replicas * in_system_s / window_s,
            utilization=simulation_result.busy_s
            / max(request.end_s for request in simulation_result.requests),
            kv_tokens=self.rules.kv_tokens,
            kv_requests=self.kv_requests,
            memory=memory,
            confidence=confidence,
            steps=simulation_result.steps,
            step_tokens=simulation_result.tokens / max(1, simulation_result.steps),
            preemptions=simulation_result.preemptions,
        )

    def _client_latency_ms(self, request: SimulatedRequest, until_s: float) -> float:
        """Return the milliseconds from the request's arrival to `until_s`, as a client sees them.

        The latency includes the overhead of the server outside of the engine.
        """
        overhead_s = self.prices.request_s + self.prices.request_token_s * (
            request.prompt_tokens - request.cached_tokens
        )
        return 1e3 * (until_s - request.arrival_s + overhead_s)

    @property
    def _replica_request_rate(self) -> float:
        assert self.workload.request_rate is not None
        return self.workload.request_rate / self.split.replicas

    @property
    def _replica_concurrency(self) -> int:
        assert self.workload.concurrency is not None
        return max(1, round(self.workload.concurrency / self.split.replicas))

    def _make_requests(self, count_factor: int, concurrency: int = 0) -> list[SimulatedRequest]:
        """Return the requests to simulate.

        Their number is
          count_factor * min(SIMULATED_REQUESTS_MAX, max(requests_min, 5 * concurrency))
        where requests_min is SIMULATED_REQUESTS_MIN for one pipeline stage, and
        PIPELINE_REQUESTS_MIN for several. If `concurrency` is 0, `_expected_concurrency` replaces
        it.
        """
        workload = self.workload
        requests_min = (
            SIMULATED_REQUESTS_MIN if self.rules.pipeline_stages == 1 else PIPELINE_REQUESTS_MIN
        )
        count = round(
            min(
                SIMULATED_REQUESTS_MAX,
                max(requests_min, 5 * (concurrency or self._expected_concurrency)),
            )
            * count_factor
        )
        prompts = workload.input_tokens.sample_lengths(count, 1)
        outputs = workload.output_tokens.sample_lengths(count, 2)
        # The virtual tokens of all adapters stay in the prefix cache, unless they would fill more
        # than half of the KV cache.
        cached_tokens = workload.virtual_tokens
        if cached_tokens * max(1, workload.adapters) > self.rules.kv_tokens // 2:
            cached_tokens = 0
        arrivals = [0.0] * count
        if workload.concurrency is None:
            # The gaps between arrivals are quantiles of the exponential distribution, in random
            # order.
            gaps = [
                -math.log(1 - (index + 0.5) / count) / self._replica_request_rate
                for index in range(count)
            ]
            random.Random(3).shuffle(gaps)
            now = 0.0
            for index, gap in enumerate(gaps):
                now += gap
                arrivals[index] = now
        return [
            SimulatedRequest(number, time, workload.virtual_tokens + prompt, output, cached_tokens)
            for number, (time, prompt, output) in enumerate(
                zip(arrivals, prompts, outputs, strict=True)
            )
        ]

    @property
    def _expected_concurrency(self) -> float:
        """The approximate number of requests that are in one replica at once.

        For an open loop, the number is the request rate times the duration of a request (Little's
        law). The duration is estimated as output tokens * pipeline stages * time of a decode step
        with a full batch.
        """
        if self.workload.concurrency is not None:
            return self._replica_concurrency
        workload, batch = self.workload, self.rules.running_requests_max
        prompt, output = workload.input_tokens.mean, workload.output_tokens.mean
        context = batch * self.rules.attention_span.keys(prompt + output / 2)
        step_s = self.prices.steps.step_seconds(batch, batch, context, 0, batch)
        return self._replica_request_rate * output * self.rules.pipeline_stages * step_s


def _with_queue(estimate: ServingEstimate, queued_requests: int) -> ServingEstimate:
    """Add the waiting time in a queue of `queued_requests` that were not simulated."""
    if not queued_requests or not estimate.requests_per_s:
        return estimate
    wait_ms = 1e3 * queued_requests / estimate.requests_per_s
    ttft, request = (
        Percentiles(
            percentiles.mean + wait_ms, percentiles.p50 + wait_ms, percentiles.p95 + wait_ms
        )
        for percentiles in (estimate.ttft_ms, estimate.request_ms)
    )
    return replace(
        estimate,
        ttft_ms=ttft,
        request_ms=request,
        concurrency=estimate.concurrency + queued_requests,
    )


def _steady_window(simulation_result: SimulationResult, concurrency: int) -> tuple[float, float]:
    """Return the start and the end of the time in which the load is steady, in seconds.

    The end is the last arrival. `concurrency` is 0 for an open loop.
    """
    arrivals = sorted(request.arrival_s for request in simulation_result.requests)
    warmup_count = int(WARMUP_FRACTION * len(arrivals))
    if concurrency:
        # The first `concurrency` requests start together, so they do not represent a steady load.
        warmup_count = min(max(warmup_count, concurrency), len(arrivals) - 2)
    return arrivals[max(0, warmup_count)], arrivals[-1]
