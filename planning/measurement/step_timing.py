"""Steps of a model, timed: the engine's own runner runs steps that are laid out for that.

Decoding batches of many sizes, with short and long contexts, and pieces of prompts are run in
turns, so that a slow moment of the machine is slow for all; of each the median counts. What part of
a step grows with what is then a difference between two of them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.costs.inference import kv_bytes_per_token
from gpt.cpu import kernels
from gpt.dtypes import FLOAT_NAMES
from gpt.model.loading import device_of
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from planning.inference.calibration_file import Measured, Shape
from planning.inference.step_cost import Curve, Steps
from serving.config import ServerConfig
from serving.messages import Begin, Step, Table
from serving.ranks.rank import arrange, load
from serving.worker.model_runner import Runner

BLOCK_TOKENS = 16
DECODES = (1, 2, 4, 8, 16, 32, 64)
PIECES = (16, 32, 64, 128, 256, 512)
NEAR_TOKENS, FAR_TOKENS = 32, 512  # That a decoding sequence looks back at.
FAR_DECODES = (1, 4, 16)
ROUNDS_MIN, ROUNDS_MAX = 3, 200
WARM_ROUNDS = 2
# A step that takes this part of the time that there is would leave too little for the others.
PART_MAX = 1 / 12
KV_BYTES_MAX = 2 << 30  # That a step may look at: beside a large model there is not much more.
# A part of a step that is too small to be seen among others is not nothing.
LEAST_S = 1e-9


@dataclass(frozen=True, order=True)
class Kind:
    """A step to be timed: so many sequences of so many new tokens, after so many others."""

    sequences: int
    tokens: int
    past: int
    draws: bool

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Timed:
    """A model's steps, and what they say of the device."""

    measured: Measured
    flops: float
    bandwidth_bytes: float


