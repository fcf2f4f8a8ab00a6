"""Early stopping of a task group: keeps the virtual-token table of the best validation.

The score of a validation is the metric that the setting `monitor` names; for the loss, the score is
the negative validation loss. With `patience: 0` a run does not stop early, but the best table is
still kept. Rank 0's score and loss decide on all ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import Mesh
from ptuning.config import MethodConfig, ValidationConfig
from ptuning.prompt.prompt_encoder import encoder_tensors
from ptuning.run_facts import Validation
from ptuning.training.trainer import Trainer

# Name of the best table in EarlyStopping.state_tensors, which also has the encoder's tensors.
TABLE_KEY = "table"


@dataclass
class BestValidation:
    """The best validation so far; saved in each state."""

    best_step: int | None = None
    best: float | None = None  # Score at best_step; higher is better.
    best_loss: float = 0.0  # Validation loss at best_step.
    waited: int = 0  # Number of validations since the last improvement of the best score.


class EarlyStopping:
    """Keeps the table of the best validation, and decides when a task group must stop early."""

    def __init__(
        self,
        validation_config: ValidationConfig,
        method_config: MethodConfig,
        trainer: Trainer,
        *,
        task: int | None = None,
    ) -> None:
        """`task`: the task that is trained alone, of several; None: all tasks of the run.

        The table of such a task is its part of the vector of `Trainer.current_table`.
        """
        self._task = task
        self._validation_config = validation_config
        self._method_config = method_config
        self._trainer = trainer
        self._best = BestValidation()
        self._table: Tensor | None = None
        # Encoder tensors that produced _table; empty if this rank has no encoder.
        self._encoder: dict[str, Tensor] = {}

    @property
    def should_stop(self) -> bool:
        """Whether the best score has not improved in the last `patience` validations."""
        patience = self._validation_config.patience_validations(
            self._trainer.config.training_config.steps, self._method_config.method
        )
        return 0 < patience <= self._best.waited

    @property
    def best_step(self) -> int | None:
        """Step of the best table; None for `full`, which writes the last weights."""
        return None if self._table is None else self._best.best_step

    @property
    def best_table(self) -> Tensor | None:
        """Table of the best validation; None before the first validation, and for `full`."""
        return self._table

    @property
    def best_encoder(self) -> Mapping[str, Tensor]:
        """Encoder tensors that produced the best table; empty if this rank has no encoder."""
        return self._encoder

    def update(self, validation: Validation, table: Tensor | None) -> None:
        """Compare a new validation with the best one; if the new one is better, keep `table`.

        `table` is that of all tasks with which the new validation was computed; None for method
        `full`.

        All ranks must call this function together.
        """
        best = self._best
        mesh = self._trainer.mesh
        validation_loss, measures = self._own_results(validation)
        score = self._score(validation_loss, measures)
        score = _broadcast_from_rank_zero(score, mesh)
        # If the scores are equal, the table with the lower loss is kept. Only a better score resets
        # `waited`.
        has_loss = validation_loss is not None and not math.isnan(validation_loss)
        loss = cast(float, validation_loss) if has_loss else math.inf
        loss = _broadcast_from_rank_zero(loss, mesh)
        is_better = best.best is None or score > best.best
        if is_better or (score == best.best and loss < best.best_loss):
            best.best = score
            best.best_loss = loss
            best.best_step = validation.step
            best.waited = 0 if is_better else best.waited + 1
            self._table = table
            if self._values is not None and table is not None:
                self._table = table[self._values].clone()
            if self._trainer.encoder is not None:
                tensors = encoder_tensors(self._trainer.encoder)
                self._encoder = {name: tensor.clone() for name, tensor in tensors.items()}
        else:
            best.waited += 1

    def state_facts(self) -> dict[str, Any]:
        """Return the facts of the best validation, to be saved in a state."""
        return asdict(self._best)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the best table and its encoder tensors, to be saved in a state.

        Return no tensors before the first validation, for method `full`, and on pipeline stages
        other than the first.
        """
        if self._table is None or self._trainer.mesh.pp_rank != 0:
            return {}
        return {TABLE_KEY: self._table} | self._encoder

    def load_state(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_facts` and `state_tensors`. All ranks must call this function together."""
        self._best = BestValidation(**facts)
        if self._best.best_step is not None and self._method_config.method != "full":
            table = tensors.get(TABLE_KEY)
            self._table = self._trainer.broadcast_table(table, values=self._values)
            self._encoder = {name: tensor for name, tensor in tensors.items() if name != TABLE_KEY}

    @property
    def _values(self) -> slice | None:
        """Where the values of the task are in the vector of all tasks; None: there is one group."""
        if self._task is None:
            return None
        assert self._trainer.linears is not None
        return self._trainer.linears.layout.task_values(self._task)

    def put_best(self, table: Tensor | None) -> Tensor | None:
        """Return the table of all tasks with the best values of this group, if there are any."""
        if self._table is None or self._values is None or table is None:
            return table if self._table is None else self._table
        table = table.clone()
        table[self._values] = self._table
        return table

    def _own_results(self, validation: Validation) -> tuple[float | None, Mapping[str, float]]:
        """Return the loss and the answer metrics of this group."""
        if self._task is None:
            return validation.loss, validation.measures
        tasks = self._trainer.config.data_config.resolved_tasks
        results = dict(validation.by_task[tasks[self._task].name])
        return results.pop("loss"), results

    def _score(self, loss: float | None, measures: Mapping[str, float]) -> float:
        """Return the score; higher is better. NaN becomes -infinity, the worst score."""
        monitor = self._validation_config.monitor
        score = 0.0 if loss is None else -loss
        if monitor != "loss":
            score = measures[monitor]
        return -math.inf if math.isnan(score) else score


def _broadcast_from_rank_zero(value: float, mesh: Mesh) -> float:
    """Return rank 0's value on all ranks.

    The values of the ranks may differ by rounding, and then the ranks could decide differently.
    """
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return value
    buffer = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    dist.broadcast(buffer, 0)
    return float(buffer)
