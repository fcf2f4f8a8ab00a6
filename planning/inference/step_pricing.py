"""Step pricing: the step cost model of a GPT, from calibration, interpolation or a spec sheet.

Each source yields a `StepCostModel` and an error bar. The costs of a model that was not measured
are interpolated between measured models. Each part of a step is interpolated over the size that
determines its time, such as the number of weights of a layer. The module does not import torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.layer_weights import layer_weights
from gpt.costs.linear_adapter import stage_costs
from gpt.errors import ConfigError
from gpt.settings import suggest_nearest
from planning.hardware import Cluster
from planning.inference.adapter_memory import ServedAdapters
from planning.inference.calibration_file import Calibration, ModelShape
from planning.inference.model_split import ModelSplit
from planning.inference.step_cost import AdaptedStepCostModel, PiecewiseLinear, StepCostModel
from planning.plan import Confidence

# Estimates for the engine on a GPU without calibration: the fractions of the specification sheet's
# speeds that the engine reaches, the time of a layer's kernel launches, and the fixed costs of a
# step, of a sequence in a step, and of a request.
MATMUL_EFFICIENCY = 0.70
MEMORY_READ_EFFICIENCY = 0.75
ATTENTION_EFFICIENCY = 0.50  # Low, because keys and values are gathered block by block.
LAYER_LAUNCH_S = 200e-6
STEP_OVERHEAD_S = 1.5e-3
SEQUENCE_OVERHEAD_S = 10e-6
REQUEST_OVERHEAD_S = 4e-3
# Memory traffic of one layer outside of its matrix products, in bytes per element of the hidden
# state, for a 16-bit dtype.
ELEMENTWISE_BYTES = 40
# Latency of an all-reduce by the number of ranks in a node. ALL_REDUCE_LATENCY_MAX_S is for numbers
# that are not in the mapping.
ALL_REDUCE_LATENCY_S = {1: 0.0, 2: 15e-6, 4: 20e-6}
ALL_REDUCE_LATENCY_MAX_S = 28e-6
LINK_EFFICIENCY = 0.6  # The fraction of the link bandwidth that an all-reduce reaches.
# Numbers of rows (new tokens of a step) at which the curves of a specification sheet are computed.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

SPEC_ERROR = 0.35  # Relative error of costs from a specification sheet.
SCALED_ERROR = 0.20  # Relative error of costs that are interpolated between measured models.
# Relative error of costs for a dtype or a number of ranks that was not measured, and for a layer
# size that is outside of the measured range by more than a factor of NEAR_FACTOR.
FAR_ERROR = 0.35
NEAR_FACTOR = 4.0
# Duration of an all-reduce between processes of one machine without a GPU.
CPU_ALL_REDUCE_S = 150e-6


@dataclass(frozen=True)
class StepPrices:
    steps: StepCostModel
    request_s: float  # Seconds that a request spends in the server outside of the engine.
    confidence: Confidence
    request_token_s: float = 0.0  # Additional seconds outside of the engine per prompt token.


def price_steps(
    model: GPTConfig,
    dtype: str,
    split: ModelSplit,
    cluster: Cluster,
    calibration: Calibration | None,
) -> StepPrices:
    """Return the costs of a model's steps and requests, and their error bar.

    The source of the costs depends on the calibration:
    - None: the specification sheet of the GPU.
    - A calibration that contains this model in this dtype and TP/PP split: this measurement.
    - Any other calibration: interpolation between the measured models.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype is {dtype!r}; {suggest_nearest(dtype, DTYPE_BYTES)}")
    if calibration is None:
        steps = steps_from_spec_sheet(model, dtype, split, cluster)
        return StepPrices(
            steps, REQUEST_OVERHEAD_S, Confidence("spec-sheet", SPEC_ERROR, "nothing was measured")
        )
    shape = ModelShape.from_config(model)
    key = shape, dtype, split
    for model_costs in calibration.models:
        measured_split = ModelSplit(model_costs.tp, model_costs.pp)
        if (model_costs.shape, model_costs.dtype, measured_split) == key:
            confidence = Confidence("calibrated", calibration.error)
            return StepPrices(
                model_costs.steps, calibration.request_s, confidence, calibration.request_token_s
            )
    steps, error, note = _interpolate_models(shape, dtype, calibration)
    if split.ranks > 1:
        steps = _divide_over_ranks(steps, model, split, cluster, calibration)
        error = max(error, FAR_ERROR)
        # `_interpolate_models` uses models that were measured on one rank, if there are any. If
        # there are none, this note is inaccurate.
        note = f"measured on one rank, not on {split.ranks}"
    confidence = Confidence("calibrated", error, note)
    return StepPrices(steps, calibration.request_s, confidence, calibration.request_token_s)