def time_model(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: str | None,
    seconds: float,
    name: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """For about so many seconds, loading not counted."""
    network = checkpoint.config
    kinds = kinds_of(network)
    blocks = 1 + max(one.sequences * _blocks(one) for one in kinds)
    slots = max(one.sequences for one in kinds)
    config = ServerConfig(
        model="",
        running_requests_max=slots,
        step_tokens_max=max(slots, max(PIECES)),
        kv_block_tokens=BLOCK_TOKENS,
        dtype=dtype,
    )
    model = load(checkpoint, Mesh.single(device_of(device)), config)
    arrange(model, config)
    runner = Runner(model, config, blocks=blocks, slots=slots)
    try:
        took = _rounds(runner, kinds, seconds, clock)
    finally:
        kernels.rest()  # Threads that wait awake would take time from who is measured next.
    steps = fitted(took)
    shape = Shape.of(network)
    width = model.dtype.itemsize
    most = max(one.rows for one in took)
    return Timed(
        Measured(shape, FLOAT_NAMES[model.dtype], steps, name=name),
        flops=2 * most * shape.layer_weights / steps.rows.at(most),
        bandwidth_bytes=shape.layer_weights * width / steps.rows.at(1),
    )


def kinds_of(network: GPTConfig) -> list[Kind]:
    """What can be timed of a model with this context, the quick ones first."""
    context = network.max_position_embeddings
    near, far = min(NEAR_TOKENS, context // 4), min(FAR_TOKENS, context - 1)
    kinds = [Kind(count, 1, near, draws) for count in DECODES for draws in (True, False)]
    kinds += [Kind(count, 1, far, True) for count in FAR_DECODES]
    pieces = [tokens for tokens in PIECES if tokens <= context]
    kinds += [Kind(1, tokens, 0, False) for tokens in pieces]
    late = [tokens for tokens in pieces if tokens + far <= context and tokens >= 64]
    kinds += [Kind(1, tokens, far, False) for tokens in late[:2]]
    width = kv_bytes_per_token(network, network.num_layers)
    held = {one: one.sequences * _blocks(one) * BLOCK_TOKENS * width for one in kinds}
    small = [one for one in held if held[one] <= KV_BYTES_MAX or one.rows == 1]
    return sorted(small, key=lambda one: (one.rows, one))


def _blocks(kind: Kind) -> int:
    return -(-(kind.past + kind.tokens) // BLOCK_TOKENS)


def _rounds(
    runner: Runner, kinds: list[Kind], seconds: float, clock: Callable[[], float]
) -> dict[Kind, float]:
    took: dict[Kind, list[float]] = {}
    start = clock()
    for kind in kinds:
        spent = min(_run(runner, kind, clock) for _ in range(2))  # Some memory is new to the first.
        if spent > PART_MAX * seconds and kind.rows > 1:
            break  # And so would those that are larger.
        took[kind] = []
    for turn in range(WARM_ROUNDS + ROUNDS_MAX):
        if turn >= WARM_ROUNDS + ROUNDS_MIN and clock() - start > seconds:
            break
        for kind, times in took.items():
            spent = _run(runner, kind, clock)
            if turn >= WARM_ROUNDS:
                times.append(spent)
    return {kind: median(times) for kind, times in took.items()}


def _run(runner: Runner, kind: Kind, clock: Callable[[], float]) -> float:
    """One step's seconds, after one without tokens that lays out its blocks."""
    count, blocks = kind.sequences, _blocks(kind)
    tables = [
        Table(slot, 0, list(range(1 + slot * blocks, 1 + (slot + 1) * blocks)))
        for slot in range(count)
    ]
    begins = [Begin(slot, Sampling(), [0], []) for slot in range(count)]
    runner.run(Step(0, begins=begins, tables=tables))
    step = Step(
        0,
        slots=list(range(count)),
        past=[kind.past] * count,
        lengths=[kind.tokens] * count,
        ids=[0] * kind.rows,
        draws=[kind.draws] * count,
        scores=[0] * count,
    )
    if kind.rows <= max(DECODES):
        runner.run(step)  # Decoding follows decoding: what fits into a cache is there.
    start = clock()
    runner.run(step)
    if runner.model.mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


# -------------------------------------------------------------------------------------- the parts


def fitted(took: Mapping[Kind, float]) -> Steps:
    """What each part of a step costs, from steps that differ in it."""
    decodes = {one.sequences: one for one in took if one.tokens == 1 and not one.draws}
    pieces = {one.tokens: one for one in took if one.tokens > 1 and not one.past}
    context_s = _context_s(took)
    pair_s = _pair_s(took)

    def decode_s(count: int) -> float:
        kind = decodes[count]
        return took[kind] - context_s * count * (kind.past + 1)

    def piece_s(tokens: int) -> float:
        return took[pieces[tokens]] - pair_s * tokens * (tokens + 1) / 2

    both = sorted(set(decodes) & set(pieces))
    extra = [(decode_s(count) - piece_s(count)) / (count - 1) for count in both]
    sequence_s = max(0.0, median(extra)) if extra else 0.0
    rows = {count: decode_s(count) - sequence_s * count for count in decodes}
    rows |= {tokens: piece_s(tokens) - sequence_s for tokens in pieces}
    drawn = {one.sequences: one for one in took if one.draws and one.past == _near(took)}
    draws = {count: took[drawn[count]] - took[decodes[count]] for count in drawn}
    return Steps(
        rows=_rising(rows),
        draws=_rising(draws),
        context_s=context_s,
        pair_s=pair_s,
        sequence_s=sequence_s,
        step_s=0.0,
    )


def _near(took: Mapping[Kind, float]) -> int:
    return min(one.past for one in took if one.tokens == 1)


def _context_s(took: Mapping[Kind, float]) -> float:
    """By least squares, from decoding after short and after long contexts."""
    near = {one.sequences: one for one in took if one.draws and one.past == _near(took)}
    far = [one for one in took if one.draws and one.past > _near(took)]
    pairs = [
        (
            one.sequences * (one.past - near[one.sequences].past),
            took[one] - took[near[one.sequences]],
        )
        for one in far
        if one.sequences in near
    ]
    return _slope(pairs)


def _pair_s(took: Mapping[Kind, float]) -> float:
    near = {one.tokens: one for one in took if one.tokens > 1 and not one.past}
    far = [one for one in took if one.tokens > 1 and one.past]
    pairs = [
        (one.tokens * one.past, took[one] - took[near[one.tokens]])
        for one in far
        if one.tokens in near
    ]
    return _slope(pairs)


def _slope(pairs: list[tuple[int, float]]) -> float:
    squares = sum(x * x for x, _ in pairs)
    return max(0.0, sum(x * y for x, y in pairs) / squares) if squares else 0.0


def _rising(points: Mapping[int, float]) -> Curve:
    """More never takes less: neighbours of which that is said are noise, and have their mean."""
    runs: list[tuple[float, list[int]]] = []
    for x, y in sorted(points.items()):
        level, alike = max(LEAST_S, y), [x]
        while runs and runs[-1][0] > level:
            before, others = runs.pop()
            level = (before * len(others) + level * len(alike)) / (len(others) + len(alike))
            alike = [*others, *alike]
        runs.append((level, alike))
    return Curve(tuple((float(x), level) for level, alike in runs for x in alike))
