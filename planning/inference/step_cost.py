"""Steps: what a step of our own engine takes, by what is in it.

A few curves and slopes of one model, in one split, on one device. They are measured, or put
together from a spec sheet; whoever plays requests through them cannot tell which. No torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Straight lines through points, on to both sides of them. It begins at the first point."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        place = min(max(1, bisect_right(points, (x, float("inf")))), len(points) - 1)
        (left, low), (right, high) = points[place - 1], points[place]
        if x <= points[0][0]:
            return points[0][1]
        return low + (x - left) * (high - low) / (right - left)

    def scaled(self, factor: float) -> "Curve":
        return Curve(tuple((x, factor * y) for x, y in self.points))

    @classmethod
    def sum(cls, curves: Sequence["Curve"]) -> "Curve":
        places = sorted({x for curve in curves for x, _ in curve.points})
        return cls(tuple((x, sum(curve.at(x) for curve in curves)) for x in places))


@dataclass(frozen=True)
class Steps:
    """Seconds of one step on the slowest stage. Slopes are of one more of each."""

    rows: Curve  # By new tokens: all that is done row by row in the layers.
    draws: Curve  # By tokens drawn: the head, and sampling.
    context_s: float  # A token that a decoding sequence looks back at.
    pair_s: float  # A prompt's token and one before it.
    sequence_s: float  # A sequence in the step: its plan, its message.
    step_s: float  # Any step: launches, the planner's turn.

    def seconds(
        self, rows: float, draws: float, context: float, pairs: float, sequences: float
    ) -> float:
        """Of `rows` tokens in so many `sequences`, of which `draws` get a token."""
        if rows <= 0:
            return 0.0
        head_s = self.draws.at(draws) if draws > 0 else 0.0
        seen_s = self.context_s * context + self.pair_s * pairs
        return self.step_s + self.rows.at(rows) + head_s + seen_s + self.sequence_s * sequences
