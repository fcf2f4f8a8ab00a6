"""FasterTransformer: what one pass of a batch through a GPT takes on given GPUs, part by part.

A part is a count of operations, bytes or messages over a speed. Speeds are the spec sheet's, cut to
what single kernels were measured to get of them, and thirteen constants that
`planning.published.fit_inference` fits to published latencies. It knows of batches, not of
requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2, sqrt

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.sharding import local_groups, stage_layers
from gpt.settings import nearest
from planning.hardware import Cluster, Device


@dataclass(frozen=True)
class Constants:
    """What is fitted. The seconds are an A100's."""

    weight_read: float = 0.882  # Of the bandwidth.
    kv_read: float = 0.892
    score_s: float = 8.68e-12  # A prompt's score: of a head, a token, and a token it looks at.
    element_s: float = 1.78e-10  # All small kernels of a layer: a token and an element of width.
    layer_s: float = 74.8e-6  # Kernels in a layer that wait for each other.
    width_s: float = 4.88e-9  # How much longer they take: an element of width.
    prompt_layer_s: float = 346e-6  # Starting a layer's kernels for a prompt takes at least that.
    latency: float = 1.08  # An all-reduce between kernels, over one measured alone.
    node_s: float = 26.5e-6  # More latency, for each doubling of the nodes.
    message_s: float = 1.47e-8  # More again: times the root of the bytes.
    draw_s: float = 8.0e-11  # Sampling: a sequence and an entry of the vocabulary.
    step_s: float = 502e-6  # Once a pass.
    wait: float = 0.0332  # Of the work, for each doubling of the ranks: the slowest one is late.


FITTED = Constants()


@dataclass(frozen=True)
class Kernels:
    """What single kernels were measured to get of a device; three numbers are for 2, 4, 8 ranks."""

    product: float  # Of the spec sheet's FLOP/s, where matrices are large.
    product_fp8: float
    bus_bytes: tuple[float, float, float]  # A large all-reduce.
    reduce_s: tuple[float, float, float]  # A small one.
    vector: float  # How much faster than an A100 small kernels run: as its memory is, if unknown.


def _kernels(
    product: tuple[float, float], bus_gb: tuple[float, ...], us: tuple[float, ...], vector: float
) -> Kernels:
    bus, latency = [1e9 * x for x in bus_gb], [1e-6 * x for x in us]
    return Kernels(*product, (bus[0], bus[1], bus[2]), (latency[0], latency[1], latency[2]), vector)


_A100 = _kernels((0.91, 0.0), (193, 217, 222), (13, 16, 23), 1.0)
KERNELS: Mapping[str, Kernels] = {
    "a100-40g": _A100,
    "a100-80g": _A100,
    "h100": _kernels((0.80, 0.53), (320, 349, 445), (7, 11, 17), 1.64),
    "h200": _kernels((0.77, 0.60), (315, 348, 460), (7, 11, 18), 2.35),
    "l40s": _kernels((0.62, 0.50), (20, 5.2, 1.4), (8, 16, 42), 0.42),
    "b200": _kernels((0.69, 0.48), (534, 634, 704), (11, 16, 27), 3.78),
}
A100_BANDWIDTH_BYTES = 2.039e12

# Bytes of a weight, and of an activation. Weights of 8 and 4 bits are widened where they are used.
WEIGHT_BYTES: Mapping[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}
FLOAT32_SLOWER = 8  # Than 16 bits: it has no fast path.

# Not fitted. Latencies hardly tell these from the constants above.
SHARDED = 0.85  # Of the small kernels' work, what tensor ranks divide among them.
ATTENTION = 0.3  # Of the spec sheet's FLOP/s: the two products of unfused attention.
SHARPNESS = 4  # How suddenly a product turns from waiting for memory to computing.
HOP_S = 30e-6  # To the next stage.
MICRO_BATCH_TOKENS = 2048  # A prompt's pass goes through a pipeline in pieces of at most this.


@dataclass(frozen=True)
class Batch:
    """One pass of it: so many sequences, each with so many new tokens, that see so many."""

    sequences: float
    tokens: float
    context: float
    prompt: bool


