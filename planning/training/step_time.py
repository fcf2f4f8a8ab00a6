"""Training step time: matmul, attention, elementwise and collective time of a GPT layer.

Each time is an amount of work divided by the speed of the machine. The work of matmuls is counted
in tiles, of attention in scores, of elementwise operations in bytes moved, and of collectives in
the bytes sent in a ring, each for the forward and the backward pass. `Efficiency` contains the
fractions of the machine's speed that the software reaches; `planning.training.efficiency` has the
values.
"""

from dataclasses import dataclass, replace
from math import log

from gpt.config import GPTConfig
from gpt.costs.training import LayerWidths, Trainable, all_reduce_elements, layer_widths
from planning.hardware import Cluster

# Number of elements of an output tile of a GPU matmul, and of tiles that a GPU computes at once.
TILE = 256 * 128
TILES_IN_FLIGHT = 108

# Bytes that unfused attention moves per score: the first matmul writes the score, softmax and
# dropout (with its mask) read and write it, and the second matmul reads it. The backward pass does
# the same for the gradients, and reads the results of the forward pass again.
SCORE_BYTES = {"forward": 13, "backward": 19}
# Bytes per element of the hidden state (norms, residuals, dropouts with masks), of the MLP's inner
# tensor (bias and activation), and of the queries (copies around attention).
ELEMENT_BYTES = {"forward": (22, 2, 4), "backward": (30, 4, 10)}
# Fused attention recomputes the scores in the backward pass: five matmuls instead of two.
FUSED_BACKWARD = 2.5


@dataclass(frozen=True)
class Efficiency:
    """The speeds and overheads that training software reaches on a machine.

    Speeds are fractions of the speeds in the specification sheet.
    """

    products: float  # Speed of 16-bit matmuls with many tiles.
    products_fp8: float
    tail: float  # Fraction of a round of tiles that is lost at the end of a matmul.
    fused_attention: float  # Speed of the matmuls in fused attention.
    memory: float  # Speed of memory traffic.
    link: float  # Speed of collectives among the GPUs of a node.
    network: float  # Speed of collectives between nodes.
    start_s: float  # Latency of a collective or a message.
    gap_s: float  # Idle time between a layer's kernels, forward; twice as much backward.
    # Fractions of the communication time that overlaps with computation: of tensor-parallel
    # collectives in the forward and the backward pass, of pipeline messages, and of gradients.
    hidden_forward: float
    hidden_backward: float
    hidden_pipeline: float
    hidden_data: float
    optimizer_bytes: float  # Memory traffic of the optimizer step per parameter.
    gradient_bytes: float  # Size of a gradient element in the all-reduce.
    logit_bytes: float  # Memory traffic of cross entropy per logit, forward and backward.
    straggler_share: float  # Fraction of time added by waiting for the slowest node, per ln(nodes).
    flash: bool  # Whether attention is fused by default.


@dataclass(frozen=True)
class LayerWork:
    """The work of one layer for one micro-batch, and the hardware and software that run it."""

    config: GPTConfig
    batch: int
    sequence: int
    tp: int
    sequence_parallel: bool
    trainable: Trainable
    fp8: bool
    flash: bool
    cluster: Cluster
    efficiency: Efficiency

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
    """Return the time of the backward pass.

    If the weights are trained, the matmuls of their gradients overlap with collectives.
    """
    w, e = layer_widths(work.config), work.efficiency
    linears = _linear_shapes(work, w)
    trains_weights = work.trainable == "all"
    products = sum(_matmul_s(work, m, k, n) for m, n, k in linears)
    if trains_weights:
        products += sum(_matmul_s(work, k, n, m) for m, n, k in linears)
    # With sequence parallelism, weight gradients need one more all-gather of the norms' outputs.
    collective_count = 3 if trains_weights and work.sequence_parallel else 2
    hidden = e.hidden_backward if trains_weights else e.hidden_forward
    collectives = collective_count * _all_reduce_s(work, work.tokens * w.hidden)
    return LayerPass(
        matmuls=products,
        attention=_attention_s(work, w, backward=True),
        elementwise=_elementwise_s(work, w, backward=True),
        tensor_parallel=collectives * (1 - hidden),
    )


def lm_head_s(work: LayerWork) -> float:
    """Return the seconds of LM head and cross entropy, forward and backward, always in 16 bits."""
    h, v = work.config.hidden_size, work.config.vocab_size / work.tp
    unquantized_work = replace(work, fp8=False)
    products = _matmul_s(unquantized_work, work.tokens, v, h) + _matmul_s(
        unquantized_work, work.tokens, h, v
    )
    if work.trainable == "all":
        products += _matmul_s(unquantized_work, h, v, work.tokens)
    return products + work.efficiency.logit_bytes * work.tokens * v / work.memory_bytes_per_s


