"""How long a step may take before its ranks count as hung: learned from the steps before it.

A prompt of 10 s is legal where steps of its size take seconds, and a decode step of 10 s is not. So
a limit has a floor, the recent steps' own times, and what a step of this size would take at the
pace of the largest recent ones. It knows nothing of ranks; silence is somebody else's to notice.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

FLOOR_S = 2.0
FACTOR = 10.0
RECENT_STEPS = 256
# An engine with nothing to do speaks about this often.
IDLE_S = 1.0


class _Took(NamedTuple):
    tokens: int
    context: int
    seconds: float


class Patience:
    """`stages` steps are in flight at once; `first_s` is for the first, of which nothing is known.

    `fixed_s` stands instead of all that is learned.
    """

    def __init__(self, fixed_s: float | None, first_s: float, stages: int = 1) -> None:
        self._fixed_s, self._first_s = fixed_s, first_s
        self._begun: deque[tuple[int, int]] = deque(maxlen=stages)
        self._recent: deque[_Took] = deque(maxlen=RECENT_STEPS)

    def note(self, tokens: int, context: int, seconds: float) -> None:
        """A step took `seconds`, and one of this size begins; 0 tokens: none does."""
        if self._begun and self._begun[0][0] and seconds > 0:
            self._recent.append(_Took(*self._begun[0], seconds))
        if not tokens:
            self._begun.clear()  # Nor is an earlier one still in flight.
        self._begun.append((tokens, context))

    @property
    def least_s(self) -> float:
        """Shorter than this no limit is: until then, nobody need ask."""
        return FLOOR_S if self._fixed_s is None else self._fixed_s

    def limit_s(self) -> float:
        """How long silence may last from the last word on."""
        largest = max(self._begun, default=(0, 0))
        idle_s = 0.0 if any(tokens for tokens, _ in self._begun) else IDLE_S
        if self._fixed_s is not None:
            return self._fixed_s + idle_s
        if not self._recent:
            return self._first_s if largest[0] else FLOOR_S + idle_s
        times = sorted(took.seconds for took in self._recent)
        usual_s = times[(len(times) - 1) * 99 // 100]
        expected_s = max((self._expected_s(*one) for one in self._begun if one[0]), default=0.0)
        return max(FLOOR_S, FACTOR * usual_s, FACTOR * expected_s) + idle_s

    def _expected_s(self, tokens: int, context: int) -> float:
        """At the pace of the steps that were as large, or nearly; each of the two by itself."""
        by_tokens = _pace(((took.tokens, took.seconds) for took in self._recent), tokens)
        by_context = _pace(((took.context, took.seconds) for took in self._recent), context)
        if context and not by_context:
            return self._first_s / FACTOR
        return by_tokens * tokens + by_context * context


def _pace(pairs: Iterable[tuple[int, float]], size: int) -> float:
    """Seconds for each of `size`: the slowest pace among steps at least half as large. 0: unknown.

    If none was, that of the largest, which is too slow rather than too fast for a larger one.
    """
    known = [(count, seconds) for count, seconds in pairs if count > 0]
    if not known:
        return 0.0
    least = min(size / 2, max(count for count, _ in known))
    return max(seconds / count for count, seconds in known if count >= least)
