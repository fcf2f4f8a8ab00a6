"""FasterTransformer performance model: roofline latency of a GPT pass (FLOPs, bytes, messages).

The time of each part is a number of operations or bytes divided by a speed, or a number of messages
times a latency. A speed is the speed in the specification sheet times the fraction that single
kernels reach in measurements. `planning.published.fit_inference` fits the thirteen constants of
`FittedConstants` to published latencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, log2, sqrt

from gpt.config import GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.costs.layer_weights import layer_weights
from gpt.errors import ConfigError
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import local_kv_heads
from gpt.settings import suggest_nearest
from planning.hardware import Cluster, Device


@dataclass(frozen=True)
class FittedConstants:
    """The fitted constants. Times are for an A100."""

    weight_read: float = 0.882  # Fraction of the memory bandwidth at which weights are read.
    kv_read: float = 0.892  # Fraction of the memory bandwidth at which the KV cache is read.
    # Time of prefill attention without its matmuls, per head and pair of tokens.
    score_s: float = 8.68e-12
    element_s: float = 1.78e-10  # Time of a layer's small kernels per token and hidden unit.
    layer_s: float = 74.8e-6  # Delay between dependent kernels, per layer.
    width_s: float = 4.88e-9  # Delay between dependent kernels, per layer and hidden unit.
    prompt_layer_s: float = 346e-6  # Lower bound of a prefill layer's time, from kernel launches.
    latency: float = 1.08  # All-reduce latency in a layer / latency measured in isolation.
    node_s: float = 26.5e-6  # Additional all-reduce latency per doubling of the nodes.
    message_s: float = 1.47e-8  # Additional all-reduce time per square root of the bytes.
    draw_s: float = 8.0e-11  # Time of sampling per sequence and vocabulary entry.
    step_s: float = 502e-6  # Fixed time of a pass.
    # Waiting time of ranks / compute time of a layer, per doubling of the TP ranks in a node.
    wait: float = 0.0332


FITTED = FittedConstants()


@dataclass(frozen=True)
class KernelSpeeds:
    """Measured speeds of single kernels on a device. Each tuple is for 2, 4 and 8 ranks."""

    matmul_fraction: float  # Fraction of the peak FLOP/s that large matmuls reach.
    matmul_fraction_fp8: float  # Fraction of the peak fp8 FLOP/s; 0: the device has no fp8.
    bus_bytes_per_s: tuple[float, float, float]  # Bus bandwidth of a large all-reduce.
    all_reduce_s: tuple[float, float, float]  # Latency of a small all-reduce.
    # Speedup of small kernels relative to an A100. For a GPU that was not measured, it is the ratio
    # of the memory bandwidths.
    small_kernel_speedup: float


def _kernel_speeds(
    matmul_fractions: tuple[float, float],
    bus_gb_per_s: tuple[float, ...],
    all_reduce_us: tuple[float, ...],
    small_kernel_speedup: float,
) -> KernelSpeeds:
    bus_bytes_per_s = [1e9 * speed for speed in bus_gb_per_s]
    latencies_s = [1e-6 * latency for latency in all_reduce_us]
    return KernelSpeeds(
        *matmul_fractions,
        (bus_bytes_per_s[0], bus_bytes_per_s[1], bus_bytes_per_s[2]),
        (latencies_s[0], latencies_s[1], latencies_s[2]),
        small_kernel_speedup,
    )


_A100 = _kernel_speeds((0.91, 0.0), (193, 217, 222), (13, 16, 23), 1.0)
KERNEL_SPEEDS: Mapping[str, KernelSpeeds] = {
    "a100-40g": _A100,
    "a100-80g": _A100,
    "h100": _kernel_speeds((0.80, 0.53), (320, 349, 445), (7, 11, 17), 1.64),
    "h200": _kernel_speeds((0.77, 0.60), (315, 348, 460), (7, 11, 18), 2.35),
    "l40s": _kernel_speeds((0.62, 0.50), (20, 5.2, 1.4), (8, 16, 42), 0.42),
    "b200": _kernel_speeds((0.69, 0.48), (534, 634, 704), (11, 16, 27), 3.78),
}
A100_BANDWIDTH_BYTES = 2.039e12

# Bytes of a weight. int8 and int4 weights are dequantized when they are used.
WEIGHT_BYTES: Mapping[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}
FLOAT32_SLOWDOWN = 8  # Time of fp32 matmuls / time of 16-bit matmuls.

# These constants are estimated, because published latencies cannot distinguish their effects from
# the effects of the fitted constants.
SHARDED_FRACTION = 0.85  # Fraction of the small kernels' work that is divided over TP ranks.
ATTENTION_EFFICIENCY = 0.3  # Fraction of the peak FLOP/s that unfused attention matmuls reach.
ROOFLINE_SHARPNESS = 4  # Exponent of `_smooth_max`.
STAGE_SEND_S = 30e-6  # Latency of a message to the next stage.
# Maximum prompt tokens of a micro-batch in a pipeline; a longer prompt is a micro-batch of its own.
MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class BatchPass:
    """One forward pass of a batch."""

    sequences: float
    tokens: float  # Number of new tokens per sequence.
    context: float  # Number of tokens that each new token attends to.
    is_prefill: bool


@dataclass(frozen=True)
class ShardedModel:
    """A model with its dtype and its TP/PP split on a cluster."""

    model: GPTConfig
    dtype: str
    tp: int
    pp: int
    cluster: Cluster
    constants: FittedConstants = FITTED

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_BYTES:
            raise ConfigError(
                f"dtype is {self.dtype!r}; {suggest_nearest(self.dtype, WEIGHT_BYTES)}"
            )
        if self.dtype == "fp8" and not self.device.flops_fp8:
            raise ConfigError(
                f"{self.device.name} does not support fp8; set --dtype float16, or --dtype int8, "
                "which needs as little memory as fp8"
            )

    @property
    def device(self) -> Device:
        return self.cluster.device

    @property
    def kernel_speeds(self) -> KernelSpeeds:
        device = self.device
        if device.name in KERNEL_SPEEDS:
            return KERNEL_SPEEDS[device.name]
        bus = 0.7 * device.link_bytes_per_s
        bandwidth_ratio = device.memory_bytes_per_s / A100_BANDWIDTH_BYTES
        return KernelSpeeds(0.75, 0.5, (bus, bus, bus), _A100.all_reduce_s, bandwidth_ratio)

    @property
    def flops(self) -> float:
        if self.dtype == "fp8":
            return self.device.flops_fp8 * self.kernel_speeds.matmul_fraction_fp8
        slowdown = FLOAT32_SLOWDOWN if self.dtype == "float32" else 1
        return self.device.flops * self.kernel_speeds.matmul_fraction / slowdown

    @property
    def activation_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


# ------------------------------------------------------------------------------------ one pass


def pass_seconds(sharded_model: ShardedModel, batch: BatchPass) -> dict[str, float]:
    """Return the seconds of each part of a pass through all stages.

    With several stages, the batch is divided into pipelined micro-batches.
    """
    micro_batches = _micro_batch_count(sharded_model, batch)
    micro_batch = BatchPass(
        batch.sequences / micro_batches, batch.tokens, batch.context, batch.is_prefill
    )
    layer_parts = layer_seconds(sharded_model, micro_batch)
    stage_sizes = [
        len(layers) for (layers,) in stage_layers(sharded_model.model.num_layers, sharded_model.pp)
    ]
    # The first micro-batch passes all layers; each later micro-batch adds the time of the largest
    # stage.
    sequential_layers = sum(stage_sizes) + (micro_batches - 1) * max(stage_sizes)
    parts = {name: seconds * sequential_layers for name, seconds in layer_parts.items()}
    parts["head"] = _lm_head_s(sharded_model, batch)
    parts["sampling"] = _sampling_s(sharded_model, batch)
    if sharded_model.pp > 1:
        parts["hops"] = (micro_batches + sharded_model.pp - 1) * _stage_send_s(
            sharded_model, micro_batch
        )
    return parts


def _micro_batch_count(sharded_model: ShardedModel, batch: BatchPass) -> int:
    if sharded_model.pp == 1:
        return 1
    micro_batches = sharded_model.pp
    if batch.is_prefill:
        micro_batches = max(
            micro_batches, ceil(batch.sequences * batch.tokens / MICRO_BATCH_TOKENS)
        )
    return max(1, min(int(batch.sequences), micro_batches))


def layer_seconds(sharded_model: ShardedModel, batch: BatchPass) -> dict[str, float]:
    """Return the seconds of each part of a layer.

    If only some layers are MoE layers, the seconds are means over all layers.
    """
    constants = sharded_model.constants
    model = sharded_model.model
    tp = sharded_model.tp
    rows = batch.sequences * batch.tokens
    sharded_share = 1 - SHARDED_FRACTION + SHARDED_FRACTION / tp
    parts = {
        "products": _matmul_s(sharded_model, rows),
        "attention": _attention_s(sharded_model, batch),
        "small kernels": constants.element_s
        * sharded_share
        * rows
        * model.hidden_size
        / sharded_model.kernel_speeds.small_kernel_speedup,
    }
    ranks = min(tp, sharded_model.cluster.gpus_per_node)
    parts["waiting"] = constants.wait * log2(ranks) * sum(parts.values())
    parts["overhead"] = constants.layer_s + constants.width_s * model.hidden_size
    parts["all-reduce"] = 2 * all_reduce_s(sharded_model, rows * model.hidden_size)
    if batch.is_prefill:
        # A layer's kernels run while the kernels of the next layer are launched. A layer therefore
        # takes the longer of the two times.
        busy_s = sum(parts.values())
        parts["overhead"] += _smooth_max(busy_s, constants.prompt_layer_s) - busy_s
    return parts


def _matmul_s(sharded_model: ShardedModel, rows: float) -> float:
    weights = layer_weights(sharded_model.model, rows, tp=sharded_model.tp)
    compute_s = 2 * rows * weights.used / sharded_model.flops
    bytes_read = weights.read * WEIGHT_BYTES[sharded_model.dtype]
    return _smooth_max(compute_s, bytes_read / _weight_read_bytes_per_s(sharded_model))


def _weight_read_bytes_per_s(sharded_model: ShardedModel) -> float:
    return sharded_model.device.memory_bytes_per_s * sharded_model.constants.weight_read


def layer_weights_per_rank(model: GPTConfig, tp: int) -> float:
    """Return the number of all matrix weights of a layer on one rank."""
    return layer_weights(model, inf, tp=tp).read


def _attention_s(sharded_model: ShardedModel, batch: BatchPass) -> float:
    model = sharded_model.model
    tp = sharded_model.tp
    constants = sharded_model.constants
    context = attention_span(model).keys(batch.context)
    if batch.is_prefill:
        scores = batch.sequences * batch.tokens * context * model.num_attention_heads / tp
        matmul_s = (
            4 * scores * model.kv_channels / (ATTENTION_EFFICIENCY * sharded_model.device.flops)
        )
        speedup = sharded_model.kernel_speeds.small_kernel_speedup
        return matmul_s + constants.score_s * scores / speedup
    kv_bytes = 2 * local_kv_heads(model, tp) * model.kv_channels * sharded_model.activation_bytes
    bytes_per_s = sharded_model.device.memory_bytes_per_s * constants.kv_read
    return batch.sequences * context * kv_bytes / bytes_per_s


def _lm_head_s(sharded_model: ShardedModel, batch: BatchPass) -> float:
    weights = sharded_model.model.vocab_size * sharded_model.model.hidden_size / sharded_model.tp
    read_s = weights * sharded_model.activation_bytes / _weight_read_bytes_per_s(sharded_model)
    slowdown = FLOAT32_SLOWDOWN if sharded_model.dtype == "float32" else 1
    flops = sharded_model.device.flops * sharded_model.kernel_speeds.matmul_fraction / slowdown
    return _smooth_max(2 * batch.sequences * weights / flops, read_s)


def _sampling_s(sharded_model: ShardedModel, batch: BatchPass) -> float:
    constants = sharded_model.constants
    logit_count = batch.sequences * sharded_model.model.vocab_size
    speedup = sharded_model.kernel_speeds.small_kernel_speedup
    return constants.step_s + constants.draw_s * logit_count / speedup


def _smooth_max(first_s: float, second_s: float) -> float:
    """Return the smooth maximum (first_s ** k + second_s ** k) ** (1 / k), k = ROOFLINE_SHARPNESS.

    The smooth maximum is slightly above the larger value if both are similar.
    """
    high, low = max(first_s, second_s), min(first_s, second_s)
    return float(high * (1 + (low / high) ** ROOFLINE_SHARPNESS) ** (1 / ROOFLINE_SHARPNESS))


# -------------------------------------------------------------------------------- communication


def all_reduce_s(sharded_model: ShardedModel, elements: float) -> float:
    """Return the seconds of an all-reduce of `elements` activations over the TP ranks.

    Between nodes, the ring uses all network cards of a node.
    """
    tp = sharded_model.tp
    cluster = sharded_model.cluster
    constants = sharded_model.constants
    if tp == 1:
        return 0.0
    bus, latency = _all_reduce_speed(sharded_model.kernel_speeds, min(tp, cluster.gpus_per_node))
    nodes = -(-tp // cluster.gpus_per_node)
    if nodes > 1:
        bus = min(bus, cluster.gpus_per_node * cluster.device.network_bytes_per_s)
    bytes_sent = 2 * elements * sharded_model.activation_bytes * (tp - 1) / tp
    seconds = constants.latency * latency + constants.node_s * log2(nodes)
    return seconds + constants.message_s * sqrt(bytes_sent) + bytes_sent / bus


def _all_reduce_speed(kernel_speeds: KernelSpeeds, ranks: int) -> tuple[float, float]:
    index = 0 if ranks <= 2 else 1 if ranks <= 4 else 2
    return kernel_speeds.bus_bytes_per_s[index], kernel_speeds.all_reduce_s[index]


def _stage_send_s(sharded_model: ShardedModel, batch: BatchPass) -> float:
    cluster = sharded_model.cluster
    is_in_node = sharded_model.tp * sharded_model.pp <= cluster.gpus_per_node
    bytes_per_s = (
        cluster.device.link_bytes_per_s if is_in_node else cluster.device.network_bytes_per_s
    )
    rows = batch.sequences * batch.tokens
    hidden_bytes = rows * sharded_model.model.hidden_size * sharded_model.activation_bytes
    return STAGE_SEND_S + hidden_bytes / sharded_model.tp / bytes_per_s
