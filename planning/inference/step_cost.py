"""Step cost model: the duration of one engine step by its tokens, samples, context and sequences.

The cost model consists of curves and slopes for one GPT in one TP/PP split on one device. Their
source is a measurement or a specification sheet; the simulator does not distinguish the sources.
Linear adapters add a cost for each of them in a step, and for each token. The module does not
import torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields

from planning.inference.adapter_memory import ServedAdapters


@dataclass(frozen=True)
class PiecewiseLinear:
    """A piecewise linear curve through points that are sorted by x.

    The curve is constant before the first point, and its last segment continues after the last
    point.
    """

    points: tuple[tuple[float, float], ...]

    def interpolate(self, x: float) -> float:
        points = self.points
        if len(points) == 1 or x <= points[0][0]:
            return points[0][1]
        # The index of the first point to the right of x, or of the last point if there is none.
        index = min(bisect_right(points, (x, float("inf"))), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (x - left) * (high - low) / (right - left)

    def scaled_by(self, factor: float) -> "PiecewiseLinear":
        return PiecewiseLinear(tuple((x, factor * y) for x, y in self.points))

    @classmethod
    def sum_curves(cls, curves: Sequence["PiecewiseLinear"]) -> "PiecewiseLinear":
        xs = sorted({x for curve in curves for x, _ in curve.points})
        return cls(tuple((x, sum(curve.interpolate(x) for curve in curves)) for x in xs))


@dataclass(frozen=True)
class StepCostModel:
    """Costs in seconds of the parts of a step on the slowest pipeline stage."""

    # Cost of the layers by the number of new tokens, without the attention to the context.
    rows: PiecewiseLinear
    draws: PiecewiseLinear  # Cost of the LM head and sampling, by the number of sampled tokens.
    context_s: float  # Cost per context token that a decoding sequence attends to.
    pair_s: float  # Cost per pair of a prompt token and a token that it attends to.
    sequence_s: float  # Cost per sequence in the step: scheduling and messages.
    step_s: float  # Cost per step: kernel launches and the engine loop.

    def step_seconds(
        self, rows: float, draws: float, context: float, pairs: float, sequences: float
    ) -> float:
        """Return the seconds of a step that computes `rows` tokens and samples `draws` tokens.

        `sequences`: the number of sequences in the step. `context`: the number of tokens that the
        decoding sequences attend to. `pairs`: the number of attention pairs of the prefill chunks.
        """
        if rows <= 0:
            return 0.0
        head_s = self.draws.interpolate(draws) if draws > 0 else 0.0
        attention_s = self.context_s * context + self.pair_s * pairs
        return (
            self.step_s
            + self.rows.interpolate(rows)
            + head_s
            + attention_s
            + self.sequence_s * sequences
        )


@dataclass(frozen=True)
class AdaptedStepCostModel(StepCostModel):
    """The costs of steps whose sequences have linear adapters."""

    served_adapters: ServedAdapters
    adapter_s: float  # Cost per different adapter in the step: reading its matrices.
    adapter_row_s: float  # Cost per new token: the FLOPs of the low-rank products.

    @classmethod
    def extend(
        cls,
        steps: StepCostModel,
        served_adapters: ServedAdapters,
        *,
        adapter_s: float,
        adapter_row_s: float,
    ) -> "AdaptedStepCostModel":
        costs = {cost.name: getattr(steps, cost.name) for cost in fields(StepCostModel)}
        return cls(
            **costs,
            served_adapters=served_adapters,
            adapter_s=adapter_s,
            adapter_row_s=adapter_row_s,
        )

    def step_seconds(
        self, rows: float, draws: float, context: float, pairs: float, sequences: float
    ) -> float:
        """Return the seconds of a step; see `StepCostModel.step_seconds`.

        The products of all sequences with an adapter read its matrices once.
        """
        seconds = super().step_seconds(rows, draws, context, pairs, sequences)
        read_s = self.adapter_s * self.served_adapters.distinct(sequences)
        return seconds + (max(read_s, self.adapter_row_s * rows) if rows > 0 else 0.0)
