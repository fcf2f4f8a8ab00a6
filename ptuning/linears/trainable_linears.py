"""Trainable adapter weights (LoRA, DoRA, IA3, bottlenecks) of one rank, in at least fp32.

A rank has the shards of the linears of its layers (gpt/parallel/adapter_sharding.py). The initial
values are drawn for whole tensors, by name, so they are the same at every split. The norms of the
changed weights, which DoRA needs, are computed once in each step, and get no gradients. This
module does not use the training loop.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.dropout import Dropout
from gpt.linear_adapter import (
    ExampleRows,
    InputDropout,
    LinearAdapter,
    LinearTerm,
    ModelAdapter,
    OutputColumns,
)
from gpt.linear_parts import split_key
from gpt.model.gpt_model import GPT
from gpt.parallel.adaptable_linears import ADAPTABLE_LINEARS, AdaptableLinear
from gpt.parallel.adapter_sharding import local_part_rows, output_columns
from gpt.parallel.collectives import all_reduce_no_grad, sum_over_expert_ranks
from gpt.parallel.weight_sharding import layer_number
from ptuning.config import MethodConfig
from ptuning.linears.layout import LinearsLayout, LinearTensor
from ptuning.prompt.initialization import seeded_generator
from ptuning.task import Task

# Rows of a weight that are converted to fp32 at once, to compute the norms of its rows.
NORM_ROWS = 1024


@dataclass(frozen=True, eq=False)
class TrainableLinear:
    """The tensors of one linear or part on this rank."""

    task: int
    key: str
    linear: AdaptableLinear
    part: str
    tensors: dict[str, Tensor]  # Trained tensors by name.
    weight: Tensor  # The base weight's rows of this rank.
    # The rows of `weight` that belong to the part; None: all rows.
    rows: Tensor | None
    # The squares of the norms of the base weight's rows; only for a magnitude.
    squared_norm: Tensor | None


class TrainableLinears:
    """The adapter weights of all tasks that are on this rank."""

    def __init__(
        self,
        layout: LinearsLayout,
        initial: Sequence[Mapping[str, LinearAdapter]],
        chunks: Sequence[GPT],
        *,
        dropout_rates: Sequence[float] = (),
    ) -> None:
        """Shard whole tensors, one mapping per task.

        Without a magnitude in `initial`, it starts as the norm of the weight. `dropout_rates` has
        the rate of each task; empty: no dropout. All tensor-parallel ranks must call this.
        """
        self.layout = layout
        self.config = chunks[0].config
        self.mesh = chunks[0].mesh
        self.dropout_rates = tuple(dropout_rates) or (0.0,) * layout.task_count
        self._dtype = torch.promote_types(chunks[0].dtype, torch.float32)
        self._chunks = {layer: chunk for chunk in chunks for layer in chunk.layers}
        self.linears = list(self._create(initial))
        # For each linear with a magnitude: the norms of the step, and the factor that the
        # micro-batches read and whose gradient they add up.
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}

    def _create(self, initial: Sequence[Mapping[str, LinearAdapter]]) -> Iterator[TrainableLinear]:
        by_key: dict[tuple[int, str], list[LinearTensor]] = {}
        for tensor in self.layout.tensors:
            by_key.setdefault((tensor.task, tensor.key), []).append(tensor)
        for (task, key), tensors in by_key.items():
            name, part = split_key(key)
            chunk = self._chunks.get(layer_number(name) or 0)
            if chunk is None or self._split_of(name) is None:
                continue
            linear = self.layout.linears[name]
            weight = chunk.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            rows = self._weight_rows(linear, part)
            squares = None
            if any(tensor.name == "magnitude" for tensor in tensors):
                squares = self._sum_columns(
                    linear,
                    torch.cat([block.square().sum(1) for block in self._blocks(weight, rows)]),
                )
            values: dict[str, Tensor] = {}
            for tensor in tensors:
                full_tensor = getattr(initial[task][key], tensor.name)
                if not tensor.is_trained:
                    continue
                if full_tensor is None:
                    assert tensor.name == "magnitude" and squares is not None
                    value = squares.sqrt()
                else:
                    value = self._shard(tensor, full_tensor)
                values[tensor.name] = value.requires_grad_()
            yield TrainableLinear(task, key, linear, part, values, weight, rows, squares)

    def named_tensors(self) -> Iterator[tuple[str, TrainableLinear, str, Tensor]]:
        """Yield the parameter name, the linear, the tensor's name and the trained tensor."""
        for linear in self.linears:
            for name, tensor in linear.tensors.items():
                yield f"tasks.{linear.task}.{linear.key}.{name}", linear, name, tensor

    def first_layer(self, tasks: Container[int]) -> int:
        """Return the lowest layer of the model that an adapter changes; the same on all ranks."""
        return min(
            layer_number(tensor.key) or 0 for tensor in self.layout.tensors if tensor.task in tasks
        )

    def begin_step(self, tasks: Container[int] | None = None) -> tuple[ModelAdapter, ...]:
        """Return the adapter of each task for the micro-batches of a step.

        The adapters of other tasks than `tasks` (None: all tasks) are empty.
        """
        adapters: list[dict[str, list[LinearTerm]]] = [{} for _ in range(self.layout.task_count)]
        self._factors = {}
        for index, linear in enumerate(self.linears):
            if tasks is not None and linear.task not in tasks:
                continue
            tensors = linear.tensors
            factor = None
            if "magnitude" in tensors:
                norm = self._norm(linear)
                factor = (tensors["magnitude"].detach() / norm).requires_grad_()
                self._factors[index] = norm, factor
            bottleneck = None
            if "bottleneck_down" in tensors:
                bottleneck = LinearAdapter(**tensors).bottleneck  # type: ignore[arg-type]
            columns = None
            if not linear.linear.is_row_parallel:
                columns = self._columns(linear.linear, linear.part)
            term = LinearTerm(
                columns,
                tensors.get("lora_a"),
                tensors.get("lora_b"),
                self.layout.scales[linear.task],
                factor,
                tensors.get("output_scale"),
                tensors.get("input_scale"),
                bottleneck=bottleneck,
            )
            adapters[linear.task].setdefault(linear.linear.name, []).append(term)
        return tuple(adapters)

    def end_step(self) -> None:
        """Compute the gradients of the magnitudes, after the backward passes of a step."""
        for index, (norm, factor) in self._factors.items():
            if factor.grad is not None:
                self.linears[index].tensors["magnitude"].grad = factor.grad / norm
        self._factors = {}

    def with_dropout(
        self, adapter: ModelAdapter, task: int, dropout: Dropout, examples: ExampleRows
    ) -> ModelAdapter:
        """Return the adapter of a task with dropout masks for its examples in a micro-batch."""
        rate = self.dropout_rates[task]
        if not rate:
            return adapter
        return {
            name: [
                replace(
                    term, input_dropout=self._input_dropout(name, part, dropout, rate, examples)
                )
                for part, term in enumerate(terms)
            ]
            for name, terms in adapter.items()
        }

    def _input_dropout(
        self, name: str, part: int, dropout: Dropout, rate: float, examples: ExampleRows
    ) -> InputDropout:
        linear = self.layout.linears[name]
        # The sites of the model's own dropout have other numbers after the layer.
        expert = () if linear.expert is None else (linear.expert,)
        module = 100 + ADAPTABLE_LINEARS.index(linear.module)
        site = (layer_number(name) or 0, module, part, *expert)
        columns = slice(None)
        if linear.is_row_parallel:
            ((start, stop),) = linear.shard(self.config, *self._own_split(linear)).ranges
            columns = slice(start, stop)
        return InputDropout(dropout, rate, site, linear.in_features, columns, examples)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Return the vector of the whole adapters on every rank. All ranks must call this.

        Each rank writes its own shards into a vector of zeros, and an all-reduce sums the vectors.
        A value that several ranks have is written by the first of them.
        """
        mesh = self.mesh
        vector = torch.zeros(self.layout.size, dtype=self._dtype, device=mesh.device)
        values = {
            f"tasks.{linear.task}.{linear.key}.weight_norm": self._norm(linear)
            for linear in self.linears
            if "magnitude" in linear.tensors
        }
        values |= {name: value for name, _, _, value in self.named_tensors()}
        sizes = [math.prod(tensor.shape) for tensor in self.layout.tensors]
        for tensor, target in zip(self.layout.tensors, vector.split(sizes), strict=True):
            value = values.get(tensor.parameter_name)
            if value is not None and not mesh.dp_rank:
                self._write_own_share(tensor, value, target.view(tensor.shape))
        if mesh.tp * mesh.dp * mesh.pp > 1:
            buffer = vector.cpu() if mesh.stages_through_host else vector
            dist.all_reduce(buffer)
            vector = buffer.to(mesh.device)
        return vector

    def _write_own_share(self, tensor: LinearTensor, value: Tensor, target: Tensor) -> None:
        own_rank, _ = self._own_split(self.layout.linears[split_key(tensor.key)[0]])
        location = self._location(tensor, own_rank)
        if location is None:
            if not own_rank:
                target.copy_(value)
            return
        dimension, indices = location
        is_first = torch.ones(len(indices), dtype=torch.bool)
        for rank in range(own_rank):
            earlier = self._location(tensor, rank)
            assert earlier is not None
            is_first &= ~torch.isin(indices, earlier[1])
        own = indices[is_first].to(target.device)
        positions = is_first.nonzero().flatten().to(value.device)
        target.index_copy_(dimension, own, value.index_select(dimension, positions))

    def _shard(self, tensor: LinearTensor, full_tensor: Tensor) -> Tensor:
        """Return a copy of this rank's shard of a whole tensor."""
        own_rank, _ = self._own_split(self.layout.linears[split_key(tensor.key)[0]])
        location = self._location(tensor, own_rank)
        value = full_tensor.to(self._dtype, copy=True)
        if location is not None:
            dimension, indices = location
            value = value.index_select(dimension, indices.to(value.device))
        return value.to(self.mesh.device)

    def _location(self, tensor: LinearTensor, rank: int) -> tuple[int, Tensor] | None:
        """Return the dimension and the indices of a rank's shard; None: each rank has all.

        `rank` is one of the ranks that share the linear.
        """
        name, part = split_key(tensor.key)
        linear = self.layout.linears[name]
        _, tp = self._own_split(linear)
        is_input = tensor.name in ("lora_a", "input_scale")
        if linear.is_row_parallel != is_input or tp == 1:
            return None
        if is_input:
            ranges = linear.shard(self.config, rank, tp).ranges
            columns = torch.cat([torch.arange(start, stop) for start, stop in ranges])
            return (1 if tensor.name == "lora_a" else 0), columns
        return 0, local_part_rows(linear, part, self.config, rank=rank, tp=tp)

    def _split_of(self, name: str) -> tuple[int, int] | None:
        """Return this rank's index among the ranks that share a linear, and their number.

        None: other ranks have the linear, which is an expert's.
        """
        return self.mesh.in_stage.split_of(name, self.config)

    def _own_split(self, linear: AdaptableLinear) -> tuple[int, int]:
        """Return the `_split_of` a linear that this rank has."""
        split = self._split_of(linear.name)
        assert split is not None, linear.name
        return split

    def _columns(self, linear: AdaptableLinear, part: str) -> OutputColumns | None:
        """Return the columns of a part in this rank's output of a column-parallel linear."""
        return output_columns(linear, part, self.config, self._own_split(linear)[1])

    def _weight_rows(self, linear: AdaptableLinear, part: str) -> Tensor | None:
        """Return the rows of this rank's base weight that belong to a part; None: all."""
        if not part or linear.is_row_parallel:
            return None
        columns = self._columns(linear, part)
        assert columns is not None
        starts = columns.offset + columns.stride * torch.arange(columns.count)
        return (starts.unsqueeze(1) + torch.arange(columns.width)).flatten().to(self.mesh.device)

    def _blocks(self, weight: Tensor, rows: Tensor | None) -> Iterator[Tensor]:
        """Yield the rows of a weight in at least fp32, a few at a time."""
        count = len(weight) if rows is None else len(rows)
        for start in range(0, count, NORM_ROWS):
            block = slice(start, min(start + NORM_ROWS, count))
            selected = weight[block] if rows is None else weight.index_select(0, rows[block])
            yield selected.detach().to(self._dtype)

    def _sum_columns(self, linear: AdaptableLinear, sums: Tensor) -> Tensor:
        """Return sums over all input channels from those over this rank's channels."""
        _, tp = self._own_split(linear)
        if not linear.is_row_parallel or tp == 1:
            return sums
        if tp == self.mesh.tp:
            return all_reduce_no_grad(sums, self.mesh)
        return sum_over_expert_ranks(sums, self.mesh)

    @torch.no_grad()
    def _norm(self, linear: TrainableLinear) -> Tensor:
        """Return the norm of each row of W + scale * B A, without computing B A.

        ||w + s b A||^2 = ||w||^2 + 2 s (W A^T) . b + s^2 (b (A A^T)) . b for a row w of W and the
        row b of B.
        """
        a, b = linear.tensors["lora_a"], linear.tensors["lora_b"]
        scale = self.layout.scales[linear.task]
        assert linear.squared_norm is not None
        products = torch.cat([block @ a.T for block in self._blocks(linear.weight, linear.rows)])
        changes = ((2 * scale * products + scale**2 * (b @ (a @ a.T))) * b).sum(1)
        return (linear.squared_norm + self._sum_columns(linear.linear, changes)).sqrt()


