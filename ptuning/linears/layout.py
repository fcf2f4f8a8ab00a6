"""Layout of trained linear adapters: their tensors, in the order of a vector.

The values of the adapters of all tasks are one vector, so that the training loop keeps, saves and
broadcasts them as it does a virtual-token table. This module uses the model's sizes, but no
weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import join_key, split_key
from gpt.parallel.adaptable_linears import AdaptableLinear, adaptable_linears
from gpt.parallel.adapter_sharding import part_rows
from gpt.parallel.weight_sharding import layer_number
from ptuning.config import LOW_RANK_METHODS, MethodConfig


@dataclass(frozen=True)
class LinearTensor:
    """A tensor of the change of a linear, or of a part of it."""

    task: int  # Index of the task whose adapter has the tensor.
    key: str  # The key of the linear or part (gpt/linear_adapter.py).
    name: str  # A field of LinearAdapter.
    shape: tuple[int, ...]  # Of the whole tensor.
    is_trained: bool  # Norms of weights are computed, not trained.

    @property
    def parameter_name(self) -> str:
        return f"tasks.{self.task}.{self.key}.{self.name}"


@dataclass(frozen=True)
class LinearsLayout:
    """The tensors of the adapters of all tasks, task after task."""

    tensors: tuple[LinearTensor, ...]
    linears: Mapping[str, AdaptableLinear]  # The linears of the model, by name.
    scales: tuple[float, ...]  # For each task, the factor of its low-rank products.

    @classmethod
    def create(cls, method_configs: Sequence[MethodConfig], config: GPTConfig) -> "LinearsLayout":
        """Return the layout of tasks with these settings.

        Raise ConfigError if the model has no such linears or layers.
        """
        if config.norm_placement != "pre" and any(
            method_config.method == "bottleneck" for method_config in method_configs
        ):
            raise ConfigError(
                "method is bottleneck, which is not supported in a model with a norm behind its "
                "blocks; set method: lora"
            )
        linears = adaptable_linears(config)
        tensors = [
            LinearTensor(task, key, *described)
            for task, method_config in enumerate(method_configs)
            for key in _adapted_keys(method_config, config, linears)
            for described in _tensors_of(key, linears, method_config, config)
        ]
        scales = tuple(method_config.low_rank_scale for method_config in method_configs)
        return cls(tuple(tensors), linears, scales)

    @property
    def task_count(self) -> int:
        return len(self.scales)

    @property
    def size(self) -> int:
        """The number of values of all tasks."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def task_values(self, task: int) -> slice:
        """Return where the values of a task are in the vector."""
        sizes = [0] * self.task_count
        for tensor in self.tensors:
            sizes[tensor.task] += math.prod(tensor.shape)
        start = sum(sizes[:task])
        return slice(start, start + sizes[task])

    def pack(self, tasks: Sequence[Mapping[str, LinearAdapter]]) -> Tensor:
        """Return the vector of the adapters of all tasks."""
        values = [getattr(tasks[tensor.task][tensor.key], tensor.name) for tensor in self.tensors]
        return torch.cat([value.flatten() for value in values])

    def unpack(self, vector: Tensor) -> tuple[dict[str, LinearAdapter], ...]:
        """Return the adapter of each task; the tensors are views of `vector`."""
        sizes = [math.prod(tensor.shape) for tensor in self.tensors]
        fields: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.task_count)]
        for tensor, values in zip(self.tensors, vector.split(sizes), strict=True):
            linear = fields[tensor.task].setdefault(tensor.key, {})
            linear[tensor.name] = values.view(tensor.shape)
        return tuple(
            {key: LinearAdapter(**tensors, scale=scale) for key, tensors in task.items()}
            for task, scale in zip(fields, self.scales, strict=True)
        )


def _adapted_keys(
    method_config: MethodConfig, config: GPTConfig, linears: Mapping[str, AdaptableLinear]
) -> list[str]:
    """Return the keys of the linears and parts that the settings select, in forward order."""
    last_layer = max(method_config.layers, default=0)
    if last_layer >= config.num_layers:
        raise ConfigError(
            f"layers has {last_layer}, but the model has {config.num_layers} layers, numbered "
            "from 0; remove it"
        )
    layers = set(method_config.layers or range(config.num_layers))
    by_target = {linear.target: linear for linear in linears.values()}
    for target in method_config.targets:
        _check_target(target, by_target)
    keys = [
        join_key(linear.name, part)
        for linear in linears.values()
        if layer_number(linear.name) in layers
        and (linear.ends_block or method_config.method != "bottleneck")
        for part in linear.selected_parts(method_config.targets)
    ]
    if not keys:
        raise ConfigError(
            f"layers {list(method_config.layers)} and targets {list(method_config.targets)} select "
            f"no linear of this model; choose other layers, or targets among: "
            f"{', '.join(sorted(by_target))}"
        )
    return keys


def _check_target(target: str, by_target: Mapping[str, AdaptableLinear]) -> None:
    name, part = split_key(target)
    if name not in by_target:
        raise ConfigError(
            f"targets has {target}, but the layers of this model have no such linear; choose "
            f"among: {', '.join(sorted(by_target))}"
        )
    if part and part not in by_target[name].parts:
        raise ConfigError(
            f"targets has {target}, but {name} of this model has no part {part!r}; set {name}"
        )


def _tensors_of(
    key: str,
    linears: Mapping[str, AdaptableLinear],
    method_config: MethodConfig,
    config: GPTConfig,
) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return (name, shape, whether it is trained) of each tensor of a linear or part."""
    name, part = split_key(key)
    linear = linears[name]
    inputs, outputs = linear.in_features, len(part_rows(linear, part, config))
    if method_config.method in LOW_RANK_METHODS:
        rank = method_config.rank
        tensors: list[tuple[str, tuple[int, ...], bool]] = [
            ("lora_a", (rank, inputs), True),
            ("lora_b", (outputs, rank), True),
        ]
        if method_config.method == "dora":
            tensors += [("magnitude", (outputs,), True), ("weight_norm", (outputs,), False)]
        return tensors
    if method_config.method == "bottleneck":
        size = method_config.rank
        return [
            ("bottleneck_down", (size, outputs), True),
            ("bottleneck_up", (outputs, size), True),
            ("bottleneck_pre_norm_weight", (outputs,), True),
            ("bottleneck_pre_norm_bias", (outputs,), True),
        ]
    # As PEFT's feedforward modules: the factors of fc2 are those of its inputs.
    if name.endswith("linear_fc2"):
        return [("input_scale", (inputs,), True)]
    return [("output_scale", (outputs,), True)]
