"""Training step time: matmul, attention, elementwise and collective time of a GPT layer.

Each time is an amount of work divided by the speed of the machine. The amounts are:
- Matmuls, including those of attention: FLOPs. The last wave of tiles of a matmul is only partly
  full, which adds time.
- Elementwise operations, and the scores of unfused attention: bytes moved in memory.
- Collectives: bytes sent in a ring.

`Efficiency` contains the fractions of the machine's speed that the software reaches;
`planning.training.efficiency` has the values.
"""

from dataclasses import dataclass, replace
from math import log

from gpt.config import GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.costs.linear_adapter import LinearAdapterCost
from gpt.costs.training import LayerWidths, Trainable, all_reduce_elements, layer_widths
from planning.hardware import Cluster

TILE = 256 * 128  # Number of elements in one output tile of a matmul on a GPU.
TILES_IN_FLIGHT = 108  # Number of tiles that a GPU computes at once. These tiles are one wave.

# Bytes that unfused attention moves per score: the first matmul writes the score, softmax and
# dropout (with its mask) read and write it, and the second matmul reads it. The backward pass does
# the same for the gradients, and reads the results of the forward pass again.
SCORE_BYTES = {"forward": 13, "backward": 19}
# Bytes of memory traffic per element of three tensors, in this order:
# - The hidden state: norms, residuals, and dropouts with their masks.
# - The inner tensor of the MLP: bias and activation.
# - The queries: copies before and after attention.
ELEMENT_BYTES = {"forward": (22, 2, 4), "backward": (30, 4, 10)}
# Time of the backward pass of fused attention, relative to the forward pass. The backward pass
# recomputes the scores, so it has five matmuls instead of two.
FUSED_BACKWARD = 2.5


@dataclass(frozen=True)
class Efficiency:
    """The speeds and overheads of training software on a machine.

    Speeds are fractions of the speeds in the specification sheet.
    """

    products: float  # Speed of 16-bit matmuls with many tiles.
    products_fp8: float  # Speed of fp8 matmuls with many tiles.
    tail: float  # Fraction of a wave of tiles that is lost at the end of a matmul.
    fused_attention: float  # Speed of the matmuls in fused attention.
    memory: float  # Speed of memory traffic.
    link: float  # Speed of collectives among the GPUs of a node.
    network: float  # Speed of collectives between nodes.
    start_s: float  # Latency of a collective or a message.
    # Sum of the idle times between a layer's kernels in the forward pass. The backward pass has
    # twice this time.
    gap_s: float
    # For each kind of communication, the fraction of its time that overlaps with computation.
    hidden_forward: float  # Tensor-parallel collectives in the forward pass.
    hidden_backward: float  # Tensor-parallel collectives in the backward pass.
    hidden_pipeline: float  # Messages between pipeline stages.
    hidden_data: float  # The all-reduce of gradients.
    optimizer_bytes: float  # Bytes of memory traffic of the optimizer step per parameter.
    gradient_bytes: float  # Bytes of a gradient element in the all-reduce.
    # Bytes of memory traffic of cross entropy per logit, forward and backward together.
    logit_bytes: float
    # The wait for the slowest node adds the fraction straggler_share * ln(nodes) to a step's time.
    straggler_share: float
    flash: bool  # Whether attention is fused by default.


@dataclass(frozen=True)
class LayerWork:
    """The work of one layer for one micro-batch, and the hardware and software that run it."""

    config: GPTConfig
    batch: int  # Number of sequences of the micro-batch.
    sequence: int  # Number of tokens of a sequence, without those of `context`.
    tp: int
    sequence_parallel: bool
    trainable: Trainable
    fp8: bool
    flash: bool
    cluster: Cluster
    efficiency: Efficiency
    # Number of tokens before those of `sequence` that are only attended to.
    context: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def memory_bytes_per_s(self) -> float:
        return self.cluster.device.memory_bytes_per_s * self.efficiency.memory


@dataclass(frozen=True)
class LayerPass:
    """Seconds of the forward or the backward pass of one layer."""

    matmuls: float
    attention: float
    elementwise: float  # Idle time between kernels included.
    tensor_parallel: float  # The part of the collectives that is not overlapped.

    @property
    def total(self) -> float:
        return self.matmuls + self.attention + self.elementwise + self.tensor_parallel


def forward(work: LayerWork) -> LayerPass:
    w, e = layer_widths(work.config), work.efficiency
    collectives = 2 * _all_reduce_s(work, work.tokens * w.hidden)
    return LayerPass(
        matmuls=sum(_matmul_s(work, *sizes) for sizes in _linear_shapes(work, w)),
        attention=_attention_s(work, w, backward=False),
        elementwise=_elementwise_s(work, w, backward=False),
        tensor_parallel=collectives * (1 - e.hidden_forward),
    )


