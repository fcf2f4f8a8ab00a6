"""Trainer: one step, with gradient accumulation, over tensor, pipeline and data parallel ranks.

Each rank has its chunks of the model and computes its share of every batch. Adapter training on a
frozen model and full training use the same code. The virtual-token table is computed once per step.
All micro-batches read the table and add to its gradient; then one backward pass through the prompt
encoder propagates the sum. An all-reduce gives every rank the totals of a step, so all ranks make
the same decisions. This module writes no files.
"""

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.adapters.adapter_file import table_width
from gpt.dropout import Dropout
from gpt.errors import ConfigError
from gpt.linear_adapter import LinearAdapter, ModelAdapter
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import shard_adapter
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_communication import broadcast_from_first_stage
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import (
    MicroBatch,
    build_micro_batch,
    number_examples,
    split_into_micro_batches,
)
from ptuning.linears.trainable_linears import TrainableLinears
from ptuning.prompt.prefix_tuning import PrefixEncoder, shard_prefix_table
from ptuning.prompt.prompt_encoder import PromptEncoder
from ptuning.run_facts import GroupMetrics, StepMetrics
from ptuning.training.gradient_reduction import (
    TrainableTensor,
    trainable_encoder_tensors,
    trainable_linear_tensors,
    trainable_model_tensors,
    trainable_prefix_tensors,
)
from ptuning.training.loss_scale import LossScale
from ptuning.training.optimizer import Optimizer
from ptuning.training.pipeline import PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import (
    Pass,
    schedule_1f1b,
    schedule_forward_only,
    schedule_interleaved_1f1b,
)

# Maximum number of consecutive steps with gradient overflow; one more such step ends the run with
# an error.
SKIPPED_MAX = 50


@dataclass(frozen=True)
class _StepTotals:
    """Totals of a step over all ranks."""

    losses: Sequence[float]  # For each task, the sum of the losses of its tokens.
    # For each task group, the squared norm of its gradients of the scaled loss.
    squared_norms: Sequence[float]
    stop_requested: bool  # Whether a stop is requested on at least one rank.


