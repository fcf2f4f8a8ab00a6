"""config.json of a Hugging Face model: values checked, in the spellings of transformers 4 and 5.

A family asks for the fields that it has, over what its configuration class defaults to. What the
model would not compute exactly as transformers does is refused by its name, never ignored. Which
fields a family has is the family's to know; here is only how a value is read.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.config import Activation, RopeScaling
from gpt.errors import CheckpointError

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}


# Larger than any size that a model has, small enough to compute with.
WHOLE_MAX = 1 << 31
# The same of layers and experts: each has tensors of its own, which are listed one by one.
COUNT_MAX = 1 << 16


class Fields:
    """config.json, over what the family's configuration class defaults to; values are checked."""

    def __init__(self, record: Mapping[str, Any], where: Path) -> None:
        self.record, self.where = record, where

    def whole(self, key: str, absent: int | None = None, below: int = WHOLE_MAX) -> int:
        """A whole number; null, or no value, is `absent`, or an error if that is None."""
        value = self.record.get(key)
        value = absent if value is None else value
        if type(value) is not int or not 0 <= value < below:
            raise self.wrong(key, value, f"a whole number below {below}")
        return value

    def count(self, key: str) -> int:
        """How many layers or experts there are."""
        return self.whole(key, below=COUNT_MAX)

    def number(self, key: str, absent: float | None = None) -> float:
        value = self.record.get(key)
        value = absent if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # JSON as Python reads it has NaN and Infinity too.
        if not math.isfinite(number):
            raise self.wrong(key, value, "a finite number")
        return number

    def flag(self, key: str) -> bool:
        value = self.record.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def activation(self, key: str) -> Activation:
        name = str(self.record.get(key))
        if name not in ACTIVATIONS:
            raise self.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def layer_types(self) -> list[str] | None:
        """What the tokens of each layer see, where the file says it."""
        value = self.record.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
            raise self.wrong("layer_types", value, "a list of names")
        return value

    def refuse(self, key: str, *allowed: object) -> None:
        """Refuse a trait that changes the function, and that the model does not have."""
        value = self.record.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{self.where}: {key} is {json.dumps(value)[:60]}, which Preamble does not compute;"
                f" it reads only models where it is {json.dumps(allowed[0])}"
            )

    def wrong(self, key: str, value: object, need: str) -> CheckpointError:
        found = "is absent" if key not in self.record else f"is {json.dumps(value)[:60]}"
        return CheckpointError(
            f"{self.where}: {key} {found}; it must be {need}: fetch the file again or correct it"
        )


def refuse_mixture(fields: Fields) -> None:
    """Refuse layers that differ in what their tokens see."""
    kinds = set(fields.layer_types() or ())
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise CheckpointError(
            f"{fields.where}: layer_types mixes {', '.join(sorted(kinds))}, which "
            "Preamble does not compute; it reads models whose layers are alike"
        )


def rotary(fields: Fields, theta: str = "rope_theta", percent: str | None = None) -> dict[str, Any]:
    """GPTConfig's fields of rotary positions.

    transformers 5 keeps it all in rope_parameters; 4 had rope_scaling, and beside it what it called
    `theta` and `percent`. Without `percent` the family's code in transformers rotates whole heads,
    and cannot do else.
    """
    rope = fields.record.get("rope_parameters") or fields.record.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"{fields.where}: rope_parameters differ by layer, which Preamble does not compute; it "
            "reads models whose layers are alike"
        )
    beside = {"rope_theta": fields.number(theta)}
    if percent is not None:
        beside["partial_rotary_factor"] = fields.number(percent)
    inner = Fields(beside | rope, fields.where)
    found: dict[str, Any] = {"rotary_base": inner.number("rope_theta")}
    if percent is None:
        fields.refuse("partial_rotary_factor", 1.0)
        inner.refuse("partial_rotary_factor", 1.0)
    else:
        found["rotary_percent"] = inner.number("partial_rotary_factor")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        found["rope_scaling"] = _scaling(fields, inner, kind)
    return found


def _scaling(fields: Fields, rope: Fields, kind: object) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        # A value beside the rope's own wins in transformers, and the context stands in for none.
        original = fields.whole(
            "original_max_position_embeddings",
            rope.whole("original_max_position_embeddings", fields.whole("max_position_embeddings")),
        )
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeScaling("llama3", rope.number("factor"), low, high, original)
    raise CheckpointError(
        f"{fields.where}: rope type {kind!r} is not one that Preamble computes; known are "
        "default, linear, llama3"
    )
