"""What a step of a model takes: as it was measured, else as like models were, else by spec sheet.

Each way ends in the same `Steps`, with the trust it deserves. A model that was not measured lies,
part by part, between those that were, by what that part of a step grows with. No torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.errors import ConfigError
from gpt.settings import nearest
from planning.hardware import Cluster
from planning.inference.calibration_file import Shape, StepCosts
from planning.inference.step_cost import Curve, Steps
from planning.plan import Trust

# Our engine on a GPU: what of a spec sheet's speed products and readings get, a layer's launches,
# and what a step costs that has no layers. Of a device that nobody measured these are estimates.
PRODUCTS = 0.70
READING = 0.75
ATTENTION = 0.50  # Keys and values are gathered block by block.
LAUNCH_S = 200e-6
STEP_S = 1.5e-3
REQUEST_S = 4e-3
# Bytes that pass memory for each element of a hidden state, besides products.
ELEMENTWISE = 40
REDUCE_S = {1: 0.0, 2: 15e-6, 4: 20e-6}
REDUCE_MOST_S = 28e-6
LINKS = 0.6  # Of their bandwidth, in both directions.
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

SPEC_ERROR = 0.35
SCALED_ERROR = 0.20
FAR_ERROR = 0.35
# A layer so many times the largest measured one, or that part of the smallest, is not far.
NEAR = 4.0
# An all-reduce between processes of one machine, without a GPU.
LOCAL_REDUCE_S = 150e-6


@dataclass(frozen=True)
class Priced:
    steps: Steps
    request_s: float
    trust: Trust
    request_token_s: float = 0.0  # For each token of its prompt.


def price(
    model: GPTConfig, dtype: str, tp: int, pp: int, cluster: Cluster, costs: StepCosts | None
) -> Priced:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; {nearest(dtype, DTYPE_BYTES)}")
    if costs is None:
        steps = by_spec_sheet(model, dtype, tp, pp, cluster)
        return Priced(steps, REQUEST_S, Trust("spec-sheet", SPEC_ERROR, "nothing was measured"))
    shape = Shape.of(model)
    for one in costs.models:
        if (one.shape, one.dtype, one.tp, one.pp) == (shape, dtype, tp, pp):
            trust = Trust("calibrated", costs.error)
            return Priced(one.steps, costs.request_s, trust, costs.request_token_s)
    steps, error, note = _scaled(shape, dtype, costs)
    if tp * pp > 1:
        steps, error = _divided(steps, model, tp, pp, cluster, costs), max(error, FAR_ERROR)
        note = f"measured on one rank, not on {tp * pp}"
    trust = Trust("calibrated", error, note)
    return Priced(steps, costs.request_s, trust, costs.request_token_s)


# ------------------------------------------------------------------------------ from like models


def _scaled(shape: Shape, dtype: str, costs: StepCosts) -> tuple[Steps, float, str]:
    """Each part of a step on the line between the measured models that are next in its size."""
    like = [one for one in costs.models if one.dtype == dtype and one.tp * one.pp == 1]
    error, note, factor = SCALED_ERROR, "from models of other sizes", 1.0
    if not like:
        like = [one for one in costs.models if one.tp * one.pp == 1] or list(costs.models)
        like = [one for one in like if one.dtype == like[0].dtype]
        factor = DTYPE_BYTES[dtype] / DTYPE_BYTES[like[0].dtype]
        error, note = FAR_ERROR, f"measured in {like[0].dtype}, not in {dtype}"
    own = next((one for one in like if one.shape == shape), None)
    if own is not None:
        return _times(own.steps, factor), costs.error if factor == 1.0 else error, note
    sizes = sorted(_layer(one.shape) for one in like)
    if not sizes[0] / NEAR <= _layer(shape) <= sizes[-1] * NEAR:
        error, note = FAR_ERROR, "far from the sizes that were measured"
    nearest_one = min(like, key=lambda one: abs(_layer(one.shape) - _layer(shape)))
    steps = Steps(
        rows=_between(
            [(_layer(one.shape), one.steps.rows.scaled(1 / one.shape.layers)) for one in like],
            _layer(shape),
        ).scaled(shape.layers),
        draws=_between([(_head(one.shape), one.steps.draws) for one in like], _head(shape)),
        context_s=_slope([(_seen(one.shape), one.steps.context_s) for one in like], _seen(shape)),
        pair_s=_slope([(_pairs(one.shape), one.steps.pair_s) for one in like], _pairs(shape)),
        sequence_s=nearest_one.steps.sequence_s,
        step_s=nearest_one.steps.step_s,
    )
    return _times(steps, factor), error, note


def _layer(shape: Shape) -> float:
    """What a layer's time grows with, beside what any layer costs."""
    return shape.layer_weights / shape.layers


def _head(shape: Shape) -> float:
    return float(shape.vocab * shape.hidden)


def _seen(shape: Shape) -> float:
    return float(shape.layers * (shape.kv_width + shape.query_width))


