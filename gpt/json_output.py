"""JSON output: replaces numbers that JSON cannot represent."""

import math
from collections.abc import Mapping


def nonfinite_to_none(value: object) -> object:
    """Return `value` with None in place of infinite and NaN numbers, at any depth of nesting.

    Tuples become lists.
    """
    if isinstance(value, Mapping):
        return {key: nonfinite_to_none(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_none(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
