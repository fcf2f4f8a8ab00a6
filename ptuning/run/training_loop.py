"""Training loop: trains, validates, saves, resumes after a kill and keeps the best adapter.

Every rank runs the loop with the same data and makes the same decisions. The loop calls its
callback on every rank; only the callback of rank 0 reports the run. A run that was interrupted or
killed resumes from its last complete state, with the same losses as without the interruption. A run
that stopped early (`patience`) is complete and does not resume. Tasks that are trained
independently stop early one by one: a task that has stopped has no more examples in the batches,
and its best values are kept. The loop is independent of the
terminal, the logs and the report.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist

from gpt.adapters.card import Card
from gpt.errors import ConfigError
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.collectives import barrier
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from ptuning.activity import ActivityCallback, ignore_activity, loading_progress
from ptuning.config import DataConfig, OutputConfig
from ptuning.data.batch_order import BatchOrders
from ptuning.linears.trainable_linears import build_trainable_linears
from ptuning.prompt.prefix_tuning import build_prefix
from ptuning.prompt.prompt_encoder import build_encoder, encoder_tensors
from ptuning.run.artifacts import RunOutcome, write_adapters, write_encoder, write_model
from ptuning.run.early_stopping import EarlyStopping
from ptuning.run.preparation import PreparedRun
from ptuning.run.training_state import (
    RunFingerprint,
    SavedState,
    choose_run_folder,
    common_state,
    remove_states,
    save_state,
)
from ptuning.run.validation import Validator
from ptuning.run_facts import StepMetrics, Validation
from ptuning.training.loss_scale import LossScale
from ptuning.training.trainer import Trainer

# The reported last loss is the mean over this number of steps, because one batch's loss is noisy.
LAST_LOSS_STEPS = 20
# In a saved state, the names of the tensors of `EarlyStopping.state_tensors` have this prefix.
BEST_PREFIX = "best/"


class RunCallback(Protocol):
    """Receives the events of a run."""

    # `step` is the last finished step: 0 unless the run resumes.
    def on_start(self, folder: Path, step: int, resumed: bool) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_validation(
        self, validation: Validation, validator: Validator, best_step: int | None
    ) -> None: ...

    def on_status(self, message: str) -> None: ...

    # Progress of an activity other than training steps: an ActivityCallback.
    def on_activity(self, activity: str, completed: int, total: int) -> None: ...

    def on_warning(self, message: str) -> None: ...

    def on_end(self, outcome: RunOutcome, validator: Validator) -> None: ...


@dataclass
class RunProgress:
    """Training losses so far; saved in each state."""

    first_loss: float | None = None  # Loss of step 1; None: no step has finished.
    last_losses: tuple[float, ...] = ()  # Losses of the last steps, at most LAST_LOSS_STEPS.

    @property
    def last_loss(self) -> float:
        return sum(self.last_losses) / max(1, len(self.last_losses))

    def record(self, loss: float) -> None:
        """Add the loss of a step."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_losses = (*self.last_losses, loss)[-LAST_LOSS_STEPS:]

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "RunProgress":
        """Return the progress that a state has, which are the fields with other facts."""
        return cls(facts["first_loss"], tuple(facts["last_losses"]))


@dataclass
class GroupProgress:
    """The progress of a task group."""

    names: Sequence[str]  # Names of its tasks.
    losses: RunProgress
    early_stopping: EarlyStopping

    def facts(self) -> dict[str, Any]:
        """Return the losses and the best validation, to be saved in a state."""
        return asdict(self.losses) | self.early_stopping.state_facts()


def run_folder(output_config: OutputConfig, data_config: DataConfig) -> Path:
    """Return the folder that contains the numbered folder of each run."""
    if output_config.run:
        return Path(output_config.run)
    name = data_config.resolved_tasks[0].name or "model"
    return Path(output_config.output).parent / "runs" / name


def load_chunks(
    prepared: PreparedRun, mesh: Mesh, report_activity: ActivityCallback = ignore_activity
) -> list[GPT]:
    """Load this rank's chunks of the model."""
    training, parallel = prepared.config.training_config, prepared.config.parallel_config
    dtype = prepared.config.model_config.dtype
    gpt_config = prepared.checkpoint.config.with_fields(
        hidden_dropout=training.hidden_dropout, attention_dropout=training.attention_dropout
    )
    checkpoint = replace(prepared.checkpoint, config=gpt_config)
    layers = stage_layers(gpt_config.num_layers, mesh.pp, vpp=parallel.virtual_stages)
    # The cast is safe, because ParallelConfig has checked the value.
    mode = cast(Literal["none", "selective", "block", "full"], parallel.recompute)
    recompute = RecomputePolicy(mode, parallel.recompute_layers)
    return [
        load_model(
            checkpoint,
            mesh,
            dtype=dtype,
            layers=chunk_layers,
            recompute=recompute,
            report_progress=loading_progress(report_activity),
        ).eval()
        for chunk_layers in layers[mesh.pp_rank]
    ]


