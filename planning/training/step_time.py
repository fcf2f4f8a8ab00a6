"""How long a GPU takes for a layer of a GPT, there and back, and what the rest of a step adds.

Counted work over what a machine can do: products by their tiles, attention by its scores, all else
by the bytes that it moves, collectives by a ring's volume. Which share of a machine a program gets
is `Efficiency`; how those few numbers were found is not known here.
"""

from dataclasses import dataclass, replace
from math import log

from gpt.config import GPTConfig
from gpt.costs.training import Trainable, Widths, all_reduced, widths
from planning.hardware import Cluster

# What a product is cut into on a GPU, and how many of them it works on at a time.
TILE = 256 * 128
TILES_AT_A_TIME = 108

# Bytes that an unfused attention moves for a score: written by its product, read and written by
# softmax, then by dropout with its mask, read by the second product. Backward it is the same for
# the gradients of all these, with the results read once more.
SCORE_BYTES = {"forward": 13, "backward": 19}
# Bytes for an element of the hidden state (norms, residuals, dropouts with masks), of the middle of
# the MLP (bias and activation), and of the queries (copies around an attention).
ELEMENT_BYTES = {"forward": (22, 2, 4), "backward": (30, 4, 10)}
# A fused attention computes the scores again on its way back: five products for two.
FUSED_BACKWARD = 2.5


@dataclass(frozen=True)
class Efficiency:
    """What software of some time gets out of a machine. Shares are of the spec sheet."""

    products: float  # Of 16-bit products that have many tiles.
    products_fp8: float
    tail: float  # Rounds of tiles that are lost at a product's end.
    fused: float  # Of the products inside a fused attention.
    memory: float
    link: float  # In a collective among the GPUs of a node.
    network: float
    start_s: float  # Of a collective or a message.
    gap_s: float  # Between the kernels of a layer, forward; backward it is twice as much.
    hidden_forward: float  # Share of tensor ranks' collectives behind products, forward.
    hidden_backward: float
    hidden_pipeline: float
    hidden_data: float
    optimizer_bytes: float  # That the optimizer's step moves for a parameter.
    gradient_bytes: float  # Of a parameter's gradient, when ranks sum it.
    logit_bytes: float  # That cross entropy moves for a logit, there and back.
    uneven: float  # What waiting for the slowest adds, for each e-fold of nodes.
    flash: bool  # Whether attention is fused, where nobody says.


@dataclass(frozen=True)
class Work:
    """A micro-batch, and where it runs."""

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
        return self.cluster.device.bandwidth_bytes * self.efficiency.memory


@dataclass(frozen=True)
class Pass:
    """Seconds of one layer, one way."""

    products: float
    attention: float
    elementwise: float
    tensor_parallel: float  # What nothing hides of its collectives.

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.tensor_parallel


def forward(work: Work) -> Pass:
    w, e = widths(work.config), work.efficiency
    collectives = 2 * _collective_s(work, work.tokens * w.hidden)
    return Pass(
        products=sum(_product_s(work, *sizes) for sizes in _linears(work, w)),
        attention=_attention_s(work, w, backward=False),
        elementwise=_elementwise_s(work, w, backward=False),
        tensor_parallel=collectives * (1 - e.hidden_forward),
    )


def backward(work: Work) -> Pass:
    """Gradients of inputs and, where weights learn, of weights: that can hide collectives."""
    w, e = widths(work.config), work.efficiency
    linears = _linears(work, w)
    learns = work.trainable == "all"
    products = sum(_product_s(work, m, k, n) for m, n, k in linears)
    if learns:
        products += sum(_product_s(work, k, n, m) for m, n, k in linears)
    # With sequence parallelism, what the norms left is gathered once more for weights' gradients.
    rounds = 3 if learns and work.sequence_parallel else 2
    hidden = e.hidden_backward if learns else e.hidden_forward
    collectives = rounds * _collective_s(work, work.tokens * w.hidden)
    return Pass(
        products=products,
        attention=_attention_s(work, w, backward=True),
        elementwise=_elementwise_s(work, w, backward=True),
        tensor_parallel=collectives * (1 - hidden),
    )


def head_s(work: Work) -> float:
    """Logits and their cross entropy, there and back. It stays in 16 bits."""
    h, v = work.config.hidden_size, work.config.vocab_size / work.tp
    wide = replace(work, fp8=False)
    products = _product_s(wide, work.tokens, v, h) + _product_s(wide, work.tokens, h, v)
    if work.trainable == "all":
        products += _product_s(wide, h, v, work.tokens)
    return products + work.efficiency.logit_bytes * work.tokens * v / work.memory_bytes_per_s


