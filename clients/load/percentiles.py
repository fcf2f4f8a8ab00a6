"""Latency percentiles. The module imports only the standard library."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank percentile, or NaN if there are no values.

    The percentile is the smallest value v such that at least `fraction` of all values are <= v.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.nan