def backward(work: LayerWork) -> LayerPass:
    """Return the time of the backward pass of a layer.

    If the weights are trained, collectives overlap with the matmuls of the weight gradients.
    Otherwise the collectives overlap as in the forward pass.
    """
    w, e = layer_widths(work.config), work.efficiency
    linears = _linear_shapes(work, w)
    trains_weights = work.trainable == "all"
    matmuls_s = sum(_matmul_s(work, m, k, n) for m, n, k in linears)  # Gradients of the inputs.
    if trains_weights:
        matmuls_s += sum(_matmul_s(work, k, n, m) for m, n, k in linears)  # Gradients of weights.
    # With sequence parallelism, the outputs of both norms are gathered again for the weight
    # gradients. These two all-gathers together take as long as one more all-reduce.
    all_reduce_count = 3 if trains_weights and work.sequence_parallel else 2
    hidden = e.hidden_backward if trains_weights else e.hidden_forward
    collectives = all_reduce_count * _all_reduce_s(work, work.tokens * w.hidden)
    return LayerPass(
        matmuls=matmuls_s,
        attention=_attention_s(work, w, backward=True),
        elementwise=_elementwise_s(work, w, backward=True),
        tensor_parallel=collectives * (1 - hidden),
    )


def lm_head_s(work: LayerWork) -> float:
    """Return the seconds of LM head and cross entropy: forward plus backward, in 16 bits."""
    h, v = work.config.hidden_size, work.config.vocab_size / work.tp
    work_16_bits = replace(work, fp8=False)
    forward_s = _matmul_s(work_16_bits, work.tokens, v, h)
    matmuls_s = forward_s + _matmul_s(work_16_bits, work.tokens, h, v)
    if work.trainable == "all":
        matmuls_s += _matmul_s(work_16_bits, h, v, work.tokens)
    return matmuls_s + work.efficiency.logit_bytes * work.tokens * v / work.memory_bytes_per_s


def stage_send_s(work: LayerWork) -> float:
    """Return the seconds to send hidden states to the next stage and their gradients back."""
    e, device = work.efficiency, work.cluster.device
    bytes_sent = 2 * work.tokens * work.config.hidden_size
    # The pipeline dimension is the outermost dimension of the ranks. With several nodes, some
    # neighboring stages are therefore on different nodes. Their messages take the longest, so all
    # messages are estimated at the speed of the network.
    if work.cluster.nodes == 1:
        bytes_per_s = device.link_bytes_per_s * e.link
    else:
        bytes_per_s = device.network_bytes_per_s * e.network
    seconds = e.start_s + bytes_sent / work.tp / bytes_per_s
    if work.tp > 1 and not work.sequence_parallel:
        # Each tensor rank sends 1 / tp of the hidden states; then an all-gather restores them.
        seconds += e.start_s + bytes_sent / (device.link_bytes_per_s * e.link)
    return 2 * seconds * (1 - e.hidden_pipeline)