def price_adapters(
    prices: StepPrices,
    model: GPTConfig,
    dtype: str,
    served_adapters: ServedAdapters,
    split: ModelSplit,
    *,
    cluster: Cluster,
    calibration: Calibration | None,
) -> StepPrices:
    """Add the costs of linear adapters, on the stage with the largest changes.

    The matrices of each adapter in a step are read once, at the speed at which weights are read.
    """
    stages = stage_costs(model, served_adapters.spec, split.tp, split.pp, ep=split.ep)
    row_flops = float(max(cost.flops_per_token for cost in stages))
    adapter_bytes = float(served_adapters.rank_bytes(model, dtype, split))
    device = cluster.device
    flops, bandwidth = device.flops, device.memory_bytes_per_s
    if calibration is None:
        flops *= MATMUL_EFFICIENCY / (1 if DTYPE_BYTES[dtype] == 2 else 8)
        bandwidth *= MEMORY_READ_EFFICIENCY
    # The ranks of a CPU share its cores and its memory.
    shares = split.stage_ranks if calibration is not None and calibration.kind == "cpu" else 1
    steps = AdaptedStepCostModel.extend(
        prices.steps,
        served_adapters,
        adapter_s=shares * adapter_bytes / bandwidth,
        adapter_row_s=shares * row_flops / flops,
    )
    return replace(prices, steps=steps)


# ------------------------------------------------------------------------------- interpolation


def _interpolate_models(
    shape: ModelShape, dtype: str, calibration: Calibration
) -> tuple[StepCostModel, float, str]:
    """Interpolate each part of a step between measured models; return costs, error and note.

    Models on one rank and in this dtype are preferred. Costs in another dtype are multiplied by the
    ratio of the bytes per weight.
    """
    single_rank_models = [model for model in calibration.models if model.tp * model.pp == 1]
    models = [model for model in single_rank_models if model.dtype == dtype]
    error = SCALED_ERROR
    note = "interpolated from models of other sizes"
    dtype_factor = 1.0
    if not models:
        models = single_rank_models or list(calibration.models)
        measured_dtype = models[0].dtype
        models = [model for model in models if model.dtype == measured_dtype]
        dtype_factor = DTYPE_BYTES[dtype] / DTYPE_BYTES[measured_dtype]
        error, note = FAR_ERROR, f"measured in {measured_dtype}, not in {dtype}"
    same_shape = next((model for model in models if model.shape == shape), None)
    if same_shape is not None:
        steps = _scale_step_costs(same_shape.steps, dtype_factor)
        return steps, calibration.error if dtype_factor == 1.0 else error, note
    sizes = sorted(_layer_size(model.shape) for model in models)
    if not sizes[0] / NEAR_FACTOR <= _layer_size(shape) <= sizes[-1] * NEAR_FACTOR:
        error, note = FAR_ERROR, "far outside of the measured model sizes"
    nearest_model = min(
        models, key=lambda model: abs(_layer_size(model.shape) - _layer_size(shape))
    )
    layer_curves = [
        (_layer_size(model.shape), model.steps.rows.scaled_by(1 / model.shape.layers))
        for model in models
    ]
    steps = StepCostModel(
        rows=_interpolate_curve(layer_curves, _layer_size(shape)).scaled_by(shape.layers),
        draws=_interpolate_curve(
            [(_head_size(model.shape), model.steps.draws) for model in models], _head_size(shape)
        ),
        context_s=_interpolate_slope(
            [(_context_size(model.shape), model.steps.context_s) for model in models],
            _context_size(shape),
        ),
        pair_s=_interpolate_slope(
            [(_pair_size(model.shape), model.steps.pair_s) for model in models],
            _pair_size(shape),
        ),
        sequence_s=nearest_model.steps.sequence_s,
        step_s=nearest_model.steps.step_s,
    )
    return _scale_step_costs(steps, dtype_factor), error, note


