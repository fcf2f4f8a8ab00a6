"""Step timing: times the engine's decode and prefill steps and fits a step cost model to them.

The engine's model runner runs steps of many shapes: decode batches of many sizes, with short and
long contexts, and prefill chunks. Each shape is timed once per round, so that a slow moment of the
machine affects all shapes. The time of a shape is the median over the rounds. The cost of a part of
a step, such as sampling, is computed from the times of two shapes that differ only in that part.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.costs.attention_span import FULL_ATTENTION, AttentionSpan, attention_span
from gpt.costs.inference import kv_bytes_per_token
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.model.loading import parse_device
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from planning.inference.calibration_file import MeasuredModel, ModelShape
from planning.inference.step_cost import PiecewiseLinear, StepCostModel
from serving.config import ServerConfig
from serving.memory_budget import KV_BLOCK_TOKENS
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.model_runner import ModelRunner
from serving.worker.startup import load_worker_model, prepare_weights

DECODE_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHUNK_SIZES = (16, 32, 64, 128, 256, 512)
SHORT_CONTEXT_TOKENS, LONG_CONTEXT_TOKENS = 32, 512  # Context lengths of decoding sequences.
LONG_CONTEXT_BATCH_SIZES = (1, 4, 16)
ROUNDS_MIN, ROUNDS_MAX = 3, 200
WARMUP_ROUNDS = 2
# A shape is not timed if one step takes more than this fraction of the measuring time.
STEP_TIME_FRACTION_MAX = 1 / 12
KV_BYTES_MAX = 2 << 30  # Limit of a step's KV cache, because large models leave little memory.
# Lower bound of the seconds in a cost curve (`_monotone_curve`). The seconds are differences of
# measured times, which may be negative.
STEP_PART_S_MIN = 1e-9


@dataclass(frozen=True, order=True)
class StepShape:
    """The shape of a step to time."""

    sequences: int
    tokens: int  # Number of new tokens per sequence.
    context: int  # Number of tokens per sequence that are in the KV cache before the step.
    samples: bool  # Whether the step samples a token for each sequence.

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class TimedModel:
    """The step costs of a model, and the speeds that it reached on the device."""

    measured: MeasuredModel
    flops: float
    memory_bytes_per_s: float


def time_model(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: str | None,
    seconds: float,
    name: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> TimedModel:
    """Time the steps of a model for about `seconds`, without the time to load it."""
    model_config = checkpoint.config
    shapes = step_shapes(model_config)
    blocks = 1 + max(
        step_shape.sequences * _blocks_per_sequence(step_shape) for step_shape in shapes
    )
    slots = max(step_shape.sequences for step_shape in shapes)
    config = ServerConfig(
        model="",
        running_requests_max=slots,
        step_tokens_max=max(slots, max(CHUNK_SIZES)),
        kv_block_tokens=KV_BLOCK_TOKENS,
        dtype=dtype,
    )
    model = load_worker_model(
        checkpoint, Mesh.single(parse_device(device)), config.model_config, config.cache_config
    )
    prepare_weights(model, config.model_config)
    runner = ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=config.uses_async_scheduling("cpu"),
        blocks=blocks,
        slots=slots,
    )
    timings = _time_rounds(runner, shapes, seconds, clock)
    step_costs = fit_step_costs(timings, attention_span(model_config))
    shape = ModelShape.from_config(model_config)
    dtype_bytes = model.dtype.itemsize
    rows_max = max(step_shape.rows for step_shape in timings)
    return TimedModel(
        MeasuredModel(shape, FLOAT_DTYPE_NAMES[model.dtype], step_costs, name=name),
        flops=2 * rows_max * shape.layer_weights / step_costs.rows.interpolate(rows_max),
        memory_bytes_per_s=shape.layer_weights * dtype_bytes / step_costs.rows.interpolate(1),
    )


def step_shapes(config: GPTConfig) -> list[StepShape]:
    """Return the shapes within the context length and KV_BYTES_MAX, sorted by number of rows."""
    context = config.max_position_embeddings
    short_context = min(SHORT_CONTEXT_TOKENS, context // 4)
    long_context = min(LONG_CONTEXT_TOKENS, context - 1)
    shapes = [
        StepShape(count, 1, short_context, samples)
        for count in DECODE_BATCH_SIZES
        for samples in (True, False)
    ]
    shapes += [StepShape(count, 1, long_context, True) for count in LONG_CONTEXT_BATCH_SIZES]
    chunk_sizes = [tokens for tokens in CHUNK_SIZES if tokens <= context]
    shapes += [StepShape(1, tokens, 0, False) for tokens in chunk_sizes]
    late_chunk_sizes = [
        tokens for tokens in chunk_sizes if tokens + long_context <= context and tokens >= 64
    ]
    shapes += [StepShape(1, tokens, long_context, False) for tokens in late_chunk_sizes[:2]]
    kv_token_bytes = kv_bytes_per_token(config, config.num_layers)
    kv_bytes = {
        step_shape: step_shape.sequences
        * _blocks_per_sequence(step_shape)
        * KV_BLOCK_TOKENS
        * kv_token_bytes
        for step_shape in shapes
    }
    allowed_shapes = [
        step_shape
        for step_shape in kv_bytes
        if kv_bytes[step_shape] <= KV_BYTES_MAX or step_shape.rows == 1
    ]
    return sorted(allowed_shapes, key=lambda step_shape: (step_shape.rows, step_shape))


def _blocks_per_sequence(step_shape: StepShape) -> int:
    return -(-(step_shape.context + step_shape.tokens) // KV_BLOCK_TOKENS)


def _time_rounds(
    runner: ModelRunner, shapes: list[StepShape], seconds: float, clock: Callable[[], float]
) -> dict[StepShape, float]:
    """Return the median seconds of each shape; shapes that are too slow are left out."""
    timings: dict[StepShape, list[float]] = {}
    start = clock()
    for step_shape in shapes:
        # The first step touches new memory, so the faster of two steps is taken.
        step_s = min(_time_step(runner, step_shape, clock) for _ in range(2))
        if step_s > STEP_TIME_FRACTION_MAX * seconds and step_shape.rows > 1:
            break  # The remaining shapes have at least as many rows.
        timings[step_shape] = []
    for round_index in range(WARMUP_ROUNDS + ROUNDS_MAX):
        if round_index >= WARMUP_ROUNDS + ROUNDS_MIN and clock() - start > seconds:
            break
        for step_shape, step_times in timings.items():
            step_s = _time_step(runner, step_shape, clock)
            if round_index >= WARMUP_ROUNDS:
                step_times.append(step_s)
    return {step_shape: median(step_times) for step_shape, step_times in timings.items()}


def _time_step(runner: ModelRunner, step_shape: StepShape, clock: Callable[[], float]) -> float:
    """Return the seconds of one step.

    Before the timed step, a step without tokens sets the slots and the block tables.
    """
    count, blocks = step_shape.sequences, _blocks_per_sequence(step_shape)
    tables = [
        BlockTableUpdate(slot, 0, list(range(1 + slot * blocks, 1 + (slot + 1) * blocks)), group)
        for slot in range(count)
        for group in range(len(runner.windows))
    ]
    slot_inits = [SlotInit(slot, SamplingParams(), [0], []) for slot in range(count)]
    runner.run_step(Step(0, slot_inits=slot_inits, block_table_updates=tables))
    step = Step(
        0,
        slots=list(range(count)),
        past=[step_shape.context] * count,
        lengths=[step_shape.tokens] * count,
        token_ids=[0] * step_shape.rows,
        draws=[step_shape.samples] * count,
        prompt_score_counts=[0] * count,
    )
    if step_shape.rows <= max(DECODE_BATCH_SIZES):
        # Decode steps of a server follow each other, so the step is timed with warm caches.
        runner.run_step(step)
    start = clock()
    runner.run_step(step)
    if runner.model.mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


# -------------------------------------------------------------------------------------- the fit


def fit_step_costs(
    timings: Mapping[StepShape, float], span: AttentionSpan = FULL_ATTENTION
) -> StepCostModel:
    """Fit the cost of each part of a step to shapes that differ in that part."""
    decode_shapes = {
        step_shape.sequences: step_shape
        for step_shape in timings
        if step_shape.tokens == 1 and not step_shape.samples
    }
    chunk_shapes = {
        step_shape.tokens: step_shape
        for step_shape in timings
        if step_shape.tokens > 1 and not step_shape.context
    }
    context_s = _context_s(timings, span)
    pair_s = _pair_s(timings, span)

    # The next two functions subtract the attention from the time of a step.
    def decode_s(count: int) -> float:
        step_shape = decode_shapes[count]
        return timings[step_shape] - context_s * count * span.keys(step_shape.context + 1)

    def chunk_s(tokens: int) -> float:
        return timings[chunk_shapes[tokens]] - pair_s * span.pairs(0, tokens)

    # A decode step of n sequences and a prefill chunk of n tokens compute the same number of rows,
    # but the decode step has n - 1 more sequences.
    shared_sizes = sorted(set(decode_shapes) & set(chunk_shapes))
    sequence_costs = [(decode_s(count) - chunk_s(count)) / (count - 1) for count in shared_sizes]
    sequence_s = max(0.0, median(sequence_costs)) if sequence_costs else 0.0
    rows = {count: decode_s(count) - sequence_s * count for count in decode_shapes}
    rows |= {tokens: chunk_s(tokens) - sequence_s for tokens in chunk_shapes}
    sampling_shapes = {
        step_shape.sequences: step_shape
        for step_shape in timings
        if step_shape.samples and step_shape.context == _short_context(timings)
    }
    sampling_s = {
        count: timings[sampling_shapes[count]] - timings[decode_shapes[count]]
        for count in sampling_shapes
    }
    return StepCostModel(
        rows=_monotone_curve(rows),
        draws=_monotone_curve(sampling_s),
        context_s=context_s,
        pair_s=pair_s,
        sequence_s=sequence_s,
        step_s=0.0,  # `rows` contains the cost per step.
    )


def _short_context(timings: Mapping[StepShape, float]) -> int:
    """Return the shortest context of the decode shapes."""
    return min(step_shape.context for step_shape in timings if step_shape.tokens == 1)


def _context_s(timings: Mapping[StepShape, float], span: AttentionSpan) -> float:
    """Return the seconds per context token, fitted to decode steps of two context lengths."""
    short_shapes = {
        step_shape.sequences: step_shape
        for step_shape in timings
        if step_shape.samples and step_shape.context == _short_context(timings)
    }
    long_shapes = [
        step_shape
        for step_shape in timings
        if step_shape.samples and step_shape.context > _short_context(timings)
    ]
    pairs = [
        (
            step_shape.sequences
            * (
                span.keys(step_shape.context + 1)
                - span.keys(short_shapes[step_shape.sequences].context + 1)
            ),
            timings[step_shape] - timings[short_shapes[step_shape.sequences]],
        )
        for step_shape in long_shapes
        if step_shape.sequences in short_shapes
    ]
    return _fit_slope(pairs)


def _pair_s(timings: Mapping[StepShape, float], span: AttentionSpan) -> float:
    """Return the seconds per attention pair, fitted to prefill chunks with and without context."""
    first_chunk_shapes = {
        step_shape.tokens: step_shape
        for step_shape in timings
        if step_shape.tokens > 1 and not step_shape.context
    }
    late_chunk_shapes = [
        step_shape for step_shape in timings if step_shape.tokens > 1 and step_shape.context
    ]
    pairs = [
        (
            span.pairs(step_shape.context, step_shape.context + step_shape.tokens)
            - span.pairs(0, step_shape.tokens),
            timings[step_shape] - timings[first_chunk_shapes[step_shape.tokens]],
        )
        for step_shape in late_chunk_shapes
        if step_shape.tokens in first_chunk_shapes
    ]
    return _fit_slope(pairs)


def _fit_slope(pairs: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the origin, at least 0."""
    squares = sum(x * x for x, _ in pairs)
    return max(0.0, sum(x * y for x, y in pairs) / squares) if squares else 0.0


def _monotone_curve(points: Mapping[int, float]) -> PiecewiseLinear:
    """Return the isotonic regression of the points.

    Neighboring points whose values decrease form a run, and get the mean value of the run.
    """
    runs: list[tuple[float, list[int]]] = []
    for x, y in sorted(points.items()):
        level, merged_xs = max(STEP_PART_S_MIN, y), [x]
        while runs and runs[-1][0] > level:
            previous_level, previous_xs = runs.pop()
            level = (previous_level * len(previous_xs) + level * len(merged_xs)) / (
                len(previous_xs) + len(merged_xs)
            )
            merged_xs = [*previous_xs, *merged_xs]
        runs.append((level, merged_xs))
    return PiecewiseLinear(tuple((float(x), level) for level, merged_xs in runs for x in merged_xs))