def load_trainer(
    prepared: PreparedRun, mesh: Mesh, report_activity: ActivityCallback = ignore_activity
) -> Trainer:
    """Load this rank's chunks, and create what the method trains and the trainer."""
    config = prepared.config
    method_config, seed = config.method_config, config.training_config.seed
    tasks, ids = config.data_config.resolved_tasks, prepared.initial_token_ids
    chunks = load_chunks(prepared, mesh, report_activity)
    if method_config.changes_linears:
        linears = build_trainable_linears(config.task_method_configs, tasks, chunks, seed=seed)
        return Trainer(chunks, config, linears=linears)
    if method_config.method == "prefix":
        prefix = build_prefix(method_config, tasks, chunks, ids, seed=seed)
        return Trainer(chunks, config, prefix=prefix)
    encoder = None
    if method_config.method != "full" and chunks[0].is_first_stage:
        encoder = build_encoder(method_config, tasks, chunks[0], ids, seed=seed)
    return Trainer(chunks, config, encoder)


class TrainingLoop:
    """Training loop of one rank; the constructor restores the state from which a run resumes."""

    def __init__(
        self,
        prepared: PreparedRun,
        trainer: Trainer,
        callback: RunCallback,
        *,
        restart: bool = False,
        keeps_final_state: bool = False,
    ) -> None:
        """Restore the latest state of the run, unless `restart` is set.

        `keeps_final_state`: the caller removes the state of the finished run, after it has reported
        the run (`remove_states`). If it is killed before, the same command reports the run again,
        and does not write its adapters twice.
        """
        self.trainer = trainer
        self._prepared = prepared
        self._callback = callback
        self._config = prepared.config
        self._mesh = trainer.mesh
        runs_folder = run_folder(self._config.output_config, self._config.data_config)
        self._folder = _agree_on_folder(runs_folder, self._mesh, restart=restart)
        self._validator = Validator(prepared, trainer, callback.on_activity)
        self._keeps_final_state = keeps_final_state
        self._fingerprint = self._agree_on_fingerprint()
        self._progress = RunProgress()
        self._groups = [self._new_group(group) for group in self._config.task_groups]
        self._saved_step: int | None = None
        # Whether a failed save was reported and no later save has succeeded.
        self._save_warned = False
        saved_state = common_state(self._folder, self._mesh)
        self._resumed = saved_state is not None
        if saved_state is not None:
            self._resume(saved_state)

    def run(self) -> RunOutcome:
        """Train until the last step, early stopping or a stop request; return the outcome."""
        training, trainer = self._config.training_config, self.trainer
        orders = BatchOrders(self._prepared.group_examples, training.batch_examples, training.seed)
        self._callback.on_start(self._folder, trainer.step_number, self._resumed)
        if self._validator.tasks:
            for line in self._validator.describe_records():
                self._callback.on_status(line)
            if self._validator.generates_answers:
                self._validator.measure_baselines()
            if trainer.step_number == 0:
                self._validate(0, answers=False)
        while trainer.step_number < training.steps and self._active_groups:
            metrics = trainer.step(orders.batch(trainer.step_number + 1, self._active_groups))
            self._record_step(metrics)
            if self._is_validation_due(metrics.step):
                self._validate(metrics.step, answers=self._validates_answers)
            if trainer.should_stop and metrics.step < training.steps:
                self._save_state()
                outcome = self._outcome([], "interrupted")
                self._callback.on_end(outcome, self._validator)
                return outcome
            if metrics.step % self._config.output_config.save_every == 0:
                self._save_state()
        return self._finish("finished" if self._active_groups else "stopped early")

    def _new_group(self, tasks: Sequence[int]) -> GroupProgress:
        config = self._config
        is_only_group = len(config.task_groups) == 1
        early_stopping = EarlyStopping(
            config.validation_config,
            config.method_config,
            self.trainer,
            task=None if is_only_group else tasks[0],
        )
        all_tasks = config.data_config.resolved_tasks
        return GroupProgress(
            [all_tasks[task].name for task in tasks], RunProgress(), early_stopping
        )

    @property
    def _active_groups(self) -> list[int]:
        """The task groups that have not stopped early."""
        return [
            index
            for index, group in enumerate(self._groups)
            if not group.early_stopping.should_stop
        ]

    @property
    def _validates_answers(self) -> bool:
        """Whether each validation generates answers; a `monitor` other than `loss` needs them."""
        return self._config.validation_config.monitor != "loss"

    def _is_validation_due(self, step: int) -> bool:
        """Return whether `validate_every` requires a validation after the step."""
        steps = self._config.training_config.steps
        interval = self._config.validation_config.interval(steps)
        if not interval or not any(self._validated_groups):
            return False
        return step % interval == 0 or step == steps

    @property
    def _validated_groups(self) -> list[GroupProgress]:
        """The task groups that have not stopped early and have validation records."""
        groups = [self._groups[index] for index in self._active_groups]
        return [
            group for group in groups if any(name in self._validator.tasks for name in group.names)
        ]

    def _record_step(self, metrics: StepMetrics) -> None:
        self._progress.record(metrics.loss)
        for group in self._groups:
            if len(self._groups) == 1:
                group.losses.record(metrics.loss)
            elif group.names[0] in metrics.by_task:
                group.losses.record(metrics.by_task[group.names[0]].loss)
        self._callback.on_step(metrics)

    def _validate(self, step: int, *, answers: bool) -> None:
        """Validate, and keep the best values of each task group."""
        table = self.trainer.current_table()
        groups = self._validated_groups
        names = {name for group in groups for name in group.names}
        validation = self._validator.validate(step, table, answers=answers, names=names)
        if step > 0:
            for group in groups:
                group.early_stopping.update(validation, table)
        self._callback.on_validation(validation, self._validator, self._best_step)
        if len(self._groups) > 1 and step < self._config.training_config.steps:
            for group in groups:
                if group.early_stopping.should_stop:
                    self._callback.on_status(
                        f"{group.names[0]} stops early at step {step}; its best step is "
                        f"{group.early_stopping.best_step}"
                    )

    @property
    def _best_step(self) -> int | None:
        """The best step, if it is the same for all task groups."""
        best_steps = {group.early_stopping.best_step for group in self._groups}
        return best_steps.pop() if len(best_steps) == 1 else None

    def _finish(self, run_state: str) -> RunOutcome:
        """Write the artifacts and return the outcome.

        A training state is saved first, so that the run can resume if writing an artifact fails.
        """
        self._save_state()
        table = self.trainer.current_table()
        for group in self._groups:
            table = group.early_stopping.put_best(table)
        if self._validator.tasks:
            best_steps = {
                name: group.early_stopping.best_step or self.trainer.step_number
                for group in self._groups
                for name in group.names
            }
            # The final metrics are computed with the table that is written, and include answers.
            for validation in self._validator.validate_best(
                best_steps, table, answers=self._validator.generates_answers
            ):
                self._callback.on_validation(validation, self._validator, self._best_step)
                self._check_finite(validation)
        cards: Sequence[Card] = ()
        if table is None:
            paths = write_model(self._prepared, self.trainer.chunks, is_resumed=self._resumed)
        else:
            adapters = write_adapters(
                self._prepared,
                self.trainer,
                table,
                self._card_metrics(),
                self._validator,
                self._folder,
                is_resumed=self._resumed,
            )
            paths, cards = [path for path, _ in adapters], [card for _, card in adapters]
            if self.trainer.encoder is not None:
                best_encoder = self._groups[0].early_stopping.best_encoder
                tensors = best_encoder or encoder_tensors(self.trainer.encoder)
                if self._mesh.rank == 0:
                    write_encoder(self._folder, tensors)
        outcome = self._outcome(paths, run_state, cards)
        self._callback.on_end(outcome, self._validator)
        if self._mesh.rank == 0 and not self._keeps_final_state:
            remove_states(self._folder)
        return outcome

    def _check_finite(self, validation: Validation) -> None:
        """Raise ConfigError if the weights to be written give a loss that is not finite."""
        losses = {name: results["loss"] for name, results in validation.by_task.items()}
        if validation.loss is not None and not losses:
            losses = {"": validation.loss}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                of_task = f" of {name!r}" if name else ""
                raise ConfigError(
                    f"the held-out loss{of_task} is {loss} at step {validation.step}, so nothing "
                    "was written; set a smaller learning_rate than "
                    f"{max(self._config.group_learning_rates):g}, or dtype: float32, and start "
                    "again with --restart"
                )

    def _card_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of training for the card of each task."""
        group_of_task = {
            task: group
            for tasks, group in zip(self._config.task_groups, self._groups, strict=True)
            for task in tasks
        }
        return [
            {
                "loss": group_of_task[task].losses.last_loss,
                "first_loss": group_of_task[task].losses.first_loss,
                "steps": group_of_task[task].early_stopping.best_step or self.trainer.step_number,
                "method": method_config.method,
            }
            for task, method_config in enumerate(self._config.task_method_configs)
        ]

    def _outcome(
        self, paths: Sequence[Path], run_state: str, cards: Sequence[Card] = ()
    ) -> RunOutcome:
        progress = self._progress
        return RunOutcome(
            paths=tuple(paths),
            cards=tuple(cards),
            folder=self._folder,
            state=run_state,
            step=self.trainer.step_number,
            first_loss=progress.first_loss or 0.0,
            last_loss=progress.last_loss,
            best_step=self._best_step,
            task_best_steps={
                group.names[0]: group.early_stopping.best_step
                for group in self._groups
                if len(self._groups) > 1
            },
        )

    def _agree_on_fingerprint(self) -> RunFingerprint:
        """Return the run's fingerprint; raise ConfigError if the ranks have different ones.

        Rank 0 computes the fingerprint first. If this requires reading all weights for the base
        model's digest, the digest is cached, and the other ranks read the cache.
        """
        fingerprint = self._prepared.fingerprint() if self._mesh.rank == 0 else None
        barrier(self._mesh)
        fingerprint = fingerprint or self._prepared.fingerprint()
        fingerprint.check_same_on_all_ranks(self._mesh)
        return fingerprint

    def _save_state(self) -> None:
        """Save a state. If several saves fail one after another, report only the first failure."""
        trainer = self.trainer
        if trainer.step_number == self._saved_step:
            return
        tensors = trainer.optimizer.state_dict()
        for prefix, group in zip(self._best_prefixes, self._groups, strict=True):
            best_tensors = group.early_stopping.state_tensors()
            tensors |= {prefix + name: tensor for name, tensor in best_tensors.items()}
        group_facts = [
            {"course": group.facts(), "scale": asdict(scale)}
            for group, scale in zip(self._groups, trainer.loss_scales, strict=True)
        ]
        facts: dict[str, Any] = {"origin": asdict(self._fingerprint)}
        if len(group_facts) == 1:
            facts |= group_facts[0]
        else:
            facts |= {"course": asdict(self._progress), "groups": group_facts}
        error = save_state(self._folder, self._mesh, trainer.step_number, tensors, facts)
        if error is None:
            self._saved_step = trainer.step_number
            self._save_warned = False
        elif not self._save_warned:
            self._save_warned = True
            self._callback.on_warning(
                f"no state could be saved at step {trainer.step_number} ({error}); the run "
                "continues and tries again"
            )

    def _resume(self, saved_state: SavedState) -> None:
        self._fingerprint.check_matches(saved_state.facts["origin"], saved_state.path)
        trainer = self.trainer
        tensors = saved_state.load_tensors(self._mesh)
        best_tensors = {
            name: tensors.pop(name) for name in list(tensors) if name.startswith(BEST_PREFIX)
        }
        trainer.optimizer.load_state_dict(tensors)
        trainer.step_number = self._saved_step = saved_state.facts["step"]
        self._progress = RunProgress.from_facts(saved_state.facts["course"])
        group_facts = saved_state.facts.get("groups", [saved_state.facts])
        for index, facts in enumerate(group_facts):
            group, prefix = self._groups[index], self._best_prefixes[index]
            trainer.loss_scales[index] = LossScale(**facts["scale"])
            group.losses = RunProgress.from_facts(facts["course"])
            stopping_facts = {
                name: value
                for name, value in facts["course"].items()
                if name not in asdict(group.losses)
            }
            own_tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in best_tensors.items()
                if name.startswith(prefix)
            }
            group.early_stopping.load_state(stopping_facts, own_tensors)

    @property
    def _best_prefixes(self) -> list[str]:
        """For each task group, the beginning of the names of its best tensors in a state."""
        if len(self._groups) == 1:
            return [BEST_PREFIX]
        return [f"{BEST_PREFIX}{index}/" for index in range(len(self._groups))]


def _agree_on_folder(base: Path, mesh: Mesh, *, restart: bool) -> Path:
    """Choose the run's folder on rank 0 and send its number to the other ranks."""
    number = int(choose_run_folder(base, restart=restart).name) if mesh.rank == 0 else 0
    if mesh.tp * mesh.dp * mesh.pp > 1:
        buffer = torch.tensor([number], dtype=torch.int64, device=mesh.device)
        dist.all_reduce(buffer)
        number = int(buffer)
    return base / str(number)
