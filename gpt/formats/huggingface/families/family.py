"""Family of Hugging Face models: the conversion of its config, and its tensor keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.parallel.weight_sharding import LAYERS_PREFIX, ParameterSpec, layer_number

# The number of an expert in a canonical name.
EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class FusedQKV:
    """The key of a tensor that has all queries, then all keys, then all values, as in GPT-2."""

    key: str


@dataclass(frozen=True)
class OffsetRows:
    """The key of a tensor that has `rows` unused rows in front, as OPT's position embeddings."""

    key: str
    rows: int


@dataclass(frozen=True)
class ScalarKey:
    """The key of a tensor without dimensions; the canonical tensor is a vector of one element."""

    key: str


@dataclass(frozen=True)
class FusedExperts:
    """How a tensor that stacks a parameter of all experts maps to the experts' keys.

    The tensor has the experts in dimension 0. `parts`: the suffixes of one expert's keys in
    `Family.key_table`, for example of gate and up; each part has an equal number of outputs.
    """

    parts: tuple[str, ...]
    transposed: bool = False  # Each expert's matrix is stored as (in, out).
    interleaved: bool = False  # The outputs of the parts alternate.


TensorKeys = str | tuple[str, ...] | FusedQKV | OffsetRows | ScalarKey


@dataclass(frozen=True)
class Family:
    """One model_type: the conversion of its config, and the file keys of each canonical tensor.

    `key_table` maps canonical names without the layer prefix to the keys in files of transformers
    4. A key contains `{n}` for the number of a layer, and `{expert}` for the number of an expert.
    `key_renames` and `fused_experts` convert the keys that are different in transformers 5.
    """

    to_gpt_config: Callable[[ConfigJson], GPTConfig]
    key_table: Mapping[str, TensorKeys]
    defaults: Mapping[str, Any]
    # Prefix of all keys except the head's. Files of the base model without a head lack the prefix.
    prefix: str
    conv1d: bool = False  # The weights of linears are stored as (in, out).
    # Parts of keys in files, and the parts of `key_table` keys that replace them.
    key_renames: Mapping[str, str] = field(default_factory=dict)
    # By the suffix of a key that stacks all experts.
    fused_experts: Mapping[str, FusedExperts] = field(default_factory=dict)
    # Whether files must have the stacked tensors. Other families are written with a tensor for each
    # expert, which all versions of transformers read.
    writes_fused_experts: bool = False
    # Keys of config.json for the number of layers for multi-token prediction. Files have these
    # layers after the model's layers; they are ignored.
    mtp_layer_keys: tuple[str, ...] = ()

    def mtp_layers(self, fields: ConfigJson) -> int:
        return max(
            [fields.count(key) for key in self.mtp_layer_keys if key in fields.record] or [0]
        )

    def tensor_keys(self, name: str) -> TensorKeys | None:
        """Return the keys of a canonical tensor; None if the family does not have this tensor."""
        layer = layer_number(name)
        expert_match = EXPERT_NUMBER.search(name)
        template = EXPERT_NUMBER.sub("{expert}", name)
        if layer is not None:
            template = template.split(".", 3)[3]  # Without the prefix `decoder.layers.N.`.
        keys = self.key_table.get(template)

        def format_key(key: str) -> str:
            return key.format(n=layer, expert=expert_match and expert_match[0])

        match keys:
            case None:
                return None
            case str():
                return format_key(keys)
            case FusedQKV(key):
                return FusedQKV(format_key(key))
            case OffsetRows(key, rows):
                return OffsetRows(format_key(key), rows)
            case ScalarKey(key):
                return ScalarKey(format_key(key))
        return tuple(map(format_key, keys))

    def stores_transposed(self, parameter: ParameterSpec) -> bool:
        """Tell whether files store this tensor as (in, out)."""
        return (
            self.conv1d and len(parameter.shape) == 2 and parameter.name.startswith(LAYERS_PREFIX)
        )