def build_trainable_linears(
    method_configs: Sequence[MethodConfig],
    tasks: Sequence[Task],
    chunks: Sequence[GPT],
    *,
    seed: int,
) -> TrainableLinears:
    """Create the initial adapter weights of tasks with these settings; they have no effect yet.

    A has Kaiming's uniform distribution with a = sqrt(5), as in PEFT, and B is zero. Of a
    bottleneck, the first factor has Xavier's normal distribution, as in NeMo, and the second one is
    zero. All ranks must call this function.
    """
    layout = LinearsLayout.create(method_configs, chunks[0].config)
    own_layers = {layer for chunk in chunks for layer in chunk.layers}
    initial: list[dict[str, LinearAdapter]] = [{} for _ in tasks]
    tensors_by_key: dict[tuple[int, str], dict[str, Tensor]] = {}
    for tensor in layout.tensors:
        if layer_number(tensor.key) not in own_layers:
            continue
        tensor_by_name = tensors_by_key.setdefault((tensor.task, tensor.key), {})
        if tensor.name == "lora_a":
            name = f"{tensor.key}.lora_a.{tasks[tensor.task].name}"
            draws = torch.rand(
                tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float64
            )
            tensor_by_name[tensor.name] = (draws * 2 - 1) / math.sqrt(tensor.shape[1])
        elif tensor.name == "bottleneck_down":
            name = f"{tensor.key}.bottleneck_down.{tasks[tensor.task].name}"
            normal = torch.randn(
                tensor.shape, generator=seeded_generator(seed, name), dtype=torch.float64
            )
            tensor_by_name[tensor.name] = normal * math.sqrt(2 / sum(tensor.shape))
        elif tensor.name in ("lora_b", "bottleneck_up", "bottleneck_pre_norm_bias"):
            tensor_by_name[tensor.name] = torch.zeros(tensor.shape, dtype=torch.float64)
        elif tensor.name in ("output_scale", "input_scale", "bottleneck_pre_norm_weight"):
            tensor_by_name[tensor.name] = torch.ones(tensor.shape, dtype=torch.float64)
    for (task, key), tensors in tensors_by_key.items():
        initial[task][key] = LinearAdapter(**tensors, scale=layout.scales[task])
    dropout_rates = [method_config.dropout for method_config in method_configs]
    return TrainableLinears(layout, initial, chunks, dropout_rates=dropout_rates)
