"""What a server is wanted for, and what its memory has room for, before anything is played.

A wish knows the load, the limits and the machine; room is counted in bytes alone, from the same
ledger as everywhere. Knows no search. No torch.
"""

import math
from dataclasses import dataclass, replace

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.hardware import Cluster
from planning.inference.calibration_file import StepCosts
from planning.inference.estimate import (
    BLOCK_TOKENS,
    ServingSplit,
    Workload,
    kv_room,
    serving_memory,
)
from planning.inference.service_levels import OBJECTIVES, Limits, Objective
from planning.memory_ledger import Ledger, tight_share
from planning.plan import Standing


@dataclass(frozen=True)
class Posture:
    """How much a step takes of prompts: what the two settings that decide it are together."""

    step_tokens: int
    stall_ms: float


# Short gaps, the server's own defaults, and many tokens.
POSTURES = (Posture(256, 5.0), Posture(512, 15.0), Posture(2048, 1000.0))
USUAL = POSTURES[1]


@dataclass(frozen=True)
class Wish:
    """What is asked for. `fill`: each candidate has as many requests at once as it can run."""

    model: GPTConfig
    dtype: str
    workload: Workload
    limits: Limits
    cluster: Cluster
    costs: StepCosts | None = None
    objective: Objective = "throughput"
    fill: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective is {self.objective!r}; it is one of {', '.join(OBJECTIVES)}"
            )
        if self.fill:
            full = replace(self.workload, request_rate=None, concurrency=1)
            object.__setattr__(self, "workload", full)
        self.limits.check(self.workload)
        context = self.model.max_position_embeddings
        if self.longest > context:
            raise ConfigError(
                f"a request has up to {self.longest} tokens (the 95th percentiles of input and "
                f"output, and virtual ones), and the model's context is {context}; plan for at "
                f"most {context}"
            )

    @property
    def gpus(self) -> int:
        return min(self.cluster.gpus, self.limits.gpus_max or self.cluster.gpus)

    @property
    def longest(self) -> int:
        """Tokens of a long request."""
        asked = self.workload
        return math.ceil(asked.virtual_tokens + asked.input_tokens.p95 + asked.output_tokens.p95)

    @property
    def usual(self) -> int:
        """Tokens of a request at its end, on average."""
        asked = self.workload
        return math.ceil(asked.virtual_tokens + asked.input_tokens.mean + asked.output_tokens.mean)

    @property
    def on_cpu(self) -> bool:
        return self.costs is not None and self.costs.kind == "cpu"

    @property
    def device(self) -> str:
        """As the server's settings name it."""
        return "cpu" if self.on_cpu else "cuda"

    @property
    def closed(self) -> bool:
        return self.workload.request_rate is None

    def load(self, running: int, replicas: int) -> Workload:
        """What comes to a server that runs so many requests at once."""
        if not self.fill:
            return self.workload
        return replace(self.workload, request_rate=None, concurrency=running * replicas)


@dataclass(frozen=True)
class Room:
    """What one split's memory holds."""

    tokens: int  # Of keys and values.
    batch_max: int  # Average requests at once, for which that is enough.
    standing: Standing = "fits"
    memory: Ledger | None = None  # Where there is none for a single request.
    reason: str = ""


def room_of(wish: Wish, tp: int, pp: int, batch: int, posture: Posture) -> Room:
    """How many tokens a replica's memory holds, and requests of the usual length."""
    split = ServingSplit(tp, pp, 1, batch, max(batch, posture.step_tokens))
    limits = wish.limits
    most = tight_share(limits.memory_fraction)
    shares: tuple[tuple[float, Standing], ...] = ((limits.memory_share, "fits"), (most, "tight"))
    tokens = 0
    for share, standing in shares:
        tokens = _tokens(wish, split, share)
        if tokens >= wish.longest:
            return Room(tokens, max(1, tokens // wish.usual), standing)
    memory, _ = serving_memory(
        *(wish.model, wish.dtype, replace(split, kv_tokens=0), wish.cluster), on_cpu=wish.on_cpu
    )
    usable = limits.memory_share * memory.capacity
    fixed = memory.weights + memory.workspace
    if fixed > usable:
        reason = (
            f"weights take {memory.weights / 1e9:.1f} GB and a step {memory.workspace / 1e9:.1f} "
            f"of the {usable / 1e9:.1f} GB of each GPU that may be used"
        )
        return Room(0, 0, "rejected", memory, reason)
    reason = (
        f"beside weights of {memory.weights / 1e9:.1f} GB there is room for keys and values of "
        f"{tokens} tokens, and a request has up to {wish.longest}"
    )
    return Room(0, 0, "rejected", memory, reason)


def _tokens(wish: Wish, split: ServingSplit, share: float) -> int:
    """Tokens of keys and values with which the fullest device is full to that share; 0: none."""

    def ledger(tokens: int) -> tuple[Ledger, int]:
        given = replace(split, kv_tokens=tokens)
        return serving_memory(wish.model, wish.dtype, given, wish.cluster, on_cpu=wish.on_cpu)

    empty, _ = ledger(0)
    usable = share * empty.capacity
    each = max(1.0, empty.kv / BLOCK_TOKENS)  # Block 0 is nobody's.
    tokens = int(max(0.0, usable - empty.total) / each)
    # Another device may be the fullest now.
    full, _ = ledger(tokens)
    over = max(0.0, full.total - usable)
    tokens = max(0, tokens - math.ceil(over / max(1.0, full.kv / (tokens + BLOCK_TOKENS))))
    if wish.on_cpu:  # Where it is not told, the server leaves the machine more.
        tokens = min(tokens, kv_room(wish.model, wish.dtype, split, wish.cluster, on_cpu=True))
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def kv_wanted(wish: Wish, room: Room, batch: int) -> int:
    """A GPU's memory has no other use; a machine's has, so there as much as long requests need."""
    if not wish.on_cpu:
        return room.tokens
    # Each fills whole blocks, and has one to grow into.
    blocks = -(-wish.longest // BLOCK_TOKENS) + 1
    return min(room.tokens, batch * blocks * BLOCK_TOKENS)
