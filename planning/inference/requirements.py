"""Serving requirements (workload, limits, hardware, objective) and KV-cache memory capacity.

The capacity is computed from the memory ledger, without a simulation. The search is in
`planning.inference.search`. The module does not import torch.
"""

from dataclasses import dataclass, replace

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import check_spec
from gpt.errors import ConfigError
from planning.hardware import Cluster
from planning.inference.calibration_file import Calibration
from planning.inference.estimate import (
    ServingSplit,
    Workload,
    kv_token_capacity,
    kv_tokens_within,
    serving_memory,
)
from planning.inference.kv_capacity import (
    kv_tokens_for_requests,
    request_tokens_max,
    requests_that_fit,
)
from planning.inference.model_split import ModelSplit
from planning.inference.service_levels import OBJECTIVES, Objective, ServiceLimits
from planning.memory_ledger import MemoryLedger, tight_share
from planning.plan import Feasibility


@dataclass(frozen=True)
class PrefillPreset:
    """Values of the two server settings that limit the prefill tokens of a step."""

    step_tokens_max: int
    prefill_stall_ms_max: float


# In this order: the preset for short inter-token latency, the server's defaults, and the preset for
# high throughput.
PREFILL_PRESETS = (PrefillPreset(256, 5.0), PrefillPreset(512, 15.0), PrefillPreset(2048, 1000.0))
DEFAULT_PREFILL_PRESET = PREFILL_PRESETS[1]


@dataclass(frozen=True)
class Requirements:
    """The input of a serving plan: model, workload, limits, hardware and objective.

    With `saturate`, the concurrency of each candidate is its `running_requests_max` times its
    number of replicas; `request_rate` and `concurrency` of `workload` are ignored.
    """

    model: GPTConfig
    dtype: str
    workload: Workload
    limits: ServiceLimits
    cluster: Cluster
    calibration: Calibration | None = None
    objective: Objective = "throughput"
    saturate: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective is {self.objective!r}; choose one of: {', '.join(OBJECTIVES)}"
            )
        if self.saturate:
            saturated_workload = replace(self.workload, request_rate=None, concurrency=1)
            object.__setattr__(self, "workload", saturated_workload)
        self.limits.check_workload(self.workload)
        if self.workload.served_adapters is not None:
            check_spec(self.model, self.workload.served_adapters.spec)
        context = self.model.max_position_embeddings
        if self.request_tokens_p95 > context:
            raise ConfigError(
                f"a request has up to {self.request_tokens_p95} tokens (virtual tokens and the "
                "95th percentiles of input and output), and the model's context length is "
                f"{context}; reduce the lengths until their sum is at most {context}"
            )

    @property
    def gpus(self) -> int:
        """Maximum number of GPUs of a candidate."""
        return min(self.cluster.gpus, self.limits.gpus_max or self.cluster.gpus)

    @property
    def request_tokens_p95(self) -> int:
        return self.workload.request_tokens_p95

    @property
    def request_tokens_mean(self) -> int:
        return self.workload.request_tokens_mean

    @property
    def on_cpu(self) -> bool:
        return self.calibration is not None and self.calibration.kind == "cpu"

    @property
    def device(self) -> str:
        """The value of the server's `device` setting."""
        return "cpu" if self.on_cpu else "cuda"

    @property
    def is_closed_loop(self) -> bool:
        return self.workload.request_rate is None

    def adapter_memory_mb(self, model_split: ModelSplit, running_requests_max: int) -> int | None:
        """Return the size of the memory for the adapters of all running requests.

        None: the requests have no linear adapters.
        """
        adapters = self.workload.served_adapters
        if adapters is None:
            return None
        resident = adapters.resident(running_requests_max)
        return adapters.memory_mb(self.model, self.dtype, model_split, resident)

    def workload_for(self, running_requests_max: int, replicas: int) -> Workload:
        """Return the workload to simulate for a candidate with these settings."""
        if not self.saturate:
            return self.workload
        return replace(
            self.workload, request_rate=None, concurrency=running_requests_max * replicas
        )


