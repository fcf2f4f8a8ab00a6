"""The linears of a model under the module names of transformers, as adapters name them.

The names come from the families' key tables. A linear of the model is one module (`c_attn`), or
each of its parts is a module (`q_proj`, `k_proj`, `v_proj`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.formats.huggingface.families.family import Family, FusedQKV
from gpt.formats.huggingface.families.registry import FAMILIES
from gpt.linear_parts import QKV_PARTS, join_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import part_rows

WEIGHT_SUFFIX = ".weight"


@dataclass(frozen=True)
class LinearModule:
    """A linear or a part of one, and the module of transformers that computes it."""

    path: str  # The module's name, for example `model.layers.3.self_attn.q_proj`.
    linear: AdaptableLinear
    part: str  # "" for a whole linear.
    has_concatenated_qkv: bool = False  # The module has all queries, then all keys, all values.

    @property
    def key(self) -> str:
        return join_key(self.linear.name, self.part)

    def output_rows(self, config: GPTConfig) -> Tensor:
        """Return the row of the linear or part for each output of the module."""
        if self.has_concatenated_qkv:
            return torch.cat([part_rows(self.linear, part, config) for part in QKV_PARTS])
        return torch.arange(len(part_rows(self.linear, self.part, config)))


@cache
def family_modules(family_name: str, config: GPTConfig) -> Mapping[str, LinearModule]:
    """Return the modules of the adaptable linears of a model of a family, by path."""
    family, modules = FAMILIES[family_name], {}
    for linear in adaptable_linears(config).values():
        for module in _linear_modules(family, linear):
            modules[module.path] = module
    return modules


def _linear_modules(family: Family, linear: AdaptableLinear) -> list[LinearModule]:
    """Return the modules of a linear; none if the family's linears have other parts."""
    match family.tensor_keys(linear.name + WEIGHT_SUFFIX):
        case str(key):
            return [LinearModule(key.removesuffix(WEIGHT_SUFFIX), linear, "")]
        case FusedQKV(key):
            return [LinearModule(key.removesuffix(WEIGHT_SUFFIX), linear, "", True)]
        case tuple(keys) if len(keys) == len(linear.parts):
            return [
                LinearModule(key.removesuffix(WEIGHT_SUFFIX), linear, part)
                for key, part in zip(keys, linear.parts, strict=True)
            ]
    return []


def find_family_modules(
    paths: Iterable[str], config: GPTConfig
) -> tuple[Mapping[str, LinearModule], str | None]:
    """Return the modules of the family that has all paths, and None.

    If no family has them, return the modules of the family that has most of them, and a path that
    it does not have.
    """
    path_set = set(paths)
    best: Mapping[str, LinearModule] = {}
    for name in FAMILIES:
        modules = family_modules(name, config)
        if len(path_set & modules.keys()) > len(path_set & best.keys()):
            best = modules
    return best, min(path_set - best.keys(), default=None)
