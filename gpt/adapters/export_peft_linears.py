"""PEFT export: the changes of an adapter's linears as LoRA, activated LoRA, DoRA or IA3.

The modules have the names of a Hugging Face family. A change of a fused linear becomes changes of
the family's separate modules (A is copied, the rows of B are divided), or the reverse. An adapter
that came from PEFT is written with the same tensors. PEFT has one kind for a whole adapter, and
none with virtual tokens and adapter weights; such adapters are refused.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.export_peft import PEFT_FILES, AdapterExport, lost_field_notes
from gpt.adapters.fused_linears import join_parts, linear_groups, select_outputs, split_into_parts
from gpt.adapters.peft_config import IA3, LORA
from gpt.adapters.peft_experts import is_stackable, stacked_tensors
from gpt.adapters.peft_tensors import IA3_VECTOR, KEY_PREFIX, LORA_A, LORA_B, MAGNITUDE
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.huggingface.linear_modules import (
    ExpertsParameter,
    LinearModule,
    experts_parameters,
    family_modules,
)
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import LOCAL_EXPERTS


@dataclass(frozen=True)
class _ModuleChange:
    """The change of one module; its outputs are in the module's order."""

    path: str
    change: LinearAdapter


def convert_linears_to_peft(
    adapter: Adapter, base: Checkpoint | None, base_name: str | None, family: str | None
) -> AdapterExport:
    """Convert the adapter weights; `family` is the model_type of the base model."""
    name = adapter.card.name
    if len(adapter.table):
        raise AdapterError(
            f"adapter {name!r} has {len(adapter.table)} virtual tokens and adapter weights, and "
            "PEFT has no adapter with both; train one of the two, or serve it with Preamble"
        )
    if any(linear.bottleneck is not None for linear in adapter.linears.values()):
        raise AdapterError(
            f"adapter {name!r} has bottlenecks (a Houlsby adapter), which PEFT does not have; "
            "export it with --to nemo"
        )
    if base is None or family is None:
        raise AdapterError(
            f"adapter {name!r} changes linears, whose names in PEFT depend on the base model; give "
            "the base model with --model"
        )
    stacks = [] if adapter.card.invocation else _stacks(adapter, base.config, family)
    stacked = {linear.name for stack in stacks for linear in stack.linears}
    linears = {key: change for key, change in adapter.linears.items() if key not in stacked}
    changes = _module_changes(name, linears, base.config, family)
    stacked_changes = [adapter.linears[stack.linears[0].name] for stack in stacks]
    is_ia3 = _is_ia3(name, [*(module.change for module in changes), *stacked_changes])
    config: dict[str, object] = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
    }
    modules = family_modules(family, base.config)
    if is_ia3:
        config |= _ia3_fields(changes, modules, base.config)
    else:
        by_path = {module.path: module.change for module in changes}
        by_path |= {
            stack.path: change for stack, change in zip(stacks, stacked_changes, strict=True)
        }
        config |= _lora_fields(adapter, by_path)
        config["target_modules"] = _module_names(_paths(changes), modules, base.config)
        config["target_parameters"] = sorted(stack.path for stack in stacks) or None
    # Conv1D stores its weight as (in, out). The adapter's own tensors are the same.
    config["fan_in_fan_out"] = family == "gpt2"
    # Parts of a fused linear share A, but safetensors stores no shared memory.
    tensors = {
        f"{KEY_PREFIX}{module.path}.{leaf}": tensor.clone(memory_format=torch.contiguous_format)
        for module in changes
        for leaf, tensor in _tensors(module.change)
    }
    for _, group in groupby(stacks, key=lambda stack: stack.module):
        tensors |= stacked_tensors(list(group), adapter.linears)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    weights = safetensors.torch.save(tensors, {"format": "pt"})
    files = dict(zip(PEFT_FILES, (text.encode(), weights), strict=True))
    return AdapterExport(files, lost_field_notes(adapter))


def _stacks(adapter: Adapter, config: GPTConfig, family: str) -> list[ExpertsParameter]:
    """Return the family's stacked parameters that the adapter changes, as transformers 5 has them.

    None are returned if PEFT cannot express all changes of experts as changes of such parameters.
    They are then written as changes of the experts' modules, which transformers 4 has.
    """
    if any(change.magnitude is not None for change in adapter.linears.values()):
        return []
    by_first_linear: dict[str, ExpertsParameter] = {}
    for group in experts_parameters(family, config).values():
        for parameter in group:
            first = parameter.linears[0].name
            # GraniteMoE has other modules in transformers 4.
            is_current = parameter.module.endswith(".experts")
            if is_current and is_stackable(parameter, adapter.linears):
                by_first_linear[first] = parameter
    stacks = list(by_first_linear.values())
    stacked = {linear.name for stack in stacks for linear in stack.linears}
    experts = {key for key in adapter.linears if LOCAL_EXPERTS in key}
    return stacks if experts <= stacked else []


