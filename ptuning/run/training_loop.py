"""A run, from loading to adapters: learn, measure, save, go on after a kill, keep the best.

Every rank runs this alike and so decides alike; rank 0 alone tells people and writes what they
read. What was learned is written at once or not at all, and a run that ended early for any reason
goes on from its last state with the same losses.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.adapters.card import Card
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import stage_layers
from ptuning.config import TuneConfig
from ptuning.data.batch_order import Order
from ptuning.prompt.prefix_tuning import build_prefix
from ptuning.prompt.prompt_encoder import build_encoder, encoder_tensors
from ptuning.run.artifacts import Outcome, write_adapters, write_encoder, write_model
from ptuning.run.preparation import Prepared
from ptuning.run.training_state import (
    Origin,
    Saved,
    choose_run,
    common_state,
    forget_states,
    save_state,
)
from ptuning.run.validation import Measuring
from ptuning.run_facts import Progress, Validation
from ptuning.training.trainer import Trainer

# What is told as a run's last loss is the mean of so many steps; one batch alone says little.
LAST_STEPS = 20
# In a state: what made the best measure so far.
BEST, TABLE = "best/", "table"


class Listener(Protocol):
    """Who is told of a run as it goes."""

    def began(self, folder: Path, step: int, resumed: bool) -> None: ...

    def step(self, made: Progress) -> None: ...

    def validated(self, made: Validation, measuring: Measuring, best_step: int | None) -> None: ...

    def doing(self, words: str) -> None: ...

    def warn(self, words: str) -> None: ...

    def ended(self, outcome: Outcome, measuring: Measuring) -> None: ...


@dataclass
class Course:
    """What a run has come to, beside its tensors: goes into its states."""

    first_loss: float | None = None
    last_losses: tuple[float, ...] = ()
    best_step: int | None = None
    best: float | None = None  # The measure at that step,
    best_loss: float = 0.0  # and the loss.
    waited: int = 0  # Validations since.

    @property
    def last_loss(self) -> float:
        return sum(self.last_losses) / max(1, len(self.last_losses))


def run_folder(config: TuneConfig) -> Path:
    """Where a run of these settings keeps its logs and states, each run in a folder of its own."""
    name = config.wanted[0].name or "model"
    return Path(config.run) if config.run else Path(config.output).parent / "runs" / name


def load_chunks(prepared: Prepared, mesh: Mesh) -> list[GPT]:
    """This rank's chunks of the model."""
    config, checkpoint = prepared.config, prepared.checkpoint
    drops = {"hidden_dropout": config.hidden_dropout, "attention_dropout": config.attention_dropout}
    checkpoint = replace(checkpoint, config=checkpoint.config.with_fields(**drops))
    layers = stage_layers(checkpoint.config.num_layers, mesh.pp, vpp=config.virtual_stages)
    kind = cast(Literal["none", "selective", "block", "full"], config.recompute)  # Was checked.
    recompute = Recompute(kind, config.recompute_layers)
    return [
        load_model(checkpoint, mesh, dtype=config.dtype, layers=own, recompute=recompute).eval()
        for own in layers[mesh.pp_rank]
    ]


def load_trainer(prepared: Prepared, mesh: Mesh) -> Trainer:
    """The model on this rank, and what learns against it."""
    config = prepared.config
    chunks = load_chunks(prepared, mesh)
    if config.method == "prefix":
        prefix = build_prefix(config, config.wanted, chunks, prepared.starts)
        return Trainer(chunks, config, prefix=prefix)
    encoder = None
    if config.method != "full" and chunks[0].first:
        encoder = build_encoder(config, config.wanted, chunks[0], prepared.starts)
    return Trainer(chunks, config, encoder)