def data_parallel_s(work: LayerWork, dp: int, rank_parameters: float) -> float:
    """Return the seconds of the all-reduce of a rank's gradients over `dp` ranks."""
    if dp == 1 or not rank_parameters:
        return 0.0
    e, cluster = work.efficiency, work.cluster
    # The GPUs of a node that reduce the same parameters divide the network traffic evenly.
    ranks_in_node = max(1, min(dp, cluster.gpus_per_node // work.tp))
    bytes_per_s = cluster.device.link_bytes_per_s * e.link
    if dp > ranks_in_node:
        bytes_per_s = min(
            bytes_per_s, ranks_in_node * cluster.device.network_bytes_per_s * e.network
        )
    volume = e.gradient_bytes * all_reduce_elements(rank_parameters, dp)
    return (e.start_s + volume / bytes_per_s) * (1 - e.hidden_data)


@dataclass(frozen=True)
class LowRankTime:
    """Seconds that an adapter's changes of the linears of a stage add to a step."""

    forward: float  # Per micro-batch.
    backward: float  # Per micro-batch.
    step: float  # Per step: the norms of changed weights, and sums over the tensor ranks.


def low_rank_time(work: LayerWork, cost: LinearAdapterCost) -> LowRankTime:
    """Return the time of the adapter weights with this cost.

    The products are narrow, so they take the time of their FLOPs or of their memory traffic,
    whichever is longer.
    """
    flops_per_s = work.cluster.device.flops * work.efficiency.products

    def seconds(flops: float, nbytes: float) -> float:
        return max(flops / flops_per_s, nbytes / work.memory_bytes_per_s)

    forward_flops = work.tokens * cost.flops_per_token
    # The gradients are in fp32, and an all-reduce has 16-bit elements.
    return LowRankTime(
        forward=seconds(forward_flops, work.tokens * cost.forward_bytes_per_token),
        backward=seconds(2 * forward_flops, work.tokens * cost.backward_bytes_per_token),
        step=seconds(cost.step_flops, cost.step_bytes) + _all_reduce_s(work, 2 * cost.replicated),
    )


def optimizer_s(work: LayerWork, trained_parameters: float) -> float:
    return work.efficiency.optimizer_bytes * trained_parameters / work.memory_bytes_per_s


def straggler_share(work: LayerWork) -> float:
    """Return the fraction of a step that is lost to waiting for the slowest node."""
    return work.efficiency.straggler_share * log(work.cluster.nodes)


def _linear_shapes(work: LayerWork, w: LayerWidths) -> list[tuple[float, float, float]]:
    """Return the (m, n, k) of a layer's four forward matmuls: (m, k) times (k, n) gives (m, n)."""
    rows, t = work.tokens, work.tp
    return [
        (rows, (w.queries + 2 * w.keys) / t, w.hidden),  # QKV.
        (rows, w.hidden, w.queries / t),  # proj.
        (rows, w.fc1 / t, w.hidden),
        (rows, w.hidden, w.fc2 / t),
    ]


def _matmul_s(work: LayerWork, m: float, n: float, k: float) -> float:
    """Return the seconds of a matmul, including the time that its last wave of tiles loses."""
    e, device = work.efficiency, work.cluster.device
    flops_per_s = device.flops_fp8 * e.products_fp8 if work.fp8 else device.flops * e.products
    return 2 * k * (m * n + e.tail * TILE * TILES_IN_FLIGHT) / flops_per_s


def _attention_s(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    e, device = work.efficiency, work.cluster.device
    if work.flash:
        # Fused attention skips the scores of later keys and of keys behind the window.
        span, end = attention_span(work.config), work.context + work.sequence
        area = span.score_area(end, causal=True)
        if work.context:
            area -= span.score_area(work.context, causal=True)
        flops = 4 * work.batch * area * w.queries / work.tp
        return flops * (FUSED_BACKWARD if backward else 1) / (device.flops * e.fused_attention)
    # Unfused attention computes all scores, and masks some of them.
    keys = work.context + work.sequence
    flops = 4 * work.tokens * keys * w.queries / work.tp
    scores = work.tokens * keys * w.heads / work.tp
    score_bytes = SCORE_BYTES["backward" if backward else "forward"] * scores
    matmuls_s = flops * (2 if backward else 1) / (device.flops * e.products)
    return matmuls_s + score_bytes / work.memory_bytes_per_s


def _elementwise_s(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    direction = "backward" if backward else "forward"
    hidden_bytes, mlp_bytes, query_bytes = ELEMENT_BYTES[direction]
    token_bytes = hidden_bytes * w.hidden / (work.tp if work.sequence_parallel else 1)
    token_bytes += (mlp_bytes * (w.fc1 + w.fc2) + query_bytes * w.queries) / work.tp
    token_bytes += _fp8_cast_bytes(work, w, backward=backward) / work.tp
    gaps_s = work.efficiency.gap_s * (2 if backward else 1)
    return work.tokens * token_bytes / work.memory_bytes_per_s + gaps_s


def _fp8_cast_bytes(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    """Return the bytes per token of the fp8 copies that are written before matmuls.

    They are copies of the inputs in the forward pass, and of the output gradients in the backward
    pass. If weights are trained, a transposed copy is written as well.
    """
    if not work.fp8:
        return 0.0
    input_width = 2 * w.hidden + w.queries + w.fc2
    output_width = w.queries + 2 * w.keys + w.fc1 + 2 * w.hidden
    copies = 2 if work.trainable == "all" else 1
    return copies * (output_width if backward else input_width)


def _all_reduce_s(work: LayerWork, elements: float) -> float:
    """Return the seconds of an all-reduce of 16-bit values over the tensor ranks.

    A reduce-scatter followed by an all-gather takes the same time.
    """
    if work.tp == 1:
        return 0.0
    e, cluster = work.efficiency, work.cluster
    ranks_in_node = min(work.tp, cluster.gpus_per_node)
    bytes_sent = 2 * all_reduce_elements(elements, ranks_in_node)
    seconds = e.start_s + bytes_sent / (cluster.device.link_bytes_per_s * e.link)
    nodes = -(-work.tp // ranks_in_node)
    if nodes > 1:
        # The GPUs of a node divide the network traffic of the node evenly.
        bytes_sent = 2 * all_reduce_elements(elements, nodes) / ranks_in_node
        seconds += e.start_s + bytes_sent / (cluster.device.network_bytes_per_s * e.network)
    return seconds
