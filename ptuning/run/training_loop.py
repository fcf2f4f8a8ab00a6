"""Training loop: trains, validates, saves, resumes after a kill and keeps the best adapter.

Every rank runs the loop with the same data and makes the same decisions. The loop calls its
callback on every rank; only the callback of rank 0 reports the run. A run that was interrupted or
killed resumes from its last complete state, with the same losses as without the interruption. A run
that stopped early (`patience`) is complete and does not resume. The loop is independent of the
terminal, the logs and the report.
"""

import math
from collections.abc import Sequence
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
from ptuning.data.batch_order import BatchOrder
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
        linears = build_trainable_linears(method_config, tasks, chunks, seed=seed)
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
        self._early_stopping = EarlyStopping(
            self._config.validation_config, self._config.method_config, trainer
        )
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
        order = BatchOrder(self._prepared.examples, training.batch_examples, training.seed)
        self._callback.on_start(self._folder, trainer.step_number, self._resumed)
        if self._validator.tasks:
            for line in self._validator.describe_records():
                self._callback.on_status(line)
            if self._validator.generates_answers:
                self._validator.measure_baselines()
            if trainer.step_number == 0:
                self._validate(0, answers=False)
        stops_early = self._early_stopping.should_stop
        while trainer.step_number < training.steps and not stops_early:
            metrics = trainer.step(order.batch(trainer.step_number + 1))
            self._record_step(metrics)
            stops_early = self._is_validation_due(metrics.step) and self._validate(
                metrics.step, answers=self._validates_answers
            )
            if trainer.should_stop and metrics.step < training.steps:
                self._save_state()
                outcome = self._outcome([], "interrupted")
                self._callback.on_end(outcome, self._validator)
                return outcome
            if metrics.step % self._config.output_config.save_every == 0:
                self._save_state()
        return self._finish("stopped early" if stops_early else "finished")

    @property
    def _validates_answers(self) -> bool:
        """Whether each validation generates answers; a `monitor` other than `loss` needs them."""
        return self._config.validation_config.monitor != "loss"

    def _is_validation_due(self, step: int) -> bool:
        """Return whether `validate_every` requires a validation after the step."""
        steps = self._config.training_config.steps
        interval = self._config.validation_config.interval(steps)
        if not self._validator.tasks or not interval:
            return False
        return step % interval == 0 or step == steps

    def _record_step(self, metrics: StepMetrics) -> None:
        progress = self._progress
        progress.first_loss = metrics.loss if progress.first_loss is None else progress.first_loss
        progress.last_losses = (*progress.last_losses, metrics.loss)[-LAST_LOSS_STEPS:]
        self._callback.on_step(metrics)

    def _validate(self, step: int, *, answers: bool) -> bool:
        """Validate and keep the best table; return whether the run must stop early."""
        table = self.trainer.current_table()
        validation = self._validator.validate(step, table, answers=answers)
        if step > 0:
            self._early_stopping.update(validation, table)
        self._callback.on_validation(validation, self._validator, self._early_stopping.best_step)
        return self._early_stopping.should_stop

    def _finish(self, run_state: str) -> RunOutcome:
        """Write the artifacts and return the outcome.

        A training state is saved first, so that the run can resume if writing an artifact fails.
        """
        self._save_state()
        best_step = self._early_stopping.best_step
        table = self._early_stopping.best_table
        if table is None:
            table = self.trainer.current_table()
        if self._validator.tasks:
            step = best_step or self.trainer.step_number
            # The final metrics are computed with the table that is written, and include answers.
            validation = self._validator.validate(
                step, table, answers=self._validator.generates_answers, repeats_step=True
            )
            self._callback.on_validation(validation, self._validator, best_step)
            self._check_finite(validation)
        metrics = self._card_metrics()
        cards: Sequence[Card] = ()
        if table is None:
            paths = write_model(self._prepared, self.trainer.chunks, is_resumed=self._resumed)
        else:
            adapters = write_adapters(
                self._prepared,
                self.trainer,
                table,
                metrics,
                self._validator,
                self._folder,
                is_resumed=self._resumed,
            )
            paths, cards = [path for path, _ in adapters], [card for _, card in adapters]
            if self.trainer.encoder is not None:
                tensors = self._early_stopping.best_encoder or encoder_tensors(self.trainer.encoder)
                if self._mesh.rank == 0:
                    write_encoder(self._folder, tensors)
        outcome = self._outcome(paths, run_state, cards)
        self._callback.on_end(outcome, self._validator)
        if self._mesh.rank == 0 and not self._keeps_final_state:
            remove_states(self._folder)
        return outcome

    def _check_finite(self, validation: Validation) -> None:
        """Raise ConfigError if the weights to be written give a loss that is not finite."""
        if validation.loss is not None and not math.isfinite(validation.loss):
            raise ConfigError(
                f"the held-out loss is {validation.loss} at step {validation.step}, so nothing was "
                "written; set a smaller learning_rate than "
                f"{self._config.peak_learning_rate:g}, or dtype: float32, and start again with "
                "--restart"
            )

    def _card_metrics(self) -> dict[str, Any]:
        progress = self._progress
        return {
            "loss": progress.last_loss,
            "first_loss": progress.first_loss,
            "steps": self._early_stopping.best_step or self.trainer.step_number,
            "method": self._config.method_config.method,
        }

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
            best_step=self._early_stopping.best_step,
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
        best_tensors = self._early_stopping.state_tensors()
        tensors |= {BEST_PREFIX + name: tensor for name, tensor in best_tensors.items()}
        facts = {
            "origin": asdict(self._fingerprint),
            "course": asdict(self._progress) | self._early_stopping.state_facts(),
            "scale": asdict(trainer.loss_scale),
        }
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
        # The losses of RunProgress and the facts of EarlyStopping, under their field names.
        progress_facts = dict(saved_state.facts["course"])
        tensors = saved_state.load_tensors(self._mesh)
        names = [name for name in tensors if name.startswith(BEST_PREFIX)]
        best_tensors = {name.removeprefix(BEST_PREFIX): tensors.pop(name) for name in names}
        trainer.optimizer.load_state_dict(tensors)
        trainer.step_number = self._saved_step = saved_state.facts["step"]
        trainer.loss_scale.value = saved_state.facts["scale"]["value"]
        trainer.loss_scale.good = saved_state.facts["scale"]["good"]
        self._progress = RunProgress(
            progress_facts.pop("first_loss"), tuple(progress_facts.pop("last_losses"))
        )
        self._early_stopping.load_state(progress_facts, best_tensors)


def _agree_on_folder(base: Path, mesh: Mesh, *, restart: bool) -> Path:
    """Choose the run's folder on rank 0 and send its number to the other ranks."""
    number = int(choose_run_folder(base, restart=restart).name) if mesh.rank == 0 else 0
    if mesh.tp * mesh.dp * mesh.pp > 1:
        buffer = torch.tensor([number], dtype=torch.int64, device=mesh.device)
        dist.all_reduce(buffer)
        number = int(buffer)
    return base / str(number)