def stage_send_s(work: LayerWork) -> float:
    """Return the seconds to send hidden states to the next stage and their gradients back."""
    e, device = work.efficiency, work.cluster.device
    bytes_sent = 2 * work.tokens * work.config.hidden_size
    # The pipeline dimension is the outermost dimension of the ranks, so with more than one node a
    # boundary of two stages is between nodes.
    is_single_node = work.cluster.nodes == 1
    bytes_per_s = (
        device.link_bytes_per_s * e.link
        if is_single_node
        else device.network_bytes_per_s * e.network
    )
    seconds = e.start_s + bytes_sent / work.tp / bytes_per_s
    if work.tp > 1 and not work.sequence_parallel:
        # Each tensor rank sends its share; then an all-gather restores the hidden states.
        seconds += e.start_s + bytes_sent / (device.link_bytes_per_s * e.link)
    return 2 * seconds * (1 - e.hidden_pipeline)


def data_parallel_s(work: LayerWork, dp: int, rank_parameters: float) -> float:
    """Return the seconds of the all-reduce of a rank's gradients over `dp` ranks."""
    if dp == 1 or work.trainable == "adapter":
        return 0.0
    e, cluster = work.efficiency, work.cluster
    # The GPUs of a node that reduce the same parameters divide the network traffic among them.
    ranks_in_node = max(1, min(dp, cluster.gpus_per_node // work.tp))
    bytes_per_s = cluster.device.link_bytes_per_s * e.link
    if dp > ranks_in_node:
        bytes_per_s = min(
            bytes_per_s, ranks_in_node * cluster.device.network_bytes_per_s * e.network
        )
    volume = e.gradient_bytes * all_reduce_elements(rank_parameters, dp)
    return (e.start_s + volume / bytes_per_s) * (1 - e.hidden_data)


def optimizer_s(work: LayerWork, trained_parameters: float) -> float:
    return work.efficiency.optimizer_bytes * trained_parameters / work.memory_bytes_per_s


def straggler_share(work: LayerWork) -> float:
    """Return the fraction of a step that is lost to waiting for the slowest node."""
    return work.efficiency.straggler_share * log(work.cluster.nodes)


def _linear_shapes(work: LayerWork, w: LayerWidths) -> list[tuple[float, float, float]]:
    """Return rows, columns and depth of the four forward matmuls of a layer."""
    rows, t = work.tokens, work.tp
    return [
        (rows, (w.queries + 2 * w.keys) / t, w.hidden),
        (rows, w.hidden, w.queries / t),
        (rows, w.fc1 / t, w.hidden),
        (rows, w.hidden, w.fc2 / t),
    ]


def _matmul_s(work: LayerWork, m: float, n: float, k: float) -> float:
    """Return the seconds of a matmul: all operations, and the idle part of the last tile round."""
    e, device = work.efficiency, work.cluster.device
    peak = device.flops_fp8 * e.products_fp8 if work.fp8 else device.flops * e.products
    return 2 * k * (m * n + e.tail * TILE * TILES_IN_FLIGHT) / peak


def _attention_s(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    e, device = work.efficiency, work.cluster.device
    flops = 4 * work.tokens * work.sequence * w.queries / work.tp
    if work.flash:
        # Fused attention skips the masked half.
        return flops / 2 * (FUSED_BACKWARD if backward else 1) / (device.flops * e.fused_attention)
    scores = work.tokens * work.sequence * w.heads / work.tp
    moved = SCORE_BYTES["backward" if backward else "forward"] * scores
    matmul_s = flops * (2 if backward else 1) / (device.flops * e.products)
    return matmul_s + moved / work.memory_bytes_per_s


def _elementwise_s(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    hidden, mlp_bytes, queries = ELEMENT_BYTES["backward" if backward else "forward"]
    moved = hidden * w.hidden / (work.tp if work.sequence_parallel else 1)
    moved += (mlp_bytes * (w.fc1 + w.fc2) + queries * w.queries) / work.tp
    moved += _fp8_cast_bytes(work, w, backward=backward) / work.tp
    gaps = work.efficiency.gap_s * (2 if backward else 1)
    return work.tokens * moved / work.memory_bytes_per_s + gaps


def _fp8_cast_bytes(work: LayerWork, w: LayerWidths, *, backward: bool) -> float:
    """Return the bytes of the fp8 copies of matmul inputs (backward: of output gradients).

    If weights are trained, a transposed copy is written as well.
    """
    if not work.fp8:
        return 0.0
    inputs = 2 * w.hidden + w.queries + w.fc2
    results = w.queries + 2 * w.keys + w.fc1 + 2 * w.hidden
    return (2 if work.trainable == "all" else 1) * (results if backward else inputs)


def _all_reduce_s(work: LayerWork, elements: float) -> float:
    """Return the seconds of an all-reduce of 16-bit values over the tensor ranks.

    A reduce-scatter and an all-gather take the same time.
    """
    if work.tp == 1:
        return 0.0
    e, cluster = work.efficiency, work.cluster
    ranks_in_node = min(work.tp, cluster.gpus_per_node)
    bytes_sent = 2 * all_reduce_elements(elements, ranks_in_node)
    seconds = e.start_s + bytes_sent / (cluster.device.link_bytes_per_s * e.link)
    nodes = -(-work.tp // ranks_in_node)
    if nodes > 1:
        # The GPUs of a node divide its network traffic among them.
        bytes_sent = 2 * all_reduce_elements(elements, nodes) / ranks_in_node
        seconds += e.start_s + bytes_sent / (cluster.device.network_bytes_per_s * e.network)
    return seconds