@dataclass(frozen=True)
class Machine:
    """A model as it is split on a cluster."""

    model: GPTConfig
    dtype: str
    tp: int
    pp: int
    cluster: Cluster
    constants: Constants = FITTED

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; {nearest(self.dtype, WEIGHT_BYTES)}")
        if self.dtype == "fp8" and not self.device.flops_fp8:
            raise ConfigError(
                f"{self.device.name} has no products of 8-bit floats; --dtype float16 it can, and "
                "--dtype int8 takes as little memory"
            )

    @property
    def device(self) -> Device:
        return self.cluster.device

    @property
    def kernels(self) -> Kernels:
        device = self.device
        if device.name in KERNELS:
            return KERNELS[device.name]
        bus = 0.7 * device.link_bytes
        faster = device.bandwidth_bytes / A100_BANDWIDTH_BYTES
        return Kernels(0.75, 0.5, (bus, bus, bus), _A100.reduce_s, faster)

    @property
    def flops(self) -> float:
        if self.dtype == "fp8":
            return self.device.flops_fp8 * self.kernels.product_fp8
        slower = FLOAT32_SLOWER if self.dtype == "float32" else 1
        return self.device.flops * self.kernels.product / slower

    @property
    def activation_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


# ------------------------------------------------------------------------------------ one pass


def pass_seconds(machine: Machine, batch: Batch) -> dict[str, float]:
    """Seconds of a pass through all stages, by parts. Pieces of the batch follow each other."""
    pieces = _pieces(machine, batch)
    piece = Batch(batch.sequences / pieces, batch.tokens, batch.context, batch.prompt)
    each = layer_seconds(machine, piece)
    stages = [len(layers) for (layers,) in stage_layers(machine.model.num_layers, machine.pp)]
    # The first piece goes through all layers; the others follow at the slowest stage's pace.
    layers = sum(stages) + (pieces - 1) * max(stages)
    parts = {name: seconds * layers for name, seconds in each.items()}
    parts["head"] = _head(machine, batch)
    parts["sampling"] = _sampling(machine, batch)
    if machine.pp > 1:
        parts["hops"] = (pieces + machine.pp - 1) * _hop(machine, piece)
    return parts


def _pieces(machine: Machine, batch: Batch) -> int:
    if machine.pp == 1:
        return 1
    wanted = machine.pp
    if batch.prompt:
        wanted = max(wanted, ceil(batch.sequences * batch.tokens / MICRO_BATCH_TOKENS))
    return max(1, min(int(batch.sequences), wanted))


def layer_seconds(machine: Machine, batch: Batch) -> dict[str, float]:
    """Of a layer, the mean one where they differ."""
    c, model, tp = machine.constants, machine.model, machine.tp
    rows = batch.sequences * batch.tokens
    shared = 1 - SHARDED + SHARDED / tp
    parts = {
        "products": _products(machine, rows),
        "attention": _attention(machine, batch),
        "small kernels": c.element_s * shared * rows * model.hidden_size / machine.kernels.vector,
    }
    ranks = min(tp, machine.cluster.gpus_per_node)
    parts["waiting"] = c.wait * log2(ranks) * sum(parts.values())
    parts["overhead"] = c.layer_s + c.width_s * model.hidden_size
    parts["all-reduce"] = 2 * all_reduce_s(machine, rows * model.hidden_size)
    if batch.prompt:
        # A layer's kernels run while the next one's are started: the slower of both counts.
        busy = sum(parts.values())
        parts["overhead"] += _either(busy, c.prompt_layer_s) - busy
    return parts


def _products(machine: Machine, rows: float) -> float:
    used, read = _mean_weights(machine.model, machine.tp, rows)
    compute = 2 * rows * used / machine.flops
    return _either(compute, read * WEIGHT_BYTES[machine.dtype] / _weight_bytes_s(machine))


def _weight_bytes_s(machine: Machine) -> float:
    return machine.device.bandwidth_bytes * machine.constants.weight_read