def _layer_size(shape: ModelShape) -> float:
    """Return the number of weights of one layer, which determines `StepCostModel.rows`."""
    return shape.layer_weights / shape.layers


def _head_size(shape: ModelShape) -> float:
    """Return the number of weights of the LM head, which determines `StepCostModel.draws`."""
    return float(shape.vocab * shape.hidden)


def _context_size(shape: ModelShape) -> float:
    """Return the widths of keys and queries, summed over all layers; they determine `context_s`."""
    return float(shape.layers * (shape.kv_width + shape.query_width))


def _pair_size(shape: ModelShape) -> float:
    """Return the width of the queries, summed over all layers; it determines `pair_s`."""
    return float(shape.layers * shape.query_width)


def _interpolate_curve(
    points: Sequence[tuple[float, PiecewiseLinear]], size: float
) -> PiecewiseLinear:
    """Interpolate between the curves of the next smaller and the next larger size.

    Above the largest size, or if there is only one size, the curve of the largest size is scaled in
    proportion to the size.
    Below the smallest size, the curves of the two smallest sizes are extrapolated; negative values
    become 0.
    """
    curve_by_size = dict(sorted(points, key=lambda point: point[0]))
    sizes = list(curve_by_size)
    largest = sizes[-1]
    if size >= largest or len(sizes) == 1:
        return curve_by_size[largest].scaled_by(size / largest)
    index = max(1, bisect_left(sizes, size))
    low, high = sizes[index - 1], sizes[index]
    weight = (size - low) / (high - low)
    blended = PiecewiseLinear.sum_curves(
        [curve_by_size[low].scaled_by(1 - weight), curve_by_size[high].scaled_by(weight)]
    )
    return PiecewiseLinear(tuple((x, max(0.0, y)) for x, y in blended.points))


def _interpolate_slope(points: Sequence[tuple[float, float]], size: float) -> float:
    return _interpolate_curve(
        [(model_size, PiecewiseLinear(((1.0, value),))) for model_size, value in points], size
    ).interpolate(1.0)


def _scale_step_costs(steps: StepCostModel, factor: float) -> StepCostModel:
    return replace(
        steps,
        rows=steps.rows.scaled_by(factor),
        draws=steps.draws.scaled_by(factor),
        context_s=steps.context_s * factor,
        pair_s=steps.pair_s * factor,
    )