class Learning:
    """One rank's part of a run."""

    def __init__(
        self, prepared: Prepared, trainer: Trainer, listener: Listener, *, restart: bool = False
    ) -> None:
        self.trainer, self._prepared, self._listener = trainer, prepared, listener
        self._config, self._mesh = prepared.config, trainer.mesh
        self._folder = _agree_on_folder(run_folder(self._config), self._mesh, restart=restart)
        self._measuring = Measuring(prepared, trainer)
        self._origin = self._whence()
        self._course = Course()
        self._best: Tensor | None = None
        self._best_encoder: dict[str, Tensor] = {}  # That made it; on the first stage.
        self._saved_step: int | None = None
        self._warned = False  # That no state could be saved, and none has been since.
        saved = common_state(self._folder, self._mesh)
        self._resumed = saved is not None
        if saved is not None:
            self._go_on(saved)

    def run(self) -> Outcome:
        """Learn to the end, or until somebody asks to stop."""
        config, trainer = self._config, self.trainer
        order = Order(self._prepared.examples, config.batch_examples, config.seed)
        self._listener.began(self._folder, trainer.step_number, self._resumed)
        if self._measuring.tasks:
            self._listener.doing("measuring what the model answers by itself")
            self._measuring.baselines()
            if trainer.step_number == 0:
                self._validate(0, answers=False)
        early = self._waited_enough
        while trainer.step_number < config.steps and not early:
            made = trainer.step(order.batch(trainer.step_number + 1))
            self._note(made)
            early = self._due(made.step) and self._validate(made.step, answers=self._answers)
            if trainer.stops and made.step < config.steps:
                self._save()
                outcome = self._outcome([], "interrupted")
                self._listener.ended(outcome, self._measuring)
                return outcome
            if made.step % config.save_every == 0:
                self._save()
        return self._finish("stopped early" if early else "finished")

    @property
    def _answers(self) -> bool:
        """Whether each validation writes answers: only where they are what decides."""
        return self._config.measure != "loss"

    def _due(self, step: int) -> bool:
        every = self._config.validate_every
        if not self._measuring.tasks or every is None:
            return False
        return step % every == 0 or step == self._config.steps

    def _note(self, made: Progress) -> None:
        course = self._course
        course.first_loss = made.loss if course.first_loss is None else course.first_loss
        course.last_losses = (*course.last_losses, made.loss)[-LAST_STEPS:]
        self._listener.step(made)

    def _validate(self, step: int, *, answers: bool) -> bool:
        """Measure; keep the state if it is the best; whether it has been the best for too long."""
        table = self.trainer.table()
        made = self._measuring.now(step, table, answers=answers)
        if step > 0:
            self._judge(step, made, table)
        self._listener.validated(made, self._measuring, self._best_step)
        return self._waited_enough

    @property
    def _waited_enough(self) -> bool:
        patience = self._config.patience
        return patience is not None and self._course.waited >= patience

    @property
    def _best_step(self) -> int | None:
        """Whose table is kept; of a whole model none is, and what is written is the last."""
        return None if self._best is None else self._course.best_step

    def _judge(self, step: int, made: Validation, table: Tensor | None) -> None:
        course, measure = self._course, self._config.measure
        value = -made.loss if measure == "loss" and made.loss is not None else 0.0
        if measure != "loss":
            value = made.measures[measure]
        value = _of_first(-math.inf if math.isnan(value) else value, self._mesh)
        # Among equals the smaller loss is better, and yet no reason to wait on.
        loss = math.inf if made.loss is None or math.isnan(made.loss) else made.loss
        loss = _of_first(loss, self._mesh)
        better = course.best is None or value > course.best
        if better or (value == course.best and loss < course.best_loss):
            course.best, course.best_loss, course.best_step = value, loss, step
            course.waited = 0 if better else course.waited + 1
            self._best = table
            if self.trainer.encoder is not None:
                kept = encoder_tensors(self.trainer.encoder)
                self._best_encoder = {name: one.clone() for name, one in kept.items()}
        else:
            course.waited += 1

    def _finish(self, state: str) -> Outcome:
        """Write what was learned. Before that a state is saved, should the writing fail."""
        self._save()
        table = self.trainer.table() if self._best is None else self._best
        if self._measuring.tasks:
            step = self._best_step or self.trainer.step_number
            # Of the table that is written, with answers, whatever was measured on the way.
            made = self._measuring.now(step, table, answers=True)
            self._listener.validated(made, self._measuring, self._best_step)
        metrics = self._metrics()
        cards: Sequence[Card] = ()
        if table is None:
            paths = write_model(self._prepared, self.trainer.chunks, again=self._resumed)
        else:
            written = write_adapters(
                *(self._prepared, self.trainer, table, metrics, self._measuring),
                again=self._resumed,
            )
            paths, cards = [path for path, _ in written], [card for _, card in written]
            if self.trainer.encoder is not None:
                tensors = self._best_encoder or encoder_tensors(self.trainer.encoder)
                if self._mesh.rank == 0:
                    write_encoder(self._folder, tensors)
        if self._mesh.rank == 0:
            forget_states(self._folder)
        outcome = self._outcome(paths, state, cards)
        self._listener.ended(outcome, self._measuring)
        return outcome

    def _metrics(self) -> dict[str, Any]:
        course = self._course
        found: dict[str, Any] = {
            "loss": course.last_loss,
            "first_loss": course.first_loss,
            "steps": self._best_step or self.trainer.step_number,
            "method": self._config.method,
        }
        return found

    def _outcome(self, paths: Sequence[Path], state: str, cards: Sequence[Card] = ()) -> Outcome:
        course = self._course
        return Outcome(
            paths=tuple(paths),
            cards=tuple(cards),
            folder=self._folder,
            state=state,
            step=self.trainer.step_number,
            first_loss=course.first_loss or 0.0,
            last_loss=course.last_loss,
            best_step=self._best_step,
        )

    def _whence(self) -> Origin:
        """The base's digest takes a look at all weights the first time; one rank does it first."""
        origin = self._prepared.origin() if self._mesh.rank == 0 else None
        if self._mesh.tp * self._mesh.dp * self._mesh.pp > 1:
            dist.barrier()
        origin = origin or self._prepared.origin()
        origin.check_alike(self._mesh)
        return origin

    def _save(self) -> None:
        trainer = self.trainer
        if trainer.step_number == self._saved_step:
            return
        tensors = trainer.optimizer.tensors()
        if self._best is not None and self._mesh.pp_rank == 0:
            tensors[BEST + TABLE] = self._best
            tensors |= {BEST + name: tensor for name, tensor in self._best_encoder.items()}
        facts = {
            "origin": asdict(self._origin),
            "course": asdict(self._course),
            "scale": asdict(trainer.scale),
        }
        trouble = save_state(self._folder, self._mesh, trainer.step_number, tensors, facts)
        if trouble is None:
            self._saved_step, self._warned = trainer.step_number, False
        elif not self._warned:
            self._warned = True
            self._listener.warn(
                f"no state could be saved at step {trainer.step_number} ({trouble}); the run goes "
                "on, and tries again"
            )

    def _go_on(self, saved: Saved) -> None:
        self._origin.check(saved.facts["origin"], saved.path)
        trainer, course = self.trainer, dict(saved.facts["course"])
        tensors = saved.tensors(self._mesh)
        names = [name for name in tensors if name.startswith(BEST)]
        best = {name.removeprefix(BEST): tensors.pop(name) for name in names}
        trainer.optimizer.load(tensors)
        trainer.step_number = self._saved_step = saved.facts["step"]
        trainer.scale.value = saved.facts["scale"]["value"]
        trainer.scale.good = saved.facts["scale"]["good"]
        self._course = Course(**{**course, "last_losses": tuple(course["last_losses"])})
        if self._course.best_step is not None and self._config.method != "full":
            self._best = trainer.shared(best.pop(TABLE, None))
            self._best_encoder = best


def _of_first(value: float, mesh: Mesh) -> float:
    """Rank 0's, on all: what ranks decide by must not differ by a rounding."""
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return value
    told = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    dist.broadcast(told, 0)
    return float(told)


def _agree_on_folder(base: Path, mesh: Mesh, *, restart: bool) -> Path:
    """Rank 0 chooses the run's folder; the others are told its number."""
    number = int(choose_run(base, restart=restart).name) if mesh.rank == 0 else 0
    if mesh.tp * mesh.dp * mesh.pp > 1:
        told = torch.tensor([number], dtype=torch.int64, device=mesh.device)
        dist.all_reduce(told)
        number = int(told)
    return base / str(number)
