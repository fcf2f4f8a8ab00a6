"""PEFT's LoRA of stacked experts (`target_parameters`): the layout of its tensors, both ways.

PEFT wraps the module of a stacked parameter. If it changes two parameters of a module, the wrappers
nest: the key of the first one, which is inside, has `base_layer`. A of all experts is (experts x
rank, inputs), an expert after the other; B is (outputs, rank x experts), where the number of the
expert varies fastest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.adapters.fused_linears import select_outputs
from gpt.adapters.peft_config import PeftLinearConfig
from gpt.adapters.peft_tensors import KEY_PREFIX, LORA_A, LORA_B, TEXT_PART, read_tensor
from gpt.checkpoint.logical_tensor import StoredTensor
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.huggingface.linear_modules import (
    ExpertsParameter,
    experts_modules,
    find_experts_parameters,
)
from gpt.linear_adapter import LinearAdapter

WRAPPED = ".base_layer"


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of stacked experts in a file, by module, then by what follows its path."""

    by_module: Mapping[str, Mapping[str, StoredTensor]]
    others: Mapping[str, StoredTensor]  # The tensors of other modules, by key.

    @classmethod
    def split(
        cls, stored: Mapping[str, StoredTensor], config: PeftLinearConfig, model: GPTConfig
    ) -> "ExpertTensors":
        """Split the tensors of a file; without target_parameters, there are no stacked experts."""
        if not config.has_target_parameters:
            return cls({}, stored)
        modules = experts_modules(model)
        by_module: dict[str, dict[str, StoredTensor]] = {}
        others = {}
        for key, tensor in stored.items():
            leaf = next((leaf for leaf in (LORA_A, LORA_B) if key.endswith(f".{leaf}")), None)
            path = key.removeprefix(KEY_PREFIX).removesuffix(f".{leaf}")
            module = TEXT_PART.sub("model.", path)
            while module.endswith(WRAPPED):
                module = module.removesuffix(WRAPPED)
            if leaf is not None and key.startswith(KEY_PREFIX) and module in modules:
                wrapper = path[len(path) - path.count(WRAPPED) * len(WRAPPED) :]
                by_module.setdefault(module, {})[f"{wrapper}.{leaf}"] = tensor
            else:
                others[key] = tensor
        return cls(by_module, others)


def read_experts(
    tensors: ExpertTensors, config: PeftLinearConfig, model: GPTConfig, weights: Path
) -> dict[str, LinearAdapter]:
    """Return the changes of experts in a file, by the keys of their linears."""
    if not config.has_target_parameters:
        return {}
    parameters = find_experts_parameters(tensors.by_module, model)
    if not tensors.by_module or parameters is None:
        raise AdapterError(
            f"{config.path} has target_parameters {config.target_parameters_text}, but "
            f"{weights.name} has no tensors of such parameters of this model's experts; train the "
            "adapter on target_modules, or give the model that it was trained on"
        )
    changes: dict[str, LinearAdapter] = {}
    for module, group in parameters.items():
        targets = [parameter for parameter in group if config.targets_parameter(parameter.path)]
        names = {
            f"{wrapper}.{leaf}": (parameter, leaf)
            for parameter, wrapper in _wrappers(targets)
            for leaf in (LORA_A, LORA_B)
        }
        stored = tensors.by_module.get(module, {})
        if names.keys() != stored.keys():
            different = min(names.keys() ^ stored.keys())
            raise AdapterError(
                f"{weights} and {config.path.name} differ in target_parameters: "
                f"{module}{different} is in one of them only; the files belong to different "
                "adapters: save the adapter again"
            )
        for parameter, wrapper in _wrappers(targets):
            a, b = (stored[f"{wrapper}.{leaf}"] for leaf in (LORA_A, LORA_B))
            changes |= _read_parameter(parameter, a, b, config, weights)
    return changes


def _wrappers(parameters: Sequence[ExpertsParameter]) -> Iterator[tuple[ExpertsParameter, str]]:
    """Yield the changed parameters of a module, and what precedes their tensors' names."""
    for index, parameter in enumerate(parameters):
        yield parameter, WRAPPED * (len(parameters) - 1 - index)


def _read_parameter(
    parameter: ExpertsParameter,
    stored_a: StoredTensor,
    stored_b: StoredTensor,
    config: PeftLinearConfig,
    weights: Path,
) -> dict[str, LinearAdapter]:
    experts, linear = len(parameter.linears), parameter.linears[0]
    scale = config.scale(parameter.path)
    rank, rows = scale.rank, torch.argsort(parameter.output_rows())
    source = f"{weights}: {{}} of {parameter.path}"
    a = read_tensor(stored_a, (experts * rank, linear.in_features), source.format(LORA_A))
    b = read_tensor(stored_b, (linear.out_features, rank * experts), source.format(LORA_B))
    by_expert = zip(
        parameter.linears,
        a.view(experts, rank, -1).unbind(),
        b.view(-1, rank, experts).unbind(-1),
        strict=True,
    )
    return {
        linear.name: LinearAdapter(own_a, own_b[rows], scale.scale)
        for linear, own_a, own_b in by_expert
    }


def stacked_tensors(
    parameters: Sequence[ExpertsParameter], changes: Mapping[str, LinearAdapter]
) -> dict[str, Tensor]:
    """Return PEFT's tensors of the changed parameters of a module, by key."""
    tensors = {}
    changed = [parameter for parameter in parameters if parameter.linears[0].name in changes]
    for parameter, wrapper in _wrappers(changed):
        rows = parameter.output_rows()
        own = [select_outputs(changes[linear.name], rows) for linear in parameter.linears]
        prefix = f"{KEY_PREFIX}{parameter.module}{wrapper}"
        a = [change.lora_a for change in own if change.lora_a is not None]
        b = [change.lora_b for change in own if change.lora_b is not None]
        tensors[f"{prefix}.{LORA_A}"] = torch.cat(a)
        tensors[f"{prefix}.{LORA_B}"] = torch.stack(b, -1).flatten(1)
    return tensors


def is_stackable(parameter: ExpertsParameter, changes: Mapping[str, LinearAdapter]) -> bool:
    """Tell whether the changes of all experts' linears can be those of a stacked parameter."""
    own = [changes.get(linear.name) for linear in parameter.linears]
    first = own[0]
    return first is not None and all(
        change is not None
        and [name for name, _ in change.tensors()] == ["lora_a", "lora_b"]
        and (change.rank, change.scale) == (first.rank, first.scale)
        for change in own
    )
