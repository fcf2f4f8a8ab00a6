"""The linears of a model under the module names of transformers, as adapters name them.

The names come from the families' key tables. A linear of the model is one module (`c_attn`), or
each of its parts is a module (`q_proj`, `k_proj`, `v_proj`). In transformers 4, the linears of each
expert are modules, too; in transformers 5, parameters stack them (`ExpertsParameter`).
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
from gpt.parallel.weight_sharding import layer_number

WEIGHT_SUFFIX = ".weight"
EXPERTS_MODULE = ".experts."  # In the paths of experts' modules, in all families.


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
def family_modules(
    family_name: str, config: GPTConfig, *, with_experts: bool = True
) -> Mapping[str, LinearModule]:
    """Return the modules of the adaptable linears of a model of a family, by path.

    A model may have thousands of experts' linears.
    """
    family, modules = FAMILIES[family_name], {}
    for linear in adaptable_linears(config).values():
        if linear.expert is not None and not with_experts:
            continue
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
    it does not have. The modules of experts are among them only if a path is one of them: in other
    versions of transformers, experts are no modules.
    """
    path_set = set(paths)
    with_experts = any(EXPERTS_MODULE in path for path in path_set)
    best: Mapping[str, LinearModule] = {}
    for name in FAMILIES:
        modules = family_modules(name, config, with_experts=with_experts)
        if len(path_set & modules.keys()) > len(path_set & best.keys()):
            best = modules
    return best, min(path_set - best.keys(), default=None)


@dataclass(frozen=True)
class ExpertsParameter:
    """A parameter of transformers that stacks a linear of all experts of a layer."""

    module: str  # The module with the parameter, for example `model.layers.3.mlp.experts`.
    name: str
    linears: tuple[AdaptableLinear, ...]  # By expert.
    interleaved: bool  # The outputs of gate and up alternate.

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def output_rows(self) -> Tensor:
        """Return the row of an expert's linear for each output of the parameter."""
        rows = torch.arange(self.linears[0].out_features)
        is_interleaved = self.interleaved and bool(self.linears[0].parts)
        return rows.view(2, -1).T.flatten() if is_interleaved else rows


@cache
def experts_parameters(
    family_name: str, config: GPTConfig
) -> Mapping[str, tuple[ExpertsParameter, ...]]:
    """Return a family's stacked parameters of experts, by module, in the order of the module."""
    family = FAMILIES[family_name]
    if not family.fused_experts:
        return {}
    parameters: dict[str, list[ExpertsParameter]] = {}
    linears: dict[tuple[int | None, str], list[AdaptableLinear]] = {}
    for linear in adaptable_linears(config).values():
        if linear.expert is not None:
            linears.setdefault((layer_number(linear.name), linear.module), []).append(linear)
    for experts in linears.values():
        keys = family.tensor_keys(experts[0].name + WEIGHT_SUFFIX)
        first_key = keys[0] if isinstance(keys, tuple) else keys
        if not isinstance(first_key, str):
            continue
        for suffix, fused in family.fused_experts.items():
            part = fused.parts[0].format(expert=0)
            if first_key.endswith(f".{part}"):
                prefix = first_key.removesuffix(part)
                for stored_part, table_part in family.key_renames.items():
                    prefix = prefix.replace(table_part, stored_part)
                module, _, name = f"{prefix}{suffix}".rpartition(".")
                parameter = ExpertsParameter(module, name, tuple(experts), fused.interleaved)
                parameters.setdefault(module, []).append(parameter)
    return {module: tuple(group) for module, group in parameters.items()}


def experts_modules(config: GPTConfig) -> frozenset[str]:
    """Return the paths of the modules with stacked experts in a model of any family."""
    by_family = (experts_parameters(name, config) for name in FAMILIES)
    return frozenset(module for parameters in by_family for module in parameters)


def find_experts_parameters(
    modules: Iterable[str], config: GPTConfig
) -> Mapping[str, tuple[ExpertsParameter, ...]] | None:
    """Return the stacked parameters of the family that has all these modules; None: none has them.

    Families differ in the order of the outputs. Those that interleave gates have an offset of them.
    """
    module_set = set(modules)
    for name in FAMILIES:
        parameters = experts_parameters(name, config)
        first = next(iter(parameters.values()), None)
        if first is None or first[0].interleaved != bool(config.glu_linear_offset):
            continue
        if module_set <= parameters.keys():
            return parameters
    return None