def _module_changes(
    name: str, linears: Mapping[str, LinearAdapter], config: GPTConfig, family: str
) -> list[_ModuleChange]:
    """Return the changes under the modules of the family, in forward-pass order."""
    by_linear: dict[str, list[LinearModule]] = {}
    for module in family_modules(family, config).values():
        by_linear.setdefault(module.linear.name, []).append(module)
    changes = []
    for linear, parts in linear_groups(linears, config):
        modules = by_linear[linear.name]
        are_separate = bool(modules[0].part)
        if are_separate and "" in parts:
            parts = split_into_parts(parts[""], linear, config)
        elif not are_separate and "" not in parts:
            parts = {"": join_parts(name, parts, linear, config)}
        for module in modules:
            if module.part in parts:
                change = select_outputs(parts[module.part], module.output_rows(config))
                changes.append(_ModuleChange(module.path, change))
    return changes


def _is_ia3(name: str, changes: Iterable[LinearAdapter]) -> bool:
    """Tell whether the adapter is IA3; refuse a mixture of kinds."""
    kinds = {
        "IA3" if not change.rank else "LoRA" if change.magnitude is None else "DoRA"
        for change in changes
    }
    has_both = any(
        change.rank and (change.output_scale is not None or change.input_scale is not None)
        for change in changes
    )
    if len(kinds) > 1 or has_both:
        raise AdapterError(
            f"adapter {name!r} combines {', '.join(sorted(kinds))} in one adapter, which PEFT does "
            "not support; train an adapter of one kind"
        )
    return kinds == {"IA3"}


def _tensors(change: LinearAdapter) -> Iterable[tuple[str, Tensor]]:
    if change.lora_a is not None and change.lora_b is not None:
        yield LORA_A, change.lora_a
        yield LORA_B, change.lora_b
    if change.magnitude is not None:
        yield MAGNITUDE, change.magnitude
    if change.output_scale is not None:
        yield IA3_VECTOR, change.output_scale.unsqueeze(1)
    if change.input_scale is not None:
        yield IA3_VECTOR, change.input_scale.unsqueeze(0)


def _paths(changes: Iterable[_ModuleChange]) -> list[str]:
    return [module.path for module in changes]


def _ia3_fields(
    changes: list[_ModuleChange], modules: Mapping[str, LinearModule], config: GPTConfig
) -> dict[str, object]:
    feedforward = [module for module in changes if module.change.input_scale is not None]
    targets = _module_names(_paths(changes), modules, config)
    names = _module_names(_paths(feedforward), modules, config)
    if not set(names) <= set(targets):  # PEFT requires a subset.
        targets, names = _paths(changes), _paths(feedforward)
    return {"peft_type": IA3, "target_modules": targets, "feedforward_modules": names}


def _lora_fields(adapter: Adapter, changes: Mapping[str, LinearAdapter]) -> dict[str, object]:
    """Return the fields of LoRA: the most frequent rank and alpha, and the others by path."""
    paths, own = list(changes), list(changes.values())
    use_rslora, alphas = _alphas(own)
    ranks = [change.rank for change in own]
    rank, alpha = _modal_number(ranks), _modal_number(alphas)
    return {
        "peft_type": LORA,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {
            path: other for path, other in zip(paths, ranks, strict=True) if other != rank
        },
        "alpha_pattern": {
            path: other for path, other in zip(paths, alphas, strict=True) if other != alpha
        },
        "use_rslora": use_rslora,
        "use_dora": own[0].magnitude is not None,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "alora_invocation_tokens": list(adapter.card.invocation) or None,
    }


def _modal_number(numbers: list[int] | list[float]) -> float:
    return Counter(numbers).most_common(1)[0][0]


def _alphas(changes: list[LinearAdapter]) -> tuple[bool, list[float]]:
    """Return alpha of each module, so that PEFT computes exactly its scale; and use_rslora.

    The scale is alpha / rank, or with use_rslora alpha / sqrt(rank). The form in which all alphas
    are whole numbers is preferred.
    """
    for use_rslora in (False, True):
        alphas = [_exact_alpha(change, use_rslora=use_rslora) for change in changes]
        if all(float(alpha).is_integer() for alpha in alphas):
            return use_rslora, [int(alpha) for alpha in alphas]
    return False, [_exact_alpha(change, use_rslora=False) for change in changes]


def _exact_alpha(change: LinearAdapter, *, use_rslora: bool) -> float:
    divisor = math.sqrt(change.rank) if use_rslora else change.rank
    alpha = change.scale * divisor
    candidates = (
        round(alpha),
        alpha,
        math.nextafter(alpha, math.inf),
        math.nextafter(alpha, -math.inf),
    )
    # Another number differs from the scale in the last bit of a double at most.
    return next((value for value in candidates if value / divisor == change.scale), alpha)


def _module_names(
    paths: list[str], modules: Mapping[str, LinearModule], config: GPTConfig
) -> list[str]:
    """Return names for target_modules that select exactly these modules.

    Short names such as `q_proj` are used if they select no other modules; else whole paths.
    """
    short_names = sorted({path.rpartition(".")[2] for path in paths})
    selected = {path for path in modules if path.rpartition(".")[2] in short_names}
    # A short name would also select modules of experts.
    return short_names if selected == set(paths) and not config.num_experts else paths