def _pairs(shape: Shape) -> float:
    return float(shape.layers * shape.query_width)


def _between(points: Sequence[tuple[float, Curve]], size: float) -> Curve:
    """On the line through the neighbours; beyond the largest in proportion to the size."""
    known = dict(sorted(points, key=lambda point: point[0]))
    sizes = list(known)
    largest = sizes[-1]
    if size >= largest or len(sizes) == 1:
        return known[largest].scaled(size / largest)
    place = max(1, bisect_left(sizes, size))
    low, high = sizes[place - 1], sizes[place]
    part = (size - low) / (high - low)
    both = Curve.sum([known[low].scaled(1 - part), known[high].scaled(part)])
    return Curve(tuple((x, max(0.0, y)) for x, y in both.points))


def _slope(points: Sequence[tuple[float, float]], size: float) -> float:
    return _between([(at, Curve(((1.0, value),))) for at, value in points], size).at(1.0)


def _times(steps: Steps, factor: float) -> Steps:
    return replace(
        steps,
        rows=steps.rows.scaled(factor),
        draws=steps.draws.scaled(factor),
        context_s=steps.context_s * factor,
        pair_s=steps.pair_s * factor,
    )


def _divided(
    steps: Steps, model: GPTConfig, tp: int, pp: int, cluster: Cluster, costs: StepCosts
) -> Steps:
    """A model measured on one rank, on several. Ranks on one CPU share its cores: none is won."""
    share = 1 / (tp * pp) if costs.kind == "cuda" else 1.0
    layers = -(-model.num_layers // pp)
    if costs.kind == "cuda":
        each = [(rows, _reduce_s(model, rows, tp, cluster)) for rows in ROWS]
    else:
        width = model.hidden_size * DTYPE_BYTES[model.dtype]
        slow = [(rows, LOCAL_REDUCE_S + rows * width / costs.bandwidth_bytes) for rows in ROWS]
        each = slow if tp > 1 else [(1, 0.0)]
    sums = Curve(tuple((float(rows), 2 * layers * seconds) for rows, seconds in each))
    return replace(
        steps,
        rows=Curve.sum([steps.rows.scaled(share), sums]),
        draws=steps.draws.scaled(1 / tp if costs.kind == "cuda" else 1.0),
        context_s=steps.context_s * share,
        pair_s=steps.pair_s * share,
    )


# -------------------------------------------------------------------------------- by spec sheet


def by_spec_sheet(model: GPTConfig, dtype: str, tp: int, pp: int, cluster: Cluster) -> Steps:
    """Of the stage with most layers; each product reads its weights once, or computes longer."""
    device, width = cluster.device, DTYPE_BYTES[dtype]
    shape = Shape.of(model)
    layers = -(-model.num_layers // pp)
    part = layers / model.num_layers / tp
    # fp32 has no fast path: an eighth of the rate of 16 bits.
    flops = device.flops * PRODUCTS / (1 if width == 2 else 8)
    bandwidth = device.bandwidth_bytes * READING
    weights = shape.layer_weights * part

    def rows_s(rows: int) -> float:
        products = max(2 * rows * weights / flops, weights * width / bandwidth)
        products += ELEMENTWISE * rows * model.hidden_size * layers * width / 2 / bandwidth
        return max(products, LAUNCH_S * layers) + 2 * layers * _reduce_s(model, rows, tp, cluster)

    head = shape.vocab * shape.hidden / tp

    def draws_s(rows: int) -> float:
        return max(2 * rows * head / flops, head * width / bandwidth)

    per_token = 2 * layers * max(1, model.num_query_groups // tp) * model.kv_channels * width
    pair_flops = 4 * layers * shape.query_width / tp
    return Steps(
        rows=Curve(tuple((float(rows), rows_s(rows)) for rows in ROWS)),
        draws=Curve(tuple((float(rows), draws_s(rows)) for rows in ROWS)),
        context_s=per_token / (device.bandwidth_bytes * ATTENTION),
        pair_s=pair_flops / (device.flops * ATTENTION),
        sequence_s=10e-6,
        step_s=STEP_S,
    )


def _reduce_s(model: GPTConfig, rows: int, tp: int, cluster: Cluster) -> float:
    """An all-reduce of a hidden state; beyond a node each node's share goes over its network."""
    if tp == 1:
        return 0.0
    device = cluster.device
    size = rows * model.hidden_size * 2
    inside = min(tp, cluster.gpus_per_node)
    seconds = REDUCE_S.get(inside, REDUCE_MOST_S)
    seconds += 2 * size * (inside - 1) / inside / (device.link_bytes * LINKS)
    nodes = -(-tp // cluster.gpus_per_node)
    if nodes > 1:
        outside = device.network_bytes * cluster.gpus_per_node * LINKS
        seconds += REDUCE_MOST_S * nodes + 2 * size * (nodes - 1) / nodes / outside
    return seconds