class Trainer:
    """Trainer of one rank. All ranks must call the methods in the same order."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        config: TuneConfig,
        encoder: PromptEncoder | None = None,
        *,
        prefix: PrefixEncoder | None = None,
        linears: TrainableLinears | None = None,
        channels: PipelineChannels | None = None,
    ) -> None:
        """Create the optimizer for the trainable tensors.

        `encoder` produces the virtual-token table; it is None on all stages except the first. For
        method `prefix`, `prefix` takes the place of `encoder` on every rank, and for methods that
        change linears `linears` does. For method `full`, all three are None.
        """
        self.chunks = list(chunks)
        self.config = config
        self.encoder = encoder
        self.prefix = prefix
        self.linears = linears
        self.mesh: Mesh = chunks[0].mesh
        self.model_config = chunks[0].config
        self.step_number = 0  # Number of the last finished step.
        self.stop_requested = False  # A signal handler may set it at any time, on any rank.
        # Whether a stop was requested on any rank; becomes true after the same step on all ranks.
        self.should_stop = False
        tasks = config.data_config.resolved_tasks
        has_table = config.method_config.has_virtual_tokens
        self._table_rows = sum(task.virtual_tokens for task in tasks) if has_table else 0
        # The index of the task group of each task.
        self._group_of_task = [
            next(group for group, members in enumerate(config.task_groups) if task in members)
            for task in range(len(tasks))
        ]
        # The loss scale of each task group.
        self.loss_scales = [LossScale.for_dtype(chunks[0].dtype) for _ in config.task_groups]
        self._consecutive_skips = [0 for _ in config.task_groups]
        self._channels = channels or PipelineChannels(self.mesh)
        self.optimizer = Optimizer(
            self._trainable_tensors(),
            config.training_config,
            self.mesh,
            peak_learning_rates=config.group_learning_rates,
        )

    def step(self, examples: Sequence[Example]) -> StepMetrics:
        """Train on one batch and return its metrics; each data-parallel rank computes its share.

        Only the task groups that have examples in the batch are trained.
        """
        started = time.monotonic()
        self.step_number += 1
        tasks = {example.task_index for example in examples}
        groups = sorted({self._group_of_task[task] for task in tasks})
        loss_tokens = self._count_loss_tokens(examples)
        encoder_output, table = self._encode_table()
        micro_batches = self._with_adapters(self._micro_batches(examples, train=True), tasks)
        losses = run_passes(
            self.chunks,
            self._schedule(len(micro_batches), train=True),
            micro_batches,
            self._channels,
            table=table,
            prefix=None if self.prefix is None else self.prefix.key_values,
            loss_scales=[
                self.loss_scales[group].value / max(1, loss_tokens[group])
                for group in self._group_of_task
            ],
            lowest_layer=-1 if self.linears is None else self.linears.first_layer(tasks),
        )
        if encoder_output is not None and table is not None:
            encoder_output.backward(torch.zeros_like(table) if table.grad is None else table.grad)
        if self.linears is not None:
            self.linears.end_step()
        squared_norms = self.optimizer.reduce_gradients(self.model_config, groups)
        totals = self._reduce_totals(losses, squared_norms)
        self.should_stop = totals.stop_requested
        by_group = self._update_groups(groups, totals, loss_tokens)
        return StepMetrics(
            step=self.step_number,
            steps=self.config.training_config.steps,
            loss=sum(totals.losses) / sum(loss_tokens),
            tokens=sum(len(example.ids) for example in examples),
            text_tokens=sum(
                token < self.model_config.vocab_size
                for example in examples
                for token in example.ids
            ),
            seconds=time.monotonic() - started,
            rate=max(metrics.rate for metrics in by_group.values()),
            gradient_norm=math.hypot(*(metrics.gradient_norm for metrics in by_group.values())),
            skipped=any(metrics.skipped for metrics in by_group.values()),
            by_task=self._name_groups(by_group),
        )

    def _count_loss_tokens(self, examples: Sequence[Example]) -> list[int]:
        """Return the number of tokens with a loss of each task group."""
        counts = [0 for _ in self.loss_scales]
        for example in examples:
            counts[self._group_of_task[example.task_index]] += len(example.loss_positions)
        return counts

    def _update_groups(
        self, groups: Sequence[int], totals: _StepTotals, loss_tokens: Sequence[int]
    ) -> dict[int, GroupMetrics]:
        """Update the parameters of task groups; return the metrics of each group.

        A group whose gradients have overflowed is not updated; the other groups are.
        """
        losses = [0.0 for _ in self.loss_scales]
        for group, loss in zip(self._group_of_task, totals.losses, strict=True):
            losses[group] += loss
        norms: dict[int, float] = {}
        clip_factors: dict[int, float] = {}
        for group in groups:
            scale = self.loss_scales[group]
            squared_norm = totals.squared_norms[group]
            norm = math.sqrt(squared_norm) / scale.value if squared_norm >= 0 else math.nan
            self._check_finite(group, losses[group] / loss_tokens[group], math.isfinite(norm))
            norms[group] = norm
            if math.isfinite(norm):
                clip = min(1.0, self.config.training_config.gradient_norm_max / (norm + 1e-6))
                clip_factors[group] = clip / scale.value
        rates = self.optimizer.step(self.step_number, clip_factors)
        for group in groups:
            self.loss_scales[group].update(finite=group in clip_factors)
        return {
            group: GroupMetrics(
                losses[group] / loss_tokens[group],
                rates[group] if group in clip_factors else 0.0,
                norms[group],
                group not in clip_factors,
            )
            for group in groups
        }

    def _name_groups(self, by_group: Mapping[int, GroupMetrics]) -> dict[str, GroupMetrics]:
        """Return the metrics by the name of the task; empty if the run has one task group."""
        if len(self.loss_scales) == 1:
            return {}
        tasks, task_groups = self.config.data_config.resolved_tasks, self.config.task_groups
        return {tasks[task_groups[group][0]].name: metrics for group, metrics in by_group.items()}

    @torch.no_grad()
    def mean_loss(
        self,
        examples: Sequence[Example],
        table: Tensor | None,
        report_progress: Callable[[int], None] = lambda _: None,
    ) -> float:
        """Return the mean over all token losses of the examples, without training.

        `table` is the result of `current_table`: the full virtual-token table or prefix table, or
        the vector of adapter weights; None for method `full`. `report_progress` is called with
        the number of examples so far.
        """
        total = 0.0
        batch_size = self.config.training_config.batch_examples
        prefix = None
        adapters: Sequence[ModelAdapter] = ()
        if table is not None and self.config.method_config.adapter_kind == "prefix":
            prefix = shard_prefix_table(table, self.chunks)
            table = None
        if table is not None and self.linears is not None:
            own_tasks = {example.task_index for example in examples}
            adapters = [
                self.shard_adapter(task, table) if task in own_tasks else {}
                for task in range(len(self._group_of_task))
            ]
            table = None
        for start in range(0, len(examples), batch_size):
            micro_batches = self._micro_batches(examples[start : start + batch_size], train=False)
            if adapters:
                micro_batches = [
                    micro_batch.with_adapters(adapters) for micro_batch in micro_batches
                ]
            losses = run_passes(
                self.chunks,
                self._schedule(len(micro_batches), train=False),
                micro_batches,
                self._channels,
                table=table,
                prefix=prefix,
                loss_scales=[0.0 for _ in self._group_of_task],
            )
            total += sum(self._reduce_totals(losses, ()).losses)
            report_progress(min(start + batch_size, len(examples)))
        return total / sum(len(example.loss_positions) for example in examples)

    @torch.no_grad()
    def current_table(self) -> Tensor | None:
        """Return the current virtual-token table or prefix table of all tasks on every rank.

        For a method that changes linears, return the vector of their changes (`LinearsLayout`).
        Return None for method `full`.
        """
        if self.linears is not None:
            return self.linears.gather()
        if not self._table_rows:
            return None
        if self.prefix is not None:
            return self.prefix.gather_table()
        return self.broadcast_table(
            None if self.encoder is None else self.encoder().detach().clone()
        )

    def broadcast_table(self, table: Tensor | None, *, values: slice | None = None) -> Tensor:
        """Return the first stage's table on every rank; `table` may be None on other stages.

        `values`: the part of the vector of adapter weights that the table is; None: all of it.
        """
        if table is None and self.linears is not None:
            size = self.linears.layout.size if values is None else values.stop - values.start
            table = torch.zeros(size, dtype=self._dtype)
        elif table is None:
            width = table_width(self.config.method_config.adapter_kind, self.model_config)
            table = torch.zeros((self._table_rows, width), dtype=self._dtype)
        return broadcast_from_first_stage(table.to(self.mesh.device), self.mesh)

    def linear_adapter(self, task: int, vector: Tensor) -> dict[str, LinearAdapter]:
        """Return the adapter weights of a task, from the vector of `current_table`."""
        assert self.linears is not None
        return self.linears.layout.unpack(vector)[task]

    def shard_adapter(self, task: int, vector: Tensor) -> ModelAdapter:
        """Return this rank's shard of the adapter weights of a task, to run the model."""
        return shard_adapter(
            self.linear_adapter(task, vector),
            self.model_config,
            [layer for chunk in self.chunks for layer in chunk.layers],
            rank=self.mesh.in_stage.rank,
            tp=self.mesh.tp,
            ep=self.mesh.ep,
            dtype=self.chunks[0].dtype,
            device=self.mesh.device,
        )

    @property
    def model(self) -> GPT | list[GPT]:
        """The model argument for generation: the chunk of this rank, or the list of its chunks."""
        return self.chunks[0] if len(self.chunks) == 1 else self.chunks

    @property
    def _trains_model(self) -> bool:
        return self.config.method_config.method == "full"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.chunks[0].dtype, torch.float32)

    def _trainable_tensors(self) -> list[TrainableTensor]:
        if self._trains_model:
            return trainable_model_tensors(self.chunks)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        if self.prefix is not None:
            return trainable_prefix_tensors(
                self.prefix.named_parameters(), self.model_config, self.mesh
            )
        if self.linears is not None:
            return trainable_linear_tensors(
                self.linears,
                self.model_config,
                self.mesh,
                [own.lora_plus_ratio for own in self.config.task_method_configs],
            )
        if self.encoder is None:
            return []
        return trainable_encoder_tensors(
            self.encoder.named_parameters(), self.encoder.split_dimensions
        )

    def _encode_table(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the encoder's output, and the detached copy that the micro-batches read.

        The backward passes accumulate the gradient of the output in the copy. Without an encoder,
        both are None.
        """
        if self.encoder is None:
            return None, None
        encoder_output: Tensor = self.encoder(self._dropout(0))
        return encoder_output, encoder_output.detach().clone().requires_grad_()

    def _with_adapters(
        self, micro_batches: Sequence[MicroBatch], tasks: Container[int]
    ) -> list[MicroBatch]:
        """Return the micro-batches of a step with the trained adapter weights, if any."""
        linears = self.linears
        if linears is None:
            return list(micro_batches)
        adapters = linears.begin_step(tasks)
        adapted = []
        for micro_batch in micro_batches:
            own_adapters = list(adapters)
            for own in micro_batch.tasks:
                own_adapters[own.task] = linears.with_dropout(
                    adapters[own.task], own.task, self._dropout(1), own.examples
                )
            adapted.append(micro_batch.with_adapters(own_adapters))
        return adapted

    def _micro_batches(self, examples: Sequence[Example], *, train: bool) -> list[MicroBatch]:
        """Return the micro-batches of this data-parallel rank's share of a batch."""
        training, mesh = self.config.training_config, self.mesh
        if train and self.linears is not None and any(self.linears.dropout_rates):
            examples = number_examples(examples)
        rank_examples = examples[mesh.dp_rank :: mesh.dp]
        # A frozen model runs without dropout, even if its checkpoint sets dropout rates.
        uses_dropout = (
            train
            and self._trains_model
            and (self.model_config.hidden_dropout or self.model_config.attention_dropout)
        )
        methods = list(enumerate(self.config.task_method_configs))
        activated_tasks = {task for task, own in methods if own.method == "alora"}
        # Examples must not share the masks of their common prefix.
        shared_tasks = {task for task, own in methods if not (train and own.dropout)}
        return [
            build_micro_batch(
                group,
                mesh.device,
                share_prefix=shared_tasks,
                activated_tasks=activated_tasks,
                dropout=self._dropout(1 + mesh.dp_rank, number) if uses_dropout else None,
            )
            for number, group in enumerate(
                split_into_micro_batches(
                    rank_examples, training.micro_batch_examples, training.micro_batch_tokens
                )
            )
        ]

    def _dropout(self, *site: int) -> Dropout:
        """Return dropout masks that are seeded by the run's seed, the step and `site`.

        `site` is (0,) for the prompt encoder, (1,) for linear adapters, and (1 + data-parallel
        rank, number of the micro-batch) for the model. A resumed run draws the same masks.
        """
        seed = 0
        for component in (self.config.training_config.seed, self.step_number, *site):
            seed = (seed * 1_000_003 + component) % 2**63
        return Dropout(seed)

    def _schedule(self, micro_batches: int, *, train: bool) -> list[Pass]:
        mesh, chunks = self.mesh, len(self.chunks)
        if not train:
            return schedule_forward_only(mesh.pp, micro_batches, chunks)
        if chunks == 1:
            return schedule_1f1b(mesh.pp_rank, mesh.pp, micro_batches)
        return schedule_interleaved_1f1b(mesh.pp_rank, mesh.pp, micro_batches, chunks)

    def _reduce_totals(self, losses: Tensor, squared_norms: Sequence[float]) -> _StepTotals:
        """Sum this rank's losses, shares of squared norms and stop request over all ranks."""
        mesh = self.mesh
        # All tensor ranks of the last stage have the same losses, so only the first of them adds
        # its losses.
        adds_losses = mesh.pp_rank == mesh.pp - 1 and mesh.tp_rank == 0
        own_losses = losses.tolist() if adds_losses else [0.0] * len(losses)
        numbers = [*own_losses, *squared_norms, float(self.stop_requested)]
        if mesh.tp * mesh.dp * mesh.pp > 1:
            reduced = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
            dist.all_reduce(reduced)
            numbers = reduced.tolist()
        count = len(losses)
        return _StepTotals(numbers[:count], numbers[count:-1], numbers[-1] > 0)

    def _check_finite(self, group: int, loss: float, has_finite_gradients: bool) -> None:
        """Raise ConfigError if the loss or the gradients of a task group are not finite.

        With loss scaling, at most SKIPPED_MAX consecutive steps may have gradient overflow.
        """
        skips = self._consecutive_skips
        skips[group] = 0 if has_finite_gradients else skips[group] + 1
        may_skip = self.loss_scales[group].value != 1.0 and skips[group] <= SKIPPED_MAX
        if math.isfinite(loss) and (has_finite_gradients or may_skip):
            return
        problem = (
            f"the loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite"
        )
        tasks, task_groups = self.config.data_config.resolved_tasks, self.config.task_groups
        of_task = f" of task {tasks[task_groups[group][0]].name!r}" if len(task_groups) > 1 else ""
        raise ConfigError(
            f"{problem} at step {self.step_number}{of_task}; try a smaller learning_rate than "
            f"{self.config.group_learning_rates[group]:g}, or dtype: float32; the last saved state "
            "is intact"
        )