@dataclass(frozen=True)
class MemoryCapacity:
    """The largest KV cache that fits in the memory of one replica."""

    kv_tokens: int  # Number of tokens in the KV cache.
    running_requests_max: int  # Number of requests of average length that fit in the KV cache.
    feasibility: Feasibility = "fits"
    memory: MemoryLedger | None = None  # Set if the split is rejected.
    reason: str = ""  # Why the split is rejected; "": it fits or is tight.


def memory_capacity(
    requirements: Requirements, model_split: ModelSplit, batch: int, preset: PrefillPreset
) -> MemoryCapacity:
    """Return the KV cache capacity of a replica.

    The KV cache fills the usable share of the memory (`fits`). If this share is too small for one
    request, the KV cache fills the share of tight plans (`tight`). If that share is also too small,
    the split is rejected.
    """
    split = ServingSplit(
        **model_split._asdict(),
        running_requests_max=batch,
        step_tokens_max=max(batch, preset.step_tokens_max),
        adapter_memory_mb=requirements.adapter_memory_mb(model_split, batch),
    )
    limits = requirements.limits
    memory_shares: tuple[tuple[float, Feasibility], ...] = (
        (limits.usable_memory_share, "fits"),
        (tight_share(limits.memory_fraction), "tight"),
    )
    kv_tokens = 0
    for share, feasibility in memory_shares:
        kv_tokens = _kv_tokens_within(requirements, split, share)
        if request_tokens_max(requirements.model, kv_tokens) >= requirements.request_tokens_p95:
            requests = requests_that_fit(
                requirements.model, kv_tokens, requirements.request_tokens_mean
            )
            return MemoryCapacity(kv_tokens, max(1, requests), feasibility)
    memory, _ = serving_memory(
        requirements.model,
        requirements.dtype,
        replace(split, kv_tokens=0),
        requirements.cluster,
        on_cpu=requirements.on_cpu,
    )
    usable_bytes = limits.usable_memory_share * memory.capacity
    reserved_bytes = memory.workspace + memory.adapters
    if memory.weights + reserved_bytes > usable_bytes:
        reason = (
            f"weights take {memory.weights / 1e9:.1f} GB, and a step's workspace and adapters take "
            f"{reserved_bytes / 1e9:.1f} GB, but only {usable_bytes / 1e9:.1f} GB per GPU are "
            "usable"
        )
        return MemoryCapacity(0, 0, "rejected", memory, reason)
    reason = (
        f"beside {memory.weights / 1e9:.1f} GB of weights, the KV cache holds {kv_tokens} tokens, "
        f"but a request has up to {requirements.request_tokens_p95} tokens"
    )
    return MemoryCapacity(0, 0, "rejected", memory, reason)


def _kv_tokens_within(requirements: Requirements, split: ServingSplit, share: float) -> int:
    """Return the size in tokens of the largest KV cache that fits in `share` of the memory.

    The size is a whole number of blocks. The device that needs the most memory limits the size.
    """
    tokens = kv_tokens_within(
        requirements.model,
        requirements.dtype,
        split,
        share * requirements.cluster.device.memory_bytes,
        on_cpu=requirements.on_cpu,
    )
    if requirements.on_cpu:
        # The limit is the server's default size, which leaves memory for other processes.
        tokens = min(
            tokens,
            kv_token_capacity(
                requirements.model, requirements.dtype, split, requirements.cluster, on_cpu=True
            ),
        )
    return tokens


def kv_tokens_needed(
    requirements: Requirements, capacity: MemoryCapacity, batch: int, step_tokens_max: int
) -> int:
    """Return the size in tokens of the KV cache to configure.

    On a GPU it is the capacity. On a CPU, whose memory has other uses, it is at most the size that
    `batch` long requests need.
    """
    if not requirements.on_cpu:
        return capacity.kv_tokens
    kv_tokens = kv_tokens_for_requests(
        requirements.model, batch, requirements.request_tokens_p95, step_tokens_max
    )
    return min(capacity.kv_tokens, kv_tokens)