def _mean_weights(model: GPTConfig, tp: int, rows: float) -> tuple[float, float]:
    """A rank's weights that a token is multiplied with in a layer, and those that `rows` read."""
    h, d = model.hidden_size, model.kv_channels
    queries = model.num_attention_heads * d / tp
    attention = h * (2 * queries + 2 * local_groups(model, tp) * d)
    matrices = (3 if model.gated else 2) * h / tp
    experts = sum(model.moe_layers) / model.num_layers
    dense = (1 - experts) * matrices * model.ffn_hidden_size
    if not experts:
        return attention + dense, attention + dense
    shared = experts * matrices * model.moe_shared_expert_intermediate_size
    one = experts * matrices * model.moe_ffn_hidden_size
    chosen, count = model.moe_router_topk, model.num_experts
    touched = count * (1 - (1 - chosen / count) ** max(1.0, rows))
    always = attention + dense + shared
    return always + chosen * one, always + touched * one


def held_weights(model: GPTConfig, tp: int) -> float:
    """All of a layer's matrices on a rank."""
    return _mean_weights(model, tp, float("inf"))[1]


def _attention(machine: Machine, batch: Batch) -> float:
    model, tp, c = machine.model, machine.tp, machine.constants
    seen = min(batch.context, model.window_size or batch.context)
    if batch.prompt:
        scores = batch.sequences * batch.tokens * seen * model.num_attention_heads / tp
        product = 4 * scores * model.kv_channels / (ATTENTION * machine.device.flops)
        return product + c.score_s * scores / machine.kernels.vector
    width = 2 * local_groups(model, tp) * model.kv_channels * machine.activation_bytes
    return batch.sequences * seen * width / (machine.device.bandwidth_bytes * c.kv_read)


def _head(machine: Machine, batch: Batch) -> float:
    weights = machine.model.vocab_size * machine.model.hidden_size / machine.tp
    read = weights * machine.activation_bytes / _weight_bytes_s(machine)
    slower = FLOAT32_SLOWER if machine.dtype == "float32" else 1
    flops = machine.device.flops * machine.kernels.product / slower
    return _either(2 * batch.sequences * weights / flops, read)


def _sampling(machine: Machine, batch: Batch) -> float:
    c = machine.constants
    drawn = batch.sequences * machine.model.vocab_size
    return c.step_s + c.draw_s * drawn / machine.kernels.vector


def _either(one: float, other: float) -> float:
    """The larger one, a little more where they are alike."""
    high, low = max(one, other), min(one, other)
    return float(high * (1 + (low / high) ** SHARPNESS) ** (1 / SHARPNESS))


# ------------------------------------------------------------------------------------- messages


def all_reduce_s(machine: Machine, elements: float) -> float:
    """Among the tensor ranks. Beyond a node, all of its network cards carry a part of the ring."""
    tp, cluster, c = machine.tp, machine.cluster, machine.constants
    if tp == 1:
        return 0.0
    bus, latency = _all_reduce(machine.kernels, min(tp, cluster.gpus_per_node))
    nodes = -(-tp // cluster.gpus_per_node)
    if nodes > 1:
        bus = min(bus, cluster.gpus_per_node * cluster.device.network_bytes)
    passed = 2 * elements * machine.activation_bytes * (tp - 1) / tp
    seconds = c.latency * latency + c.node_s * log2(nodes)
    return seconds + c.message_s * sqrt(passed) + passed / bus


def _all_reduce(kernels: Kernels, ranks: int) -> tuple[float, float]:
    place = 0 if ranks <= 2 else 1 if ranks <= 4 else 2
    return kernels.bus_bytes[place], kernels.reduce_s[place]


def _hop(machine: Machine, batch: Batch) -> float:
    cluster = machine.cluster
    inside = machine.tp * machine.pp <= cluster.gpus_per_node
    speed = cluster.device.link_bytes if inside else cluster.device.network_bytes
    rows = batch.sequences * batch.tokens
    return HOP_S + rows * machine.model.hidden_size * machine.activation_bytes / machine.tp / speed