def _divide_over_ranks(
    steps: StepCostModel,
    model: GPTConfig,
    split: ModelSplit,
    cluster: Cluster,
    calibration: Calibration,
) -> StepCostModel:
    """Estimate the cost on several ranks from a measurement on one rank.

    Ranks on one CPU share its cores, so they add the cost of all-reduces and, with expert
    parallelism, the waiting for the busiest rank.
    """
    on_gpu = calibration.kind == "cuda"
    # The share of the work of one rank, times the number of ranks that run one after the other.
    share = 1 / (split.tp * split.pp) if on_gpu else split.stage_ranks / split.tp
    layers = -(-model.num_layers // split.pp)

    def all_reduce_s(rows: float, ranks: int) -> float:
        if on_gpu:
            return _all_reduce_s(model, rows, ranks, cluster)
        row_bytes = model.hidden_size * DTYPE_BYTES[model.dtype]
        transfer_s = rows * row_bytes / calibration.bandwidth_bytes
        return 0.0 if ranks == 1 else CPU_ALL_REDUCE_S + transfer_s

    def layers_s(rows: float, seconds: float) -> float:
        weights = layer_weights(model, rows, tp=split.tp, ep=split.ep).read * split.tp
        ratio = weights / layer_weights(model, rows).read if split.ep > 1 else 1.0
        # An all-reduce after attention, and one after the MLP.
        all_reduces_s = all_reduce_s(rows, split.tp) + all_reduce_s(rows, split.stage_ranks)
        return seconds * share * ratio + layers * all_reduces_s

    row_counts = sorted({*map(float, ROW_COUNTS), *(rows for rows, _ in steps.rows.points)})
    points = [(rows, layers_s(rows, steps.rows.interpolate(rows))) for rows in row_counts]
    return replace(
        steps,
        rows=PiecewiseLinear(tuple(points)),
        draws=steps.draws.scaled_by(1 / split.tp if on_gpu else 1.0),
        context_s=steps.context_s * share,
        pair_s=steps.pair_s * share,
    )


# --------------------------------------------------------------------------- specification sheet


def steps_from_spec_sheet(
    model: GPTConfig, dtype: str, split: ModelSplit, cluster: Cluster
) -> StepCostModel:
    """Return the step costs of the stage with the most layers.

    The time of a matmul is the maximum of its compute time and its memory time (roofline).
    """
    device, dtype_bytes = cluster.device, DTYPE_BYTES[dtype]
    shape = ModelShape.from_config(model)
    tp, layers = split.tp, -(-model.num_layers // split.pp)
    # fp32 runs at about an eighth of the 16-bit rate.
    flops = device.flops * MATMUL_EFFICIENCY / (1 if dtype_bytes == 2 else 8)
    bandwidth = device.memory_bytes_per_s * MEMORY_READ_EFFICIENCY

    def layers_s(rows: int) -> float:
        weights = layer_weights(model, rows, tp=tp, ep=split.ep)
        seconds = layers * max(
            2 * rows * weights.used / flops, weights.read * dtype_bytes / bandwidth
        )
        seconds += (
            ELEMENTWISE_BYTES * rows * model.hidden_size * layers * dtype_bytes / 2 / bandwidth
        )
        # An all-reduce after attention, and one after the MLP.
        all_reduces_s = _all_reduce_s(model, rows, tp, cluster)
        all_reduces_s += _all_reduce_s(model, rows, split.stage_ranks, cluster)
        return max(seconds, LAYER_LAUNCH_S * layers) + layers * all_reduces_s

    head_weights = shape.vocab * shape.hidden / tp

    def head_s(rows: int) -> float:
        return max(2 * rows * head_weights / flops, head_weights * dtype_bytes / bandwidth)

    kv_bytes_per_token = (
        2 * layers * max(1, model.num_query_groups // tp) * model.kv_channels * dtype_bytes
    )
    pair_flops = 4 * layers * shape.query_width / tp
    return StepCostModel(
        rows=PiecewiseLinear(tuple((float(rows), layers_s(rows)) for rows in ROW_COUNTS)),
        draws=PiecewiseLinear(tuple((float(rows), head_s(rows)) for rows in ROW_COUNTS)),
        context_s=kv_bytes_per_token / (device.memory_bytes_per_s * ATTENTION_EFFICIENCY),
        pair_s=pair_flops / (device.flops * ATTENTION_EFFICIENCY),
        sequence_s=SEQUENCE_OVERHEAD_S,
        step_s=STEP_OVERHEAD_S,
    )


def _all_reduce_s(model: GPTConfig, rows: float, ranks: int, cluster: Cluster) -> float:
    """Return the seconds of a ring all-reduce of the hidden states of `rows` tokens.

    If the ranks are on several nodes, the time of an all-reduce between the nodes is added.
    """
    if ranks == 1:
        return 0.0
    device = cluster.device
    message_bytes = rows * model.hidden_size * 2
    ranks_in_node = min(ranks, cluster.gpus_per_node)
    seconds = ALL_REDUCE_LATENCY_S.get(ranks_in_node, ALL_REDUCE_LATENCY_MAX_S)
    seconds += (
        2
        * message_bytes
        * (ranks_in_node - 1)
        / ranks_in_node
        / (device.link_bytes_per_s * LINK_EFFICIENCY)
    )
    nodes = -(-ranks // cluster.gpus_per_node)
    if nodes > 1:
        node_bytes_per_s = device.network_bytes_per_s * cluster.gpus_per_node * LINK_EFFICIENCY
        seconds += (
            ALL_REDUCE_LATENCY_MAX_S * nodes
            + 2 * message_bytes * (nodes - 1) / nodes / node_bytes_per_s
        )
    return seconds