def hop_s(work: Work) -> float:
    """A micro-batch's results to the next stage, and their gradients back."""
    e, device = work.efficiency, work.cluster.device
    sent = 2 * work.tokens * work.config.hidden_size
    # Stages are the outermost ranks: with more than one node, some boundary is between nodes.
    inside = work.cluster.nodes == 1
    speed = device.link_bytes * e.link if inside else device.network_bytes * e.network
    seconds = e.start_s + sent / work.tp / speed
    if work.tp > 1 and not work.sequence_parallel:
        # Each tensor rank sends its share; then they gather the whole.
        seconds += e.start_s + sent / (device.link_bytes * e.link)
    return 2 * seconds * (1 - e.hidden_pipeline)


def data_parallel_s(work: Work, dp: int, held: float) -> float:
    """The sum over data ranks of the gradients of `held` parameters."""
    if dp == 1 or work.trainable == "adapter":
        return 0.0
    e, cluster = work.efficiency, work.cluster
    # GPUs of a node that sum the same parameters carry it over the network together.
    near = max(1, min(dp, cluster.gpus_per_node // work.tp))
    speed = cluster.device.link_bytes * e.link
    if dp > near:
        speed = min(speed, near * cluster.device.network_bytes * e.network)
    volume = e.gradient_bytes * all_reduced(held, dp)
    return (e.start_s + volume / speed) * (1 - e.hidden_data)


def optimizer_s(work: Work, held: float) -> float:
    return work.efficiency.optimizer_bytes * held / work.memory_bytes_per_s


def waiting_share(work: Work) -> float:
    """The slowest of many sets the pace of all."""
    return work.efficiency.uneven * log(work.cluster.nodes)


def _linears(work: Work, w: Widths) -> list[tuple[float, float, float]]:
    """Rows, columns and depth of a layer's four products, forward."""
    rows, t = work.tokens, work.tp
    return [
        (rows, (w.queries + 2 * w.keys) / t, w.hidden),
        (rows, w.hidden, w.queries / t),
        (rows, w.fc1 / t, w.hidden),
        (rows, w.hidden, w.fc2 / t),
    ]


def _product_s(work: Work, m: float, n: float, k: float) -> float:
    """Its operations at full speed, and a part of a round in which some of the GPU idles."""
    e, device = work.efficiency, work.cluster.device
    peak = device.flops_fp8 * e.products_fp8 if work.fp8 else device.flops * e.products
    return 2 * k * (m * n + e.tail * TILE * TILES_AT_A_TIME) / peak


def _attention_s(work: Work, w: Widths, *, backward: bool) -> float:
    e, device = work.efficiency, work.cluster.device
    flops = 4 * work.tokens * work.sequence * w.queries / work.tp
    if work.flash:
        # Half is masked, and skipped.
        return flops / 2 * (FUSED_BACKWARD if backward else 1) / (device.flops * e.fused)
    scores = work.tokens * work.sequence * w.heads / work.tp
    moved = SCORE_BYTES["backward" if backward else "forward"] * scores
    products = flops * (2 if backward else 1) / (device.flops * e.products)
    return products + moved / work.memory_bytes_per_s


def _elementwise_s(work: Work, w: Widths, *, backward: bool) -> float:
    hidden, middle, queries = ELEMENT_BYTES["backward" if backward else "forward"]
    moved = hidden * w.hidden / (work.tp if work.sequence_parallel else 1)
    moved += (middle * (w.fc1 + w.fc2) + queries * w.queries) / work.tp
    moved += _narrowed_bytes(work, w, backward=backward) / work.tp
    gaps = work.efficiency.gap_s * (2 if backward else 1)
    return work.tokens * moved / work.memory_bytes_per_s + gaps


def _narrowed_bytes(work: Work, w: Widths, *, backward: bool) -> float:
    """Fp8 writes inputs of products, and gradients of their results, once more in a byte; and once
    more turned over where weights learn."""
    if not work.fp8:
        return 0.0
    inputs = 2 * w.hidden + w.queries + w.fc2
    results = w.queries + 2 * w.keys + w.fc1 + 2 * w.hidden
    return (2 if work.trainable == "all" else 1) * (results if backward else inputs)


def _collective_s(work: Work, elements: float) -> float:
    """An all-reduce of 16-bit values over tensor ranks; or its two halves."""
    if work.tp == 1:
        return 0.0
    e, cluster = work.efficiency, work.cluster
    near = min(work.tp, cluster.gpus_per_node)
    sent = 2 * all_reduced(elements, near)
    seconds = e.start_s + sent / (cluster.device.link_bytes * e.link)
    nodes = -(-work.tp // near)
    if nodes > 1:
        # Each GPU of a node carries its share of what the node sends.
        sent = 2 * all_reduced(elements, nodes) / near
        seconds += e.start_s + sent / (cluster.device.network_bytes * e.network)
    return seconds
